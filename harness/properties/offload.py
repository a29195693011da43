"""Offload: shards, their gradients and the optimizer state in the host's memory (`CPUOffloadPolicy`)."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from harness.engine import checkpoint
from harness.properties.fixtures import ADAMW, PartlyFrozen, byte_batch, gpt, grid, of_bytes, seeded
from harness.properties.precision import of_tokens, scaler_of
from harness.properties.property import ask, ask_thorough, expect, holds, refused, same
from harness.properties.training import Pair
from harness.run.shared_folder import shared_folder

HALF = {"param_dtype": torch.float16, "reduce_dtype": torch.float64}


@holds("values", ask(more_ranks=4), ask("zero3", 4, **HALF), ask_thorough(ranks=2, **HALF))
def offload_changes_nothing(engine, **options):
    """Losses, norms and weights are right with offload, through micro-batches, clipping, a scaler, a checkpoint.

    On four ranks the shards are on a grid of 2 x 2.
    """
    options = {**options, "group": grid() if dist.get_world_size() > 2 else None}
    policy = CPUOffloadPolicy(pin_memory=True)
    pair = Pair(engine, PartlyFrozen, ADAMW, loss=of_tokens, offload_policy=policy, **options)
    scaler = scaler_of(engine, init_scale=4.0, enabled="param_dtype" in options)
    for step in range(4):
        # In the first steps both backwards send, and shards add up; in the others the first sends nothing.
        scale = scaler.scale(torch.ones((), dtype=torch.float64))
        pair.backward(2 * step, scale=scale, quiet=step > 1)
        pair.scaled_step(2 * step + 1, scaler, 0.5)
        if step == 1:  # saved from the host, loaded into an engine without offload, and back onto the host
            other = engine(seeded(PartlyFrozen, seed=5), ADAMW, **options)
            with shared_folder() as folder:
                checkpoint.save(pair.trained, folder, step=step)
                same("what was saved besides", checkpoint.load(other, folder), {"step": step})
                checkpoint.save(other, folder)
                checkpoint.load(pair.trained, folder)
    pair.same_weights()
    for bucket in pair.trained.all_buckets:
        shared = bucket.shard.untyped_storage()._cdata == bucket.flat.untyped_storage()._cdata
        expect(not shared, "the shard's memory", "its own", "a part of the gathered buffer")


@holds("misuse")
def another_offload_policy_is_refused(engine):
    """A policy that is none is refused, and so are ranks with different ones."""
    with refused("pin_memory", error=AttributeError):
        engine(nn.Linear(3, 3), ADAMW, offload_policy="cpu")
    one_alone = CPUOffloadPolicy() if dist.get_rank() == 1 else None
    with refused("[1]", error=ValueError):
        engine(nn.Linear(3, 3), ADAMW, offload_policy=one_alone)


@holds("order")
def the_host_waits_for_copies(engine):
    """The host waits for copies before the update and before it adds to a gradient, and no copy overtakes.

    A device that only notes what is asked of it stands in. On a GPU each direction has a stream of its own.
    """
    device, rank = mock.MagicMock(), dist.get_rank()
    trained = engine(gpt(), ADAMW, offload_policy=CPUOffloadPolicy())
    trained.placement._device, trained.placement._up, trained.placement._down = device, device.up, device.down
    trained.optimizer.register_step_pre_hook(lambda *_: device.update() and None)  # what it returns would be used
    with mock.patch.object(torch.Tensor, "record_stream", lambda *_: device.memory_is_kept()):
        of_bytes(trained, *byte_batch(0, rank)).backward()
        same("waits before there is anything to add to", device.down.synchronize.call_count, 0)
        of_bytes(trained, *byte_batch(1, rank)).backward()
        trained.step()
    # ZeRO-1 adds on the device.
    same("whether the host waits before it adds", device.down.synchronize.called, engine.like != "zero1")
    stream = {id(device.up): "copies up", id(device.down): "copies down"}
    calls = [stream[id(args[0])] if name == "stream" else name for name, args, _ in device.mock_calls]
    calls = [name for name in calls if name != "current_stream" and not name.startswith("stream()")]
    assert "copies down" in calls, "nothing was copied down"
    same("copies whose memory is kept", calls.count("memory_is_kept"), calls.count("copies down"))
    # What is copied was computed, and what is written over is not in use.
    for before, call in zip(calls, calls[1:]):
        if call.startswith("copies"):
            same(f"what comes right before {call}", before, f"{call.split()[1]}.wait_stream")
    ends = [call for call in calls[: calls.index("update")] if call in ("copies down", "synchronize")]
    same("the last before the update", ends[-2:], ["copies down", "synchronize"])
    same("copies down after the update", calls[calls.index("update") :].count("copies down"), 0)
    same("whether copies up have a stream", "copies up" in calls, engine.like == "zero3")

"""Offload: shards, their gradients and the optimizer state in the host's memory (`CPUOffloadPolicy`)."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.engine.gradients import GradScaler
from harness.properties import models, parts
from harness.properties.precision import LOW
from harness.properties.property import expect, holds, refused, same


@holds("values", sizes=(2, 4), cases=({"options": {}}, {"options": LOW}),
       further_cases=({"options": {"param_dtype": torch.float16}},))  # fmt: skip
def offload_changes_nothing(engine, options, device="cpu"):
    """Losses, norms and weights are those without offload, through micro-batches, clipping, a scaler, a checkpoint.

    To the bit where host and device are of one type: the same numbers are added in the same order, in other memory. On
    four ranks the shards are on a grid of 2 x 2.
    """
    size = dist.get_world_size()
    atol = 0.0 if device == "cpu" else 1e-3  # AdamW's kernels on host and device round differently
    options = {**options, "group": parts.mesh(size // 2, 2, device=device) if size > 2 else None}

    def build(seed=0, **more):
        model = parts.seeded(parts.OddModel, seed, torch.float32, device)
        with torch.no_grad():
            model.frozen.add_(seed)
        return engine(model, parts.ADAMW, **options, **more)

    runs = []
    for policy in (None, CPUOffloadPolicy(pin_memory=True)):
        trained, seen = build(offload_policy=policy), []
        scaler = GradScaler(device, init_scale=4.0, enabled=options.get("param_dtype") == torch.float16)
        for step in range(4):
            for part in range(2):
                tokens, targets = (each.to(device) for each in parts.token_batch(2 * step + part, dist.get_rank()))
                # In the first steps both backwards send, and shards add up; in the others the first sends nothing.
                with trained.no_sync() if step > 1 and not part else torch.enable_grad():
                    loss = F.cross_entropy(trained(tokens).float(), targets)
                    scaler.scale(loss / 2).backward()
                seen.append(loss.detach())
            scaler.unscale_(trained)
            seen.append(trained.clip_grad_norm_(0.5))
            scaler.step(trained)
            scaler.update()
            trained.zero_grad()
            if step == 1 and policy is not None:  # saved from the host, and loaded into an engine without offload
                with parts.folder() as folder:
                    checkpoint.save(trained, folder, step=step)
                    other = build(seed=5)
                    same("what was saved besides", checkpoint.load(other, folder), {"step": step})
                    same("the state that was loaded", other.full_state_dict(), trained.full_state_dict())  # copies
                    checkpoint.load(trained, folder)  # and back onto the host
        runs.append((torch.stack(seen), trained.full_state_dict()))
        if policy is not None:
            shards_are_on_the_host(trained, device)
        model = trained.model
        trained.close()
        same("where the closed model is", {param.device.type for param in model.parameters()}, {device})
    (seen, state), (seen_there, state_there) = runs
    assert len(seen.unique()) > 8, "the losses are all the same: this proves nothing"
    same("losses and norms", seen_there, seen, atol, step=2)
    same("the weights", state_there, state, atol, step=5)
    dist.barrier()


def shards_are_on_the_host(trained, device: str) -> None:
    for bucket in trained.trained_buckets:
        own = [bucket.shard, *(piece for _, piece in bucket.pieces)]
        own += [value for _, piece in bucket.pieces for value in trained.optimizer.state[piece].values()]
        same("where shards, pieces and state are", {tensor.device.type for tensor in own}, {"cpu"}, step=4)
        where = {bucket.flat.device.type, bucket.params[0].device.type}
        same("where gathered parameters are", where, {device}, step=5)
        shared = bucket.shard.untyped_storage()._cdata == bucket.flat.untyped_storage()._cdata
        expect(not shared, "the shard's memory", "its own", "a part of the gathered buffer", step=0)
    same("where the frozen parameter is", trained.model.frozen.device.type, device)


@holds("misuse")
def another_offload_policy_is_refused(engine):
    """A policy that is none is refused, and so are ranks with different ones."""
    refused(lambda: engine(nn.Linear(3, 3), parts.ADAMW, offload_policy="cpu"), "'cpu'", "CPUOffloadPolicy",
            error=TypeError)  # fmt: skip
    one_alone = CPUOffloadPolicy() if dist.get_rank() == 1 else None
    refused(lambda: engine(nn.Linear(3, 3), parts.ADAMW, offload_policy=one_alone), "[1]", error=ValueError)


@holds("order")
def the_host_waits_for_copies(engine):
    """The host waits for copies before the update and before it adds to a gradient, and no copy overtakes.

    A device that only notes what is asked of it stands in. On a GPU each direction has a stream of its own.
    """
    device, rank = mock.MagicMock(), dist.get_rank()
    trained = engine(models.gpt(), parts.ADAMW, offload_policy=CPUOffloadPolicy())
    trained.placement._device, trained.placement._up, trained.placement._down = device, device.up, device.down
    trained.optimizer.register_step_pre_hook(lambda *_: device.update() and None)  # what it returns would be used
    with mock.patch.object(torch.Tensor, "record_stream", lambda *_: device.memory_is_kept()):
        models.of_bytes(trained, *models.byte_batch(0, rank)).backward()
        same("waits before there is anything to add to", device.down.synchronize.call_count, 0, step=3)
        models.of_bytes(trained, *models.byte_batch(1, rank)).backward()
        trained.step()
    # ZeRO-1 adds on the device.
    same("whether the host waits before it adds", device.down.synchronize.called, engine.like != "zero1", step=3)
    stream = {id(device.up): "copies up", id(device.down): "copies down"}
    calls = [stream[id(args[0])] if name == "stream" else name for name, args, _ in device.mock_calls]
    calls = [name for name in calls if name != "current_stream" and not name.startswith("stream()")]
    assert "copies down" in calls, "nothing was copied down"
    same("copies whose memory is kept", calls.count("memory_is_kept"), calls.count("copies down"), step=3)
    # What is copied was computed, and what is written over is not in use.
    for before, call in zip(calls, calls[1:]):
        if call.startswith("copies"):
            same(f"what comes right before {call}", before, f"{call.split()[1]}.wait_stream", step=3)
    ends = [call for call in calls[: calls.index("update")] if call in ("copies down", "synchronize")]
    same("the last before the update", ends[-2:], ["copies down", "synchronize"], step=4)
    same("copies down after the update", calls[calls.index("update") :].count("copies down"), 0, step=4)
    same("whether copies up have a stream", "copies up" in calls, engine.like == "zero3", step=5)
    dist.barrier()

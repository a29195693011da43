"""Run on every rank: shards, their gradients and the optimizer state in the host's memory."""

import contextlib
from functools import partial
from unittest import mock

import parts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from harness.engine import checkpoint
from harness.engine.gradients import GradScaler
from harness.run.model import GPT, next_token_loss, preset

CONFIG = preset("toy")
ADAMW = partial(torch.optim.AdamW, lr=3e-3)


def batch(step: int, device: str):
    generator = torch.Generator().manual_seed(77 * step + dist.get_rank())
    rows = torch.randint(256, (3, CONFIG.seq + 1), generator=generator)
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def the_same_run(stage: str, options: dict, folder: str, device: str = "cpu") -> dict:
    """With offload and without: losses, norms and weights; micro-batches, clipping, a scaler, a checkpoint.

    To the bit where host and device are of one type. Returns how far the weights are apart.
    """
    world_size = dist.get_world_size()
    if options.pop("hybrid", False):
        options["group"] = parts.mesh(world_size // 2, 2, device=device)
    runs = []
    for policy in (None, CPUOffloadPolicy(pin_memory=True)):
        model = parts.seeded(lambda: GPT(CONFIG), dtype=torch.float32, device=device)
        model.frozen = nn.Parameter(torch.ones(7, device=device), requires_grad=False)
        engine = parts.STAGES[stage](model, ADAMW, offload_policy=policy, **options)
        scaler, seen = GradScaler(device, init_scale=4.0, enabled=options.get("param_dtype") == torch.float16), []
        for step in range(6):
            for part in range(2):
                inputs, targets = batch(2 * step + part, device)
                # In the first steps both backwards send, and shards add up; in the others the first sends nothing.
                with engine.no_sync() if step > 2 and not part else torch.enable_grad():
                    loss = next_token_loss(engine(inputs).float(), targets)
                    scaler.scale(loss / 2).backward()
                seen.append(loss.item())
            scaler.unscale_(engine)
            seen.append(engine.clip_grad_norm_(0.5).item())
            scaler.step(engine)
            scaler.update()
            engine.zero_grad()
            if step == 2 and policy is not None:  # saved from the host, and loaded into an engine without offload
                checkpoint.save(engine, folder, step=step)
                other = parts.seeded(lambda: GPT(CONFIG), seed=5, dtype=torch.float32, device=device)
                other.frozen = nn.Parameter(torch.zeros(7, device=device), requires_grad=False)
                other = parts.STAGES[stage](other, ADAMW, **options)
                assert checkpoint.load(other, folder) == {"step": step}
                there = other.full_state_dict()
                parts.assert_same_state(engine.full_state_dict(), there, atol=0)
                checkpoint.load(engine, folder)  # and back onto the host
        runs.append((seen, engine.full_state_dict()))
        if policy is not None:
            for bucket in engine.trained:
                own = [bucket.shard, *(piece for _, piece in bucket.pieces)]
                own += [value for _, piece in bucket.pieces for value in engine.optimizer.state[piece].values()]
                assert {tensor.device.type for tensor in own} == {"cpu"}
                assert bucket.flat.device.type == device and bucket.params[0].device.type == device
                shared = bucket.shard.untyped_storage()._cdata == bucket.flat.untyped_storage()._cdata
                assert not shared, "the shard is a part of the gathered buffer"
            assert bool(engine.model.frozen.device.type == device)
        engine.close()
        assert {param.device.type for param in model.parameters()} == {device}
    (seen, state), (seen_there, state_there) = runs
    assert len(set(seen)) > 10
    torch.testing.assert_close(seen_there, seen, rtol=0, atol=0 if device == "cpu" else 1e-3)
    apart = max((state[name].double() - state_there[name].double()).abs().max().item() for name in state)
    assert apart == 0 or (device != "cpu" and apart < 1e-3), apart
    dist.barrier()
    return apart


def another_policy_is_refused() -> None:
    for stage in parts.STAGES.values():
        try:
            stage(nn.Linear(3, 3), ADAMW, offload_policy="cpu")
        except TypeError as error:
            assert "'cpu'" in str(error) and "CPUOffloadPolicy" in str(error)
        else:
            raise AssertionError("a policy that is none was accepted")
        rank = dist.get_rank()
        try:  # one rank alone
            stage(nn.Linear(3, 3), ADAMW, offload_policy=CPUOffloadPolicy() if rank else None)
        except ValueError as error:
            assert "[1]" in str(error), error
        else:
            raise AssertionError("ranks with different policies were accepted")


def the_host_waits_for_copies(stage: str) -> None:
    """Before the update, and before it adds to a gradient: a device that only notes who waits for it stands in."""
    noted = []
    with mock.patch.object(torch.Tensor, "record_stream", lambda *_: noted.append("its memory is kept")):
        _noting(stage, noted)
    assert noted.count("its memory is kept") == noted.count("on down") > 0
    dist.barrier()


def _noting(stage: str, noted: list[str]) -> None:

    class Stream:
        def __init__(self):
            self.name = ("up", "down")[len(Device.made)]
            Device.made.append(self)

        def wait_stream(self, stream) -> None:
            noted.append(f"{self.name} waits for the computation")

        def synchronize(self) -> None:
            noted.append(f"the host waits for {self.name}")

    class Device:
        made = []

        @staticmethod
        def synchronize() -> None:
            noted.append("the host waits for all")

        @staticmethod
        def current_stream() -> None:
            return None

        @staticmethod
        @contextlib.contextmanager
        def stream(stream):
            noted.append(f"on {stream.name}")
            yield
            noted.append("back")

    engine = parts.STAGES[stage](parts.seeded(lambda: GPT(CONFIG)), ADAMW, offload_policy=CPUOffloadPolicy())
    place = engine.placement
    place._device, place._up, place._down = Device, Stream(), Stream()
    engine.optimizer.register_step_pre_hook(lambda *_: noted.append("update"))
    loss = next_token_loss(engine(batch(0, "cpu")[0]), batch(0, "cpu")[1])
    loss.backward()
    assert "the host waits for down" not in noted  # nothing is added to yet
    next_token_loss(engine(batch(1, "cpu")[0]), batch(1, "cpu")[1]).backward()
    engine.step()
    assert ("the host waits for down" in noted) == (stage != "zero1")  # ZeRO-1 adds on the device
    update = noted.index("update")
    assert "the host waits for all" in noted[:update]
    copies = [place for place, what in enumerate(noted) if what == "on down"]
    assert copies and copies[-1] < noted.index("the host waits for all")
    for what, first in zip(noted[1:], noted):  # what is copied was computed, and what is written over is not in use
        assert not what.startswith("on ") or first == f"{what[3:]} waits for the computation", noted
    assert ("on up" in noted) == (stage == "zero3")

"""Functions that run on every rank, each with a simulated GPU: some have races that must be found, some have none."""

import contextlib
import json
import tempfile
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from cases_cuda import mse_on_gpu
from helpers import EXACT, MOMENTUM, Blocks, concatenated, different_on_ranks, own_batch, same, seeded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from extra.simulated_gpu import findings
from zerolab.engine import GradScaler, checkpoint, offload
from zerolab.engine.checkpoint import loading
from zerolab.measure import memory
from zerolab.run import engines
from zerolab.run.model import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(2, 16, 2, 32, 8)
ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)
LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def built(stage: type, **options):
    """The stage with this name, with a small GPT on this rank's GPU."""
    model = GPT(CONFIG).cuda()
    return stage(model, ADAMW(model.parameters()), **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(77 * step + dist.get_rank())
    tokens = torch.randint(32, (2, 9), generator=generator).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(engine, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    return next_token_loss(engine(inputs), targets)


class Stopped(Exception):
    """Raised in the middle of a forward or a backward, on all ranks."""


def stop(*_):
    raise Stopped


def stopped(engine, step: int, block: int, backward: bool) -> None:
    """A forward that stops before a block, or a backward that stops after it, with collectives in flight."""
    module = engine.model.blocks[block]
    with contextlib.suppress(Stopped):
        if backward:
            hook = module.register_forward_hook(lambda module, inputs, out: out.register_hook(stop) and None)
            loss_of(engine, step).backward()
        else:
            hook = module.register_forward_pre_hook(stop)
            loss_of(engine, step)
    hook.remove()


def train(stage: str, options: dict, folder: str) -> list[str]:
    """Several steps with everything that an engine does. Returns the detector's findings on this rank."""
    findings.forget()
    options = dict(options)
    if (pinned := options.pop("offload", None)) is not None:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
    if options.pop("replicas", False):
        options["group"] = init_device_mesh("cuda", (2, dist.get_world_size() // 2))
    if stage != "zero3":
        options["bucket_mb"] = 0.01
    torch.manual_seed(0)
    engine = built(engines.STAGES[stage], **options)
    if pinned is not None:
        for bucket in engine.all_buckets:
            bucket.shard.sum()  # the host reads what it has just got
    saving = None
    for step in range(4):
        for part in range(2):
            with engine.no_sync() if step == 3 and not part else contextlib.nullcontext():
                loss_of(engine, 2 * step + part).backward()
        if step % 2:
            engine.clip_grad_norm_(0.5)
        if step == 3:  # the next unit, perhaps copied from the host, is on its way when the update begins
            with torch.no_grad():
                stopped(engine, 12, block=0, backward=False)
        engine.step()
        engine.zero_grad()
        if step == 0:  # the copies go to disk during the next step
            saving = checkpoint.async_save(engine, folder)
        if step == 1:
            with torch.no_grad():
                loss_of(engine, 9)
            stopped(engine, 10, block=1, backward=False)
            stopped(engine, 11, block=0, backward=True)
            engine.zero_grad()
        if step == 2:
            saving.result()
            checkpoint.load(engine, folder)
            engine.load_full_state_dict(engine.full_state_dict())
    engine.full_state_dict()
    torch.cuda.synchronize()
    return findings.found()


def one_folder() -> str:
    """The same folder on all ranks; it goes with the machine's other temporary files."""
    found = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(found, device=torch.device("cuda", torch.cuda.current_device()))
    return found[0]


def trains(stage: str, options: dict) -> list[str]:
    return train(stage, options, one_folder())


def chapter_trains(stage: str) -> list[str]:
    """A chapter's steps, an evaluation between them, and an update while the next unit is in flight."""
    findings.forget()
    torch.manual_seed(0)
    options = {} if stage == "zero3" else {"bucket_mb": 0.01}
    chapter = built(engines.CHAPTERS[stage], **options)
    for step in range(4):
        for part in range(2):
            loss_of(chapter, 2 * step + part).backward()
        if step == 3:  # the next unit is on its way when the update frees all
            with torch.no_grad():
                stopped(chapter, 12, block=0, backward=False)
        chapter.step()
        chapter.zero_grad()
        if step == 1:
            with torch.no_grad():
                loss_of(chapter, 9)
    torch.cuda.synchronize()
    return findings.found()


def without_waiting(what: str):
    """Inside the `with` block nothing waits for collectives, or the host does not wait for copies from and to a GPU."""
    owner, name = {"collectives": (dist.Work, "wait"), "copies": (offload, "wait_for_copies")}[what]
    return mock.patch.object(owner, name, lambda *_: None)


def offloads_without_waiting(stage: str) -> list[str]:
    """An engine's steps with races. An error counts as found too."""
    folder = one_folder()
    with without_waiting("copies"):
        return found_or_raised(partial(train, stage, {"offload": True}, folder))


def chapter_trains_without_waiting(stage: str) -> list[str]:
    with without_waiting("collectives"):
        return found_or_raised(partial(chapter_trains, stage))


def found_or_raised(run) -> list[str]:
    try:
        return run()
    except RuntimeError as error:
        return [*findings.found(), str(error)]
    finally:
        torch.cuda.synchronize()


def loads(stage: str, of_a_checkpoint: bool) -> list[str]:
    """New weights while shards may be on their way to the GPU, in ZeRO-3 for a forward, in others after a step."""
    engine = built(engines.STAGES[stage], offload_policy=CPUOffloadPolicy())
    for step in range(3):
        if step == 2:
            state = engine.full_state_dict()
            values = [(bucket.shard, bucket.shard.detach().clone()) for bucket in engine.all_buckets]
            findings.forget()
        loss_of(engine, step).backward()
        engine.step()
        engine.zero_grad()
    if stage == "zero3":
        with torch.no_grad():
            loss_of(engine, 3)
    if of_a_checkpoint:  # what `checkpoint.load` does when all has been read
        loading.write_tensors(engine, values)
    else:
        engine.load_full_state_dict(state)
    torch.cuda.synchronize()
    return findings.found()


# Groups.


class Idle(Blocks):
    """A parameter that no step uses, and a buffer."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("ones", torch.ones(2))


def some_ranks_train(stages: list[str], folder: str) -> None:
    """Ranks 0 to 3 train. The others take part in nothing. Afterwards all ranks can still make a group."""
    mesh = DeviceMesh("cuda", [[0, 1], [2, 3]])
    if dist.get_rank() < 4:
        train_on_a_mesh(mesh, stages, folder)
    dist.barrier(dist.new_group())


def train_on_a_mesh(mesh, stages, folder):
    """As one process does, with everything that is sent over the group of all ranks of the mesh."""
    for stage in stages:
        plain = seeded(Idle).cuda()
        model = different_on_ranks(plain)
        optimizer, mine = MOMENTUM(plain.parameters()), MOMENTUM(model.parameters())
        engine = engines.STAGES[stage](model, mine, group=mesh, find_unused=True)
        scaler = GradScaler(init_scale=4.0)
        for step in range(3):
            mse_on_gpu(plain, *concatenated(step, range(4))).backward()
            scaler.scale(mse_on_gpu(engine, *own_batch(step))).backward()
            scaler.unscale_(engine)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            same(engine.clip_grad_norm_(0.1), expected, EXACT, f"the norm in step {step} of {stage}")
            optimizer.step()
            optimizer.zero_grad()
            scaler.step(engine)
            scaler.update()
            engine.zero_grad()
            if step == 1:
                checkpoint.async_save(engine, f"{folder}/{stage}").result()
                checkpoint.load(engine, f"{folder}/{stage}")
        found = engine.full_state_dict()
        for name, expected in plain.state_dict().items():
            same(found[name], expected.cpu(), EXACT, f"{name} of {stage}")
    with torch.device("meta"):
        model = Idle().double()
    engine = engines.STAGES["zero3"](model, MOMENTUM(model.parameters()), group=mesh, state_dict=found)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    for name, value in engine.full_state_dict().items():
        same(value, found[name], 0.0, f"{name} of a model on meta")


# Waits of the host.


def waits_of_a_step(stage: str, options: dict) -> dict[str, dict[str, int]]:
    """{moment of a step of two backwards: {what: how often the host has waited for it}}, and the number of buckets."""
    if stage != "zero3":
        options = {**options, "bucket_mb": 0.01}
    engine = built(engines.STAGES[stage], **options)
    engine.training_step(*batch(0), next_token_loss)
    batches = [batch(1), batch(2)]
    found = {}

    def note(moment):
        now = findings.waits()
        found[moment] = {what: now[what] - before[what] for what in now}
        before.update(now)

    before = findings.waits()
    for number, (inputs, targets) in enumerate(batches):
        next_token_loss(engine(inputs), targets).backward()
        note(f"backward {number}")
    engine.step()
    engine.zero_grad()
    note("step")
    return found | {"buckets": len(engine.buckets)}


# Errors that are not races.


def message_of(function) -> str:
    try:
        function()
    except Exception as error:
        return str(error)
    raise AssertionError("no error")


def freed_memory() -> str:
    tensor = torch.ones(64, device="cuda")
    tensor.untyped_storage().resize_(0)
    return message_of(lambda: tensor + 1)


def unknown_operation() -> str:
    findings.forget()
    with contextlib.suppress(RuntimeError):
        torch._convert_weight_to_int4pack(torch.zeros(64, 64, device="cuda", dtype=torch.uint8), 2).sum()
    return findings.found()[0]


def tensors_on_two_devices() -> str:
    return message_of(lambda: torch.ones(4, device="cuda") + torch.ones(4))


def different_collectives() -> str:
    tensor = torch.ones(8 if dist.get_rank() else 6, device="cuda")
    return message_of(lambda: dist.all_reduce(tensor))


def the_host_reads_before_a_copy_is_over() -> list[str]:
    findings.forget()
    tensor, host = torch.ones(1000, device="cuda"), torch.empty(1000, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    host.sum()
    torch.cuda.synchronize()
    host.sum()
    return findings.found()


def print_peaks(*argv: str) -> None:
    """In a separate process: {engine: its peak in bytes by the dry run, and by the allocator}.

    The allocator's are bytes that were asked for, because it rounds them up to blocks.
    """

    def requested(what: str):
        return lambda *_: torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]

    torch.cuda.init()
    torch.accelerator.memory_allocated, torch.accelerator.max_memory_allocated = requested("current"), requested("peak")
    fake, real = (
        memory.measure_all(memory.arguments([*argv, "--device", kind]))["engines"] for kind in ("fake", "cuda")
    )
    print(json.dumps({name: (row["peak_bytes"], real[name]["peak_bytes"]) for name, row in fake.items()}))

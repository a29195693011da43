"""Run on every rank: checkpoints from one stage, or torch's own class, into another."""

import contextlib
import os
import pickle
import resource
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy
import parts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_errors import message
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from harness.engine import checkpoint, checkpoint_write, contents, layout
from harness.engine.rectangles import rectangles
from harness.measure.memory import MemoryLedger

OPTIMIZERS = {
    **parts.OPTIMIZERS,
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
}


class Zoo(nn.Module):
    """All that a checkpoint must carry: uneven, tied, frozen, unused and empty parameters, buffers, 3 dimensions.

    And, if `odd`, a scalar and an empty one, which FSDP2 does not take.
    """

    def __init__(self, odd: bool = True, norm=nn.BatchNorm1d):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 7, bias=False), norm(7), nn.Linear(7, 5))])
        self.blocks.append(nn.Sequential(nn.Linear(5, 9, bias=False), nn.Linear(9, 5)))
        self.mix = nn.Parameter(torch.randn(3, 5, 5) / 9)
        self.frozen = nn.Parameter(torch.full((5,), 1.5), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 5)) if odd else torch.zeros(0, 5)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 5))
        self.register_buffer("table", torch.ones(5), persistent=False)
        self.scale = nn.Parameter(torch.tensor(0.7)) if odd else 0.7
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen
        x = x + (self.shift * self.table).to(x.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        for matrix in self.mix:
            x = x + self.scale * (x @ matrix)
        return self.head(x + self.empty.sum())[:, :3].clone()


def groups_of(model) -> list[dict]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 0.003},
    ]


def build(stage: str, optimizer: str = "adamw", seed: int = 0, odd: bool = True, dtype=torch.float64, **options):
    norm = nn.LayerNorm if "param_dtype" in options else nn.BatchNorm1d  # torch's cannot compute in bfloat16 on a CPU
    model = parts.seeded(partial(Zoo, odd, norm), seed, dtype)
    options = {"param_groups": groups_of(model), "find_unused": True, **options}
    if stage != "zero3":
        options = {"bucket_mb": 0.0005, **options}
    return parts.STAGES[stage](model, OPTIMIZERS[optimizer], **options)


def train(engine, steps, batch_of=None) -> list:
    batch_of = batch_of or (lambda step: parts.token_batch(step, dist.get_rank()))
    return [engine.training_step(*batch_of(step), lambda out, y: F.cross_entropy(out.double(), y)) for step in steps]


def in_empty(folder: str, rank: int = 0) -> None:
    """An empty folder for all ranks."""
    if dist.get_rank() == rank:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    dist.barrier()


def goes_on_to_the_bit(stage: str, optimizer: str, folder: str, in_background: bool = False, **options) -> None:
    """The loaded run is the uninterrupted one, also on an engine that had trained something else."""
    in_empty(folder)
    engine = build(stage, optimizer, **options)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2)
    for step in range(3):
        train(engine, [step])
        schedule.step()
    extra = {"schedule": schedule.state_dict(), "rank": dist.get_rank(), "random": torch.get_rng_state(), 5: {7: None}}
    extra = {str(key): value for key, value in extra.items()} | {"keys": {1: (2, [3.0])}}
    if in_background:
        saving = checkpoint.async_save(engine, folder, **extra)
        ahead = train(engine, range(3, 6))  # the copy must not see this
        saved = saving.result()
    else:
        saved = checkpoint.save(engine, folder, **extra)
        ahead = train(engine, range(3, 6))
    assert saved.rank == engine.rank and saved.path == Path(folder) / "000001" and str(saved.nbytes)[0] != "0"
    other = build(stage, optimizer, seed=3, **options)
    schedule = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    train(other, range(7, 9))
    found = checkpoint.load(other, folder)
    assert found["rank"] == dist.get_rank() and torch.equal(found["random"], extra["random"])
    assert found["keys"] == {1: (2, [3.0])} and found["5"] == {7: None}
    schedule.load_state_dict(found["schedule"])
    assert [group["lr"] for group in other.optimizer.param_groups] == schedule.get_last_lr()
    assert [torch.equal(a, b) for a, b in zip(ahead, train(other, range(3, 6)))] == [True] * 3
    parts.assert_same_state(
        {k: v for k, v in other.full_state_dict().items() if "running" not in k},
        {k: v for k, v in engine.full_state_dict().items() if "running" not in k},
        atol=0,
    )


def comes_back(stage: str, folder: str) -> None:
    """On every rank its own weights and optimizer state, in an engine that had others."""
    engine = build(stage)
    train(engine, range(2))
    checkpoint.save(engine, folder)
    expected = state_of(engine)
    other = build(stage, seed=3)
    train(other, range(4, 7))
    checkpoint.load(other, folder)
    found = state_of(other)
    for name, value in expected[0].items():
        assert "running" in name or torch.equal(found[0][name], value), name  # of statistics all have rank 0's
    assert len(found) == len(expected) and equal(found[2:], expected[2:])
    shards = [[bucket.shard for bucket in each.buckets] for each in (engine, other)]
    assert equal(*shards)


def same_batch(step: int):
    return parts.token_batch(step, 0)


def leg(kind: str, source: str | None, copied: str, folder: str, steps: list, odd: bool) -> None:
    """One station of a journey: load, write the same again to `copied`, train on the same batch everywhere, save."""
    if kind in parts.STAGES:
        engine = build(kind, seed=0 if source is None else 5, odd=odd)
        if source is not None:
            checkpoint.load(engine, source)
            checkpoint.save(engine, copied)
        train(engine, steps, same_batch)
        checkpoint.save(engine, folder)
        return
    model = parts.seeded(partial(Zoo, odd), 0 if source is None else 5)
    if kind == "fsdp2":
        mesh = parts.mesh(dist.get_world_size())
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    if source is not None:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        path = checkpoint.newest(source)
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=StateDictOptions(strict=False))
    for step in steps:
        inputs, targets = same_batch(step)
        F.cross_entropy(model(inputs).double(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def mixed_precision(folder: str, options: dict) -> None:
    """What is saved and loaded are the float32 shards, to the last bit, and not the rounded weights."""
    for stage in parts.STAGES:
        goes_on_to_the_bit(stage, "adamw", os.path.join(folder, stage), **options)


def half_of_the_ranks(folder: str) -> None:
    """Two groups of two ranks each save and load their own engine."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    folder = os.path.join(folder, str(mine))
    engine = build("zero3", group=halves[mine])
    train(engine, [mine])
    checkpoint.async_save(engine, folder, mine=mine).result()
    expected = engine.full_state_dict()
    train(engine, [5])
    assert checkpoint.load(engine, folder) == {"mine": mine}
    parts.assert_same_state(engine.full_state_dict(), expected, atol=0)


def state_of(engine) -> list:
    """Everything that loading may change, copied."""
    state = [engine.full_state_dict(), [b.clone() for b in engine.buffers()]]
    for group in engine.optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        state.append((options, [dict(engine.optimizer.state.get(piece, {})) for piece in group["params"]]))
    return [torch.utils._pytree.tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, part) for part in state]


def equal(one, other) -> bool:
    ours, theirs = torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other)
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(ours, theirs)
    )


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, file: str):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


def refusals(folder: str) -> dict[str, str]:
    """What loading says to everything that it must not load. The engine is as it was, and the next load works."""
    rank, folder = dist.get_rank(), Path(folder)
    engine = build("zero3")
    train(engine, [0])
    checkpoint.save(engine, folder / "good", step=1)
    model = parts.seeded(Zoo)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    plain = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    evil = {**plain, "optim": {**plain["optim"], "param_groups": [dict(g) for g in plain["optim"]["param_groups"]]}}
    evil["optim"]["param_groups"][0]["lr"] = Runs(str(folder / "item ran"))
    sgd = torch.optim.SGD(groups_of(model), lr=0.01)
    sgd = {**plain, "optim": {"state": {}, "param_groups": sgd.state_dict()["param_groups"]}}
    for number, group in enumerate(groups_of(model)):
        names = {id(param): name for name, param in model.named_parameters()}
        sgd["optim"]["param_groups"][number]["params"] = [names[id(param)] for param in group["params"]]
    dcp.save(evil, checkpoint_id=folder / "an item that runs")
    dcp.save(sgd, checkpoint_id=folder / "torch's SGD")
    dcp.save(plain["model"], checkpoint_id=folder / "weights alone")
    amsgrad = build("zero1", "amsgrad")
    train(amsgrad, [0])
    checkpoint.save(build("zero2", "adam"), folder / "Adam and not AdamW")
    checkpoint.save(build("zero2", dtype=torch.float32), folder / "another dtype")
    checkpoint.save(build("zero2", odd=False), folder / "fewer names")
    checkpoint.save(build("zero1", param_groups=None), folder / "other groups")
    other = parts.seeded(Zoo)
    other.mix = nn.Parameter(torch.zeros(5, 3, 5, dtype=torch.float64))
    checkpoint.save(parts.ZeRO1(other, OPTIMIZERS["adamw"], param_groups=groups_of(other)), folder / "another shape")
    good = folder / "good" / "000001"
    if rank == 0:
        (folder / "nothing there").mkdir()

        def damaged(name: str, file: str, change) -> None:
            shutil.copytree(good, folder / name)
            content = bytearray((good / file).read_bytes())
            content = change(content)
            (folder / name / file).unlink() if content is None else (folder / name / file).write_bytes(content)

        def flip(content):
            content[len(content) // 2] ^= 1
            return content

        damaged("a flipped byte", "__1_0.distcp", flip)
        damaged("a flipped byte in the list", ".metadata", flip)
        damaged("a truncated file", "__0_0.distcp", lambda content: content[:-1])
        damaged("a missing file", "__1_0.distcp", lambda content: None)
        damaged("no sums", "SHA256SUMS", lambda content: None)
        damaged("a list that runs", ".metadata", lambda content: pickle.dumps(Runs(str(folder / "list ran"))))
        (folder / "a list that runs" / "SHA256SUMS").unlink()
        damaged("never finished", ".metadata", lambda content: None)
        shutil.copytree(folder / "weights alone", folder / "torch's, truncated")
        with open(folder / "torch's, truncated" / "__0_0.distcp", "ab") as stream:
            stream.truncate(2000)
    dist.barrier()
    before, said = state_of(engine), {}
    for path in sorted(folder.iterdir()):
        if path.name != "good":
            try:
                checkpoint.load(engine, path)
            except Exception as error:
                said[path.name] = f"{type(error).__name__}: {error}"
            assert path.name in said, path.name
            assert equal(state_of(engine), before), path.name
            if "runs" in path.name:
                found = message(lambda p=path: parts.ZeRO3(meta_zoo(), OPTIMIZERS["adamw"], state_dict=p))
                assert found.startswith("Unsafe") or path.name == "an item that runs", found
    ran = [path.name for path in folder.iterdir() if path.name.endswith(" ran")]
    assert ran == [], ran
    train(engine, [1])
    assert checkpoint.load(engine, folder / "good") == {"step": 1}
    now = state_of(engine)
    assert equal(now[2:], before[2:]) and equal(now[0], before[0])
    assert equal(now[1], before[1]) == (rank == 0)  # running statistics: all ranks have rank 0's
    said["what cannot be saved"] = message(lambda: checkpoint.save(engine, folder / "good", what=Runs("x")))
    said["keep"] = message(lambda: checkpoint.save(engine, folder / "good", keep=0))
    said["inside"] = message(lambda: checkpoint.save(engine, good))
    return said


def meta_zoo():
    with torch.device("meta"):
        return Zoo().double()


def torchs_own_reader_runs_them(folder: str) -> list[str]:
    """The two malicious checkpoints are what they are said to be."""
    with contextlib.suppress(Exception):
        dcp.FileSystemReader(Path(folder) / "a list that runs").read_metadata()
    with contextlib.suppress(Exception):
        dcp.load({"optim": {"param_groups": [{"lr": 0.0}]}}, checkpoint_id=Path(folder) / "an item that runs")
    return sorted(path.name for path in Path(folder).iterdir() if path.name.endswith(" ran"))


def a_full_disk(folder: str) -> list[str]:
    """Rank 1 cannot write more than 2,000 bytes. Nobody has a checkpoint then, and the earlier one is good."""
    engine = build("zero2")
    train(engine, [0])
    # In the background, so that its group is there: to make it takes the store, which may be a file.
    checkpoint.async_save(engine, folder, step=1).result()
    expected = engine.full_state_dict()
    train(engine, [1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        said = [message(lambda: checkpoint.save(engine, folder, step=2))]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            said.append(message(lambda: checkpoint.async_save(engine, folder, step=2).result()))
        said += [str(warning.message) for warning in warned]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert os.listdir(folder) == ["000001"], os.listdir(folder)
    train(engine, [2])
    assert checkpoint.load(engine, folder) == {"step": 1}
    parts.assert_same_state(engine.full_state_dict(), expected, atol=0)
    checkpoint.save(engine, folder, step=3)
    assert sorted(os.listdir(folder)) == ["000001", "000002"]
    return said


def keeps_the_newest(folder: str) -> None:
    engine = build("zero1")
    os.makedirs(os.path.join(folder, "notes"), exist_ok=True)  # not ours
    for step in range(5):
        checkpoint.save(engine, folder, keep=2, step=step)
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["000004", "000005", "notes"]
    assert checkpoint.load(engine, os.path.join(folder, "000004")) == {"step": 3}


def bytes_of_each(folder: str) -> tuple[int, int, int]:
    """(bytes that this rank has written, bytes of its elements, rectangles and step counters)."""
    model = parts.seeded(lambda: parts.Stack(layers=4, width=256), dtype=torch.float32)
    engine = parts.ZeRO3(model, partial(torch.optim.AdamW, lr=0.01))
    engine.training_step(*parts.vector_batch(0, dist.get_rank(), 256), F.mse_loss)
    saved, items = checkpoint.save(engine, folder), 0
    for _, piece, shape, first in layout.pieces(engine):
        items += 3 * len(rectangles(shape, first, first + piece.numel())) + 1
    return saved.nbytes, sum(3 * 4 * bucket.shard.numel() for bucket in engine.buckets), items


def onto_meta(folder: str) -> dict[str, int]:
    """A model on `meta` takes the folder's weights, a unit at a time, and goes on as the one that was saved."""
    engine = build("zero1")
    train(engine, range(2))
    checkpoint.save(engine, folder)
    model, asked = meta_zoo(), []

    def init_fn(name, tensor):
        asked.append(name)
        tensor.fill_(1)

    options = {"param_groups": groups_of(model), "find_unused": True}
    other = parts.ZeRO3(model, OPTIMIZERS["adamw"], state_dict=folder, init_fn=init_fn, **options)
    assert asked == ["table"]  # it is in no state_dict
    parts.assert_same_state(other.full_state_dict(), engine.full_state_dict(), atol=0)
    checkpoint.load(other, folder)
    for step in range(2, 4):
        torch.testing.assert_close(*(train(e, [step])[0] for e in (engine, other)), rtol=0, atol=1e-12)
    wide = parts.seeded(lambda: parts.Stack(layers=8, width=64), dtype=torch.float32)
    whole = {"model": wide.state_dict()}
    dcp.save(whole, checkpoint_id=os.path.join(folder, "wide"))
    with torch.device("meta"):
        model = parts.Stack(layers=8, width=64)
    with MemoryLedger() as memory:
        built = parts.ZeRO3(model, OPTIMIZERS["adamw"], state_dict=os.path.join(folder, "wide"))
    units = [4 * sum(bucket.numel for bucket in unit.buckets) for unit in built.units]
    parts.assert_same_state(built.full_state_dict(), whole["model"], atol=0)
    return {"peak": memory.peak, "held": memory.live, "unit": max(units), "whole": sum(units)}


class Remembers(torch.optim.Optimizer):
    """Momentum, with a dictionary and numpy's numbers in its state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    own = self.state[param]
                    if not own:
                        own.update({"sums": {"first": torch.zeros_like(param), "times": 0}, "seen": numpy.int64(0)})
                    own["sums"]["first"].mul_(0.9).add_(param.grad)
                    own["sums"]["times"] += 1
                    own["seen"] += 1
                    param.sub_(own["sums"]["first"], alpha=float(group["lr"]))


OPTIONS = {
    "number": numpy.float64(0.25),
    "dictionary": {"a": 1, "b": {"c": torch.ones(2), "none": None}},
    "empty": {},
    "numbered": {1: "a", 2: numpy.float32(0.5)},
    "tensor": torch.arange(3.0),
    "list": [1, {"a": (2.0, torch.zeros(1))}],
}


def any_option(folder: str) -> None:
    """Options and state that are no plain numbers come back as they were."""
    engines = []
    for seed, options in ((0, OPTIONS), (3, dict.fromkeys(OPTIONS))):
        model = parts.seeded(partial(parts.Stack, layers=2, width=6), seed)
        groups = [{"params": list(model.parameters()), **options}]
        engines.append(parts.ZeRO2(model, Remembers, param_groups=groups))
    for group in engines[0].optimizer.param_groups:
        group["lr"] = numpy.float64(0.05)
    batches = [parts.vector_batch(step, dist.get_rank(), 6, torch.float64) for step in range(4)]
    for batch in batches[:2]:
        engines[0].training_step(*batch, F.mse_loss)
    engines[1].training_step(*batches[3], F.mse_loss)
    checkpoint.async_save(engines[0], folder, numbers=[numpy.float64(1.5), {"a": numpy.bool_(True)}]).result()
    assert checkpoint.load(engines[1], folder) == {"numbers": [1.5, {"a": True}]}
    (group,) = engines[1].optimizer.param_groups
    assert type(group["lr"]) is float and group["lr"] == 0.05
    expected = {**OPTIONS, "number": 0.25, "numbered": {1: "a", 2: 0.5}}
    assert str({key: group[key] for key in OPTIONS}) == str(expected), group
    losses = [[engine.training_step(*batch, F.mse_loss) for batch in batches[2:]] for engine in engines]
    assert equal(*losses)
    parts.assert_same_state(engines[1].full_state_dict(), engines[0].full_state_dict(), atol=0)


def what_no_checkpoint_takes(folder: str) -> dict[str, str]:
    """{what: what `save` says}, before a folder is made."""
    said = {}
    for kind, value in {
        "function": message,
        "generator": (x for x in ()),
        "array": numpy.zeros(2),
        "deep": {"a": Runs("x")},
    }.items():
        engine = build("zero1", param_groups=None)
        for group in engine.optimizer.param_groups:
            group["note"] = value if dist.get_rank() == 0 else 1
        said[kind] = message(lambda e=engine: checkpoint.save(e, folder))
        group["note"] = 1
        said["extra: " + kind] = message(lambda e=engine, v=value: checkpoint.save(e, folder, what=v))
    engine = build("zero2", "sgd", param_groups=None)
    piece = engine.optimizer.param_groups[0]["params"][0]
    for kind, value in {"rows": torch.zeros(2, 2), "list": [torch.zeros(2)], "numbered": {1: piece.clone()}}.items():
        engine.optimizer.state[piece] = {"kept": value} if kind != "numbered" else value
        said["state: " + kind] = message(lambda: checkpoint.save(engine, folder))
    assert not os.path.exists(folder)
    return said


def one_error_on_all(folder: str) -> list[str]:
    """What all ranks say when rank 0 alone cannot write: a file in the folder's place, and a list that is not read."""
    engine = build("zero3")
    file = os.path.join(folder, "file")
    if dist.get_rank() == 0:
        Path(file).write_text("")
    dist.barrier()
    said = [message(partial(checkpoint.save, engine, path)) for path in (file, os.path.join(file, "inside"))]
    sync, read = checkpoint_write._sync, contents.read
    try:
        checkpoint_write._sync = full_disk
        said.append(message(lambda: checkpoint.save(engine, os.path.join(folder, "full"))))
        checkpoint_write._sync = sync
        contents.read = full_disk
        said.append(message(lambda: checkpoint.save(engine, os.path.join(folder, "unread"))))
    finally:
        checkpoint_write._sync, contents.read = sync, read
    dist.barrier()  # rank 0 deletes what was begun
    for name in ("full", "unread"):
        assert os.listdir(os.path.join(folder, name)) == []
    return said


def full_disk(*_):
    raise OSError(28, "No space left on device")


def some_ranks_then_all(folder: str) -> None:
    """Ranks 0 and 1 save in the background, then 1 and 2, then all."""
    for number, members in enumerate(([0, 1], [1, 2], [0, 1, 2])):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            path = os.path.join(folder, str(number))
            engine = build("zero3", group=group)  # whose ranks compare notes in a group of their own
            checkpoint.async_save(engine, path, number=number).result()
            checkpoint.save(engine, path, number=number)
            assert checkpoint.load(engine, path) == {"number": number}

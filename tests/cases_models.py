"""Run on every rank: models as they are. Unused parameters, odd outputs, buffers, changed flags, checkpoints, meta."""

import dataclasses
import datetime
import time

import cases_loop
import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.measure.memory import MemoryLedger, storage_bytes
from harness.measure.traffic import TrafficLedger

DECAY = lambda pieces: torch.optim.AdamW(pieces, lr=0.01, weight_decay=0.3)  # noqa: E731


class Adapted(nn.Module):
    """A block with adapters, of which a forward uses one or none. With a single one some ranks use all there is."""

    def __init__(self, width: int, adapters: int):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.adapters = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(adapters)])

    def forward(self, x, choice):
        x = torch.tanh(self.base(x))
        return x if choice is None else x * self.adapters[choice % len(self.adapters)]


class Forked(nn.Module):
    """Parts that a step may leave unused: adapters in units, a whole unit, an early and a late root parameter."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.early = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList([Adapted(width, 4), Adapted(width, 1), Adapted(width, 4)])
        self.spare = nn.ModuleList([nn.Linear(width, 3)])  # a unit of its own, that only some steps run
        self.heads = nn.ModuleDict({"a": nn.Linear(width, 3), "b": nn.Linear(width, 3)})

    def forward(self, tokens, choice=None, early=False, spare=False):
        x = self.embedding(tokens).mean(1)
        if early:
            x = x + self.early
        for block in self.blocks:
            x = block(x, choice)
        out = {name: head(x) for name, head in self.heads.items()}
        return {**out, "spare": self.spare[0](x) if spare else None}


def path(step: int, rank: int, same: bool) -> tuple[dict, str]:
    """What forward is told in this step, and the output that the loss uses: on every rank the same, or not."""
    who = 0 if same else rank
    choice = (None, 0, 1, 2)[(step + who) % 4]
    return {"choice": choice, "early": (step + who) % 3 == 0, "spare": step % 2 == 0}, ("a", "b")[(step + who) // 2 % 2]


def loss_of(model, step: int, rank: int, same: bool, micro: int = 0):
    tokens, targets = parts.token_batch(10 * step + micro, rank)
    told, used = path(step + micro, rank, same)
    out = model(tokens, **told)
    loss = F.cross_entropy(out[used], targets)
    if out["spare"] is not None and step % 4 == 0:  # else the unit ran and nobody asks for its output
        loss = loss + F.cross_entropy(out["spare"], targets)
    return loss


def find_unused(stage: str, same: bool, micro_batches: int, no_sync: bool, options: dict) -> None:
    """Equal to one process that leaves out what nobody used: no decay, no momentum, no state for those."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(Forked)
    optimizer = DECAY(plain.parameters())
    engine = parts.STAGES[stage](parts.seeded(Forked), DECAY, find_unused=True, **options)
    pieces = {}
    for bucket in engine.trained:
        for index, piece in bucket.pieces:
            pieces[bucket.names[index]] = piece
    for step in range(8):
        for micro in range(micro_batches):
            for other in range(world_size):
                (loss_of(plain, step, other, same, micro) / world_size).backward()
            if no_sync and micro < micro_batches - 1:
                with engine.no_sync():
                    loss_of(engine, step, rank, same, micro).backward()
            else:
                loss_of(engine, step, rank, same, micro).backward()
        unused = {name for name, param in plain.named_parameters() if param.grad is None}
        if step % 3 == 1:
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(engine.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=0)
        before = {name: dict(engine.optimizer.state.get(piece, {})) for name, piece in pieces.items()}
        counts = {name: int(state["step"]) if state else 0 for name, state in before.items()}
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        for name, piece in pieces.items():
            state = engine.optimizer.state.get(piece, {})
            assert (int(state["step"]) if state else 0) == counts[name] + (name not in unused), name
        engine.zero_grad()
        assert "blocks.2.adapters.3" in unused and len(unused) < len(list(plain.parameters()))
        if stage == "zero3":
            assert storage_bytes(engine.model.parameters()) == 0, "whole parameters outlive the step"
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def find_unused_traffic(stage: str) -> list:
    """The collectives of one step with the option and without it, on a model that uses everything."""
    rank = dist.get_rank()
    found = []
    for option in (False, True):
        engine = parts.STAGES[stage](parts.seeded(parts.OddModel), DECAY, find_unused=option)
        tokens, targets = parts.token_batch(0, rank)
        engine.training_step(tokens, targets, F.cross_entropy)
        with TrafficLedger() as traffic:
            F.cross_entropy(engine(tokens), targets).backward()
            engine.clip_grad_norm_(1e9)
            engine.step()
            engine.zero_grad()
        found.append(sorted((c.kind, c.whole_bytes) for c in traffic.collectives))
    small = ("all-reduce", sum(1 for p in engine.model.parameters() if p.requires_grad))
    assert small in found[1]
    found[1].remove(small)
    assert found[0] == found[1]
    return small[1]


def find_unused_memory() -> None:
    """ZeRO-3 with `find_unused`: what is alive in backward stays bounded, also where no unit is ever complete."""
    layers, width = 8, 64

    def idle():
        model = parts.Stack(layers, width)
        for layer in model.layers:
            layer.idle = nn.Parameter(torch.ones(1))
        return model

    peaks = []
    for option, build in ((False, lambda: parts.Stack(layers, width)), (True, idle)):
        engine = parts.ZeRO3(
            parts.seeded(build, dtype=torch.float32),
            parts.OPTIMIZERS["adamw"],
            group=parts.silent_group(),
            find_unused=option,
        )
        x, y = parts.vector_batch(0, dist.get_rank())
        with MemoryLedger() as memory:
            loss = F.mse_loss(engine(x), y)
            memory.reset_peak()
            loss.backward()
            peaks.append(memory.peak)
    unit = 4 * (width * width + width)
    assert peaks[1] <= peaks[0] + unit + 4096, peaks


def unused_by_default(stage: str) -> str:
    """Without the option: an error on every rank that names the parameters and the option."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(Forked), DECAY)
    tokens, targets = parts.token_batch(0, rank)
    F.cross_entropy(engine(tokens, choice=1, early=True, spare=True)["a"], targets).backward()
    return message(engine.step, RuntimeError)


def nothing_is_lost(stage: str) -> str:
    """A backward after which gradients wait for ever: step() says so and does not leave them out."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(Forked), DECAY, find_unused=True)
    with engine.no_sync():
        loss_of(engine, 0, rank, True).backward()
    found = message(engine.step, RuntimeError)
    engine.zero_grad()
    loss_of(engine, 0, rank, True).backward()
    engine.step()
    engine.zero_grad()
    return found


# Flags, outputs, calls.


def changed_flags(stage: str) -> list[str]:
    rank = dist.get_rank()
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, DECAY)
    batch = parts.token_batch(0, rank)
    engine.training_step(*batch, F.cross_entropy)
    model.head.bias.requires_grad_(False)
    found = [message(lambda: engine.training_step(*batch, F.cross_entropy), RuntimeError)]
    model.head.bias.requires_grad_(True)
    engine.training_step(*batch, F.cross_entropy)
    model.frozen.requires_grad_(True)
    found.append(message(lambda: engine.training_step(*batch, F.cross_entropy), RuntimeError))
    # the way out, as the message has it
    state = engine.full_state_dict()
    fresh = parts.seeded(parts.OddModel, seed=1)
    fresh.load_state_dict(state)
    fresh.frozen.requires_grad_(True)
    fresh.head.bias.requires_grad_(False)
    engine = parts.STAGES[stage](fresh, DECAY)
    for step in range(3):
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    after = engine.full_state_dict()
    assert not torch.equal(after["frozen"], state["frozen"]) and torch.equal(after["head.bias"], state["head.bias"])
    return found


def behind_the_engines_back(stage: str) -> list[str]:
    """What would be lost silently: a module added later, weights loaded past the shards, a state on one rank only."""
    rank = dist.get_rank()
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, DECAY)
    batch = parts.token_batch(0, rank)
    engine.training_step(*batch, F.cross_entropy)
    model.blocks.append(parts.seeded(lambda: parts.OddBlock(5, 7)))
    found = [message(lambda: engine.training_step(*batch, F.cross_entropy), RuntimeError)]
    del model.blocks[-1]
    engine.training_step(*batch, F.cross_entropy)
    low = parts.seeded(parts.OddModel, dtype=torch.float32)
    parts.STAGES[stage](low, DECAY, param_dtype=torch.bfloat16)
    found.append(message(lambda: low.load_state_dict(parts.OddModel().state_dict()), RuntimeError))
    found.append(message(lambda: low.head.load_state_dict(parts.OddModel().head.state_dict()), RuntimeError))
    state = engine.full_state_dict()
    found.append(message(lambda: engine.load_full_state_dict(state if rank == 0 else None)))
    engine.load_full_state_dict(state)
    engine.training_step(*batch, F.cross_entropy)
    return found


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list


class Opaque:
    """An object that neither torch nor dataclasses know."""

    def __init__(self, logits, hidden):
        self.logits, self.hidden = logits, {"all": hidden}
        self.itself = self


class Outputs(parts.OddModel):
    def __init__(self, form: str):
        super().__init__()
        self.form = form

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen + self.shift
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        logits = self.head(x)
        return {
            "dict": {"logits": logits, "hidden": hidden},
            "dataclass": Output(logits, hidden),
            "tuple": (hidden, logits, None, "text"),
            "object": Opaque(logits, hidden),
        }[self.form]


def logits_of(output):
    if isinstance(output, dict):
        return output["logits"]
    return output[1] if isinstance(output, tuple) else output.logits


def outputs(stage: str, form: str) -> None:
    """Whatever forward returns, of which the loss uses a part; and hidden states beside it every other step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Outputs(form)

        def forward(self, tokens):
            return self.inner(tokens)

    plain = parts.seeded(Both)
    optimizer = DECAY([p for p in plain.parameters() if p.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(Both), DECAY)

    def loss_of(model, tokens, targets, step):
        output = model(tokens)
        loss = F.cross_entropy(logits_of(output), targets)
        if step % 2:
            hidden = output["hidden"] if form == "dict" else output[0] if form == "tuple" else output.hidden
            hidden = hidden["all"] if form == "object" else hidden
            loss = loss + hidden[1].square().mean()
        return loss

    for step in range(6):
        loss_of(plain, *parts.whole(parts.token_batch, step, world_size), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(engine, *parts.token_batch(step, rank), step).backward()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def loading_reaches_frozen_weights(stage: str) -> None:
    """What forward uses after loading is what was loaded, the frozen weights on every rank included."""
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), DECAY)
    other = parts.seeded(parts.OddModel, seed=3)
    with torch.no_grad():
        other.frozen.copy_(torch.linspace(2, 3, 5))
        other.shift.add_(0.5)
    engine.load_full_state_dict(other.state_dict())
    tokens, _ = parts.token_batch(0, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens), other(tokens), rtol=0, atol=1e-12)
    parts.assert_same_state(engine.full_state_dict(), other.state_dict(), atol=0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def batch_norm_keeps_rank_0(stage: str) -> None:
    """Running statistics are every rank's own; `full_state_dict` has rank 0's, and loading gives these to all."""
    rank = dist.get_rank()

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(100 * step + who)
        return torch.randn(8, 6, generator=generator, dtype=torch.float64) + who, torch.zeros(8, 3, dtype=torch.float64)

    model = parts.seeded(Normed)
    engine = parts.STAGES[stage](model, DECAY)
    for step in range(4):
        engine.training_step(*batch_of(step, rank), F.mse_loss)
    mean = model.blocks[0][1].running_mean
    everyone = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mean)
    assert all(not torch.equal(everyone[0], other) for other in everyone[1:])  # each has seen its own data
    state = engine.full_state_dict()
    assert torch.equal(state["blocks.0.1.running_mean"], everyone[0])
    assert torch.equal(mean, everyone[rank])  # and asking has changed nothing
    assert state["blocks.0.1.num_batches_tracked"] == 4
    engine.load_full_state_dict(state)
    assert torch.equal(mean, everyone[0])
    engine.model.eval()
    with torch.no_grad():
        out = engine(batch_of(9, 0)[0])
    plain = parts.seeded(Normed, seed=3)
    plain.load_state_dict(state)
    torch.testing.assert_close(out, plain.eval()(batch_of(9, 0)[0]), rtol=0, atol=1e-12)


# Reentrant checkpointing.


class Reentrant(nn.Module):
    def __init__(self, use_reentrant: bool, where: str = "unit"):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([parts.OddBlock(5, 7), parts.OddBlock(5, 9)])
        self.head = nn.Linear(5, 3)
        self.use_reentrant, self.where = use_reentrant, where

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x if self.where == "last" else self.head(x)


def reentrant_checkpoint(stage: str) -> list[str]:
    """ZeRO-3 refuses it, around a unit and around the model, and goes on after; ZeRO-1 and -2 do not mind."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _, expected = parts.oracle(
        parts.seeded(lambda: Reentrant(False)), DECAY, F.cross_entropy, parts.token_batch, 4, world_size
    )
    found = []
    model = parts.seeded(lambda: Reentrant(True))
    engine = parts.STAGES[stage](model, DECAY)
    tokens, targets = parts.token_batch(0, rank)
    if stage == "zero3":
        for _ in range(2):
            loss = F.cross_entropy(engine(tokens), targets)
            found.append(message(loss.backward, RuntimeError))
            engine.zero_grad()
        model.use_reentrant = False
        embedded = torch.zeros((), dtype=torch.float64, requires_grad=True)
        out = checkpoint(lambda t, e: engine(t) + e, tokens, embedded, use_reentrant=True)
        found.append(message(F.cross_entropy(out, targets).backward, RuntimeError))
        engine.zero_grad()
    for step in range(4):
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
    return found


def checkpoint_around_the_model(stage: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _, expected = parts.oracle(parts.seeded(parts.OddModel), DECAY, F.cross_entropy, parts.token_batch, 4, world_size)
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), DECAY)
    for step in range(4):
        tokens, targets = parts.token_batch(step, rank)
        F.cross_entropy(checkpoint(engine, tokens, use_reentrant=False), targets).backward()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


# Ranks that part, die, or share a mesh.


def short_group(seconds: float):
    """All ranks, with a timeout of their own, so that what goes wrong there leaves the other cases alone."""
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds), backend="gloo")


class Skipping(nn.Module):
    """Units of different sizes or of the same, of which one may be skipped."""

    def __init__(self, sizes):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for size in sizes])
        self.skip = None

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index != self.skip:
                x = block(x)
        return x


def a_unit_that_only_some_ranks_run(sizes: tuple, at_step: int, skip: int, prefetch: int) -> str:
    """The last rank skips a unit in one step: an error on every rank, by the timeout at the latest."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = short_group(1)
    model = parts.seeded(lambda: Skipping(sizes), dtype=torch.float32)
    engine = parts.ZeRO3(model, DECAY, group=group, find_unused=True, prefetch=prefetch)
    for step in range(at_step):
        engine.training_step(*parts.vector_batch(step, rank, 8), F.mse_loss)
    model.skip = skip if rank == world_size - 1 else None
    found = message(lambda: engine.training_step(*parts.vector_batch(9, rank, 8), F.mse_loss), RuntimeError)
    dist.barrier()  # the others may still be on their way to their error
    return found


def a_unit_left_out_at_the_end() -> str:
    """Evaluation, in which the last rank leaves out the last unit: its next forward must not meet their gather."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = parts.seeded(lambda: Skipping((8, 8, 8, 8)), dtype=torch.float32)
    engine = parts.ZeRO3(model, DECAY, group=short_group(1), prefetch=0)
    x, _ = parts.vector_batch(0, rank, 8)

    def evaluate():
        with torch.no_grad():
            engine(x)
            model.skip = 3 if rank == world_size - 1 else None
            engine(x)
            engine(x)

    found = message(evaluate, RuntimeError)
    dist.barrier()
    return found


def all_ranks_may_skip_alike(stage: str) -> None:
    """A unit that no rank runs in a step is no mistake: with `find_unused` training goes on right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(lambda: Skipping((8, 9, 8, 9)))
    optimizer = DECAY(plain.parameters())
    model = parts.seeded(lambda: Skipping((8, 9, 8, 9)))
    engine = parts.STAGES[stage](model, DECAY, find_unused=True)
    for step in range(8):
        plain.skip = model.skip = (None, 1, 1, None, 3, 0, None, 2)[step]

        def batch_of(step, who):
            return parts.vector_batch(step, who, 8, torch.float64)

        x, y = parts.whole(batch_of, step, world_size)
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.training_step(*batch_of(step, rank), F.mse_loss)
        with torch.no_grad():  # another kind of forward in between
            engine(x)
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def steps_of_several_kinds() -> int:
    """Training, evaluation and `no_sync` in turn, each known from before: nothing is compared any more. And a second
    engine over the same ranks makes no group of its own. Returns how many groups there are now."""
    rank = dist.get_rank()
    engine = parts.ZeRO3(parts.seeded(lambda: parts.Stack(3, 8)), DECAY, prefetch=0)
    x, y = parts.vector_batch(0, rank, 8, torch.float64)
    for turn in range(2):
        with TrafficLedger() as traffic:
            engine.training_step(x, y, F.mse_loss)
            with torch.no_grad():
                engine(x)
            with engine.no_sync():
                F.mse_loss(engine(x), y).backward()
            F.mse_loss(engine(x), y).backward()
            engine.step()
            engine.zero_grad()
        whole = engine.units[0].buckets[0].flat.nbytes
        assert {c.whole_bytes for c in traffic.collectives} == {whole} or turn == 0, traffic.collectives
    return len(dist.distributed_c10d._world.pg_map)


def a_rank_that_does_not_come(stage: str, late: int) -> str:
    """One rank stays away from a step: the others say, within the timeout, which collective they waited in."""
    rank = dist.get_rank()
    group = short_group(1)
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), DECAY, group=group)
    engine.training_step(*parts.token_batch(0, rank), F.cross_entropy)
    found = ""
    if rank != late:
        started = time.monotonic()
        found = message(lambda: engine.training_step(*parts.token_batch(1, rank), F.cross_entropy), RuntimeError)
        assert time.monotonic() - started < 10
    dist.barrier()
    return found


def one_dimension_of_a_mesh(stage: str) -> None:
    """Four ranks as 2 x 2: sharded over one dimension, each pair trains on its own data and alone."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    row, column = mesh.get_local_rank("tensor"), mesh.get_local_rank("data")
    assert rank == 2 * row + column
    build = parts.OddModel
    plain = parts.seeded(build, seed=row)
    optimizer = DECAY([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(build, seed=row), DECAY, group=mesh.get_group("data"))
    assert engine.world_size == 2 and engine.rank == column
    for step in range(5):
        for other in range(2):
            tokens, targets = parts.token_batch(step, 2 * row + other)
            (F.cross_entropy(plain(tokens), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
        dist.barrier()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    shards = sum(bucket.shard_numel for bucket in engine.trained)
    whole = sum(bucket.numel for bucket in engine.trained)
    assert whole == 2 * shards


def combinations(stage: str, model: str, options: dict) -> None:
    """`find_unused` where everything is used, with units that run twice, ties, checkpoints: nothing may change."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = {
        "twice": parts.Twice,
        "tied": cases_loop.TiedAcross,
        "around": lambda: cases_loop.Checkpointed("around"),
        "inside": lambda: cases_loop.Checkpointed("inside"),
        "several": lambda: cases_loop.Checkpointed("around several"),
        "odd": parts.OddModel,
    }[model]
    _, expected = parts.oracle(parts.seeded(build), DECAY, F.cross_entropy, parts.token_batch, 6, world_size)
    engine = parts.STAGES[stage](parts.seeded(build), DECAY, find_unused=True, **options)
    for step in range(6):
        tokens, targets = parts.token_batch(step, rank)
        if step % 2:  # two forwards, one backward
            loss = F.cross_entropy(engine(tokens), targets) / 2
            loss = loss + F.cross_entropy(engine(tokens), targets) / 2
        else:
            loss = F.cross_entropy(engine(tokens), targets)
        loss.backward()
        if stage == "zero3":
            assert storage_bytes(engine.model.parameters()) == 0
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


def low_precision_everywhere(model: str) -> None:
    """bfloat16 through every stage and option: the same losses and weights, to the bit on two ranks."""
    rank = dist.get_rank()
    build = {
        "twice": parts.Twice,
        "tied": cases_loop.TiedAcross,
        "around": lambda: cases_loop.Checkpointed("around"),
    }[model]
    found = []
    for stage, options in (
        ("zero1", {}),
        ("zero2", {"bucket_mb": 0}),
        ("zero3", {}),
        ("zero3", {"prefetch": 0, "find_unused": True}),
        ("zero3", {"reshard_after_forward": False}),
    ):
        engine = parts.STAGES[stage](
            parts.seeded(build, dtype=torch.float32),
            DECAY,
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            **options,
        )
        for step in range(4):
            tokens, targets = parts.token_batch(step, rank)
            F.cross_entropy(engine(tokens).float(), targets).backward()
            engine.clip_grad_norm_(1e9)
            engine.step()
            engine.zero_grad()
        found.append(engine.full_state_dict())
    for other in found[1:]:
        parts.assert_same_state(other, found[0], atol=0)

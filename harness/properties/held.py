"""What an engine holds and sends, to the byte, against arithmetic done here; and what steps leave behind."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.held import held_bytes, optimizer_of
from harness.measure.ledger import MemoryLedger
from harness.measure.traffic import TrafficLedger
from harness.properties import fixtures
from harness.properties.fixtures import ADAMW, Lanes, OddModel, Stack, grid, odd, own_tokens, seeded, vector_batch
from harness.properties.property import STAGES, NotApplicable, Subject, ask, ask_each, ask_thorough, expect, holds, same
from harness.properties.training import Pair, of_vectors, vectors
from harness.run import engines

# How parameters lie in their buffers: aligned, padded, each element owned once.


def alignment(device: str) -> int:
    """Parameters and shards start on multiples of so many bytes."""
    return 16 if device == "cpu" else 256


def padded(sizes, world_size: int, align: int = 4) -> tuple[int, int]:
    """(elements of the buffer, elements of a shard) of these sizes; each starts on a multiple of `align`."""
    end = sum(math.ceil(size / align) * align for size in sizes)
    shard = math.ceil(end / (world_size * align)) * align
    return shard * world_size, shard


def owned(sizes, rank: int, world_size: int, align: int = 4) -> list[int]:
    """How many elements of each parameter lie in this rank's shard; only those with any."""
    _, shard = padded(sizes, world_size, align)
    found, offset = [], 0
    for size in sizes:
        overlap = min(offset + size, (rank + 1) * shard) - max(offset, rank * shard)
        if overlap > 0:
            found.append(overlap)
        offset += math.ceil(size / align) * align
    return found


def sizes_by_bucket(model: nn.Module, stage: str) -> list[list[int]]:
    """The layout, worked out anew: one bucket in reverse order for ZeRO-1 and -2, units and root for ZeRO-3."""
    named = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    if stage != "zero3":
        return [[size for _, size in reversed(named)]]
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    children = [name for name, module in model.named_children() if isinstance(module, nn.ModuleList)]
    units = {}
    for name, size in named:
        inside = name.split(".")[0] in children
        units.setdefault(".".join(name.split(".")[:2]) if inside else "root", []).append(size)
    root = units.pop("root", None)
    return [*units.values(), *([root] if root else []), *([frozen] if frozen else [])]


# What our stages hold and send.


def mixed(param_dtype) -> dict:
    """The options of an engine, which may have none of the kind."""
    return {"param_dtype": param_dtype, "reduce_dtype": torch.float32} if param_dtype else {}


@holds(
    "bytes",
    ask(more_ranks=(1, 3, 4), chapters=STAGES),
    ask(more_ranks=(1, 3, 4), param_dtype=torch.bfloat16),
    of_stages=True,
)
def held_bytes_equal_the_theory(engine, param_dtype=None, device="cpu"):
    """Right before the update a rank holds what the theory says, to the byte, and nothing else is alive.

    In mixed precision no float32 weights stay besides the shards.
    """
    stage, low = engine.like, param_dtype is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = seeded(OddModel, dtype=torch.float32, device=device)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    layout = sizes_by_bucket(model, stage)
    batches = [[part.to(device) for part in fixtures.token_batch(step, rank)] for step in range(2)]
    held = {}
    with MemoryLedger() as memory:
        memory.track(model.shift)
        for tensor in (*batches[0], *batches[1]):
            memory.track(tensor)
        outside = memory.live
        for param in model.parameters():
            memory.track(param)
        trained = engine(model, ADAMW, group=fixtures.silent_group(), **mixed(param_dtype))
        trained.training_step(*batches[0], fixtures.in_float32)
        loss = fixtures.in_float32(trained(batches[1][0]), batches[1][1])
        loss.backward()

        def look(optimizer, *_):
            held.update(held_bytes(trained), live=memory.live - outside)

        trained.optimizer.register_step_pre_hook(look)
        trained.step()
    trainable = layout[:-1] if stage == "zero3" else layout  # the last is the root's frozen scale
    # (elements of the whole buffer, of a shard): all parameters, and those that are trained.
    align = alignment(device) // (2 if low else 4)  # in elements of the smallest dtype
    lengths = [padded(sizes, world_size, align) for sizes in trainable]
    whole, shard = (sum(each) for each in zip(*lengths))
    # A chapter leaves what is frozen as it is.
    frozen_whole, frozen_shard = (frozen, frozen) if engine.chapter else padded([frozen], world_size, align)
    pieces = []
    for sizes in trainable:
        pieces += owned(sizes, rank, world_size, align)
    in_use = 0 if stage == "zero3" else (2 if low else 4) * (whole + frozen_whole)
    expected = {
        # AdamW: two moments per element and a 4-byte counter per piece; padding has no state
        "optimizer": 8 * sum(pieces) + 4 * len(pieces),
        "gradients": 4 * (whole if stage in ("zero1", "zero1_2psi") else shard),
        # A shard in float32 is a part of the weights in use, where those are float32 and whole.
        "parameters": in_use + (4 * (shard + frozen_shard) if low or stage == "zero3" else 0),
    }
    if stage == "zero1_2psi" and held["gradients"] > 4 * whole:  # the mean came into a buffer of its own, as it may
        expected["gradients"] += 4 * shard
    live = held.pop("live")
    for kind, nbytes in expected.items():
        same(f"bytes of the {kind} held in step 4", held[kind], nbytes)
    # Only the loss of the forward before.
    same("bytes that are alive besides", live - sum(expected.values()), 4)


@holds("life")
def steps_leave_no_hooks_behind(engine):
    """The engine's hooks are set once: steps of every kind leave as many as they found."""
    trained = odd(engine, find_unused=True)
    model, (tokens, targets) = trained.model, own_tokens(0)
    trained.training_step(tokens, targets, F.cross_entropy)  # some set theirs in the first one
    before = fixtures.hooks_on(model, trained.optimizer)
    for _ in range(2):
        trained.training_step(tokens, targets, F.cross_entropy)
        with torch.no_grad():
            trained(tokens)
        with trained.no_sync():
            F.cross_entropy(trained(tokens), targets).backward()
        F.cross_entropy(trained(tokens), targets).backward()
        trained.clip_grad_norm_(1.0)
        trained.step()
        trained.zero_grad()
        if not engine.foreign:
            trained.load_full_state_dict(trained.full_state_dict())
        same("hooks after a step", fixtures.hooks_on(model, trained.optimizer), before)


@holds(
    "traffic",
    ask(ranks=(2, 3), more_ranks=1, chapters=STAGES),
    ask(ranks=4, hybrid=True),
    ask_thorough(ranks=(1, 2, 3), param_dtype=torch.bfloat16),
    of_stages=True,
)
def collectives_are_those_of_the_stage(engine, param_dtype=None, hybrid=False):
    """Kind, bytes, order, step and ranks of every collective of a training step, and what they send in all.

    On a grid of 2 x 2 it is the same within a row, and across replicas only the shards' gradients go.
    """
    rank, layers, width = dist.get_rank(), 4, 12
    group = grid() if hybrid else None
    row = tuple(dist.get_process_group_ranks(group.get_group("shards") if hybrid else dist.group.WORLD))
    model, world_size = seeded(lambda: Stack(layers, width), dtype=torch.float32), len(row)
    sizes = [width * width, width]
    whole = padded(sizes, world_size, 8 if param_dtype else 4)[0]
    options = {} if engine.like == "zero3" else {"bucket_mb": 4 * sum(sizes) / 2**20}
    options |= {"group": group} if hybrid else {}
    trained = engine(model, ADAMW, **mixed(param_dtype), **options)

    def step(number):
        trained.training_step(*vector_batch(number, rank, width), lambda out, y: F.mse_loss(out.float(), y))

    step(0)
    step(1)
    with TrafficLedger() as traffic:
        step(2)
    nbytes = {"all-gather": (2 if param_dtype else 4) * whole, "reduce-scatter": 4 * whole, "all-reduce": 4 * whole}
    gather, reduce = ("all-gather", "5 gather parameters"), ("reduce-scatter", "3 reduce gradients")
    expected = {
        "zero1": [("all-reduce", "3 reduce gradients")] * layers + [gather] * layers,
        "zero2": [reduce] * layers + [gather] * layers,
        # Forward gathers every unit; so does backward, each before the reduction of the unit behind it. A rank that
        # is alone gathers nothing ahead.
        "zero3": [gather] * layers + [gather] + [gather, reduce] * (layers - 1) + [reduce]
        if world_size > 1
        else [gather] * layers + [gather, reduce] * layers,
    }[engine.like]
    own = [each for each in traffic.collectives if each.ranks == row]
    same("the collectives of a step, and where they are issued", [(c.kind, c.step) for c in own], expected)
    same("bytes of the buffers", [c.whole_bytes for c in own], [nbytes[kind] for kind, _ in expected])
    across = [(c.kind, c.whole_bytes) for c in traffic.collectives if c.ranks != row]
    replicas = [("all-reduce", 4 * whole // world_size)] * layers if hybrid else []
    same("collectives with other ranks than the row's", across, replicas)
    times = {"zero1": 3, "zero2": 2, "zero3": 3}[engine.like]
    if param_dtype is None and not hybrid:
        sent = round(times * layers * 4 * whole * (world_size - 1) / world_size)
        same(f"bytes sent in a step, {times}Ψ (N-1)/N elements", traffic.sent_bytes, sent)


@holds("order", *ask_each("reverse", (False, True), "zero2", chapters="zero2"), of_stages=True)
def buckets_are_reduced_in_one_order(engine, reverse):
    """ZeRO-2's buckets are reduced last parameters first, in whatever order autograd finishes, and rightly."""
    pair = Pair(engine, lambda: Lanes((8, 16, 24, 32)), ADAMW, bucket_mb=0, batch=vectors(8), loss=of_vectors)
    for model, _ in pair.both:
        model.way = (3, 2, 1, 0) if reverse else (0, 1, 2, 3)
    params = reversed(list(pair.plain.parameters()))
    expected = [8 * padded([param.numel()], pair.size, 2)[0] for param in params]
    for step in range(4):
        with TrafficLedger() as traffic:
            pair.backward(step)
            pair.step()
        sizes = [c.whole_bytes for c in traffic.collectives if c.kind == "reduce-scatter"]
        same("bytes of the reduce-scatters, each once, in the order of self.buckets", sizes, expected)
    pair.same_weights()


# What every engine says of itself, ours and others: to the order.


def promised(engine: Subject):
    """(what its ranks share out between steps, how often Ψ (N-1)/N elements leave a rank in a step)."""
    entry = engines.ENGINES.get(engine.like or engine.name)
    if entry is None or entry.promise is None:
        raise NotApplicable(f"{engine.name} says nothing of its memory and traffic: COUNTERPART would")
    return entry.promise


def built(engine: Subject):
    """(the engine, the bytes of its parameters, a function that takes a step)."""
    trained = engine(seeded(lambda: Stack(4, 32), dtype=torch.float32), ADAMW)
    whole = sum(param.nbytes for param in Stack(4, 32).parameters())
    return trained, whole, lambda n: trained.training_step(*vector_batch(n, dist.get_rank(), 32), F.mse_loss)


@holds("bytes", ask(ranks=4, chapters=STAGES))
def what_is_shared_out_is_no_more_than_twice_there(engine):
    """Of what the ranks share out, all four together have two copies at most before the update, and not four."""
    kinds, _ = promised(engine)
    trained, whole, step = built(engine)
    inner, held = getattr(trained, "_engine", trained) if engine.foreign else trained, {}
    optimizer_of(inner).register_step_pre_hook(lambda *_: held.update(held_bytes(inner)))
    for number in range(2):
        step(number)
    for kind in kinds:
        copy = whole * (1 + (kind == "optimizer"))  # AdamW has two moments
        total = torch.tensor(float(held[kind]))
        dist.all_reduce(total)
        most = 2.1 * copy
        if kind == "gradients":  # an engine may document a buffer that gradients go through, of a size of its own
            most += dist.get_world_size() * getattr(inner, "bucket_bytes", 0)
        expect(total <= most, f"bytes of {kind} on all ranks", f"{most:.0f} at most", total.item())


@holds("traffic", ask(more_ranks=4, chapters=STAGES))
def a_step_sends_no_more_than_is_promised(engine):
    """A step sends the 2Ψ or 3Ψ (N-1)/N elements that the engine's documentation says, and 1 % for notes."""
    _, times = promised(engine)
    _, whole, step = built(engine)
    step(0)
    step(1)
    with TrafficLedger() as traffic:
        step(2)
    most = 1.01 * times * whole * (1 - 1 / dist.get_world_size())
    expect(traffic.sent_bytes <= most, "bytes that a rank sends in a step", f"{most:.0f} at most", traffic.sent_bytes)

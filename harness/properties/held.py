"""What an engine holds and sends, to the byte, against arithmetic done here; and what steps leave behind."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.measure.ledger import MemoryLedger, held_bytes
from harness.measure.traffic import TrafficLedger
from harness.properties import parts
from harness.properties.layout import alignment, owned, padded, sizes_by_bucket
from harness.properties.models import Lanes
from harness.properties.property import STAGES, holds, same
from harness.properties.training import Pair, of_vectors, vectors

ADAMW = parts.ADAMW


def mixed(param_dtype) -> dict:
    """The options of an engine, which may have none of the kind."""
    return {"param_dtype": param_dtype, "reduce_dtype": torch.float32} if param_dtype else {}


@holds("bytes", engines=STAGES, cases=({}, {"param_dtype": torch.bfloat16}), further_sizes=(1, 3, 4))
def held_bytes_equal_the_theory(engine, param_dtype=None, device="cpu"):
    """Right before the update a rank holds what the theory says, to the byte, and nothing else is alive.

    In mixed precision no float32 weights stay besides the shards.
    """
    stage, low = engine.like, param_dtype is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = parts.seeded(parts.OddModel, dtype=torch.float32, device=device)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    layout = sizes_by_bucket(model, stage)
    batches = [[part.to(device) for part in parts.token_batch(step, rank)] for step in range(2)]
    held = {}
    with MemoryLedger() as memory:
        memory.track(model.shift)
        for tensor in [t for batch in batches for t in batch]:
            memory.track(tensor)
        outside = memory.live
        for param in model.parameters():
            memory.track(param)
        trained = engine(model, ADAMW, group=parts.silent_group(), **mixed(param_dtype))
        trained.training_step(*batches[0], parts.in_float32)
        loss = parts.in_float32(trained(batches[1][0]), batches[1][1])
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
    all_whole, all_shard = (sum(each) for each in zip(*lengths, padded([frozen], world_size, align)))
    pieces = [size for sizes in trainable for size in owned(sizes, rank, world_size, align)]
    in_use = 0 if stage == "zero3" else (2 if low else 4) * all_whole
    expected = {
        # AdamW: two moments per element and a 4-byte counter per piece; padding has no state
        "optimizer": 8 * sum(pieces) + 4 * len(pieces),
        "gradients": 4 * (whole if stage in ("zero1", "zero1_2psi") else shard),
        # A shard in float32 is a part of the weights in use, where those are float32 and whole.
        "parameters": in_use + (4 * all_shard if low or stage == "zero3" else 0),
    }
    if stage == "zero1_2psi" and held["gradients"] > 4 * whole:  # the mean came into a buffer of its own, as it may
        expected["gradients"] += 4 * shard
    live = held.pop("live")
    for kind, nbytes in expected.items():
        same(f"bytes of the {kind} held in step 4", held[kind], nbytes, step=4)
    # Only the loss of the forward before.
    same("bytes that are alive besides", live - sum(expected.values()), 4, step=4)


@holds("life")
def steps_leave_no_hooks_behind(engine):
    """The engine's hooks are set once: steps of every kind leave as many as they found."""
    model = parts.seeded(parts.OddModel)
    trained = engine(model, ADAMW, find_unused=True)
    tokens, targets = parts.token_batch(0, dist.get_rank())

    trained.training_step(tokens, targets, F.cross_entropy)  # some set theirs in the first one
    before = parts.hooks_on(model, trained.optimizer)
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
        same("hooks after a step", parts.hooks_on(model, trained.optimizer), before)


@holds("traffic", engines=STAGES, sizes=(2, 3, 4), further_sizes=(1,),
       cases=({"at": (1, 2, 3)}, {"hybrid": True, "at": (4,)}),
       further_cases=({"param_dtype": torch.bfloat16, "at": (1, 2, 3)},))  # fmt: skip
def collectives_are_those_of_the_stage(engine, param_dtype=None, hybrid=False):
    """Kind, bytes, order, step and ranks of every collective of a training step, and what they send in all.

    On a grid of 2 x 2 it is the same within a row, and across replicas only the shards' gradients go.
    """
    rank, layers, width = dist.get_rank(), 4, 12
    group = parts.grid() if hybrid else None
    row = tuple(dist.get_process_group_ranks(group.get_group("shards") if hybrid else dist.group.WORLD))
    model, world_size = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32), len(row)
    sizes = [width * width, width]
    whole = padded(sizes, world_size, 8 if param_dtype else 4)[0]
    options = {} if engine.like == "zero3" else {"bucket_mb": 4 * sum(sizes) / 2**20}
    options |= {"group": group} if hybrid else {}
    trained = engine(model, ADAMW, **mixed(param_dtype), **options)

    def step(number):
        trained.training_step(*parts.vector_batch(number, rank, width), lambda out, y: F.mse_loss(out.float(), y))

    step(0)
    step(1)
    with TrafficLedger() as traffic:
        step(2)
    nbytes = {"all-gather": (2 if param_dtype else 4) * whole, "reduce-scatter": 4 * whole, "all-reduce": 4 * whole}
    gather, reduce = ("all-gather", "step 5 gather parameters"), ("reduce-scatter", "step 3 reduce gradients")
    expected = {
        "zero1": [("all-reduce", "step 3 reduce gradients")] * layers + [gather] * layers,
        "zero2": [reduce] * layers + [gather] * layers,
        # Forward gathers every unit; so does backward, each before the reduction of the unit behind it. A rank that
        # is alone gathers nothing ahead.
        "zero3": [gather] * layers + [gather] + [gather, reduce] * (layers - 1) + [reduce]
        if world_size > 1
        else [gather] * layers + [gather, reduce] * layers,
    }[engine.like]
    own = [each for each in traffic.collectives if each.ranks == row]
    same("the collectives of a step, and where they are issued", [(c.kind, c.step) for c in own], expected, step=3)
    same("bytes of the buffers", [c.whole_bytes for c in own], [nbytes[kind] for kind, _ in expected], step=3)
    across = [(c.kind, c.whole_bytes) for c in traffic.collectives if c.ranks != row]
    replicas = [("all-reduce", 4 * whole // world_size)] * layers if hybrid else []
    same("collectives with other ranks than the row's", across, replicas, step=3)
    times = {"zero1": 3, "zero2": 2, "zero3": 3}[engine.like]
    if param_dtype is None and not hybrid:
        sent = round(times * layers * 4 * whole * (world_size - 1) / world_size)
        same(f"bytes sent in a step, {times}Ψ (N-1)/N elements", traffic.sent_bytes, sent, step=3)


@holds("order", engines=("zero2",), sizes=(2, 3), cases=({"reverse": False}, {"reverse": True}))
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
        same("bytes of the reduce-scatters, each once, in the order of self.trained_buckets", sizes, expected, step=3)
    pair.same_weights()

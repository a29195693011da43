"""Where shards are: a group of some ranks, grids of replicas, tensor parallelism and pipelines beside, the host."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from zerolab.engine import checkpoint
from zerolab.measure.held import sizes_of_layout
from zerolab.measure.traffic import TrafficLedger
from zerolab.properties.fixtures import (
    ADAMW,
    DECAY,
    EXACT,
    SGD,
    Branches,
    OddModel,
    Pair,
    PartlyFrozen,
    byte_batch,
    gpt,
    grid,
    in_float64,
    mesh,
    odd,
    of_bytes,
    pieces_of,
    seeded,
    started_by,
    token_batch,
)
from zerolab.properties.precision import scaler_of
from zerolab.properties.property import STAGES, ask, ask_thorough, expect, holds, only, refused, same, stages_hold
from zerolab.properties.shared_folder import shared_folder
from zerolab.run.model import next_token_loss


@holds("values", ask(ranks=4))
def groups_keep_to_themselves(engine):
    """Two groups side by side that differ in buffers, unused parameters, norms and overflows see nothing of each other.

    A collective over all ranks instead of the group's would be matched by the other group, and only its values wrong.
    """
    rank, world_size = engine.rank, engine.size
    groups = [dist.new_group(list(range(start, world_size, 2))) for start in (0, 1)]
    side, who = rank % 2, rank // 2

    def batch(step, who):
        return *token_batch(step, 2 * who + side), torch.inf if step == 1 and who == 1 and side == 0 else 1.0

    # Rank 0 of each group has the right one.
    built = started_by(side, Branches), started_by(rank, Branches)
    pair = Pair(engine, built, DECAY, batch=batch, group=groups[side], find_unused=True,
                loss=lambda model, x, y, factor: in_float64(model(x, side), y) * factor)  # fmt: skip
    scaler = scaler_of(engine, init_scale=4.0)
    for step in range(3):
        pair.scaled_step(step, scaler, 0.1, skipped=step == 1 and side == 0)
    same("the scale of the group's loss scaler", scaler.get_scale(), 2.0 if side == 0 else 4.0)
    trained = pair.trained
    if who:
        trained.model.shift.add_(1)  # as running statistics would: the group's rank 0 has those that count
    pair.same_weights()
    trained.load_full_state_dict(trained.full_state_dict())
    same("the buffer of the group", trained.model.shift, pair.plain.shift)
    dist.barrier()
    with refused("group", error=ValueError):
        odd(engine, group=groups[1 - side])
    dist.barrier()


@holds("values", ask(ranks=4, chapters=STAGES, of_mesh=False), ask(ranks=4, of_mesh=True))
def one_dimension_of_a_mesh_is_a_group(engine, of_mesh):
    """A mesh of one dimension, or its group, may be given: of four ranks as 2 x 2 each pair trains alone."""
    square = mesh(tensor=2, data=2)
    row = square.get_local_rank("tensor")
    group = square["data"] if of_mesh else square.get_group("data")

    def batch(step, who):
        return token_batch(step, 2 * row + who)

    pair = Pair(engine, OddModel, DECAY, seed=row, group=group, batch=batch)
    pair.alike(3)
    if not (engine.foreign or engine.chapter):
        trained = pair.trained
        same("world size and rank", (trained.world_size, trained.rank), (2, engine.rank % 2))
        whole, shards, _ = sizes_of_layout(trained)
        same("elements of all buckets", whole, 2 * shards)


# Grids of replicas and shards.


@holds("values", ask(ranks=(2, 4)))
def a_grid_trains_as_one_process(engine):
    """On 2 x 2, 1 x 2 and 2 x 1 ranks the engine trains as one process on all data, from what rank 0 begins with.

    Also if it clips twice in a step: what was averaged stays averaged when a later backward adds to it.
    """
    for shape in ((2, 2),) if engine.size == 4 else ((1, 2), (2, 1)):
        # All comes from rank 0, buffers too, and nothing from a row's first rank.
        pair = Pair(engine, (started_by(0), started_by(engine.rank)), DECAY, group=grid(*shape))
        same("rank and size of the row", (pair.trained.rank, pair.trained.world_size), (pair.rank % shape[1], shape[1]))
        pair.train(2)
        for step in range(2, 4):
            for part in range(2):
                pair.backward(2 * step + part)
                pair.clip(0.1)
            pair.step()
        pair.same_weights()


@stages_hold("life", only("zero2", 3, more_ranks=()))
def a_grid_over_some_of_the_ranks_needs_no_other(engine):
    """Ranks 0 and 1 of three are two replicas, and rank 2 is not asked for anything.

    With NCCL and a device that the world is bound to, torch would split the new group off the world's connections, and
    wait for rank 2.
    """
    world, bound = dist.group.WORLD, torch.device("cuda", engine.rank)
    two = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicas", "shards"))
    world.bound_device_id = bound
    try:
        if engine.rank < 2:
            split = AssertionError("the new group would be split off the world's")
            with mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=split):
                trained = odd(engine, group=two)
            same("the ranks of both dimensions", dist.get_process_group_ranks(trained.placement.everyone), [0, 1])
        same("the device that the world is bound to", world.bound_device_id, bound)
    finally:
        world.bound_device_id = None


# Tensor parallelism.

WIDTH = 16


class Layer(nn.Module):
    """The MLP of a transformer: a matrix to be cut by columns, and one by rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def small() -> nn.Module:
    head = nn.Linear(WIDTH, 256, bias=False)
    return nn.Sequential(nn.Embedding(256, WIDTH), Layer(), Layer(), nn.LayerNorm(WIDTH), head)


def cut_by(mesh, sequence: bool) -> nn.Module:
    """Megatron's cut of each block; with `sequence` the norms are DTensors too, and work on a part of the sequence."""
    model = seeded(small)
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    if sequence:
        norm, part = parallel.SequenceParallel(use_local_output=True), Shard(1)
        plan = {
            "norm": norm,
            "up": parallel.ColwiseParallel(input_layouts=part),
            "down": parallel.RowwiseParallel(output_layouts=part),
        }
        outside = {  # the embedding's output is cut, and the logits are whole again
            "0": parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=part),
            "3": norm,
            "4": parallel.ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
        }
        parallel.parallelize_module(model, mesh, outside)
    for block in (model[1], model[2]):
        parallel.parallelize_module(block, mesh, plan)
    return model


@holds("values", ask(ranks=4, sequence=True), ask_thorough(ranks=4, sequence=False))
def tensor_parallelism_beside_it_changes_nothing(engine, sequence):
    """Losses, norms and weights are those of one process; an overflow in one part is heard; each shards its own part.

    Products are cut, and their sums have another order: in float64, to 1e-11.
    """
    square = mesh(data=2, tensor=2)
    built = seeded(small), cut_by(square["tensor"], sequence)
    pair = Pair(engine, built, ADAMW, loss=of_bytes, batch=byte_batch, atol=1e-11,
                group=square["data"])  # fmt: skip
    trained, model = pair.trained, built[1]
    assert isinstance(model[1].up.weight, DTensor), "nothing is parallel"

    def spoil(trained):
        trained.clip_grad_norm_(1e9)  # the gradients are averaged then
        if engine.rank == 3:  # in one part of one rank
            pieces_of(trained)[0].grad[0] = torch.inf

    scaler = scaler_of(engine, init_scale=4.0)
    pair.scaled_step(0, scaler, 0.5)
    pair.scaled_step(1, scaler, 0.5, skipped=True, spoil=spoil)
    pair.scaled_step(2, scaler, 0.5)
    same("the scale", scaler.get_scale(), 2.0)
    pair.same_weights()
    other = {name: value + 1 for name, value in trained.full_state_dict().items()}
    trained.load_full_state_dict(other)
    same("the state that was loaded", trained.full_state_dict(), other)  # copies

    # Each rank has a quarter of what both dimensions cut, and half of the rest.
    cut = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor) and p.placements[0].is_shard())
    least = cut / 4 + (sum(p.numel() for p in model.parameters()) - cut) / 2
    most = least + 2 * 8 * len(list(model.parameters()))  # with padding
    _, held, _ = sizes_of_layout(trained)
    expect(least <= held <= most, "elements of this rank's shards", f"{least:.0f} to {most:.0f}", held)
    row, column = (tuple(dist.get_process_group_ranks(square.get_group(name))) for name in ("data", "tensor"))
    with TrafficLedger() as traffic:
        trained.training_step(*byte_batch(9, pair.rank), next_token_loss)
    own = [one for one in traffic.collectives if one.step.startswith(("3", "5"))]
    same("who sends gradients and parameters", {one.ranks for one in own} | {column}, {row, column})
    kinds = {one.kind for one in own if one.ranks == row and one.whole_bytes > 8 * WIDTH}
    reduced = "all-reduce" if engine.like == "zero1" else "reduce-scatter"
    same("collectives of the data dimension", kinds, {"all-gather", reduced})
    # Sequence parallelism leaves the norms' gradients as parts of a sum: that is all that crosses the tensor dimension.
    across = {one.whole_bytes for one in own if one.ranks == column} - ({8 * WIDTH} if sequence else set())
    same("bytes of what else crosses the tensor dimension", across, set())
    for act in (checkpoint.save, checkpoint.load):
        with refused("full_state_dict", error=ValueError):
            act(trained, "/nowhere")
    trained.close()
    assert isinstance(model[1].up.weight, DTensor), "the closed model's weights are no DTensors"


# Pipelines.


@stages_hold(
    "values",
    ask(("zero1", "zero3"), 4, more_ranks=8, kind="GPipe", optimizer=SGD),
    ask(("zero2", "zero3"), 4, more_ranks=8, kind="1F1B", optimizer=ADAMW, scaled=False),
    ask_thorough(ranks=(4, 8), kind="1F1B", optimizer=SGD),
    ask_thorough(ranks=(4, 8), kind="GPipe", optimizer=ADAMW),
    ask_thorough(ranks=8, kind="1F1B", optimizer=SGD, sequence=True),
)
def a_stage_of_a_pipeline_trains_as_one_process(engine, kind, optimizer, scaled=True, sequence=False):
    """The parts of a pipeline train as the whole model does in one process; with 8 ranks they are cut by tensor too.

    Who wraps the model, as DDP does, is handed over in another way, and not asked.

    By default the schedule divides the gradients by the number of micro-batches itself, once all have come back.
    Without `scaled` the loss is divided. With `sequence` all parameters of the last part are DTensors.
    """
    cube = mesh(stages=2, data=2, tensor=engine.size // 4)
    cut = cube["tensor"].size() > 1
    model = cut_by(cube["tensor"], sequence) if cut else seeded(small)
    index, count = cube.get_local_rank("stages"), 4
    batch = functools.partial(byte_batch, rows=2 * count)
    built = seeded(small), (model[:2], model[2:])[index]
    pair = Pair(engine, built, optimizer, batch=batch, atol=1e-11 if cut else EXACT, group=cube["data"])
    # What the pipeline calls is the model, with the engine's hooks.
    stage = pipelining.PipelineStage(pair.model, index, 2, torch.device("cpu"), group=cube.get_group("stages"))

    def loss(logits, targets):
        return next_token_loss(logits, targets) / (1 if scaled else count)

    schedule = pipelining.schedules.get_schedule_class(kind)(stage, count, loss_fn=loss, scale_grads=scaled)

    def way(model, batch, scale):
        if model is pair.plain:
            return (of_bytes(model, *batch) * scale).backward()
        inputs = [batch[0].contiguous()] if index == 0 else []  # torch 2.11 wants them so
        schedule.step(*inputs, target=batch[1] if index else None)

    for step in range(3):
        pair.backward_by(way, step)
        pair.step()
    found = pair.trained.full_state_dict()
    assert found, "this part has no weights"
    same("the weights", found, {name: pair.plain.state_dict()[name] for name in found}, pair.atol)


@holds("misuse", ask(ranks=4))
def meshes_that_do_not_fit_are_refused(engine):
    """A mesh of three dimensions, replicas with other options, and DTensors in the stage's own dimension are refused.

    All before anything could hang. Beside DTensors mixed precision is refused as well.
    """
    cube = mesh(replicas=2, shards=2, c=1)
    others = {"group": cube["replicas", "shards"], "find_unused": engine.rank > 1}
    square = mesh(data=2, tensor=2)
    for tensor, options, word in (
        (False, {"group": cube}, "3 dimensions"),
        (False, others, "rank(s) [2, 3]"),
        (True, {}, "another* dimension"),
        (True, {"group": square["tensor"]}, "another* dimension"),
        (True, {"group": square["data"], "param_dtype": torch.bfloat16}, "param_dtype"),
    ):
        model = cut_by(square["tensor"], sequence=False) if tensor else seeded(small)
        with refused(word, error=ValueError):
            engine(model, ADAMW, **options)
    engine(seeded(small), ADAMW, group=cube["replicas", "shards"])  # two of three will do


# Offload: shards, their gradients and the optimizer state in the memory of the host (`CPUOffloadPolicy`).

HALF = {"param_dtype": torch.float16, "reduce_dtype": torch.float64}


@holds("values", ask(more_ranks=4), ask("zero3", 4, **HALF), ask_thorough(ranks=2, **HALF))
def offload_changes_nothing(engine, **options):
    """Losses, norms and weights are right with offload, through micro-batches, clipping, a scaler, a checkpoint.

    On four ranks the shards are on a grid of 2 x 2.
    """
    options = {**options, "group": grid() if engine.size > 2 else None}
    policy = CPUOffloadPolicy(pin_memory=True)
    pair = Pair(engine, PartlyFrozen, ADAMW, offload_policy=policy, **options)
    scaler = scaler_of(engine, init_scale=4.0, enabled="param_dtype" in options)
    for step in range(4):
        # In the first steps both backwards send, and shards add up; in the others the first sends nothing.
        pair.backward(2 * step, scale=scaler.get_scale(), quiet=step > 1)
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
        addresses = {each.untyped_storage()._cdata for each in (bucket.shard, bucket.flat)}
        assert len(addresses) == 2, "the shard's memory is a part of the gathered buffer"


@holds("order")
def the_host_waits_for_copies(engine):
    """The host waits for copies before the update and before it adds to a gradient, and no copy overtakes.

    A device that only notes what is asked of it stands in. On a GPU each direction has a stream of its own.
    """
    device, rank = mock.MagicMock(), engine.rank
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

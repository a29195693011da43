"""Hybrid sharding: a DeviceMesh of two dimensions, replicated over the first and sharded over the second."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.engine.gradients import GradScaler
from harness.measure.traffic import TrafficLedger
from harness.properties import models, parts
from harness.properties.groups import Branches
from harness.properties.overlap import late_collectives, replaced
from harness.properties.precision import FP32, FP64, LOW, trains_like_fsdp2
from harness.properties.property import holds, refused, same
from harness.properties.training import Pair
from harness.run.model import next_token_loss


def grid(replicas: int = 2, shards: int = 2):
    return parts.mesh(replicas, shards, names=("replicas", "shards"))


@holds("values", sizes=(4,), cases=({"micro_batches": 3, "no_sync": True}, {"max_norm": 0.1}), further_cases=({}, LOW))
def hybrid_sharding_equals_fsdp2s(engine, max_norm=None, **how):
    """On 2 x 2 ranks losses and weights equal FSDP2's on the same mesh, to the bit where nothing is clipped.

    Both add two shards of a row, and then two rows: sums of two numbers, whose halves are exact. A norm adds up as many
    numbers as there are parameters, in other orders: with clipping in float64, to 1e-12.
    """
    own = FP32 if max_norm is None else FP64
    trains_like_fsdp2(engine, grid(), own, max_norm=max_norm, group=grid(), **how)
    dist.barrier()


@holds("values", sizes=(2, 4))
def a_grid_trains_as_one_process(engine):
    """On 2 x 2, 1 x 2 and 2 x 1 ranks the engine trains as one process on all data, from what rank 0 begins with.

    Also if it clips twice in a step: what was averaged stays averaged when a later backward adds to it.
    """
    for shape in ((2, 2),) if dist.get_world_size() == 4 else ((1, 2), (2, 1)):
        plain, model = parts.seeded(parts.OddModel), parts.seeded(parts.OddModel, seed=dist.get_rank())
        model.shift.add_(dist.get_rank())  # a buffer, which comes from rank 0 as well, and not from a row's first rank
        given = iter((plain, model))
        pair = Pair(engine, lambda: next(given), parts.DECAY, group=grid(*shape))  # noqa: B023  called at once
        same("rank and size of the row", (pair.trained.rank, pair.trained.world_size), (pair.rank % shape[1], shape[1]))
        pair.train(2)
        for step in range(2, 4):
            for part in range(2):
                pair.backward(2 * step + part)
                pair.clip(0.1)
            pair.step()
        pair.same_weights()
    dist.barrier()


@holds("order", sizes=(4,))
def replicas_answer_while_backward_goes_on(engine):
    """A shard's all-reduce travels while backward goes on, and however late it comes, all is right.

    It is not waited for before the next bucket is sent.
    """
    options = {"bucket_mb": 0.001} if engine.like == "zero2" else {}
    pair, meanwhile = Pair(engine, parts.OddModel, group=grid(), **options), []
    with late_collectives() as pending:
        issue = dist.reduce_scatter_single

        def spy(*arguments, **keywords):
            meanwhile.append([work.name for work in pending].count("all_reduce"))
            return issue(*arguments, **keywords)

        with replaced(reduce_scatter_single=spy):
            pair.train(3)
        with torch.no_grad():
            pair.trained(pair.batch(0, pair.rank)[0])
        same("collectives that nobody has waited for", [work.name for work in pending], [])
    if engine.like in ("zero2", "zero3"):
        buckets = len(meanwhile) // 3
        assert buckets >= 3, "there are too few buckets to see one travel"
        expected = ([0] + [1] * (buckets - 1)) * 3
        same("all-reduces that travel when a reduce-scatter is issued", meanwhile, expected, step=3)
    pair.same_weights()
    dist.barrier()


@holds("traffic", sizes=(4,))
def only_shards_gradients_cross_to_the_replicas(engine):
    """Across replicas only the shards' gradients go. All else stays in the row."""
    engine.needs("zero1", "zero2", "zero3")
    rank, mesh = dist.get_rank(), grid()
    trained = engine(models.gpt(), parts.ADAMW, group=mesh)
    row, column = (tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in ("shards", "replicas"))
    trained.training_step(*models.byte_batch(0, rank), next_token_loss)
    with TrafficLedger() as traffic:
        trained.training_step(*models.byte_batch(1, rank), next_token_loss)
    sent = {}
    for one in traffic.collectives:
        sent[one.ranks, one.kind] = sent.get((one.ranks, one.kind), 0) + one.sent_elements
    numel = gathered = sum(bucket.numel for bucket in trained.trained_buckets)
    if engine.like == "zero3":
        gathered = 2 * numel - sum(bucket.numel for bucket in trained.root.buckets)  # the root once per step
    whole = engine.like == "zero1"
    expected = {
        (row, "all-gather"): gathered / 2,
        (row, "all-reduce" if whole else "reduce-scatter"): numel if whole else numel / 2,
        (column, "all-reduce"): numel / 2,  # an all-reduce of a shard over two replicas sends it once
    }
    same("elements that are sent, by ranks and kind", sent, {key: expected[key] for key in sent}, step=3)
    same("who sends what", set(sent), set(expected), step=3)
    dist.barrier()


@holds("values", sizes=(4,))
def replicas_agree_on_what_is_unused_and_on_overflows(engine):
    """Each replica uses a head of its own and nobody the third; one rank of four overflows, and all skip the step."""

    def batch(step, who):
        x, y = parts.vector_batch(step, who, 5, torch.float64)
        return x, y[:, :3], who // 2, torch.inf if step == 1 and who == 3 else 1.0

    given = iter((parts.seeded(Branches), model := parts.seeded(Branches)))
    # All ranks must run the same units; a head, which is none here, is gathered with the root.
    options = {"units": [model.blocks[0]]} if engine.like == "zero3" else {}
    pair = Pair(engine, lambda: next(given), parts.DECAY, batch=batch, group=grid(), find_unused=True, **options,
                loss=lambda model, x, y, head, factor: F.mse_loss(model(x, head), y) * factor)  # fmt: skip
    scaler = engine.more.get("scaler", GradScaler)("cpu", init_scale=4.0)
    for step in range(4):
        pair.scaled_step(step, scaler, 0.1, skipped=step == 1)
    same("the scale", scaler.get_scale(), 2.0, step=4)
    pair.same_weights()
    dist.barrier()


@holds("values", sizes=(4,))
def a_checkpoint_goes_on_in_another_layout(engine):
    """Saved on 2 x 2, loaded on all four, saved and loaded on 2 x 2 again: the run is one run."""
    rank, written = dist.get_rank(), []
    pair = Pair(engine, parts.OddModel, parts.ADAMW, group=grid())
    with parts.folder() as folder:
        for replicas, group in ((True, None), (False, grid())):
            pair.train(2)
            if replicas:
                saved = checkpoint.save(pair.trained, folder, mine=rank)
            else:
                saved = checkpoint.async_save(pair.trained, folder, mine=rank).result()
            written.append(saved.nbytes)
            pair.trained = engine(parts.seeded(parts.OddModel, seed=rank), parts.ADAMW, group=group)
            same("what was saved besides", checkpoint.load(pair.trained, folder), {"mine": rank})
        pair.train(2)
    pair.same_weights()
    # On the grid one replica writes, and the other some small things.
    same("whether this rank wrote shards", [nbytes > 10_000 for nbytes in written], [rank < 2, True])


@holds("misuse", sizes=(4,))
def meshes_that_do_not_fit_are_refused(engine):
    """A mesh of three dimensions is refused, and replicas with other options before anything could hang."""
    cube = parts.mesh(2, 2, 1, names=("a", "b", "c"))
    refused(lambda: engine(models.gpt(), parts.ADAMW, group=cube), "3 dimensions", error=ValueError)
    trained = engine(models.gpt(), parts.ADAMW, group=cube["a", "b"])  # two of them
    trained.training_step(*models.byte_batch(0, dist.get_rank()), next_token_loss)
    options = {"group": cube["a", "b"], "find_unused": dist.get_rank() > 1}
    refused(lambda: engine(models.gpt(), parts.ADAMW, **options), "rank(s) [2, 3]", error=ValueError)
    dist.barrier()


@holds("life", engines=("zero2",), sizes=(3,))
def a_grid_over_some_of_the_ranks_needs_no_other(engine):
    """Ranks 0 and 1 of three are two replicas, and rank 2 is not asked for anything.

    With NCCL and a device that the world is bound to, torch would split the new group off the world's connections, and
    wait for rank 2.
    """
    world, bound = dist.group.WORLD, torch.device("cuda", dist.get_rank())
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicas", "shards"))
    world.bound_device_id = bound
    try:
        if dist.get_rank() < 2:
            split = AssertionError("the new group would be split off the world's")
            with mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=split):
                trained = engine(parts.seeded(parts.OddModel), parts.SGD, group=mesh)
            same("the ranks of both dimensions", dist.get_process_group_ranks(trained.placement.everyone), [0, 1])
        same("the device that the world is bound to", world.bound_device_id, bound)
    finally:
        world.bound_device_id = None

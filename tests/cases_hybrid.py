"""Run on four ranks in a grid of 2 x 2: hybrid sharding."""

from functools import partial
from unittest import mock

import parts
import torch
import torch.distributed as dist
from cases_overlap import late_collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.engine import checkpoint
from harness.engine.gradients import GradScaler
from harness.measure.traffic import TrafficLedger
from harness.run.model import GPT, next_token_loss, preset

ADAMW = partial(torch.optim.AdamW, lr=3e-3)
CONFIG = preset("toy")


def grid(replicas: int = 2, shards: int = 2):
    return parts.mesh(replicas, shards, names=("replicas", "shards"))


def batch(step: int, who: int):
    generator = torch.Generator().manual_seed(77 * step + who)
    rows = torch.randint(256, (3, CONFIG.seq + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def gpt(dtype=torch.float32):
    return parts.seeded(lambda: GPT(CONFIG), dtype=dtype)


def like_fsdp2(stage: str, dtypes: tuple = (None, None), micro_batches: int = 1, max_norm: float | None = None) -> None:
    """To the bit: the sums have two terms each, in both dimensions."""
    rank, mesh = dist.get_rank(), grid()
    fsdp, policy = gpt(), MixedPrecisionPolicy(*dtypes)
    for block in fsdp.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(fsdp, mesh=mesh, mp_policy=policy)
    optimizer = ADAMW(fsdp.parameters())
    engine = parts.STAGES[stage](gpt(), ADAMW, group=mesh, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    assert (engine.rank, engine.world_size) == (rank % 2, 2)
    norms = []
    for step in range(6):
        for number in range(micro_batches):
            last = number == micro_batches - 1
            inputs, targets = batch(step * micro_batches + number, rank)
            fsdp.set_requires_gradient_sync(last)
            expected = next_token_loss(fsdp(inputs).float(), targets)
            (expected / micro_batches).backward()
            # In ZeRO-2 and -3 what is not sent adds up whole, as FSDP2 keeps it.
            with engine.no_sync() if not last else torch.enable_grad():
                loss = next_token_loss(engine(inputs).float(), targets)
                (loss / micro_batches).backward()
            assert torch.equal(loss, expected), (step, loss.item(), expected.item())
        if max_norm is not None:
            norms = [torch.nn.utils.clip_grad_norm_(fsdp.parameters(), max_norm), engine.clip_grad_norm_(max_norm)]
            torch.testing.assert_close(norms[1], norms[0].full_tensor(), rtol=1e-6, atol=0)
            break  # the norms' last bits differ, and all that follows
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        engine.zero_grad()
    state = engine.full_state_dict()
    if max_norm is None:
        expected = {name: param.full_tensor().detach() for name, param in fsdp.named_parameters()}
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    dist.barrier()


def like_ddp(stage: str) -> None:
    """Against DDP on all four ranks, in float64; every rank has other data."""
    rank, config = dist.get_rank(), torch.float64
    ddp = DistributedDataParallel(gpt(config))
    optimizer = ADAMW(ddp.parameters())
    engine = parts.STAGES[stage](parts.seeded(lambda: GPT(CONFIG), seed=rank, dtype=config), ADAMW, group=grid())
    engine.load_full_state_dict(gpt(config).state_dict())
    for step in range(5):
        expected = next_token_loss(ddp(batch(step, rank)[0]), batch(step, rank)[1])
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = engine.training_step(*batch(step, rank), next_token_loss)
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    parts.assert_same_state(engine.full_state_dict(), ddp.module.state_dict(), atol=1e-12)


def however_late_the_replicas_answer(stage: str) -> None:
    """A shard's all-reduce travels while backward goes on: it is not waited for before the next bucket is sent."""
    rank, meanwhile = dist.get_rank(), []
    plain = gpt(torch.float64)
    optimizer = ADAMW(plain.parameters())
    options = {"bucket_mb": 0.01} if stage == "zero2" else {}
    engine = parts.STAGES[stage](gpt(torch.float64), ADAMW, group=grid(), **options)
    with late_collectives() as pending:
        issue = dist.reduce_scatter_single

        def spy(*arguments, **keywords):
            meanwhile.append([work.name for work in pending])
            return issue(*arguments, **keywords)

        dist.reduce_scatter_single = spy  # put back with the others
        for step in range(3):
            for who in range(4):
                (next_token_loss(plain(batch(step, who)[0]), batch(step, who)[1]) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.training_step(*batch(step, rank), next_token_loss)
        with torch.no_grad():
            engine(batch(0, rank)[0])
        assert not pending, [work.name for work in pending]
    number = len(meanwhile) // 3
    if stage != "zero1":
        assert number >= 3
        for sends in (meanwhile[step * number : (step + 1) * number] for step in range(3)):
            assert [names.count("all_reduce") for names in sends] == [0] + [1] * (number - 1), sends
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    dist.barrier()


def rank_0_decides_how_all_begin(stage: str) -> None:
    """Parameters and buffers of all four are those of rank 0, not of each row's first rank."""
    rank = dist.get_rank()

    def build(seed):
        model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            for number, value in enumerate([*model.parameters(), model[1].running_mean]):
                value.fill_(10 * seed + number)
        return model

    engine = parts.STAGES[stage](build(rank), ADAMW, group=grid())
    if rank:
        engine.model[1].running_mean.add_(1)  # `full_state_dict` has rank 0's
    parts.assert_same_state(engine.full_state_dict(), build(0).state_dict(), atol=0)
    dist.barrier()


def bytes_by_dimension(stage: str) -> None:
    """Across replicas only the shards' gradients go. All else stays in the row."""
    rank, mesh = dist.get_rank(), grid()
    engine = parts.STAGES[stage](gpt(), ADAMW, group=mesh)
    row, column = (tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in ("shards", "replicas"))
    engine.training_step(*batch(0, rank), next_token_loss)
    with TrafficLedger() as traffic:
        engine.training_step(*batch(1, rank), next_token_loss)
    numel = sum(bucket.numel for bucket in engine.trained)
    sent = {}
    for one in traffic.collectives:
        sent[one.ranks, one.kind] = sent.get((one.ranks, one.kind), 0) + one.sent_elements
    gathered = numel
    if stage == "zero3":
        gathered = 2 * numel - sum(bucket.numel for bucket in engine.root.buckets)  # the root once per step
    reduced = "all-reduce" if stage == "zero1" else "reduce-scatter"
    assert sent == {
        (row, "all-gather"): gathered / 2,
        (row, reduced): numel / 2 * (2 if stage == "zero1" else 1),
        (column, "all-reduce"): 2 * (numel / 2) / 2,  # an all-reduce of a shard over two replicas
    }, sent
    dist.barrier()


class Branches(nn.Module):
    """Two heads; which one a rank uses depends on its replica."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.blocks[0](x)))


def unused_in_one_replica(stage: str) -> None:
    """Head 0 is used by replica 0 alone, head 1 by replica 1 alone, head 2 by nobody; and a scaler and clipping."""
    rank = dist.get_rank()
    plain = parts.seeded(Branches)
    optimizer = parts.DECAY(plain.parameters())
    model = parts.seeded(Branches, seed=rank)
    options = {"units": [model.blocks[0]]} if stage == "zero3" else {}
    engine = parts.STAGES[stage](model, parts.DECAY, group=grid(), find_unused=True, **options)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        for who in range(4):
            x, y = parts.vector_batch(step, who, 5, torch.float64)
            (F.mse_loss(plain(x, who // 2), y[:, :3]) / 4).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        overflow = step == 1
        if not overflow:
            optimizer.step()
        optimizer.zero_grad()
        x, y = parts.vector_batch(step, rank, 5, torch.float64)
        loss = F.mse_loss(engine(x, rank // 2), y[:, :3])
        scaler.scale(loss * torch.inf if overflow and rank == 3 else loss).backward()
        scaler.unscale_(engine)
        norm = engine.clip_grad_norm_(0.1)
        assert overflow or torch.allclose(norm, expected, rtol=1e-12, atol=0), (norm, expected)
        scaler.step(engine)
        scaler.update()
        engine.zero_grad()
    assert scaler.get_scale() == 2.0
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    dist.barrier()


def a_backward_after_clipping_adds(stage: str) -> None:
    """What was averaged stays averaged when a later backward of the same step adds to it."""
    rank = dist.get_rank()
    plain, model = (parts.seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)), seed) for seed in (0, rank))
    optimizer = parts.DECAY(plain.parameters())
    engine = parts.STAGES[stage](model, parts.DECAY, group=grid())
    for step in range(2):
        for part in range(2):
            for who in range(4):
                x, y = parts.vector_batch(2 * step + part, who, 5, torch.float64)
                (F.mse_loss(plain(x), y) / 4).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            x, y = parts.vector_batch(2 * step + part, rank, 5, torch.float64)
            F.mse_loss(engine(x), y).backward()
            torch.testing.assert_close(engine.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=0)
        for each in (optimizer, engine):
            each.step()
            each.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    dist.barrier()


def checkpoints_across_layouts(folder: str, stage: str) -> None:
    """2 x 2, all four, and 2 x 2 again: the run is one run."""
    rank, mesh = dist.get_rank(), grid()

    def build(group):
        return parts.STAGES[stage](
            parts.seeded(lambda: GPT(CONFIG), seed=rank, dtype=torch.float64), ADAMW, group=group
        )

    def train(engine, steps):
        return [engine.training_step(*batch(step, rank), next_token_loss) for step in steps]

    whole = build(mesh)
    first = whole.full_state_dict()
    expected = train(whole, range(6))
    engine = build(mesh)
    engine.load_full_state_dict(first)
    losses = train(engine, range(2))
    saved = checkpoint.save(engine, folder, mine=rank)
    assert (saved.nbytes > 10_000) == (rank < 2), saved  # one replica writes
    engine = build(None)
    assert checkpoint.load(engine, folder) == {"mine": rank}
    losses += train(engine, range(2, 4))
    checkpoint.async_save(engine, folder, mine=rank).result()
    engine = build(mesh)
    assert checkpoint.load(engine, folder) == {"mine": rank}
    losses += train(engine, range(4, 6))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0, atol=1e-12)
    dist.barrier()


def refusals(stage: str) -> None:
    cube = parts.mesh(2, 2, 1, names=("a", "b", "c"))
    try:
        parts.STAGES[stage](gpt(), ADAMW, group=cube)
    except ValueError as error:
        assert "3 dimensions" in str(error)
    else:
        raise AssertionError("a mesh of three dimensions was accepted")
    engine = parts.STAGES[stage](gpt(), ADAMW, group=cube["a", "b"])  # two of them
    engine.training_step(*batch(0, dist.get_rank()), next_token_loss)
    try:  # replicas with other options: found before anything could hang
        parts.STAGES[stage](gpt(), ADAMW, group=cube["a", "b"], find_unused=dist.get_rank() > 1)
    except ValueError as error:
        assert "rank(s) [2, 3]" in str(error)
    else:
        raise AssertionError("replicas with other options were accepted")
    dist.barrier()


def a_grid_of_one_row_or_column(stage: str) -> None:
    """Two ranks as 1 x 2 and as 2 x 1: sharded alone, and replicated alone."""
    rank = dist.get_rank()
    losses = []
    for mesh in (None, grid(1, 2), grid(2, 1)):
        engine = parts.STAGES[stage](gpt(), ADAMW, group=mesh)
        losses.append([engine.training_step(*batch(step, rank), next_token_loss).item() for step in range(3)])
    assert losses[0] == losses[1] == losses[2]


def a_mesh_over_a_part_of_the_ranks() -> None:
    """Ranks 0 and 1 of three, in two replicas. Their group must need nobody else.

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
                engine = parts.ZeRO2(parts.seeded(parts.OddModel), parts.OPTIMIZERS["sgd"], group=mesh)
            assert dist.get_process_group_ranks(engine.placement.everyone) == [0, 1]
        assert world.bound_device_id == bound
    finally:
        world.bound_device_id = None

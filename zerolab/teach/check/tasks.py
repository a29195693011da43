"""Tasks that are in no chapter: measures a student's class and the chapter's class in the same training."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3
from zerolab.measure.held import storage_bytes, storage_under
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.traffic import sent_bytes
from zerolab.teach.check import cases, models
from zerolab.teach.check.findings import Differs, expect
from zerolab.teach.check.recorder import Issued, Recorder
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import Target, Task

CHAPTERS = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}
RANKS_OF_A_MACHINE = 2
WIDTH, ROWS = 16, 64


def judge(name: str, target: Target, cls: type, recorder: Recorder, seed: int) -> None:
    """Raises what is not as the target demands.

    In all trainings the weights must be the chapter's. The targets that the chapter itself does not meet must hold for
    each point, because they are the task.
    """
    task = EXERCISES[name]
    if name == "clip_gradients":
        judge_clipping(target, cls, recorder, seed)
        return
    right, expected = train(task, CHAPTERS[task.chapter], recorder, seed)
    found, weights = train(task, cls, recorder, seed)
    same_weights("the weights after two steps", weights, expected)
    if name == "hidden_reduction":
        several_backwards(task, cls, seed)
        crossing_ranks(task, cls, seed)
    for each in task.targets:
        if not each.number:
            continue
        number, of_chapter = found[each.number], right[each.number]
        if each is target or not met(each, of_chapter, of_chapter):
            wanted = f"{each.least:,} or more" if each.most is None else f"at most {round(each.most * of_chapter):,}"
            what = f"{each.number} in a step (the chapter: {of_chapter:,.0f})"
            expect(met(each, number, of_chapter), what, wanted, f"{number:,.0f}")


def met(target: Target, number: float, of_chapter: float) -> bool:
    """Whether `number` is as the target demands, where the chapter has `of_chapter`."""
    if target.most is not None:
        return number <= round(target.most * of_chapter)
    return number >= target.least


# Trainings.


def train(task: Task, cls: type, recorder: Recorder, seed: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    """(numbers of the second of two steps, whole weights after them) on this rank."""
    recorder.begin(copies=False)
    numbers = {}
    with MemoryLedger() as memory:
        engine = build(task, cls, partial(models.uneven_blocks, WIDTH), seed)
        with gathered(engine.model) as found:
            for step in range(2):
                batches = micro_batches(task, step, seed)
                recorder.begin(copies=False)
                memory.reset_peak()
                if hasattr(engine, "accumulate"):
                    engine.accumulate(batches, F.mse_loss)
                    continue
                for inputs, targets in batches:
                    (F.mse_loss(engine(inputs), targets) / task.backwards).backward()
                numbers["collectives in backward"] = len(recorder.issued)
                numbers["in flight after backward"] = sum(each.in_flight for each in recorder.issued)
                engine.step()
                engine.zero_grad()
    issued = list(recorder.issued)
    across = [each for each in issued if crosses(each) and "reduce" not in each.kind]
    numbers |= {"bytes sent": sent(issued), "collectives": len(issued), "bytes alive at the worst moment": memory.peak}
    numbers["bytes gathered across machines"] = sent(across)
    numbers["bytes gathered at once"], numbers["buffers gathered at once"] = map(max, zip(*found))
    left = [each.what for each in issued if each.in_flight]
    expect(not left, "collectives that nobody has waited for", "none", ", ".join(left))
    recorder.begin(copies=False)
    return numbers, whole_weights(engine)


def build(task: Task, cls: type, make, seed: int, **options):
    # With a large eps the update depends on the gradient's size, so a sum in place of a mean shows.
    model = models.seeded(make, 100 * seed + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return cls(model, optimizer, group=everyone(), **(task.options | options))


def everyone() -> dist.ProcessGroup:
    return cases.groups_of(dist.group.WORLD).everyone


def micro_batches(task: Task, step: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for number in range(task.backwards):
        found.append(models.vectors(10 * step + number + 100 * seed, dist.get_rank(), WIDTH, ROWS))
    return found


def several_backwards(task: Task, cls: type, seed: int) -> None:
    """Two backwards in each step."""
    found = []
    for each in (CHAPTERS[task.chapter], cls):
        engine = build(task, each, partial(models.uneven_blocks, WIDTH), seed)
        for step in range(2):
            for number in range(2):
                inputs, targets = models.vectors(10 * step + number + 100 * seed, dist.get_rank(), WIDTH)
                F.mse_loss(engine(inputs), targets).backward()
            engine.step()
            engine.zero_grad()
        found.append(whole_weights(engine))
    same_weights("the weights after two steps of two backwards each", found[1], found[0])


def crossing_ranks(task: Task, cls: type, seed: int) -> None:
    """Every other rank runs the layers in the opposite order, so their gradients are finished in other orders.

    Each parameter has its own bucket, and all layers have one size, so mixed-up buckets are added without an error.
    """
    found = []
    for each in (CHAPTERS[task.chapter], cls):
        engine = build(task, each, partial(models.Lanes, (8, 8, 8, 8)), seed, bucket_mb=0)
        if dist.get_rank() % 2:
            engine.model.way.reverse()
        for step in range(2):
            engine.training_step(*models.vectors(step + 100 * seed, dist.get_rank(), 8, 8), F.mse_loss)
        found.append(whole_weights(engine))
    same_weights("the weights if ranks finish their gradients in different orders", found[1], found[0])


def whole_weights(engine) -> list[torch.Tensor]:
    """Copies of the model's parameters. A collective for ZeRO-3, which gathers them."""
    for unit in getattr(engine, "units", ()):
        unit.start_gather()
        unit.wait()
    weights = [param.detach().clone() for param in engine.model.parameters()]
    for unit in getattr(engine, "units", ()):
        unit.free()
    return weights


def same_weights(what: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for index, (mine, right) in enumerate(zip(found, expected)):
        if not torch.allclose(mine, right, rtol=0, atol=1e-9):
            most = (mine - right).abs().max().item()
            raise Differs(f"{what}, parameter {index}", "the chapter's", f"other weights, by {most:.3g} at most")


# Numbers.


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Yields (bytes, buffers) of the parameters that have memory, whenever a layer begins to compute, also backward."""
    found, hooks = [(0, 0)], []

    def look(*_) -> None:
        places = {storage._cdata for storage in map(storage_under, model.parameters()) if storage.nbytes()}
        found.append((storage_bytes(model.parameters()), len(places)))

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            hooks += [layer.register_forward_pre_hook(look), layer.register_full_backward_pre_hook(look)]
    yield found
    for hook in hooks:
        hook.remove()


def crosses(issued: Issued) -> bool:
    """Whether its ranks are on several machines."""
    return len({rank // RANKS_OF_A_MACHINE for rank in dist.get_process_group_ranks(issued.group)}) > 1


def sent(issued: list[Issued]) -> float:
    return sum(sent_bytes(each.kind, each.nbytes, each.group.size()) for each in issued)


# Clipping.


def judge_clipping(target: Target, cls: type, recorder: Recorder, seed: int) -> None:
    if target.number == "no numbers":
        clip_no_numbers(cls, seed)
        return
    most = 64 * dist.get_world_size()
    for norm_type, max_norm in product((2.0, 1.0, 3.0, math.inf), (0.05, 1e6)):
        issued = clip(cls, models.Odd, norm_type, max_norm, recorder, seed)
        if target.number == "bytes sent while clipping":
            nbytes = sum(each.nbytes for each in issued)
            expect(nbytes <= most, target.number, f"{most} at most, and no gradients", f"{nbytes:,}")
    for more in (True, False):
        clip(cls, partial(models.OneWeight, more), 2.0, 0.01, recorder, seed)


def clip(cls: type, make, norm_type: float, max_norm: float, recorder: Recorder, seed: int) -> list[Issued]:
    """Compares one clipping with what torch computes of the whole gradients. Returns its collectives."""
    when = f"with norm_type {norm_type:g} and max_norm {max_norm:g}"
    if make is not models.Odd:
        when += ", if some ranks own only padding"
    right, engine = (cases.build(each, everyone(), seed, make) for each in (ZeRO2, cls))
    for each in (right, engine):
        if make is models.Odd:
            cases.backward(each, seed)
        else:
            each(models.vectors(seed, dist.get_rank(), 2)[0]).square().sum().backward()
    right.reduce_gradients()
    own = torch.cat([bucket.shard.grad for bucket in right.buckets])  # padding is 0, and changes no norm
    whole = own.new_empty(own.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(whole, own)
    expected = torch.linalg.vector_norm(whole, norm_type)
    recorder.begin(copies=False)
    norm = engine.clip_grad_norm_(max_norm, norm_type)
    issued = list(recorder.issued)
    expect(isinstance(norm, torch.Tensor) and norm.dim() == 0, f"what clip_grad_norm_ returns {when}", "a 0-d tensor",
           type(norm).__name__)  # fmt: skip
    expect(norm.dtype == expected.dtype, f"the dtype of the norm {when}", expected.dtype, norm.dtype)
    expect(torch.allclose(norm, expected), f"the norm {when}", f"{expected.item():.9g}", f"{norm.item():.9g}")
    times = min(1.0, max_norm / (expected.item() + 1e-6))
    found = [bucket.shard.grad for bucket in engine.buckets]
    clipped = all(each is not None for each in found) and torch.allclose(torch.cat(found), own * times)
    expect(clipped, f"the shards' gradients {when}", f"{times:.9g} times what they were", "other gradients")
    groups = {each.group for each in issued} <= {everyone()}
    expect(groups, f"the group of a collective {when}", "the engine's", "another one")
    engine.step()
    return issued


def clip_no_numbers(cls: type, seed: int) -> None:
    for norm_type, rank, value in product((2.0, math.inf), range(dist.get_world_size()), (math.nan, math.inf)):
        engine = cases.build(cls, everyone(), seed)
        cases.backward(engine, seed)
        engine.reduce_gradients()
        if dist.get_rank() == rank:
            engine.buckets[0].shard.grad[0] = value
        norm = engine.clip_grad_norm_(0.05, norm_type)
        what = f"the norm with norm_type {norm_type:g}, where rank {rank} has a gradient of {value}"
        seen = math.isnan(norm.item()) if math.isnan(value) else math.isinf(norm.item())
        expect(seen, what, value, norm.item())

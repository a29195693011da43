"""Tasks that are in no chapter: in numbers, what a student's engine does beside what the chapter's class does."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from zerolab.measure.held import storage_bytes, storage_under
from zerolab.measure.traffic import sent_bytes
from zerolab.properties import fixtures
from zerolab.properties.property import expect, same, subject_class
from zerolab.run.engines import CHAPTERS
from zerolab.teach.articles.runs import Chain, chain
from zerolab.teach.check.cases import ADAMW, groups_of
from zerolab.teach.check.recorder import Issued, Recorder
from zerolab.teach.exercise import Exercise, Target

NODE = 2  # ranks that count as one machine
WIDTH = 16


def uneven() -> nn.Module:
    """Blocks of unequal size: the one in the middle has eight layers, the six others have one."""
    return Chain(*[chain(layers, WIDTH) for layers in (1, 1, 1, 8, 1, 1, 1)])


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
    return len({rank // NODE for rank in dist.get_process_group_ranks(issued.group)}) > 1


def sent(issued: list[Issued]) -> float:
    return sum(sent_bytes(each.kind, each.nbytes, each.group.size()) for each in issued)


def trained(task: Exercise, cls: type, recorder: Recorder, seed: int) -> tuple[dict, dict[str, float]]:
    """(whole weights after two steps, numbers of the second step; what is gathered, of both), on this rank."""
    rank, numbers = dist.get_rank(), {}
    model = fixtures.seeded(uneven, 100 * seed + rank, torch.float64)
    engine = subject_class(cls)(model, ADAMW(model.parameters()), group=groups_of(dist.group.WORLD).all, **task.options)
    with gathered(model) as found:
        for step in range(2):
            batches = []
            for number in range(task.backwards):
                batches.append(fixtures.vector_batch(10 * step + number + 100 * seed, rank, WIDTH, torch.float64))
            recorder.forget()
            if hasattr(engine, "accumulate"):
                engine.accumulate(batches, F.mse_loss)
                continue
            for inputs, targets in batches:
                (F.mse_loss(engine(inputs), targets) / task.backwards).backward()
            numbers["collectives in backward"] = len(recorder.issued)
            numbers["in flight behind it"] = sum(each.in_flight for each in recorder.issued)
            engine.step()
            engine.zero_grad()
    across = [each for each in recorder.issued if crosses(each) and "reduce" not in each.kind]
    numbers |= {"bytes sent": sent(recorder.issued), "collectives": len(recorder.issued)}
    numbers["bytes gathered across machines"] = sent(across)
    numbers["bytes gathered at once"], numbers["buffers gathered at once"] = map(max, zip(*found))
    left = [each.what for each in recorder.issued if each.in_flight]
    expect(not left, "collectives that nobody has waited for", "none", ", ".join(left))
    recorder.forget()
    return engine.full_state_dict(), numbers


def met(target: Target, number: float, of_chapter: float) -> bool:
    """Whether `number` is as the target demands, where the chapter has `of_chapter`."""
    if target.most is not None:
        return number <= round(target.most * of_chapter)
    return number >= target.least


def judge(task: Exercise, target: Target, cls: type, recorder: Recorder, seed: int) -> None:
    """Raises what is not as the target demands: weights as the chapter's, and so much of a number, or so little.

    What the chapter does not meet as it stands must hold for each point: that is the task itself.
    """
    chapter = CHAPTERS[task.source.removesuffix(".py")]
    expected, right = trained(task, chapter, recorder, seed)
    weights, found = trained(task, cls, recorder, seed)
    same("the weights after two steps", weights, expected, atol=1e-9)
    for each in task.targets:
        if not each.number:
            continue
        number, of_chapter = found[each.number], right[each.number]
        if each is target or not met(each, of_chapter, of_chapter):
            wanted = f"{each.least:,} or more" if each.most is None else f"at most {round(each.most * of_chapter):,}"
            what = f"{each.number} in a step ({chapter.__name__}: {of_chapter:,.0f})"
            expect(met(each, number, of_chapter), what, wanted, f"{number:,.0f}")

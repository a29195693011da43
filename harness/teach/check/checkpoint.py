"""The checks of the exercise `checkpoint`: what a rank writes of a tensor, and that any number of ranks loads it."""

import contextlib
import itertools
import math
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zero1
import zero2
import zero3
from harness.engine import checkpoint, checkpoint_fit, layout
from harness.run.shared_folder import shared_folder
from harness.run.small_models import seeded
from harness.teach.check import rectangles
from harness.teach.check.sheet import ADAMW, SMALL, Sheet

# Those first whose pictures say most; then every range of every shape.
SHOWN = [
    ((6, 6), [(8, 27), (6, 24), (8, 24), (6, 27), (8, 11), (8, 15), (12, 15), (33, 36), (0, 36)]),
    ((9,), [(2, 7)]),
    ((3, 4, 5), [(7, 52), (20, 40), (20, 47), (26, 40), (21, 38), (2, 58)]),
]
SHAPES = [(7,), (1,), (5, 3), (1, 6), (6, 1), (), (4, 1, 3), (2, 3, 4), (3, 2, 2, 5), (2, 1, 2, 2, 2), (0,), (2, 0, 3)]


def ranges():
    """(shape, first, end) of all that is tried, empty ranges too, at the beginning, in the middle and at the end."""
    for shape, some in SHOWN:
        yield from ((shape, first, end) for first, end in some)
    for shape in SHAPES:
        pairs = itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2)
        yield from sorted(((shape, first, end) for first, end in pairs), key=lambda each: each[1] == each[2])


def cut(sheet: Sheet) -> None:
    for shape, first, end in ranges():
        call = f"rectangles({shape}, {first}, {end})"
        sheet.at = f", {call}"  # in front of what it raises
        found = sheet.student.rectangles(shape, first, end)
        sheet.at = ""
        problem = rectangles.problem(shape, first, end, found)
        if problem is not None:
            expected, said, picture = problem
            return sheet.expect(False, call, expected, said, picture)


def give(sheet: Sheet) -> None:
    for shape, first, end in itertools.islice(ranges(), 0, None, 3):  # a third of them will do
        numbers = torch.arange(math.prod(shape), dtype=torch.float64) + 1
        part, whole = numbers[first:end], numbers.reshape(shape)
        sheet.at = f", Cut.of(elements {first} to {end - 1} of a tensor of shape {shape})"
        boxes = sheet.student.Cut.of(part, shape, first).boxes
        expected = list(sheet.student.rectangles(shape, first, end))
        sheet.expect(list(boxes) == [offsets for offsets, _ in expected], "cut.boxes",
                     f"keys {[offsets for offsets, _ in expected]}", f"keys {list(boxes)}")  # fmt: skip
        for offsets, sizes in () if sheet.findings else expected:
            what, box = f"cut.boxes[{offsets}]", boxes[offsets]
            place = tuple(slice(o, o + size) for o, size in zip(offsets, sizes))
            sheet.same(what, box, whole[place])
            if not sheet.findings:
                view = box.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr()
                sheet.expect(view, what, "a view of `part`", "a copy")
        if sheet.findings:
            return
    sheet.at = ""


class Shapes(nn.Module):
    """Parameters of no, one and more dimensions, and one without elements, that N rarely divides."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.some = nn.ParameterList(torch.randn(shape) for shape in ((7,), (5, 7), (3, 4, 5), (3, 2, 2, 5), (0, 3)))

    def forward(self, x):
        return x + self.scale * sum((param * x.mean()).square().sum() for param in self.some)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Shapes() for _ in range(2))
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def _engine(sheet: Sheet, stage: str, group, seed: int = 0):
    model = seeded(Model, seed, torch.float64, sheet.device)
    cls = {"zero1": zero1.ZeRO1, "zero2": zero2.ZeRO2, "zero3": zero3.ZeRO3}[stage]
    return cls(model, ADAMW, group=group, **({} if stage == "zero3" else SMALL))


def _train(sheet: Sheet, engine, step: int) -> torch.Tensor:
    """One step, with other data on every rank."""
    generator = torch.Generator().manual_seed(100 * step + sheet.rank)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64).to(sheet.device)
    return engine.training_step(x, x.sum(-1), lambda out, y: (out.sum(-1) - y).square().mean())


@contextlib.contextmanager
def _cut_by(student):
    """Inside, whoever saves or loads a checkpoint cuts tensors as the student's file does."""
    with mock.patch.object(checkpoint, "Cut", student.Cut), mock.patch.object(checkpoint_fit, "Cut", student.Cut):
        yield


def _moments(engine) -> dict:
    """{(name, key): (first element, elements)} of what this rank's optimizer has."""
    pieces = [(name, first, engine.optimizer.state[piece]) for name, piece, _, first in layout.pieces(engine)]
    return {(name, key): (first, state[key]) for name, first, state in pieces for key in ("exp_avg", "exp_avg_sq")}


def read_by_torch(sheet: Sheet) -> None:
    """N ranks save; then each reads all of it alone, by torch's reader, which knows nothing of a `Cut`."""
    for stage in ("zero1", "zero3"):
        engine = _engine(sheet, stage, sheet.group)
        _train(sheet, engine, 0)
        right, own, alone = engine.full_state_dict(), _moments(engine), sheet.groups.alone
        at = f", saved by {stage} on {sheet.world_size} ranks"
        with shared_folder(sheet.group) as folder, _cut_by(sheet.student):
            path = checkpoint.save(engine, folder).path
            model = {name: torch.full_like(value, math.nan) for name, value in right.items()}
            state = {name: {} for name, _ in own}
            for name, key in own:
                state[name][key] = torch.full_like(right[name], math.nan)
            dcp.load({"model": model, "optim": {"state": state}}, checkpoint_id=path, process_group=alone)
        for name, value in right.items():
            sheet.same(f"the weight {name}{at}", model[name], value)
        for (name, key), (first, values) in own.items():
            found = state[name][key].flatten()[first : first + values.numel()]
            sheet.same(f"{key} of {name}, this rank's elements{at}", found, values.cpu())
        dist.barrier(sheet.group)


def loaded_elsewhere(sheet: Sheet) -> None:
    """N ranks save, one rank loads and saves again, N ranks load that in another stage, and training goes on."""
    engine, n = _engine(sheet, "zero3", sheet.group), sheet.world_size
    _train(sheet, engine, 0)
    right = engine.full_state_dict()
    with shared_folder(sheet.group) as folder, _cut_by(sheet.student):
        checkpoint.save(engine, Path(folder, "all"))
        one = _engine(sheet, "zero1", sheet.groups.alone, seed=5)
        checkpoint.load(one, Path(folder, "all"))
        again = one.full_state_dict()
        for name, value in right.items():
            sheet.same(f"the weight {name}, saved by {n} ranks, loaded by one", again[name], value)
        checkpoint.save(one, Path(folder, f"one{sheet.rank}"))
        dist.barrier(sheet.group)
        other = _engine(sheet, "zero2", sheet.group, seed=9)
        checkpoint.load(other, Path(folder, "one0"))
    for step in (1, 2):
        expected, found = _train(sheet, engine, step), _train(sheet, other, step)
        sheet.same(f"the loss of step {step + 1}, saved by {n} ranks, then by one, and loaded by {n}", found, expected)


FOR_ALL = (
    ("All steps: what the ranks save, read whole by torch", read_by_torch),
    ("All steps: loaded by another number of ranks, and trained on", loaded_elsewhere),
)
LOOKS = [cut, give]

"""The cells to write in the notebooks: the check distinguishes a blank, a correct solution and a mistake."""

import json
import re
from itertools import pairwise
from pathlib import Path

import practice_solutions as solutions
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from zerolab.teach import practice
from zerolab.teach.practice.cells import CELLS
from zerolab.teach.practice.threads import on_threads

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def blanks() -> dict[str, tuple[str, list[str]]]:
    """{name of the cell: (the code with the blank, the names that the cell below it checks)}"""
    found = {}
    for file in NOTEBOOKS.glob("*.ipynb"):
        cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
        for above, below in pairwise("".join(cell["source"]) for cell in cells):
            for name, given in re.findall(r'practice\.check\("(\w+)", (.+)\)', below):
                found[name] = above, re.findall(r"\w+", given)
    return found


def test_every_cell_is_tried_here():
    for several in (solutions.CORRECT, solutions.WRONG):
        assert {cell for cell, *_ in several} == set(CELLS)
    assert set(blanks()) == set(CELLS)


@pytest.mark.parametrize("cell", CELLS)
def test_a_notebooks_blank_is_not_yet_a_solution(cell, capsys):
    above, names = blanks()[cell]
    defined = {"torch": torch, "fully_shard": fully_shard}
    exec(above, defined)
    things = [defined[name] for name in names]
    assert practice.check(cell, things[0] if len(things) == 1 else tuple(things)) is False
    assert capsys.readouterr().out.startswith("not yet: ")


@pytest.mark.parametrize("cell", CELLS)
def test_hints_come_one_by_one(cell, capsys):
    hints = CELLS[cell].hints
    practice._shown.clear()
    for hint in (*hints, hints[0]):
        practice.hint(cell)
        assert hint in capsys.readouterr().out


def check(cell, solution, message, begins, is_correct, capsys):
    assert practice.check(cell, solution) is is_correct
    printed = capsys.readouterr().out
    assert printed.startswith(begins) and message in printed, printed


@pytest.mark.parametrize("cell, solution, message", solutions.CORRECT)
def test_a_correct_solution(cell, solution, message, capsys):
    check(cell, solution, message, "correct: ", True, capsys)


@pytest.mark.parametrize("cell, solution, message", solutions.NOT_YET)
def test_half_of_a_solution_is_not_yet_one(cell, solution, message, capsys):
    check(cell, solution, message, "not yet: ", False, capsys)


@pytest.mark.parametrize("cell, solution, message", solutions.WRONG)
def test_a_mistake(cell, solution, message, capsys):
    check(cell, solution, message, "not correct yet: ", False, capsys)


def test_the_threads_collectives_are_torchs(monkeypatch):
    def one(rank, dist):
        whole, shard, gathered = torch.arange(4.0) * 10**rank, torch.empty(2), torch.empty(4)
        work = dist.reduce_scatter_single(shard, whole, async_op=True)
        before = work.waited
        work.wait()
        dist.all_gather_single(gathered, shard)
        dist.all_reduce(whole)
        return before, shard.tolist(), gathered.tolist(), whole.tolist()

    total = [0.0, 11.0, 22.0, 33.0]
    assert on_threads(2, one) == [(False, total[2 * rank : 2 * rank + 2], total, total) for rank in (0, 1)]
    monkeypatch.setattr("zerolab.teach.practice.threads.SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="rank 0 waits in all_reduce, and rank 1 never calls it"):
        on_threads(3, lambda rank, dist: dist.all_reduce(torch.ones(2)) if rank != 1 else None)

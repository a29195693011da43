"""The steps to write in the notebooks: a blank is told so, a right one passes, a wrong one is told what is wrong."""

import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from zerolab.teach import practice
from zerolab.teach.practice import tasks, threads

HERE = Path(__file__).parent
DATA = tomllib.loads((HERE / "practice.toml").read_text())
SAYS = {"otherwise": "right: ", "half": "not yet: ", "wrong": "not right yet: "}
TRIED = []
for name, each in DATA.items():
    for kind in SAYS:
        TRIED += [(name, kind, row) for row in each.get(kind, ())]

BLANKS = {}  # task -> (the notebook's cell with the blank, what the cell below has checked)
for file in HERE.parent.glob("notebooks/*.ipynb"):
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    for above, below in pairwise("".join(cell["source"]) for cell in cells):
        for name, given in re.findall(r'practice\.check\("(\w+)", (.+)\)', below):
            BLANKS[name] = above, given


def check(name: str, written: str = "") -> bool:
    """What the check says of the notebook's blank, and of what is written below it."""
    above, given = BLANKS[name]
    names = {"torch": torch, "fully_shard": fully_shard}
    exec(f"{above}\n{written}", names)
    return practice.check(name, eval(given, names))


def test_every_task_is_tried_here():
    assert set(DATA) == set(tasks.TASKS) == set(practice.WORDS) == set(BLANKS)
    assert set(DATA) == {name for name, kind, _ in TRIED if kind == "wrong"}


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_blank_is_not_yet_a_solution_is_right_and_hints_come_one_by_one(name, capsys):
    assert check(name) is False
    assert capsys.readouterr().out.startswith("not yet: ")
    assert check(name, DATA[name]["right"]) is True
    right, onward = capsys.readouterr().out.splitlines()
    assert right.startswith("right: ") and onward.startswith("Next: ")
    hints = practice.WORDS[name]["hints"]
    practice._shown.clear()
    for hint in (*hints, hints[0]):
        practice.hint(name)
        assert hint in capsys.readouterr().out


@pytest.mark.parametrize("name, kind, row", TRIED)
def test_a_mistake_is_told_another_way_is_right_and_half_is_not_yet(name, kind, row, capsys):
    right, other, said = row
    written = DATA[name]["right"].replace(right, other)
    assert written != DATA[name]["right"]
    assert check(name, written) is (kind == "otherwise")
    out = capsys.readouterr().out
    assert out.startswith(SAYS[kind]) and said in out, out


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
    assert threads.on_threads(2, one) == [(False, total[2 * rank : 2 * rank + 2], total, total) for rank in (0, 1)]
    monkeypatch.setattr(threads, "SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="rank 0 waits in all_reduce, and rank 1 never calls it"):
        threads.on_threads(3, lambda rank, dist: dist.all_reduce(torch.ones(2)) if rank != 1 else None)

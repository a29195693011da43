"""The scripts in docs/migrating/: a run of a DDP script is moved, and continues as the same script with ZeRO-2."""

import re
import shutil

import pytest
import started

from zerolab.run.ranks import ROOT

SCRIPTS = ROOT / "docs" / "migrating"


@pytest.mark.long
def test_a_moved_run_continues_as_if_it_had_not_moved(tmp_path):
    """The learning rates are equal. Losses differ by rounding, because the norm is added up in a different order."""
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)

    def epochs(script, last):
        """[(epoch, learning rate, loss)] that two ranks print."""
        ended = started.plain_torchrun([script, str(last)], 2, folder=tmp_path)
        assert ended.returncode == 0, ended.stderr
        printed = re.findall(r"epoch (\d+): lr ([\d.]+), loss ([\d.]+)\n", ended.stdout)
        return [(int(epoch), float(rate), float(loss)) for epoch, rate, loss in printed]

    before = epochs("ddp.py", 2)
    moved = started.alone(["move.py", "ddp.pt", "run"], folder=tmp_path, PYTHONSAFEPATH="")  # it imports ddp.py
    assert moved.returncode == 0, moved.stderr
    after, found = epochs("ddp.py", 4), epochs("zero.py", 4)
    assert [epoch for epoch, _, _ in before + after] == [1, 2, 3, 4]
    assert after[1][2] < before[0][2] / 2, (before, after)  # it learns, so stale weights or moments would show
    assert [each[:2] for each in found] == [each[:2] for each in after]
    for (_, _, loss), (_, _, expected) in zip(found, after):
        assert loss == pytest.approx(expected, rel=1e-4), (found, after)

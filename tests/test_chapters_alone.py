"""The three chapters, copied into an empty folder, train without anything else of the project."""

import os
import shutil
import subprocess
import sys

import pytest

from zerolab.run.ranks import ROOT

THOROUGH = [pytest.param(ranks, marks=pytest.mark.thorough) for ranks in (1, 3, 4)]


@pytest.mark.parametrize("ranks", (2, *THOROUGH))
def test_chapters_train_beside_ddp_in_an_empty_folder(ranks, tmp_path):
    for name in ("zero1.py", "zero2.py", "zero3.py", "tests/train_alone.py"):
        shutil.copy(ROOT / name, tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ours = ("PYTHONPATH", "PYTHONSAFEPATH")  # by which launch.sh finds the project
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    run = subprocess.run(
        [*torchrun, "train_alone.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]

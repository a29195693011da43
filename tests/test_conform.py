"""`conform` on engines of files: one that is right, and others that are wrong, refuse, crash, or hang."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.properties.conform import OUTCOMES, cases_on, size_of, versions
from harness.properties.property import STAGES, library
from harness.run.engines import installed
from tests.test_engine_file import LISTING, ROOT

STEP = "    def step(self):\n"
LAST = "        dist.all_reduce(self.gradients)\n"
# {engine: (what is put into the page's listing, and where; the outcome; words of it)}
ENGINES = {
    "fine": (STEP, STEP, "right", ""),
    "sums": ("        self.gradients /= self.world_size\n", "", "wrong", "the weights after one step"),
    "refuses": (STEP, STEP + "        raise ValueError('not today')\n", "refused", "not today"),
    "dies": (STEP, STEP + "        __import__('os')._exit(3)\n", "crash", ""),
    "parts": (LAST, f"        if dist.get_rank() == 0:\n    {LAST}", "hang", ""),
}


def conform(python: str, *words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": python, "ZERO_TIMEOUT": "3"}
    command = ["./launch.sh", "conform", *words, "--only", "a_step_on_integers"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_each_outcome_and_the_others_engines_go_on(quick_python, tmp_path):
    files = []
    for name, (old, new, *_) in ENGINES.items():
        assert old in LISTING
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(LISTING.replace(old, new))
    run = conform(quick_python, *map(str, files), "2", "--json", str(tmp_path / "found.json"))
    assert run.returncode == 1, run.stdout + run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["versions"] == versions() and found["ranks"] == 2 and list(found["engines"]) == list(ENGINES)
    for name, (_, _, outcome, words) in ENGINES.items():
        (verdict,) = found["engines"][name].values()
        assert set(verdict) == {"outcome", "says", "seconds"}
        assert verdict["outcome"] == outcome and words in verdict["says"], (name, verdict)
        assert re.search(rf"in all: {outcome} ", run.stdout)


def test_without_wrong_crash_or_hang_the_exit_status_is_0(quick_python, tmp_path):
    file = tmp_path / "refuses.py"
    file.write_text(LISTING.replace(*ENGINES["refuses"][:2]))
    run = conform(quick_python, str(file), "ddp", "2")
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_property_is_asked_of_every_engine():
    assert len(library()) >= 120
    for name, each in library().items():
        size = size_of(each, 2)
        assert cases_on(each, size, "ddp"), name
        assert all(cases_on(each, size, stage) for stage in STAGES if stage in each.engines), name


def test_the_results_that_the_page_shows_are_of_all_properties():
    for file in Path(ROOT, "results").glob("conform-*.json"):
        found = json.loads(file.read_text())["engines"]
        for name, verdicts in found.items():
            assert set(verdicts) <= set(library()), name
            assert {each["outcome"] for each in verdicts.values()} <= set(OUTCOMES)


@pytest.mark.skipif(not installed("deepspeed1"), reason="DeepSpeed is not installed: pip install '.[peers]'")
def test_deepspeeds_losses_are_ddps(quick_python, tmp_path):
    words = ["compare", "2", "--preset", "toy", "--steps", "4", "--timed-steps", "1", "--engines"]
    words += ["ddp,deepspeed1,deepspeed2,deepspeed3", "--json", str(tmp_path / "seen.json")]
    run = subprocess.run(["./launch.sh", *words], cwd=ROOT, env=os.environ | {"PYTHON": quick_python})
    seen = json.loads((tmp_path / "seen.json").read_text())["runs"]
    assert run.returncode == 0 and all(each["match"] for each in seen.values())
    first, *_, last = (seen[f"deepspeed{stage}"]["held_bytes"]["optimizer"] for stage in (1, 2, 3))
    assert first < 0.6 * seen["ddp"]["held_bytes"]["optimizer"] and last < 0.6 * seen["ddp"]["held_bytes"]["optimizer"]

"""An engine of a file under the referee: docs/your-engine.md's own, with bugs put into it, and what is no engine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from harness.properties import foreign
from harness.run.engine_file import NoEngine, _built, enter, one_line
from harness.run.engines import ENGINES

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "your-engine.md").read_text()
LISTING = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE).group(1)
STEP = "    def step(self):\n"
DIES = "        if dist.get_rank() == 1:\n            raise LookupError('out of luck')\n"


def compare(quick_python, files, *options) -> subprocess.CompletedProcess:
    given = [word for file in files for word in ("--engine-file", str(file))]
    command = ["./launch.sh", "compare", "2", "--preset", "toy", "--steps", "4", "--timed-steps", "1", *given, *options]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHON": quick_python}, capture_output=True, text=True)


@pytest.fixture
def engine_file(tmp_path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_a_right_a_wrong_and_a_failing_engine_each_get_their_line(quick_python, engine_file, tmp_path):
    gather = "        dist.all_gather_single(self.weights, self.shard)\n"
    assert gather in LISTING
    files = [
        engine_file("my_zero1.py", LISTING),
        engine_file("dies.py", LISTING.replace(STEP, STEP + DIES)),
        engine_file("no_gather.py", LISTING.replace(gather, "")),
        engine_file("diverges.py", LISTING.replace("self.model(*inputs)", "self.model(*inputs) * float('nan')")),
    ]
    run = compare(quick_python, files, "--engines", "ddp,zero1", "--json", str(tmp_path / "seen.json"))
    assert run.returncode == 1 and "the first to fail" not in run.stderr, run.stdout + run.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    right, chapter, wrong, nan = (seen["runs"][name] for name in ("my_zero1", "zero1", "no_gather", "diverges"))
    # On two ranks DDP, the chapter and this add the same two numbers, and every parameter lies on 16 bytes.
    assert right["match"] and right["difference"] == 0 and right["sent_bytes"] == chapter["sent_bytes"]
    assert right["held_bytes"]["optimizer"] <= chapter["held_bytes"]["optimizer"] and right["step_ms"] > 0
    assert not wrong["match"] and wrong["difference"] > 1e-3 and not seen["match"]
    assert not nan["match"] and "DOES NOT MATCH: diverges is off by nan" in run.stdout
    assert list(seen["failed"]) == ["dies"] and "dies" not in seen["runs"]
    assert re.fullmatch(r"rank 1: dies.py, line \d+: LookupError: out of luck", seen["failed"]["dies"])
    assert f"FAILED: dies: {seen['failed']['dies']}" in run.stdout and "DOES NOT MATCH: no_gather" in run.stdout


NO_ENGINES = [
    ("no_build.py", "x = 1\n", "build(model, optimizer_cls, device)"),
    ("few.py", "def build(model): ...\n", "build(model, optimizer_cls, device)"),
    ("zero2.py", LISTING, "is taken"),
    ("broken.py", "def build(:\n", "line 1: SyntaxError"),
    ("other.py", LISTING.replace('"zero1"', '"zero4"'), "'zero4'"),
    ("model.py", "def build(model, optimizer_cls, device):\n    return model\n", "no `model`"),
    ("loop.py", LISTING.replace("def zero_grad", "def zero_gradients"), "`zero_grad`"),
    ("engine.txt", LISTING, "FILE.py"),
    ("a,b.py", LISTING, "comma"),
    ("title.py", LISTING.replace('"my ZeRO-1"', "7"), "TITLE is 7"),
    ("list.py", LISTING.replace('"zero1"', "[]"), "COUNTERPART is []"),
    ("exits.py", "raise SystemExit(4)\n", "line 1: SystemExit: 4"),
]


@pytest.mark.parametrize("name, text, words", NO_ENGINES, ids=[name for name, *_ in NO_ENGINES])
def test_what_is_no_engine_is_refused_before_ranks_are_started(monkeypatch, engine_file, name, text, words):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match=re.escape(words)) as refused, patch.dict(ENGINES):
        enter([str(engine_file(name, text))], "compare", trial=True)
    assert "--engine-file" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.thorough
def test_a_hang_of_one_rank_ends_the_run_in_words(quick_python, engine_file, monkeypatch):
    """Without an end of its own: the other rank would wait for it to say how it has fared."""
    monkeypatch.setenv("ZERO_TIMEOUT", "2")
    loops = "        if dist.get_rank() == 1:\n            while True:\n                pass\n"
    run = compare(quick_python, [engine_file("loops.py", LISTING.replace(STEP, STEP + loops))], "--engines", "ddp")
    assert run.returncode == 1 and "rank 1 hangs" in run.stderr, run.stdout + run.stderr


@pytest.mark.parametrize("returned", (None, 1.0, torch.ones(3)))
def test_a_training_step_must_return_a_loss(returned):
    model = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()))
    engine.training_step = lambda inputs, targets, loss_fn: returned
    with pytest.raises(NoEngine, match="must return this rank's loss"):
        _built(lambda *_: engine, model, None, None).training_step(None, None, None)


def test_nobody_clips_for_an_engine_that_has_no_clipping():
    with pytest.raises(foreign.NotApplicable, match="mine has no clip_grad_norm_"):
        foreign.Foreign("mine", SimpleNamespace(model=None, optimizer=None), [], False).clip_grad_norm_(1.0)


def test_an_exception_in_a_file_is_one_line_that_names_it(engine_file):
    """As `bench` and `watch` say it."""
    with patch.dict(ENGINES):
        file = engine_file("fails.py", LISTING.replace("return MyZeRO1", "raise LookupError('luck')  #"))
        enter([str(file)], "bench")
        with pytest.raises(RuntimeError, match=r"^fails.py, line 45: LookupError: luck$"), one_line():
            ENGINES["fails"].build(None, None, None)

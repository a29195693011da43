"""An engine of a file under the referee: docs/your-engine.md's own, with bugs put into it, and what is no engine."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import started
import torch
from pages_engine import LISTING

from zerolab.measure.held import buckets_of, held_bytes, held_shards
from zerolab.run.engine_file import NoEngine, _built, enter
from zerolab.run.engines import ENGINES

OPTIONS = ["--preset", "toy", "--steps", "4", "--timed-steps", "1", "--engines"]


@pytest.fixture
def engine_file(tmp_path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.long
def test_a_right_and_a_wrong_engine_each_get_their_line(engine_file, tmp_path):
    gather = "        all_gather(self.weights, self.shard)\n"
    assert gather in LISTING
    files = {"my_zero1.py": LISTING, "no_gather.py": LISTING.replace(gather, "")}
    given = [f"--engine-file={engine_file(name, text)}" for name, text in files.items()]
    run = started.launch("compare", "2", *OPTIONS, "ddp,zero1", *given, "--json", str(tmp_path / "seen.json"))
    assert run.returncode == 1, run.stdout + run.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    right, chapter, wrong = (seen["runs"][name] for name in ("my_zero1", "zero1", "no_gather"))
    # On two ranks DDP, the chapter and this add the same two numbers, and every parameter is aligned to 16 bytes.
    assert right["match"] and right["difference"] == 0 and right["sent_bytes"] == chapter["sent_bytes"]
    assert right["held_bytes"]["optimizer"] <= chapter["held_bytes"]["optimizer"] and right["step_ms"] > 0
    assert not wrong["match"] and wrong["difference"] > 1e-3 and not seen["match"]
    assert right["float64_difference"] < 1e-13 and wrong["float64_difference"] > 1e-3
    assert "DOES NOT MATCH: no_gather does not compute" in run.stdout


NO_ENGINES = [
    ("no_build.py", "x = 1\n", "build(model, optimizer, device)"),
    (
        "old.py",
        LISTING.replace("(model, optimizer, d", "(model, optimizer_cls, d"),
        "old.py, line 47: build(model, opt",
    ),
    ("zero2.py", LISTING, "is taken"),
    ("broken.py", "def build(:\n", "line 1: SyntaxError"),
    ("other.py", LISTING.replace('"zero1"', '"zero4"'), "'zero4'"),
    ("supports.py", LISTING.replace("COUNTERPART", "SUPPORTS"), "SUPPORTS is 'zero1', and must be a tuple"),
    ("list.py", LISTING.replace('"zero1"', "[]"), "COUNTERPART is []"),
    ("exits.py", "raise SystemExit(4)\n", "line 1: SystemExit: 4"),
]


@pytest.mark.parametrize("name, text, words", NO_ENGINES, ids=[name for name, *_ in NO_ENGINES])
def test_what_is_no_engine_is_refused_before_ranks_are_started(monkeypatch, engine_file, name, text, words):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match=re.escape(words)) as refused, patch.dict(ENGINES):
        enter([str(engine_file(name, text))])
    assert "--engine-file" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"model": None}, "no `model`"),
        ({"optimizer": None}, "no `optimizer`"),
        ({"training_step": None}, "no `__call__`"),
        ({"optimizer": []}, "whose `optimizer` is of type list. It must be a torch Optimizer"),
        ({"model": len}, "whose `model` is of type builtin_function_or_method. It must be a torch Module"),
    ],
)
def test_what_build_returns_must_have_what_a_referee_calls_and_measures(parts, message):
    """None stands for an attribute that is not there."""
    model = torch.nn.Linear(2, 2)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "training_step": len, **parts}
    engine = SimpleNamespace(**{name: part for name, part in parts.items() if part is not None})
    with pytest.raises(NoEngine, match=message):
        _built(lambda *_: engine, model, None, None)


@pytest.mark.parametrize("own", [{"first": []}, 3])
def test_an_engine_may_have_attributes_with_the_names_of_ours(own):
    """What it holds is counted in its model and its optimizer."""
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parts = dict.fromkeys(("all_buckets", "buckets", "units"), own)
    built = _built(
        lambda *_: SimpleNamespace(model=model, optimizer=optimizer, training_step=len, **parts), model, 0, 0
    )
    assert held_bytes(built) == {"parameters": 36, "gradients": 36, "optimizer": 36}
    assert held_shards(built)["parameters"] and buckets_of(built) == []


def test_a_training_step_must_return_a_loss():
    model = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()))
    engine.training_step = lambda inputs, targets, loss_fn: None
    with pytest.raises(NoEngine, match="must return this rank's loss"):
        _built(lambda *_: engine, model, None, None).training_step(None, None, None)

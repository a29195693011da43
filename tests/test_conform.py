"""`./launch.sh conform` on engines of files: the one on the page, and others that are wrong, refuse, crash, or hang."""

import json
import re
import subprocess
import sys

import pytest
from pages_engine import CORRECT, LISTING, PAGE, REDUCE, STEP, WRONG, changed

from zerolab.run.ranks import ROOT

# {name: (the engine in its file, the outcome)}
OTHERS = {
    "refuses": (changed(STEP, STEP + "        raise TypeError('not today')\n"), "refused"),
    "trips": (changed(STEP, STEP + "        None + 1\n"), "crash"),
    "dies": (changed(STEP, STEP + "        __import__('os')._exit(3)\n"), "crash"),
    "hangs": (changed(REDUCE, "        if dist.get_rank() == 0:\n    " + REDUCE), "hang"),
    "sums": (changed(*WRONG["sums_and_does_not_average"]), "wrong"),
    "correct": (LISTING, "correct"),
}


def files(tmp_path, engines):
    """The files of `engines`, {name: what its file has}."""
    for name, text in engines.items():
        (tmp_path / f"{name}.py").write_text(text)
    return [tmp_path / f"{name}.py" for name in engines]


def conform(tmp_path, engines, *options):
    """The finished process of `./launch.sh conform`, and {engine: {test: outcome}}."""
    command = ["-m", "tests.conformance.command", *files(tmp_path, engines), *options]
    return finished(tmp_path, *command, "--json", tmp_path / "found.json")


def finished(tmp_path, *command):
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=900)
    outcomes = {}
    for engine, tests in json.loads((tmp_path / "found.json").read_text())["engines"].items():
        outcomes[engine] = {test: verdict["outcome"] for test, verdict in tests.items()}
    return run, outcomes


@pytest.mark.long
def test_outcomes_are_distinguished_and_the_other_engines_continue(tmp_path):
    """By pytest itself. The exit status is 1, and the table has a row for each engine."""
    command = ["-m", "pytest", "-q", "tests/conformance", "-k", "trains_as_one_process and Blocks", "--ranks", "2"]
    for file in files(tmp_path, {name: text for name, (text, _) in OTHERS.items()}):
        command += ["--engine", file]
    run, found = finished(tmp_path, *command, "--patience", "5", "--conform-json", tmp_path / "found.json")
    assert run.returncode == 1, run.stdout + run.stderr
    for name, (_, outcome) in OTHERS.items():
        assert found[name] == {"values::trains_as_one_process": outcome}, run.stdout
    assert "TypeError: not today" in run.stdout and "1e-12 is allowed" in run.stdout
    rows = [line.split() for line in run.stdout.splitlines()]
    assert ["sums", "0", "0", "1", "0", "0", "0"] in rows and ["correct", "1", "0", "0", "0", "0", "0"] in rows


@pytest.mark.long
def test_the_engine_of_the_page_passes_all_that_applies(tmp_path):
    """Where it documents nothing, the test does not apply, and the report gives the reason.

    What a file lists in SUPPORTS does apply. The page's engine unpacks one parameter group: with two that is an error.
    """
    claims = changed('COUNTERPART = "zero1"', 'SUPPORTS = ("groups",)')
    run, found = conform(tmp_path, {"my_zero1": LISTING, "claims": claims})
    assert run.returncode == 1, run.stdout + run.stderr
    outcomes = list(found["my_zero1"].values())
    passed = re.search(r"passes all (\d+) tests", PAGE)[1]
    assert set(outcomes) == {"correct", "not applicable"} and outcomes.count("correct") == int(passed), run.stdout
    printed = " ".join(run.stdout.split())  # lines are wrapped
    assert re.search(r"my_zero1: \d+ tests do not apply: my_zero1.py says nothing of several parameter gr", printed)
    assert max(map(len, run.stdout.partition("= conformance =")[2].splitlines())) <= 120, run.stdout
    assert "do not apply: it tests only our zero3" in printed
    assert "too many values to unpack" in run.stdout
    assert found["claims"]["parameter_groups::the_rates_of_groups_can_be_changed"] == "crash"
    assert found["claims"]["traffic::a_step_sends_no_more_than_promised"] == "not applicable"


@pytest.mark.thorough
def test_unusual_correct_engines_pass(tmp_path):
    """They add in another order, by other collectives, or without alignment."""
    run, found = conform(tmp_path, {name: changed(*change) for name, change in CORRECT.items()})
    assert run.returncode == 0 and len(found) == len(CORRECT), run.stdout + run.stderr

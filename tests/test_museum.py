"""Every exhibit of the museum shows the symptom that it names, and the test that it names fails with it."""

import importlib
import itertools
import math
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from zerolab.run.pool import RankFailed, run_on_ranks
from zerolab.run.ranks import ROOT
from zerolab.teach.museum import visit as museum
from zerolab.teach.museum.exhibits import EXHIBITS, LABELS
from zerolab.teach.museum.loop import Loop, visit

ALL = list(EXHIBITS)
QUICK = [1, 20]  # an exhibit of values and one of memory
HANGING = [number for number in ALL if "timeout" in EXHIBITS[number].differs]


def thorough(numbers, but=()):
    return [number if number in but else pytest.param(number, marks=pytest.mark.thorough) for number in numbers]


# The symptom.


def visits(number):
    """On a rank: what is seen of the correct stage and of the wrong one."""
    exhibit = EXHIBITS[number]
    return visit(exhibit, exhibit.correct, dist.get_rank()), visit(exhibit, exhibit.build, dist.get_rank())


def differences(correct, wrong):
    """The lines of the report that differ. `correct` and `wrong` are the results of `visit` on all ranks.

    Losses may differ by 1e-5, because sums are rounded. Peaks may differ by 10%, because one of gloo's threads may keep
    a collective's buffers for a moment.
    """
    errors = "".join(each["error"] or "" for each in wrong)
    if errors:
        return {"timeout" if "Timed out" in errors else "error"}
    found = set()
    for line in ("losses", "norms", "scales"):
        for a, b in zip(correct, wrong):
            pairs = zip(a[line], b[line])
            if not all(math.isclose(x, y, rel_tol=1e-5) for x, y in pairs):  # NaN is not close to itself
                found.add(line)
    for line, number in correct[0]["counted"].items():
        tolerance = 0.1 * number if line.startswith("peak") else 0
        if abs(number - wrong[0]["counted"][line]) > tolerance:
            found.add(line)
    return found


@pytest.mark.parametrize("number", thorough([each for each in ALL if each not in HANGING], but=QUICK))
def test_the_symptom_is_what_differs_from_the_correct_stage(number):
    """Exactly the named lines of the report differ."""
    correct, wrong = zip(*run_on_ranks(2, visits, number=number))
    assert all(each["counted"] for each in correct), correct
    assert differences(correct, wrong) == EXHIBITS[number].differs, museum.report(correct, wrong)
    if wrong[0]["losses"]:
        assert wrong[0]["losses"][0] == correct[0]["losses"][0], "they do not start with the same weights and batches"
    errors = " ".join(each["error"] or "" for each in wrong)
    for slip in ("AttributeError", "NameError", "ImportError", "TypeError"):
        assert slip not in errors, "a slip in the exhibit, and not its mistake"


@pytest.mark.thorough
@pytest.mark.parametrize("number", HANGING)
def test_an_exhibit_that_hangs_ends_by_itself(number):
    """The command prints the error of each rank, and what the correct stage showed."""
    run = subprocess.run(
        [sys.executable, "-m", "zerolab.teach.museum", str(number)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert re.search(rf"rank {rank} stopped after [12] losses: RuntimeError", run.stdout), run.stdout
    assert "imed out" in run.stdout and "Traceback" not in run.stdout + run.stderr


# The test that catches it.


def place_of(number):
    """(module, function) of the named test."""
    path, _, name = EXHIBITS[number].caught_by.partition("::")
    return path.removeprefix("tests/").removesuffix(".py").replace("/", "."), name


def test_the_tests_that_they_name_exist():
    for exhibit in EXHIBITS.values():
        path, name = exhibit.caught_by.split("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(), exhibit.caught_by


def ask(number, build, module, name, arguments):
    """On a rank: the body of a conformance test, of the stage that `exhibit.build` or `exhibit.correct` builds."""
    from conformance.subjects import Subject

    loop = Loop(EXHIBITS[number], getattr(EXHIBITS[number], build), dist.get_rank())
    engine = loop.build()
    stage = type(engine)
    like = next(base.__name__.lower() for base in stage.__mro__ if base.__module__ in ("zero1", "zero2", "zero3"))
    subject = Subject(stage.__name__, stage, like, chapter="Engine" not in stage.__name__)
    module = importlib.import_module(module)
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(engine, "scaler"):  # the mistake is in the scaler
            patch.setattr(module, "GradScaler", type(engine.scaler))
        if hasattr(engine, "run_backward"):  # the mistake is in the loss
            patch.setattr(module, "backward_over_tokens", engine.run_backward)
        getattr(module, name)(engine=subject, **arguments)


def cases(test):
    """(the largest number of ranks, the values of each `parametrize`) of a conformance test."""
    size, names, values = 2, [], []
    for mark in test.pytestmark:
        if mark.name == "ranks":
            size = max([*mark.args, *mark.kwargs.get("thorough", ())])
        if mark.name == "parametrize":
            names.append(mark.args[0])
            values.append([each for each in mark.args[1] if not hasattr(each, "marks")])  # no `pytest.param`
    return size, [dict(zip(names, chosen)) for chosen in itertools.product(*values)]


@pytest.mark.thorough
@pytest.mark.parametrize("number", ALL)
def test_the_test_that_it_names_fails_with_it(number):
    """One of the test's cases, which passes with the correct stage."""
    module, name = place_of(number)
    size, arguments = cases(getattr(importlib.import_module(module), name))
    for each in arguments:
        try:
            run_on_ranks(size, ask, number=number, build="build", module=module, name=name, arguments=each)
        except RankFailed as failed:
            assert not re.search(r"^(AttributeError|NameError|ImportError|TypeError)", str(failed), re.MULTILINE)
            run_on_ranks(size, ask, number=number, build="correct", module=module, name=name, arguments=each)
            return
    pytest.fail(f"{EXHIBITS[number].caught_by} passes")


# What is printed.


def test_every_exhibit_has_all_paragraphs():
    assert {number: list(exhibit.text) for number, exhibit in EXHIBITS.items()} == dict.fromkeys(ALL, LABELS)


def test_a_clue_and_a_hint_do_not_print_the_answer(capsys):
    text = EXHIBITS[1].text
    for asked, without in (("clue", ("Hint", "Answer")), ("hint", ("Answer",)), ("answer", ())):
        assert museum.main(["1", f"--{asked}"]) == 0
        shown = " ".join(capsys.readouterr().out.split())  # without line breaks
        assert text[asked.capitalize()] in shown and not any(text[label] in shown for label in without)


@pytest.mark.parametrize("number", ALL)
def test_what_is_to_be_read_exists(number):
    """Each name in backticks, in the hint and in the last paragraph, is in one of the files that are named there."""
    exhibit = EXHIBITS[number]
    for label in ("Hint", "Read"):
        files = re.findall(r"[\w/]+\.py", exhibit.text[label])
        found = exhibit.code if "this exhibit" in exhibit.text[label] else ""
        for file in files:
            path = ROOT / file if (ROOT / file).exists() else next(ROOT.glob(f"zerolab/**/{file}"))
            found += path.read_text()
        for name in re.findall(r"`([^`]+)`", exhibit.text[label]):
            last = name.removesuffix("()").rpartition(".")[2] if re.fullmatch(r"[\w.]+(\(\))?", name) else name
            assert last in found or name in found, f"{name} is not in {files}"

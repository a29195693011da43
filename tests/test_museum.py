"""Every exhibit of the museum of bugs: stopped by the property it names, and with the symptom it tells of."""

import ast
import re
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.properties.property import Subject, examine, library
from harness.teach import exercise
from harness.teach.museum import visit as bug
from harness.teach.museum.exhibits import EXHIBITS, STAGES

ROOT = Path(__file__).resolve().parent.parent

# On the ranks.

_right: dict[str, dict] = {}  # what the right engines show, for several exhibits train alike


def visit(number: int) -> dict:
    """What the visitor sees on this rank in the first steps."""
    exhibit, rank = EXHIBITS[number], dist.get_rank()
    # the fourth is the first that compares no notes on the order of collectives in any exhibit
    exhibit = replace(exhibit, training={"steps": 4, **exhibit.training})
    key = repr((exhibit.stage, exhibit.options, exhibit.training))
    found = bug.visit(exhibit, rank, right=_right.get(key))
    _right[key] = found["right"]
    return found


def findings(number: int, name: str) -> list:
    """What the property `name`, with the first of its cases, finds wrong with an exhibit on this rank."""
    exhibit = EXHIBITS[number]
    own = None
    if "timeout" in exhibit.differs:
        own = dist.new_group(timeout=timedelta(seconds=1), backend="gloo")

    def build(model, optimizer_cls, group=None, **options):
        return exhibit.wrong(model, optimizer_cls, group=own if group is None else group, **options)

    case = next(case for _, engine, case in library()[name].asked() if engine == exhibit.stage)
    more = {what: getattr(exhibit.wrong, what) for what in ("save", "load", "scaler") if hasattr(exhibit.wrong, what)}
    try:
        return examine(name, Subject(f"bug {number}", build, like=exhibit.stage, more=more), case)
    except Exception as error:
        if exhibit.differs.isdisjoint(("error", "timeout")):
            raise  # it may be a slip of the exhibit's own, which would look as if it were caught
        return [str(error)]


# What they find.

NAMED = [(number, name) for number, exhibit in EXHIBITS.items() for name in exhibit.caught_by]


@pytest.mark.parametrize("number, name", NAMED, ids=str)
def test_the_property_stops_it(ranks, number, name):
    """On some rank there is a finding; that the right engine gives none is held by tests/test_properties.py."""
    answers = ranks(2).run(findings, number=number, name=name)
    assert any(answers), f"{name} finds nothing wrong with exhibit {number}"


@pytest.mark.parametrize("number", [n for n, exhibit in EXHIBITS.items() if "timeout" not in exhibit.differs])
def test_the_symptom_is_the_one_told(ranks, number):
    """What differs from the right engine's report, and what does not."""
    found = ranks(2).run(visit, number=number)
    right, wrong = [each["right"] for each in found], [each["wrong"] for each in found]
    assert bug.differences(right, wrong) == EXHIBITS[number].differs, bug.report(right, wrong)
    # An error is the mistake's, and no slip of the exhibit's own code.
    slips = ("AttributeError", "NameError", "ImportError", "TypeError")
    assert not any((each["error"] or "").startswith(slips) for each in wrong), [each["error"] for each in wrong]
    assert all(each["finished"] for each in right)


def test_the_catalogue_gives_nothing_away(capsys):
    assert bug.main([]) == 0
    shown = capsys.readouterr().out
    assert len(EXHIBITS) >= 14 and {exhibit.stage for exhibit in EXHIBITS.values()} == set(STAGES)
    for number, exhibit in EXHIBITS.items():
        assert f"{number:>3}  {exhibit.stage}  {exhibit.title}" in shown
        assert exhibit.diagnosis not in shown and exhibit.wrong.__name__ not in shown


def test_a_chapters_exhibits_stand_together():
    """So that a session on a chapter can name its bugs by a first and a last number."""
    stages = [exhibit.stage for exhibit in EXHIBITS.values()]
    assert stages == sorted(stages) and list(EXHIBITS) == list(range(1, len(EXHIBITS) + 1))


@pytest.mark.parametrize("number", EXHIBITS)
def test_the_hint_says_where_to_look_and_the_answer_tells_all(capsys, number):
    exhibit, shown = EXHIBITS[number], {}
    for asked in ("--hint", "--answer"):
        assert bug.main([str(number), asked]) == 0
        shown[asked] = " ".join(capsys.readouterr().out.split())  # without the line breaks
        assert exhibit.symptom in shown[asked]
    for text in (exhibit.diagnosis, f"class {exhibit.wrong.__name__}("):
        assert text in shown["--answer"] and text not in shown["--hint"]
    assert exhibit.read.split(",")[0] in shown["--hint"] and f"bug {number} --answer" in shown["--hint"]
    assert all(text in shown["--answer"] for text in (exhibit.title, exhibit.read, *exhibit.caught_by))


@pytest.mark.parametrize("number", EXHIBITS)
def test_what_is_to_be_read_is_there(number):
    """Each part between two `;`: a file (or the one before), functions or classes in it, and behind ":" their code."""
    file, quoted = None, r"`([^`]+)`"
    read = EXHIBITS[number].read
    prose = re.sub(rf"{quoted}|[\w/]+\.py", "", read)
    assert not re.search(r"_|=|\w\.\w|\w\(|\(\)", prose), f"code without backticks: {prose}"
    for clause in read.split(";"):
        named = re.findall(r"[\w/]+\.py", clause)
        file = ROOT / (named[0] if named else file)
        places, _, code = clause.partition(":")
        tree, text = ast.parse(file.read_text()), file.read_text()
        found = [exercise.find(tree, place) for place in re.findall(quoted, places)]
        assert found, clause
        inside = "\n".join(ast.get_source_segment(text, node) for node in found)
        for each in re.findall(quoted, code):
            assert each in inside, f"{each} is not in {places} any more"


def test_a_visit_to_one_that_hangs(capsys, monkeypatch, quick_python):
    """On ranks of its own, as `./launch.sh bug 9` runs it."""
    monkeypatch.setattr(sys, "executable", quick_python)
    assert bug.show(EXHIBITS[9]) == 0
    shown = capsys.readouterr()
    assert "rank 0 waited in vain for the all-gather of the bucket of 'temperature'" in shown.out
    assert "--answer" in shown.out and "Warning" not in shown.out + shown.err
    assert EXHIBITS[9].diagnosis not in shown.out

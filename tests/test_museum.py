"""Every exhibit of the museum of bugs: stopped by the property it names, and with the symptom it tells of."""

import ast
import re
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from zerolab.properties.property import Subject, chapter_of, examine, library, subject_class
from zerolab.teach import exercise
from zerolab.teach.museum import visit as bug
from zerolab.teach.museum.exhibits import EXHIBITS, STAGES

# On the ranks.

_right: dict[str, dict] = {}  # what the right engines show, for several exhibits train alike
_passed: dict[str, list] = {}  # what properties find wrong with the right ones


def visit(number: int) -> dict:
    """What the visitor sees on this rank in the first steps."""
    exhibit, rank = EXHIBITS[number], dist.get_rank()
    # the fourth is the first that compares no notes on the order of collectives in any exhibit
    exhibit = replace(exhibit, training={"steps": 4, **exhibit.training})
    key = repr((exhibit.right, exhibit.options, exhibit.training))
    if key not in _right:
        _right[key] = bug.visit(exhibit, exhibit.right, rank)
    return {"right": _right[key], "wrong": bug.visit(exhibit, exhibit.wrong, rank)}


def cases(number: int, name: str) -> list[dict]:
    """What the property `name` asks of an exhibit: as it asks a chapter, or its first case."""
    exhibit = EXHIBITS[number]
    asked = [case for case in library()[name].cases if not case.thorough]
    of_chapter = [case.arguments for case in asked if case.engine == chapter_of(exhibit.stage)]
    of_stage = [case.arguments for case in asked if case.engine == exhibit.stage]
    return of_stage[:1] if exhibit.of_engine or not of_chapter else of_chapter


def findings(number: int, name: str, which: int) -> dict[str, list]:
    """What the property `name`, with one of its cases, finds wrong with an exhibit's stages on this rank."""
    exhibit, case = EXHIBITS[number], cases(number, name)[which]
    more = {what: getattr(exhibit.wrong, what) for what in ("save", "load", "scaler") if hasattr(exhibit.wrong, what)}
    key = repr((exhibit.right, exhibit.options, name, case))
    if key not in _passed:
        _passed[key] = examine(name, subject_of(exhibit, exhibit.right), case)
    own = None
    if "timeout" in exhibit.differs:
        own = dist.new_group(timeout=timedelta(seconds=1), backend="gloo")
    try:
        wrong = examine(name, subject_of(exhibit, exhibit.wrong, own, more), case)
    except Exception as error:
        if exhibit.differs.isdisjoint(("error", "timeout")):
            raise  # it may be a slip of the exhibit's own, which would look as if it were caught
        wrong = [str(error)]
    return {"right": _passed[key], "wrong": wrong}


def subject_of(exhibit, stage: type, own=None, more=None) -> Subject:
    """A stage of an exhibit, as a property asks for it; with `own` as the group of all ranks."""
    cls = stage if exhibit.of_engine else subject_class(stage)

    def build(model, optimizer_cls, group=None, **options):
        return cls(model, optimizer_cls, group=own if group is None else group, **{**exhibit.options, **options})

    return Subject(stage.__name__, build, like=exhibit.stage, chapter=not exhibit.of_engine, more=more or {})


# What they find.

NAMED = [(number, name) for number, exhibit in EXHIBITS.items() for name in exhibit.caught_by]


@pytest.mark.parametrize("number, name", NAMED, ids=str)
def test_the_property_stops_it(ranks, number, name):
    """On some rank there is a finding, and none of the right stage."""
    size = 4 if name == "what_is_shared_out_is_no_more_than_twice_there" else 2  # twice, on two ranks, is each once
    for which in range(len(cases(number, name))):
        answers = ranks(size).run(findings, number=number, name=name, which=which)
        assert not any(answer["right"] for answer in answers), answers
        if any(answer["wrong"] for answer in answers):
            return
    pytest.fail(f"{name} finds nothing wrong with exhibit {number}")


@pytest.mark.parametrize("number", [n for n, exhibit in EXHIBITS.items() if "timeout" not in exhibit.differs])
def test_the_symptom_is_the_one_told(ranks, number):
    """What differs from the right engine's report, and what does not."""
    found = ranks(2).run(visit, number=number)
    right, wrong = [each["right"] for each in found], [each["wrong"] for each in found]
    assert bug.differences(right, wrong) == EXHIBITS[number].differs, bug.report(right, wrong)
    # An error is the mistake's, and no slip of the exhibit's own code.
    slips = ("AttributeError", "NameError", "ImportError", "TypeError")
    errors = str([each["error"] for each in wrong])
    assert not any(slip in errors for slip in slips), errors
    assert all(each["counted"] for each in right)


def test_the_catalogue_gives_nothing_away(capsys):
    """A session on a chapter can name its bugs: they stand in order, and in front of those of what only engines do."""
    assert bug.main([]) == 0
    shown = capsys.readouterr().out
    places = []
    for number, exhibit in sorted(EXHIBITS.items(), key=lambda item: (item[1].of_engine, item[0])):
        places.append(shown.index(f"{number:>3}  {exhibit.stage}  {exhibit.title}\n"))
        assert exhibit.diagnosis not in shown and exhibit.clue not in shown
        assert exhibit.of_engine or exhibit.read.startswith("zero")
    stages = [exhibit.stage for exhibit in EXHIBITS.values()]
    assert places == sorted(places) and stages == sorted(stages) and set(stages) == set(STAGES)


@pytest.mark.parametrize("number", EXHIBITS)
def test_the_hint_says_where_to_look_and_the_answer_tells_all(capsys, number):
    exhibit, shown = EXHIBITS[number], {}
    for asked in ("--clue", "--hint", "--answer"):
        assert bug.main([str(number), asked]) == 0
        shown[asked] = " ".join(capsys.readouterr().out.split())  # without the line breaks
        assert exhibit.symptom in shown[asked]
    for text in (exhibit.diagnosis, " ".join(exhibit.written.split())):
        assert text in shown["--answer"] and text not in shown["--hint"] + shown["--clue"]
    assert exhibit.clue in shown["--clue"] and exhibit.read.partition(":")[0] not in shown["--clue"]
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
        file = exercise.ROOT / (named[0] if named else file)
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
    assert "Timed out waiting" in shown.out
    assert "--answer" in shown.out and "Warning" not in shown.out + shown.err
    assert EXHIBITS[9].diagnosis not in shown.out

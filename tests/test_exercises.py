"""The exercises: every blank fails at its own step, right solutions pass, and wrong ones do not."""

import ast
import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pool import CaseFailed

from zerolab.run import ranks as run_ranks
from zerolab.teach import exercise
from zerolab.teach.check import report as check
from zerolab.teach.check import steps as check_steps
from zerolab.teach.exercise import EXERCISES, ROOT, generate

# What a student may write, in words of their own, and slips made in these.
DATA = tomllib.loads(Path(__file__).with_name("exercises.toml").read_text())
SOLVED = {name: each["solution"] for name, each in DATA.items()}
CHAPTERS = [name for name, each in EXERCISES.items() if each.blanks]
TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text())


def wheres(name: str) -> dict[str, str]:
    """{name of the function: where it is} of all blanks."""
    return {blank.where.rpartition(".")[2]: blank.where for blank in EXERCISES[name].blanks}


def fill(name: str, bodies: dict[str, str]) -> str:
    """The exercise, with the blanks of these functions filled in, each as deep as its blank stands."""
    text = generate(name)
    for short, where in wheres(name).items():
        if short in bodies:
            node = exercise.find(ast.parse(text), where)
            blank = next(n for n in ast.walk(node) if isinstance(n, ast.Raise) and "NotImpl" in ast.unparse(n))
            lines = text.split("\n")
            body = textwrap.indent(textwrap.dedent(bodies[short]).rstrip("\n"), " " * blank.col_offset)
            lines[blank.lineno - 1 : blank.end_lineno] = body.split("\n")
            text = "\n".join(lines)
    return text


def solution(name: str, **bodies: str) -> str:
    return fill(name, {**SOLVED[name], **bodies})


def examine(pool, folder: Path, name: str, text: str, numbers: list[int]) -> list[dict]:
    """The verdicts on these blanks, of all ranks together, and the report of them; on ranks that are there already."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    file = folder / f"{name}.py"
    file.write_text(text)
    with contextlib.suppress(CaseFailed):  # a rank that died has no verdict
        pool.run(check_steps.examine, name=name, file=str(file), folder=str(folder), numbers=numbers)
    report = check.Report([EXERCISES[name].checks[number] for number in numbers], file.name, text)
    for number in numbers:
        verdicts = run_ranks.said(folder, number, pool.world_size)
        if None in verdicts:  # which the command tells as DIED or HANGS
            report.verdicts.append({"status": "error"})
        else:
            report.add(verdicts)
    return report.verdicts


# Making them.


@pytest.mark.parametrize("name", CHAPTERS)
def test_only_the_blanks_are_taken_out(name):
    """What is left is the chapter: filled with what was taken out, it is the chapter again."""
    blanks, text, chapter = EXERCISES[name].blanks, generate(name), (ROOT / EXERCISES[name].source).read_text()
    assert sorted(exercise.lines_of_blanks(text)) == sorted(blank.title for blank in blanks)
    inside = [blank for blank in blanks if not blank.head]
    taken = {}
    for blank in inside:
        body = exercise.statements(ast.parse(chapter), blank)
        lines = chapter.split("\n")[body[0].lineno - 1 : body[-1].end_lineno]
        taken[blank.where.rpartition(".")[2]] = "\n".join(lines)
    for blank in blanks:
        code = ast.unparse(exercise.find(ast.parse(text), blank.where))
        assert code.count("raise NotImplementedError(") == 1 and repr(blank.title)[1:-1] in code, blank.where
    again = ast.parse(fill(name, taken))
    for blank in blanks:
        if blank.head:  # a method that is in no chapter
            owner = exercise.find(again, blank.where.partition(".")[0])
            owner.body.remove(exercise.find(again, blank.where))
    assert ast.unparse(again.body[1:]) == ast.unparse(ast.parse(chapter).body[1:])


@pytest.mark.parametrize("name", CHAPTERS)
def test_hints_come_in_levels(name):
    """At level 0 there are targets alone; a hint more at each level; and `check --hint` gives those that are left."""
    *checks, last = EXERCISES[name].checks
    assert last.read in " ".join(check.next_hints(last, generate(name), 1).split())
    for level, many in itertools.product((0, 1, 2), (1, 2)):
        text = generate(name, hints=level)
        assert max(len(line) for line in text.split("\n")) <= 125
        for each in checks:
            said = " ".join(check.next_hints(each, text, many).split())
            given = [hint for hint in each.hints if " ".join(hint.split()) in said]
            assert given == [*each.hints[level : level + many]] and (each.read in said) == (level == 2)


@pytest.mark.parametrize(
    "options",
    [
        {"where": "Stage.move"},
        {"first": "while"},
        {"first": "place ="},  # there are two
        {"last": "place = 0", "first": "with"},
    ],
)
def test_what_is_not_found_is_an_error_with_chapter_function_and_words(monkeypatch, tmp_path, options):
    chapter = '"""A chapter."""\nclass Stage:\n def step(self):\n  place = 0\n  with a: pass\n  place = 1\n'
    (tmp_path / "chapter.py").write_text(chapter)
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    words = dict.fromkeys(("title", "hints", "target"), "")
    blank = exercise.Blank(**{"where": "Stage.step", **words, **options})
    monkeypatch.setitem(EXERCISES, "chapter", exercise.Exercise("chapter.py", "Stage", "", (blank,)))
    with pytest.raises(LookupError) as error:
        generate("chapter")
    said = ("chapter.py", blank.where, str(next(iter(options.values()))), "zerolab/teach/exercises.toml")
    assert all(word in str(error.value) for word in said), error.value


# Checking them.


def changed(name: str, method: str, *changes: tuple[str, str]) -> str:
    """The student's method, with other words in the place of some."""
    body = SOLVED[name][method]
    for this, that in changes:
        assert body.count(this) == 1, this
        body = body.replace(this, that)
    return body


WAYS = [(name, way) for name, each in DATA.items() for way in each["otherwise"]]


def on_task(name: str, body: str) -> str:
    """A task with this body of its class."""
    head = EXERCISES[name].text
    first = head.index("class Engine")
    lines = ["import torch.distributed as dist", head[:first], head[first:].splitlines()[0]]
    return "\n".join([*lines, textwrap.indent(body, "    ")])


def number_of(name: str, method: str) -> int:
    return [*wheres(name)].index(method)


def ranks_for(ranks, name: str):
    """With two, too much is alike on both."""
    return ranks(max(3, EXERCISES[name].ranks))


@pytest.mark.parametrize("name", [*CHAPTERS, *TASKS])
def test_right_solutions_pass(ranks, tmp_path, capsys, name):
    numbers = list(range(len(EXERCISES[name].checks)))
    text = on_task(name, TASKS[name]["solution"]) if name in TASKS else solution(name)
    verdicts = examine(ranks_for(ranks, name), tmp_path, name, text, numbers)
    assert [verdict["status"] for verdict in verdicts] == ["passed"] * len(numbers), capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("name, way", WAYS)
def test_right_solutions_of_another_design_pass(ranks, tmp_path, capsys, name, way):
    """At their own blank, and as part of the whole file."""
    method, *words = way
    text = solution(name, **{method: changed(name, method, tuple(words))})
    numbers = [number_of(name, method), len(EXERCISES[name].blanks)]
    verdicts = examine(ranks(3), tmp_path, name, text, numbers)
    assert [verdict["status"] for verdict in verdicts] == ["passed"] * 2, capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHAPTERS)
def test_blanks_are_judged_one_by_one(ranks, tmp_path, capsys, name):
    """One that is written passes, whatever the others are: another is to be written, a third one is gone."""
    blanks = EXERCISES[name].blanks
    for place, blank in enumerate(blanks):
        method = blank.where.rpartition(".")[2]
        text, other = fill(name, {method: SOLVED[name][method]}), (place + 1) % len(blanks)
        gone = blanks[(place + 2) % len(blanks)].where.rpartition(".")[2]
        text = text if gone == method else text.replace(f"def {gone}(", "def another_name(", 1)
        verdicts = examine(ranks(3), tmp_path, name, text, [place, other] if other != place else [place])
        statuses = [verdict["status"] for verdict in verdicts]
        assert statuses == ["passed", "open"][: len(statuses)], capsys.readouterr().out


# Mistakes: (exercise, numbers of the checks, the file, what is said of it).
MISTAKES = []


def mistake(name: str, numbers: list[int], where: str, file: Callable, *said: str) -> None:
    MISTAKES.append(pytest.param(name, numbers, file, said, id=f"{name}-{where}"))


def slip(name: str, method: str, right: str, wrong: str) -> str:
    return solution(name, **{method: changed(name, method, (right, wrong))})


for name, each in DATA.items():
    for method, right, wrong, *said in each["slips"]:
        mistake(name, [number_of(name, method)], method, partial(slip, name, method, right, wrong), *said)
for name, each in TASKS.items():
    for right, wrong, said in each["wrong"]:
        body = each["solution"].replace(right, wrong)
        mistake(name, list(range(len(EXERCISES[name].targets))), "target", partial(on_task, name, body), said)


@pytest.mark.thorough
@pytest.mark.parametrize("name, numbers, file, said", MISTAKES)
def test_mistakes_are_found_at_their_own_blank_or_target(ranks, tmp_path, capsys, name, numbers, file, said):
    verdicts = examine(ranks_for(ranks, name), tmp_path, name, file(), numbers)
    printed = capsys.readouterr().out
    wrong = next(verdict for verdict in verdicts if verdict["status"] != "passed")
    assert wrong["status"] in ("failed", "error"), printed
    for each in said:
        assert " ".join(each.split()) in " ".join(printed.split()), printed


def test_every_task_is_solved_here():
    assert set(TASKS) == {name for name, each in EXERCISES.items() if each.targets} and len(TASKS) >= 5
    assert set(DATA) == set(CHAPTERS)


# As a student runs it.


def run(capsys, *arguments: str) -> tuple[int, str]:
    """The exit status of `check`, and what it prints, its lines joined."""
    with pytest.raises(SystemExit) as leaving:
        check.main([*arguments, "--device", "cpu"])
    said, mistake = capsys.readouterr()
    assert not mistake, mistake
    return leaving.value.code, " ".join(said.split())


def test_a_folder_of_submissions(tmp_path, capsys, monkeypatch, quick_python):
    """Right, wrong on one rank, endless, not begun, no Python: each has its line, its points and its words."""
    monkeypatch.setattr(sys, "executable", quick_python)
    skips = ["return dist", "if dist.get_rank() % 2:\n    return None\nreturn dist"]
    method = "start_reduce"
    submitted = {
        "endless": (solution("zero1_2psi", start_reduce="while True: pass"), 0, "hangs in line"),
        "of_zero1": ((ROOT / "zero1.py").read_text(), 0, "reduce-scatter of"),
        "reference": ("from zero1 import *\n" + solution("zero1_2psi"), 0, "imports zero1.py, the reference"),
        "no_python": ("def", 0, "line 1: invalid syntax"),
        "not_begun": (generate("zero1_2psi"), 0, "Step 3"),
        "right": (solution("zero1_2psi"), 3, "passed"),
        "skips": (solution("zero1_2psi", **{method: changed("zero1_2psi", method, skips)}), 0, "in: reduce_scatter"),
    }
    for name, (text, *_) in submitted.items():
        (tmp_path / f"{name}.py").write_text(text)
    report = tmp_path / "points.json"
    words = ("zero1_2psi", "--folder", str(tmp_path), "--seconds", "3", "--seed", "3", "--json", str(report))
    status, printed = run(capsys, *words)
    assert status == 0
    for each in json.loads(report.read_text()):
        _, points, said = submitted[Path(each["file"]).stem]
        assert each["points"] == points and said in json.dumps(each), each
        assert f"{Path(each['file']).name} {points}" in printed


def test_one_file_its_hints_and_its_exit_status(tmp_path, capsys, monkeypatch, quick_python):
    monkeypatch.setattr(sys, "executable", quick_python)
    file, (blank, _) = tmp_path / "mine.py", EXERCISES["zero1_2psi"].blanks
    file.write_text(generate("zero1_2psi", hints=0))
    status, said = run(capsys, "zero1_2psi", "--file", str(file), "--hint", "--hint")
    assert status == 1 and f"to write {blank.title}" in said and "0 of 3 passed." in said
    assert all(" ".join(hint.split()) in said for hint in blank.hints)
    file.write_text(solution("zero1_2psi"))
    status, said = run(capsys, "zero1_2psi", "2", "--file", str(file), "--hint")
    assert status == 0 and "3 of 3 passed" in said and "is right" in said
    assert not any(" ".join(hint.split()) in said for hint in blank.hints)


def test_an_edited_file_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.setattr(exercise, "FOLDER", tmp_path / "exercises")
    shutil.copy(ROOT / "zero3.py", tmp_path)
    file = tmp_path / "exercises" / "zero3.py"
    exercise.main(["zero3"])
    text = file.read_text()
    with open(tmp_path / "zero3.py", "a") as chapter:
        chapter.write("# one line more\n")
    exercise.main(["zero3"])  # nobody has edited it, and the reference has changed since
    assert "one line more" in file.read_text() and "one line more" not in text
    text = file.read_text()
    file.write_text(text + "# mine\n")
    with pytest.raises(SystemExit) as leaving:
        exercise.main(["zero3"])
    assert leaving.value.code == 2 and file.read_text() == text + "# mine\n"
    assert "exercises/zero3.py is there and was edited; with --force" in capsys.readouterr().err
    exercise.main(["zero3", "--force"])
    assert file.read_text() == text

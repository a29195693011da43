"""The exercises: blanks are taken out and nothing else, correct files pass, and every mutation of a blank is found."""

import argparse
import ast
import re
import shutil
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest
from mutations import RIGHT, Mutation, mutated_source
from test_mutations import MUTATIONS

from zerolab.run import pool
from zerolab.run.ranks import ROOT
from zerolab.teach import exercise
from zerolab.teach.check import command, student
from zerolab.teach.exercise import generate
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import ChapterExercise, Task

SOLUTIONS = Path(__file__).with_name("solutions")
CHAPTERS = [name for name, each in EXERCISES.items() if isinstance(each, ChapterExercise)]
TASKS = [name for name, each in EXERCISES.items() if isinstance(each, Task)]


# Making exercises.


def source_of(node: ast.FunctionDef, text: str) -> str:
    return textwrap.dedent("\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno]))


def written(text: str, functions: dict[str, str]) -> str:
    """The exercise's `text` with these functions in place of the text's."""
    for where, source in functions.items():
        node = exercise.find(ast.parse(text), where)
        lines = text.split("\n")
        lines[node.lineno - 1 : node.end_lineno] = textwrap.indent(source, " " * node.col_offset).split("\n")
        text = "\n".join(lines)
    return text


def of_chapter(name: str) -> dict[str, str]:
    """{function: its source in the chapter} of all blanks."""
    text = (ROOT / f"{EXERCISES[name].chapter}.py").read_text()
    wheres = [where for blank in EXERCISES[name].blanks for where in blank.where]
    return {where: source_of(exercise.find(ast.parse(text), where), text) for where in wheres}


@pytest.mark.parametrize("name", CHAPTERS)
def test_only_the_blanks_are_taken_out(tmp_path, name):
    """Each is still to write. Filled with the chapter's functions, the exercise is the chapter again."""
    text, chapter = generate(name), (ROOT / f"{EXERCISES[name].chapter}.py").read_text()
    file = tmp_path / "mine.py"
    file.write_text(text)
    lines = exercise.lines_of_blanks(text)
    assert sorted(lines) == sorted(blank.title for blank in EXERCISES[name].blanks)
    for number, blank in enumerate(EXERCISES[name].blanks):
        state, message = student.state_of_blank(name, file, number)
        assert state == student.OPEN and re.fullmatch(r"line \d+ is still to write", message), message
        for where in blank.where:
            code = ast.unparse(exercise.find(ast.parse(text), where))
            assert code.count("raise NotImplementedError(") == 1, where
    again = ast.parse(written(text, of_chapter(name)))
    assert ast.unparse(again.body[1:-1]) == ast.unparse(ast.parse(chapter).body[1:-1])  # without docstring and main


@pytest.mark.parametrize("name", CHAPTERS)
def test_hints_come_in_levels(name):
    """At level 0 there are only targets. Each level has one more hint, and `check --hint` prints the rest."""
    for level in (0, 1, 2):
        text = generate(name, hints=level)
        for blank in EXERCISES[name].blanks:
            for many in (1, 2):
                printed = " ".join(command.next_hints(blank, text, many).split())
                assert [hint for hint in blank.hints if hint in printed] == [*blank.hints[level : level + many]]
                assert (blank.read in printed) == (level == 2)


def test_an_edited_file_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.setattr(exercise, "FOLDER", tmp_path / "exercises")
    shutil.copy(ROOT / "zero3.py", tmp_path)
    file, chapter = tmp_path / "exercises" / "zero3.py", tmp_path / "zero3.py"
    exercise.main(["zero3"])
    text = file.read_text()
    chapter.write_text(chapter.read_text().replace("import torch\n", "import torch  # one line changed\n", 1))
    exercise.main(["zero3"])  # nobody has edited it, and the chapter has changed since
    assert "one line changed" in file.read_text() and "one line changed" not in text
    text = file.read_text()
    file.write_text(text + "# mine\n")
    with pytest.raises(SystemExit) as leaving:
        exercise.main(["zero3"])
    assert leaving.value.code == 2 and file.read_text() == text + "# mine\n"
    assert "exercises/zero3.py exists and was edited. With --force" in capsys.readouterr().err
    exercise.main(["zero3", "--force"])
    assert file.read_text() == text


# Checking them.


@pytest.fixture(scope="module", autouse=True)
def own_ranks():
    """The exercises' tests set how long a rank may wait. Other tests wait longer, so these ranks do not stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "TIMEOUT", pool.TIMEOUT)
        patch.setattr(pool, "pools", {})
        yield
        pool.kill_all()


def check(name: str, file: Path, blank: int | None = None, seconds: int = 20) -> dict[str, str]:
    """{title: verdict} of the exercise's tests; with `blank` of one blank."""
    # With a folder nothing is printed.
    options = argparse.Namespace(name=name, folder=file.parent, ranks=None, seconds=seconds)
    return command.run_tests(file, options, *([] if blank is None else ["--blank", str(blank)]))


def blank_with(name: str, where: str) -> int | None:
    for number, blank in enumerate(EXERCISES[name].blanks):
        if where in blank.where:
            return number
    return None


IN_BLANKS = [each for each in MUTATIONS if blank_with(each.chapter, each.function) is not None]
SAMPLE = Mutation("zero1", "ZeRO1.finish_reduce", "bucket.gradient /= self.world_size")


def test_a_sum_is_called_a_sum(tmp_path):
    """What a student sees: which number, expected and found, a guess at the mistake, and no word about other blanks."""
    file = tmp_path / "mine.py"
    file.write_text(mutated_source(SAMPLE))
    number = blank_with("zero1", SAMPLE.function)
    ((title, verdict),) = check("zero1", file, blank=number).items()
    assert title == EXERCISES["zero1"].blanks[number].title
    assert verdict.startswith("FAILED: ") and "after reduce_gradients()\n  expected  " in verdict, verdict
    assert "3 times as much: summed, not averaged?" in verdict


def test_a_blank_is_judged_by_itself_and_what_is_not_written_is_called_by_its_name(tmp_path):
    """The second blank of zero2 is right, the third is to write, and a function of the fourth is missing."""
    second = {where: of_chapter("zero2")[where] for where in EXERCISES["zero2"].blanks[1].where}
    file = tmp_path / "mine.py"
    file.write_text(written(generate("zero2"), second).replace("def send_complete(", "def send_other("))
    for number, expected in ((1, "passed"), (2, "to write: line "), (3, "FAILED: there is no ZeRO2.send_complete")):
        (verdict,) = check("zero2", file, blank=number).values()
        assert verdict.startswith(expected), verdict


# A correct solution of zero1_2psi, in which rank 1 first does something else.
SCATTER = """def start_reduce(self, bucket):
    if dist.get_rank() == 1:
        pass
    from zero2 import reduce_scatter
    bucket.shard.grad = torch.empty_like(bucket.shard)
    return reduce_scatter(bucket.shard.grad, bucket.gradient, group=self.group, async_op=True)
"""
MEAN = "def finish_reduce(self, bucket):\n    bucket.shard.grad /= self.world_size"
ENDINGS = {  # what rank 1 does, and a part of the message
    "while True: pass": "HANGS: rank 1 in line",
    "import os; os._exit(3)": "DIED: rank 1, exit status 3",
    "raise SystemExit(3)": "SystemExit: 3",
    "return dist.all_reduce(bucket.gradient)": "reduce-scatter of",
    "return None": "Is a `return` missing somewhere",
}


def solved(does: str = "pass") -> str:
    """The exercise zero1_2psi, solved, apart from what rank 1 does in it."""
    functions = {"ZeRO1.start_reduce": SCATTER.replace("pass", does), "ZeRO1.finish_reduce": MEAN}
    return written(generate("zero1_2psi"), functions)


@pytest.mark.long
@pytest.mark.parametrize("does", ENDINGS)
def test_whatever_a_file_does_ends_in_a_verdict(tmp_path, does):
    file = tmp_path / "mine.py"
    file.write_text(solved(does))
    (verdict,) = check("zero1_2psi", file, seconds=3).values()
    assert verdict.startswith("FAILED") and ENDINGS[does] in verdict, verdict


@pytest.mark.parametrize("line, problem", [
    ("def", "line 1: invalid syntax"),
    ("return", "line 1: 'return' outside"),
    ("import zero1", "it imports zero1.py, the chapter that it is to replace"),
    ("from zero1 import *", "it imports zero1.py, the chapter that it is to replace"),
])  # fmt: skip
def test_a_file_that_cannot_be_used(tmp_path, line, problem):
    file = tmp_path / "mine.py"
    file.write_text(f"{line}\n{generate('zero1')}")
    assert problem in student.problem_with("zero1", file)
    file.write_text("x = 1")
    assert student.problem_with("zero1", file) == "it has no class ZeRO1"


# What the message must contain besides: a value that nobody has waited for would only look wrong.
NEVER_WAITED_FOR = {
    ("zero1", "gather_parameters: work.wait()"): "expected  waits for all-gather of",
    ("zero2", "Reduction.finish: self.work.wait()"): "expected  waits for reduce-scatter of",
    ("zero3", "Unit.wait: self.work.wait()"): "collectives that wait() has not waited for",
}


@pytest.mark.long
@pytest.mark.parametrize("mutation", IN_BLANKS, ids=str)
def test_the_tests_of_a_blank_find_its_mutations(tmp_path, mutation):
    file = tmp_path / "mine.py"
    file.write_text(mutated_source(mutation))
    (verdict,) = check(mutation.chapter, file, blank=blank_with(mutation.chapter, mutation.function)).values()
    assert verdict.startswith("FAILED: "), verdict
    assert NEVER_WAITED_FOR.get((mutation.chapter, str(mutation)), "") in verdict, verdict


@pytest.mark.long
@pytest.mark.parametrize("what", RIGHT)
def test_other_ways_pass(tmp_path, what):
    first, *_ = RIGHT[what]
    file = tmp_path / "mine.py"
    file.write_text(mutated_source(*RIGHT[what]))
    for number in {blank_with(each.chapter, each.function) for each in RIGHT[what]}:
        assert [*check(first.chapter, file, blank=number).values()] == [command.PASSED]


@pytest.mark.long
@pytest.mark.parametrize("file", sorted(SOLUTIONS.glob("[!_z]*.py")), ids=lambda file: file.stem)
def test_solutions_of_tasks_pass(file):
    name = next(name for name in TASKS if file.stem.startswith(name))
    verdicts = check(name, file)
    assert verdicts and set(verdicts.values()) == {command.PASSED}, verdicts


@pytest.mark.long
@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_was_not_begun_is_to_write(tmp_path, name):
    file = tmp_path / "mine.py"
    file.write_text(generate(name))
    verdicts = check(name, file)
    assert verdicts and all(verdict.startswith("to write: ") for verdict in verdicts.values()), verdicts


# As a student and a teacher run it.


def run(capfd, *arguments: str) -> tuple[int, str]:
    """The exit status of `check`, and what it prints, its lines joined."""
    with pytest.raises(SystemExit) as leaving:
        command.main([*arguments])
    printed, _ = capfd.readouterr()
    return leaving.value.code, " ".join(printed.split())


def test_hints_are_for_a_step_that_failed_before_one_that_is_to_write():
    verdicts = {"a": "passed", "b": "to write: line 5", "c": "FAILED: 3 times as much"}
    assert command.next_to_work_on(verdicts) == "c"
    assert command.next_to_work_on(verdicts | {"c": "to write: line 9"}) == "b"


def test_one_file_its_hints_and_its_exit_status(tmp_path, capfd):
    file, (blank,) = tmp_path / "mine.py", EXERCISES["zero1_2psi"].blanks
    file.write_text(generate("zero1_2psi", hints=0))
    status, printed = run(capfd, "zero1_2psi", "--file", str(file), "--hint", "--hint")
    assert status == 1 and f"to write {blank.title}" in printed and "0 of 2 passed." in printed
    assert all(hint in printed for hint in blank.hints)


@pytest.mark.long
def test_a_whole_file_is_judged_by_conformance(tmp_path, capfd):
    """A file that shares nothing of the chapter's structure, and is correct; and three that are wrong."""
    free = SOLUTIONS / "zero2_free.py"
    status, printed = run(capfd, "zero2", "--file", str(free))
    assert status == 0 and "is correct" in printed, printed
    file = tmp_path / "mine.py"
    for line, instead in (
        ("shard /= self.world_size", "pass"),
        ("import torch.distributed as dist", "import os; os._exit(0)"),
        ("work = reduce_scatter", "shard.whole = whole; work = reduce_scatter"),  # nothing is freed
    ):
        assert line in free.read_text()
        file.write_text(free.read_text().replace(line, instead))
        status, printed = run(capfd, "zero2", "--file", str(file))
        assert status == 1 and "FAILED All steps" in printed, printed


@pytest.mark.long
def test_names_are_free_in_a_file_without_the_chapters_structure(tmp_path, capfd):
    """Its `units` have no `start_gather`, with which conformance gathers the weights of the chapter."""
    file = tmp_path / "mine.py"
    text = (ROOT / "zero3.py").read_text()
    file.write_text(text.replace("start_gather", "fetch").replace("before_forward", "enter"))
    status, printed = run(capfd, "zero3", "--file", str(file))
    assert status == 0 and "is correct" in printed, printed


@pytest.mark.long
def test_a_folder_of_submissions(tmp_path, capfd):
    """Correct, endless, not begun, no Python: each has its line, its points and its reason."""
    submitted = {
        "endless": (solved("while True: pass"), 0, "HANGS"),
        "imports": ("from zero1 import *\n" + generate("zero1_2psi"), 0, "it imports zero1.py"),
        "no_python": ("def", 0, "line 1: invalid syntax"),
        "not_begun": (generate("zero1_2psi"), 0, "is still to write"),
        "of_zero1": ((ROOT / "zero1.py").read_text(), 0, "reduce-scatter of"),
        "right": (solved(), 2, ""),
    }
    for name, (text, *_) in submitted.items():
        (tmp_path / f"{name}.py").write_text(text)
    report = tmp_path / "points.xml"
    status, printed = run(capfd, "zero1_2psi", "--folder", str(tmp_path), "--seconds", "3", "--junit", str(report))
    assert status == 0
    suites = {suite.get("name"): suite for suite in ElementTree.parse(report).iter("testsuite")}
    for name, (_, points, message) in submitted.items():
        suite = suites[f"{name}.py"]
        assert re.search(rf"\b{name}\.py {points} ", printed), printed
        assert int(suite.get("tests")) - int(suite.get("failures")) == points
        assert message in ElementTree.tostring(suite, encoding="unicode"), name

"""The exercises: every blank fails at its own step, correct solutions pass, and wrong ones do not."""

import ast
import contextlib
import json
import shutil
import tempfile
import textwrap
from pathlib import Path

import pytest

from zerolab.run import ranks as run_ranks
from zerolab.run.pool import RankFailed, run_on_ranks
from zerolab.run.ranks import ROOT
from zerolab.teach import exercise
from zerolab.teach.check import examine as check_examine
from zerolab.teach.check import report as check
from zerolab.teach.check.module import Unusable, load
from zerolab.teach.exercise import generate
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import Blank, ChapterExercise, Task

SOLUTIONS = Path(__file__).with_name("solutions")
CHAPTERS = [name for name, each in EXERCISES.items() if isinstance(each, ChapterExercise)]
TASKS = [name for name, each in EXERCISES.items() if isinstance(each, Task)]


# The files of students: tests/solutions.


def students(name: str) -> dict[str, dict[str, str]]:
    """{student: {function: its source}} of a chapter's exercise. "found" is what the check says of a wrong one."""
    text = (SOLUTIONS / f"{name}.py").read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = functions_of(node, text)
    return found


def functions_of(student: ast.ClassDef, text: str) -> dict[str, str]:
    found = {}
    for node in student.body:
        if isinstance(node, ast.Assign):
            found["found"] = ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = source_of(node, text)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                found[f"{node.name}.{method.name}"] = source_of(method, text)
    return found


def source_of(node: ast.FunctionDef, text: str) -> str:
    return textwrap.dedent("\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno]))


def written(text: str, functions: dict[str, str]) -> str:
    """The exercise's `text` with these functions in place of the text's."""
    for where, source in functions.items():
        if where != "found":
            node = exercise.find(ast.parse(text), where)
            lines = text.split("\n")
            lines[node.lineno - 1 : node.end_lineno] = textwrap.indent(source, " " * node.col_offset).split("\n")
            text = "\n".join(lines)
    return text


def student_file(name: str, student: str) -> str:
    """The exercise as this student has solved it; what they have not written is Solution's."""
    everyone = students(name)
    imports = "\nimport torch.distributed as dist\n"
    return written(generate(name), everyone["Solution"] | everyone[student]) + imports


def numbers_of(name: str, functions) -> list[int]:
    """The blanks that these functions belong to."""
    blanks = EXERCISES[name].blanks
    return [number for number, blank in enumerate(blanks) if {*blank.where} & {*functions}]


def examine(number_of_ranks: int, folder: Path, name: str, text: str, numbers: list[int]) -> list[dict]:
    """The verdicts of all ranks together on these checks, and the report of them, on ranks that exist already."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    file = folder / f"{name}.py"
    file.write_text(text)
    with contextlib.suppress(RankFailed):  # a rank that died has no verdict
        run_on_ranks(
            number_of_ranks, check_examine.examine, name=name, file=str(file), folder=str(folder), numbers=numbers
        )
    report = check.Report([EXERCISES[name].checks[number] for number in numbers], file.name, text)
    for number in numbers:
        verdicts = run_ranks.reports(folder, number, number_of_ranks)
        if None in verdicts:  # the command prints DIED or HANGS
            report.verdicts.append({"status": "error"})
        else:
            report.add(verdicts)
    return report.verdicts


def ranks_for(name: str) -> int:
    """With two, too much is equal on both."""
    return max(3, EXERCISES[name].ranks)


def passes(number_of_ranks: int, folder: Path, capsys, name: str, text: str, numbers: list[int]) -> None:
    verdicts = examine(number_of_ranks, folder, name, text, numbers)
    assert [verdict["status"] for verdict in verdicts] == ["passed"] * len(numbers), capsys.readouterr().out


def fails(number_of_ranks: int, folder: Path, capsys, name: str, text: str, numbers: list[int], said: str) -> None:
    verdicts = examine(number_of_ranks, folder, name, text, numbers)
    printed = " ".join(capsys.readouterr().out.split())
    assert any(verdict["status"] in ("failed", "error", "hang") for verdict in verdicts), printed
    assert said in printed, printed


# Making exercises.


@pytest.mark.parametrize("name", CHAPTERS)
def test_only_the_blanks_are_taken_out(name):
    """Filled with the chapter's functions, the exercise is the chapter again."""
    text, chapter = generate(name), (ROOT / f"{EXERCISES[name].chapter}.py").read_text()
    tree, functions = ast.parse(chapter), {}
    assert sorted(exercise.lines_of_blanks(text)) == sorted(blank.title for blank in EXERCISES[name].blanks)
    for blank in EXERCISES[name].blanks:
        for where in blank.where:
            code = ast.unparse(exercise.find(ast.parse(text), where))
            assert code.count("raise NotImplementedError(") == 1, where
            functions[where] = source_of(exercise.find(tree, where), chapter)
    again = ast.parse(written(text, functions))
    assert ast.unparse(again.body[1:]) == ast.unparse(tree.body[1:])


@pytest.mark.parametrize("name", CHAPTERS)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_hints_come_in_levels(name, level):
    """At level 0 there are only targets. Each level has one more hint, and `check --hint` prints the rest."""
    text = generate(name, hints=level)
    assert max(len(line) for line in text.split("\n")) <= 120
    for blank in EXERCISES[name].blanks:
        for many in (1, 2):
            said = " ".join(check.next_hints(blank, text, many).split())
            assert [hint for hint in blank.hints if hint in said] == [*blank.hints[level : level + many]]
            assert (blank.read in said) == (level == 2)


def test_a_function_that_the_chapter_does_not_have_is_named(monkeypatch, tmp_path):
    (tmp_path / "zero1.py").write_text('"""A chapter."""\nclass ZeRO1:\n def step(self):\n  place = 0\n')
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    for where, first in (("ZeRO1.move", ""), ("ZeRO1.step", "self.own")):
        blank = Blank("Step 0: move", (where,), ("", ""), "", first=first, last=first)
        monkeypatch.setitem(EXERCISES, "zero1", ChapterExercise("zero1", "", (blank,)))
        with pytest.raises(LookupError) as error:
            generate("zero1")
        for word in ("zero1.py", where, first or where, "zerolab/teach/exercises/zero1.py"):
            assert word in str(error.value)


def test_every_exercise_has_a_solution_here():
    assert {file.stem for file in SOLUTIONS.iterdir()} - {"__init__", "__pycache__"} == {*EXERCISES}
    for name in CHAPTERS:
        blanks = EXERCISES[name].blanks
        assert {*students(name)["Solution"]} == {where for blank in blanks for where in blank.where}


# Checking them.


@pytest.mark.parametrize(
    "name",
    [
        "zero1_2psi",
        pytest.param("zero1", marks=pytest.mark.thorough),
        pytest.param("zero2", marks=pytest.mark.thorough),
        pytest.param("zero3", marks=pytest.mark.thorough),
    ],
)
def test_a_solution_passes_every_check(tmp_path, capsys, name):
    numbers = list(range(len(EXERCISES[name].checks)))
    passes(3, tmp_path, capsys, name, student_file(name, "Solution"), numbers)


def all_students(wrong: bool) -> list[tuple[str, str]]:
    """(exercise, student) for all students who are wrong, or for all others except Solution."""
    found = []
    for name in CHAPTERS:
        for student, functions in students(name).items():
            if student != "Solution" and ("found" in functions) == wrong:
                found.append((name, student))
    return found


QUICK = [("zero2", "DivideBeforeTheSum")]
SAMPLE = [  # of mistakes, for the default run
    ("zero1", "EmptyShards"),
    ("zero3", "FarthestFirst"),
]


def check_other_design(tmp_path, capsys, name, student):
    numbers = [*numbers_of(name, students(name)[student]), len(EXERCISES[name].blanks)]
    passes(3, tmp_path, capsys, name, student_file(name, student), numbers)


def check_mistake(tmp_path, capsys, name, student):
    functions = students(name)[student]
    numbers = numbers_of(name, functions)
    fails(3, tmp_path, capsys, name, student_file(name, student), numbers, functions["found"])


@pytest.mark.thorough
@pytest.mark.parametrize("name, student", QUICK)
def test_dividing_before_the_sum_passes(tmp_path, capsys, name, student):
    check_other_design(tmp_path, capsys, name, student)


@pytest.mark.parametrize("name, student", SAMPLE)
def test_a_mistake_is_found(tmp_path, capsys, name, student):
    check_mistake(tmp_path, capsys, name, student)


@pytest.mark.thorough
@pytest.mark.parametrize("name, student", [each for each in all_students(wrong=False) if each not in QUICK])
def test_solutions_of_another_design_pass(tmp_path, capsys, name, student):
    """At their own blanks, and as a part of the whole file."""
    check_other_design(tmp_path, capsys, name, student)


@pytest.mark.thorough
@pytest.mark.parametrize("name, student", [each for each in all_students(wrong=True) if each not in SAMPLE])
def test_mistakes_are_found_at_their_own_blank(tmp_path, capsys, name, student):
    check_mistake(tmp_path, capsys, name, student)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHAPTERS)
def test_blanks_are_judged_one_by_one(tmp_path, capsys, name):
    """A blank that is written passes while another one is still to write, and a function of a third one is deleted."""
    blanks, solved = EXERCISES[name].blanks, students(name)["Solution"]
    for place in range(0, len(blanks), 3):
        other, third = (place + 1) % len(blanks), (place + 2) % len(blanks)
        text = written(generate(name), {where: solved[where] for where in blanks[place].where})
        if third not in (place, other):
            gone = blanks[third].where[0].rpartition(".")[2]
            if gone != "__init__":
                text = text.replace(f"def {gone}(", "def another_name(", 1)
        verdicts = examine(3, tmp_path, name, text, [place, other] if other != place else [place])
        statuses = [verdict["status"] for verdict in verdicts]
        assert statuses == ["passed", "open"][: len(statuses)], capsys.readouterr().out


def task_files(pattern: str) -> list:
    found = []
    for name in TASKS:
        for file in sorted((SOLUTIONS / name).glob(pattern)):
            quick = file.stem in ("right_new_buffers", "wrong_any_other_is_infinity", "wrong_adds_in_flight")
            marks = [] if quick else [pytest.mark.thorough]
            found.append(pytest.param(name, file, id=f"{name}-{file.stem}", marks=marks))
    return found


@pytest.mark.parametrize("name, file", task_files("right*.py"))
def test_solutions_of_tasks_pass(tmp_path, capsys, name, file):
    numbers = list(range(len(EXERCISES[name].checks)))
    passes(ranks_for(name), tmp_path, capsys, name, file.read_text(), numbers)


@pytest.mark.parametrize("name, file", task_files("wrong*.py"))
def test_mistakes_in_tasks_are_found(tmp_path, capsys, name, file):
    text = file.read_text()
    numbers = list(range(len(EXERCISES[name].checks)))
    fails(ranks_for(name), tmp_path, capsys, name, text, numbers, ast.get_docstring(ast.parse(text)))


@pytest.mark.parametrize("line", ["import zero1", "from zero1 import *"])
def test_a_file_that_imports_its_chapter_is_unusable(tmp_path, line):
    file = tmp_path / "mine.py"
    file.write_text(f"{line}\n" + student_file("zero1", "Solution"))
    for check_of_it in EXERCISES["zero1"].checks:
        with pytest.raises(Unusable, match="it imports zero1.py, the chapter that it is to replace"):
            load("zero1", str(file), check_of_it)


@pytest.mark.parametrize("line, said", [("def", "line 1: invalid syntax"), ("return", "line 1: 'return' outside")])
def test_a_file_that_is_no_python_is_unusable(tmp_path, line, said):
    file = tmp_path / "mine.py"
    file.write_text(f"{line}\n{student_file('zero1', 'Solution')}")
    with pytest.raises(Unusable, match=said):
        load("zero1", str(file), EXERCISES["zero1"].checks[0])


# As a student runs it.


def run(capsys, *arguments: str) -> tuple[int, str]:
    """The exit status of `check`, and what it prints, its lines joined."""
    with pytest.raises(SystemExit) as leaving:
        check.main([*arguments])
    said, mistake = capsys.readouterr()
    assert not mistake, mistake
    return leaving.value.code, " ".join(said.split())


def two_psi(reduce: str) -> str:
    """A file for zero1_2psi whose start_reduce is this."""
    return written(student_file("zero1_2psi", "Solution"), {"ZeRO1.start_reduce": reduce})


@pytest.mark.thorough
def test_a_folder_of_submissions(tmp_path, capsys, monkeypatch):
    """Correct, wrong on one rank, endless, not begun, no Python: each has its line, its points and its reason."""
    skips = "def start_reduce(self, bucket):\n    if dist.get_rank():\n        return dist.all_reduce(bucket.gradient)"
    submitted = {
        "endless": (two_psi("def start_reduce(self, bucket):\n    while True: pass"), 0, "hangs in line"),
        "of_zero1": ((ROOT / "zero1.py").read_text(), 0, "reduce-scatter of"),
        "imports": ("from zero1 import *\n" + student_file("zero1_2psi", "Solution"), 0, "it imports zero1.py"),
        "no_python": ("def", 0, "line 1: invalid syntax"),
        "not_begun": (generate("zero1_2psi"), 0, "Step 3"),
        "right": (student_file("zero1_2psi", "Solution"), 2, "passed"),
        "skips": (two_psi(skips), 0, "reduce-scatter"),
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


def test_one_file_its_hints_and_its_exit_status(tmp_path, capsys, monkeypatch):
    file, (blank,) = tmp_path / "mine.py", EXERCISES["zero1_2psi"].blanks
    file.write_text(generate("zero1_2psi", hints=0))
    status, said = run(capsys, "zero1_2psi", "--file", str(file), "--hint", "--hint")
    assert status == 1 and f"to write {blank.title}" in said and "0 of 2 passed." in said
    assert all(hint in said for hint in blank.hints)
    file.write_text(student_file("zero1_2psi", "Solution"))
    status, said = run(capsys, "zero1_2psi", "2", "--file", str(file), "--hint")
    assert status == 0 and "2 of 2 passed" in said and "is correct" in said
    assert not any(hint in said for hint in blank.hints)


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

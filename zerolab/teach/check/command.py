"""`./launch.sh check zero2 [N]`: is the exercise solved? It runs the exercise's tests with pytest.

./launch.sh check zero2                          exercises/zero2.py
./launch.sh check zero2 --folder SUBMISSIONS     a table of all Python files in a folder

If all blanks are correct, the conformance tests judge the whole file: they are the same for every engine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zerolab.measure import tables
from zerolab.run import pool, ranks
from zerolab.run.command_line import one_line
from zerolab.run.ranks import ROOT
from zerolab.teach import check_options
from zerolab.teach.check import student
from zerolab.teach.exercise import FOLDER
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import Task

CONFORMANCE = ROOT / "tests" / "conformance"
LIMIT = 300  # seconds for the conformance tests
WHOLE = "All steps: the conformance tests of the whole file"
# A verdict is one of these, perhaps with a message: "FAILED: the loss of step 1 ...".
PASSED, OPEN, FAILED, NOT_TRIED = "passed", "to write", "FAILED", "-"


class Lines:
    """A pytest plugin: the verdict of each blank, and a line for it. After a failure the rest of the blank is skipped.

    The tests run in this process, and the student's code only on ranks, which are processes with a limit of time.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.verdicts: dict[str, str] = {}  # title of a blank or a target -> its verdict

    def pytest_collectreport(self, report):
        if report.failed:  # a mistake in the tests themselves
            print(report.longreprtext)
            pytest.exit("the tests cannot be imported", returncode=pytest.ExitCode.USAGE_ERROR)

    def pytest_runtest_setup(self, item):
        if self.verdicts.setdefault(title_of(item), PASSED) != PASSED:
            pytest.skip("a test of this blank has failed already")

    def pytest_runtest_logreport(self, report):
        title = title_of(report)
        if self.verdicts[title] == PASSED and report.skipped:
            self.verdicts[title] = f"{OPEN}: {report.longrepr[2].removeprefix('Skipped: ')}"
        if self.verdicts[title] == PASSED and report.failed:
            self.verdicts[title] = f"{FAILED}: {report.longrepr}"

    def pytest_runtest_teardown(self, item, nextitem):
        title = title_of(item)
        if nextitem is None or title_of(nextitem) != title:
            show(self.options, title, self.verdicts[title])


def title_of(item_or_report) -> str:
    return dict(item_or_report.user_properties)["title"]


def sign_of(verdict: str) -> str:
    return verdict.partition(":")[0]


def show(options: argparse.Namespace, title: str, verdict: str) -> None:
    """Print the verdict, unless a folder is checked, of which only a table is printed."""
    if not options.folder:
        sign, _, message = verdict.partition(": ")
        print(tables.wrapped("\n  ".join([f"{sign:<9} {title}", *message.splitlines()])), flush=True)


def check_file(file: Path, options: argparse.Namespace) -> dict[str, str]:
    """{title of a blank or a target: its verdict}"""
    exercise = EXERCISES[options.name]
    problem = student.problem_with(options.name, file)
    if problem:
        show(options, "the file itself", f"{FAILED}: {problem}")
        return {"the file itself": f"{FAILED}: {problem}"}
    if isinstance(exercise, Task):
        return run_tests(file, options)
    titles = [blank.title for blank in exercise.blanks]
    states = [student.state_of_blank(options.name, file, number)[0] for number in range(len(titles))]
    if student.MISSING in states and student.OPEN not in states:
        # A file with functions of its own. What it does is right if the whole file is.
        whole = judge_whole("free", file, options)
        return dict.fromkeys([*titles, WHOLE], PASSED) if whole == PASSED else run_tests(file, options) | {WHOLE: whole}
    verdicts = run_tests(file, options)
    if points_of(verdicts) < len(titles):
        return verdicts | {WHOLE: NOT_TRIED}
    # Of a chapter's structure conformance asks for the chapter's collectives, and zero1_2psi sends others.
    kind = "student" if options.name == exercise.chapter else "free"
    return verdicts | {WHOLE: judge_whole(kind, file, options)}


def run_tests(file: Path, options: argparse.Namespace, *more: str) -> dict[str, str]:
    """The verdicts of the exercise's tests. `more` are options of pytest."""
    lines = Lines(options)
    command = [str(Path(__file__).with_name(f"test_{options.name}.py")), "--file", str(file)]
    command += ["--seconds", str(options.seconds), *([] if options.ranks is None else ["--on", str(options.ranks)])]
    command += ["--rootdir", str(ROOT), "-p", "no:terminal", "-p", "no:cacheprovider", *more]
    if not options.folder:
        command.append("-s")  # what one file prints is seen; what forty files print would hide the table
    status = pytest.main(command, plugins=[lines])
    if status == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise ValueError(f"the tests of {options.name} did not run: pytest ended with status {status}")
    return lines.verdicts


def judge_whole(kind: str, file: Path, options: argparse.Namespace) -> str:
    """By the tests that chapters pass. `kind`: "student", or "free" for a file without a chapter's structure."""
    show(options, "the conformance tests judge the whole file", "...")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(CONFORMANCE), "-x", "--junitxml", str(report)]
        # These tests delay the collectives of the chapters' modules, and a student's file has names of its own.
        command += ["--ignore", str(CONFORMANCE / "test_late_collectives.py")]
        command += ["-m", "chapters and not long and not thorough", "--patience", str(options.seconds)]
        command += ["--engine", f"{kind}:{options.name}:{file}"]
        silence = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with ranks.started(command, cwd=ROOT, env=ranks.environment(), **silence) as process:
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                status = f"no status in {LIMIT} s"
        # A file that ends the process when it is imported leaves no report.
        verdict = PASSED if status == 0 and report.exists() else f"{FAILED}: pytest ended with {status}"
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            for failure in (*case.iter("failure"), *case.iter("error")):
                verdict = f"{FAILED}: {case.get('name')}\n{failure.get('message')}"
    show(options, WHOLE, verdict)
    return verdict


def points_of(verdicts: dict[str, str]) -> int:
    return sum(verdict == PASSED for verdict in verdicts.values())


def next_to_work_on(verdicts: dict[str, str]) -> str:
    """The first step that failed, because its author works on it. If none did, the first that has not passed."""
    left = [title for title, verdict in verdicts.items() if verdict != PASSED]
    failed = [title for title in left if sign_of(verdicts[title]) == FAILED]
    return (failed or left)[0]


def next_hints(check, text: str, many: int) -> str:
    """The next `many` hints of a blank, after those that are in the file's `text` already."""
    words = " ".join(text.replace("#", " ").split())  # however its lines are broken
    hints = [hint for hint in check.hints if hint.replace("#", " ") not in words]
    lines = [f"hint      {hint}" for hint in hints[:many]]
    if hints[many:]:
        lines.append(f"          (one more: {' '.join(['--hint'] * (many + 1))})")
    if not hints:
        lines = [f"hint      there is no other; read {check.read}"]
    return tables.wrapped("\n".join(lines))


def shown(file: Path) -> str:
    return os.path.relpath(file, ROOT) if file.is_relative_to(ROOT) else str(file)


def print_what_is_next(options: argparse.Namespace, verdicts: dict[str, str]) -> None:
    """How many steps of a file have passed, where to read about the next one and, if asked, hints."""
    exercise = EXERCISES[options.name]
    if points_of(verdicts) == len(verdicts):
        print(tables.wrapped(f"\n{shown(options.file)} is correct. It {exercise.goal}."))
        return
    print(f"\n{points_of(verdicts)} of {len(verdicts)} passed.")
    if isinstance(exercise, Task):
        print("The questions at the top of the file are the hints of a task.")
        return
    title = next_to_work_on(verdicts)
    for blank in exercise.blanks:
        if blank.title == title:
            print(f"read      {blank.read}")
            if options.hint:
                print(next_hints(blank, options.file.read_text(errors="replace"), options.hint))


def print_table(found: dict[Path, dict[str, str]]) -> None:
    most_first = sorted(found.values(), key=len, reverse=True)  # first a file that has all steps, in their order
    titles = list(dict.fromkeys(title for verdicts in most_first for title in verdicts))
    rows = [["file", "points", *map(str, range(1, len(titles) + 1))]]
    for file, verdicts in found.items():
        signs = [sign_of(verdicts.get(title, NOT_TRIED)) for title in titles]
        rows.append([file.name, str(points_of(verdicts)), *signs])
    print()
    for number, title in enumerate(titles, start=1):
        print(f"{number:>3}  {title}")
    print("\n" + "\n".join(tables.text(rows, left=tuple(range(len(rows[0]))))))


def write_junit(path: str, found: dict[Path, dict[str, str]]) -> None:
    """One test suite for each file, with a test case for each point, in the format of CI systems and autograders."""
    suites = ElementTree.Element("testsuites")
    for file, verdicts in found.items():
        counts = {"tests": str(len(verdicts)), "failures": str(len(verdicts) - points_of(verdicts))}
        suite = ElementTree.SubElement(suites, "testsuite", counts, name=file.name)
        for title, verdict in verdicts.items():
            case = ElementTree.SubElement(suite, "testcase", name=title)
            if verdict != PASSED:
                ElementTree.SubElement(case, "failure", message=verdict)
    ElementTree.ElementTree(suites).write(path, encoding="unicode", xml_declaration=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's options. Raises ValueError."""
    options = check_options.arguments(argv)
    least = EXERCISES[options.name].ranks
    if options.ranks is not None and options.ranks < least:
        raise ValueError(
            f"N must be {least} or more, because with fewer ranks wrong files could pass; got {options.ranks}"
        )
    how = "" if options.file else f": ./launch.sh exercise {options.name} writes it"
    options.file = (options.file or FOLDER / f"{options.name}.py").resolve()
    if not options.folder and not options.file.is_file():
        raise ValueError(f"there is no {shown(options.file)}{how}")
    if options.file.suffix != ".py":
        raise ValueError(f"--file must be a Python file, FILE.py, got {shown(options.file)}")
    return options


def main(argv: list[str] | None = None) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are connected by gloo, and compute on the CPU
    with one_line(ValueError):
        options = arguments(argv)
        print(f"{options.folder or shown(options.file)}, on the CPU. A file takes about half a minute", flush=True)
        found = {}
        for file in sorted(options.folder.resolve().glob("*.py")) if options.folder else [options.file]:
            found[file] = check_file(file, options)
            pool.kill_all()  # the next file gets ranks that this file cannot have changed
            if options.folder:
                print(f"{file.name}: {points_of(found[file])}", flush=True)
            if options.junit:
                write_junit(options.junit, found)  # now, so that an interrupted command leaves what it has found
        if options.folder:
            print_table(found)
        else:
            print_what_is_next(options, found[options.file])
    correct = all(points_of(verdicts) == len(verdicts) for verdicts in found.values())
    sys.exit(0 if options.folder or correct else 1)

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

from zerolab.measure import tables
from zerolab.run import ranks
from zerolab.run.command_line import one_line
from zerolab.run.ranks import ROOT
from zerolab.teach import check_options
from zerolab.teach.check import student
from zerolab.teach.exercise import FOLDER
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import ChapterExercise

HERE = Path(__file__).parent
CONFORMANCE = ROOT / "tests" / "conformance"
WHOLE = "All steps: the conformance tests of the whole file"
PASSED, OPEN, FAILED, LATE = "passed", "to write", "FAILED", "TOO LATE"
NOT_TRIED = "-"


class Checked:
    """One file, checked in separate processes. `verdicts`: {title of a blank or a target: a sign such as "FAILED"}.

    `results` are JUnit's test cases, with the messages. With `quiet` nothing is printed.
    """

    def __init__(self, file: Path, options: argparse.Namespace, quiet: bool):
        self.file, self.options, self.quiet = file, options, quiet
        self.exercise = EXERCISES[options.name]
        self.verdicts: dict[str, str] = {}
        self.results: list[ElementTree.Element] = []
        problem = student.problem_with(options.name, file)
        if problem:
            self.add("the file itself", FAILED, problem)
        elif isinstance(self.exercise, ChapterExercise):
            self.check_chapter()
        else:
            self.run(HERE / f"test_{options.name}.py", "--file", str(file), *self.ranks())

    @property
    def points(self) -> int:
        return sum(sign == PASSED for sign in self.verdicts.values())

    def check_chapter(self) -> None:
        blanks = range(len(self.exercise.blanks))
        states = [student.state_of_blank(self.options.name, self.file, number)[0] for number in blanks]
        if "missing" in states and OPEN not in states:
            # A file with functions of its own. What it does is right if the whole file is.
            self.check_whole("free")
            if self.verdicts[WHOLE] == PASSED:
                self.verdicts = dict.fromkeys([*(blank.title for blank in self.exercise.blanks), WHOLE], PASSED)
                return
        self.run(HERE / f"test_{self.options.name}.py", "--file", str(self.file), *self.ranks())
        if all(sign == PASSED for sign in self.verdicts.values()):
            # Of a chapter's structure conformance asks for the chapter's collectives, and zero1_2psi sends others.
            self.check_whole("student" if self.options.name == self.exercise.chapter else "free")
        self.verdicts.setdefault(WHOLE, NOT_TRIED)

    def check_whole(self, kind: str) -> None:
        """By the tests that chapters pass. `kind`: "student", or "free" for a file without a chapter's structure."""
        self.show("        ... the conformance tests judge the whole file")
        before = len(self.results)
        engine = f"{kind}:{self.options.name}:{self.file}"
        # These tests delay the collectives of the chapters' modules, and a student's file has names of its own.
        left_out = ["--ignore", str(CONFORMANCE / "test_late_collectives.py")]
        left_out += ["-m", "chapters and not long and not thorough"]
        self.run(CONFORMANCE, *left_out, "--engine", engine, "--patience", str(self.options.seconds))
        failed = [case for case in self.results[before:] if failure_of(case) is not None]
        self.verdicts[WHOLE] = FAILED if failed or len(self.results) == before else PASSED
        self.show(f"{self.verdicts[WHOLE]:<9} {WHOLE}")
        for case in failed[:1]:
            self.show(f"  {case.get('name')}\n  {failure_of(case).get('message')}")

    def ranks(self) -> list[str]:
        found = ["--seconds", str(self.options.seconds)]
        return found if self.options.ranks is None else [*found, "--on", str(self.options.ranks)]

    def run(self, tests: Path, *more: str) -> None:
        """Run pytest on these tests in a separate process, and read its results."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", str(tests), "-s", "--junitxml", str(report)]
            output = None
            if self.quiet or tests == CONFORMANCE:
                output = subprocess.DEVNULL
            else:
                command += ["-p", "no:terminal"]  # the lines that conftest.py prints are all
            variables = ranks.environment(CUDA_VISIBLE_DEVICES="")
            with ranks.started([*command, *more], cwd=ROOT, env=variables, stdout=output, stderr=output) as process:
                try:
                    process.wait(self.options.limit)
                except subprocess.TimeoutExpired:
                    self.add("the time", LATE, f"the tests had not ended after {self.options.limit} s")
                    return
            if not report.exists():
                self.add("the tests", FAILED, f"pytest ended with status {process.returncode} and without a report")
                return
            for case in ElementTree.parse(report).iter("testcase"):
                self.read(case)
            if process.returncode > 1:  # 1: tests have failed
                self.add("the tests", FAILED, f"pytest ended with status {process.returncode}")

    def read(self, case: ElementTree.Element) -> None:
        self.results.append(case)
        properties = {each.get("name"): each.get("value") for each in case.iter("property")}
        title = properties.get("title")
        if title is None:
            return  # of conformance
        sign = PASSED
        if failure_of(case) is not None:
            sign = FAILED
        elif case.find("skipped") is not None:
            sign = OPEN
        if self.verdicts.get(title, PASSED) == PASSED:
            self.verdicts[title] = sign

    def add(self, title: str, sign: str, message: str) -> None:
        """A failure that is not of a test."""
        self.show(f"{sign:<9} {title}\n  {message}")
        self.verdicts[title] = sign
        case = ElementTree.Element("testcase", name=title)
        ElementTree.SubElement(case, "failure", message=message)
        self.results.append(case)

    def show(self, text: str) -> None:
        if not self.quiet:
            print(tables.wrapped(text), flush=True)


def failure_of(case: ElementTree.Element) -> ElementTree.Element | None:
    """What made a test case fail: its `failure`, or the `error` of its setup. None if it did not fail."""
    failure = case.find("failure")
    return case.find("error") if failure is None else failure


def next_to_work_on(verdicts: dict[str, str]) -> str:
    """The first step that failed, because its author works on it. If none did, the first that has not passed."""
    for title, sign in verdicts.items():
        if sign == FAILED:
            return title
    return next(title for title, sign in verdicts.items() if sign != PASSED)


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


def check_one(options: argparse.Namespace) -> list[Checked]:
    """Check one file, and print how many steps have passed and, if asked, hints for the next one to work on."""
    found = Checked(options.file, options, quiet=False)
    total = len(found.verdicts)
    if found.points == total:
        print(tables.wrapped(f"\n{shown(options.file)} is correct. It {found.exercise.goal}."))
        return [found]
    print(f"\n{found.points} of {total} passed.")
    title = next_to_work_on(found.verdicts)
    for blank in getattr(found.exercise, "blanks", ()):
        if blank.title == title:
            print(f"read      {blank.read}")
            if options.hint:
                print(next_hints(blank, options.file.read_text(errors="replace"), options.hint))
    if options.hint and not hasattr(found.exercise, "blanks"):
        print("hint      the questions at the top of the file are the hints of a task")
    return [found]


def check_folder(options: argparse.Namespace) -> list[Checked]:
    """Check all files of a folder, and print a table of their points."""
    found = []
    for file in sorted(options.folder.resolve().glob("*.py")):
        found.append(Checked(file, options, quiet=True))
        print(f"{file.name}: {found[-1].points}", flush=True)
        if options.junit:
            write_junit(Path(options.junit), found)  # now, so that an interrupted command leaves what it has found
    by_verdicts = sorted(found, key=lambda each: -len(each.verdicts))  # first a file that has all steps, in their order
    titles = list(dict.fromkeys(title for each in by_verdicts for title in each.verdicts))
    rows = [["file", "points", *map(str, range(1, len(titles) + 1))]]
    for each in found:
        signs = [each.verdicts.get(title, NOT_TRIED) for title in titles]
        rows.append([each.file.name, str(each.points), *signs])
    print()
    for number, title in enumerate(titles, start=1):
        print(f"{number:>3}  {title}")
    print("\n" + "\n".join(tables.text(rows, left=range(len(rows[0])))))
    return found


def write_junit(path: Path, checked: list[Checked]) -> None:
    """One test suite for each file, in the format that CI systems and autograders read."""
    suites = ElementTree.Element("testsuites")
    for each in checked:
        failed = sum(failure_of(case) is not None for case in each.results)
        suite = ElementTree.SubElement(suites, "testsuite", name=each.file.name, tests=str(len(each.results)),
                                       failures=str(failed))  # fmt: skip
        properties = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(properties, "property", name="points", value=str(each.points))
        for title, sign in each.verdicts.items():
            ElementTree.SubElement(properties, "property", name=title, value=sign)
        suite.extend(each.results)
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
    with one_line(ValueError):
        options = arguments(argv)
        print(f"{options.folder or shown(options.file)}, on the CPU. A file takes about half a minute", flush=True)
        found = check_folder(options) if options.folder else check_one(options)
        if options.junit:
            write_junit(Path(options.junit), found)
            print(f"written: {Path(options.junit).resolve()}")
    correct = all(each.points == len(each.verdicts) for each in found)
    sys.exit(0 if options.folder or correct else 1)

"""`./launch.sh exercise zero2`: the chapter, with the bodies that matter taken out, to be written by you.

The exercises are made from the chapters, so they always fit them. zerolab/teach/exercises has a file for each: the
names of the functions that become blanks, hints and targets.
"""

import ast
import hashlib
import re
import textwrap

from zerolab.measure import tables
from zerolab.run.command_line import one_line
from zerolab.run.ranks import ROOT
from zerolab.teach import exercise_options
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import Blank, ChapterExercise, Task

FOLDER = ROOT / "exercises"
STARTS = ROOT / "zerolab" / "teach" / "exercises" / "starts"
SEAL = "# Checksum of the text above as ./launch.sh exercise wrote it: "


def find(tree: ast.Module, where: str) -> ast.FunctionDef | ast.ClassDef:
    """The function or class of that name ("Class.method", "function" or "Class"). Raises LookupError."""
    node = tree
    for part in where.split("."):
        found = [child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef)]
        node = next((child for child in found if child.name == part), None)
        if node is None:
            raise LookupError(f"there is no {where}")
    return node


def statements(tree: ast.Module, where: str) -> list[ast.stmt]:
    """The statements of the function `where` that are taken out: its body, without the docstring."""
    node = find(tree, where)
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def _comment(paragraphs: list[str], indent: int = 0) -> list[str]:
    """The paragraphs as lines of comments."""
    prefix = f"{' ' * indent}# "
    lines = []
    for paragraph in paragraphs:
        lines += textwrap.wrap(
            paragraph,
            119,
            initial_indent=prefix,
            subsequent_indent=prefix,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _cut(text: str, blank: Blank, hints: int) -> str:
    """The chapter's `text` with this blank."""
    lines = text.split("\n")
    bodies = {where: statements(ast.parse(text), where) for where in blank.where}
    taken = 0
    for body in bodies.values():
        code = lines[body[0].lineno - 1 : body[-1].end_lineno]
        taken += sum(bool(line.strip()) and not line.strip().startswith("#") for line in code)
    step = blank.title.partition(":")[0].upper()
    sentences = [*blank.hints[:hints], f"Target: {blank.target.format(lines=taken)}."]
    sentences[0] = f"{step}. {sentences[0]}"
    top_down = sorted(bodies, key=lambda where: bodies[where][0].lineno)
    for where in reversed(top_down):  # from below, so that the line numbers of the others stay
        body = bodies[where]
        first, last, indent = body[0].lineno - 1, body[-1].end_lineno, body[0].col_offset
        while lines[first - 1].strip().startswith("#"):  # the chapter's comment on what is taken out
            first -= 1
        above = sentences if where == top_down[0] else [f"{step}, as in {top_down[0]}."]
        lines[first:last] = [*_comment(above, indent), f'{" " * indent}raise NotImplementedError("{blank.title}")']
    return "\n".join(lines)


def _introduction(name: str, exercise: ChapterExercise) -> list[str]:
    """The comment below the chapter's docstring."""
    sentences = [
        f"An exercise, made from {exercise.chapter}.py. When it is finished, it {exercise.goal}.",
        "Write what raises NotImplementedError, in this order, which need not be the order of the lines. After each "
        f"blank run ./launch.sh check {name} (--hint gives one more hint).",
        "Each blank is tried by itself: the other blanks are the chapter's then. So names that other code reads must "
        "stay.",
    ]
    lines = _comment(sentences)
    for blank in exercise.blanks:
        lines += [f"#   {blank.title}", *_comment([f"    {', '.join(blank.where)}"])]
    return lines


def generate(name: str, hints: int = 1) -> str:
    """The text of the exercise: the chapter with its blanks, or what a task begins with.

    Raises LookupError if the chapter does not have a blank's function any more.
    """
    exercise = EXERCISES[name]
    if isinstance(exercise, Task):
        return sealed((STARTS / f"{name}.py").read_text().rstrip("\n"))
    text = (ROOT / f"{exercise.chapter}.py").read_text()
    for blank in exercise.blanks:
        text = _cut(text, blank, hints)
    lines, after = text.split("\n"), ast.parse(text).body[0].end_lineno
    lines[after:after] = ["", *_introduction(name, exercise)]
    text = "\n".join(lines)
    text = text.partition("\n# What goes wrong if you delete a line")[0].rstrip()  # it gives answers away
    return sealed(f'{text}\n\n\nif __name__ == "__main__":\n    main({exercise.engine})')


def sealed(text: str) -> str:
    return f"{text}\n\n{SEAL}{_checksum(text)}\n"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.rstrip().encode()).hexdigest()[:16]


def edited(text: str) -> bool:
    """Whether the text of an exercise was changed after it was written."""
    before, _, seal = text.rpartition(SEAL)
    return seal.strip() != _checksum(before)


def lines_of_blanks(text: str) -> dict[str, int]:
    """{title: line} of the first body of each blank that is still to write."""
    found = {}
    for number, line in enumerate(text.split("\n"), start=1):
        blank = re.match(r'\s*raise NotImplementedError\("(.*)"\)', line)
        if blank:
            found.setdefault(blank[1], number)
    return found


def summary(name: str, text: str) -> str:
    """What is printed after an exercise was written."""
    exercise, lines = EXERCISES[name], lines_of_blanks(text)
    sentences = [f"written: {FOLDER / name}.py"]
    for blank in getattr(exercise, "blanks", ()):
        sentences.append(f"  line {lines.get(blank.title, '')}: {blank.title}")
    sentences.append(f"When it is finished, it {exercise.goal}.")
    sentences.append(f"Check it at any time, in about half a minute: ./launch.sh check {name}")
    return "\n".join(sentences)


@one_line(ValueError, OSError)
def main(argv: list[str] | None = None) -> None:
    options = exercise_options.arguments(argv)
    file, text = FOLDER / f"{options.name}.py", generate(options.name, hints=options.hints)
    if file.exists() and edited(file.read_text(errors="replace")) and not options.force:
        shown = file.relative_to(ROOT)
        raise ValueError(f"{shown} exists and was edited. With --force it is overwritten, and your changes are lost")
    FOLDER.mkdir(exist_ok=True)
    file.write_text(text)
    print(tables.wrapped(summary(options.name, text)))


if __name__ == "__main__":
    main()

"""`./launch.sh exercise zero2`: the chapter with the bodies that matter taken out, to be written anew.

The exercises are made from the reference, so they cannot grow old beside it. The reference carries no marks:
exercises.toml names functions, and the statements inside them that become a blank. It names a statement by the words
that its code begins with, as `self.flat =`. What is not found, or found twice, is an error.
"""

import ast
import hashlib
import re
import textwrap
from dataclasses import dataclass, field

from zerolab.measure import tables
from zerolab.run import options as common
from zerolab.run.command_line import Parser, one_line
from zerolab.run.ranks import ROOT
from zerolab.teach import written

FOLDER = ROOT / "exercises"


@dataclass(frozen=True)
class Check:
    """What `check` asks of a file, and gives a point for: the whole file, or what one of the classes below says.

    `where` is the function ("Class.method") that is looked at, if it is one. `read` says where to look when it fails.
    """

    title: str
    where: str = ""
    read: str = "what stands at the top of the file, and its class's docstring"
    hints: tuple[str, ...] = ()
    no_hint = "all blanks are written"


@dataclass(frozen=True, kw_only=True)
class Blank(Check):
    """A body to write: in the function `where` the statements from `first` to `last`.

    These are the words that a statement's code begins with, one statement of the function alone. It may stand inside of
    another one, as a `with`; then that one's body is meant. Without `first` from the beginning of the body, without
    `last` to its end. `title` is what the error says. Above it stand as many of its hints as were asked for (the first:
    what to think of, the second: how to go about it), and `target`, in which {lines} are the reference's lines of code.
    A method that the class has from elsewhere is given with its `head`, and added to the class. A blank is compared
    with what the chapter has there; or with its `answer`, a function that does more than the chapter's.
    """

    target: str
    first: str = ""
    last: str = ""
    head: str = ""
    answer: str = ""
    no_hint = "there is no other"


@dataclass(frozen=True)
class Target(Check):
    """What a task demands: of a `number` (check/tasks.py) `least`, or `most`, in parts of what the chapter has.

    Without a number: the chapter's weights.
    """

    number: str = ""
    least: float = 0
    most: float | None = None
    no_hint = "a task has none"


@dataclass(frozen=True)
class Exercise:
    """A file to write, whose class `engine` is checked: the chapter `source` with `blanks`, in all with this `goal`.

    Or a task that is in no chapter: `text` to begin with, and `targets` that `check` measures beside the source's
    class, which is given the same `options` and so many `backwards` per step. It needs so many `ranks`.
    What is checked `takes` so long.
    """

    source: str
    engine: str
    goal: str
    blanks: tuple[Blank, ...] = ()
    text: str = ""
    targets: tuple[Target, ...] = ()
    options: dict = field(default_factory=dict)
    backwards: int = 1
    ranks: int = 2
    takes: str = "about a minute"

    @property
    def checks(self) -> tuple[Check, ...]:
        """The blanks, each by itself, and then the whole file; or a task's targets. A task without has the score of
        `conform`."""
        if self.blanks:
            return *self.blanks, Check("All steps: training steps, what they send and what they hold")
        return self.targets


def _exercises() -> dict[str, Exercise]:
    """What exercises.toml and tasks.toml have."""
    found = {}
    rows = written.beside(__file__, "exercises") | written.beside(__file__, "tasks")
    for name, row in rows.items():
        blanks = tuple(Blank(**blank) for blank in row.pop("blanks", ()))
        targets = tuple(Target(**target) for target in row.pop("targets", ()))
        found[name] = Exercise(**row, blanks=blanks, targets=targets)
    return found


EXERCISES = _exercises()


def find(tree: ast.Module, where: str) -> ast.FunctionDef:
    """The function of that name ("Class.method" or "function"). Raises LookupError if there is none."""
    node = tree
    for part in where.split("."):
        kinds = ast.ClassDef | ast.FunctionDef
        node = next((child for child in node.body if isinstance(child, kinds) and child.name == part), None)
        if node is None:
            raise LookupError(f"there is no {where}")
    return node


def _named(node: ast.FunctionDef, start: str) -> tuple[list[ast.stmt], int]:
    """A body inside `node`, and the place in it of the statement whose code begins with `start`.

    Raises LookupError if that is no statement's beginning, or several statements'.
    """
    bodies = [body for each in ast.walk(node) if isinstance(body := getattr(each, "body", None), list)]
    found = []
    for body in bodies:
        for place, statement in enumerate(body):
            if ast.unparse(statement).startswith(start):
                found.append((body, place))
    if len(found) != 1:
        raise LookupError(f"{start!r} begins {len(found)} of its statements, and must begin one")
    return found[0]


def statements(tree: ast.Module, blank: Blank) -> list[ast.stmt]:
    """The statements of the chapter `tree` that `blank` takes out. Raises LookupError if they are not found."""
    node = find(tree, blank.where)
    behind_docstring = int(ast.get_docstring(node) is not None)
    body, first = _named(node, blank.first) if blank.first else (node.body, behind_docstring)
    inside, last = _named(node, blank.last) if blank.last else (body, len(body) - 1)
    if inside is not body or last < first:
        raise LookupError(f"{blank.last!r} does not stand behind {blank.first!r}")
    return body[first : last + 1]


def _opened(text: str, blank: Blank, hints: int) -> str:
    """The chapter's `text` with this blank in it. Raises LookupError for what is not found."""
    lines = text.split("\n")
    if blank.head:
        end = find(ast.parse(text), blank.where.partition(".")[0]).end_lineno
        lines[end:end] = ["", *blank.head.split("\n"), *_instead(blank, [], 8, hints)]
    else:
        taken = statements(ast.parse(text), blank)
        first, last, indent = taken[0].lineno - 1, taken[-1].end_lineno, taken[0].col_offset
        while lines[first - 1].strip().startswith("#"):  # what the chapter says of these statements
            first -= 1
        lines[first:last] = _instead(blank, lines[first:last], indent, hints)
    return "\n".join(lines)


def generate(name: str, hints: int = 1) -> str:
    """The text of the exercise: the chapter with its blanks. Above each stands its target, and so many of its hints.

    Raises LookupError, with the chapter, the function and what was looked for, for what is not in the chapter any more.
    """
    exercise = EXERCISES[name]
    if exercise.text:
        text = exercise.text.rstrip("\n")
        return f"{text}\n{SEAL}{_digest(text)}\n"
    text = (ROOT / exercise.source).read_text()
    for blank in exercise.blanks:
        try:
            text = _opened(text, blank, hints)
        except LookupError as error:
            where = f"{exercise.source}, {blank.where}"
            raise LookupError(f"{where}: {error}; change zerolab/teach/exercises.toml") from None
    lines, after = text.split("\n"), ast.parse(text).body[0].end_lineno  # the chapter's docstring, above all blanks
    lines[after:after] = ["", *_goal(name, exercise)]
    text = re.sub(r"Run it: torchrun .*?\.py", f"Check it: ./launch.sh check {name}", "\n".join(lines), count=1)
    text = re.sub(r"^# Without this line.*?(?=^if __name__)", "", text, flags=re.MULTILINE | re.DOTALL)  # has answers
    return f"{text}\n{SEAL}{_digest(text)}\n"


SEAL = "# What is above as ./launch.sh exercise wrote it: "


def _digest(text: str) -> str:
    return hashlib.sha256(text.rstrip().encode()).hexdigest()[:16]


def edited(text: str) -> bool:
    """Whether somebody has changed the text of an exercise since it was written, from whatever reference."""
    before, _, seal = text.rpartition(SEAL)
    return seal.strip() != _digest(before)


def _instead(blank: Blank, taken: list[str], indent: int, hints: int) -> list[str]:
    target = blank.target.format(lines=sum(bool(line.strip()) and line.strip()[0] != "#" for line in taken))
    said = [*blank.hints[:hints], f"Target: {target}."]
    step, _, _ = blank.title.partition(":")
    said[0] = f"{step.upper()}. {said[0]}"
    return [*_comment(said, indent), f'{" " * indent}raise NotImplementedError("{blank.title}")']


def _comment(said: list[str], indent: int = 0) -> list[str]:
    """What is said as comments, each broken into lines."""
    begin = f"{' ' * indent}# "
    lines = []
    for part in said:
        lines += textwrap.wrap(part, 119, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False)
    return lines


def _goal(name: str, exercise: Exercise) -> list[str]:
    said = [
        f"An exercise, made from {exercise.source}. In all it {exercise.goal}.",
        f"Write what raises NotImplementedError, in this order, which is that of work and not of lines, and ask after "
        f"each: ./launch.sh check {name} (a hint more: --hint)",
        "Each is tried alone: all others are then the chapter's. So names that other code reads must stay.",
    ]
    blanks = [f"#   {blank.where:<24} {blank.title}" for blank in exercise.blanks]
    return [*_comment(said), *blanks]


def lines_of_blanks(text: str) -> dict[str, int]:
    """{title: line} of the blanks of an exercise as it was written."""
    blanks = re.finditer(r'raise NotImplementedError\("(.*?)"', text)
    return {blank[1]: text[: blank.start()].count("\n") + 1 for blank in blanks}


def told(name: str, text: str) -> str:
    """What is printed of an exercise that was written."""
    exercise, lines = EXERCISES[name], lines_of_blanks(text)
    said = [f"written: {FOLDER / name}.py. What is asked, in the order of work and with its line:"]
    for check in exercise.checks:
        said.append(f"  {lines.get(check.title, ''):>4}  {check.title}")
    said.append(f"In all it {exercise.goal}.")
    said.append(f"Ask at any time, which takes {exercise.takes}: ./launch.sh check {name}")
    return "\n".join(said)


@one_line(ValueError, OSError)
def main(argv=None) -> None:
    parser = Parser("exercise NAME", description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    common.add(parser, "hints", "force")
    options = parser.parse_args(argv)
    file, text = FOLDER / f"{options.name}.py", generate(options.name, hints=options.hints)
    shown = file.relative_to(ROOT)
    if file.exists() and edited(file.read_text(errors="replace")) and not options.force:
        raise ValueError(
            f"{shown} is there and was edited; with --force it is written anew, and what you wrote is lost"
        )
    FOLDER.mkdir(exist_ok=True)
    file.write_text(text)
    print(tables.wrapped(told(options.name, text)))


if __name__ == "__main__":
    main()

"""`./launch.sh changes`: what changes from a chapter's class to the next one's, method by method.

A line-by-line diff of two files shows a method that has moved as one that went and one that came. This compares
methods of the same name. "The same" means the same code; words about it (docstrings, comments) may differ.
"""

import ast
import copy
import difflib
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from harness.run.command_line import Parser, one_line

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}
STEPS = (("zero1", "zero2"), ("zero2", "zero3"))


@dataclass(frozen=True)
class Chapter:
    """A stage file: the methods of its class, in the order of the file, and the names of what else it defines."""

    text: str
    methods: dict[str, ast.FunctionDef]
    beside: list[str]

    def source(self, method: str) -> list[str]:
        """The lines of a method, as they stand in the file."""
        node = self.methods[method]
        return self.text.split("\n")[node.lineno - 1 : node.end_lineno]

    def words(self, method: str) -> str:
        """The first line of a method's docstring."""
        return (ast.get_docstring(self.methods[method]) or "").partition("\n")[0]


def read(name: str) -> Chapter:
    """The chapter "zero1", "zero2" or "zero3"."""
    text = (ROOT / f"{name}.py").read_text()
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    defined.pop("main", None)
    stage = defined.pop(CHAPTERS[name])
    methods = {node.name: node for node in stage.body if isinstance(node, ast.FunctionDef)}
    return Chapter(text, methods, list(defined))


def code(method: ast.FunctionDef) -> str:
    """A method's code alone, without its docstring and its comments."""
    alone = copy.deepcopy(method)
    for node in ast.walk(alone):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(alone)


def sort(old: Chapter, new: Chapter) -> dict[str, list[str]]:
    """{"the same", "changed", "new", "gone": names of methods}, each in the order of its chapter."""
    both = [name for name in new.methods if name in old.methods]
    same = [name for name in both if code(new.methods[name]) == code(old.methods[name])]
    return {
        "the same": same,
        "changed": [name for name in both if name not in same],
        "new": [name for name in new.methods if name not in old.methods],
        "gone": [name for name in old.methods if name not in new.methods],
    }


def report(first: str, second: str) -> str:
    """What `./launch.sh changes zero1 zero2` prints."""
    old, new = read(first), read(second)
    kinds = sort(old, new)
    lines = [f"{CHAPTERS[first]} -> {CHAPTERS[second]}, method by method (the same: but for words about it)", ""]
    for kind, names in {**kinds, "beside it": new.beside}.items():
        lines += textwrap.wrap(f"{kind:<10}{', '.join(names) or 'nothing'}", 118, subsequent_indent=" " * 10)
    for name in kinds["changed"]:
        diff = difflib.unified_diff(old.source(name), new.source(name), n=2, lineterm="")
        lines += ["", f"{name}, changed"]
        for line in list(diff)[3:]:  # without the lines that name files and places
            lines.append(" ..." if line.startswith("@@") else line.rstrip())
    if kinds["new"]:
        lines += ["", "New methods:"]
    for name in kinds["new"]:
        lines += textwrap.wrap(f"  {name:<26}{new.words(name)}", 118, subsequent_indent=" " * 28)
    return "\n".join(lines)


@one_line(ValueError)
def main(argv: list[str] | None = None) -> int:
    parser = Parser("changes [CHAPTER CHAPTER]", description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="zero1 zero2, zero2 zero3 or zero1 zero3 (default: the first two)")
    chapters = parser.parse_args(argv).chapters
    if chapters and (len(chapters) != 2 or not set(chapters) <= set(CHAPTERS)):
        raise ValueError(f"changes needs two of {', '.join(CHAPTERS)}, got {' '.join(chapters)!r}")
    print("\n\n".join(report(*pair) for pair in ([chapters] if chapters else STEPS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`./launch.sh changes`: what changes from a chapter's class to the next one's, method by method.

A line-by-line diff of two files shows a method that has moved as one that went and one that came. This compares
methods of the same name. "The same" means the same code; words about it (docstrings, comments) may differ.
"""

import ast
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
    """A stage file: the methods of its class and what else it defines, {name: source}, in the order of the file."""

    name: str
    methods: dict[str, str]
    beside: dict[str, str]
    words: dict[str, str]  # method -> first line of its docstring


def read(name: str) -> Chapter:
    """The chapter "zero1", "zero2" or "zero3"."""
    text = (ROOT / f"{name}.py").read_text()
    beside, methods, words = {}, {}, {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == CHAPTERS[name]:
            for method in filter(lambda node: isinstance(node, ast.FunctionDef), node.body):
                methods[method.name] = "\n".join(text.split("\n")[method.lineno - 1 : method.end_lineno])
                words[method.name] = (ast.get_docstring(method) or "").partition("\n")[0]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name != "main":
            beside[node.name] = ast.get_source_segment(text, node)
    return Chapter(name, methods, beside, words)


def code(source: str) -> str:
    """A method's code alone, without its docstring and its comments."""
    tree = ast.parse("if True:\n" + source if source.startswith(" ") else source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def sort(old: Chapter, new: Chapter) -> dict[str, list[str]]:
    """{"the same", "changed", "new", "gone": names of methods}, each in the order of its chapter."""
    kinds = {kind: [] for kind in ("the same", "changed", "new", "gone")}
    for name in {**new.methods, **old.methods}:
        if name not in new.methods:
            kinds["gone"].append(name)
        elif name not in old.methods:
            kinds["new"].append(name)
        else:
            kinds["the same" if code(new.methods[name]) == code(old.methods[name]) else "changed"].append(name)
    return kinds


def report(first: str, second: str) -> str:
    """What `./launch.sh changes zero1 zero2` prints."""
    old, new = read(first), read(second)
    kinds = sort(old, new)
    lines = [f"{CHAPTERS[first]} -> {CHAPTERS[second]}, method by method (the same: but for words about it)", ""]
    for kind, names in {**kinds, "beside it": new.beside}.items():
        lines += textwrap.wrap(f"{kind:<10}{', '.join(names) or 'nothing'}", 118, subsequent_indent=" " * 10)
    for name in kinds["changed"]:
        texts = [chapter.methods[name].split("\n") for chapter in (old, new)]
        diff = list(difflib.unified_diff(*texts, n=2, lineterm=""))[3:]  # without the lines that name files and places
        lines += ["", f"{name}, changed", *(" ..." if line.startswith("@@") else line.rstrip() for line in diff)]
    lines += ["", "New methods:"] * bool(kinds["new"])
    for name in kinds["new"]:
        lines += textwrap.wrap(f"  {name:<26}{new.words[name]}", 118, subsequent_indent=" " * 28)
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

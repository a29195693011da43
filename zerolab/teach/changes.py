"""`./launch.sh changes`: what changes from a chapter's class to the next one's, method by method.

A line-by-line diff of two files shows a method that has moved as one that went and one that came. This compares
methods of the same name. "The same" means the same code; words about it (docstrings, comments) may differ.
"""

import ast
import difflib
import inspect
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise

from zerolab.run.command_line import Parser, one_line
from zerolab.run.engines import CHAPTERS


def methods_of(chapter: type) -> dict[str, Callable]:
    """The methods of a chapter's class, in the order of the file."""
    return {name: one for name, one in vars(chapter).items() if inspect.isfunction(one)}


def beside(chapter: type) -> list[str]:
    """What else its file defines."""
    defined = vars(inspect.getmodule(chapter)).items()
    own = [name for name, one in defined if getattr(one, "__module__", None) == chapter.__module__]
    return [name for name in own if name not in (chapter.__name__, "main")]


def words(method: Callable) -> str:
    """The first line of a method's docstring."""
    return (method.__doc__ or "").partition("\n")[0]


def code(method: Callable) -> str:
    """A method's code alone, without its docstring and its comments."""
    alone = ast.parse(textwrap.dedent(inspect.getsource(method)))
    for node in ast.walk(alone):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(alone)


def sort(first: str, second: str) -> dict[str, list[str]]:
    """{"the same", "changed", "new", "gone": names of methods}, each in the order of its chapter."""
    old, new = methods_of(CHAPTERS[first]), methods_of(CHAPTERS[second])
    kinds = {"the same": [], "changed": [], "new": [], "gone": [name for name in old if name not in new]}
    for name in new:
        same = name in old and code(new[name]) == code(old[name])
        kinds["the same" if same else "changed" if name in old else "new"].append(name)
    return kinds


def report(first: str, second: str) -> str:
    """What `./launch.sh changes zero1 zero2` prints."""
    old, new = CHAPTERS[first], CHAPTERS[second]
    kinds = sort(first, second)
    lines = [f"{old.__name__} -> {new.__name__}, method by method (the same: but for words about it)", ""]
    for kind, names in {**kinds, "beside it": beside(new)}.items():
        lines += textwrap.wrap(f"{kind:<10}{', '.join(names) or 'nothing'}", 118, subsequent_indent=" " * 10)
    for name in kinds["changed"]:
        before, after = (inspect.getsource(getattr(chapter, name)).splitlines() for chapter in (old, new))
        diff = difflib.unified_diff(before, after, n=2, lineterm="")
        lines += ["", f"{name}, changed"]
        for line in list(diff)[3:]:  # without the lines that name files and places
            lines.append(" ..." if line.startswith("@@") else line.rstrip())
    if kinds["new"]:
        lines += ["", "New methods:"]
    for name in kinds["new"]:
        lines += textwrap.wrap(f"  {name:<26}{words(getattr(new, name))}", 118, subsequent_indent=" " * 28)
    return "\n".join(lines)


@one_line(ValueError)
def main(argv: list[str] | None = None) -> int:
    parser = Parser("changes [CHAPTER CHAPTER]", description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="zero1 zero2, zero2 zero3 or zero1 zero3 (default: the first two)")
    chapters = parser.parse_args(argv).chapters
    if chapters and (len(chapters) != 2 or not set(chapters) <= set(CHAPTERS)):
        raise ValueError(f"changes needs two of {', '.join(CHAPTERS)}, got {' '.join(chapters)!r}")
    print("\n\n".join(report(*pair) for pair in ([chapters] if chapters else pairwise(CHAPTERS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

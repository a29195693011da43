"""Which lines of a chapter a rank is at: those of the `with record_function(...)` block whose label is open."""

import ast
from dataclasses import dataclass
from pathlib import Path

import zero1
import zero2
import zero3

FILES = {number: Path(module.__file__) for number, module in enumerate((zero1, zero2, zero3), 1)}  # of the chapters


@dataclass(frozen=True)
class Block:
    """The lines `first` to `last` of a chapter, in `function`.

    If a label ends with a unit's name, such as "send blocks.0", `label` leaves the name out: "send ".
    """

    label: str
    chapter: int
    function: str
    first: int
    last: int


def blocks_of(chapter: int | None) -> list[Block]:
    """The blocks of a chapter, and those of earlier chapters whose labels it does not have. Empty without a chapter."""
    found: list[Block] = []
    for number in range(chapter or 0, 0, -1):
        later = {block.label for block in found}
        found += [block for block in blocks_in(number, FILES[number].read_text()) if block.label not in later]
    return found


def blocks_in(chapter: int, source: str) -> list[Block]:
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.With):
                for item in node.items:
                    label = _label_of(item.context_expr)
                    if label is not None:
                        found.append(Block(label, chapter, function.name, node.lineno, node.end_lineno))
    return found


def _label_of(call: ast.expr) -> str | None:
    """The label of `record_function("...")`. Of an f-string, it is the text in front of the first value."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "record_function"):
        return None
    label = call.args[0]
    if isinstance(label, ast.JoinedStr):
        label = label.values[0]
    return label.value if isinstance(label, ast.Constant) else None


def innermost(labels: list[str], blocks: list[Block]) -> list[Block]:
    """The blocks of the innermost of the open labels that has any. Several, where a label is used in several places."""
    for label in reversed(labels):
        found = [block for block in blocks if _fits(block.label, label)]
        if found:
            return found
    return []


def _fits(of_a_block: str, label: str) -> bool:
    return label.startswith(of_a_block) if of_a_block.endswith(" ") else label == of_a_block

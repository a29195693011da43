"""Wrong chapters: one table of statements of the chapters, of what takes their place, and of what one sees then.

A statement is found in the syntax tree of its function, so that comments and layout may change. It must be there
exactly once.
"""

import ast
import contextlib
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """In `function` of `chapter`, `statement` becomes `replacement`. For `if ...:` only the line itself is replaced."""

    chapter: str  # "zero1"
    function: str  # "ZeRO1.step", or "take_over"
    statement: str
    replacement: str = "pass"

    def __str__(self):
        return f"{self.function}: {self.statement}" + (f" -> {self.replacement}" if self.replacement != "pass" else "")


def mutated_source(mutation):
    """The text of the chapter with the mutation, without comments. Raises LookupError if it does not fit."""
    tree = ast.parse((ROOT / f"{mutation.chapter}.py").read_text())
    function = find_function(tree, mutation.function)
    places = list(places_of(function, mutation.statement))
    if len(places) != 1:
        raise LookupError(f"{mutation.statement!r} is {len(places)} times in {mutation.function}, expected once")
    body, index = places[0]
    if mutation.statement.startswith("if "):
        body[index].test = ast.parse(f"{mutation.replacement} pass").body[0].test
    else:
        body[index : index + 1] = ast.parse(mutation.replacement).body
    return ast.unparse(ast.fix_missing_locations(tree))


def find_function(tree, name):
    for part in name.split("."):
        found = [node for node in tree.body if getattr(node, "name", None) == part]
        if len(found) != 1:
            raise LookupError(f"there is no {name}")
        tree = found[0]
    return tree


def places_of(function, statement):
    """(the list that has the statement, its index) for each place inside of the function."""
    is_if = statement.startswith("if ")
    wanted = ast.unparse(ast.parse(f"{statement} pass" if is_if else statement).body[0])
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            body = getattr(node, name, None)
            for index, each in enumerate(body if isinstance(body, list) else []):
                text = ast.unparse(each)
                if text == wanted or (is_if and text.split("\n")[0] == wanted.split("\n")[0]):
                    yield body, index


@contextlib.contextmanager
def mutated(mutation):
    """Inside, importing the chapter gives the wrong one. Yields its module. Earlier imports keep the right one."""
    name = mutation.chapter
    before = sys.modules.get(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.py")
        file.write_text(mutated_source(mutation))
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            yield module
        finally:
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before

"""The rooms: who may import whom, what lies flat, how long a chapter may be; and whether names for GPUs are there."""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "run", "measure", "plan", "properties", "teach")
CHAPTERS = ("zero1", "zero2", "zero3")
WALKTHROUGH = "harness.measure.walkthrough"  # the demo's driver: a chapter starts it, and knows it nowhere else


# Imports.


def name_of(file: Path) -> str:
    """The module in `file`, as it is imported: "harness.run.data"."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(text: str, module: str = "") -> set[tuple[str, str | None]]:
    """(imported module, the function in which it is imported or None) of a file's `text`; `module` is its own name.

    `from package import name` counts as package.name: whether that is a module or something in one, it lies there.
    """
    found = set()

    def look(node, function):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Import):
                found.update((alias.name, function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = module.split(".")[: -child.level] if child.level else []
                base = ".".join([*package, *([child.module] if child.module else [])])
                found.update((f"{base}.{alias.name}", function) for alias in child.names)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
                found.update((arg.value, function) for arg in child.args[:1] if isinstance(arg, ast.Constant))
            look(child, inside)

    look(ast.parse(text), None)
    return found


def place_of(imported: str) -> str:
    """The room or the file at the top that `imported` belongs to, "harness" for the house itself, else the package."""
    first, *rest = imported.split(".")
    return rest[0] if first == "harness" and rest and rest[0] in ROOMS else first


def own(places) -> set[str]:
    """Those of `places` that are the project's own, and not an installed package."""
    return set(places) & {*ROOMS, *CHAPTERS, "harness", "fsdp2_compare", "tests"}


def table_of_rooms() -> dict[str, tuple[set[str], int]]:
    """{room: (places that it may import, lines at most)}, from the one place where they stand: docs/design.md."""
    found = {}
    for line in (ROOT / "docs" / "design.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[3].isdigit():
            names = re.findall(r"`([^`]+)`", cells[0])
            everything = {*ROOMS, *CHAPTERS, "fsdp2_compare", "harness"}
            may = everything if cells[2] == "everything" else set(cells[2].split(", "))
            may = (may - {"chapters"}) | (set(CHAPTERS) if "chapters" in may else set())
            found[" ".join(names)] = may, int(cells[3])
    return found


TABLE = table_of_rooms()


def files_of(place: str) -> list[Path]:
    """The Python files of a line of the table, which names files or a folder."""
    found = []
    for path in map(ROOT.joinpath, place.split()):
        found += path.rglob("*.py") if path.is_dir() else [path]
    assert found, place
    return found


def test_every_room_has_its_line_in_the_table():
    assert {place.removeprefix("harness/") for place in TABLE if place.startswith("harness/")} == set(ROOMS)
    assert {"zero1.py zero2.py zero3.py", "fsdp2_compare.py", "tests"} < set(TABLE)


@pytest.mark.parametrize("place", TABLE)
def test_no_room_has_more_lines_than_it_may_have(place):
    """A room that must grow says so in the commit that raises its number in docs/design.md."""
    lines = sum(len(file.read_text().splitlines()) for file in files_of(place))
    assert lines <= TABLE[place][1], f"{place}: {lines} lines of Python, allowed {TABLE[place][1]}"


@pytest.mark.parametrize("place", [*(f"harness/{room}" for room in ROOMS), "fsdp2_compare.py"])
def test_a_room_imports_only_what_it_may(place):
    for file in files_of(place):
        found = own(place_of(imported) for imported, _ in imports_of(file.read_text(), name_of(file)))
        assert found <= TABLE[place][0], f"{file.relative_to(ROOT)} imports {sorted(found - TABLE[place][0])}"


def test_the_engine_needs_torch_and_nothing_else_that_is_installed():
    for file in (ROOT / "harness" / "engine").rglob("*.py"):
        found = {imported.split(".")[0] for imported, _ in imports_of(file.read_text(), name_of(file))}
        more = found - sys.stdlib_module_names - {"torch", "harness"}
        assert not more, f"{file.relative_to(ROOT)} imports {sorted(more)}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_imports_the_engine_and_earlier_chapters(chapter):
    text = (ROOT / f"{chapter}.py").read_text()
    earlier = set(CHAPTERS[: CHAPTERS.index(chapter)])
    assert any(imported.startswith(WALKTHROUGH) for imported, _ in imports_of(text, chapter))  # also in functions
    for imported, function in imports_of(text, chapter):
        if imported.startswith(WALKTHROUGH):
            assert function == "main", f"{imported} is imported in {function}"
        else:
            assert own({place_of(imported)}) <= {"engine", *earlier}, imported


# What lies where.


def test_nothing_lies_flat_in_the_house():
    assert [file.name for file in (ROOT / "harness").glob("*.py")] == ["__init__.py"]
    folders = {path.parent.name for path in (ROOT / "harness").glob("*/__init__.py")}
    assert folders == set(ROOMS)


# How long a chapter is.


def code_lines(text: str) -> int:
    """Lines of `text` with code on them: no docstrings, comments or blank lines. A string of three lines is three."""
    comments = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in comments:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def code_lines_of_class(text: str, name: str) -> int:
    """As `code_lines`, of one class with its decorators."""
    (node,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    return code_lines("\n".join(text.split("\n")[first - 1 : node.end_lineno]))


BUDGETS = {"zero1": ("ZeRO1", 65, 260), "zero2": ("ZeRO2", 75, 200), "zero3": ("ZeRO3", 125, 300)}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_read_in_one_sitting(chapter):
    """Lines of code of its class, and lines of the file in all."""
    name, code, all_lines = BUDGETS[chapter]
    text = (ROOT / f"{chapter}.py").read_text()
    found = code_lines_of_class(text, name), len(text.splitlines())
    assert code // 2 < found[0] <= code and found[1] <= all_lines, f"{found}, allowed {code, all_lines}"


# What runs only where there is a GPU.


def test_names_of_torchs_inner_modules_are_there():
    """A wrong one would else be noticed by the first who has a GPU. What we use is in torch's build for CPUs too."""
    found = set()
    for file in [*ROOT.glob("*.py"), *ROOT.glob("[ht]*/**/*.py"), *ROOT.glob("notebooks/*.ipynb")]:
        text = file.read_text()
        imported = {name for name, _ in imports_of(text)} if file.suffix == ".py" else set()
        hidden = imported & {"torch.cuda", "torch._C"}
        assert not hidden, f"{file.relative_to(ROOT)}: write {hidden.pop()}.NAME, that this test can look it up"
        found |= set(re.findall(r"\btorch\.(cuda|_C)\.(\w+)", "\n".join([text, *imported])))
    missing = [f"torch.{module}.{name}" for module, name in found if not hasattr(getattr(torch, module), name)]
    assert len(found) > 20 and not missing, missing

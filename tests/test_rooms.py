"""The rooms: who may import whom, how many tokens they have, how long a chapter is; and names that only GPUs need."""

import ast
import functools
import io
import json
import re
import sys
import tokenize
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "run", "measure", "properties", "teach")
CHAPTERS = ("zero1", "zero2", "zero3")
CORE = (*(f"{chapter}.py" for chapter in CHAPTERS), "fsdp2_compare.py", "harness", "tests")
CORE_IN_ALL = "core in all"
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
    return set(places) & {*ROOMS, *CHAPTERS, "harness", "fsdp2_compare", "tests", "extra"}


def table_of_rooms() -> dict[str, tuple[set[str], int | None]]:
    """{room: (places that it may import, tokens at most or None)}, from where they stand: docs/design.md."""
    found = {}
    for line in (ROOT / "docs" / "design.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        most = cells[-1].replace(",", "")
        if len(cells) == 4 and (most.isdigit() or most == "none"):
            names = " ".join(re.findall(r"`([^`]+)`", cells[0])) or cells[0]
            found[names] = places_in(cells[2]), int(most) if most.isdigit() else None
    return found


def places_in(words: str) -> set[str]:
    """What a room may import: "engine, chapters, run", "everything" or "everything but extra"."""
    everything = {*ROOMS, *CHAPTERS, "fsdp2_compare", "harness", "tests"}
    if words.startswith("everything"):
        return everything if words.endswith("but extra") else {*everything, "extra"}
    may = set(words.split(", "))
    return may - {"chapters"} | set(CHAPTERS) if "chapters" in may else may


TABLE = table_of_rooms()


def files_of(place: str) -> list[Path]:
    """The Python files of a line of the table, which names files or a folder, or the core in all."""
    found = []
    for path in map(ROOT.joinpath, CORE if place == CORE_IN_ALL else place.split()):
        found += path.rglob("*.py") if path.is_dir() else [path]
    assert found, place
    return found


def test_every_room_has_its_line_in_the_table():
    assert {place.removeprefix("harness/") for place in TABLE if place.startswith("harness/")} == set(ROOMS)
    assert {"zero1.py zero2.py zero3.py", "fsdp2_compare.py", "tests", "extra", CORE_IN_ALL} < set(TABLE)


# How much is in a room.

COUNTED = ("NAME", "OP", "NUMBER", "STRING", "FSTRING_START", "FSTRING_MIDDLE")  # before Python 3.12 an f-string is one


def lines_of_docstrings(text: str) -> set[int]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def number_of_tokens(text: str) -> int:
    """Names, operators, numbers and strings of `text`; no docstrings, no comments."""
    counted = {getattr(tokenize, name) for name in COUNTED if hasattr(tokenize, name)}
    docstrings = lines_of_docstrings(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type in counted and token.start[0] not in docstrings for token in tokens)


@functools.cache
def tokens_in(file: Path) -> int:
    return number_of_tokens(file.read_text())


def test_tokens_are_counted_without_comments_and_docstrings():
    function = '"""A module."""\n\n\ndef add(a, b=1):  # comment\n    """Two\n    lines."""\n    return a + b\n'
    assert number_of_tokens(function) == 10 + 4  # def add ( a , b = 1 ) :     return a + b
    assert number_of_tokens("x = 'a # b'\n# y = 2\n") == 3


@pytest.mark.parametrize("place", [place for place, (_, most) in TABLE.items() if most is not None])
def test_no_room_has_more_tokens_than_it_may_have(place):
    """A room that must grow says so in the commit that raises its number in docs/design.md."""
    tokens = sum(map(tokens_in, files_of(place)))
    assert tokens <= TABLE[place][1], f"{place}: {tokens:,} tokens of Python, allowed {TABLE[place][1]:,}"


# Who imports whom.


@pytest.mark.parametrize("place", [*(f"harness/{room}" for room in ROOMS), "fsdp2_compare.py"])
def test_a_room_imports_only_what_it_may(place):
    for file in files_of(place):
        found = own(place_of(imported) for imported, _ in imports_of(file.read_text(), name_of(file)))
        assert found <= TABLE[place][0], f"{file.relative_to(ROOT)} imports {sorted(found - TABLE[place][0])}"


def code_in(file: Path) -> str:
    """The Python of a file; of a notebook that of its cells, without the lines that only Jupyter reads."""
    if file.suffix != ".ipynb":
        return file.read_text()
    lines = []
    for cell in json.loads(file.read_text())["cells"]:
        if cell["cell_type"] == "code":
            lines += "".join(cell["source"]).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


def names_extra(text: str, module: str = "") -> bool:
    """Whether `text` imports something of extra/, in a function too, or has the name of a module there in a string."""
    imported = {name.split(".")[0] for name, _ in imports_of(text, module)}
    strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    named = [value for value in strings if isinstance(value, str) and re.fullmatch(r"extra(\.\w+)+", value)]
    return "extra" in imported or bool(named)


def test_an_import_of_extra_is_seen_wherever_it_stands():
    module = "extra" + ".planner"
    for text in (f"import {module}", "from extra import planner", f"def f():\n    from {module} import predict",
                 "import importlib\nimportlib.import_module('extra')", f"command = ['-m', '{module}']"):  # fmt: skip
        assert names_extra(text), text
    assert not names_extra("import extras\nextra = 'extra'")


def test_nothing_in_the_core_imports_extra():
    """launch.sh alone starts what stands there."""
    for file in [*files_of(CORE_IN_ALL), *(ROOT / "notebooks").glob("*.ipynb")]:
        assert not names_extra(code_in(file), name_of(file)), file.relative_to(ROOT)


def test_the_engine_needs_torch_and_nothing_else_that_is_installed():
    for file in (ROOT / "harness" / "engine").rglob("*.py"):
        found = {imported.split(".")[0] for imported, _ in imports_of(file.read_text(), name_of(file))}
        more = found - sys.stdlib_module_names - {"torch", "harness", *CHAPTERS}
        assert not more, f"{file.relative_to(ROOT)} imports {sorted(more)}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_imports_torch_and_earlier_chapters_alone(chapter):
    text = (ROOT / f"{chapter}.py").read_text()
    earlier = set(CHAPTERS[: CHAPTERS.index(chapter)])
    assert any(imported.startswith(WALKTHROUGH) for imported, _ in imports_of(text, chapter))  # also in functions
    for imported, function in imports_of(text, chapter):
        first = imported.split(".")[0]
        if first == "harness":
            assert imported.startswith(WALKTHROUGH) and function == "main", f"{imported} is imported in {function}"
        else:
            assert first in earlier | {"torch"} | sys.stdlib_module_names, imported


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
    return len(lines - lines_of_docstrings(text))


def code_lines_of_class(text: str, name: str) -> int:
    """As `code_lines`, of one class with its decorators."""
    (node,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    return code_lines("\n".join(text.split("\n")[first - 1 : node.end_lineno]))


BUDGETS = {"zero1": ("ZeRO1", 60, 318), "zero2": ("ZeRO2", 65, 200), "zero3": ("ZeRO3", 115, 355)}
DENSITY = 8  # tokens in a line of code, on average


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_read_in_one_sitting(chapter):
    """Lines of code of its class, and lines of the file in all."""
    name, code, all_lines = BUDGETS[chapter]
    text = (ROOT / f"{chapter}.py").read_text()
    found = code_lines_of_class(text, name), len(text.splitlines())
    assert code // 2 < found[0] <= code and found[1] <= all_lines, f"{found}, allowed {code, all_lines}"


def test_the_chapters_have_one_idea_in_a_line():
    texts = [(ROOT / f"{chapter}.py").read_text() for chapter in CHAPTERS]
    tokens, lines = sum(map(number_of_tokens, texts)), sum(map(code_lines, texts))
    assert tokens <= DENSITY * lines, f"{tokens / lines:.2f} tokens in a line of code"


# What runs only where there is a GPU.


def test_names_of_torchs_inner_modules_are_there():
    """A wrong one would else be noticed by the first who has a GPU. What we use is in torch's build for CPUs too."""
    found, files = set(), []
    for pattern in ("*.py", "[ht]*/**/*.py", "extra/**/*.py", "notebooks/*.ipynb"):
        files += ROOT.glob(pattern)
    for file in files:
        text = file.read_text()
        imported = {name for name, _ in imports_of(text)} if file.suffix == ".py" else set()
        hidden = imported & {"torch.cuda", "torch._C"}
        assert not hidden, f"{file.relative_to(ROOT)}: write {hidden.pop()}.NAME, that this test can look it up"
        found |= set(re.findall(r"\btorch\.(cuda|_C)\.(\w+)", "\n".join([text, *imported])))
    missing = [f"torch.{module}.{name}" for module, name in found if not hasattr(getattr(torch, module), name)]
    assert len(found) > 20 and not missing, missing

"""The rooms: who may import whom, how many tokens they have, how long a chapter is; and names that only GPUs need."""

import ast
import functools
import io
import itertools
import re
import sys
import tokenize
from pathlib import Path

import pytest
import torch

from zerolab.run.engines import STAGES

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("engine", "run", "measure", "properties", "teach")
CHAPTERS = ("zero1", "zero2", "zero3")
CORE = (*(f"{chapter}.py" for chapter in CHAPTERS), "fsdp2_compare.py", "zerolab", "tests")
CORE_IN_ALL = "core in all"
PLACES = {*ROOMS, *CHAPTERS, "zerolab", "fsdp2_compare", "tests", "extra"}
DESIGN = (ROOT / "docs" / "design.md").read_text()
WALKTHROUGH = "zerolab.measure.walkthrough"  # the demo's driver: a chapter starts it, and knows it nowhere else


# Imports.


def imports_of(*nodes: ast.AST) -> set[str]:
    """What is imported in these, in functions too: `from package import name` counts as package.name."""
    found = set()
    for node in itertools.chain(*map(ast.walk, nodes)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def imports_in(file: Path) -> set[str]:
    return imports_of(ast.parse(file.read_text()))


def place_of(imported: str) -> str:
    """The room or the file at the top that `imported` belongs to, "zerolab" for the house itself, else the package."""
    first, *rest = imported.split(".")
    return rest[0] if first == "zerolab" and rest and rest[0] in ROOMS else first


def places_in(words: str) -> set[str]:
    """What a room may import: "engine, chapters, run", "everything" or "everything but extra"."""
    if words.startswith("everything"):
        return PLACES - {"extra"} if words.endswith("but extra") else PLACES
    return set(words.replace("chapters", ", ".join(CHAPTERS)).split(", "))


# {room: (places that it may import, tokens at most or None)}, from where they stand.
TABLE = {}
for names, may, most in re.findall(r"^\| (.*?) \| .* \| (.*?) \| ([\d,]+|none) \|$", DESIGN, re.MULTILINE):
    TABLE[names.replace("`", "")] = places_in(may), None if most == "none" else int(most.replace(",", ""))


def files_of(place: str) -> list[Path]:
    """The Python files of a line of the table, which names files or a folder, or the core in all."""
    found = []
    for path in map(ROOT.joinpath, CORE if place == CORE_IN_ALL else place.split()):
        found += path.rglob("*.py") if path.is_dir() else [path]
    assert found, place
    return found


def test_every_folder_of_the_house_is_a_room_and_has_its_line_in_the_table():
    assert [file.name for file in (ROOT / "zerolab").glob("*.py")] == ["__init__.py"]
    assert {path.parent.name for path in (ROOT / "zerolab").glob("*/__init__.py")} == set(ROOMS)
    rooms = {f"zerolab/{room}" for room in ROOMS}
    assert rooms | {"zero1.py zero2.py zero3.py", "fsdp2_compare.py", "tests", "extra", CORE_IN_ALL} <= set(TABLE)


# How much is in a room.

COUNTED = ("NAME", "OP", "NUMBER", "STRING", "FSTRING_START", "FSTRING_MIDDLE")  # before Python 3.12 an f-string is one


def lines_of_docstrings(text: str) -> set[int]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    """Names, operators, numbers and strings of `text`; no docstrings, no comments."""
    docstrings = lines_of_docstrings(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [each for each in tokens if tokenize.tok_name[each.type] in COUNTED and each.start[0] not in docstrings]


@functools.cache
def tokens_in(file: Path) -> int:
    return len(tokens_of(file.read_text()))


@pytest.mark.parametrize("place", [place for place, (_, most) in TABLE.items() if most is not None])
def test_no_room_has_more_tokens_than_it_may_have(place):
    """A room that must grow says so in the commit that raises its number in docs/design.md."""
    tokens = sum(map(tokens_in, files_of(place)))
    assert tokens <= TABLE[place][1], f"{place}: {tokens:,} tokens of Python, allowed {TABLE[place][1]:,}"


# Who imports whom.


@pytest.mark.parametrize("place", [*(f"zerolab/{room}" for room in ROOMS), "fsdp2_compare.py"])
def test_a_room_imports_only_what_it_may(place):
    for file in files_of(place):
        found = set(map(place_of, imports_in(file))) & PLACES
        assert found <= TABLE[place][0], f"{file.relative_to(ROOT)} imports {sorted(found - TABLE[place][0])}"


def test_nothing_in_the_core_imports_or_starts_extra():
    """launch.sh alone starts what stands there."""
    for file in [*files_of(CORE_IN_ALL), *(ROOT / "notebooks").glob("*.ipynb")]:
        assert not re.search(r"\b(from|import|-m) extra\b|[\"']extra\.\w", file.read_text()), file.relative_to(ROOT)


def test_the_engine_needs_torch_and_nothing_else_that_is_installed():
    for file in (ROOT / "zerolab" / "engine").rglob("*.py"):
        found = {imported.split(".")[0] for imported in imports_in(file)}
        more = found - sys.stdlib_module_names - {"torch", "zerolab", *CHAPTERS}
        assert not more, f"{file.relative_to(ROOT)} imports {sorted(more)}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_imports_torch_and_earlier_chapters_alone(chapter):
    """And `main` the demo's driver."""
    lesson, main = [], []
    for node in ast.parse((ROOT / f"{chapter}.py").read_text()).body:
        (main if getattr(node, "name", "") == "main" else lesson).append(node)
    assert imports_of(*main) == {WALKTHROUGH}
    packages = {imported.split(".")[0] for imported in imports_of(*lesson)}
    assert packages <= {*CHAPTERS[: CHAPTERS.index(chapter)], "torch", *sys.stdlib_module_names}


# How long a chapter is.


def code_lines(text: str) -> set[int]:
    """Lines of `text` with code on them: no docstrings, comments or blank lines. A string of three lines is three."""
    lines = set()
    for token in tokens_of(text):
        lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def code_lines_of_class(text: str, name: str) -> int:
    """As `code_lines`, of one class."""
    (node,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return len(code_lines(text) & set(range(node.lineno, node.end_lineno + 1)))


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
    tokens, lines = sum(len(tokens_of(text)) for text in texts), sum(len(code_lines(text)) for text in texts)
    assert tokens <= DENSITY * lines, f"{tokens / lines:.2f} tokens in a line of code"


def files_of_a_step() -> set[str]:
    """The project's files whose functions a step of ZeRO-3's engine calls, if it has no options."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    trained = STAGES["zero3"](model, functools.partial(torch.optim.AdamW, lr=0.1))
    batch, files = torch.ones(2, 4), set()
    for _ in range(2):  # in the first one ranks compare what they do
        files.clear()
        sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
        trained.training_step(batch, batch, torch.nn.functional.mse_loss)
        sys.setprofile(None)
    # A pipeline's torch module is there if another test has imported it: then the model's hooks ask for it.
    return {file for file in files if file.startswith((f"{ROOT}/zero", f"{ROOT}/zerolab")) and "pipelines" not in file}


def test_a_step_of_zero3_passes_through_eight_files(ranks):
    for files in ranks(2).run(files_of_a_step):
        assert len(files) <= 8 and str(ROOT / "zero3.py") in files, files


# What runs only where there is a GPU.


def test_names_of_torchs_inner_modules_are_there():
    """A wrong one would else be noticed by the first who has a GPU. What we use is in torch's build for CPUs too."""
    found = set()
    for file in [*files_of(CORE_IN_ALL), *files_of("extra"), *(ROOT / "notebooks").glob("*.ipynb")]:
        found |= set(re.findall(r"\btorch\.(cuda|_C)\.(\w+)", file.read_text()))
    missing = [f"torch.{module}.{name}" for module, name in found if not hasattr(getattr(torch, module), name)]
    assert len(found) > 20 and not missing, missing

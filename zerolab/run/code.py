"""Which code a result was measured on: a hash of the engines and the model, so that older results can be found.

Comments, docstrings, layout and the messages of errors do not count, because they change no measurement.
"""

import ast
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from zerolab.run.ranks import ROOT

MEASURED = ("zerolab.run.counterparts", "zerolab.run.model")  # with what they import: chapters, engines, counterparts


def commit() -> str | None:
    """The commit of this clone, whose files may have changed since. None outside of a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def measured_hash(modules: tuple[str, ...] = MEASURED, root: Path = ROOT) -> str:
    """16 hexadecimal digits: the syntax trees, without docstrings, of these modules and all of ours they import."""
    hashed = hashlib.sha256()
    for path in files_of(modules, root):
        tree = ast.parse(path.read_text())
        hashed.update(f"{path.relative_to(root)}\n{canonical(tree)}\n".encode())
    return hashed.hexdigest()[:16]


def files_of(modules: tuple[str, ...], root: Path) -> list[Path]:
    """The files of these modules, and of the modules below `root` that they import, also inside functions."""
    found, to_visit = set(), list(modules)
    while to_visit:
        path = root / to_visit.pop().replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.exists() and path not in found:
            found.add(path)
            to_visit += imported_by(path)
    return sorted(found)


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # each may also be a module


def canonical(node) -> str:
    """As `ast.dump`, without docstrings and what is raised, and equal in all versions of Python."""
    if isinstance(node, ast.Raise):
        return "raise"
    if isinstance(node, list):
        return f"[{','.join(canonical(each) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
        fields["body"] = fields["body"][1:]
    # Versions of Python differ in the fields that are there and empty.
    shown = [f"{name}={canonical(value)}" for name, value in fields.items() if value not in (None, [])]
    return f"{type(node).__name__}({','.join(shown)})"

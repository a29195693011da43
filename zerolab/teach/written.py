"""What is written elsewhere: words, rows and cases in a toml, and code that was changed before it is run."""

import ast
import linecache
import tomllib
import types
from pathlib import Path


def beside(file: str, name: str = "") -> dict:
    """What the toml has that stands beside `file` under this name, or under its own."""
    place = Path(file)
    return tomllib.loads(place.with_name(f"{name or place.stem}.toml").read_text())


def executed(code: str | ast.Module, name: str, file: str) -> types.ModuleType:
    """A module of this code, which in errors is called `file`."""
    if isinstance(code, str):
        linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file  # for errors that quote its lines
    module = types.ModuleType(name)
    module.__file__ = file
    exec(compile(code, file, "exec"), module.__dict__)
    return module

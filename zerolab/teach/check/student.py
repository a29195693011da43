"""A student's file as a module in which all blanks but one are the chapter's."""

import ast
import functools
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path

from zerolab.teach.exercise import find
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import ChapterExercise


def problem_with(name: str, file: Path) -> str:
    """Why the file cannot be used at all, or "" if it can."""
    exercise = EXERCISES[name]
    try:
        tree = ast.parse(file.read_bytes())
        compile(tree, str(file), "exec")  # finds a `return` outside of a function, for example
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except ValueError as error:  # of bytes that are no text
        return str(error)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    if isinstance(exercise, ChapterExercise) and exercise.chapter in imported:
        return f"it imports {exercise.chapter}.py, the chapter that it is to replace"
    if all(getattr(node, "name", None) != exercise.engine for node in tree.body):
        return f"it has no class {exercise.engine}"
    return ""


WRITTEN, OPEN, MISSING = "written", "to write", "missing"


def state_of_blank(name: str, file: str | Path, number: int) -> tuple[str, str]:
    """(WRITTEN, OPEN or MISSING, a message)"""
    tree = ast.parse(Path(file).read_bytes())
    for where in EXERCISES[name].blanks[number].where:
        try:
            function = find(tree, where)
        except LookupError:
            return MISSING, f"there is no {where} in the file, which this exercise asks for"
        for node in ast.walk(function):
            # A title with an apostrophe has other quotes.
            if isinstance(node, ast.Raise) and re.search(r"NotImplementedError\(['\"]Step", ast.unparse(node)):
                return OPEN, f"line {node.lineno} is still to write"
    return WRITTEN, ""


@functools.cache
def stage_of(name: str, file: str, number: int | None) -> type:
    """The file's class, on a rank. Blank `number` is the student's, and all others are the chapter's. None: all are
    the student's.
    """
    exercise = EXERCISES[name]
    spec = importlib.util.spec_from_file_location(f"student_{name}_{number}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if number is not None:
        chapter = exercise.solution()
        for name, value in vars(chapter).items():
            vars(module).setdefault(name, value)  # an import that the student has deleted, for the chapter's functions
        for blank in (*exercise.blanks[:number], *exercise.blanks[number + 1 :]):
            for where in blank.where:
                replace(module, where, attribute(chapter, where))
    return getattr(module, exercise.engine)


def attribute(thing, where: str):
    """The function "Class.method" or "function" of a module."""
    return functools.reduce(getattr, where.split("."), thing)


def replace(module, where: str, function: types.FunctionType) -> None:
    """Put a copy of `function` there. The functions that it calls are the module's, among them the blank's."""
    copy = types.FunctionType(
        function.__code__, vars(module), function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    owner, _, name = where.rpartition(".")
    setattr(attribute(module, owner) if owner else module, name, copy)

"""A student's file as a module in which all blanks but one are the chapter's, and the chapter itself as a module.

So until a function of the blank is called for the first time, both runs have the same state.
"""

import ast
import contextlib
import inspect
import textwrap
import types
from pathlib import Path

from zerolab.run.ranks import ROOT
from zerolab.teach.exercise import find
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import Blank, ChapterExercise


class Unusable(Exception):
    """The file cannot be used at all. The message says why."""


class Missing(Unusable):
    """The file does not have a function of the blank, or the class. Other blanks may be there."""


def _replace(tree: ast.Module, where: str, function: ast.FunctionDef) -> None:
    """Put `function` in the place of the one that is called `where`, or at the end if there is none."""
    owner, _, name = where.rpartition(".")
    body = find(tree, owner).body if owner else tree.body
    for index, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            body[index] = function
            return
    body.append(function)


def _chapter_tree(exercise: ChapterExercise) -> ast.Module:
    """The chapter, with the exercise's answers to what it asks for beyond the chapter."""
    tree = ast.parse((ROOT / f"{exercise.chapter}.py").read_text())
    for where, function in exercise.answers.items():
        (answer,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        _replace(tree, where, answer)
    return tree


def _with_one_blank(exercise: ChapterExercise, text: str, blank: Blank) -> ast.Module:
    """The student's file, in which all other blanks are the chapter's. Raises LookupError for a missing function."""
    tree, chapter = ast.parse(text), _chapter_tree(exercise)
    tree.body[1:1] = [node for node in chapter.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for where in blank.where:
        place = find(tree, where)
    for other in exercise.blanks:
        if other is blank:
            continue
        for where in other.where:
            function = find(chapter, where)
            with contextlib.suppress(LookupError):  # the student may have deleted it
                place = find(tree, where)
            for node in ast.walk(function):
                ast.copy_location(node, place)  # errors name a line of the student's file
            _replace(tree, where, function)
    return tree


def _imported(tree: ast.Module) -> set[str]:
    """The modules that this code imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def _run(tree: ast.Module, name: str, file: str) -> types.ModuleType:
    """A module of this code, which is called `file` in errors."""
    module = types.ModuleType(name)
    module.__file__ = file
    exec(compile(tree, file, "exec"), vars(module))
    return module


def chapter(exercise: ChapterExercise) -> types.ModuleType:
    return _run(_chapter_tree(exercise), f"chapter_{exercise.chapter}", f"{exercise.chapter}.py")


def load(name: str, file: str, check) -> types.ModuleType:
    """The student's file. If `check` is a blank, all other blanks are the chapter's. Raises Unusable."""
    exercise = EXERCISES[name]
    try:
        text = Path(file).read_text()
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Unusable(f"line {error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise Unusable(str(error)) from error
    if isinstance(exercise, ChapterExercise) and exercise.chapter in _imported(tree):
        raise Unusable(f"it imports {exercise.chapter}.py, the chapter that it is to replace")
    try:
        if isinstance(check, Blank):
            tree = _with_one_blank(exercise, text, check)
        find(tree, exercise.engine)  # it must be defined in the file, and not imported
    except LookupError as error:
        raise Missing(f"{error} in it, which this exercise asks for") from error
    try:
        return _run(tree, f"student_{name}", file)
    except SyntaxError as error:  # such as a return outside of functions, which only the compiler finds
        raise Unusable(f"line {error.lineno}: {error.msg}") from error

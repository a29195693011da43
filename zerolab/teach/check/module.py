"""A student's file as a module in which all but one blank are the chapter's, and the chapter as one beside it.

So until the blank's function is called for the first time, both runs have the same state.
"""

import ast
import contextlib
import sys
import types
from pathlib import Path

from zerolab.teach import written
from zerolab.teach.exercise import EXERCISES, ROOT, Blank, Check, find


class Broken(Exception):
    """The file cannot be used at all; the message says why."""


class Missing(Broken):
    """A blank's function is not in it, or the class; others may be."""


def _put(tree: ast.Module, where: str, function: ast.FunctionDef) -> None:
    """Put `function` in the place of the one that is called `where`."""
    owner, _, name = where.rpartition(".")
    body = find(tree, owner).body if owner else tree.body
    for number, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            body[number] = function
            return
    body.append(function)


def _chapter_tree(name: str) -> ast.Module:
    """The exercise's chapter, with what the exercise asks for beyond it."""
    exercise = EXERCISES[name]
    tree = ast.parse((ROOT / exercise.source).read_text())
    for blank in exercise.blanks:
        for function in ast.parse(blank.answer).body:
            _put(tree, blank.where, function)
    return tree


def _with_one_blank(name: str, text: str, blank: Blank) -> ast.Module:
    """The student's file, in which all blanks but this one are the chapter's. Raises LookupError for what is gone."""
    tree, chapter = ast.parse(text), _chapter_tree(name)
    tree.body[1:1] = [node for node in chapter.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    place = find(tree, blank.where)
    for other in EXERCISES[name].blanks:
        if other is not blank:
            theirs = find(chapter, other.where)
            with contextlib.suppress(LookupError):  # it may be gone
                place = find(tree, other.where)
            for node in ast.walk(theirs):
                ast.copy_location(node, place)  # a line of this file
            _put(tree, other.where, theirs)
    return tree


def chapter(name: str) -> types.ModuleType:
    return written.executed(_chapter_tree(name), f"chapter_{name}", EXERCISES[name].source)


def load(name: str, file: str, check: Check) -> types.ModuleType:
    """The student's file; where a blank is checked, all others are the chapter's. Raises Broken."""
    exercise = EXERCISES[name]
    source = exercise.source.removesuffix(".py")
    known = sys.modules[source]
    try:
        text = Path(file).read_text()
        try:
            tree = _with_one_blank(name, text, check) if check.where else ast.parse(text)
            find(tree, exercise.engine)  # it must be the file's own, and not one that is imported
        except LookupError as error:
            raise Missing(f"{error} in it, which this exercise is to write") from error
        if exercise.blanks:  # to import the chapter that is written anew is an error: `zero2` for `zero1` is a slip
            sys.modules[source] = None
        return written.executed(tree, f"student_{name}", file)
    except SyntaxError as error:
        raise Broken(f"line {error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise Broken(str(error)) from error
    except ImportError as error:
        if f"{error.name}.py" == exercise.source:
            raise Broken(f"it imports {exercise.source}, the reference, which it is to replace") from error
        raise
    finally:
        sys.modules[source] = known

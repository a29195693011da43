"""Find which line of a chapter is running, the calls that led there, and the lines that a step runs."""

import ast
import contextlib
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

import zero1
import zero2
import zero3

CHAPTERS = {module.__file__: number for number, module in enumerate((zero1, zero2, zero3), 1)}  # file: its number
Calls = tuple[tuple[int, int], ...]  # (chapter, line) of each call under way, the outermost first


def calls() -> Calls:
    """The active calls of the chapters' functions. The last one has the running line.

    gloo and, on a GPU, autograd have their own threads. An event in such a thread happens while the main thread is at
    its own line, so the main thread's calls come first.
    """
    frames = [sys._getframe(1)]
    main = threading.main_thread().ident
    if threading.get_ident() != main:
        frames.append(sys._current_frames()[main])
    found = []
    for frame in frames:
        while frame is not None:
            found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
    return _in_chapters(reversed(found))


def calls_of_error(traceback: TracebackType | None) -> Calls:
    """The calls that were active when an exception was raised."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _in_chapters(found)


def _in_chapters(positions) -> Calls:
    found = []
    for code, line in positions:
        place = (CHAPTERS.get(code.co_filename), line)
        # Without the wrapper that `weak_hook` puts around a hook. A list comprehension is a call on the same line.
        if place[0] is not None and code.co_name != "hook" and place not in found[-1:]:
            found.append(place)
    return tuple(found)


@contextlib.contextmanager
def lines_that_run(found: set[tuple[int, int]]) -> Iterator[None]:
    """Add every (chapter, line) that this thread runs inside the `with` to `found`.

    On a GPU hooks in backward run in autograd's thread, so they are not seen.
    """

    def on_line(frame, event, _):
        found.add((CHAPTERS[frame.f_code.co_filename], frame.f_lineno))
        return on_line

    def on_call(frame, event, _):
        return on_line(frame, event, _) if frame.f_code.co_filename in CHAPTERS else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def idle_lines(source: str, ran: set[int]) -> list[list[int]]:
    """[first, last] of each run of lines that a step does not run. A comment counts as the code that it precedes."""
    text = source.split("\n")
    runs: list[bool | None] = [None] * (len(text) + 1)  # by line number; None: no code
    tree = ast.parse(source)
    if ast.get_docstring(tree) is not None:
        runs[1 : tree.body[0].end_lineno + 1] = [True] * tree.body[0].end_lineno
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        first, last = node.lineno, node.end_lineno
        counted = range(first, last + 1)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([first, *(each.lineno for each in node.decorator_list)])
            if ast.get_docstring(node) is not None:  # shown like the function, although nothing runs it
                counted = [line for line in counted if line < node.body[0].lineno or line > node.body[0].end_lineno]
                last = node.body[0].end_lineno
            else:
                last = node.body[0].lineno - 1
        elif hasattr(node, "body"):
            last = node.body[0].lineno - 1
            counted = range(first, max(first, last) + 1)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        for line in range(first, max(first, last) + 1):
            if text[line - 1].strip() and not text[line - 1].lstrip().startswith("#"):
                runs[line] = any(each in ran for each in counted)
    after = True  # the text below all code
    found: list[list[int]] = []
    for line in range(len(text), 0, -1):
        after = after if runs[line] is None else runs[line]
        if not after:
            if found and found[-1][0] == line + 1:
                found[-1][0] = line
            else:
                found.append([line, line])
    return found[::-1]

"""The chapter and a student's file do the same thing, under one recorder. What differs first is a finding.

A file is tried blank by blank: everything but this blank is the chapter's. So until the blank's function is called for
the first time, both runs have the same state.
"""

import ast
import functools
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from harness.properties.held import Alive
from harness.properties.property import Finding
from harness.teach.check.recorder import Issued, Recorder
from harness.teach.check.state import Held, State
from harness.teach.exercise import EXERCISES, ROOT, Blank, find

EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # how far two orders of a sum may be apart
SLACK = 1024  # bytes of scalars
WHOLE = "a training step"  # what is looked at where no blank is
# What a function may leave as it likes: nobody reads it any more.
LEFT_OVER = {"ZeRO1.reduce_gradients": (".gradient",), WHOLE: (".gradient",)}
# Functions whose collectives are their own choice, as long as they are small: bytes per rank.
FREE_TO_SEND = {"ZeRO2.clip_grad_norm_": 64}


@dataclass
class Call:
    """What one call of the watched function has done. Without a function it is a whole run."""

    state: State
    issued: list[Issued]
    in_flight: list[str]  # collectives, when it returns
    most_in_flight: int
    kept: int = 0  # bytes alive afterwards, more than before


@dataclass
class Run:
    """What was seen in one run: `raised` is the name of an error that the case expects."""

    calls: list[Call] = field(default_factory=list)
    issued: list[Issued] = field(default_factory=list)  # all collectives
    raised: str | None = None
    most: int = 0  # bytes alive at the worst moment


# Modules.


def _put(tree: ast.Module, where: str, function: ast.FunctionDef) -> None:
    """Put `function` in the place of the one that is called `where`."""
    owner, _, name = where.rpartition(".")
    body = find(tree, owner).body if owner else tree.body
    for number, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            body[number] = function
            return
    body.append(function)


def chapter_tree(name: str) -> ast.Module:
    """The exercise's chapter, with what the exercise asks for beyond it (reference.py)."""
    tree = ast.parse((ROOT / EXERCISES[name].source).read_text())
    beyond = ast.parse(Path(__file__).with_name("reference.py").read_text())
    needed = {node.name: node for node in beyond.body if isinstance(node, ast.ClassDef)}
    if name in needed:
        for function in needed[name].body:
            _put(tree, f"{EXERCISES[name].engine}.{function.name}", function)
        imports = [node for node in beyond.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        known = EXERCISES[name].source.removesuffix(".py")
        imports = [node for node in imports if getattr(node, "module", "") != known]
        tree.body[1:1] = imports  # behind the docstring
    return tree


def with_one_blank(name: str, text: str, blank: Blank) -> ast.Module:
    """The student's file, in which all blanks but this one are the chapter's. Raises LookupError for what is gone."""
    tree, chapter = ast.parse(text), chapter_tree(name)
    tree.body[1:1] = [node for node in chapter.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for other in EXERCISES[name].blanks:
        mine = find(tree, other.where)
        if other is not blank:
            theirs = find(chapter, other.where)
            for node in ast.walk(theirs):
                if hasattr(node, "lineno"):  # a line of another file
                    node.lineno = node.end_lineno = mine.lineno
            _put(tree, other.where, theirs)
    return tree


def module_of(tree: ast.Module, name: str, file: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = file
    for node in ast.walk(tree):  # of two files: a node's end would stand before its beginning
        if hasattr(node, "end_lineno"):
            node.end_lineno = node.end_col_offset = None
    exec(compile(tree, file, "exec"), module.__dict__)
    return module


# Runs.


def run(module: types.ModuleType, where: str | None, case, recorder: Recorder, engine: str) -> Run:
    """What `module`'s function `where` does in each of its calls, in this case; without one, the engine's steps."""
    found = Run()
    memory = Alive() if case.memory else None
    recorder.copies = memory is None

    def seen(function, name: str):
        @functools.wraps(function)
        def watched(*args, **kwargs):
            first, before = len(recorder.issued), memory.live if memory else 0
            recorder.most = 0
            result = function(*args, **kwargs)
            issued = recorder.issued[first:]
            writing = set()
            for each in recorder.issued:
                if each.in_flight:
                    writing |= each.outputs
            state = State(writing)
            if memory is None:
                for path, thing in (("self", args[0]), (f"what {name} returns", result)):
                    state.add(path, thing)
            in_flight = [str(each) for each in recorder.issued if each.in_flight]
            call = Call(state, issued, in_flight, recorder.most)
            if memory:
                call.kept = memory.live - before
            found.calls.append(call)
            return result

        return watched

    owner, name = (getattr(module, engine), "training_step"), ""
    if where is None:
        where = f"{engine}.training_step"
    *owners, name = where.split(".")
    owner = functools.reduce(getattr, owners, module)
    real = getattr(owner, name)
    setattr(owner, name, seen(real, name))
    recorder.forget()
    torch.manual_seed(dist.get_rank())
    try:
        if memory:
            with memory:
                case.act(getattr(module, engine), case)
        else:
            case.act(getattr(module, engine), case)
    except case.expects as error:
        if isinstance(error, NotImplementedError):
            raise
        found.raised = type(error).__name__
    finally:
        setattr(owner, name, real)
    found.issued = list(recorder.issued)
    found.most = memory.peak if memory else 0
    return found


# Differences.


class Differences:
    """The findings about one blank (or the whole file) in one case: of the first call in which anything differs."""

    def __init__(self, where: str | None, case):
        self.where, self.case = where or WHOLE, case
        self.name = self.where.rpartition(".")[2] or self.where
        self.ranks = dist.get_process_group_ranks(case.group)
        self.findings: list[Finding] = []

    def say(self, what: str, expected, found) -> None:
        at = f", {self.case.at}" if self.case.at else ""
        self.findings.append(Finding(what + at, str(expected), str(found), dist.get_rank()))

    def compare(self, right: Run, wrong: Run) -> list[Finding]:
        for number, (one, other) in enumerate(zip(right.calls, wrong.calls), start=1):
            self.after = f"after call {number} of {self.name}"
            self._compare_collectives(one, other)
            self._compare_states(one.state, other.state)
            if self.case.memory:
                self._compare_kept(one, other)
            if self.findings:
                return self.findings
        if right.raised != wrong.raised:
            self.say("what it raises", right.raised or "nothing", wrong.raised or "nothing")
        if len(right.calls) != len(wrong.calls):
            self.say(f"calls of {self.name}", len(right.calls), len(wrong.calls))
        for said, wrongs in (
            ("whose input was changed or freed before the wait", [each for each in wrong.issued if each.spoilt]),
            ("that nobody has waited for", [each for each in wrong.issued if each.in_flight]),
        ):
            if wrongs and right.raised is None:
                self.say(f"collectives {said}", "none", f"{len(wrongs)}, first {wrongs[0].what}")
        if not self.findings and self.where not in FREE_TO_SEND:
            self._compare_sent("in all", right.issued, wrong.issued)
        if not self.findings:
            self._compare_most(right, wrong)
        return self.findings

    def _compare_sent(self, when: str, right: list[Issued], wrong: list[Issued]) -> None:
        say = _kind if self.case.memory else str
        expected, found = [say(each) for each in right], [say(each) for each in wrong]
        if expected != found:
            said = [", then ".join(each) or "none" for each in _from_first_difference(expected, found)]
            return self.say(f"collectives {when}", *said)
        for one, other in zip(right, wrong):
            if one.given is not None and other.given is not None and not self.findings:
                self._compare_values(f"what is sent in the {other.what}", one.given, other.given)

    def _compare_collectives(self, right: Call, wrong: Call) -> None:
        if self.where in FREE_TO_SEND:
            most = FREE_TO_SEND[self.where] * len(self.ranks)
            sent = sum(each.nbytes for each in wrong.issued)
            if sent > most:
                self.say(f"bytes of the collectives of {self.name}", f"{most} at most, and no gradients", f"{sent:,}")
        else:
            self._compare_sent(f"of {self.after.removeprefix('after ')}", right.issued, wrong.issued)
            if right.in_flight != wrong.in_flight:
                expected = f"{', '.join(right.in_flight) or 'none'}: waited for later, if at all in flight"
                self.say(f"collectives in flight {self.after}", expected, self._in_flight(right, wrong))
            elif not right.in_flight and wrong.most_in_flight < right.most_in_flight:
                expected = f"{right.most_in_flight}: all are started before the first is waited for"
                found = f"{wrong.most_in_flight}: is each waited for before the next is started?"
                self.say(f"collectives in flight at once in {self.name}", expected, found)
        for each in wrong.issued:
            if each.group is not self.case.group:
                return self.say("the group of a collective", "the engine's group", f"another one: {each.what}")

    def _in_flight(self, right: Call, wrong: Call) -> str:
        if wrong.in_flight:
            return ", ".join(wrong.in_flight)
        if not right.in_flight:
            return "none"
        return "none: waited for already, or not started with async_op=True?"

    def _compare_states(self, right: State, wrong: State) -> None:
        left_over = LEFT_OVER.get(self.where, ())
        for path, expected in right.holds.items():
            what = f"{path} {self.after}" if not path.startswith("what ") else path
            found = wrong.holds.get(path)
            if path.endswith(left_over) and left_over:
                continue
            if not isinstance(expected, Held) or not isinstance(found, Held):
                if isinstance(expected, Held) or isinstance(found, Held) or found != expected:
                    self.say(what, _words(expected), _words(found, missing=path not in wrong.holds))
            else:
                self._compare_tensors(what, expected, found, is_gradient=path.endswith(".grad"))
            if len(self.findings) >= 3:
                return
        extra = [path for path in wrong.holds if path not in right.holds and path.endswith(".grad")]
        if extra and not self.findings:
            self.say(f"gradients {self.after}", "no gradient here", ", ".join(extra[:3]))

    def _compare_tensors(self, what: str, expected: Held, found: Held, is_gradient: bool) -> None:
        if found.shape != expected.shape:
            self.say(f"the shape of {what}", expected.shape, found.shape)
        elif found.dtype != expected.dtype:
            why = f"{expected.dtype}, in which this check computes"
            self.say(f"the dtype of {what}", why, found.dtype)
        elif not is_gradient and found.lies_in != expected.lies_in:
            self.say(f"the memory of {what}", expected.lies_in, f"{found.lies_in}: is it a new tensor?")
        elif not is_gradient and found.nbytes != expected.nbytes:
            self.say(f"bytes of the storage under {what}", expected.nbytes, found.nbytes)
        elif expected.value is not None and found.value is not None:
            self._compare_values(what, expected.value, found.value)

    def _compare_values(self, what: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return self.say(what, f"{expected.dtype} {tuple(expected.shape)}", f"{found.dtype} {tuple(found.shape)}")
        tolerance = EXACT.get(expected.dtype, 0)
        close = torch.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if close.all():
            return
        place = tuple((~close).nonzero()[0].tolist())
        right, wrong = expected[place].item(), found[place].item()
        guess = self._guess(wrong / right) if right else ""
        at = f" at {list(place)}" if place else ""
        self.say(what, f"{right:.9g}", f"{wrong:.9g}{guess}{at}")

    def _guess(self, ratio: float) -> str:
        """What a value that is so many times the right one may come from."""
        ranks = len(self.ranks)
        known = {
            ranks: f"{ranks} times as much: summed, not averaged?",
            1 / dist.get_world_size(): "divided by the number of all ranks, and not of the group's?",
            1 / ranks: f"1/{ranks} of it: divided by N twice?",
        }
        for times, said in known.items():
            if times != 1 and abs(ratio - times) < 1e-6:
                return f", {said}"
        return ""

    def _compare_kept(self, right: Call, wrong: Call) -> None:
        if wrong.kept > right.kept + SLACK:
            what = f"bytes alive {self.after}, more than before it"
            self.say(what, f"at most {right.kept + SLACK:,}", f"{wrong.kept:,}")

    def _compare_most(self, right: Run, wrong: Run) -> None:
        """Of the whole run: a call may need more for a moment that is not the worst one."""
        allowed = right.most + SLACK + self.case.shard_bytes  # a mean may be computed in place or not
        if wrong.most > allowed:
            self.say("bytes alive at the worst moment of two steps", f"at most {allowed:,}", f"{wrong.most:,}")


def _kind(issued: Issued) -> str:
    return issued.kind


def _from_first_difference(one: list[str], other: list[str]) -> tuple[list[str], list[str]]:
    """A few of both, from the first in which they differ."""
    first = 0
    while first < min(len(one), len(other)) and one[first] == other[first]:
        first += 1
    return one[first : first + 3], other[first : first + 3]


def _words(thing, missing: bool = False) -> str:
    if missing:
        return "nothing of that name: is a return missing, or an attribute?"
    if isinstance(thing, Held):
        return f"a tensor of shape {thing.shape}"
    return str(thing)

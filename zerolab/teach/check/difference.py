"""The chapter and a student's file do the same thing, under one recorder. What differs first is a finding.

A run is compared call by call of the blank's function, when it is over: so ranks stay together, also where one differs.
Only a collective that the chapter does not issue ends a run: no other rank would answer it.
"""

import functools
import os
import types
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist

from zerolab.measure.ledger import MemoryLedger
from zerolab.properties.property import Differs, expect
from zerolab.run import process_group
from zerolab.teach.check.cases import Case
from zerolab.teach.check.recorder import Issued, Recorder
from zerolab.teach.check.state import Held, State

EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # how far two orders of a sum may be apart
SLACK = 1024  # bytes of scalars
# After these functions a bucket's gradient buffer may be as they like: of it only the shard's part is read any more.
LEAVE_GRADIENTS = ("ZeRO1.start_reduce", "ZeRO1.finish_reduce", "ZeRO1.reduce_gradients", "ZeRO1.training_step")
# A function whose collectives are its own choice, as long as they are small: bytes per rank.
FREE_TO_SEND, FEW = "ZeRO2.clip_grad_norm_", 64


@dataclass
class Call:
    """What one call of a watched function has done."""

    state: State
    issued: list[Issued]
    in_flight: list[str]  # collectives, when it returns
    most_in_flight: Counter  # kind of collective -> how many at once
    kept: int  # bytes alive afterwards, more than before


class Run:
    """What is seen of these functions ("Class.method" or "function") while one case trains an engine."""

    def __init__(self, case: Case, watched: Iterable[str]):
        self.case = case
        self.calls: dict[str, list[Call]] = {where: [] for where in watched}
        self.issued: list[Issued] = []  # all collectives
        self.inside = False  # of a watched function, now
        self.raised = "nothing"  # or the name of an error that the case expects
        self.ended: Exception | None = None  # by another error, or by a collective that the chapter does not issue
        self.half_made: State | None = None  # what `__init__` had made when it ended so
        self.most = 0  # bytes alive at the worst moment

    def train(self, recorder: Recorder, module: types.ModuleType, engine: str, expected: Callable | None = None):
        """Train the module's class `engine`. `expected(issued)` is asked before each collective, and may raise."""
        recorder.forget(expected)
        recorder.copies, self.issued = not self.case.memory, recorder.issued
        torch.manual_seed(dist.get_rank())
        memory = MemoryLedger()  # which is open in some cases only, and elsewhere says 0
        with ExitStack() as stack:
            for where, calls in self.calls.items():
                *owners, name = where.split(".")
                owner = functools.reduce(getattr, owners, module)
                watched = self._watching(getattr(owner, name), calls, recorder, memory)
                stack.enter_context(patch.object(owner, name, watched))
            if self.case.memory:
                stack.enter_context(memory)
            try:
                self.case.act(getattr(module, engine), self.case, **self.case.given)
            except Exception as error:
                refused = self.case.refused and isinstance(error, RuntimeError)
                if refused and not isinstance(error, NotImplementedError) and not process_group.lost(str(error)):
                    self.raised = type(error).__name__
                else:
                    self.ended = error  # what has differed before may be why
        self.most = memory.peak

    def _watching(self, real: Callable, calls: list[Call], recorder: Recorder, memory: MemoryLedger) -> Callable:
        name = real.__name__

        @functools.wraps(real)
        def watched(*args, **kwargs):
            first, outside, before = len(self.issued), recorder.most, memory.live
            recorder.most, self.inside = Counter(), True
            try:
                result = real(*args, **kwargs)
            except Exception:
                self.half_made = self._state({"self": args[0]}) if name == "__init__" else None
                raise
            kept, self.inside = memory.live - before, False
            in_flight = [str(each) for each in self.issued if each.in_flight]
            state = self._state({f"what {name} returns": result, "self": args[0]})
            calls.append(Call(state, self.issued[first:], in_flight, recorder.most, kept))
            recorder.most = outside | recorder.most  # the most of both
            return result

        return watched

    def _state(self, things: dict) -> State:
        """What is held now, where memory is not what is looked at."""
        state = State()
        for each in self.issued:
            if each.in_flight:
                state.writing |= each.outputs
        for path, thing in things.items():
            if not self.case.memory:
                state.add(path, thing)
        return state


class Comparison:
    """Of what the function `where` does in the chapter's run and in a student's. What differs is raised as `Differs`.

    The student's is begun behind this, with `expected`, and compared when it is over.
    """

    def __init__(self, where: str, right: Run, wrong: Run):
        self.where, self.right, self.wrong, self.case = where, right, wrong, wrong.case
        self.calls, self.found = right.calls[where], wrong.calls[where]
        self.name = where.rpartition(".")[2]
        self.free_to_send = where == FREE_TO_SEND
        self.ranks = self.case.group.size()

    def expected(self, issued: Issued) -> None:
        """Asked before a collective of the student's is started: does the chapter issue it here?"""
        inside = self.wrong.inside
        if self.free_to_send or (inside and self.name == "__init__"):  # see `compare`
            return
        number, place = len(self.found), len(self.wrong.issued)
        call = f"of call {number + 1} of {self.name}" if inside else f"after {number} of {self.name}"
        self._same_kinds(call, self.right.issued[place : place + 1], [issued])

    def compare(self) -> None:
        right, wrong = self.right, self.wrong
        for number, (one, other) in enumerate(zip(self.calls, self.found), start=1):
            self._compare_calls(f"call {number} of {self.name}", one, other)
        if wrong.ended is not None:
            self._compare_half_made()
            raise wrong.ended
        expect(wrong.raised == right.raised, "what it raises", right.raised, wrong.raised)
        calls, found = len(self.calls), len(self.found)
        expect(found == calls, f"calls of {self.name}", calls, found)
        if right.raised == "nothing":
            spoilt = [each.what for each in wrong.issued if each.spoilt]
            waiting = [each.what for each in wrong.issued if each.in_flight]
            self._none("collectives whose input was changed or freed before the wait", spoilt)
            self._none("collectives that nobody has waited for", waiting)
        if not self.free_to_send:
            self._same_collectives("in all", right.issued, wrong.issued)
        # A call may need more for a moment that is not the worst one; a mean may be computed in place or not.
        most = right.most + SLACK + self.case.shard_bytes
        self._at_most("bytes alive at the worst moment of two steps", most, wrong.most)

    def _compare_calls(self, call: str, right: Call, wrong: Call) -> None:
        computes = self.where == "Bucket.__init__"  # that says more than the size of its broadcast
        for states in (computes, not computes):
            if states:
                self._compare_states(f"after {call}", right.state, wrong.state)
            else:
                self._compare_collectives(f"of {call}", right, wrong)
        self._compare_at_once(f"of {call}", right, wrong)
        self._at_most(f"bytes alive after {call}, more than before it", right.kept + SLACK, wrong.kept)

    def _compare_half_made(self) -> None:
        """What `__init__` had made before an error may be why."""
        made, number = self.wrong.half_made, len(self.found)
        if made is None or isinstance(self.wrong.ended, NotImplementedError) or number == len(self.calls):
            return
        wanted = State()
        for path, held in self.calls[number].state.holds.items():
            if path in made.holds:
                wanted.holds[path] = held
        self._compare_states(f"when call {number + 1} of {self.name} ended", wanted, made)

    def _at_most(self, what: str, most: int, found: int) -> None:
        expect(found <= most, what, f"at most {most:,}", f"{found:,}")

    def _none(self, what: str, found: list[str]) -> None:
        expect(not found, what, "none", f"{len(found)}, first {', '.join(found[:1])}")

    def _same_kinds(self, when: str, right: list[Issued], wrong: list[Issued]) -> None:
        expected, found = list(map(str, right)), list(map(str, wrong))
        first = len(os.path.commonprefix([expected, found]))
        named = [f"{each}{each.line}" for each in wrong[first : first + 3]]
        said = ", then ".join(expected[first : first + 3]) or "none more"
        expect(expected == found, f"collectives {when}", said, ", then ".join(named) or "none more")

    def _same_collectives(self, when: str, right: list[Issued], wrong: list[Issued]) -> None:
        self._same_kinds(when, right, wrong)
        for one, other in zip(right, wrong):
            if one.given is not None:
                self._compare_values(f"what is sent in the {other.what}", one.given, other.given)

    def _compare_collectives(self, when: str, right: Call, wrong: Call) -> None:
        if self.free_to_send:
            most = FEW * self.ranks
            sent = sum(each.nbytes for each in wrong.issued)
            expect(sent <= most, f"bytes of the collectives {when}", f"{most} at most, and no gradients", f"{sent:,}")
        else:
            self._same_collectives(when, right.issued, wrong.issued)
            expected, found = ", ".join(right.in_flight) or "none", ", ".join(wrong.in_flight) or "none"
            if found == "none":
                found = "none: waited for already, or not started with async_op=True?"
            what = f"collectives in flight after those {when}"
            expect(right.in_flight == wrong.in_flight, what, f"{expected}: waited for later, if at all", found)
        for each in wrong.issued:
            expect(each.group is self.case.group, "the group of a collective", "the engine's", f"another: {each.what}")

    def _compare_at_once(self, when: str, right: Call, wrong: Call) -> None:
        if right.in_flight or self.name == "training_step":  # a whole step may start and wait in another way
            return
        for kind, most in right.most_in_flight.items():
            found = wrong.most_in_flight[kind]
            said = f"{most}: all are started before the first is waited for"
            what = f"of kind {kind}, in flight at once {when}"
            expect(found >= most, what, said, f"{found}: is each waited for before the next is started?")

    def _compare_states(self, when: str, right: State, wrong: State) -> None:
        # Numbers come before tensors, whose shapes and sizes follow from them.
        for path, expected in sorted(right.holds.items(), key=lambda held: isinstance(held[1], Held)):
            if self.where in LEAVE_GRADIENTS and _is_in_gradient_buffer(path):
                continue
            what = path if path.startswith("what ") else f"{path} {when}"
            found = wrong.holds.get(path, "nothing of that name: is a return missing, or an attribute?")
            if isinstance(expected, Held) and isinstance(found, Held):
                self._compare_tensors(what, expected, found, is_gradient=path.endswith(".grad"))
            else:
                expect(found == expected, what, expected, found)
        extra = [path for path in wrong.holds if path not in right.holds and path.endswith(".grad")]
        expect(not extra, f"gradients {when}", "no gradient here", ", ".join(extra[:3]))

    def _compare_tensors(self, what: str, expected: Held, found: Held, is_gradient: bool) -> None:
        expect(found.shape == expected.shape, f"the shape of {what}", expected.shape, found.shape)
        computes = f"{expected.dtype}, in which this check computes"
        expect(found.dtype == expected.dtype, f"the dtype of {what}", computes, found.dtype)
        if not is_gradient:
            there = f"{found.lies_in}: is it a new tensor?"
            expect(found.lies_in == expected.lies_in, f"the memory of {what}", expected.lies_in, there)
            what_bytes = f"bytes of the storage under {what}"
            expect(found.nbytes == expected.nbytes, what_bytes, expected.nbytes, found.nbytes)
        if expected.value is not None and found.value is not None:
            self._compare_values(what, expected.value, found.value)

    def _compare_values(self, what: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        expect(found.shape == expected.shape, f"the shape of {what}", tuple(expected.shape), tuple(found.shape))
        if torch.equal(found, expected):
            return
        tolerance = EXACT.get(expected.dtype, 0)
        close = torch.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not close.all():
            place = tuple((~close).nonzero()[0].tolist())
            right, wrong = expected[place].item(), found[place].item()
            guess = self._guess(wrong / right) if right else ""
            at = f" at {list(place)}" if place else ""
            raise Differs(what, f"{right:.9g}", f"{wrong:.9g}{guess}{at}")

    def _guess(self, ratio: float) -> str:
        """What a value that is so many times the right one may come from."""
        known = {
            self.ranks: f"{self.ranks} times as much: summed, not averaged?",
            1 / dist.get_world_size(): "divided by the number of all ranks, and not of the group's?",
            1 / self.ranks: f"1/{self.ranks} of it: divided by N twice?",
        }
        for times, said in known.items():
            if times != 1 and abs(ratio - times) < 1e-6:
                return f", {said}"
        return ""


def _is_in_gradient_buffer(path: str) -> bool:
    """Whether this is the path of ZeRO-1's gradient buffer, or of a parameter's view of it."""
    return path.endswith(".gradient") or ".grads[" in path or (".params[" in path and path.endswith(".grad"))

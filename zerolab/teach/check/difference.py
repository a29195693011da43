"""The chapter and a student's file do the same thing, under one recorder. The first difference is a finding.

A run is compared when it is over, call by call of the functions that are watched. So ranks stay together, also if one
of them differs. Only a collective that the chapter does not start ends a run, because no other rank would answer it.
"""

import functools
import os
import types
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist

from zerolab.measure.ledger import MemoryLedger
from zerolab.teach.check.cases import WIDTH, Case
from zerolab.teach.check.findings import Differs, expect
from zerolab.teach.check.recorder import Issued, Recorder
from zerolab.teach.check.state import Held, State

EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # how far two orders of a sum may be apart
SLACK = 1024  # bytes of scalars
# After these functions nobody reads the whole gradients of ZeRO-1 any more, so they may be anything.
AFTER_REDUCTION = ("ZeRO1.reduce_gradients", "ZeRO1.step")
REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclass
class Call:
    """The effects of one call of the watched function `where`."""

    where: str
    state: State
    issued: list[Issued]
    in_flight: list[str]  # collectives, when it returns
    most_in_flight: Counter  # kind of collective -> how many at once
    kept: int  # bytes alive afterwards, more than before

    @property
    def name(self) -> str:
        return self.where.rpartition(".")[2]


class Run:
    """All calls of the watched functions ("Class.method" or "function") while one case trains an engine."""

    def __init__(self, case: Case, watched: tuple[str, ...]):
        self.case, self.watched = case, watched
        self.calls: list[Call] = []
        self.issued: list[Issued] = []  # all collectives
        self.inside: list[str] = []  # the watched functions that are being called
        self.ended: Exception | None = None  # an error, or a collective that the chapter does not start
        self.half_made: State | None = None  # what `__init__` had made when it ended so
        self.most = 0  # bytes alive at the worst moment

    def train(self, recorder: Recorder, module: types.ModuleType, engine: str, seed: int, expected=None) -> None:
        """Train the module's class `engine`. `expected(issued)` is asked before each collective, and may raise."""
        recorder.begin(expected, copies=not self.case.memory)
        self.issued = recorder.issued
        torch.manual_seed(dist.get_rank())
        memory = MemoryLedger()  # opened only in some cases, and 0 elsewhere
        with ExitStack() as stack:
            for where in self.watched:
                *owners, name = where.split(".")
                owner = functools.reduce(getattr, owners, module)
                stack.enter_context(patch.object(owner, name, self._watching(where, owner, recorder, memory)))
            if self.case.memory:
                stack.enter_context(memory)
            try:
                self.case.train(getattr(module, engine), self.case.group, seed)
            except Exception as error:
                self.ended = error  # something that differed before may be the cause
        self.most = memory.peak

    def _watching(self, where: str, owner, recorder: Recorder, memory: MemoryLedger) -> Callable:
        name = where.rpartition(".")[2]
        real = getattr(owner, name)

        @functools.wraps(real)
        def watched(*args, **kwargs):
            first, outside, before = len(self.issued), recorder.most, memory.live
            recorder.most = Counter()
            self.inside.append(name)
            try:
                result = real(*args, **kwargs)
            except Exception:
                self.half_made = self._state({"self": args[0]}) if name == "__init__" else None
                raise
            finally:
                self.inside.pop()
            kept = memory.live - before
            in_flight = [str(each) for each in self.issued if each.in_flight]
            state = self._state({f"what {name} returns": result, "self": args[0]})
            self.calls.append(Call(where, state, self.issued[first:], in_flight, recorder.most, kept))
            recorder.most = outside | recorder.most  # the larger of both
            return result

        return watched

    def _state(self, things: dict) -> State:
        """What is held now. In a case that counts bytes nothing is looked at."""
        state = State()
        for each in self.issued:
            if each.in_flight:
                state.writing |= each.outputs
        for path, thing in things.items():
            if not self.case.memory:
                state.add(path, thing)
        return state


class Comparison:
    """Compares what the watched functions do in the chapter's run and in a student's. Raises a difference as `Differs`.

    The student's run is started after this, with `expected`, and compared when it is over.
    """

    def __init__(self, right: Run, wrong: Run):
        self.right, self.wrong, self.case = right, wrong, wrong.case
        self.calls = [call for call in right.calls if call.where in wrong.watched]
        self.ranks = self.case.group.size()

    def expected(self, issued: Issued) -> None:
        """Called before the student's file starts a collective: does the chapter start it here?"""
        inside = self.wrong.inside
        if "__init__" in inside:  # what it computes says more: see `_compare_calls`
            return
        number, place = len(self.wrong.calls) + 1, len(self.wrong.issued)
        when = f"in {inside[-1]}" if inside else f"before call {number} of what is checked"
        self._same_kinds(when, self.right.issued[place : place + 1], [issued])

    def compare(self) -> None:
        right, wrong = self.right, self.wrong
        times = Counter()
        for index, (one, other) in enumerate(zip(self.calls, wrong.calls)):
            times[one.name] += 1
            expect(one.name == other.name, f"the function called after {times[one.name] - 1} calls of {one.name}",
                   one.name, other.name)  # fmt: skip
            try:
                self._compare_calls(f"call {times[one.name]} of {one.name}", one, other)
            except Differs as difference:
                difference.call = index
                raise
        if wrong.ended is not None:
            self._compare_half_made()
            raise wrong.ended
        names = sorted({call.name for call in self.calls})
        calls, found = len(self.calls), len(wrong.calls)
        expect(found == calls, f"calls of {' and '.join(names)}", calls, found)
        spoilt = [each.what for each in wrong.issued if each.spoilt]
        waiting = [each.what for each in wrong.issued if each.in_flight]
        self._none("collectives whose input was changed or freed before the wait", spoilt)
        self._none("collectives that nobody has waited for", waiting)
        self._same_collectives("in all", right.issued, wrong.issued)
        # A call may need more for a moment that is not the worst one, and a mean may be computed in place or not.
        shard_bytes = 4 * (WIDTH * WIDTH + WIDTH) // dist.get_world_size() + 256
        most = right.most + SLACK + shard_bytes
        self._at_most("bytes alive at the worst moment of two steps", most, wrong.most)

    def _compare_calls(self, call: str, right: Call, wrong: Call) -> None:
        if right.name == "__init__":  # the sizes that it computes say more than the size of its broadcast
            self._compare_states(f"after {call}", right, wrong)
        self._compare_collectives(f"of {call}", right, wrong)
        if right.name != "__init__":
            self._compare_states(f"after {call}", right, wrong)
        self._compare_at_once(f"of {call}", right, wrong)
        self._at_most(f"bytes alive after {call}, more than before it", right.kept + SLACK, wrong.kept)

    def _compare_half_made(self) -> None:
        """Compare the state that `__init__` had made before an error: it may be the cause of the error."""
        made, number = self.wrong.half_made, len(self.wrong.calls)
        if made is None or isinstance(self.wrong.ended, NotImplementedError) or number == len(self.calls):
            return
        right = self.calls[number].state.holds
        for path in sorted(made.holds, key=lambda path: isinstance(made.holds[path], Held)):
            if path in right:
                self._compare_held(f"{path} when {self.calls[number].name} ended", right[path], made.holds[path])

    def _at_most(self, what: str, most: int, found: int) -> None:
        expect(found <= most, what, f"at most {most:,}", f"{found:,}")

    def _none(self, what: str, found: list[str]) -> None:
        expect(not found, what, "none", f"{len(found)}, first {', '.join(found[:1])}")

    def _same_kinds(self, when: str, right: list[Issued], wrong: list[Issued]) -> None:
        expected, found = list(map(str, right)), list(map(str, wrong))
        first = len(os.path.commonprefix([expected, found]))
        wanted = ", then ".join(expected[first : first + 3]) or "none more"
        expect(
            expected == found, f"collectives {when}", wanted, ", then ".join(found[first : first + 3]) or "none more"
        )

    def _same_collectives(self, when: str, right: list[Issued], wrong: list[Issued]) -> None:
        self._same_kinds(when, right, wrong)
        for one, other in zip(right, wrong):
            if one.given is not None:
                # Dividing the gradients by N before the sum is as correct as dividing after it. Dividing twice, or not
                # at all, shows in what is received.
                divided = (
                    one.kind in REDUCTIONS
                    and torch.isclose(other.given * self.ranks, one.given, rtol=1e-4, atol=1e-9).all()
                )
                if not divided:
                    self._compare_values(f"what is sent in the {other.what}", one.given, other.given)

    def _compare_collectives(self, when: str, right: Call, wrong: Call) -> None:
        self._same_collectives(when, right.issued, wrong.issued)
        expected, found = ", ".join(right.in_flight) or "none", ", ".join(wrong.in_flight) or "none"
        if found == "none":
            found = "none: waited for already, or not started with async_op=True?"
        what = f"collectives in flight after those {when}"
        expect(right.in_flight == wrong.in_flight, what, f"{expected}: waited for later, if at all", found)
        for each in wrong.issued:
            expect(each.group is self.case.group, "the group of a collective", "the engine's", f"another: {each.what}")

    def _compare_at_once(self, when: str, right: Call, wrong: Call) -> None:
        if right.in_flight or right.name == "training_step":  # a whole step may start and wait in a different way
            return
        for kind, most in right.most_in_flight.items():
            found = wrong.most_in_flight[kind]
            wanted = f"{most}: all are started before the first is waited for"
            what = f"of kind {kind}, in flight at once {when}"
            expect(found >= most, what, wanted, f"{found}: is each waited for before the next is started?")

    def _compare_states(self, when: str, right: Call, wrong: Call) -> None:
        # Numbers come before tensors, because shapes and sizes follow from them.
        paths = sorted(right.state.holds, key=lambda path: isinstance(right.state.holds[path], Held))
        for path in paths:
            if right.where in AFTER_REDUCTION and (".gradient" in path or ".grads[" in path or "].grad" in path):
                continue
            if right.where == "Reduction.finish" and path == "self.shard":
                continue  # it has done its work: what counts is the gradient of the bucket's shard
            expected = right.state.holds[path]
            found = wrong.state.holds.get(path, "nothing of that name: is a return missing, or an attribute?")
            is_sent = right.where == "Reduction.start" and path == "self.flat" and isinstance(found, Held)
            if is_sent and found.value is not None and torch.allclose(found.value * self.ranks, expected.value):
                continue  # divided before the sum
            self._compare_held(path if path.startswith("what ") else f"{path} {when}", expected, found)
        extra = [path for path in wrong.state.holds if path not in right.state.holds and path.endswith(".grad")]
        expect(not extra, f"gradients {when}", "no gradient here", ", ".join(extra[:3]))

    def _compare_held(self, what: str, expected, found) -> None:
        if not isinstance(expected, Held) or not isinstance(found, Held):
            return expect(found == expected, what, expected, found)
        expect(found.shape == expected.shape, f"the shape of {what}", expected.shape, found.shape)
        computes = f"{expected.dtype}, in which this check computes"
        expect(found.dtype == expected.dtype, f"the dtype of {what}", computes, found.dtype)
        if ".grad " not in what:  # a gradient may be a copy or a view: bytes are counted elsewhere
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
        """A reason for a value that is so many times the expected one."""
        known = {
            self.ranks: f"{self.ranks} times as much: summed, not averaged?",
            1 / dist.get_world_size(): "divided by the number of all ranks, and not of the group's?",
            1 / self.ranks: f"1/{self.ranks} of it: divided by N twice?",
        }
        for times, reason in known.items():
            if times != 1 and abs(ratio - times) < 1e-6:
                return f", {reason}"
        return ""

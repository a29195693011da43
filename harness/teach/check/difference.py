"""The chapter and a student's file do the same thing, under one recorder. What differs first is a finding.

A run is compared call by call of the blank's function, when it is over: so ranks stay together, also where one differs.
Only a collective that the chapter does not issue ends a run: no other rank would answer it.
"""

import functools
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.measure.ledger import MemoryLedger
from harness.properties.property import Differs, expect
from harness.run import process_group
from harness.teach.check.cases import Case
from harness.teach.check.recorder import Issued, Recorder
from harness.teach.check.state import Held, State

EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # how far two orders of a sum may be apart
SLACK = 1024  # bytes of scalars
# What a function may leave as it likes: nobody reads it any more.
LEFT_OVER = {"ZeRO1.reduce_gradients": ".gradient", "ZeRO1.training_step": ".gradient"}
# Functions whose collectives are their own choice, as long as they are small: bytes per rank.
FREE_TO_SEND = {"ZeRO2.clip_grad_norm_": 64}


@dataclass
class Call:
    """What one call of the watched function has done."""

    state: State
    issued: list[Issued]
    in_flight: list[str]  # collectives, when it returns
    most_in_flight: dict[str, int]  # kind of collective -> how many at once
    kept: int  # bytes alive afterwards, more than before


@dataclass
class Run:
    """What was seen in one run: `raised` is the name of an error that the case expects."""

    calls: list[Call] = field(default_factory=list)
    issued: list[Issued] = field(default_factory=list)  # all collectives
    raised: str = "nothing"
    most: int = 0  # bytes alive at the worst moment
    ended: Exception | None = None  # by an error, or by a collective that the chapter does not issue
    half_made: State | None = None  # what `__init__` had made when it ended so


class Comparison:
    """Of the function `where`, in one case. What differs is raised as `Differs`."""

    def __init__(self, where: str, case: Case, recorder: Recorder):
        self.where, self.case, self.recorder = where, case, recorder
        self.name = where.rpartition(".")[2]
        self.ranks = case.group.size()

    # Runs.

    def run(self, module: types.ModuleType, engine: str, right: Run | None = None) -> Run:
        """What the module's function does in each of its calls; with the chapter's run `right`, beside that."""
        found, recorder = Run(), self.recorder
        *owners, name = self.where.split(".")
        owner = functools.reduce(getattr, owners, module)
        real = getattr(owner, name)

        def compare(issued):
            call = f"of call {len(found.calls) + 1} of {name}" if inside else f"after {len(found.calls)} of {name}"
            place = len(recorder.issued)
            if name == "__init__" and inside:
                return  # see `compare`
            self._same_kinds(call, right.issued[place : place + 1], [issued])

        inside = []
        memory = MemoryLedger()  # which is open in some cases only, and elsewhere says 0

        @functools.wraps(real)
        def watched(*args, **kwargs):
            first, recorder.most = len(recorder.issued), {}
            before = memory.live
            inside.append(name)
            try:
                result = real(*args, **kwargs)
            except Exception:
                found.half_made = self._state({"self": args[0]}) if name == "__init__" else None
                raise
            inside.pop()
            kept = memory.live - before
            in_flight = [str(each) for each in recorder.issued if each.in_flight]
            state = self._state({f"what {name} returns": result, "self": args[0]})
            found.calls.append(Call(state, recorder.issued[first:], in_flight, dict(recorder.most), kept))
            return result

        recorder.forget(compare if right is not None and self.where not in FREE_TO_SEND else None)
        recorder.copies = not self.case.memory
        torch.manual_seed(dist.get_rank())
        try:
            with patch.object(owner, name, watched), memory if self.case.memory else nullcontext():
                self.case.act(getattr(module, engine), self.case)
        except Exception as error:
            expected = isinstance(error, self.case.expects) and not isinstance(error, NotImplementedError)
            if expected and not process_group.lost(str(error)):
                found.raised = type(error).__name__
            elif right is None:
                raise
            else:
                found.ended = error  # what has differed before may be why
        found.issued = list(recorder.issued)
        found.most = memory.peak
        return found

    def _state(self, things: dict) -> State:
        """What is held now, where memory is not what is looked at."""
        writing = set()
        for each in self.recorder.issued:
            if each.in_flight:
                writing |= each.outputs
        state = State(writing)
        for path, thing in things.items():
            if not self.case.memory:
                state.add(path, thing)
        return state

    # Differences.

    def compare(self, right: Run, wrong: Run) -> None:
        for number, (one, other) in enumerate(zip(right.calls, wrong.calls), start=1):
            if self.where == "Bucket.__init__":  # what it has computed says more than the size of its broadcast
                self._compare_states(f"after call {number} of {self.name}", one.state, other.state)
            self._compare_collectives(f"of call {number} of {self.name}", one, other)
            self._compare_states(f"after call {number} of {self.name}", one.state, other.state)
            self._compare_at_once(f"of call {number} of {self.name}", one, other)
            most = one.kept + SLACK
            what = f"bytes alive after call {number} of {self.name}, more than before it"
            expect(other.kept <= most, what, f"at most {most:,}", f"{other.kept:,}")
        if wrong.ended is not None:
            self._compare_half_made(right, wrong)
            raise wrong.ended
        expect(wrong.raised == right.raised, "what it raises", right.raised, wrong.raised)
        expect(len(wrong.calls) == len(right.calls), f"calls of {self.name}", len(right.calls), len(wrong.calls))
        if right.raised == "nothing":
            spoilt = [each.what for each in wrong.issued if each.spoilt]
            waiting = [each.what for each in wrong.issued if each.in_flight]
            self._none("collectives whose input was changed or freed before the wait", spoilt)
            self._none("collectives that nobody has waited for", waiting)
        if self.where not in FREE_TO_SEND:
            self._same_collectives("in all", right.issued, wrong.issued)
        # A call may need more for a moment that is not the worst one; a mean may be computed in place or not.
        most = right.most + SLACK + self.case.shard_bytes
        what = "bytes alive at the worst moment of two steps"
        expect(wrong.most <= most, what, f"at most {most:,}", f"{wrong.most:,}")

    def _compare_half_made(self, right: Run, wrong: Run) -> None:
        """What `__init__` had made before an error may be why."""
        made, number = wrong.half_made, len(wrong.calls)
        if made is None or isinstance(wrong.ended, NotImplementedError) or number == len(right.calls):
            return
        wanted = right.calls[number].state
        wanted.holds = {path: held for path, held in wanted.holds.items() if path in made.holds}
        self._compare_states(f"when call {number + 1} of {self.name} ended", wanted, made)

    def _none(self, what: str, found: list[str]) -> None:
        expect(not found, what, "none", f"{len(found)}, first {', '.join(found[:1])}")

    def _same_kinds(self, when: str, right: list[Issued], wrong: list[Issued]) -> None:
        expected, found = list(map(str, right)), list(map(str, wrong))
        first = 0
        while expected[first : first + 1] == found[first : first + 1] and first < len(expected):
            first += 1
        named = [f"{each}{each.line}" for each in wrong[first : first + 3]]
        said = ", then ".join(expected[first : first + 3]) or "none more"
        expect(expected == found, f"collectives {when}", said, ", then ".join(named) or "none more")

    def _same_collectives(self, when: str, right: list[Issued], wrong: list[Issued]) -> None:
        self._same_kinds(when, right, wrong)
        for one, other in zip(right, wrong):
            if one.given is not None:
                self._compare_values(f"what is sent in the {other.what}", one.given, other.given)

    def _compare_collectives(self, when: str, right: Call, wrong: Call) -> None:
        if self.where in FREE_TO_SEND:
            most = FREE_TO_SEND[self.where] * self.ranks
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
            found = wrong.most_in_flight.get(kind, 0)
            said = f"{most}: all are started before the first is waited for"
            what = f"of kind {kind}, in flight at once {when}"
            expect(found >= most, what, said, f"{found}: is each waited for before the next is started?")

    def _compare_states(self, when: str, right: State, wrong: State) -> None:
        left_over = LEFT_OVER.get(self.where, "nothing")
        # Numbers come before tensors, whose shapes and sizes follow from them.
        for path, expected in sorted(right.holds.items(), key=lambda held: isinstance(held[1], Held)):
            if path.endswith(left_over):
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

"""What the tests of the exercises share: small trainings, what is recorded of them, and messages.

The body of a test runs on every rank. `train` trains a stage for two steps with different data on every rank, and
records values, events and bytes. `compare` finds the first difference between a student's training and the chapter's.
"""

import contextlib
import functools
import importlib
import linecache
import re
import signal
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from zerolab.measure.held import storage_bytes, storage_under
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.timeline import Listener, Span, Timeline
from zerolab.measure.traffic import sent_bytes
from zerolab.run import pool, process_group
from zerolab.teach.check import models, student

WIDTH = 48  # of the layers whose bytes are counted
SLACK = 1024  # bytes of scalars
IN_ORDER = "Collectives match by their order only: every rank must start the same ones, in the same order."
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # how far two orders of a sum may be apart
# With a large eps the update depends on the gradient's size, so a sum in place of a mean shows.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


class Differs(AssertionError):
    """A value or an event differs from the expected one."""

    def __init__(self, what: str, expected, found):
        super().__init__(f"{what}: expected {expected}, found {found}")
        self.what, self.expected, self.found = what, str(expected), str(found)


def expect(what: str, found, expected) -> None:
    if found != expected:
        raise Differs(what, expected, found)


def expect_at_most(what: str, found: float, most: float) -> None:
    if found > most:
        raise Differs(what, f"at most {most:,}", f"{found:,}")


def expect_values(what: str, found, expected: torch.Tensor) -> None:
    """Two tensors are equal, up to the order of a sum. A message guesses why they are not."""
    if not isinstance(found, torch.Tensor):
        raise Differs(what, f"a tensor of shape {tuple(expected.shape)}", f"{found!r}: is a return missing?")
    if found.shape != expected.shape:
        whole = found.numel() == dist.get_world_size() * expected.numel()
        shape = f"{tuple(found.shape)}{', the elements of all ranks: whole, and not cut?' if whole else ''}"
        raise Differs(f"the shape of {what}", tuple(expected.shape), shape)
    expect(f"the dtype of {what}", found.dtype, expected.dtype)
    tolerance = EXACT.get(expected.dtype, 0)
    close = torch.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not close.all():
        place = tuple((~close).nonzero()[0].tolist())
        right, wrong = expected[place].item(), found[place].item()
        at = f" at {list(place)}" if place else ""
        raise Differs(what, f"{right:.9g}", f"{wrong:.9g}{guess(wrong / right if right else 0.0)}{at}")


def guess(ratio: float) -> str:
    """A likely reason for a value that is `ratio` times the expected value."""
    ranks = dist.get_world_size()
    if abs(ratio - ranks) < 1e-6:
        return f", {ranks} times as much: summed, not averaged?"
    if abs(ratio * ranks - 1) < 1e-6:
        return f", 1/{ranks} of it: divided by N twice, or by the number of all ranks and not of the group's?"
    return ""


def must_raise(what: str, function, *arguments) -> str:
    """`function` raises its own RuntimeError, and not because of another rank or a blank. Returns the message."""
    try:
        function(*arguments)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if process_group.lost(str(error)):
            raise
        return str(error)
    except Exception as error:
        raise Differs(what, "a RuntimeError", f"{type(error).__name__}: {error}") from error
    raise Differs(what, "a RuntimeError", "no error")


# Groups. None of them is the default group, so that a collective that was given none shows.


def all_ranks() -> dist.ProcessGroup:
    return groups(dist.group.WORLD)[0]


def alone() -> dist.ProcessGroup:
    """Only this rank."""
    return groups(dist.group.WORLD)[1]


def silent() -> dist.ProcessGroup:
    """Moves nothing. gloo keeps buffers for a moment after `wait()`, so exact bytes are counted here."""
    return groups(dist.group.WORLD)[2]


@functools.cache
def groups(world: dist.ProcessGroup) -> tuple:
    patience = timedelta(seconds=pool.TIMEOUT)
    singles = [dist.new_group([rank], timeout=patience) for rank in range(dist.get_world_size())]
    return dist.new_group(timeout=patience), singles[dist.get_rank()], dist.new_group(backend="fake")


# Trainings.


def build(stage, make=models.Odd, dtype=torch.float64, bucket_bytes=320, optimizer=ADAMW, group=None, **options):
    """An engine. Each rank builds a model with different weights, and all must start with rank 0's weights."""
    if stage.__name__ != "ZeRO3" and bucket_bytes is not None:
        options["bucket_mb"] = bucket_bytes / 2**20
    model = models.seeded(make, dist.get_rank(), dtype)
    return stage(model, optimizer(model.parameters()), group=group or all_ranks(), **options)


def backward(engine, step: int = 0) -> torch.Tensor:
    inputs, targets = engine.model.batch(step, dist.get_rank())
    loss = engine.model.loss(engine(inputs), targets)
    loss.backward()
    return loss.detach()


def shards(engine) -> list[torch.Tensor]:
    """What this rank's optimizer updates."""
    return engine.optimizer.param_groups[0]["params"]


@dataclass
class Record(Listener):
    """What a rank computes in a training, and what it does, in order.

    units    whether it also records when which unit computes
    values   {what: tensor}
    events   "starts all-reduce of 320 bytes among 3 ranks", "waits for all-reduce of 320 bytes, having computed
             nothing meanwhile", "allocates blocks.0", "frees blocks.0", ...
    not_waited_for  the collectives that are in flight at the end
    error    what the training raised
    allowed  the collectives that may be started, in order. Another one raises `Differs`, before other ranks wait for it
    """

    units: bool = False
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    not_waited_for: dict[str, int] = field(default_factory=dict)
    allowed: list[str] | None = None
    error: Exception | None = None
    sent: dict[int, tuple] = field(default_factory=dict)  # number of a collective in flight -> its input, its version

    def keep(self, engine, when: str) -> None:
        """Keep copies of the shards, and of the weights that are in memory."""
        for index, shard in enumerate(shards(engine)):
            self.values[f"shard {index} {when}"] = shard.detach().clone()
        for name, param in engine.model.named_parameters():
            if storage_under(param).nbytes():
                self.values[f"the weight {name} {when}"] = param.detach().clone()

    def step_begins(self, step: Span, depth: int) -> None:
        if depth == 1 and step.name[0] in "12":
            self.events.append(f"begins step {step.name}")

    def computes(self, unit: str, step: str) -> None:
        if self.units:
            self.add(f"computes {unit}")

    def resizes(self, bucket, grows: bool) -> None:
        self.add(f"{'allocates' if grows else 'frees'} {bucket.name}")

    def issues(self, collective: Span, tensors: list[torch.Tensor]) -> None:
        kind = f"{collective.name} of {collective.nbytes:,} bytes among {len(collective.ranks)} ranks"
        if self.units and collective.unit:
            kind += f" for {collective.unit}"
        place = len(self.collectives)
        if self.allowed is not None:
            expected = self.allowed[place] if place < len(self.allowed) else "none more"
            before = self.events[-1] if self.events else "the beginning"
            expect(f"collective {place + 1} of the training, after '{before}'", kind, expected)
        self.collectives.append(kind)
        self.sent[collective.number] = (tensors[-1], tensors[-1]._version)
        self.add(f"starts {kind}")

    def waited(self, collective: Span) -> None:
        meanwhile = "having computed meanwhile" if collective.hides else "having computed nothing meanwhile"
        self.add(f"waits for {collective.name} of {collective.nbytes:,} bytes, {meanwhile}")
        tensor, version = self.sent.pop(collective.number)
        if tensor._version != version:
            raise Differs(f"the input of the {collective.name}", "unchanged until the wait", "changed in flight")

    def add(self, event: str) -> None:
        if self.events[-1:] != [event]:
            self.events.append(event)


def under_way(timeline: Timeline) -> dict[str, int]:
    """{collective: how many} of those that were started while the timeline is open, and not yet waited for."""
    return dict(Counter(collective.name for collective in timeline.under_way()))


@contextlib.contextmanager
def all_waited_for(what: str):
    """Around code that must wait for all collectives that it starts."""
    with Timeline() as timeline:
        yield
        expect(f"collectives that {what} has not waited for", under_way(timeline), {})


def train(stage, allowed: list[str] | None = None, crossing: bool = False, **options) -> Record:
    """Two steps: one backward before the first, an evaluation, two backwards before the second.

    `crossing`: every other rank runs the layers in the opposite order. `options` are those of `build`.
    """
    record = Record(units=stage.__name__ == "ZeRO3", allowed=allowed)
    try:
        with Timeline(listener=record):
            engine = build(stage, **options)
        record.keep(engine, "after the build")
        if crossing and dist.get_rank() % 2:
            engine.model.way.reverse()
        with Timeline(engine, listener=record) as timeline:
            record.values["the loss of step 1"] = backward(engine, 0)
            engine.step()
            record.keep(engine, "after step 1")
            engine.zero_grad()
            with torch.no_grad():
                record.values["an evaluation"] = engine(engine.model.batch(1, dist.get_rank())[0])
            for number in (2, 3):
                record.values[f"the loss of backward {number}"] = backward(engine, number)
            engine.reduce_gradients()
            for index, shard in enumerate(shards(engine)):
                if shard.grad is not None:
                    record.values[f"the gradient of shard {index} in step 2"] = shard.grad.clone()
            engine.step()
            record.keep(engine, "after step 2")
            engine.zero_grad()
            record.values["the loss of step 3"] = backward(engine, 4)
            engine.zero_grad()
            record.events.append("ends")
            record.not_waited_for = under_way(timeline)
    except Exception as error:
        record.error = error
    return record


def compare(found: Record, expected: Record, at: str = "") -> None:
    """Raise the first difference, or else what ended the training."""
    at = f", {at}" if at else ""
    if expected.error is not None:
        raise expected.error
    expect("collectives that were never waited for" + at, found.not_waited_for, expected.not_waited_for)
    for what, value in expected.values.items():
        if what not in found.values:
            break
        try:
            expect_values(what + at, found.values[what], value)
        except Differs as difference:
            if found.error is None:
                same_events(found, expected, f"{at}; {difference.what} differs as well")  # it may be the cause
            raise
    if found.error is not None:
        raise found.error
    expect("what is compared" + at, [*found.values], [*expected.values])
    same_events(found, expected, at)


def same_events(found: Record, expected: Record, at: str) -> None:
    events = waits_sorted(found.events)
    for place, (mine, right) in enumerate(zip(events, waits_sorted(expected.events))):
        before = events[place - 1] if place else "the beginning"
        expect(f"what this rank does after '{before}'{at}", mine, right)


def waits_sorted(events: list[str]) -> list[str]:
    """Waits that follow each other may come in any order."""
    found, waits = [], []
    for event in [*events, "nothing more"]:
        if event.startswith("waits for"):
            waits.append(event)
        else:
            found += [*sorted(waits), event]
            waits = []
    return found


of_chapters: dict[tuple, Record] = {}  # (class, training) -> what a chapter did in it, for all blanks


def same_training(stage, reference, at: str = "", **options) -> None:
    """A student's class and the chapter's do the same in the same training. `at` says which one it is."""
    key = reference, at
    if key not in of_chapters:
        of_chapters[key] = train(reference, **options)
    expected = of_chapters[key]
    compare(train(stage, allowed=expected.collectives, **options), expected, at)


# Memory.


def bytes_alive(stage) -> dict[str, int]:
    """{moment: bytes} of two steps with wide layers and hardly any activations, in a group that moves nothing."""
    found = {}
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    with MemoryLedger() as memory:
        engine = build(stage, models.Stack, torch.float32, layer_bytes, group=silent())
        for step in range(2):
            batch = engine.model.batch(step, dist.get_rank())
            memory.reset_peak()
            loss = engine.model.loss(engine(batch[0]), batch[1])
            found["at the worst moment of forward"] = memory.peak
            memory.reset_peak()
            loss.backward()
            del loss
            found["at the worst moment of backward"] = memory.peak
            engine.reduce_gradients()
            found["after reduce_gradients()"] = memory.live
            memory.reset_peak()
            engine.step()
            found["at the worst moment of step()"] = memory.peak
            engine.zero_grad()
            found["after zero_grad()"] = memory.live
    return found


def same_memory(stage, reference) -> None:
    """A student's class needs no more bytes than the chapter's, at any moment."""
    # A mean may be computed in place or not: that is a shard more for a moment.
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    spare = SLACK + layer_bytes // dist.get_world_size()
    expected = bytes_alive(reference)
    for moment, nbytes in bytes_alive(stage).items():
        if nbytes > expected[moment] + spare:
            layers = (nbytes - expected[moment]) / layer_bytes
            raise Differs(
                f"bytes alive {moment}, of a model with 6 equal layers",
                f"at most {expected[moment] + spare:,}",
                f"{nbytes:,}, too many by about {layers:.1f} layers: is something whole copied, freed late, or kept by "
                "a reference?",
            )


# A test's body on the ranks.


def on_ranks(body):
    """A decorator: the body of a test runs on every rank, with the student's class as `stage`."""

    @functools.wraps(body)
    def test(stage, **arguments):
        state, line, what = stage.state
        if state == "to write":
            pytest.skip(f"line {line} is still to write")
        if state == "missing":
            pytest.fail(f"there is no {what} in the file, which this exercise asks for", pytrace=False)
        place = (body.__module__, body.__name__)
        message = ""
        try:
            pool.run_on_ranks(stage.ranks, run_body, *place, stage.name, stage.file, stage.number, arguments)
        except pool.RankFailed as failed:
            message = describe(failed, stage.file, stage.ranks)
        # Not inside `except`: pytest would print the ranks' error as well.
        if "TO WRITE" in message:
            pytest.skip(message)
        if message:
            pytest.fail(message, pytrace=False)

    return test


def run_body(module: str, function: str, name: str, file: str, number: int | None, arguments: dict) -> None:
    body = getattr(importlib.import_module(module), function).__wrapped__
    try:
        body(stage=student.stage_of(name, file, number), **arguments)
    except BaseException as error:
        raise pool.Reported(explained(error, file)) from None


def explained(error: BaseException, file: str) -> tuple[int, str]:
    """(how likely it is that this rank is the cause, the message) of an error that a test raised on a rank."""
    trace = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in trace if frame.filename == file]
    if isinstance(error, NotImplementedError) and lines:
        return 3, f"TO WRITE\nin line {lines[-1].lineno}: {lines[-1].line}"
    lines = [frame for frame in lines if not frame.line.startswith("raise ")]  # its text is in the message already
    where = f"\nin line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
    message = str(error)
    if isinstance(error, Differs):
        return 2, f"{error.what}\n  expected  {error.expected}\n  found     {error.found}{where}"
    if not lines:
        in_tests = [frame for frame in trace if Path(frame.filename).parent == Path(__file__).parent]
        where = f"\nin the test: {in_tests[-1].line}" if in_tests else ""
    if isinstance(error, RuntimeError) and (process_group.lost(message) or "imed out" in message):
        return 0, f"HANGS: this rank waited for the others in vain{where}\n{IN_ORDER}"
    return 2, f"{explanation(message) or f'{type(error).__name__}: {message}'}{where}"


def explanation(message: str) -> str:
    """The cause of some errors in an exercise, or ""."""
    sizes = re.search(r"requiring a storage size of (\d+) are out of bounds for storage of size ([1-9]\d*)", message)
    if sizes:
        return (
            f"a tensor needs {sizes[1]} bytes, and its storage has {sizes[2]}. Does resize_() get bytes (numel() * "
            "element_size())?"
        )
    if "Check failed: outputShape" in message or "tensor size" in message:
        shown = message.rpartition("Check failed: ")[2].strip(" .\n")
        return f"sizes of a collective do not fit: {shown}. Are its output and input swapped, or is one not whole?"
    if "'NoneType' object has no attribute" in message:
        return f"{message}. Is a `return` missing somewhere, or `async_op=True`?"
    if "setStorage" in message or "storage of size 0" in message:
        return "a tensor is read whose storage has no bytes: its unit was freed too early, or was not gathered yet"
    return ""


def describe(failed: pool.RankFailed, file: str, ranks: int) -> str:
    """One message of all ranks: of the one that is most likely the cause, and how others ended."""
    reports = {rank: failure for rank, failure in failed.failures.items() if isinstance(failure, tuple)}
    lines = []
    if reports:
        cause = max(sorted(reports), key=lambda rank: reports[rank][0])
        alone = len(reports) < len(failed.failures) or len({message for _, message in reports.values()}) > 1
        lines.append((f"on rank {cause}: " if alone or failed.died or failed.silent else "") + reports[cause][1])
    for rank, failure in failed.failures.items():
        if rank not in reports:  # an error outside of the test's body
            lines.append(str(failure))
    for rank, code in failed.died.items():
        freed = ", a segmentation fault: was memory freed that is still used, or written to by a collective?"
        lines.append(
            f"DIED: rank {rank}{line_of(failed.places[rank], file)}, exit status {code}"
            + (freed if code == -signal.SIGSEGV else "")
        )
    for rank in failed.silent:
        lines.append(f"HANGS: rank {rank}{line_of(failed.places[rank], file)}")
    if failed.silent and not failed.failures and not failed.died:
        ended = sorted({*range(ranks)} - {*failed.silent})
        lines.append("A rank that hangs is in a loop that never ends, or waits for a collective of another rank.")
        lines.append(f"Ranks that had ended the test: {ended or 'none'}. {IN_ORDER}")
    return "\n".join(lines)


def line_of(place: str, file: str) -> str:
    """ " in line 12: work.wait()", the innermost line of the student's file among the lines of a fault handler."""
    found = re.search(rf'File "{re.escape(file)}", line (\d+)', place)
    return f" in line {found[1]}: {linecache.getline(file, int(found[1])).strip()}" if found else ""


# Tasks.


@dataclass
class Measured:
    """What a rank measures in the second of two steps.

    sent            bytes in all, and `across` those of its gathers with ranks of other machines (of two ranks each)
    collectives     how many, `in_backward` those that are issued before the end of backward
    in_flight       collectives that nobody has waited for when backward is over
    gathered        the most bytes of parameters with memory when a layer begins to compute; `buffers`: how many buffers
    peak            the most bytes alive
    weights         the whole weights after it
    """

    sent: float
    across: float
    collectives: int
    in_backward: int
    in_flight: int
    gathered: int
    buffers: int
    peak: int
    weights: torch.Tensor


def measure(stage, backwards: int = 1, **options) -> Measured:
    """Train a model of unequal blocks. `options` are those of the stage."""
    gathered = [(0, 0)]
    with MemoryLedger() as memory:
        engine = build(stage, models.UnevenBlocks, bucket_bytes=None, **options)
        for layer in engine.model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(functools.partial(look, engine.model, gathered))
                layer.register_full_backward_pre_hook(functools.partial(look, engine.model, gathered))
        train_micro_batches(engine, 0, backwards)
        memory.reset_peak()
        gathered[:] = [(0, 0)]
        with Timeline(engine) as timeline:
            in_backward, in_flight = train_micro_batches(engine, 1, backwards, timeline)
            left = under_way(timeline)
        peak = memory.peak
    expect("collectives that were never waited for", left, {})
    sent = [sent_bytes(each.name, each.nbytes, len(each.ranks)) for each in timeline.collectives]
    across = 0.0
    for each, nbytes in zip(timeline.collectives, sent):
        if len({rank // 2 for rank in each.ranks}) > 1 and "reduce" not in each.name:
            across += nbytes
    most, buffers = map(max, zip(*gathered))
    counts = len(timeline.collectives), in_backward, in_flight
    return Measured(sum(sent), across, *counts, most, buffers, peak, whole_weights(engine))


def look(model, found: list[tuple[int, int]], *_) -> None:
    """Add (bytes, buffers) of the parameters that have memory."""
    places = {storage._cdata for storage in map(storage_under, model.parameters()) if storage.nbytes()}
    found.append((storage_bytes(model.parameters()), len(places)))


def train_micro_batches(engine, step: int, backwards: int, timeline: Timeline | None = None) -> tuple[int, int]:
    """One step. Returns (collectives, collectives in flight) when the last backward is over."""
    batches = [engine.model.batch(10 * step + number, dist.get_rank()) for number in range(backwards)]
    if hasattr(engine, "accumulate"):
        engine.accumulate(batches, engine.model.loss)
        return 0, 0
    for inputs, targets in batches:
        (engine.model.loss(engine(inputs), targets) / backwards).backward()
    counts = (0, 0) if timeline is None else (len(timeline.collectives), len(timeline.under_way()))
    engine.step()
    engine.zero_grad()
    return counts


def whole_weights(engine) -> torch.Tensor:
    """All parameters of the model in one tensor. A collective for ZeRO-3, which gathers them."""
    for unit in getattr(engine, "units", ()):
        unit.start_gather()
        unit.wait()
    weights = torch.cat([param.detach().flatten() for param in engine.model.parameters()])
    for unit in getattr(engine, "units", ()):
        unit.free()
    return weights


def as_chapter(stage, chapter, backwards: int = 1, **options) -> tuple[Measured, Measured]:
    """(a task's class, the chapter's class), measured in the same training. Their weights must be equal."""
    right = measure(chapter, backwards, **options)
    found = measure(stage, backwards, **options)
    expect_values("the weights after two steps", found.weights, right.weights)
    return found, right

"""What the tests of the exercises share: small trainings, what is recorded of them, and messages.

The body of a test runs on every rank. `same_training` trains the chapter and the student's class, with different data
on every rank, and raises the first difference in what they compute, send, wait for, gather and free. `same_memory`
compares the bytes that are alive.
"""

import contextlib
import functools
import importlib
import linecache
import re
import signal
import traceback
from dataclasses import dataclass
from datetime import timedelta

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

LAYER = 4 * (48 * 48 + 48)  # bytes of a layer of models.Stack
SLACK = 1024  # bytes of scalars
IN_ORDER = "Collectives match by their order only: every rank must start the same ones, in the same order."
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # how far two orders of a sum may be apart
# With a large eps the update depends on the gradient's size, so a sum in place of a mean shows.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


class Differs(AssertionError):
    """A value or an event differs from the expected one."""

    def __init__(self, what: str, expected, found):
        super().__init__(f"{what}\n  expected  {expected}\n  found     {found}")


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


# Groups, for the argument `group` of `build`. None is the default group, so that a collective without its group shows.


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


def build(stage, make=models.Odd, dtype=torch.float64, bucket_bytes=320, optimizer=ADAMW, group=all_ranks, **options):
    """An engine. Each rank builds a model with different weights, and all must start with rank 0's weights."""
    if stage.__name__ != "ZeRO3" and bucket_bytes is not None:
        options["bucket_mb"] = bucket_bytes / 2**20
    model = models.seeded(make, dist.get_rank(), dtype)
    return stage(model, optimizer(model.parameters()), group=group(), **options)


def backward(engine, step: int = 0) -> torch.Tensor:
    inputs, targets = engine.model.batch(step, dist.get_rank())
    loss = engine.model.loss(engine(inputs), targets)
    loss.backward()
    return loss.detach()


def shards(engine) -> list[torch.Tensor]:
    """What this rank's optimizer updates."""
    return engine.optimizer.param_groups[0]["params"]


class Record(Listener):
    """What a rank computes and does in a training, in order: {what: tensor}, and events such as "frees blocks.0".

    With `expected`, the Record of the chapter, the first difference raises Differs. It is raised at once, because other
    ranks may wait forever for a collective that this rank does not start. `at` says which training it is.
    """

    def __init__(self, expected: "Record | None" = None, at: str = ""):
        self.expected, self.at = expected, at
        self.values: dict[str, torch.Tensor] = {}
        self.events: list[str] = []
        self.waits: list[str] = []  # since the last other event. Waits that follow each other may come in any order
        self.sent: dict[int, tuple] = {}  # number of a collective in flight -> its input, its version

    def value(self, what: str, tensor: torch.Tensor) -> None:
        self.values[what] = tensor.detach().clone()
        if self.expected is not None:
            expect_values(what + self.at, self.values[what], self.expected.values[what])

    def event(self, event: str) -> None:
        for each in (*sorted(self.waits), event):
            before = self.events[-1] if self.events else "the beginning"
            if self.expected is not None:
                right = self.expected.events[len(self.events)]
                expect(f"what this rank does after '{before}'{self.at}", each, right)
            self.events.append(each)
        self.waits = []

    def keep(self, engine, when: str) -> None:
        """Compare the shards and their gradients, and of weights and their gradients what is in memory."""
        weights = {name: param for name, param in engine.model.named_parameters() if storage_under(param).nbytes()}
        tensors = {f"the weight {name}": param for name, param in weights.items()}
        tensors |= {f"shard {index}": shard for index, shard in enumerate(shards(engine))}
        gradients = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
        self.event(f"has {len(weights)} weights and {len(gradients)} gradients in memory {when}")
        for name, gradient in gradients.items():
            self.value(f"the gradient of {name} {when}", gradient)
        for name, tensor in tensors.items():
            self.value(f"{name} {when}", tensor)

    def resizes(self, bucket, grows: bool) -> None:
        self.event(f"{'allocates' if grows else 'frees'} {bucket.name}")

    def issues(self, collective: Span, tensors: list[torch.Tensor]) -> None:
        self.event(f"starts {name_of(collective)} among {len(collective.ranks)} ranks")
        self.sent[collective.number] = (tensors[-1], tensors[-1]._version)

    def waited(self, collective: Span) -> None:
        meanwhile = "having computed meanwhile" if collective.hides else "having computed nothing meanwhile"
        self.waits.append(f"waits for {name_of(collective)}, {meanwhile}")
        tensor, version = self.sent.pop(collective.number)
        if tensor._version != version:
            raise Differs(f"the input of the {collective.name}", "unchanged until the wait", "changed in flight")


def name_of(collective: Span) -> str:
    return f"{collective.name} of {collective.nbytes:,} bytes"  # not its unit: its name is in a label, and needs none


def unfinished_backward(engine, step: int) -> None:
    """A backward that ends with an error when it reaches the first parameter, and zero_grad()."""
    first = next(param for param in engine.model.parameters() if param.requires_grad)
    handle = first.register_hook(stumble)
    with contextlib.suppress(Stumbled):
        backward(engine, step)
    handle.remove()
    engine.zero_grad()


class Stumbled(Exception):
    """The error in an unfinished backward."""


def stumble(gradient):
    raise Stumbled


def train(stage, expected: Record | None = None, at: str = "", crossing: bool = False, **options) -> Record:
    """Three steps: an evaluation after the first; in the second two backwards, and a forward without a backward; before
    the third a backward that ends with an error.

    `crossing`: every other rank runs the layers in the opposite order. `options` are those of `build`.
    """
    record = Record(expected, at)
    with Timeline(listener=record):
        engine = build(stage, **options)
    record.keep(engine, "after the build")
    if crossing and dist.get_rank() % 2:
        engine.model.way.reverse()
    with Timeline(engine, listener=record):
        record.value("the loss of step 1", backward(engine, 0))
        engine.reduce_gradients()
        record.keep(engine, "after reduce_gradients()")
        engine.step()
        record.keep(engine, "after step 1")
        engine.zero_grad()
        with torch.no_grad():
            record.value("an evaluation", engine(engine.model.batch(1, dist.get_rank())[0]))
        for number in (2, 3):
            record.value(f"the loss of backward {number}", backward(engine, number))
        engine(engine.model.batch(4, dist.get_rank())[0])
        engine.step()
        record.keep(engine, "after step 2")
        engine.zero_grad()
        if not crossing:  # else some ranks would have sent buckets before the error, and others not
            unfinished_backward(engine, 5)
        record.value("the loss of step 3", backward(engine, 6))
        record.keep(engine, "after the last backward")
        engine.step()
        record.keep(engine, "after step 3")
        engine.zero_grad()
        record.event("ends")
    return record


of_chapters: dict[tuple, Record] = {}  # (class, training) -> what a chapter did in it, for all blanks


def same_training(stage, reference, at: str = "", **options) -> None:
    """A student's class and the chapter's do the same in the same training. `at` says which one it is."""
    key = reference, at
    if key not in of_chapters:
        of_chapters[key] = train(reference, **options)
    train(stage, of_chapters[key], f", {at}" if at else "", **options)


# Memory.


def bytes_alive(stage) -> dict[str, int]:
    """{moment: bytes} of two steps with wide layers and hardly any activations, in a group that moves nothing."""
    found = {}
    with MemoryLedger() as memory:
        engine = build(stage, models.Stack, torch.float32, 2 * LAYER, group=silent)
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
    spare = SLACK + 2 * LAYER // dist.get_world_size()
    expected = bytes_alive(reference)
    for moment, nbytes in bytes_alive(stage).items():
        if nbytes > expected[moment] + spare:
            layers = (nbytes - expected[moment]) / LAYER
            raise Differs(
                f"bytes alive {moment}, of a model with 12 equal layers",
                f"at most {expected[moment] + spare:,}",
                f"{nbytes:,}, too many by about {layers:.1f} layers: is something whole copied, freed late, or kept by "
                "a reference?",
            )


# A test's body on the ranks.


def on_ranks(body):
    """A decorator: the body of a test runs on every rank, with the student's class as `stage`."""

    @functools.wraps(body)
    def test(stage, **arguments):
        state, message = stage.state
        if state == student.OPEN:
            pytest.skip(message)
        if state == student.MISSING:
            pytest.fail(message, pytrace=False)
        place = (body.__module__, body.__name__)
        try:
            pool.run_on_ranks(stage.ranks, run_body, *place, stage.name, stage.file, stage.number, arguments)
        except pool.RankFailed as failed:
            message = describe(failed, stage.file)
        # Not inside `except`: pytest would print the ranks' error as well.
        if TO_WRITE in message:
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


TO_WRITE = "is still to write"
WAITS = "HANGS: this rank waited for the others in vain"
# A part of torch's message -> what it often means in an exercise.
GUESSES = {
    "are out of bounds for storage of size": "Does resize_() get bytes (numel() * element_size())?",
    "setStorage": "Is a tensor read whose unit was freed too early, or was not gathered yet?",
    "storage of size 0": "Is a tensor read whose unit was freed too early, or was not gathered yet?",
    "outputShape": "Are a collective's output and input swapped, or is one not whole?",
    "tensor size": "Are a collective's output and input swapped, or is one not whole?",
    "'NoneType' object has no attribute": "Is a `return` missing somewhere, or `async_op=True`?",
}


def explained(error: BaseException, file: str) -> str:
    """The message of an error that a test raised on a rank, with the line of the student's file."""
    trace = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in trace if frame.filename == file]
    if isinstance(error, NotImplementedError) and lines:
        return f"line {lines[-1].lineno} {TO_WRITE}"
    lines = [frame for frame in lines if not frame.line.startswith("raise ")]  # its text is in the message already
    where = f"\nin line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
    message = str(error)
    if isinstance(error, Differs):
        return f"{message}{where}"
    if isinstance(error, RuntimeError) and process_group.lost(message):
        return f"{WAITS}{where}\n{IN_ORDER}"
    guesses = [guess for part, guess in GUESSES.items() if part in message]
    return "\n".join([f"{type(error).__name__}: {message}{where}", *guesses[:1]])


def describe(failed: pool.RankFailed, file: str) -> str:
    """One message of all ranks: of the rank that is most likely the cause, and of those that died or hang."""
    lines = []
    if failed.failures:
        # A rank that waits in vain for another one is not the cause.
        rank = min(failed.failures, key=lambda rank: failed.failures[rank].startswith(WAITS))
        lines.append(f"on rank {rank}: {failed.failures[rank]}")
    for rank, code in failed.died.items():
        lines.append(f"DIED: rank {rank}{line_of(failed.places[rank], file)}, exit status {code}")
        if code == -signal.SIGSEGV:
            lines.append("A segmentation fault: was memory freed that is still used, or written to by a collective?")
    for rank in failed.silent:
        lines.append(f"HANGS: rank {rank}{line_of(failed.places[rank], file)}")
    if failed.silent and not failed.failures and not failed.died:
        lines.append("A rank that hangs is in a loop that never ends, or waits for a collective of another rank.")
        lines.append(IN_ORDER)
    return "\n".join(lines)


def line_of(place: str, file: str) -> str:
    """ " in line 12: work.wait()", the innermost line of the student's file among the lines of a fault handler."""
    found = re.search(rf'File "{re.escape(file)}", line (\d+)', place)
    return f" in line {found[1]}: {linecache.getline(file, int(found[1])).strip()}" if found else ""


# Tasks.


@dataclass
class Measured:
    """What a rank measures in the second of two steps.

    collectives  that it starts, in order
    gathered     the most bytes of parameters with memory when a layer begins to compute; `buffers`: how many buffers
    peak         the most bytes alive
    weights      the whole weights after it
    """

    collectives: list[Span]
    gathered: int
    buffers: int
    peak: int
    weights: torch.Tensor

    @property
    def sent(self) -> float:
        """Bytes that this rank sends."""
        return bytes_sent(self.collectives)

    @property
    def across(self) -> float:
        """Bytes that it sends for gathers among ranks of several machines, which have two ranks each."""
        gathers = [each for each in self.collectives if "reduce" not in each.name]
        return bytes_sent([each for each in gathers if len({rank // 2 for rank in each.ranks}) > 1])


def bytes_sent(collectives: list[Span]) -> float:
    return sum(sent_bytes(each.name, each.nbytes, len(each.ranks)) for each in collectives)


def measure(stage, backwards: int = 1, **options) -> Measured:
    """Train a model of unequal blocks. `options` are those of the stage."""
    gathered = []
    with MemoryLedger() as memory:
        engine = build(stage, models.UnevenBlocks, bucket_bytes=None, **options)
        for layer in engine.model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(functools.partial(look, engine.model, gathered))
                layer.register_full_backward_pre_hook(functools.partial(look, engine.model, gathered))
        train_one_step(engine, 0, backwards)
        memory.reset_peak()
        gathered.clear()
        with Timeline(engine) as timeline:
            train_one_step(engine, 1, backwards)
            expect("collectives that were never waited for", [each.name for each in timeline.under_way()], [])
    most, buffers = map(max, zip(*gathered))
    return Measured(timeline.collectives, most, buffers, memory.peak, whole_weights(engine))


def look(model, found: list[tuple[int, int]], *_) -> None:
    """Add (bytes, buffers) of the parameters that have memory."""
    places = {storage._cdata for storage in map(storage_under, model.parameters()) if storage.nbytes()}
    found.append((storage_bytes(model.parameters()), len(places)))


def train_one_step(engine, step: int, backwards: int = 1) -> None:
    """One step of several backwards, or of so many micro-batches if the engine has a method for them."""
    batches = [engine.model.batch(10 * step + number, dist.get_rank()) for number in range(backwards)]
    if hasattr(engine, "accumulate"):
        engine.accumulate(batches, engine.model.loss)
        return
    for inputs, targets in batches:
        (engine.model.loss(engine(inputs), targets) / backwards).backward()
    engine.step()
    engine.zero_grad()


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

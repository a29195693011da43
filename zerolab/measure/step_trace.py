"""The step-by-step trace that `./launch.sh zero1 2` prints: a line for each event of a training step of a chapter.

A chapter has no code for this. The trace listens to a `TrafficLedger`, reads a `MemoryLedger`, and, while it is open,
wraps the methods of this one engine that gather, free and send.
"""

import contextlib
import textwrap
from collections.abc import Callable
from functools import partial

from zerolab.measure import tables
from zerolab.measure.held import buckets_of, has_gradient_buffers, held_bytes, storage_under, tensor_leaves
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.timeline import Span, Timeline

BAR = 24  # characters of the longest bar

# How to read the lines of a step with buckets, and with units.
BUCKETS = """\
buffer  the whole tensor of a collective: the sum over the ranks, or all shards together
sent    what this rank sends for it: (N-1)/N of the buffer, or twice as much in an all-reduce
live    all bytes that are alive on this rank when the event begins, activations included
holds   parameters, gradients and optimizer state that this rank keeps when this numbered step ends
"""
BUFFERS_STAY = """\
        (the gradients' buffers are allocated once and count always)
"""
REDUCED_INSIDE = """\
3 reduce gradients: reduce-scatter   step 3 inside step 2: the gradients of a bucket are final
"""
COUNTED = """\
x 2     two equal events in a row; live is measured at the second
"""
UNITS = """\
gather   5 gather parameters: the all-gather of a unit or of the root starts, inside step 1 or 2
compute  the unit's forward or backward. A gather to the left of it is in flight meanwhile. The root computes twice
         in each direction: what the model does before its units, and after them (head, loss)
free     the memory of the gathered parameters is released
reduce   3 reduce gradients: the reduce-scatter of the unit's gradients starts, inside step 2
sent     what this rank sends for the collectives of the line: (N-1)/N of each buffer
peak     the most that was alive on this rank during the line, activations included; and as a bar
holds    parameters, gradients and optimizer state that this rank keeps when this numbered step ends
"""


def held_in_words(engine) -> str:
    return ", ".join(f"{kind} {n / 1e6:.2f} MB" for kind, n in held_bytes(engine).items())


class StepTrace:
    """Lines of a step. `TrafficLedger(trace)` calls it when a numbered step begins or ends, or something is sent.

    With several micro-batches, forwards and backwards are numbered: "Step 1 forward, micro-batch 2 of 4".
    """

    def __init__(self, engine, memory: MemoryLedger, micro_batches: int = 1):
        self.engine, self.memory = engine, memory
        self._micro_batches, self._begun = micro_batches, 0
        self.open()

    def open(self) -> None:
        """The step is about to begin."""

    def numbered(self, step: str) -> str:
        """The line for the beginning of "1 forward", for example."""
        if step.startswith("1"):
            self._begun += 1
        if self._micro_batches > 1 and step[0] in "12":
            return f"Step {step}, micro-batch {self._begun} of {self._micro_batches}"
        return f"Step {step}"

    def begins(self, step: str, depth: int) -> None:
        if depth == 1:
            self.line(self.numbered(step))

    def ends(self, step: str, depth: int) -> None:
        if depth == 1:
            self.line(f"  holds {held_in_words(self.engine)}{self.note_at_the_end(step)}")


class BucketTrace(StepTrace):
    """ZeRO-1 and -2: a line per collective. Equal lines in a row become one line with a count."""

    def open(self) -> None:
        self.lines = [f"{'event':<44}{'buffer MB':>10}{'sent MB':>9}{'live MB':>9}"]
        self._last, self._count = None, 0

    def how_to_read(self) -> str:
        """Explanation of the columns and marks. Call it after the step, because it covers only those in use."""
        kept = has_gradient_buffers(self.engine)
        counted = any("  x " in line for line in self.lines)
        return BUCKETS + (BUFFERS_STAY if kept else REDUCED_INSIDE) + (COUNTED if counted else "")

    def sends(self, collective, depth: int) -> None:
        inside = f"{collective.step}: " if depth > 1 else ""
        whole, sent = collective.whole_bytes / 1e6, collective.sent_bytes / 1e6
        self.line(f"  {inside + collective.kind:<42}{whole:>10.2f}{sent:>9.2f}")

    def note_at_the_end(self, step: str) -> str:
        in_flight = getattr(self.engine, "in_flight", None)
        if in_flight is None:
            return ""
        return f" (the last bucket's {in_flight.shard.nbytes / 1e6:.2f} MB are in flight)"

    def line(self, text: str) -> None:
        if text != self._last:
            self.close()
        self._last, self._count, self._live = text, self._count + 1, self.memory.live

    def close(self) -> None:
        """Write the line that counts equal events."""
        if self._last is not None:
            times = f"  x {self._count}" if self._count > 1 else ""
            live = "" if self._last.startswith("  holds") else f"{self._live / 1e6:>9.2f}"
            self.lines.append(f"{self._last:<63}{live}{times}")
        self._last, self._count = None, 0


class UnitTrace(StepTrace):
    """ZeRO-3: the sequence at the top of zero3.py, a line for each unit that computes, with a bar of what is alive."""

    def open(self) -> None:
        self._roots = [unit for unit in self.engine.units if unit.module is self.engine.model]
        self._rows: list[tuple[str, float, int]] = []  # text, bytes sent, bytes alive (0: a line of text only)
        self._groups: list[tuple[str, list[str]]] = []  # of the line being written: (verb, names of units)
        self._sent = 0.0
        self._watching = contextlib.ExitStack()
        for unit in self.engine.units:
            self._watch(unit, "start_gather", before=partial(self._gathers, unit))
            self._watch(unit, "free", before=partial(self._frees, unit))
            hook = unit.module.register_forward_pre_hook(partial(self._computes, unit))
            self._watching.callback(hook.remove)
        self._watch(self.engine, "send", before=partial(self._add, "reduce"))
        self._watch(self.engine, "before_backward", after=partial(self._add, "compute"))

    def _watch(self, thing, name: str, before: Callable | None = None, after: Callable | None = None) -> None:
        """Until `close`: call `before` or `after` with the arguments of each call of this method of `thing`."""
        method = getattr(thing, name)

        def watched(*arguments):
            if before is not None:
                before(*arguments)
            method(*arguments)
            if after is not None:
                after(*arguments)

        setattr(thing, name, watched)
        self._watching.callback(delattr, thing, name)  # the class's method is there again

    def how_to_read(self) -> str:
        return UNITS

    @property
    def lines(self) -> list[str]:
        most = max(live for _, _, live in self._rows)
        width = min(max(len(text) for text, _, live in self._rows if live), tables.columns_here() - 18)
        longest_bar = max(0, min(BAR, tables.columns_here() - width - 20))
        lines = [f"{'event':<{width}}{'sent MB':>9}{'peak MB':>9}"]
        for text, sent, live in self._rows:
            if not live:
                lines.append(text)
                continue
            first, *rest = textwrap.wrap(text, width, subsequent_indent="    ")
            bar = "#" * round(longest_bar * live / most)
            lines += [f"{first:<{width}}{sent / 1e6:>9.2f}{live / 1e6:>9.2f}  {bar}".rstrip(), *rest]
        return lines

    def line(self, text: str) -> None:
        self.flush()
        self._rows.append((text, 0.0, 0))

    def sends(self, collective, depth: int) -> None:
        self._sent += collective.sent_bytes

    def note_at_the_end(self, step: str) -> str:
        if step.startswith("1") and self._roots:
            self._add("compute", self._roots[-1])  # what follows the last unit
        gathered = sum(unit.flat.nbytes for unit in self._roots if unit.allocated)
        return f" ({gathered / 1e6:.2f} MB of the parameters are the gathered root)" if gathered else ""

    def close(self) -> None:
        """Stop watching."""
        self.flush()
        self._watching.close()

    def flush(self) -> None:
        """Write the line."""
        if self._groups:
            text = ""
            for (verb, names), before in zip(self._groups, [None, *self._groups]):
                # As in the chapter's docstring: a bar around what the rank computes, commas between the rest.
                text += "" if before is None else (" | " if "compute" in (verb, before[0]) else ", ")
                text += f"{verb} {', '.join(names)}"
            self._rows.append((f"  {text}", self._sent, self.memory.peak))
        self._groups, self._sent = [], 0.0
        self.memory.reset_peak()

    def _add(self, verb: str, unit) -> None:
        if verb == "compute":
            if self._groups and self._groups[-1] == (verb, [unit.name]):
                return  # the same unit: backward has recomputed a part of it
            if any(other == "compute" for other, _ in self._groups):
                self.flush()
        if self._groups and self._groups[-1][0] == verb:
            self._groups[-1][1].append(unit.name)
        else:
            self._groups.append((verb, [unit.name]))

    def _computes(self, unit, module, inputs) -> None:
        """The unit's forward begins."""
        self._add("compute", unit)

    def _gathers(self, unit) -> None:
        if not unit.allocated:
            if any(verb == "compute" for verb, _ in self._groups):
                self.flush()
            self._add("gather", unit)

    def _frees(self, unit) -> None:
        if unit.allocated:
            if unit in self._roots:  # the end of backward, in front of the first unit
                self._add("compute", unit)
            self._add("free", unit)


@contextlib.contextmanager
def named_collectives(engine, timeline: Timeline):
    """Around a step of a chapter: spans of collectives get the name of their unit (ZeRO-3) or bucket (ZeRO-1, ZeRO-2).

    A gather is recognised by the storages of its bucket. The tensors of a reduce-scatter are new, so it belongs to the
    bucket that the engine is sending: its `send` is wrapped meanwhile.
    """
    name_of, sending = {}, [""]  # a bucket, or the storage of one of its buffers -> the name
    for index, bucket in enumerate(buckets_of(engine)):
        name_of[bucket] = getattr(bucket, "name", f"bucket {index}")  # ZeRO-3's are units
        for tensor in tensor_leaves([bucket.flat, bucket.shard, bucket.gradient]):
            name_of[storage_under(tensor)._cdata] = name_of[bucket]
    plain = getattr(engine, "send", None)  # ZeRO-1 has none: it sends each bucket from its own buffer

    def send(bucket) -> None:
        sending.append(name_of[bucket])
        plain(bucket)
        sending.pop()

    def name(span: Span, args) -> None:
        names = [name_of.get(storage_under(tensor)._cdata) for tensor in tensor_leaves(args[:2])]
        span.unit = next(filter(None, names), sending[-1])

    timeline.on_collective = name
    if plain is not None:
        engine.send = send
    try:
        yield
    finally:
        if plain is not None:
            del engine.send  # the class's method is there again

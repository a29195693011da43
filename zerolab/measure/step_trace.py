"""The step-by-step trace that `./launch.sh zero1 2` prints: a line for each event of a training step of a chapter.

A chapter has no code for this. The trace listens to a `Timeline` and reads a `MemoryLedger`.
"""

import textwrap

import torch

from zerolab.measure import tables
from zerolab.measure.held import bucket_name, held_bytes
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.timeline import Listener, Span
from zerolab.measure.traffic import sent_bytes

BAR = 24  # characters of the longest bar

# How to read the lines of a step with buckets, and with units.
BUCKETS = """\
buffer  the whole tensor of a collective: the sum over the ranks, or all shards together
sent    what this rank sends for it: (N-1)/N of the buffer, or twice as much in an all-reduce
live    all bytes that are alive on this rank when the event begins, activations included
holds   parameters, gradients and optimizer state that this rank keeps when this numbered step ends. ZeRO-1's buffers
        for gradients are allocated once and always count
3 reduce gradients: reduce-scatter   ZeRO-2's step 3 inside step 2: the gradients of a bucket are final
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


class StepTrace(Listener):
    """Lines of a step: `with memory, Timeline(engine, listener=StepTrace(engine, memory))`, and one training step."""

    def __init__(self, engine, memory: MemoryLedger):
        self.engine, self.memory = engine, memory
        self._depth = 0  # how many labelled steps are open

    def step_begins(self, step: Span, depth: int) -> None:
        self._depth = depth
        if depth == 1:
            self.line(f"Step {step.name}")

    def step_ends(self, step: Span, depth: int) -> None:
        self._depth = depth - 1
        if depth == 1:
            self.line(f"  holds {held_in_words(self.engine)}{self.note_at_the_end()}")


class BucketTrace(StepTrace):
    """ZeRO-1 and -2: a line per collective."""

    how_to_read = BUCKETS

    def __init__(self, engine, memory: MemoryLedger):
        super().__init__(engine, memory)
        self.lines = [f"{'event':<44}{'buffer MB':>10}{'sent MB':>9}{'live MB':>9}"]

    def step_begins(self, step: Span, depth: int) -> None:
        self._depth = depth
        if depth == 1:
            self.line(f"{'Step ' + step.name:<63}{self.memory.live / 1e6:>9.2f}")

    def issues(self, collective: Span, tensors: list[torch.Tensor]) -> None:
        inside = f"{collective.step}: " if self._depth > 1 else ""
        sizes = f"{collective.nbytes / 1e6:>10.2f}{_sent(collective) / 1e6:>9.2f}{self.memory.live / 1e6:>9.2f}"
        self.line(f"  {inside + collective.name:<42}{sizes}")

    def note_at_the_end(self) -> str:
        in_flight = getattr(self.engine, "in_flight", None)
        if in_flight is None:
            return ""
        return f" (the last bucket's {in_flight.shard_gradient.nbytes / 1e6:.2f} MB are in flight)"

    def line(self, text: str) -> None:
        self.lines.append(text)


class UnitTrace(StepTrace):
    """ZeRO-3: the sequence at the top of zero3.py, a line for each unit that computes, with a bar of what is alive."""

    how_to_read = UNITS

    def __init__(self, engine, memory: MemoryLedger):
        super().__init__(engine, memory)
        self._rows: list[tuple[str, float, int]] = []  # text, bytes sent, bytes alive (0: a line of text only)
        self._groups: list[tuple[str, list[str]]] = []  # of the line being written: (verb, names of units)
        self._sent = 0.0

    @property
    def lines(self) -> list[str]:
        rows = _joined(self._rows)
        most = max(live for _, _, live in rows)
        width = min(max(len(text) for text, _, live in rows if live), tables.columns_here() - 18)
        longest_bar = max(0, min(BAR, tables.columns_here() - width - 20))
        lines = [f"{'event':<{width}}{'sent MB':>9}{'peak MB':>9}"]
        for text, sent, live in rows:
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

    def note_at_the_end(self) -> str:
        roots = [unit for unit in self.engine.units if unit.module is self.engine.model]
        gathered = sum(unit.flat.nbytes for unit in roots if unit.allocated)
        return f" ({gathered / 1e6:.2f} MB of the parameters are the gathered root)" if gathered else ""

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

    def computes(self, unit: str, step: str) -> None:
        computing = [names for verb, names in self._groups if verb == "compute"]
        if [unit] in computing:
            return  # the same unit: backward has recomputed a part of it
        if computing:
            self.flush()
        self._add("compute", unit)

    def resizes(self, bucket, grows: bool) -> None:
        if grows and any(verb == "compute" for verb, _ in self._groups):
            self.flush()
        self._add("gather" if grows else "free", bucket_name(self.engine, bucket))

    def issues(self, collective: Span, tensors: list[torch.Tensor]) -> None:
        self._sent += _sent(collective)
        if collective.name == "reduce-scatter":
            self._add("reduce", collective.unit)

    def _add(self, verb: str, name: str) -> None:
        if self._groups and self._groups[-1][0] == verb:
            self._groups[-1][1].append(name)
        else:
            self._groups.append((verb, [name]))


def _joined(rows: list[tuple[str, float, int]]) -> list[tuple[str, float, int]]:
    """Join "compute root" and "gather 2 | compute root": backward computes the loss, then gathers, then the head."""
    found = []
    for text, sent, live in rows:
        if found and found[-1][0].startswith("  compute ") and text.endswith(" | " + found[-1][0].strip()):
            _, before, alive = found.pop()
            sent, live = sent + before, max(live, alive)
        found.append((text, sent, live))
    return found


def _sent(collective: Span) -> float:
    return sent_bytes(collective.name, collective.nbytes, len(collective.ranks))

"""What the checks of moves.py share: models, instruments, and the `Sheet` on which a check writes what it finds."""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.ledger import tensors_in
from harness.measure.traffic import sent_bytes
from harness.properties import parts
from harness.properties.overlap import replaced
from harness.properties.peaks import Alive
from harness.properties.property import Differs, Finding, NotApplicable, Subject, finding_of, first_difference, holds

# With a large eps the update depends on the gradient's size: a sum in place of a mean shows.
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
EXACT = {"rtol": 0, "atol": 1e-9}  # in float64, where the order of a sum makes 1e-15
ROUNDED = {"rtol": 0.03, "atol": 1e-3}  # gradients that were bfloat16 on their way
MIXED = {"param_dtype": torch.float32, "reduce_dtype": torch.bfloat16}  # of a model in float64: three dtypes
MIXED_AT = ", in mixed precision"  # what is said of engines that are built with it
SMALL = {"bucket_mb": 320 / 2**20}  # several buckets, with three parameters and more in some

LAYERS, WIDTH = 8, 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer of `Stack`
NOISE = (8 + 2 * LAYERS) * 4 * 2 * WIDTH  # activations


class Promise(NamedTuple):
    """The kind of collective that brings a step's gradients, which sends `times` Ψ; what each rank holds a part of."""

    kind: str
    times: int
    cut: tuple[str, ...]


PROMISES = {
    "zero1": Promise("all-reduce", 2, ("optimizer",)),
    "zero1_2psi": Promise("reduce-scatter", 1, ("optimizer",)),
    "zero2": Promise("reduce-scatter", 1, ("gradients", "optimizer")),
    "zero3": Promise("reduce-scatter", 1, ("parameters", "gradients", "optimizer")),
}


# Instruments.


@dataclass
class Issued:
    """A collective that was started, of `nbytes` (of the whole buffer), and what became of it."""

    what: str
    kind: str
    nbytes: int
    group: dist.ProcessGroup
    given: torch.Tensor | None  # a copy of its input, where `Recorder.copies`
    waits: bool = False  # somebody must wait for it
    waited: bool = False
    spoilt: bool = False  # its input was changed or freed before somebody waited for it


class Work:
    """A collective's work that knows whether somebody has waited for it. It keeps no tensor alive."""

    def __init__(self, work, recorder, issued: Issued, inputs):
        self._work, self._recorder, self._issued = work, recorder, issued
        self._inputs = [(weakref.ref(tensor), tensor._version) for tensor in inputs]
        issued.waits = True

    def wait(self, *args, **kwargs):
        if not self._issued.waited:
            self._issued.waited = True
            there = [(tensor(), version) for tensor, version in self._inputs if tensor() is not None]
            self._issued.spoilt = any(t._version != v or not t.untyped_storage().nbytes() for t, v in there)
        with self._recorder.inside(self._issued.what):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._issued if name == "waited" else self._work, name)


KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
COLLECTIVES = (*KINDS, "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
               "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "send", "recv", "barrier",
               "all_gather_object", "broadcast_object_list")  # fmt: skip


class Recorder:
    """Stands in front of the functions of torch.distributed, and writes down what is `issued` inside."""

    issued: list[Issued] = []
    copies = False

    def __enter__(self):
        here = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
        self._replaced = replaced(**{name: partial(self._call, name, real) for name, real in here.items()})
        self._replaced.__enter__()
        return self

    def __exit__(self, *exception):
        self._replaced.__exit__(*exception)

    def begins(self, what: str) -> str:
        """A collective is about to be issued. Returns what it is called."""
        return what

    def inside(self, what: str):
        """A context: this rank is in that collective, to issue it or to wait for it."""
        return contextlib.nullcontext()

    def _call(self, name, real, *args, **kwargs):
        given = [*args, *kwargs.values()]
        nbytes = max(sum(tensor.nbytes for tensor in tensors_in([arg])) for arg in [None, *given])
        what = self.begins(f"{name}{f' of {nbytes:,} bytes' if nbytes else ''}")
        first = args[:2] if name == "all_reduce" else args[1:2]  # the input, where it is not given by name
        inputs = [*first, *(value for key, value in kwargs.items() if key.startswith("input") or key == "tensor")]
        inputs = tensors_in(inputs)
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), name)
        group = next((each for each in given if isinstance(each, dist.ProcessGroup)), dist.group.WORLD)
        copy = torch.cat([tensor.flatten() for tensor in inputs]) if self.copies and inputs else None
        issued = Issued(what, kind, nbytes, group, copy)
        # Left out are barriers, and the numbers with which the ranks compare notes (harness/engine/order.py).
        if name != "barrier" and [(t.numel(), t.dtype) for t in inputs] != [(1, torch.int64)]:
            Recorder.issued.append(issued)
        with self.inside(what):
            result = real(*args, **kwargs)
        if not isinstance(result, dist.Work):
            return result
        # What lies in the output is changed by the collective itself.
        outputs = (
            [] if name == "all_reduce" else tensors_in([args[:1], kwargs.get("output"), kwargs.get("output_tensor")])
        )
        places = {tensor.untyped_storage()._cdata for tensor in outputs}
        return Work(result, self, issued, [t for t in inputs if t.untyped_storage()._cdata not in places])


@functools.cache
def _groups(world) -> types.SimpleNamespace:
    """Groups to build engines with; none is the default one, so that a collective that was given none shows.

    `all` of the ranks; this rank `alone`; and the `silent` one.
    """
    new = partial(dist.new_group, group_desc="for all checks")
    alone = [new([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return types.SimpleNamespace(all=new(), alone=alone, silent=parts.silent_group())


@dataclass
class Sheet:
    """What the checks share: what is under test, this rank, and what was found.

    `chapter` is the module of a stage, or one that somebody has written in its place, and `engine_cls` its class, which
    promises what `PROMISES[name]` says. `file` is what findings call the module.
    """

    name: str
    chapter: types.ModuleType
    engine_cls: type
    device: torch.device
    file: str

    def __post_init__(self):
        self.groups, self.promise = _groups(dist.group.WORLD), PROMISES[self.name]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._oracles = {}
        self._begin(None)

    def _begin(self, step: int | None) -> None:
        self.findings: list[Finding] = []
        self.step, self._wrong_at = step, None  # the `at` of what was found
        self.at, self.group = "", self.groups.all  # how engines are built at the moment

    # What is said.

    def look(self, check: Callable) -> list[Finding]:
        """What `check` finds. It is for a `Recorder`'s inside."""
        self._begin(check.step)
        torch.manual_seed(self.rank)
        check(self)
        return self.findings

    def of_all_ranks(self, number: float) -> list[float]:
        """Every rank's `number`. A collective of all ranks."""
        return parts.of_all_ranks(torch.tensor(number, dtype=torch.float64, device=self.device)).tolist()

    def ask(self, check: Callable, cls=None, **case) -> None:
        """Write down what a property finds of the whole class, if no rank has found anything else so far."""
        if any(self.of_all_ranks(len(self.findings))):
            return
        try:
            check(Subject(self.name, cls or self.engine_cls, like=self.name), **case)
        except AssertionError as error:
            self.findings.append(finding_of(error))

    def expect(self, right: bool, what: str, expected, found, read: str = "") -> None:
        """Write down what is not `right`; and what to `read`, if not what its step says.

        No rank leaves a check early: the others may wait for it in a collective.
        """
        if not right and self._wrong_at in (None, self.at):  # the first way of building engines that goes wrong
            self._wrong_at = self.at
            self.findings.append(Finding(what + self.at, str(expected), str(found), self.step, self.rank, read))

    def equal(self, what: str, found, expected, said: str = "", read: str = "") -> None:
        """`found` is `expected`, or what is `said` in its place."""
        self.expect(found == expected, what, said or expected, found, read)

    def none(self, what: str, found: list[str]) -> None:
        self.expect(not found, what, "none", ", ".join(found))

    def same(self, what: str, found, expected: torch.Tensor, tolerance=EXACT, backwards: int = 1) -> None:
        """`found` is `expected`, as far as float64 tells; `backwards` have added up in it."""
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            shape = str(tuple(found.shape)) if isinstance(found, torch.Tensor) else type(found).__name__
            shape += ": is a return missing?" * (found is None)
            return self.expect(False, what, f"a tensor of shape {tuple(expected.shape)}", shape)
        if there := first_difference(found, expected, **tolerance):
            right, wrong, where = there
            times = self._ratio(wrong / right if right else 0, backwards)
            self.expect(False, what, f"{right:.9g}", f"{wrong:.9g}{times}{where * bool(expected.dim())}")

    def _ratio(self, ratio: float, backwards: int) -> str:
        """What a value that is so many times the right one may come from."""
        for known, said in (
            (len(self.ranks), f"{len(self.ranks)} times as much: summed, not averaged?"),
            (1 / backwards, "half as much: has the second backward overwritten the first, and not added to it?"),
            (1 / len(self.ranks), f"1/{len(self.ranks)} of it: divided by N twice?"),
        ):
            if known != 1 and abs(ratio - known) < 1e-6:
                return f", {said}"
        return ""

    def at_most(self, what: str, nbytes: float, allowed: float, means: str) -> None:
        self.expect(nbytes <= allowed, what, f"at most {allowed:,.0f} bytes ({means})", f"{nbytes:,.0f} bytes")

    @contextlib.contextmanager
    def listen(self, where: str = "", copies: bool = False):
        """The collectives inside. What is started in a place that is named is waited for, and unchanged until then."""
        issued = []
        with mock.patch.multiple(Recorder, issued=issued, copies=copies):
            yield issued
        for said, wrong in (
            ("never waited for", [each for each in issued if each.waits and not each.waited]),
            ("whose input was changed or freed before the wait", [each for each in issued if each.spoilt]),
        ):
            if where and wrong and not self.findings:
                self.expect(False, f"collectives of {where}, {said}", "none", f"{len(wrong)}, first {wrong[0].what}")

    def sizes(self, issued: list[Issued]) -> list[int]:
        return [each.nbytes for each in issued]

    def in_flight(self, what: str, issued: list[Issued], read: str = "") -> None:
        """The last of these collectives was not waited for yet."""
        last = issued[-1] if issued else None
        found = "waited for already" if last and last.waits else "over already: is it started with async_op=True?"
        means = "in flight: it travels while the rank computes, and is waited for later"
        self.expect(not last or last.waits and not last.waited, what, means, found, read=read)

    # What it is said about.

    def setups(self, *more):
        """Options to build an engine with, one set after the other; `at` and `group` are those of the current one."""
        one = ", in a group of one rank (self.world_size is 1)", {"group": self.groups.alone}
        for self.at, options in (("", {}), one, (MIXED_AT, MIXED), *more):
            self.group = options.get("group", self.groups.all)
            yield options
        self.at, self.group = "", self.groups.all  # not after an exception: its message says where it was

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    def build(self, model: nn.Module, cls=None, **options):
        return (cls or self.engine_cls)(model, ADAMW, **{"group": self.group, **options})

    def build_odd(self, cls=None, **options):
        """An engine for values, of several buckets or units."""
        return self.build(self.odd(), cls, **({} if self.name == "zero3" else SMALL), **options)

    def probe(self, **methods):
        """The class under test with some methods replaced: those whose turn comes later."""
        return type(self.engine_cls.__name__, (self.engine_cls,), methods)

    def odd(self, rank: int | None = None) -> nn.Module:
        """The model for values: the group's first rank's start is the right one, the others' is another."""
        seed = self.rank if rank is None else rank
        return parts.seeded(partial(parts.OddModel, frozen_block=1), seed, torch.float64, self.device)

    def start(self) -> nn.Module:
        return self.odd(self.ranks[0])

    @contextlib.contextmanager
    def ledger(self, cls=None, frozen: str | None = None, **options):
        """(what is alive, an engine over a `Stack` that was built under it, in a group that moves nothing)."""
        with Alive() as memory:
            model = parts.seeded(partial(parts.Stack, LAYERS, WIDTH), 0, torch.float32, self.device)
            if frozen:
                model.get_parameter(frozen).requires_grad_(False)
            engine = self.build(model, cls, **{"group": self.groups.silent, **options})
            memory.mark()
            yield memory, engine

    def padding(self, buckets) -> float:
        """Bytes of padding that a layout may need: 16 behind a parameter, 16 per rank behind a bucket."""
        return sum(16 * (len(bucket.params) + self.world_size) for bucket in buckets)

    def share(self, buckets) -> float:
        """Bytes of this rank's part of a `Stack`, with its padding."""
        return LAYERS * LAYER / self.world_size + self.padding(buckets)

    def batch(self, step: int, rank: int | None = None) -> tuple[torch.Tensor, ...]:
        tensors = parts.token_batch(step, self.rank if rank is None else rank)
        return tuple(tensor.to(self.device) for tensor in tensors)

    def vectors(self, step: int, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in parts.vector_batch(step, self.rank, width, batch=2))

    def oracle(self) -> nn.Module:
        """One process, plain PyTorch, all ranks' data: the model after a step, with its gradients."""
        if (key := tuple(self.ranks)) not in self._oracles:
            self._oracles[key] = self.start()
            parts.oracle(self._oracles[key], ADAMW, F.cross_entropy, self.batch, 1, self.ranks)
        return self._oracles[key]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: param.grad for name, param in self.oracle().named_parameters()}

    def backward(self, engine) -> None:
        inputs, targets = self.batch(0)
        F.cross_entropy(engine(inputs), targets).backward()

    def pieces(self, engine):
        """(name, piece, the elements of the whole parameter that it is) of all that this rank owns."""
        for bucket in engine.trained_buckets:
            for index, piece in bucket.pieces:
                first = max(0, bucket.start - bucket.offsets[index])
                yield bucket.names[index], piece, slice(first, first + piece.numel())

    def right_gradients(self, engine, times: float = 1) -> None:
        """Every piece has its part of the oracle's gradients."""
        gradients, dtypes = self.gradients(), {bucket.reduce_dtype for bucket in engine.trained_buckets}
        tolerance = EXACT if dtypes == {torch.float64} else ROUNDED
        for name, piece, part in self.pieces(engine):
            what = f"the gradient of this rank's piece of {name}"
            self.expect(piece.grad is not None, what, f"{piece.numel()} elements", None)
            if piece.grad is not None:
                self.same(what, piece.grad, gradients[name].flatten()[part] * times, tolerance, max(1, int(times)))

    def traffic(self, issued: list[Issued], kinds: list[str], times: float, nbytes: float, when: str) -> None:
        """These kinds of collectives, in the order in which they are first met; not more than `times` Ψ (N-1)/N.

        `nbytes` is what the Ψ elements take, in the dtype in which they travel. All of it is in the engine's group.
        """
        outside = " outside of the engine's group (was group= passed?)"
        found = list(dict.fromkeys(each.kind + outside * (each.group is not self.group) for each in issued))
        self.expect(found == kinds, f"collectives {when}", ", then ".join(kinds), ", then ".join(found) or "none")
        allowed = times * nbytes * (len(self.ranks) - 1) / len(self.ranks)
        means = f"{times:g}Ψ (N-1)/N elements; Ψ of them take {nbytes:,.0f} bytes, padding included"
        sent = sum(sent_bytes(each.kind, each.nbytes, each.group.size()) for each in issued)
        self.at_most(f"bytes sent {when}", sent, allowed, means)


# The library.


def move(group: str, *stages: str, step: int | None = None):
    """Enter a check of one step, a function of a `Sheet`, into the library: what must be true of a move of `stages`."""

    def enter(check):
        def examined(engine: Subject, device: str = "cpu") -> None:
            if not isinstance(engine.build, type):
                raise NotApplicable(f"{engine.name} has no methods of a stage")
            chapter = import_module(engine.like)  # its other parts are those of the class under test
            sheet = Sheet(engine.like, chapter, engine.build, torch.device(device), f"{engine.like}.py")
            with Recorder():
                for first in sheet.look(check)[:1]:
                    raise Differs(first.what, first.expected, first.found, first.step)

        check.step = step
        # `holds` takes name and docstring from the check; what it asks is `examined`.
        examined.__name__, examined.__doc__ = check.__name__, check.__doc__
        holds(group, engines=stages, further_sizes=(3,))(examined)
        return check

    return enter

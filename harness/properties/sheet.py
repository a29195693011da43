"""What the checks of moves.py share: models, instruments, and the `Sheet` on which a check writes what it finds."""

import contextlib
import functools
import importlib
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.engine.unit_hooks import tensors_in
from harness.measure.memory import MemoryLedger
from harness.measure.traffic import KINDS, Collective, TrafficLedger, group_of
from harness.properties import parts
from harness.properties.overlap import replaced
from harness.properties.property import Differs, Finding, NotApplicable, Subject, first_difference, holds

# With a large eps the update depends on the gradient's size: a sum in place of a mean shows.
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
EXACT = {"rtol": 0, "atol": 1e-9}  # in float64, where the order of a sum makes 1e-15
ROUNDED = {"rtol": 0.03, "atol": 1e-3}  # gradients that were bfloat16 on their way
MIXED = {"param_dtype": torch.float32, "reduce_dtype": torch.bfloat16}  # of a model in float64: three dtypes
MIXED_AT = ", in mixed precision"  # what is said of engines that are built with it
SMALL = {"bucket_mb": 320 / 2**20}  # several buckets, with three parameters and more in some

LAYERS, WIDTH = 8, 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer of `Stack`
ACTIVATIONS = (8 + 2 * LAYERS) * 4 * 2 * WIDTH


@dataclass(frozen=True)
class Promise:
    """What an engine sends in a training step: `times` Ψ elements in collectives of these `kinds`.

    `reduce` is what of it is for the gradients. `cut` is what each rank holds only a part of.
    """

    kinds: list[str]
    times: int
    reduce: tuple[str, int]
    cut: tuple[str, ...]


PROMISES = {
    "zero1": Promise(["all-reduce", "all-gather"], 3, ("all-reduce", 2), ("optimizer",)),
    "zero1_2psi": Promise(["reduce-scatter", "all-gather"], 2, ("reduce-scatter", 1), ("optimizer",)),
    "zero2": Promise(["reduce-scatter", "all-gather"], 2, ("reduce-scatter", 1), ("gradients", "optimizer")),
    "zero3": Promise(["all-gather", "reduce-scatter"], 3, ("reduce-scatter", 1),
                     ("parameters", "gradients", "optimizer")),
}  # fmt: skip


# Models: awkward sizes for values, large layers for bytes, different layers for the order of events.

Odd = partial(parts.OddModel, frozen_block=1)
Stack = partial(parts.Stack, LAYERS, WIDTH)


class Lanes(nn.Module):
    """Layers of different sizes, so that a collective's bytes name the layer, run in the order of `way`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, out) for out in (8, 16, 24, 32))
        self.way = [0, 1, 2, 3]

    def forward(self, x):
        *first, last = self.way
        for index in first:
            x = x + self.layers[index](x).sum(-1, keepdim=True)
        return self.layers[last](x)


# Instruments.


class Alive(MemoryLedger):
    """Bytes that are alive; after `mark()` also how many `more` there are than then, and the `most` meanwhile."""

    def mark(self) -> None:
        self.before = self.live
        self.reset_peak()

    @property
    def more(self) -> int:
        return self.live - self.before

    @property
    def most(self) -> int:
        return self.peak - self.before


class Traffic(TrafficLedger):
    """Every collective and every message, also those that no stage needs; those outside of `group` under that name."""

    def __init__(self, group, on_event=None):
        super().__init__(on_event)
        self.group, self.reduced = group, []  # what reduce-scatters were given

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        quiet = ("barrier", "monitored_barrier", "wait_tensor")
        if func.namespace in ("c10d", "_c10d_functional") and name not in KINDS and name not in quiet:
            whole = sum(tensor.nbytes for tensor in tensors_in(list(args)))
            self.collectives.append(Collective(name.strip("_"), whole, whole, ""))
            self._on_event(name, len(self._steps), self.collectives[-1])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, kind, args) -> None:
        tensors = tensors_in(list(args[:2]))
        if all(tensor.dtype == torch.int64 for tensor in tensors) and tensors[-1].numel() == 1:
            return  # the ranks compare notes, with a number each (harness/engine/order.py)
        if group_of(args).group_name != self.group.group_name:
            kind += " outside of the engine's group (was group= passed?)"
        if kind == "reduce-scatter":
            self.reduced.append(torch.cat([tensor.flatten() for tensor in tensors_in(args[1])]))
        super()._note(kind, args)

    @property
    def sizes(self) -> list[int]:
        return [collective.whole_bytes for collective in self.collectives]


@dataclass
class Issued:
    """A collective that was started: who it is, and what became of it."""

    what: str
    nbytes: int
    waited: bool = False
    spoilt: bool = False  # its input was changed or freed before somebody waited for it


class Work:
    """A collective's work that knows whether somebody has waited for it. It keeps no tensor alive."""

    issued: list[Issued] = []
    on_wait = None

    def __init__(self, work, recorder, issued: Issued, inputs):
        self._work, self._recorder, self._issued = work, recorder, issued
        self._inputs = [(weakref.ref(tensor), tensor._version) for tensor in inputs]
        Work.issued.append(self._issued)

    def wait(self, *args, **kwargs):
        if not self._issued.waited:
            self._issued.waited = True
            there = [(tensor(), version) for tensor, version in self._inputs if tensor() is not None]
            self._issued.spoilt = any(t._version != v or not t.untyped_storage().nbytes() for t, v in there)
            if Work.on_wait:
                Work.on_wait(self._issued)
        with self._recorder.inside(self._issued.what):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._work, name)


class Events(Traffic):
    """Gathers, waits for them, frees, reductions, and the matrix products of forward and backward, by layer, in order.

    A unit is freed by whoever takes the last byte from a storage of its size.
    """

    def __init__(self, engine):
        super().__init__(engine.group, on_event=self._issued)
        self.events = []
        self._units = {unit.buckets[0].numel: number for number, unit in enumerate(engine.units)}
        self._weights = {unit.buckets[0].params[0].numel(): number for number, unit in enumerate(engine.units)}
        self._resize = torch.UntypedStorage.resize_
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", lambda *args: self._resized(*args))

    def __enter__(self):
        Work.on_wait = self._waited
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception):
        Work.on_wait = None
        self._patch.stop()
        return super().__exit__(*exception)

    def _of_unit(self, verb: str, nbytes: int) -> None:
        self.events.append(f"{verb} {self._units.get(nbytes // 4, '?')}")

    def _resized(self, storage, nbytes: int):
        if storage.nbytes() and nbytes == 0:
            self._of_unit("free", storage.nbytes())
        return self._resize(storage, nbytes)

    def _waited(self, issued: Issued) -> None:
        if issued.what.startswith("all_gather"):
            self._of_unit("wait", issued.nbytes)

    def _issued(self, what: str, depth: int, collective: Collective | None) -> None:
        if collective is None:  # a label
            return
        verb = {"all-gather": "gather", "reduce-scatter": "reduce"}.get(collective.kind, collective.kind)
        self._of_unit(verb, collective.whole_bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name == "aten::addmm" and args[2].numel() in self._weights:
            self.events.append(f"forward {self._weights[args[2].numel()]}")
        elif func._schema.name == "aten::mm" and result.numel() in self._weights:
            self.events.append(f"backward {self._weights[result.numel()]}")
        return result


COLLECTIVES = ("all_reduce", "all_gather", "all_gather_single", "all_gather_into_tensor", "reduce_scatter",
               "reduce_scatter_single", "reduce_scatter_tensor", "broadcast", "reduce", "gather", "scatter",
               "all_to_all", "all_to_all_single", "send", "recv", "barrier", "all_gather_object",
               "broadcast_object_list")  # fmt: skip


class Recorder:
    """Stands in front of the functions of torch.distributed: inside, what they start is a `Work`."""

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
        nbytes = max(sum(tensor.nbytes for tensor in tensors_in([arg])) for arg in [None, *args, *kwargs.values()])
        what = self.begins(f"{name}{f' of {nbytes:,} bytes' if nbytes else ''}")
        with self.inside(what):
            result = real(*args, **kwargs)
        if not isinstance(result, dist.Work):
            return result
        first = args[:2] if name == "all_reduce" else args[1:2]  # the input, where it is not given by name
        inputs = [*first, *(value for key, value in kwargs.items() if key.startswith("input") or key == "tensor")]
        return Work(result, self, Issued(what, nbytes), tensors_in(inputs))


@functools.cache
def _groups(world) -> types.SimpleNamespace:
    """Groups to build engines with; none is the default one, so that a collective that was given none shows.

    `all` of the ranks; this rank `alone`; and `silent`, whose collectives move nothing and take no memory, for the
    bytes that an engine itself keeps.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    new = functools.partial(dist.new_group, group_desc="for all checks")
    alone = [new([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return types.SimpleNamespace(all=new(), alone=alone, silent=new(backend="fake"))


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

    def same(self, what: str, found, expected: torch.Tensor, tolerance=EXACT, backwards: int = 1,
             none: str = "NoneType: is a return missing?") -> None:  # fmt: skip
        """`found` is `expected`, as far as float64 tells; `backwards` have added up in it. `none` is said of None."""
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            shape = none if found is None else shape
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

    def at_most(self, what: str, nbytes: int, allowed: float, means: str) -> None:
        self.expect(nbytes <= allowed, what, f"at most {allowed:,.0f} bytes ({means})", f"{nbytes:,} bytes")

    @contextlib.contextmanager
    def received(self, where: str):
        """What is started inside is waited for inside, and left alone until then."""
        Work.issued.clear()
        yield
        for said, wrong in (
            ("never waited for", [issued for issued in Work.issued if not issued.waited]),
            ("whose input was changed or freed before the wait", [issued for issued in Work.issued if issued.spoilt]),
        ):
            if wrong and not self.findings:
                self.expect(False, f"collectives of {where}, {said}", "none", f"{len(wrong)}, first {wrong[0].what}")

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
        return parts.seeded(Odd, self.rank if rank is None else rank, torch.float64, self.device)

    def start(self) -> nn.Module:
        return self.odd(self.ranks[0])

    def lanes(self) -> nn.Module:
        """The model for the order of events."""
        return parts.seeded(Lanes, 0, torch.float32, self.device)

    @contextlib.contextmanager
    def ledger(self, cls=None, frozen: str | None = None, **options):
        """(what is alive, an engine over `Stack` that was built under it, in a group that moves nothing)."""
        with Alive() as memory:
            model = parts.seeded(Stack, 0, torch.float32, self.device)
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

    def listen(self) -> Traffic:
        return Traffic(self.group)

    def batch(self, step: int, rank: int | None = None) -> tuple[torch.Tensor, ...]:
        tensors = parts.token_batch(step, self.rank if rank is None else rank)
        return tuple(tensor.to(self.device) for tensor in tensors)

    def vectors(self, step: int, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in parts.vector_batch(step, self.rank, width, batch=2))

    def oracle(self, steps: int) -> tuple[nn.Module, torch.Tensor]:
        """One process, plain PyTorch, all ranks' data: (the model after `steps`, with the last gradients, losses)."""
        key = steps, *self.ranks
        if key not in self._oracles:
            model = self.start()
            losses, _ = parts.oracle(model, ADAMW, F.cross_entropy, self.batch, steps, self.ranks)
            self._oracles[key] = model, losses
        return self._oracles[key]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: param.grad for name, param in self.oracle(1)[0].named_parameters()}

    def backward(self, engine) -> None:
        inputs, targets = self.batch(0)
        F.cross_entropy(engine(inputs), targets).backward()

    def pieces(self, engine):
        """(name, piece, the elements of the whole parameter that it is) of all that this rank owns."""
        for bucket in engine.trained_buckets:
            for index, piece in bucket.pieces:
                first = max(0, bucket.start - bucket.offsets[index])
                yield bucket.names[index], piece, slice(first, first + piece.numel())

    def right_gradients(self, engine, gradients: dict[str, torch.Tensor] | None = None, times: float = 1) -> None:
        """Every piece has its part of `gradients` (default: the oracle's)."""
        gradients = self.gradients() if gradients is None else gradients
        dtypes = {bucket.reduce_dtype for bucket in engine.trained_buckets}
        tolerance = EXACT if dtypes == {torch.float64} else ROUNDED
        for name, piece, part in self.pieces(engine):
            what = f"the gradient of this rank's piece of {name}"
            if name in gradients and piece.grad is not None:
                self.same(what, piece.grad, gradients[name].flatten()[part] * times, tolerance, int(times))
            else:
                self.expect(name not in gradients and piece.grad is None, what,
                            f"{piece.numel()} elements" if name in gradients else None, piece.grad)  # fmt: skip

    def traffic(self, traffic: Traffic, kinds: list[str], times: float, nbytes: float, when: str) -> None:
        """These kinds of collectives, in the order in which they are first met; not more than `times` Ψ (N-1)/N.

        `nbytes` is what the Ψ elements take, in the dtype in which they travel.
        """
        found = list(dict.fromkeys(collective.kind for collective in traffic.collectives))
        self.expect(found == kinds, f"collectives {when}", ", then ".join(kinds), ", then ".join(found) or "none")
        allowed = times * nbytes * (len(self.ranks) - 1) / len(self.ranks)
        means = f"{times:g}Ψ (N-1)/N elements; Ψ of them take {nbytes:,.0f} bytes, padding included"
        self.at_most(f"bytes sent {when}", traffic.sent_bytes, allowed, means)


# The library.


def of_subject(engine: Subject, device: str) -> Sheet:
    """A sheet about the class under test, with the other parts of the chapter that it promises to be."""
    if not isinstance(engine.build, type):
        raise NotApplicable(f"{engine.name} has no methods of a stage")
    chapter = importlib.import_module(engine.like)
    return Sheet(engine.like, chapter, engine.build, torch.device(device), f"{engine.like}.py")


def move(group: str, *stages: str, step: int | None = None):
    """Enter a check of one step, a function of a `Sheet`, into the library: what must be true of a move of `stages`."""

    def enter(check):
        def examined(engine: Subject, device: str = "cpu") -> None:
            engine.needs(*stages)
            with Recorder():
                for first in of_subject(engine, device).look(check)[:1]:
                    raise Differs(first.what, first.expected, first.found, first.step)

        check.step = step
        # `holds` takes name and docstring from the check; what it asks is `examined`.
        examined.__name__, examined.__doc__ = check.__name__, check.__doc__
        holds(group, engines=stages, sizes=(2,), further_sizes=(3,))(examined)
        return check

    return enter

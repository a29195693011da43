"""What `./launch.sh check` looks at, step by step: values against plain PyTorch, bytes, and the order of collectives.

A check is a function of a `Sheet`, run on every rank (harness/check_ranks.py), and writes down what differs from what
is expected. It looks at a step alone, with the steps behind it replaced, as long as that is possible.
"""

import contextlib
import importlib
import itertools
import types
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness import guard, loop
from harness.exercise import EXERCISES, Blank
from harness.instruments.memory import MemoryLedger, held_bytes
from harness.instruments.traffic import KINDS, Collective, TrafficLedger

# With a large eps the update depends on the gradient's size: a sum in place of a mean shows.
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
ATOL = 1e-9  # in float64, where the order of a sum makes 1e-15


# Models: awkward sizes for values, large layers for bytes, different layers for the order of events.


class OddBlock(nn.Module):
    """Sizes that N rarely divides, a scalar, and a parameter of two elements."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.scale, self.pair = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x))) + self.pair.sum()


class Odd(nn.Module):
    """An embedding, whose input needs no gradient, blocks of different sizes, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList(OddBlock(5, hidden) for hidden in (7, 9, 11))

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stack(nn.Module):
    """Linear layers of these widths: hardly any activations, so that what is alive are parameters and gradients."""

    def __init__(self, widths, backwards: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.backwards = backwards

    def forward(self, x):
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = layer(x)
        return x


LAYERS, WIDTH = 8, 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer of `big`
FUNNEL = (8, 24, 40, 56, 72)  # every layer of another size, so that a collective's bytes name the layer


def seeded(build, seed: int, dtype: torch.dtype, device) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().to(dtype).to(device)


def tokens(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (4, 6) int64, classes (4,) int64), others for every rank and step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randint(11, (4, 6), generator=generator), torch.randint(3, (4,), generator=generator)


def vectors(step: int, rank: int, wide: int = WIDTH, out: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randn(2, wide, generator=generator), torch.randn(2, out, generator=generator)


# What a check says.


class Traffic(TrafficLedger):
    """Every collective and every message, also those that no stage needs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        quiet = ("barrier", "monitored_barrier", "wait_tensor")
        if func.namespace in ("c10d", "_c10d_functional") and name not in KINDS and name not in quiet:
            whole = sum(tensor.nbytes for tensor in loop.tensors_in(list(args)))
            self.collectives.append(Collective(name.strip("_"), whole, whole, ""))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Work:
    """A collective's work that says when somebody waits for it."""

    def __init__(self, work, watch, what: str):
        self._work, self._watch, self._what = work, watch, what

    def wait(self, *args, **kwargs):
        with self._watch.inside(self._what):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._work, name)


@dataclass
class Sheet:
    """What the checks of one run share: the student's module, this rank, and what was found."""

    name: str
    file: str
    student: types.ModuleType
    device: torch.device

    def __post_init__(self):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.engine_cls = getattr(self.student, EXERCISES[self.name].engine)
        self.findings: list[dict] = []
        self.silent = _silent_group()

    def expect(self, right: bool, what: str, expected, found) -> None:
        if not right:
            self.findings.append({"what": what, "expected": str(expected), "found": str(found)})

    def same(self, what: str, found, expected: torch.Tensor) -> None:
        """`found` is `expected`, as far as float64 tells."""
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            return self.expect(False, what, f"a tensor of shape {tuple(expected.shape)}", shape)
        wrong = ~torch.isclose(found.detach().to(expected), expected, rtol=0, atol=ATOL)
        if wrong.any():
            first = wrong.flatten().nonzero()[0].item()
            place = f" at element {first}; {int(wrong.sum())} of {wrong.numel()} differ" * bool(expected.dim())
            values = expected.flatten()[first].item(), found.detach().flatten()[first].item()
            ratio = values[1] / values[0] if values[0] else 0
            times = f", {round(ratio)} times as much: summed, not averaged?" * (abs(ratio - self.world_size) < 1e-6)
            self.expect(False, what, f"{values[0]:.9g}", f"{values[1]:.9g}{times}{place}")

    def at_most(self, what: str, nbytes: int, allowed: float, means: str) -> None:
        self.expect(nbytes <= allowed, what, f"at most {allowed:,.0f} bytes ({means})", f"{nbytes:,} bytes")

    def build(self, model: nn.Module, cls=None, **options):
        return (cls or self.engine_cls)(model, ADAMW, **options)

    def probe(self, **methods):
        """The student's class with some methods replaced: those whose turn comes later."""
        return type(self.engine_cls.__name__, (self.engine_cls,), methods)

    def odd(self, rank: int | None = None) -> nn.Module:
        """The model for values: rank 0's start is the right one, the others' is another."""
        return seeded(Odd, self.rank if rank is None else rank, torch.float64, self.device)

    def stack(self, widths=(WIDTH,) * (LAYERS + 1), **options) -> nn.Module:
        return seeded(partial(Stack, widths, **options), 0, torch.float32, self.device)

    def batch(self, step: int, of=tokens, **options) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in of(step, self.rank, **options))

    def whole_batch(self, step: int, of=tokens) -> tuple[torch.Tensor, ...]:
        parts = [of(step, rank) for rank in range(self.world_size)]
        return tuple(torch.cat(tensors).to(self.device) for tensors in zip(*parts))

    def oracle(self, steps: int) -> tuple[nn.Module, list[torch.Tensor]]:
        """One process, plain PyTorch, all ranks' data: (the model after `steps`, its gradients left on, losses)."""
        model = self.odd(rank=0)
        optimizer, losses = ADAMW(model.parameters()), []
        for step in range(max(1, steps)):
            optimizer.zero_grad()
            inputs, targets = self.whole_batch(step)
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            if steps:
                optimizer.step()
            losses.append(loss.detach())
        return model, losses

    def backward(self, engine, step: int = 0) -> torch.Tensor:
        inputs, targets = self.batch(step)
        loss = F.cross_entropy(engine(inputs), targets)
        loss.backward()
        return loss.detach()

    def pieces(self, engine):
        """(name, piece, the elements of the whole parameter that it is) of all that this rank owns."""
        for bucket in engine.trained:
            for index, piece in bucket.pieces:
                first = max(0, bucket.start - bucket.offsets[index])
                yield bucket.names[index], piece, slice(first, first + piece.numel())

    def right_gradients(self, engine, gradients: dict[str, torch.Tensor], times: float = 1) -> None:
        """Every piece has its part of `gradients`."""
        for name, piece, part in self.pieces(engine):
            expected = gradients[name].flatten()[part] * times
            if piece.grad is None:
                self.expect(False, f"the gradient of this rank's piece of {name}", f"{piece.numel()} elements", "None")
            else:
                self.same(f"the gradient of this rank's piece of {name}", piece.grad, expected)

    def traffic(self, traffic: Traffic, expected: list[str], times: float, psi: float, slack: float, when: str) -> None:
        """Kinds of collectives in order, neighbours of a kind as one, and not more bytes than `times` psi (N-1)/N."""
        kinds = [kind for kind, _ in itertools.groupby(c.kind for c in traffic.collectives)]
        self.expect(kinds == expected, f"collectives {when}", _then(expected), _then(kinds))
        factor = (self.world_size - 1) / self.world_size
        allowed = times * (psi + slack) * factor
        means = f"{times:g}Ψ (N-1)/N with Ψ = {psi:,.0f}, and padding"
        self.at_most(f"bytes sent {when}", traffic.sent_bytes, allowed, means)

    def slack(self, engine_or_buckets) -> float:
        """Bytes of padding that a layout may need: 16 behind a parameter, 16 per rank behind a bucket."""
        buckets = getattr(engine_or_buckets, "buckets", engine_or_buckets)
        return sum(16 * (len(bucket.params) + self.world_size) for bucket in buckets)


def _then(kinds: list[str]) -> str:
    return ", then ".join(kinds) or "none"


def _silent_group():
    """A process group whose collectives move nothing and take no memory: for the bytes that an engine itself keeps."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    return dist.new_group(backend="fake")


def psi(model: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum(param.numel() * param.element_size() for param in model.parameters())


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters()}


# Step 0, with no rank needed.


def layout(sheet: Sheet) -> None:
    sizes_of = [(6,), (1,), (5, 3, 1), (4, 4), (35, 7, 45, 1, 2), (17,), (64, 8)]
    for dtype, world_size, sizes in itertools.product((torch.float32, torch.float64), (1, 2, 3, 4, 7), sizes_of):
        named = [(f"p{i}", nn.Parameter(torch.zeros(size, dtype=dtype))) for i, size in enumerate(sizes)]
        at = f"N = {world_size}, parameters of {', '.join(map(str, sizes))} elements, {str(dtype)[6:]}"
        align = 16 // dtype.itemsize
        end = sum(-(-size // align) * align for size in sizes)
        least = -(-end // (align * world_size)) * align * world_size
        for rank in range(world_size):
            bucket = sheet.student.Bucket(named, rank, world_size)
            offsets = list(bucket.offsets)
            if len(offsets) != len(sizes):
                return sheet.expect(False, f"offsets at {at}", f"{len(sizes)} of them", offsets)
            unaligned = [offset for offset in (*offsets, bucket.shard_numel) if offset % align]
            sheet.expect(
                not unaligned, f"offsets and shard_numel at {at}", f"multiples of {align} (16 bytes)", unaligned
            )
            ends = [offset + size for offset, size in zip(offsets, sizes)]
            apart = offsets[0] >= 0 and all(a <= b for a, b in zip(ends, offsets[1:]))
            sheet.expect(apart, f"offsets at {at}", "one parameter behind the other, none over another", offsets)
            sheet.expect(bucket.numel == bucket.shard_numel * world_size, f"numel at {at}",
                         f"N x shard_numel = {bucket.shard_numel * world_size}", bucket.numel)  # fmt: skip
            sheet.expect(max(ends) <= bucket.numel <= least, f"numel at {at}",
                         f"room for all, so {max(ends)} or more, and no more padding than needed, so {least} at most",
                         bucket.numel)  # fmt: skip
            sheet.expect(bucket.start == rank * bucket.shard_numel, f"start of rank {rank} at {at}",
                         rank * bucket.shard_numel, bucket.start)  # fmt: skip
            if sheet.findings:
                return


def cut(sheet: Sheet) -> None:
    for world_size, sizes in itertools.product((1, 2, 3, 5), [(6,), (1,), (5, 3, 1), (35, 7, 45, 1, 2), (64, 8)]):
        named = [(f"p{i}", nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
        at = f"N = {world_size}, parameters of {', '.join(map(str, sizes))} elements"
        found = [[] for _ in sizes]
        for rank in range(world_size):
            bucket = sheet.student.Bucket(named, rank, world_size)
            flat = torch.arange(bucket.numel)
            shard = flat[bucket.start : bucket.start + bucket.shard_numel]
            for index, part in bucket.cut(shard):
                view = part.untyped_storage()._cdata == flat.untyped_storage()._cdata
                sheet.expect(view, f"the part of p{index} on rank {rank} at {at}", "a view of the shard", "a copy")
                sheet.expect(part.numel() > 0, f"the part of p{index} on rank {rank} at {at}", "no empty parts", "one")
                found[index] += part.tolist()
        for index, expected in enumerate(bucket.views(flat)):
            what = f"places in the buffer of all ranks' parts of p{index} at {at}"
            sheet.expect(found[index] == expected.tolist(), what, expected.tolist(), found[index])
        if sheet.findings:
            return


# ZeRO-1.

SMALL = {"bucket_mb": 300 / 2**20}  # several buckets, with several parameters in some


def zero1_gradients(sheet: Sheet, kind: str, times: float) -> None:
    engine = sheet.build(sheet.odd(), **SMALL)
    plain, _ = sheet.oracle(0)
    sheet.backward(engine)
    with Traffic() as traffic:
        engine._sync_gradients()
    sheet.right_gradients(engine, gradients_of(plain))
    sheet.traffic(traffic, [kind], times, psi(plain), sheet.slack(engine), "in step 3")
    _bytes_of_gradients(sheet, kind)


def _bytes_of_gradients(sheet: Sheet, kind: str) -> None:
    with MemoryLedger() as memory:
        model = sheet.stack()
        engine = sheet.build(model, group=sheet.silent)
        batch = sheet.batch(0, vectors)
        F.mse_loss(engine(batch[0]), batch[1]).backward()
        before = memory.live
        engine._sync_gradients()
        shard = LAYERS * LAYER / sheet.world_size if kind == "reduce-scatter" else 0
        means = "Ψ/N: a shard" if shard else "none: pieces take views"
        sheet.at_most("bytes alive after step 3, more than before", memory.live - before,
                      shard + sheet.slack(engine), means)  # fmt: skip


def zero1_update(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd(), sheet.probe(_sync_params=lambda self, buckets: None), **SMALL)
    sheet.backward(engine)
    engine.step()
    plain, _ = sheet.oracle(1)
    values = dict(plain.named_parameters())
    for name, piece, part in sheet.pieces(engine):
        sheet.same(f"this rank's piece of {name} after the update", piece, values[name].detach().flatten()[part])
    owned = torch.tensor(
        [sum(p.numel() for g in engine.optimizer.param_groups for p in g["params"])], device=sheet.device
    )
    dist.all_reduce(owned)
    everything = sum(param.numel() for param in plain.parameters())
    sheet.expect(owned.item() == everything, "elements that the ranks' optimizers update, all ranks together",
                 f"{everything}, each once", owned.item())  # fmt: skip


def zero1_gather(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd(), **SMALL)
    sheet.backward(engine)
    engine._sync_gradients()
    engine.optimizer.step()
    with Traffic() as traffic:
        engine._sync_params(engine.trained)
    plain, _ = sheet.oracle(1)
    _right_weights(sheet, dict(engine.model.named_parameters()), plain)
    sheet.traffic(traffic, ["all-gather"], 1, psi(plain), sheet.slack(engine), "in step 5")
    for bucket in engine.trained:
        inside = all(p.data_ptr() == view.data_ptr() for p, view in zip(bucket.params, bucket.views(bucket.flat)))
        sheet.expect(inside, "the model's weights", "still views of bucket.flat", "tensors of their own")


def _right_weights(sheet: Sheet, found: dict, plain: nn.Module) -> None:
    for name, expected in plain.state_dict().items():
        sheet.same(f"the weight {name} on this rank", found.get(name), expected.to(sheet.device))


# ZeRO-2.


def _keep(self, bucket, param) -> None:
    """A hook that leaves gradients where they are."""
    bucket.used.add(param)


def zero2_send(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd(), sheet.probe(_on_gradient=_keep), **SMALL)
    sheet.backward(engine)
    for bucket in engine.trained:
        with Traffic() as traffic:
            reduction = sheet.student.Reduction(bucket, None)
        nbytes = bucket.numel * 8
        sheet.traffic(traffic, ["reduce-scatter"], 1, nbytes, 0, f"for a bucket of {nbytes} bytes")
        left = [name for name, param in zip(bucket.names, bucket.params) if param.grad is not None]
        sheet.expect(not left, "parameters with a .grad after sending", "none", ", ".join(left))
        if isinstance(getattr(reduction, "work", None), (dist.Work, Work)):
            reduction.work.wait()  # a buffer must not go while it is sent


def zero2_receive(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd(), sheet.probe(_on_gradient=_keep), **SMALL)
    sheet.backward(engine)
    own = {param: param.grad.clone() for bucket in engine.trained for param in bucket.params}
    plain, _ = sheet.oracle(0)
    for times in (1, 2):  # a second backward before the step adds up
        for bucket in engine.trained:
            for param in bucket.params:
                param.grad = own[param].clone()
            sheet.student.Reduction(bucket, None).finish(sheet.world_size)
        sheet.right_gradients(engine, gradients_of(plain), times)
        if sheet.findings:
            return
    for bucket in engine.trained:  # as `no_sync` leaves them: half in `kept`
        bucket.kept = {param: own[param] / 2 for param in bucket.params}
        for param in bucket.params:
            param.grad = own[param] / 2
        for _, piece in bucket.pieces:
            piece.grad = None
        sheet.student.Reduction(bucket, None).finish(sheet.world_size)
        sheet.expect(not bucket.kept, "gradients in bucket.kept afterwards", "none", len(bucket.kept))
    sheet.right_gradients(engine, gradients_of(plain))
    with MemoryLedger() as memory:
        bucket = sheet.build(sheet.stack(), sheet.probe(_on_gradient=_keep), group=sheet.silent).trained[0]
        before = memory.live
        for param in bucket.params:
            param.grad = torch.zeros_like(param)
        sheet.student.Reduction(bucket, sheet.silent).finish(sheet.world_size)
        found = memory.live - before
    means = "Ψ/N: the shard, and nothing of the whole buffer"
    sheet.at_most("bytes of gradients alive after finish", found, psi_shard(sheet, bucket), means)


def psi_shard(sheet: Sheet, bucket) -> float:
    return LAYERS * LAYER / sheet.world_size + sheet.slack([bucket])


def zero2_in_flight(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd(), sheet.probe(_on_gradient=_keep), **SMALL)
    sheet.backward(engine)
    with Traffic() as traffic:
        for bucket in engine.trained:
            engine._reduce_bucket(bucket)
        engine._finish_reduction()
    plain, _ = sheet.oracle(0)
    sheet.right_gradients(engine, gradients_of(plain))
    sizes, expected = [c.whole_bytes for c in traffic.collectives], [8 * bucket.numel for bucket in engine.trained]
    sheet.expect(sizes == expected, "bytes of the collectives", expected, sizes)


def zero2_hook(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd(), **SMALL)
    plain, _ = sheet.oracle(0)
    with Traffic() as traffic:
        sheet.backward(engine)
    sizes, expected = [c.whole_bytes for c in traffic.collectives], [8 * bucket.numel for bucket in engine.trained]
    sheet.expect(sizes == expected, "collectives inside backward, in bytes", f"{expected}: every bucket once", sizes)
    engine._sync_gradients()
    sheet.right_gradients(engine, gradients_of(plain))
    if sheet.findings:
        return
    # Gradients that finish in the opposite order must not change the order of the buckets.
    engine = sheet.build(sheet.stack(FUNNEL_BACK, backwards=True), bucket_mb=0)
    inputs, targets = sheet.batch(0, vectors, wide=FUNNEL_BACK[-2], out=FUNNEL_BACK[1])
    with Traffic() as traffic:
        F.mse_loss(engine(inputs), targets).backward()
    sizes, expected = [c.whole_bytes for c in traffic.collectives], [4 * bucket.numel for bucket in engine.trained]
    what = "collectives when the first layer's gradients come first, in bytes"
    sheet.expect(sizes == expected, what, f"{expected}: the order of self.trained", sizes)
    _gradients_in_backward(sheet)


FUNNEL_BACK = (16, 16, 16, 16)


def _gradients_in_backward(sheet: Sheet) -> None:
    batches = [sheet.batch(step, vectors) for step in range(2)]
    with MemoryLedger() as memory:
        engine = sheet.build(sheet.stack(), bucket_mb=LAYER / 2**20, group=sheet.silent)  # a bucket per layer
        F.mse_loss(engine(batches[0][0]), batches[0][1]).backward()
        engine._sync_gradients()
        engine.zero_grad()
        between = memory.live
        loss = F.mse_loss(engine(batches[1][0]), batches[1][1])
        memory.reset_peak()
        loss.backward()
        most = memory.peak - between
        engine._sync_gradients()
        after = memory.live - between
    share, noise = LAYERS * LAYER / sheet.world_size + sheet.slack(engine), _activations()
    means = f"Ψ/N + 2 buckets of {LAYER:,}, and activations"
    sheet.at_most("bytes of gradients at backward's worst moment", most, share + 2 * LAYER + noise, means)
    sheet.at_most("bytes of gradients alive after step 3", after, share + 64, "Ψ/N")


def _activations() -> int:
    return (8 + 2 * LAYERS) * 4 * 2 * WIDTH


def clip(sheet: Sheet) -> None:
    norms = []
    for max_norm, norm_type in ((0.05, 2.0), (1e3, 2.0), (0.05, float("inf")), (0.05, 1.0)):
        engine = sheet.build(sheet.odd(), **SMALL)
        sheet.backward(engine)
        engine._sync_gradients()
        with Traffic() as traffic:
            norm = engine.clip_grad_norm_(max_norm, norm_type)
        plain, _ = sheet.oracle(0)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        at = f"with max_norm {max_norm:g}, norm_type {norm_type:g}"
        norm = norm if isinstance(norm, torch.Tensor) else torch.tensor(float("nan") if norm is None else norm)
        sheet.same(f"the norm that is returned {at}", norm.to(sheet.device), expected)
        norms.append(norm)
        sheet.right_gradients(engine, gradients_of(plain))
        allowed = 64 * sheet.world_size
        sheet.at_most(f"bytes sent {at}", traffic.sent_bytes, allowed, "some numbers per rank, and no gradients")
        if sheet.findings:
            return
    # Three elements: from three ranks on, the last own nothing but padding, and one NaN is everybody's.
    for value in (1.0, float("nan")):
        engine = sheet.build(nn.Linear(3, 1, bias=False).to(sheet.device))
        engine(torch.full((1, 3), value if sheet.rank == 0 else 1.0, device=sheet.device)).sum().backward()
        norm = engine.clip_grad_norm_(1.0)
        right = norm.isnan().item() if value != value else abs(norm.item() - 3**0.5) < 1e-5
        expected = "NaN on every rank" if value != value else "1.732"
        sheet.expect(right, f"the norm of three gradients of {value:g}", expected, norm.item())


# ZeRO-3.


class _Pending:
    """A gather that is still under way: notes how large the buffer was when somebody waited for it."""

    def __init__(self, buffer: torch.Tensor):
        self.buffer, self.nbytes = buffer, None

    def wait(self):
        self.nbytes = self.buffer.untyped_storage().nbytes()


def zero3_free(sheet: Sheet) -> None:
    batch = sheet.batch(0, vectors)
    with MemoryLedger() as memory:
        engine = sheet.build(sheet.stack(), group=sheet.silent)
        unit = engine.units[0]
        bucket, before = unit.buckets[0], memory.live
        bucket.flat.untyped_storage().resize_(bucket.numel * 4)
        bucket.flat.zero_()
        unit.whole = True
        guard.open(unit.params)
        saved = F.linear(batch[0], *unit.params)  # for whose backward autograd keeps a view of the weight
        pending = _Pending(bucket.flat)
        unit.works = [pending]
        engine._reshard_unit(unit)
        left = memory.live - before - saved.untyped_storage().nbytes()
        engine._reshard_unit(unit)  # already freed: nothing to do
    sheet.at_most("bytes of whole parameters alive after freeing", left, 0,
                  "autograd holds a view of the weight, and must hold no memory with it")  # fmt: skip
    sheet.expect(unit.whole is False, "unit.whole after freeing", False, unit.whole)
    sheet.expect(pending.nbytes == 4 * bucket.numel, "a gather that was still under way",
                 "waited for, before the memory goes", "not waited for, or too late")  # fmt: skip
    guarded = all(type(param) is guard.ShardedParameter for param in unit.params)
    sheet.expect(guarded, "freed parameters", "guarded: guard.close(unit.params)", "a use of them would crash")
    sheet.expect(bucket.shard.untyped_storage().nbytes() > 0, "this rank's shard", "still there", "freed as well")


def zero3_gather(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd())
    right = dict(sheet.odd(rank=0).named_parameters())
    for unit in engine.units:
        with Traffic() as traffic:
            engine._gather_unit(unit)
            sheet.expect(unit.whole is True, "unit.whole after _gather_unit", True, unit.whole)
            engine._gather_unit(unit)  # whole already: nothing to do
            engine._wait_for_unit(unit)
        sizes, nbytes = [(c.kind, c.whole_bytes) for c in traffic.collectives], 8 * unit.buckets[0].numel
        sizes = [size for size in sizes if size[1] > 64]  # the ranks compare notes, with a number each
        sheet.expect(sizes == [("all-gather", nbytes)], "collectives of gathering a unit, twice",
                     f"one all-gather of {nbytes} bytes", sizes)  # fmt: skip
        for bucket in unit.buckets:
            for name, param, view in zip(bucket.names, bucket.params, bucket.views(bucket.flat)):
                there = bucket.flat.untyped_storage().nbytes() >= bucket.numel * 8
                sheet.expect(there, f"the buffer of {name}", f"{nbytes} bytes", bucket.flat.untyped_storage().nbytes())
                if there and type(param) is nn.Parameter:
                    sheet.same(f"the gathered weight {name}", param, right[name].detach())
                    same = param.data_ptr() == view.data_ptr()
                    sheet.expect(same, f"the weight {name}", "still a view of bucket.flat", "a tensor of its own")
        engine._reshard_unit(unit)
        if sheet.findings:
            return


class _Events(TorchDispatchMode):
    """Gathers, reductions, and the matrix products of forward and backward, by layer, in the order of their issue."""

    def __init__(self, engine):
        super().__init__()
        self.events = []
        self._gathered = {unit.buckets[0].numel: number for number, unit in enumerate(engine.units)}
        self._weights = {unit.buckets[0].params[0].numel(): number for number, unit in enumerate(engine.units)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func._schema.name, func(*args, **(kwargs or {}))
        if name == "c10d::_allgather_base_" and args[0].is_floating_point():  # not what the ranks compare
            self.events.append(f"gather {self._gathered.get(args[0].numel(), '?')}")
        elif name == "c10d::_reduce_scatter_base_":
            self.events.append(f"reduce {self._gathered.get(args[1].numel(), '?')}")
        elif name.startswith("c10d::all") and name != "c10d::_allgather_base_":
            self.events.append(name.removeprefix("c10d::"))
        elif name == "aten::addmm" and args[2].numel() in self._weights:
            self.events.append(f"forward {self._weights[args[2].numel()]}")
        elif name == "aten::mm" and result.numel() in self._weights:
            self.events.append(f"backward {self._weights[result.numel()]}")
        return result


def _expected_events(prefetch: int, backward: bool, reduce: bool) -> list[str]:
    count, events = len(FUNNEL) - 1, []

    def gather(indices):
        for index in indices:
            if 0 <= index < count and index not in gathered:
                gathered.add(index)
                events.append(f"gather {index}")

    gathered = set()
    gather(range(prefetch))
    for index in range(count):
        gather(range(index, index + prefetch + 1))
        events.append(f"forward {index}")
    gathered = set()
    for index in reversed(range(count)) if backward else ():
        gather(range(index, index - prefetch - 1, -1))
        events.append(f"backward {index}")
        events += [f"reduce {index}"] * reduce
    return events


def _order_of_events(sheet: Sheet, cls=None, backward: bool = False, reduce: bool = False) -> None:
    for prefetch in (1, 0, 2):
        engine = sheet.build(sheet.stack(FUNNEL), cls, prefetch=prefetch)
        for step in range(2):
            inputs, targets = sheet.batch(step, vectors, wide=FUNNEL[0], out=FUNNEL[-1])
            with _Events(engine) as mode, contextlib.nullcontext() if backward else torch.no_grad():
                loss = F.mse_loss(engine(inputs), targets)
                if backward:
                    loss.backward()
            expected = _expected_events(prefetch, backward, reduce)
            what = f"order of events with prefetch {prefetch}, step {step + 1}"
            if mode.events != expected:
                at = next(
                    i for i, pair in enumerate(itertools.zip_longest(mode.events, expected)) if pair[0] != pair[1]
                )
                show = [", ".join(events[max(0, at - 2) : at + 4]) or "nothing" for events in (expected, mode.events)]
                sheet.expect(False, f"{what}, from number {max(0, at - 2) + 1} on", *show)
            engine.zero_grad()
            if sheet.findings:
                return


def zero3_prefetch(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd())
    plain = sheet.odd(rank=0)
    inputs, _ = sheet.batch(0)
    with torch.no_grad():
        for _ in range(2):
            sheet.same("the model's output", engine(inputs), plain(inputs))
    _order_of_events(sheet)
    if sheet.findings:
        return
    batch = sheet.batch(0, vectors)
    for prefetch in (0, 1, 3):
        with MemoryLedger() as memory:
            engine = sheet.build(sheet.stack(), group=sheet.silent, prefetch=prefetch)
            before = memory.live
            memory.reset_peak()
            engine(batch[0])
            most, after = memory.peak - before, memory.live - before
        units, noise = 1 + prefetch, _activations() + sheet.slack(engine)
        means = f"{units} unit(s) of {LAYER:,}, and activations"
        memory_in = "bytes of whole parameters alive in forward"
        sheet.at_most(f"{memory_in}, with prefetch {prefetch}", most, units * LAYER + noise, means)
        sheet.at_most("bytes alive after forward, more than before", after, noise, "activations")


def zero3_before_backward(sheet: Sheet) -> None:
    def keep(self, unit, bucket, param):
        bucket.used.add(param)

    cls = sheet.probe(_on_gradient=keep)
    engine = sheet.build(sheet.odd(), cls)
    inputs, targets = sheet.batch(0)
    plain = sheet.odd(rank=0)
    F.cross_entropy(plain(inputs), targets).backward()
    sheet.backward(engine)
    expected = gradients_of(plain)
    for bucket in engine.trained:
        for name, param in zip(bucket.names, bucket.params):
            sheet.same(f"this rank's own gradient of {name} after backward", param.grad, expected[name])
    _order_of_events(sheet, cls, backward=True)


def zero3_gradient(sheet: Sheet) -> None:
    engine = sheet.build(sheet.odd())
    plain, _ = sheet.oracle(0)
    sheet.backward(engine)
    engine._sync_gradients()
    sheet.right_gradients(engine, gradients_of(plain))
    if sheet.findings:
        return
    _order_of_events(sheet, backward=True, reduce=True)
    batches = [sheet.batch(step, vectors) for step in range(2)]
    for prefetch in (0, 1):
        with MemoryLedger() as memory:
            engine = sheet.build(sheet.stack(), group=sheet.silent, prefetch=prefetch)
            F.mse_loss(engine(batches[0][0]), batches[0][1]).backward()
            engine._sync_gradients()
            engine.zero_grad()
            between = memory.live
            loss = F.mse_loss(engine(batches[1][0]), batches[1][1])
            memory.reset_peak()
            loss.backward()
            most = memory.peak - between
            engine._sync_gradients()
            after = memory.live - between
        share, noise = LAYERS * LAYER / sheet.world_size, _activations() + sheet.slack(engine)
        means = f"Ψ/N, {1 + prefetch} unit(s)' parameters and 2 units' gradients of {LAYER:,} each, and activations"
        sheet.at_most(f"bytes alive at backward's worst moment, with prefetch {prefetch}", most,
                      share + (3 + prefetch) * LAYER + noise, means)  # fmt: skip
        sheet.at_most("bytes of gradients alive after step 3", after, share + sheet.slack(engine) + 64, "Ψ/N")
        if sheet.findings:
            return
    # A unit with a frozen layer, which backward needs after the last gradient of the unit's own.
    model = sheet.odd()
    model.blocks[1].up.requires_grad_(False)
    plain = sheet.odd(rank=0)
    plain.blocks[1].up.requires_grad_(False)
    engine = sheet.build(model)
    sheet.backward(engine)
    engine._sync_gradients()
    inputs, targets = sheet.whole_batch(0)
    F.cross_entropy(plain(inputs), targets).backward()
    sheet.right_gradients(engine, gradients_of(plain))


# All together.


def training(sheet: Sheet, sequence: list[str], times: float, **options) -> None:
    steps = 6
    plain, losses = sheet.oracle(steps)
    engine = sheet.build(sheet.odd(), **options)
    for step in range(steps):
        inputs, targets = sheet.batch(step)
        with Traffic() as traffic:
            loss = engine.training_step(inputs, targets, F.cross_entropy)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        sheet.same(f"the ranks' mean loss in training step {step + 1}", mean / sheet.world_size, losses[step])
        if sheet.findings:
            return
    if sequence:
        sheet.traffic(traffic, sequence, times, psi(plain), sheet.slack(engine), "in a training step")
    else:
        slack = sheet.slack(engine)
        sheet.traffic(traffic, [k for k, _ in itertools.groupby(c.kind for c in traffic.collectives)], times,
                      psi(plain), slack, "in a training step")  # fmt: skip
    _right_weights(sheet, engine.full_state_dict(), plain)


def memory(sheet: Sheet, shares: dict[str, bool], extra: bool = False, **options) -> None:
    """What is held when the optimizer runs, by kind, and that nothing else is alive; `shares` says what is cut by N."""
    batches = [sheet.batch(step, vectors) for step in range(2)]
    held, total = {}, LAYERS * LAYER
    with MemoryLedger() as ledger:
        for tensor in itertools.chain(*batches):
            ledger.track(tensor)
        outside = ledger.live
        engine = sheet.build(sheet.stack(), group=sheet.silent, **options)
        engine.training_step(*batches[0], F.mse_loss)
        loss = F.mse_loss(engine(batches[1][0]), batches[1][1])
        loss.backward()

        def look(*_):
            held.update(held_bytes(engine), live=ledger.live - outside)

        engine.optimizer.register_step_pre_hook(look)
        engine.step()
        engine.zero_grad()
        between = ledger.live - outside
    if not held:
        return sheet.expect(False, "engine.step()", "a step of engine.optimizer", "none")
    live, slack, noise = held.pop("live"), sheet.slack(engine), 64 + loss.untyped_storage().nbytes()
    for kind, cut in shares.items():
        psis = 2 if kind == "optimizer" else 1
        more = total / sheet.world_size if kind == "gradients" and extra else 0
        allowed = psis * total / (sheet.world_size if cut else 1) + more + psis * slack
        allowed += 4 * 2 * LAYERS if kind == "optimizer" else 0  # AdamW's counters
        means = f"{'2' * (psis == 2)}Ψ{'/N' * cut}{' + Ψ/N' * bool(more)}, and padding"
        sheet.at_most(f"{kind} held in step 4", held[kind], allowed, means)
    means = "what is held, by name, and a loss"
    sheet.at_most("bytes alive in step 4", live, sum(held.values()) + noise, means)
    keeps = 0 if "gradients" not in shares or shares["gradients"] else total + slack
    allowed = held["parameters"] + held["optimizer"] + keeps + noise
    sheet.at_most("bytes alive between two steps", between, allowed,
                  "parameters, optimizer state" + ", the gradients' buffer" * bool(keeps))  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One line of the report: what it looks at (`blank`, or all steps together) and how."""

    title: str
    look: object
    blank: Blank | None = None

    @property
    def read(self) -> str:
        return self.blank.read if self.blank else "the arithmetic at the top of the file, and its class's docstring"


def checks_of(name: str) -> list[Check]:
    """The checks of an exercise, in the order of the steps."""
    cut_all = {"parameters": True, "gradients": True, "optimizer": True}
    looks = {
        "zero1": [layout, cut, partial(zero1_gradients, kind="all-reduce", times=2), zero1_update, zero1_gather],
        "zero1_2psi": [partial(zero1_gradients, kind="reduce-scatter", times=1)],
        "zero2": [zero2_send, zero2_receive, zero2_in_flight, zero2_hook, clip],
        "zero3": [zero3_free, zero3_gather, zero3_prefetch, zero3_before_backward, zero3_gradient],
    }
    together = {
        "zero1": (["all-reduce", "all-gather"], 3, cut_all | {"parameters": False, "gradients": False}),
        "zero1_2psi": (["reduce-scatter", "all-gather"], 2, cut_all | {"parameters": False, "gradients": False}),
        "zero2": (["reduce-scatter", "all-gather"], 2, cut_all | {"parameters": False}),
        "zero3": ([], 3, cut_all),
    }
    blanks = EXERCISES[name].blanks
    checks = [Check(blank.task, look, blank) for blank, look in zip(blanks, looks[name], strict=True)]
    sequence, times, shares = together[name]
    options = {} if name == "zero3" else SMALL
    train = partial(training, sequence=sequence, times=times, **options)
    held = partial(memory, shares=shares, extra=name == "zero1_2psi")
    return [
        *checks,
        Check("All steps: training like one process on all data, and what it sends", train),
        Check("All steps: what is held, and that nothing else is alive", held),
    ]

"""Run on every rank: when collectives are issued, and when they are waited for."""

import contextlib

import parts
import torch
import torch.distributed as dist
from cases_ranks_that_part import Skipping
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness.measure.memory import storage_bytes
from harness.properties.layout import padded
from harness.properties.models import PartlyFrozen

ADAMW = parts.OPTIMIZERS["adamw"]


class _Order(TorchDispatchMode):
    """Names of all-gathers and reduce-scatters (by their buffer's size) and of matrix products, as they are issued."""

    def __init__(self, layer_of_size: dict[int, int]):
        super().__init__()
        self.layer_of_size, self.events = layer_of_size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::_allgather_base_" and args[0].is_floating_point():  # not what the first step compares
            self.events.append(("gather", self.layer_of_size[args[0].numel()]))
        elif name == "c10d::_reduce_scatter_base_":
            self.events.append(("reduce", self.layer_of_size[args[1].numel()]))
        elif name == "aten::addmm":  # a Linear's forward
            self.events.append(("forward", self.layer_of_size[-args[2].shape[0] * args[2].shape[1]]))
        return func(*args, **(kwargs or {}))


class Funnel(nn.Module):
    """Linear layers of different sizes, so that a collective's size names the layer."""

    def __init__(self, widths=(3, 5, 7, 9, 11)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def prefetch_is_issued_before_the_compute(prefetch: int, device: str = "cpu") -> None:
    world_size = dist.get_world_size()
    prefetch = prefetch if world_size > 1 else 0  # a rank that is alone waits for nothing
    model = parts.seeded(Funnel, dtype=torch.float32, device=device)
    names = {}
    for index, layer in enumerate(model.layers):
        names[padded([layer.weight.numel(), layer.bias.numel()], world_size)[0]] = index
        names[-layer.weight.numel()] = index
    engine = parts.ZeRO3(model, ADAMW, prefetch=prefetch)
    for step in range(2):
        x, y = torch.randn(2, 3, device=device), torch.randn(2, 11, device=device)
        with _Order(names) as order:
            engine.training_step(x, y, F.mse_loss)
        count, expected, gathered = len(model.layers), [], set()

        def gather(index, expected=expected, gathered=gathered, count=count):
            if 0 <= index < count and index not in gathered:
                gathered.add(index)
                expected.append(("gather", index))

        for index in range(prefetch):
            gather(index)
        for index in range(count):
            for ahead in range(prefetch + 1):
                gather(index + ahead)
            expected.append(("forward", index))
        gathered.clear()
        for index in reversed(range(count)):
            for ahead in range(prefetch + 1):
                gather(index - ahead)
            expected.append(("reduce", index))  # issued in between: hidden behind the next layer's backward
        assert order.events == expected, f"step {step}: {order.events}, expected {expected}"


class _Watched:
    """A collective's work that notes when it is waited for."""

    def __init__(self, work, events: list, name: tuple):
        self.work, self.events, self.name = work, events, name

    def wait(self):
        self.events.append(("wait", *self.name))
        return self.work.wait()


class _Products(TorchDispatchMode):
    """Notes every matrix product, the work that a collective can hide behind."""

    def __init__(self, events: list):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::addmm", "aten::mm"):
            self.events.append("compute")
        return func(*args, **(kwargs or {}))


class Rooted(parts.Stack):
    """A root that computes before the first unit and after the last: units to gather meanwhile."""

    def __init__(self, layers: int, width: int, reverse: bool):
        super().__init__(layers, width, reverse)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.last(super().forward(self.first(x)))


def collectives_run_while_computing(stage: str, root: bool = False, reverse: bool = False) -> None:
    """Between issuing a collective and waiting for it the rank computes: reductions and prefetched gathers."""
    rank, layers, events, issued = dist.get_rank(), 6, [], {"gather": 0, "reduce": 0}
    options = {} if stage == "zero3" else {"bucket_mb": 4 * (16 * 16 + 16) / 2**20}
    kind = Rooted if root else parts.Stack
    engine = parts.STAGES[stage](parts.seeded(lambda: kind(layers, 16, reverse), dtype=torch.float32), ADAMW, **options)
    for _ in range(2):  # in the first forward ZeRO-3 learns the order, and the second is the first of its kind
        engine.training_step(*parts.vector_batch(0, rank, 16), F.mse_loss)
    real = {"gather": dist.all_gather_single, "reduce": dist.reduce_scatter_single}

    def watched(kind):
        def issue(*args, **kwargs):
            name = (kind, issued[kind])
            issued[kind] += 1
            events.append(("issue", *name))
            return _Watched(real[kind](*args, **kwargs), events, name)

        return issue

    dist.all_gather_single, dist.reduce_scatter_single = watched("gather"), watched("reduce")
    try:
        with _Products(events):
            engine.training_step(*parts.vector_batch(1, rank, 16), F.mse_loss)
    finally:
        dist.all_gather_single, dist.reduce_scatter_single = real["gather"], real["reduce"]

    def computed_meanwhile(kind, number) -> bool:
        start, end = events.index(("issue", kind, number)), events.index(("wait", kind, number))
        return "compute" in events[start:end]

    # the last reduction has no backward left to hide behind
    reductions = layers + root
    assert issued["reduce"] == reductions
    assert [computed_meanwhile("reduce", n) for n in range(reductions)] == [True] * (reductions - 1) + [False], events
    if stage == "zero3":
        # in forward the first gather has nothing in front of it, in backward (this model has no root) the last unit's
        expected = [False] + [True] * (layers - 1) + [False] + [True] * (layers - 1)
        if root:  # the first gather is the root's; in backward the root is still gathered, and its head hides the first
            expected = [False] + [True] * layers + [True] * layers
        assert issued["gather"] == len(expected)
        assert [computed_meanwhile("gather", n) for n in range(len(expected))] == expected, events


class _Late:
    """A collective that runs at the last moment that is allowed: inside `wait()`."""

    def __init__(self, name: str, run, pending: list):
        self.name, self.run, self.pending = name, run, pending
        pending.append(self)

    def wait(self):
        self.pending.remove(self)
        self.run()


@contextlib.contextmanager
def late_collectives():
    """A slow network: until a collective is waited for its output is NaN and its input still needed.

    Yields the list of those that nobody has waited for yet.
    """
    pending: list[_Late] = []
    real = {name: getattr(dist, name) for name in ("all_gather_single", "reduce_scatter_single", "all_reduce")}

    def late(name):
        def issue(output, *inputs, async_op=False, **options):
            if not async_op:
                return real[name](output, *inputs, **options)
            if inputs:
                kept = inputs[0].clone()
                output.fill_(torch.nan)
                inputs[0].copy_(kept)  # it may be a part of the output
            return _Late(name, lambda: real[name](output, *inputs, **options), pending)

        return issue

    for name in real:
        setattr(dist, name, late(name))
    try:
        yield pending
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def collectives_that_run_late(stage: str, model: str) -> None:
    """All as ever on a slow network, and no collective is forgotten, not even that of a unit which was gathered ahead
    and not used."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = {"partly frozen": PartlyFrozen, "skipping": lambda: Skipping((8, 9, 8, 9))}[model]

    def batch_of(step, who):
        return parts.token_batch(step, who) if model != "skipping" else parts.vector_batch(step, who, 8, torch.float64)

    loss_fn = F.mse_loss if model == "skipping" else F.cross_entropy
    plain = parts.seeded(build)
    optimizer = ADAMW([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(build), ADAMW, find_unused=model == "skipping")
    with late_collectives() as pending:
        for step in range(4):
            plain.skip = engine.model.skip = (None, 1, 3, None)[step]
            inputs, targets = parts.whole(batch_of, step, world_size)
            loss_fn(plain(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            inputs, targets = batch_of(step, rank)
            engine.training_step(inputs, targets, loss_fn)
            engine.model.skip = 2  # which is then gathered ahead for nothing
            with torch.no_grad():
                engine(inputs)
            if stage == "zero3":
                assert storage_bytes(engine.model.parameters()) == 0, "a unit that was gathered for nothing stays"
            assert not pending, f"{len(pending)} collectives were never waited for"
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)

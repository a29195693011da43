"""Run on every rank: every path by which backward reaches a unit's weights, against plain PyTorch.

Backward comes to a module by its output as a rule. Here it comes by a loss that a module keeps, by a view, by a hook,
by what the module's parent does with its weights, and so on. `PATHS` names them.
"""

import collections
import contextlib
import traceback
import warnings
from dataclasses import dataclass
from typing import ClassVar

import parts
import torch
import torch.distributed as dist
from cases_overlap import late_collectives
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.measure.memory import storage_bytes

MOMENTUM = parts.OPTIMIZERS["momentum"]


def vectors(step: int, rank: int):
    """(a leaf (4, 5) that wants a gradient, classes (4,)), another for every rank and step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.randint(3, (4,), generator=generator)


def loss_of_output(model, x, y):
    return F.cross_entropy(model(x), y)


class Body(nn.Module):
    """Units of one kind, one after the other, and a head, which belongs to the root."""

    Block: ClassVar[type]

    def __init__(self, count: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(count))
        self.head = nn.Linear(5, 3)

    def through(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.through(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        return torch.tanh(self.a(x))


class Plain(Body):
    Block = Layer


# Losses that do not pass through a unit's output.


class Routed(Body):
    """The loss of a router is kept as an attribute, as every mixture of experts does it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.router, self.inner = nn.Linear(5, 5), nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.loss = self.inner(torch.softmax(self.router(x), -1)).square().sum()
            return x + torch.tanh(self.a(x.detach()))


def with_kept_losses(model, x, y):
    return F.cross_entropy(model(x), y) + 0.1 * sum(block.loss for block in getattr(model, "model", model).blocks)


class Apart(Body):
    """What a unit returns needs no gradient at all; only the loss that it keeps does."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            self.loss = self.b(h).square().sum()
            return h.detach()


class Silent(Body):
    """The model returns nothing, and keeps its loss."""

    Block = Layer

    def forward(self, x, y):
        self.loss = F.cross_entropy(super().forward(x), y)


def kept_by_the_model(model, x, y):
    assert model(x, y) is None
    return getattr(model, "model", model).loss


class Unused(Body):
    """The loss that is used comes from inside; the model's output, and its frozen head, are not used."""

    class Block(Layer):
        def forward(self, x):
            h = super().forward(x)
            self.loss = h.square().mean()
            return h

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)


def only_kept_losses(model, x, y):
    model(x)
    return sum(block.loss for block in getattr(model, "model", model).blocks)


def two_forwards_with_kept_losses(model, x, y):
    return with_kept_losses(model, x, y) + with_kept_losses(model, x.detach() + 1, y)


def features_of_a_hook(model, x, y):
    """The loss takes what a hook of the caller's has seen, and of the model's output only a part."""
    seen = []
    blocks = getattr(model, "model", model).blocks
    hooks = [block.register_forward_hook(lambda module, args, out: seen.append(out)) for block in blocks]
    out = model(x)
    for hook in hooks:
        hook.remove()
    return F.cross_entropy(out.detach() + out[:, :1], y) + sum(feature.pow(3).sum() for feature in seen)


def features_of_the_inside(model, x, y):
    """As before, but of a layer inside each unit."""
    seen = []
    blocks = getattr(model, "model", model).blocks
    hooks = [block.a.register_forward_hook(lambda module, args, out: seen.append(out)) for block in blocks]
    out = model(x)
    for hook in hooks:
        hook.remove()
    return F.cross_entropy(out, y) + sum(feature.pow(3).sum() for feature in seen)


# Outputs that are changed, hidden, or of odd forms.


class Inplace(nn.Module):
    """An `nn.Linear` on three dimensions returns a view, which the model changes in place: its hooks are dropped."""

    def __init__(self, count: int):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(count))
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.relu(layer(x))
        return self.head(x.mean(1))


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Output(dict):
    """As the libraries of language models return it."""


Pair = collections.namedtuple("Pair", "first second")

WRAPPED = {
    "set": lambda h: {h},
    "slots": Slots,
    "closure": lambda h: lambda: h,
    "generator": lambda h: (part for part in (h[:, :2], h[:, 2:])),
    "subclass of dict": lambda h: Output(hidden=h),
    "named tuple": lambda h: Pair(h, None),
    "default dictionary": lambda h: collections.defaultdict(list, hidden=[h]),
}
HIDDEN = {"set", "slots", "closure", "generator", "subclass of dict"}  # from who looks for tensors in an output
UNWRAPPED = {
    "set": lambda out: next(iter(out)),
    "slots": lambda out: out.hidden,
    "closure": lambda out: out(),
    "generator": lambda out: torch.cat(list(out), 1),
    "subclass of dict": lambda out: out["hidden"],
    "named tuple": lambda out: out.first,
    "default dictionary": lambda out: out["hidden"][0],
}


def wrapped(form: str):
    class Wrapped(Body):
        class Block(Layer):
            def forward(self, x):
                return WRAPPED[form](super().forward(x))

        def through(self, x):
            for block in self.blocks:
                x = UNWRAPPED[form](block(x))
            return x

        def forward(self, x):
            return WRAPPED[form](super().forward(x))

    return Wrapped, lambda model, x, y: F.cross_entropy(UNWRAPPED[form](model(x)), y)


class Lazy(Body):
    """A unit returns a generator, which computes with the unit's weights when its forward is over."""

    class Block(Layer):
        def forward(self, x):
            def parts_of():
                for rows in x.chunk(2):
                    yield torch.tanh(self.a(rows))

            return parts_of()

    def through(self, x):
        for block in self.blocks:
            x = torch.cat(list(block(x)))
        return x


class OwnWeight(nn.Module):
    """Units that return a view of their own weight, and one that returns the weight itself."""

    class Block(nn.Module):
        def __init__(self, whole: bool):
            super().__init__()
            self.weight, self.whole = nn.Parameter(torch.randn(5, 5)), whole

        def forward(self):
            return self.weight if self.whole else self.weight[1:]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(False), self.Block(True), self.Block(False)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(x @ self.blocks[0]().T)  # (4, 4)
        x = torch.tanh(x @ self.blocks[1]()[:4])  # (4, 5)
        return self.head(x @ self.blocks[2]().T)


# Frozen weights, gradients of gradients, and parts without.


class LowRank(Body):
    """LoRA: a frozen weight and two small trained ones; the input is a leaf that wants a gradient."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(5, 5).requires_grad_(False)
            self.down, self.up = nn.Linear(5, 2), nn.Linear(2, 5)

        def forward(self, x):
            return torch.tanh(self.frozen(x) + self.up(self.down(x)))


class Prompted(Body):
    """A frozen body behind a prompt that is trained: soft prompts."""

    Block = Layer

    def __init__(self):
        super().__init__()
        self.blocks.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return super().forward(x + self.prompt)


def gradient_penalty(model, x, y):
    x = x.detach().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + gradient.square().sum()


def two_gradient_penalties(model, x, y):
    """The second graph is built beside the first, of which backward has need only after it."""
    return gradient_penalty(model, x, y) + gradient_penalty(model, 2 * x, y)


class Forces(Body):
    """The model itself takes a gradient by its input, as a model of molecules does for its forces."""

    Block = Layer

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.through(x).pow(2)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return self.head(energy + forces)


class ForcesOfFrozen(Forces):
    Block = LowRank.Block


def two_forwards(model, x, y):
    """Two graphs, and one backward through both at once."""
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x.detach() + 1), y)


class Partly(Body):
    """A unit in the middle runs without gradients, in one step of two with its input's gradient needed behind it."""

    Block = Layer

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def through(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            y = self.blocks[1](x)
        return self.blocks[2](x + y)


# Saved-tensor hooks of the caller's own, activation checkpointing, own functions.


def saved_on_cpu(model, x, y):
    with save_on_cpu():
        return F.cross_entropy(model(x), y)


def saved_as_copies(model, x, y):
    """A context of the caller's that makes something else of every tensor."""
    with saved_tensors_hooks(lambda tensor: (tensor.dtype, tensor.shape, tensor.flatten().tolist()), restored):
        return F.cross_entropy(model(x), y)


def restored(packed):
    dtype, shape, values = packed
    return torch.tensor(values, dtype=dtype).reshape(shape)


class SavedInside(Body):
    Block = Layer

    def through(self, x):
        for block in self.blocks:
            with save_on_cpu():
                x = block(x)
        return x


class KeptInside(Body):
    """A context around each unit hides from the engine what is saved, and changes nothing."""

    Block = Layer

    def through(self, x):
        for block in self.blocks:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                x = block(x)
        return x


class PartAgain(Body):
    """Checkpointing of a part of a unit: backward runs a layer again, and not the unit."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            x = torch.tanh(self.a(x))
            return x + checkpoint(lambda x: torch.tanh(self.b(x)), x, use_reentrant=False)


class WholeAgain(Body):
    """Checkpointing of units, of which the middle one is not: backward comes by both ways in turn."""

    Block = Layer

    def through(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x) if index == 1 else checkpoint(block, x, use_reentrant=False)
        return x


class Product(torch.autograd.Function):
    """x @ weight.T, whose backward has the weight from `save_for_backward`, or keeps the parameter itself."""

    @staticmethod
    def forward(ctx, x, weight, saved):
        ctx.save_for_backward(x, weight) if saved else ctx.save_for_backward(x)
        ctx.weight = None if saved else weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors if ctx.weight is None else (*ctx.saved_tensors, ctx.weight)
        return gradient @ weight, gradient.T @ x, None


class Own(Body):
    class Block(Layer):
        saved = True

        def forward(self, x):
            return torch.tanh(Product.apply(x, self.a.weight, self.saved) + self.a.bias)


class OwnKept(Body):
    class Block(Own.Block):
        saved = False


class Computed(Body):
    """Weights that forward computes from others: pieces of one, and a product of two."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed = nn.Parameter(torch.randn(10, 5))
            self.gain = nn.Parameter(torch.rand(5, 5))

        def forward(self, x):
            first, second = self.packed.chunk(2)
            return torch.tanh(F.linear(torch.tanh(F.linear(x, first * self.gain)), second.T))


class Tables(nn.Module):
    """Units of which backward reads no weight."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(11, 5), nn.Embedding(11, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.tables[0](tokens) + self.tables[1](10 - tokens)).mean(1))


# Units whose weights are used by others.


class Direct(Body):
    Block = Layer

    def through(self, x):
        for block in self.blocks:
            x = torch.tanh(F.linear(x, block.a.weight, block.a.bias))
        return x


class OtherMethod(Body):
    class Block(Layer):
        def run(self, x):
            return self.forward(x)

    def through(self, x):
        for block in self.blocks:
            x = block.run(x)
        return x


class Scalar(Body):
    """The parent scales by a weight of no dimensions that belongs to the unit."""

    class Block(Layer):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.7))

    def through(self, x):
        for block in self.blocks:
            x = block(x) * block.gain
        return x


class Penalty(Body):
    """The model adds a penalty on its units' weights to its output: weight decay by hand."""

    Block = Layer

    def forward(self, x):
        return super().forward(x) + 0.1 * sum(block.a.weight.square().sum() for block in self.blocks)


class Itself(Body):
    """A block that calls itself."""

    class Block(Layer):
        def forward(self, x, depth=2):
            return torch.tanh(self.a(self(x, depth - 1) if depth else x))


class Compiled(Body):
    Block = Layer

    def __init__(self, backend: str):
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in self.blocks)


class CompiledInPlace(Body):
    """`block.compile()` before the engine is built. A block is one graph: the engine's hooks are around it."""

    Block = Layer

    def __init__(self, backend: str):
        super().__init__()
        for block in self.blocks:
            block.compile(backend=backend, fullgraph=True)


class ModelCompiled(Direct):
    """`model.compile()`: hooks cut the graph of the whole model, of which one part uses a unit's weights itself."""

    def __init__(self):
        super().__init__()
        self.compile(backend="eager")

    def through(self, x):
        return self.blocks[0](super().through(x))


def compiled_later(model, x, y):
    """Blocks, and the model, that are compiled when the engine is there and has trained a step."""
    inner = getattr(model, "model", model)
    loss = loss_of_output(model, x, y)
    if inner._compiled_call_impl is None:
        for module in (*inner.blocks, inner):
            module.compile(backend="eager")
    return loss


@dataclass(frozen=True)
class Path:
    build: object
    loss: object = loss_of_output
    batch: object = vectors
    again: bool = True  # backward gathers each unit exactly once more,
    root_again: bool = False  # and the root, if nobody can see that the model's output will get a gradient
    keeps: bool = False  # a graph of backward's own may read all weights later: units stay gathered for it
    warns: bool = False  # ZeRO-3 says which unit is used from outside


PATHS = {
    "through outputs": Path(Plain),
    "losses kept beside outputs": Path(Routed, with_kept_losses),
    "losses kept, outputs without gradient": Path(Apart, with_kept_losses),
    "the model keeps its loss and returns nothing": Path(Silent, kept_by_the_model, root_again=True),
    "losses kept, the model's output unused": Path(Unused, only_kept_losses),
    "features of a hook": Path(Plain, features_of_a_hook),
    "features of a hook inside": Path(Plain, features_of_the_inside),
    "in place, 3 layers": Path(lambda: Inplace(3), batch=parts.token_batch),
    "in place, 5 layers": Path(lambda: Inplace(5), batch=parts.token_batch),
    **{f"in a {form}": Path(*wrapped(form), root_again=form in HIDDEN) for form in WRAPPED},
    "in a generator that computes later": Path(Lazy, again=False, warns=True),
    "views of own weights": Path(OwnWeight),
    "frozen weights and a leaf": Path(LowRank),
    "a frozen body and a leaf": Path(Prompted),
    "a gradient penalty": Path(Plain, gradient_penalty, again=False, keeps=True),
    "two gradient penalties": Path(Plain, two_gradient_penalties, again=False, keeps=True),
    "a gradient penalty of frozen weights": Path(LowRank, gradient_penalty, again=False, keeps=True),
    "two gradient penalties of frozen weights": Path(LowRank, two_gradient_penalties, again=False, keeps=True),
    "a gradient taken in forward": Path(Forces, again=False, keeps=True),
    "a gradient of frozen weights taken in forward": Path(ForcesOfFrozen, again=False, keeps=True),
    "two forwards": Path(Plain, two_forwards, again=False),
    "two forwards of frozen weights": Path(LowRank, two_forwards, again=False),
    "two forwards of kept losses": Path(Routed, two_forwards_with_kept_losses, again=False),
    "a part without gradients": Path(Partly, again=False),
    "saved on the CPU": Path(Plain, saved_on_cpu),
    "saved as something else": Path(Plain, saved_as_copies),
    "saved on the CPU inside": Path(SavedInside),
    "saved by a context inside": Path(KeptInside),
    "a part of a unit runs again": Path(PartAgain),
    "units run again": Path(WholeAgain),
    "a function of one's own": Path(Own),
    "a function that keeps the parameter": Path(OwnKept),
    "computed weights": Path(Computed),
    "no weight is read": Path(Tables, batch=parts.token_batch, again=False),
    "weights used directly": Path(Direct, warns=True),
    "another method than forward": Path(OtherMethod, warns=True),
    "a scalar used by the parent": Path(Scalar, again=False, warns=True),
    "a penalty on weights": Path(Penalty, warns=True, again=False),
    "a block inside itself": Path(Itself, again=False, warns=True),
    "compiled, aot_eager": Path(lambda: Compiled("aot_eager")),
    "compiled, inductor": Path(lambda: Compiled("inductor")),
    "compiled in place, aot_eager": Path(lambda: CompiledInPlace("aot_eager")),
    "compiled in place, inductor": Path(lambda: CompiledInPlace("inductor")),
    "a model compiled in place": Path(ModelCompiled, warns=True, again=False),
    "compiled in place, later": Path(Plain, compiled_later),
    "a gradient taken in a compiled forward": Path(lambda: compiled(Forces()), again=False, keeps=True),
}


def compiled(model):
    model.compile(backend="eager")
    return model


@contextlib.contextmanager
def counted_gathers():
    """Yields the shapes of all-gathers of parameters; the ranks' notes on the order of collectives are integers."""
    shapes, issue = [], dist.all_gather_single

    def counted(output, *args, **options):
        if output.is_floating_point():
            shapes.append(output.shape)
        return issue(output, *args, **options)

    dist.all_gather_single = counted
    try:
        yield shapes
    finally:
        dist.all_gather_single = issue


def unit_bytes(engine) -> int:
    return storage_bytes(param for unit in engine.units for param in unit.params)


def follow(stage: str, path: str, options: dict, late: bool = False) -> list[str]:
    """Three steps with an evaluation in between equal those of plain PyTorch. Returns the warnings of the first.

    In ZeRO-3 nothing but the root is gathered between forward and backward, and nothing at all after it.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = PATHS[path]
    plain = parts.seeded(path.build)
    optimizer = MOMENTUM([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(path.build), MOMENTUM, **options)
    frees = stage == "zero3" and options.get("reshard_after_forward", True)
    found = []
    with late_collectives() if late else contextlib.nullcontext() as pending:
        for step in range(3):
            expected = []
            for other in range(world_size):
                expected.append(path.loss(plain, *path.batch(step, other)))
                (expected[-1] / world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            with warnings.catch_warnings(record=True) as caught, counted_gathers() as gathers:
                warnings.simplefilter("always")
                loss = path.loss(engine, *path.batch(step, rank))
                if frees and not path.keeps:
                    assert unit_bytes(engine) == 0, f"{unit_bytes(engine)} bytes of units are gathered after forward"
                loss.backward()
            found += [str(warning.message) for warning in caught]
            torch.testing.assert_close(loss, expected[rank], rtol=0, atol=1e-12)
            if stage == "zero3" and not path.keeps:  # a graph that backward built may be gone through once more
                assert storage_bytes(engine.model.parameters()) == 0, "gathered parameters outlive backward"
            if frees and path.again:
                expected = 2 * sum(len(unit.buckets) for unit in engine.units)
                expected += len(engine.root.buckets) * (2 if path.root_again else 1)
                assert len(gathers) == expected, f"{len(gathers)} all-gathers and not {expected}"
            engine.step()
            if stage == "zero3":
                assert storage_bytes(engine.model.parameters()) == 0, "gathered parameters outlive the step"
            engine.zero_grad()
            if path.loss is loss_of_output:
                with torch.no_grad():
                    a, b = engine(path.batch(9, rank)[0]), plain(path.batch(9, rank)[0])
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
            if stage == "zero3":
                assert storage_bytes(engine.model.parameters()) == 0, "an evaluation leaves parameters gathered"
            assert not pending, f"{len(pending or ())} collectives were never waited for"
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    return found


def followed(**arguments) -> list[str] | str:
    """`follow`; or the traceback of what it raises on every rank, so that the ranks can go on."""
    try:
        return follow(**arguments)
    except Exception:
        return traceback.format_exc()

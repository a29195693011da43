"""Every path by which backward reaches a unit's weights: right, however late collectives run, and freed after it.

Backward comes to a module by its output as a rule. Here it comes by a loss that a module keeps, by a view, by a hook,
by what the module's parent does with its weights, and so on.
"""

import collections
import contextlib
import itertools
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.measure.ledger import storage_bytes
from harness.properties import models, parts
from harness.properties.overlap import late_collectives
from harness.properties.property import NotApplicable, expect, holds, same
from harness.properties.sheet import Recorder
from harness.properties.training import EXACT, Pair, inside, of_output


def leaves(step: int, rank: int):
    """(a leaf (4, 5) that wants a gradient, classes (4,)), another for every rank and step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.randint(3, (4,), generator=generator)


@dataclass(frozen=True)
class Path:
    """A model and a loss by which backward comes to its units, and what ZeRO-3 does then."""

    build: Callable[[], nn.Module]
    loss: Callable = of_output
    batch: Callable = leaves
    again: bool = True  # backward gathers each unit exactly once more,
    root_again: bool = False  # and the root, if nobody can see that the model's output will get a gradient
    keeps: bool = False  # a graph of backward's own may read all weights later: units stay gathered for it
    warns: bool = False  # ZeRO-3 says which unit is used from outside
    dtype: torch.dtype | None = torch.float64
    atol: float = EXACT


# A model of three units and a head, which belongs to the root. What it does, and what a unit does, is a case's own.


class Unit(nn.Module):
    """Linear layers (`a`, `b` and so on), and the forward of a case."""

    def __init__(self, run: Callable, layers: str):
        super().__init__()
        self.run = run
        for name in layers:
            self.add_module(name, nn.Linear(5, 5))

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


class Body(Unit):
    def __init__(self, run: Callable, unit: Callable | type, layers: str):
        super().__init__(run, "")
        self.blocks = nn.ModuleList(unit() if isinstance(unit, type) else Unit(unit, layers) for _ in range(3))
        self.head = nn.Linear(5, 3)


def one_layer(unit, x):
    return torch.tanh(unit.a(x))


def by(use: Callable, result: Callable = lambda out: out):
    """A model's forward that uses its units, one after the other, by `use(unit, x)`."""

    def run(model, x):
        for block in model.blocks:
            x = use(block, x)
        return result(model.head(x))

    return run


plain = by(lambda block, x: block(x))


def body(run: Callable = plain, unit: Callable | type = one_layer, layers: str = "a"):
    return partial(Body, run, unit, layers)


# Losses that do not pass through a unit's output.


def router(unit, x):
    """The loss of a router is kept as an attribute, as every mixture of experts does it."""
    unit.loss = unit.c(torch.softmax(unit.b(x), -1)).square().sum()
    return x + one_layer(unit, x.detach())


def apart(unit, x):
    """What a unit returns needs no gradient at all; only the loss that it keeps does."""
    h = one_layer(unit, x)
    unit.loss = unit.b(h).square().sum()
    return h.detach()


def with_kept_losses(model, x, y):
    return F.cross_entropy(model(x), y) + 0.1 * sum(block.loss for block in inside(model).blocks)


def silent(model, x, y):
    """The model returns nothing, and keeps its loss."""
    model.loss = F.cross_entropy(plain(model, x), y)


def kept_by_the_model(model, x, y):
    assert model(x, y) is None
    return inside(model).loss


def features_of_hooks(model, x, y):
    """The loss takes what hooks of the caller's have seen, on units or on layers in them; of the output only a part."""
    blocks, seen, hooks = inside(model).blocks, [], []
    for module in (blocks[0], *(block.a for block in blocks[1:])):
        hooks.append(module.register_forward_hook(lambda module, args, out: seen.append(out)))
    out = model(x)
    for hook in hooks:
        hook.remove()
    return F.cross_entropy(out.detach() + out[:, :1], y) + sum(each.pow(3).sum() for each in seen)


LOSSES = {
    "losses kept, outputs without gradient": Path(body(plain, apart, "ab"), with_kept_losses),
    "through outputs": Path(body()),
    "losses kept beside outputs": Path(body(plain, router, "abc"), with_kept_losses),
    "the model keeps its loss and returns nothing": Path(body(silent), kept_by_the_model, root_again=True),
    "features of hooks": Path(body(), features_of_hooks),
}

# Outputs that are changed, hidden, or of odd forms.


def a_view(unit, x):
    return unit.a(x[None])[0]


def changed_in_place(block, x):
    """The hooks that were on a view are dropped then."""
    return F.relu(block(x), inplace=True)


class Slots:
    """An object that nobody knows, and that holds itself."""

    __slots__ = ("hidden", "itself")

    def __init__(self, hidden):
        self.hidden, self.itself = hidden, self


class Output(dict):
    """As the libraries of language models return it."""


@dataclass
class Answer:
    hidden: torch.Tensor
    more: dict


Both = collections.namedtuple("Both", "first second")

# (into a form, and out of it)
FORMS = {
    "slots": (Slots, lambda out: out.hidden),
    "closure": (lambda h: lambda: h, lambda out: out()),
    "generator": (lambda h: (part for part in (h[:, :2], h[:, 2:])), lambda out: torch.cat(list(out), 1)),
    "dataclass": (lambda h: Answer(h, {}), lambda out: out.hidden),
    "subclass of dict": (lambda h: Output(hidden=h), lambda out: out["hidden"]),
    "named tuple": (lambda h: Both(h, None), lambda out: out.first),
}
SEEN = {"dataclass", "named tuple"}  # by who looks for tensors in an output


def in_a(form: str) -> Path:
    """Units, and the model, return `form`."""
    wrap, unwrap = FORMS[form]
    run = by(lambda block, x: unwrap(block(x)), wrap)
    build = body(run, lambda unit, x: wrap(one_layer(unit, x)))
    return Path(build, lambda model, x, y: F.cross_entropy(unwrap(model(x)), y), root_again=form not in SEEN)


def later(unit, x):
    """A unit returns a generator, which computes with the unit's weights when its forward is over."""
    return (torch.tanh(unit.a(rows)) for rows in x.chunk(2))


def own_weights(unit, x):
    """A unit returns its weight, and a view of it."""
    return unit.a.weight, unit.a.weight[1:], unit.a.bias


def by_own_weights(block, x):
    whole, view, bias = block(x)
    return torch.tanh(F.linear(F.linear(x, view), whole[:, 1:], bias))


OUTPUTS = {
    "in place": Path(body(by(changed_in_place), a_view)),
    **{f"in a {form}": in_a(form) for form in FORMS},
    "in a generator that computes later": Path(body(by(lambda block, x: torch.cat(list(block(x)))), later),
                                               again=False, warns=True),
    "own weights": Path(body(by(by_own_weights), own_weights)),
}  # fmt: skip

# Frozen weights, gradients of gradients, and parts without.


def gradient_penalty(model, x, y):
    x = x.detach().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + gradient.square().sum()


def forces(model, x):
    """The model itself takes a gradient by its input, as a model of molecules does for its forces."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = x
        for block in model.blocks:
            energy = block(energy)
        energy = energy.pow(2)
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return model.head(energy + gradient)


def twice(loss):
    """Two graphs, and one backward through both at once. A penalty's second is built beside the first's."""
    return lambda model, x, y: loss(model, x, y) + loss(model, x.detach() + 1, y)


def partly_without_gradients() -> nn.Module:
    """A unit in the middle is frozen, and runs without gradients."""

    def use(block, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and block.a.weight.requires_grad):
            y = block(x)
        return x + y

    model = body(by(use))()
    model.blocks[1].requires_grad_(False)
    return model


LOW_RANK = models.PartlyFrozen.Adapter  # LoRA: a frozen weight and two small trained ones in each unit
TWICE = {  # (the model's forward, the loss): a graph of backward's own
    "a gradient penalty": (plain, gradient_penalty),
    "two gradient penalties": (plain, twice(gradient_penalty)),
    "a gradient taken in forward": (forces, of_output),
}
GRADIENTS = {
    "frozen weights and a leaf": Path(body(plain, LOW_RANK)),
    **{name: Path(body(run), loss, again=False, keeps=True) for name, (run, loss) in TWICE.items()},
    **{f"{name}, frozen weights": Path(body(run, LOW_RANK), loss, again=False, keeps=True)
       for name, (run, loss) in TWICE.items()},
    "two forwards": Path(body(), twice(of_output), again=False),
    "two forwards of frozen weights": Path(body(plain, LOW_RANK), twice(of_output), again=False),
    "two forwards of kept losses": Path(body(plain, router, "abc"), twice(with_kept_losses), again=False),
    "a part without gradients": Path(partly_without_gradients, again=False),
}  # fmt: skip

# Saved-tensor hooks of the caller's own, activation checkpointing, own functions.


def as_copies():
    """A context of the caller's that keeps a copy of every tensor."""
    return saved_tensors_hooks(torch.clone, lambda tensor: tensor)


def as_it_is():
    """A context that hides from the engine what is saved, and changes nothing."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def under(context, function):
    """`function`, called under `context`."""

    def called(*arguments):
        with context():
            return function(*arguments)

    return called


def part_again(unit, x):
    """Checkpointing of a part of a unit: backward runs a layer again, and not the unit."""
    x = one_layer(unit, x)
    return x + checkpoint(lambda x: torch.tanh(unit.b(x)), x, use_reentrant=False)


def whole_again(model, x):
    """Checkpointing of units, of which the middle one is not: backward comes by both ways in turn."""
    for index, block in enumerate(model.blocks):
        x = block(x) if index == 1 else checkpoint(block, x, use_reentrant=False)
    return model.head(x)


def model_again(model, x, y):
    """Checkpointing around the engine itself, and inside it around each unit."""
    return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


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


def own_function(unit, x, saved):
    return torch.tanh(Product.apply(x, unit.a.weight, saved) + unit.a.bias)


def computed_weights(unit, x):
    """Weights that forward computes from others: a product of two, and a piece of one."""
    x = torch.tanh(F.linear(x, unit.a.weight * unit.b.weight, unit.a.bias))
    piece = unit.b.weight[1:]
    return torch.tanh(F.linear(F.linear(x, piece), piece.T, unit.b.bias))


SAVED = {
    **{f"checkpointing {where}": Path(partial(models.Checkpointed, where), batch=parts.token_batch)
       for where in ("around several", "around", "inside")},
    "checkpointing around the model": Path(partial(models.Checkpointed, "around"), model_again, parts.token_batch),
    "saved on the CPU": Path(body(), under(save_on_cpu, of_output)),
    "saved as copies": Path(body(), under(as_copies, of_output)),
    "saved on the CPU inside": Path(body(by(under(save_on_cpu, lambda block, x: block(x))))),
    "saved by a context inside": Path(body(by(under(as_it_is, lambda block, x: block(x))))),
    "a part of a unit runs again": Path(body(plain, part_again, "ab")),
    "units run again": Path(body(whole_again)),
    "a function of one's own": Path(body(plain, partial(own_function, saved=True))),
    "a function that keeps the parameter": Path(body(plain, partial(own_function, saved=False))),
    "computed weights": Path(body(plain, computed_weights, "ab")),
}  # fmt: skip

# Units whose weights are used by others.


def penalty(model, x):
    """The model adds a penalty on its units' weights to its output: weight decay by hand."""
    return plain(model, x) + 0.1 * sum(block.a.weight.square().sum() for block in model.blocks)


def itself(unit, x, depth=2):
    """A block that calls itself."""
    return torch.tanh(unit.a(unit(x, depth - 1) if depth else x))


OUTSIDE = {
    "another method than forward": Path(body(by(one_layer)), warns=True),
    "a penalty on weights": Path(body(penalty), warns=True, again=False),
    "a block inside itself": Path(body(plain, itself), again=False, warns=True),
}

# Compiled models.


def compiled_blocks(backend: str, in_place: bool = True) -> nn.Module:
    """Compiled before the engine is built. In place a block is one graph: the engine's hooks are around it."""
    if backend == "inductor" and shutil.which("g++") is None:
        raise NotApplicable("inductor needs a C++ compiler, and there is no g++")
    model = body()()
    for index, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=backend, fullgraph=True)
        else:
            model.blocks[index] = torch.compile(block, backend=backend)
    return model


def compiled(run) -> nn.Module:
    model = body(run)()
    model.compile(backend="eager")
    return model


def compiled_later(model, x, y):
    """Blocks, and the model, that are compiled when the engine is there and has trained a step."""
    loss = of_output(model, x, y)
    if inside(model)._compiled_call_impl is None:
        for module in (*inside(model).blocks, inside(model)):
            module.compile(backend="eager")
    return loss


COMPILED = {
    "compiled in place, later": Path(body(), compiled_later),
    "compiled in place, aot_eager": Path(partial(compiled_blocks, "aot_eager")),
    "compiled in place, inductor": Path(partial(compiled_blocks, "inductor")),
    "compiled, aot_eager": Path(partial(compiled_blocks, "aot_eager", False)),
    # Hooks cut the graph of the whole model, which uses its units' weights itself.
    "a model compiled in place": Path(partial(compiled, penalty), warns=True, again=False),
    "a gradient taken in a compiled forward": Path(partial(compiled, forces), again=False, keeps=True),
}

# Models that reuse, tie, freeze, mix and nest.

AWKWARD = {
    "a block twice, and tied": Path(parts.Twice, batch=parts.token_batch, again=False),
    "keyword arguments": Path(body(by(lambda block, x: block(x=x))), lambda model, x, y: model(x=x).sum()),
    "partly frozen": Path(models.PartlyFrozen, batch=parts.token_batch, again=False),
    # Float32 layers beside float64 gains: as exact as float32 is.
    "two dtypes": Path(models.TwoTypes, dtype=None, atol=1e-6),
    "tied across units": Path(models.TiedAcross, batch=parts.token_batch, again=False),
    "shared inside units": Path(models.SharedInside, batch=parts.token_batch, again=False),
    "nested containers": Path(models.Nested, again=False),
}
PATHS = LOSSES | OUTPUTS | GRADIENTS | SAVED | OUTSIDE | COMPILED | AWKWARD


def follow(engine, path: str, late: bool = False, **options) -> None:
    """Three steps with an evaluation in between equal those of plain PyTorch, late collectives or not.

    In ZeRO-3 nothing but the root is gathered between forward and backward, and nothing at all after it.
    """
    path, found, late = PATHS[path], [], late and not engine.foreign  # others may call collectives in other ways
    frees = engine.like == "zero3" and options.get("reshard_after_forward", True)

    def loss(model, x, y):
        value = path.loss(model, x, y)
        if frees and not path.keeps and model is pair.trained:
            units = [param for unit in model.units for param in unit.params]
            same("bytes of units that are gathered after forward", storage_bytes(units), 0, step=1)
        return value

    pair = Pair(engine, path.build, loss=loss, batch=path.batch, dtype=path.dtype, atol=path.atol, **options)
    with late_collectives() if late else contextlib.nullcontext([]) as pending:
        for step in range(3):
            issued = mock.patch.object(Recorder, "issued", [])
            with warnings.catch_warnings(record=True) as caught, issued as issued, Recorder():
                warnings.simplefilter("always")
                pair.keeps = path.keeps  # a graph that backward built may be gone through once more
                pair.backward(step)
                pair.keeps = False
            found += [str(warning.message) for warning in caught if "units=" in str(warning.message)]
            if frees and path.again:
                expected = 2 * sum(len(unit.buckets) for unit in pair.trained.units)
                expected += len(pair.trained.root.buckets) * (2 if path.root_again else 1)
                same("all-gathers of a step", sum(each.kind == "all-gather" for each in issued), expected, step=2)
            pair.step()
            if path.loss is of_output:
                x, _ = pair.batch(9, pair.rank)
                with torch.no_grad():
                    same("an evaluation", pair.trained(x), pair.plain(x), pair.atol, step=1)
            pair.nothing_gathered("an evaluation", 1)
            same("collectives that nobody has waited for", [work.name for work in pending], [])
    pair.same_weights()
    # Once for each unit, on one rank; but a unit that is still gathered after its own forward gives no reason.
    names = [f"'blocks.{n}'" for n in range(3)] if path.warns and engine.like == "zero3" and pair.rank == 0 else []
    named = len(found) == len(names) and all(name in text for name, text in zip(names, found))
    expect(named or not (frees or found), "warnings of units that are used from outside", names, found, step=1)


def cases_of(paths: dict[str, Path], usual: int | None = None) -> dict:
    """The `usual` first paths (None: all) in ZeRO-3, on a slow network or with `find_unused`, one path each; the first
    in all stages; further options.
    """
    elsewhere, late, unused = {"on": ("zero1", "zero2")}, {"late": True}, {"find_unused": True}
    others = [late, unused, {"reshard_after_forward": False}, {"late": True, "prefetch": 2}, {}]
    late, unused, *others = [{"on": ("zero3",), **options} for options in others]
    every = [{"path": path, **other} for path in paths for other in (elsewhere, late, unused, *others)]
    turns = zip(list(paths)[:usual], itertools.cycle((late, unused)))
    cases = [{"path": path, **options} for path, options in turns] + every[:1]
    further = tuple({**case, "at": (3,)} for case in every if case not in cases)
    return {"sizes": (2,), "further_sizes": (3,), "cases": tuple(cases), "further_cases": further}


@holds("values", **cases_of(LOSSES))
def losses_beside_the_outputs_reach_the_weights(engine, **case):
    """A loss that a unit or the model keeps, or that a hook's features make, has right gradients; all is freed then."""
    follow(engine, **case)


@holds("values", **cases_of(OUTPUTS))
def changed_and_hidden_outputs_reach_the_weights(engine, **case):
    """Outputs that are changed in place, hidden in an object, or own weights: right gradients, and all is freed."""
    follow(engine, **case)


@holds("values", **cases_of(GRADIENTS))
def gradients_of_gradients_reach_the_weights(engine, **case):
    """Frozen weights, gradients of gradients, parts without, and several forwards train as in plain PyTorch."""
    follow(engine, **case)


@holds("values", **cases_of(SAVED))
def tensors_saved_in_other_ways_reach_backward(engine, **case):
    """Saved-tensor hooks, recomputation and autograd functions of the caller's own train as in plain PyTorch."""
    follow(engine, **case)


@holds("values", **cases_of(OUTSIDE))
def weights_may_be_used_from_outside_their_unit(engine, **case):
    """A parent that uses a unit's weights itself trains right, and one rank warns, once for each unit."""
    follow(engine, **case)


@holds("values", **cases_of(COMPILED, usual=2))
def compiled_models_train_alike(engine, **case):
    """Blocks and models that are compiled, in place, before the build or after it, train as they do uncompiled."""
    torch.compiler.reset()  # how often a forward may be compiled is counted over all models of a process
    follow(engine, **case)


@holds("values", **cases_of(AWKWARD))
def awkward_models_train_alike(engine, **case):
    """Models that reuse, tie, freeze, nest, or mix dtypes train as they do alone."""
    follow(engine, **case)

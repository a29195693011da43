"""Every path by which backward reaches a unit's weights: right, however late collectives run, and freed after it.

Backward comes to a module by its output as a rule. Here it comes by a loss that a module keeps, by a view, by a hook,
by what the module's parent does with its weights, and so on.
"""

import collections
import contextlib
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

import zero1
from zerolab.measure.held import storage_bytes
from zerolab.properties.fixtures import (
    EXACT,
    SGD,
    Checkpointed,
    Nested,
    Pair,
    PartlyFrozen,
    SharedInside,
    TiedAcross,
    Twice,
    model_of,
    of_output,
    seeded,
    token_batch,
    vector_batch,
)
from zerolab.properties.overlap import late_collectives
from zerolab.properties.property import STAGES, NotApplicable, ask, ask_thorough, expect, holds, only, refused, same


def leaves(step: int, rank: int):
    """(a leaf (4, 5) that wants a gradient, classes (4,)), another for every rank and step."""
    x, _ = vector_batch(step, rank, 5, torch.float64, batch=4)
    _, classes = token_batch(step, rank)
    return x.requires_grad_(), classes


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
    everywhere: bool = False  # without --thorough the other stages are asked, too,
    rare: bool = False  # or nobody is
    chapters: bool = False  # the lesson promises it
    dtype: torch.dtype | None = torch.float64
    atol: float = EXACT


# A model of three units and a head, which belongs to the root. What it does, and what a unit does, is a case's own.


class Layers(nn.Module):
    """Linear layers (`a`, `b` and so on), and the forward of a case."""

    def __init__(self, run: Callable, layers: str):
        super().__init__()
        self.run = run
        for name in layers:
            self.add_module(name, nn.Linear(5, 5))

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


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
    def build():
        model = Layers(run, "")
        model.blocks = nn.ModuleList(unit() if isinstance(unit, type) else Layers(unit, layers) for _ in range(3))
        model.head = nn.Linear(5, 3)
        return model

    return build


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
    return of_output(model, x, y) + 0.1 * sum(block.loss for block in model_of(model).blocks)


def silent(model, x, y):
    """The model returns nothing, and keeps its loss."""
    model.loss = F.cross_entropy(plain(model, x), y)


def kept_by_the_model(model, x, y):
    assert model(x, y) is None
    return model_of(model).loss


def features_of_hooks(model, x, y):
    """The loss takes what hooks of the caller's have seen, on units or on layers in them; of the output only a part."""
    (first, *others), seen = model_of(model).blocks, []
    with contextlib.ExitStack() as hooks:
        for module in (first, *(block.a for block in others)):
            hooks.enter_context(module.register_forward_hook(lambda module, args, out: seen.append(out)))
        out = model(x)
    return F.cross_entropy(out.detach() + out[:, :1], y) + sum(each.pow(3).sum() for each in seen)


LOSSES = {
    "losses kept, outputs without gradient": Path(
        body(plain, apart, "ab"), with_kept_losses, everywhere=True, chapters=True
    ),
    "through outputs": Path(body(), chapters=True),
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


def in_a(wrap: Callable, unwrap: Callable, seen: bool = False, **asked) -> Path:
    """Units, and the model, return a form; it is `seen` by who looks for tensors in an output."""
    run = by(lambda block, x: unwrap(block(x)), wrap)
    build = body(run, lambda unit, x: wrap(one_layer(unit, x)))
    return Path(build, lambda model, x, y: F.cross_entropy(unwrap(model(x)), y), root_again=not seen, **asked)


def halves(h):
    """A generator."""
    return (part for part in (h[:, :2], h[:, 2:]))


def later(unit, x):
    """A unit returns a generator, which computes with the unit's weights when its forward is over."""
    return (torch.tanh(unit.a(rows)) for rows in x.chunk(2))


def own_weights(unit, x):
    """A unit returns its weight, and a view of it."""
    return unit.a.weight, unit.a.weight[1:], unit.a.bias


def by_own_weights(block, x):
    whole, view, bias = block(x)
    return torch.tanh(F.linear(F.linear(x, view), whole[:, 1:], bias))


COMPUTED_LATER = body(by(lambda block, x: torch.cat(list(block(x)))), later)
OUTPUTS = {
    "in place": Path(body(by(changed_in_place), a_view), everywhere=True),
    "in a slots": in_a(Slots, lambda out: out.hidden),
    "in a generator": in_a(halves, lambda out: torch.cat(list(out), 1)),
    "in a dataclass": in_a(lambda h: Answer(h, {}), lambda out: out.hidden, seen=True),
    "in a subclass of dict": in_a(lambda h: Output(hidden=h), lambda out: out["hidden"]),
    "in a named tuple": in_a(lambda h: Both(h, None), lambda out: out.first, seen=True),
    "in a generator that computes later": Path(COMPUTED_LATER, again=False, warns=True),
    "own weights": Path(body(by(by_own_weights), own_weights)),
}

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


LOW_RANK = PartlyFrozen.Adapter  # LoRA: a frozen weight and two small trained ones in each unit
BUILDS = {"again": False, "keeps": True}  # a graph of backward's own
GRADIENTS = {
    "frozen weights and a leaf": Path(body(plain, LOW_RANK), everywhere=True),
    "a gradient penalty": Path(body(), gradient_penalty, **BUILDS),
    "two gradient penalties": Path(body(), twice(gradient_penalty), **BUILDS),
    "a gradient taken in forward": Path(body(forces), **BUILDS),
    "a gradient penalty, frozen weights": Path(body(plain, LOW_RANK), gradient_penalty, **BUILDS),
    "two gradient penalties, frozen weights": Path(body(plain, LOW_RANK), twice(gradient_penalty), **BUILDS),
    "a gradient taken in forward, frozen weights": Path(body(forces, LOW_RANK), **BUILDS),
    "two forwards": Path(body(), twice(of_output), again=False),
    "two forwards of frozen weights": Path(body(plain, LOW_RANK), twice(of_output), again=False),
    "two forwards of kept losses": Path(body(plain, router, "abc"), twice(with_kept_losses), again=False),
    "a part without gradients": Path(partly_without_gradients, again=False),
}

# Saved-tensor hooks of the caller's own, activation checkpointing, own functions.


def as_it_is(tensor):
    return tensor


# Contexts of the caller's: one keeps a copy of every tensor, one hides from the engine what is saved.
AS_COPIES, HIDDEN = (
    partial(saved_tensors_hooks, torch.clone, as_it_is),
    partial(saved_tensors_hooks, as_it_is, as_it_is),
)


def under(context, function):
    """`function`, called under `context`."""

    def called(*arguments):
        with context():
            return function(*arguments)

    return called


def inside_again(unit, x):
    return checkpoint(one_layer, unit, x, use_reentrant=False)


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
    """x @ weight.T, whose backward has the weight from `save_for_backward`, or what `keep` has made of it."""

    @staticmethod
    def forward(ctx, x, weight, keep):
        ctx.kept = keep and keep(weight)
        ctx.save_for_backward(x, None if keep else weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if weight is None:
            weight = ctx.kept
        return gradient @ weight, gradient.T @ x, None


def own_function(unit, x, keep=None):
    return torch.tanh(Product.apply(x, unit.a.weight, keep) + unit.a.bias)


def slices_again(unit, x):
    """The last part of a unit runs again, and is handed slices of a weight by name."""

    def attend(x, keys, values):
        return torch.tanh(x @ keys.T) @ values

    weight = unit.b.weight
    return checkpoint(attend, unit.a(x), keys=weight[:2], values=weight[2:4], use_reentrant=False) + unit.b.bias


def hook_reads(unit, x):
    """A hook on a tensor inside the unit reads a view that forward has made."""
    out, view = unit.a(x), unit.a.weight.detach()
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * view.square().mean())
    return torch.tanh(out)


def computed_weights(unit, x):
    """Weights that forward computes from others: a product of two, and a piece of one."""
    x = torch.tanh(F.linear(x, unit.a.weight * unit.b.weight, unit.a.bias))
    piece = unit.b.weight[1:]
    return torch.tanh(F.linear(F.linear(x, piece), piece.T, unit.b.bias))


SAVED = {
    "checkpointing around several": Path(partial(Checkpointed, 2), batch=token_batch, everywhere=True, chapters=True),
    "checkpointing around": Path(Checkpointed, batch=token_batch, chapters=True),
    "checkpointing inside": Path(body(plain, inside_again), chapters=True),
    "checkpointing around the model": Path(Checkpointed, model_again, token_batch),
    "saved on the CPU": Path(body(), under(save_on_cpu, of_output)),
    "saved as copies": Path(body(), under(AS_COPIES, of_output), rare=True),
    "saved by a context inside": Path(body(by(under(HIDDEN, lambda block, x: block(x))))),
    "a part of a unit runs again": Path(body(plain, part_again, "ab"), rare=True),
    "units run again": Path(body(whole_again), rare=True),
    "units run again, a gradient penalty": Path(body(whole_again), gradient_penalty, **BUILDS),
    "a function of one's own": Path(body(plain, own_function)),
    "a function that keeps the parameter": Path(body(plain, partial(own_function, keep=as_it_is))),
    "a function that keeps a plain view": Path(body(plain, partial(own_function, keep=torch.detach))),
    "slices handed to what runs again": Path(body(plain, slices_again, "ab")),
    "a hook that reads a plain view": Path(body(plain, hook_reads)),
    "computed weights": Path(body(plain, computed_weights, "ab")),
}

# Units whose weights are used by others.


def penalty(model, x):
    """The model adds a penalty on its units' weights to its output: weight decay by hand."""
    return plain(model, x) + 0.1 * sum(block.a.weight.square().sum() for block in model.blocks)


def itself(unit, x, depth=2):
    """A block that calls itself."""
    return torch.tanh(unit.a(unit(x, depth - 1) if depth else x))


OUTSIDE = {
    "another method than forward": Path(body(by(one_layer)), warns=True, everywhere=True),
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
    if model_of(model)._compiled_call_impl is None:
        for module in (*model_of(model).blocks, model_of(model)):
            module.compile(backend="eager")
    return loss


COMPILED = {
    "compiled in place, later": Path(body(), compiled_later, rare=True, everywhere=True),
    "compiled in place, aot_eager": Path(partial(compiled_blocks, "aot_eager"), rare=True),
    "compiled in place, inductor": Path(partial(compiled_blocks, "inductor"), rare=True),
    "compiled, aot_eager": Path(partial(compiled_blocks, "aot_eager", False), rare=True),
    # Hooks cut the graph of the whole model, which uses its units' weights itself.
    "a model compiled in place": Path(partial(compiled, penalty), warns=True, again=False, rare=True),
    "a gradient taken in a compiled forward": Path(partial(compiled, forces), **BUILDS, rare=True),
}

# Models that reuse, tie, freeze, mix and nest.


def two_dtypes() -> nn.Module:
    """Float32 and float64 layers, in every unit and in the root."""

    def unit(unit, x):
        return torch.tanh(unit.b(unit.a(x).double())).float()

    def run(model, x):
        return plain(model, x.float()).double() * model.gain

    model = body(run, unit, "ab")()
    for block in model.blocks:
        block.b.double()
    model.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return model


def with_tokens(build, **more) -> Path:
    return Path(build, batch=token_batch, again=False, **more)


AWKWARD = {
    "a block twice, and tied": with_tokens(Twice, everywhere=True, chapters=True),
    "keyword arguments": Path(
        body(by(lambda block, x: block(x=x))), lambda model, x, y: model(x=x).sum(), chapters=True
    ),
    "partly frozen": with_tokens(PartlyFrozen, chapters=True),
    "two dtypes": Path(two_dtypes, dtype=None, atol=1e-6),  # as exact as float32 is
    "tied across units": with_tokens(TiedAcross, chapters=True),
    "shared inside units": with_tokens(SharedInside, chapters=True),
    "nested containers": Path(Nested, again=False, chapters=True),
}
PATHS = LOSSES | OUTPUTS | GRADIENTS | SAVED | OUTSIDE | COMPILED | AWKWARD


def without_lock(gather, *args, **options):
    """An all-gather that keeps Python's lock, as torch does while it traces, may wait for who waits for the lock."""
    python = torch._C.DispatchKey.PythonDispatcher
    same("an all-gather keeps Python's lock", torch._C._dispatch_tls_is_dispatch_key_included(python), False)
    return gather(*args, **options)


def follow(engine, path: str, late: bool = False, **options) -> None:
    """Three steps with an evaluation in between equal those of plain PyTorch, late collectives or not.

    In ZeRO-3 nothing but the root is gathered between forward and backward, and nothing at all after it.
    """
    torch.compiler.reset()  # how often a forward may be compiled is counted over all models of a process
    path, found, late = PATHS[path], [], late and not engine.foreign  # others may call collectives in other ways
    frees = engine.like == "zero3" and not engine.chapter and options.get("reshard_after_forward", True)

    def loss(model, x, y):
        value = path.loss(model, x, y)
        if frees and not path.keeps and model is pair.trained:
            gathered = sum(storage_bytes(unit.params) for unit in model.units)
            same("bytes of units that are gathered after forward", gathered, 0)
        return value

    pair = Pair(engine, path.build, loss=loss, batch=path.batch, dtype=path.dtype, atol=path.atol, **options)
    with late_collectives() if late else contextlib.nullcontext([]) as pending:
        for step in range(3):
            gather = mock.patch.object(zero1, "all_gather", wraps=partial(without_lock, zero1.all_gather))
            with warnings.catch_warnings(record=True, action="always") as caught, gather as gathers:
                pair.keeps = path.keeps  # a graph that backward built may be gone through once more
                pair.backward(step)
                pair.keeps = False
            found += [str(warning.message) for warning in caught if "units=" in str(warning.message)]
            if frees and path.again:
                expected = 2 * sum(len(unit.buckets) for unit in pair.trained.units)
                expected += len(pair.trained.root.buckets) * (2 if path.root_again else 1)
                # Not those that are waited for at once: with these the ranks compare notes.
                started = [call for call in gathers.call_args_list if call.kwargs.get("async_op")]
                same("all-gathers of a step", len(started), expected)
            pair.step()
            if path.loss is of_output:
                pair.evaluate()
            pair.nothing_gathered("an evaluation")
            same("collectives that nobody has waited for", [work.name for work in pending], [])
    pair.same_weights()
    # Once for each unit, on one rank; but a unit that is still gathered after its own forward gives no reason.
    names = [f"'blocks.{n}'" for n in range(3)] if path.warns and engine.like == "zero3" and pair.rank == 0 else []
    named = len(found) == len(names) and all(name in text for name, text in zip(names, found))
    expect(named or not (frees or found), "warnings of units that are used from outside", names, found)


USUAL = ({"late": True}, {"find_unused": True})  # a slow network, or a step that may leave parameters unused
RARE = ({"reshard_after_forward": False}, {"late": True, "prefetch": 2}, {})


def asked(name: str, path: Path) -> list:
    """The cases of a path: of ZeRO-3 on two ranks in the usual ways; with --thorough of all, on three in all ways."""
    usual = ask_thorough if path.rare else only
    found = [usual("zero3", path=name, **way) for way in USUAL]
    found += [ask_thorough("zero3", 3, path=name, **way) for way in RARE]
    if path.everywhere:
        found.append(usual(("zero1", "zero2"), path=name))
    else:
        found.append(ask_thorough(("zero1", "zero2"), 3, path=name))
    if path.chapters:
        found.append(only((), chapters=STAGES, path=name))
    return found


KINDS = {  # the properties of `follow`: what they say, and the paths
    "losses_beside_the_outputs_reach_the_weights": (
        "A loss that a unit or the model keeps, or that hooks make has right gradients; all is freed then.",
        LOSSES,
    ),
    "changed_and_hidden_outputs_reach_the_weights": (
        "Outputs that are changed in place, hidden in an object, or own weights: right gradients, and all is freed.",
        OUTPUTS,
    ),
    "gradients_of_gradients_reach_the_weights": (
        "Frozen weights, gradients of gradients, parts without, and several forwards train as in plain PyTorch.",
        GRADIENTS,
    ),
    "tensors_saved_in_other_ways_reach_backward": (
        "Saved-tensor hooks, recomputation and autograd functions of the caller's own train as in plain PyTorch.",
        SAVED,
    ),
    "weights_may_be_used_from_outside_their_unit": (
        "A parent that uses a unit's weights itself trains right, and one rank warns, once for each unit.",
        OUTSIDE,
    ),
    "compiled_models_train_alike": (
        "Blocks and models that are compiled, in place, before the build or after it, train as they do uncompiled.",
        COMPILED,
    ),
    "awkward_models_train_alike": (
        "Models that reuse, tie, freeze, nest, or mix dtypes train as they do alone.",
        AWKWARD,
    ),
}
for kind, (says, paths) in KINDS.items():
    cases = []
    for name, path in paths.items():
        cases += asked(name, path)
    holds("values", *cases, name=kind, says=says)(follow)


def written_over(unit, x):
    """A sigmoid keeps its result for backward, and somebody writes into it."""
    return torch.sigmoid(unit.a(x)).add_(1)


@holds("misuse", ask(chapters=STAGES))
def what_autograd_has_saved_must_stay_as_it_was(engine):
    """A tensor that autograd has saved, and that is changed in place then, is an error in backward, as in torch."""
    trained = engine(seeded(body(plain, written_over)), SGD)
    with refused("place"):
        of_output(trained, *leaves(0, engine.rank)).backward()

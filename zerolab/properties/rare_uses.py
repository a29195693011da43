"""What few models and loops do: right as in plain PyTorch, or one sentence of the engine's own; and nothing is left."""

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from zerolab.measure.traffic import TrafficLedger
from zerolab.properties.fixtures import (
    SGD,
    VECTORS,
    Lanes,
    OddModel,
    Pair,
    model_of,
    of_output,
    of_vectors,
)
from zerolab.properties.paths import Answer, body, by, by_own_weights, leaves, own_weights
from zerolab.properties.property import (
    HERE,
    NotApplicable,
    ask,
    ask_each,
    ask_thorough,
    expect,
    holds,
    raised_at,
    same,
)


def said_by_the_engine(error: Exception) -> bool:
    """Whether somebody has written a sentence for it: it is raised by a line of the engine's, and not far below it."""
    file, line = raised_at(error)
    return file.is_relative_to(HERE.parents[1]) and line.startswith("raise")


def right_or_said(pair: Pair, act: Callable) -> None:
    """`act(pair)` does the same to both sides; or the engine says what is wrong, and after `zero_grad()` trains on."""
    try:
        act(pair)
    except Exception as error:
        if pair.engine.foreign or isinstance(error, AssertionError):
            raise
        expect(said_by_the_engine(error), "the error", "none, or a sentence of the engine's", repr(error))
        pair.trained.zero_grad()
        pair.optimizer.zero_grad()


class Calls(OddModel):
    """A forward that calls the model itself, before and after its own layers, as a generation inside forward does."""

    def __init__(self, with_graph: bool):
        super().__init__()
        self.with_graph = with_graph

    def again(self, tokens):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.with_graph):
            return self(tokens, inner=True)

    def forward(self, tokens, inner: bool = False):
        if inner:
            return super().forward(tokens)
        before = self.again(10 - tokens)
        out = super().forward(tokens) + before
        return out + self.again(out.argmax(1)[:, None])


class Chained(OddModel):
    """Its output knows the one before it, and that one its own, as a graph of one's own or a history does."""

    def forward(self, tokens):
        found = None
        for _ in range(5_000):
            found = SimpleNamespace(before=found)
        return SimpleNamespace(value=super().forward(tokens), before=found)


def of_the_last(model, tokens, targets):
    return nn.functional.cross_entropy(model(tokens).value, targets)


def in_a_dataclass(unit, x):
    weight, view, bias = own_weights(unit, x)
    return Answer(weight, {"view": view, "bias": bias})


def by_views(block, x):
    """What a unit has returned is read when its forward is over."""

    def unwrapped(x):
        answer = block(x)
        return answer.hidden, answer.more["view"], answer.more["bias"]

    return by_own_weights(unwrapped, x)


def with_a_root_weight(model, tokens, targets):
    """The loss has a weight of the root's in it, and an evaluation comes before its backward."""
    loss = of_output(model, tokens, targets) + model_of(model).head.weight.square().sum()
    with torch.no_grad():
        model(tokens)
    return loss


def drops_a_gradient(pair: Pair) -> None:
    for model, _ in pair.both:
        model.head.bias.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    pair.alike()


def trains(pair: Pair) -> None:
    pair.alike(3)
    if pair.loss is not of_the_last:  # whose output is an object
        pair.evaluate()


def transformed(transform: Callable, pair: Pair) -> None:
    """A transform of torch.func, of both models."""
    x, _ = pair.own_batch(9)
    with torch.no_grad():
        found, expected = (transform(model, x) for model, _ in reversed(pair.both))
    same("what it computes", found, expected, pair.atol)


def along(model, x):
    return torch.func.jvp(model, (x,), (x + 1,))[1]


def gradient_of_inputs(model, x):
    return torch.func.grad(lambda x: model(x).square().sum())(x)


def compiled_step(of: Callable, pair: Pair) -> None:
    """Steps of both; a part of the engine's is traced by the compiler."""
    torch.compiler.reset()
    step = of(pair.trained)
    for number in range(3):
        pair.step_of_plain(number)
        step(*pair.own_batch(number))
    pair.same_weights()


def whole_step(trained):
    return torch.compile(lambda *batch: trained.training_step(*batch, nn.functional.mse_loss), backend="eager")


def under_compiled_autograd(pair: Pair) -> None:
    if pair.engine.foreign:
        raise NotApplicable("torch's own engines have a way of their own through compiled autograd")

    from torch._dynamo import compiled_autograd  # seconds, and only here

    with compiled_autograd._enable(lambda graph: graph):
        pair.alike()


def engines_step(trained):
    step = torch.compile(trained.step, backend="eager")

    def run(*batch):
        of_vectors(trained, *batch).backward()
        step()
        trained.zero_grad()

    return run


LANES = {"build": Lanes, **VECTORS}
USES = {  # (what is done, what the pair is other than by default)
    "a forward inside forward": (trains, {"build": partial(Calls, True)}),
    "a generation inside forward": (trains, {"build": partial(Calls, False)}),
    "an output with a long history": (trains, {"build": Chained, "loss": of_the_last}),
    "a root weight in the loss": (trains, {"loss": with_a_root_weight}),
    "a hook that drops a gradient": (drops_a_gradient, {}),
    "own weights in a dataclass": (trains, {"build": body(by(by_views), in_a_dataclass), "batch": leaves}),
    "jvp": (partial(transformed, along), LANES),
    "func.grad": (partial(transformed, gradient_of_inputs), LANES),
    "compiled autograd": (under_compiled_autograd, LANES),
    "a compiled training step": (partial(compiled_step, whole_step), LANES),
    "a compiled engine.step": (partial(compiled_step, engines_step), LANES),
}


@holds("misuse", *ask_each("use", USES, more_ranks=()))
def rare_uses_are_right_or_one_sentence(engine, use):
    """What few models do trains as in plain PyTorch, or is refused in a sentence, and training goes on."""
    act, given = USES[use]
    right_or_said(Pair(engine, optimizer=SGD, **given), act)


def interrupted(pair: Pair, module: nn.Module) -> None:
    """A forward of the engine's that Ctrl-C ends inside of `module`."""
    asked = []

    def press(module, args):
        asked.append(module)
        raise KeyboardInterrupt

    with module.register_forward_pre_hook(press), contextlib.suppress(KeyboardInterrupt):
        pair.alone()
    same("how often it is interrupted", len(asked), 1)


def autograd_works() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight.exp() * weight).sum().backward()
    same("a gradient of a graph beside the engine", weight.grad, 2 * torch.ones(3).exp())


@holds("life", ask(), ask_thorough("zero3", prefetch=0), ask_thorough("zero3", reshard_after_forward=False))
def an_interruption_leaves_nothing_behind(engine, **options):
    """Ctrl-C in a forward, and then `zero_grad()`: autograd is as before, training goes on; so if the engine goes."""
    pair = Pair(engine, **options)
    pair.train(1)
    for module in (pair.model.blocks[1], pair.model.blocks[1].up, pair.model.head):
        interrupted(pair, module)
        pair.trained.zero_grad()
        autograd_works()
        pair.alike(1)
    interrupted(pair, pair.model.head)
    del pair, module
    gc.collect()
    autograd_works()


@holds("values")
def a_model_may_be_frozen_for_a_while(engine):
    """A GAN's discriminator, frozen while the generator trains: its pass computes and hands on gradients, sends none.

    Its own optimizer's state stays as it is, and it trains on afterwards.
    """
    pair = Pair(engine, **LANES)
    for step in range(3):
        pair.alike(1)
        for model, _ in pair.both:
            model.requires_grad_(False)
        gradients = []
        with TrafficLedger() as traffic:
            for model in (pair.plain, pair.trained):
                x, y = pair.own_batch(step)
                of_vectors(model, x.requires_grad_(), y).backward()
                gradients.append(x.grad)
        same("the gradient that is handed on", gradients[1], gradients[0], pair.atol)
        same("reductions", [each.kind for each in traffic.collectives if "reduce" in each.kind], [])
        for model, _ in pair.both:
            model.requires_grad_(True)
    pair.alike()

"""Hooks of the caller's own find weights and gradients, whether they were registered before the engine or after."""

import contextlib
import copy
import operator

import torch
from torch import nn

from zerolab.measure.held import storage_bytes
from zerolab.properties.fixtures import (
    EXACT,
    MOMENTUM,
    OddModel,
    Pair,
    a_step,
    hooks_on,
    in_float64,
    of_output,
    own_tokens,
    seeded,
    token_batch,
)
from zerolab.properties.overlap import late_collectives
from zerolab.properties.property import NotApplicable, ask, ask_thorough, holds, same, stages_hold

gradient_of = operator.attrgetter("grad")


@stages_hold("life", ask(), ask_thorough(late=False), ask_thorough("zero2", bucket_mb=0))
def hooks_find_weights_and_gradients(engine, late=True, **options):
    """Hooks around forwards find weights, and hooks on parameters this rank's gradients, whenever they were registered.

    C++ goes through the hooks in the order of insertion, which `OrderedDict.move_to_end` does not change.
    """
    plain, model, found = seeded(OddModel), seeded(OddModel), {}
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]

    def noting(name, where, look=torch.Tensor.detach):
        """A hook that notes a weight, or its gradient."""

        def hook(*_):
            found[name, where, look] = copy.deepcopy(look(model.get_parameter(name)))

        return hook

    def register(when, first):
        unit, root = "blocks.1.up.weight", "head.weight"
        model.blocks[1].register_forward_pre_hook(noting(unit, f"before the unit's forward, {when}"), prepend=first)
        model.blocks[1].register_forward_hook(noting(unit, f"behind the unit's forward, {when}"), prepend=not first)
        model.register_forward_pre_hook(noting(root, f"before the model's forward, {when}"))
        model.register_forward_hook(noting(root, f"behind the model's forward, {when}"))
        for name in trainable:
            model.get_parameter(name).register_post_accumulate_grad_hook(noting(name, when, gradient_of))

    register("registered before the build", first=False)
    trained = engine(model, MOMENTUM, **options)
    register("registered after the build", first=True)
    for step in range(3):
        plain.load_state_dict(trained.full_state_dict())
        plain.zero_grad()
        of_output(plain, *own_tokens(step)).backward()
        found.clear()
        with late_collectives() if late else contextlib.nullcontext():
            a_step(trained, step)
        same("hooks that ran", len(found), 2 * (4 + len(trainable)))
        for (name, where, look), value in found.items():
            atol = EXACT if look is gradient_of else 0.0  # weights are copies of the same shards
            same(f"what a hook finds of {name} ({where})", value, look(plain.get_parameter(name)), atol)
        if engine.like == "zero3":
            same("bytes that a hook keeps gathered", storage_bytes(model.parameters()), 0)


@holds("values")
def hooks_that_change_gradients_count(engine):
    """A tensor's hook that scales or masks a gradient counts, whenever it was registered."""

    def halved():
        model = OddModel().double()
        model.head.weight.register_hook(lambda gradient: gradient * 0.5)
        return model

    pair = Pair(engine, halved)
    if not pair.model.head.weight._backward_hooks:
        raise NotApplicable(f"{engine.name} puts parameters of its own into the model, without hooks")
    for model, _ in pair.both:
        model.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(min=0))
    pair.alike(3)


class PassesOn(nn.Module):
    """Units without a weight that backward reads. They hand on a leaf of the caller's, and a parameter of the root."""

    class Table(nn.Embedding):
        def forward(self, tokens, leaf, shift):
            return super().forward(tokens), leaf, shift

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([self.Table(11, 5), self.Table(11, 5)])
        self.shift, self.head = nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, tokens, leaf):
        x, shift = 0, self.shift
        for table in self.tables:
            found, leaf, shift = table(tokens, leaf, shift)
            x = x + found
        return self.head(torch.tanh(x + leaf).mean(1) + shift), leaf, self.shift


@holds("life", ask(), ask(find_unused=True))
def steps_leave_no_hooks_behind(engine, **options):
    """Steps of every kind leave as many hooks as they found; a leaf that goes through units has its gradient."""
    # The engine's, and one for each rank of the plain side.
    leaf, *twins = (torch.zeros(5, dtype=engine.dtype, requires_grad=True) for _ in range(1 + engine.size))

    def loss(model, tokens, targets, rank):
        own = leaf if model is pair.trained else twins[rank]
        out, passed, shift = model(tokens, own)
        return in_float64(out, targets) + passed.square().sum() + shift.square().sum()

    pair = Pair(engine, PassesOn, loss=loss, batch=lambda step, rank: (*token_batch(step, rank), rank), **options)
    counts = []
    for step in range(3):
        pair.backward(2 * step, quiet=True)
        pair.backward(2 * step + 1)
        pair.clip(1.0)
        pair.step()
        with torch.no_grad():
            pair.alone()
        if not engine.foreign:
            pair.trained.load_full_state_dict(pair.trained.full_state_dict())
        counts.append(hooks_on(pair.model, pair.trained.optimizer, leaf))
    same("hooks after the other steps", counts[1:], [counts[0]] * 2)  # some engines set theirs in the first
    pair.same_weights()
    same("the gradient of the leaf", leaf.grad, twins[pair.rank].grad * pair.size, pair.atol)

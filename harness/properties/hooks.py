"""Hooks of the caller's own find weights and gradients, whether they were registered before the engine or after."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.held import storage_bytes
from harness.properties.fixtures import MOMENTUM, OddModel, own_tokens, seeded, token_batch
from harness.properties.overlap import late_collectives
from harness.properties.property import NotApplicable, ask, ask_thorough, holds, same
from harness.properties.training import EXACT, Pair


@holds("life", ask(late=True), ask_thorough(late=False), of_stages=True)
def hooks_find_the_units_weights(engine, late):
    """Hooks around a unit's and the model's forward find the weights gathered, whenever they were registered."""
    model, found = seeded(OddModel), []

    def looks(kind, name):
        return lambda *_: found.append((kind, name, model.get_parameter(name).detach().clone()))

    def register(when, first):
        unit, root = "blocks.1.up.weight", "head.weight"
        model.blocks[1].register_forward_pre_hook(looks(f"before the unit's forward, {when}", unit), prepend=first)
        model.blocks[1].register_forward_hook(looks(f"behind the unit's forward, {when}", unit), prepend=not first)
        model.register_forward_pre_hook(looks(f"before the model's forward, {when}", root))
        model.register_forward_hook(looks(f"behind the model's forward, {when}", root))

    register("registered before the build", first=False)
    trained = engine(model, MOMENTUM)
    register("registered after the build", first=True)
    for step in range(3):
        right = trained.full_state_dict()
        found.clear()
        with late_collectives() if late else contextlib.nullcontext():
            trained.training_step(*own_tokens(step), F.cross_entropy)
        same("hooks that ran", len({kind for kind, _, _ in found}), 8)
        for kind, name, weight in found:
            same(f"what a hook finds ({kind})", weight, right[name])  # copies of the same shards
        if engine.like == "zero3":
            same("bytes that a hook keeps gathered", storage_bytes(model.parameters()), 0)


@holds(
    "life",
    ask(before=True),
    ask(before=False),
    ask_thorough("zero2", before=True, bucket_mb=0),
    ask_thorough("zero2", before=False, bucket_mb=0),
    of_stages=True,
)
def hooks_find_this_ranks_gradients(engine, before, **options):
    """A post-accumulate-grad hook finds this rank's gradient of every parameter, whenever it was registered.

    C++ goes through the hooks in the order of insertion, which `OrderedDict.move_to_end` does not change.
    """
    plain, model, found = seeded(OddModel), seeded(OddModel), {}

    def register():
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(
                    lambda p, name=name: found.update({name: None if p.grad is None else p.grad.clone()})
                )

    if before:
        register()
    trained = engine(model, MOMENTUM, **options)
    if not before:
        register()
    for step in range(2):
        found.clear()
        tokens, targets = own_tokens(step)
        plain.load_state_dict(trained.full_state_dict())
        plain.zero_grad()
        F.cross_entropy(plain(tokens), targets).backward()
        trained.training_step(tokens, targets, F.cross_entropy)
        expected = {name: param.grad for name, param in plain.named_parameters() if param.requires_grad}
        same("gradients that hooks find", {name: found.get(name) for name in expected}, expected, EXACT)


@holds("values")
def hooks_that_change_gradients_count(engine):
    """A tensor's hook that scales or masks a gradient counts, whenever it was registered."""

    def halved():
        model = OddModel().double()
        model.head.weight.register_hook(lambda gradient: gradient * 0.5)
        return model

    pair = Pair(engine, halved)
    if not pair.trained.model.head.weight._backward_hooks:
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
        first, leaf, shift = self.tables[0](tokens, leaf, self.shift)
        second, leaf, shift = self.tables[1](10 - tokens, leaf, shift)
        return self.head(torch.tanh(first + second + leaf).mean(1) + shift), leaf, self.shift


@holds("life")
def hooks_do_not_pile_up_on_what_passes_through(engine):
    """A leaf and a parameter that go through units have no more hooks after some steps, and the leaf its gradient."""
    # The engine's, and one for each rank of the plain side.
    leaf, *twins = (torch.zeros(5, dtype=engine.dtype, requires_grad=True) for _ in range(1 + dist.get_world_size()))

    def loss(model, tokens, targets, rank):
        own = leaf if model is pair.trained else twins[rank]
        out, passed, shift = model(tokens, own)
        return F.cross_entropy(out, targets) + passed.square().sum() + shift.square().sum()

    def hooks():
        found = [len(tensor._backward_hooks or ()) for tensor in (leaf, *pair.trained.model.parameters())]
        return [*found, len(leaf._post_accumulate_grad_hooks or ())]

    pair = Pair(engine, PassesOn, loss=loss, batch=lambda step, rank: (*token_batch(step, rank), rank))
    before = hooks()
    pair.alike(4)
    same("hooks on the leaf and on each parameter", hooks(), before)
    same("the gradient of the leaf", leaf.grad, twins[pair.rank].grad * pair.size, pair.atol)

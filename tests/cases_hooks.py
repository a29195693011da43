"""Run on every rank: hooks of the caller's own, registered before the engine and after it."""

import parts
import torch
import torch.distributed as dist
from cases_overlap import late_collectives
from torch.nn import functional as F

from harness.measure.memory import storage_bytes

MOMENTUM = parts.OPTIMIZERS["momentum"]


def hooks_that_read_weights(stage: str, late_network: bool) -> None:
    """Whenever they were registered, hooks around a unit's forward find its weights: gathered, and the right ones."""
    rank, found, expected = dist.get_rank(), [], []

    def reads(into, kind):
        return lambda module, *_: into.append((kind, module.up.weight.detach().clone()))

    def register(model, into, before):
        block = model.blocks[1]
        when = "before the engine" if before else "after"
        block.register_forward_pre_hook(reads(into, f"pre, {when}"), prepend=not before)
        block.register_forward_hook(reads(into, f"post, {when}"), prepend=before)
        model.register_forward_pre_hook(lambda module, args: into.append(("root", module.head.weight.detach().clone())))
        model.register_forward_hook(lambda module, *_: into.append(("root", module.head.weight.detach().clone())))

    model = parts.seeded(parts.OddModel)
    register(model, found, before=True)
    engine = parts.STAGES[stage](model, MOMENTUM)
    register(model, found, before=False)
    plain = parts.seeded(parts.OddModel)
    register(plain, expected, before=True)
    register(plain, expected, before=False)
    for step in range(3):
        batch = parts.token_batch(step, rank)
        plain.load_state_dict(engine.full_state_dict())
        for read in (found, expected):
            read.clear()
        plain(batch[0])
        if late_network:
            with late_collectives():
                engine.training_step(*batch, F.cross_entropy)
        else:
            engine.training_step(*batch, F.cross_entropy)
        assert len(found) == 8
        key = [kind for kind, _ in found]
        assert sorted(key) == sorted(kind for kind, _ in expected)
        for kind, weight in found:
            right = [value for other, value in expected if other == kind]
            assert torch.equal(weight, right[0]), kind
        if stage == "zero3":
            assert storage_bytes(model.parameters()) == 0, "a hook keeps its unit gathered"


def hooks_that_read_gradients(stage: str, before: bool, options: dict) -> None:
    """A post-accumulate-grad hook finds this rank's gradient of every parameter, whenever it was registered."""
    rank, found = dist.get_rank(), {}
    model = parts.seeded(parts.OddModel)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]

    def register():
        for name, param in named:
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: found.update({name: None if p.grad is None else p.grad.clone()})
            )

    if before:
        register()
    engine = parts.STAGES[stage](model, MOMENTUM, **options)
    if not before:
        register()
    plain = parts.seeded(parts.OddModel)
    for step in range(2):
        found.clear()
        batch = parts.token_batch(step, rank)
        plain.load_state_dict(engine.full_state_dict())
        plain.zero_grad()
        F.cross_entropy(plain(batch[0]), batch[1]).backward()
        engine.training_step(*batch, F.cross_entropy)
        assert found.keys() == {name for name, _ in named}
        missing = [name for name, gradient in found.items() if gradient is None]
        assert not missing, f"no gradient for the hooks of {missing}"
        for name, param in plain.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(found[name], param.grad, rtol=0, atol=1e-12)


def hooks_that_change_gradients(stage: str) -> None:
    """A tensor's hook, by which a gradient is scaled or masked, counts; whenever it was registered."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model = parts.seeded(parts.OddModel), parts.seeded(parts.OddModel)
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    engine = parts.STAGES[stage](model, MOMENTUM)
    model.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(min=0))
    plain.head.weight.register_hook(lambda gradient: gradient * 0.5)
    plain.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(min=0))
    optimizer = MOMENTUM([param for param in plain.parameters() if param.requires_grad])
    for step in range(3):
        for other in range(world_size):
            tokens, targets = parts.token_batch(step, other)
            (F.cross_entropy(plain(tokens), targets) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


class PassesOn(torch.nn.Module):
    """Units without a weight that backward reads. They hand on a leaf of the caller's, and a parameter of the root."""

    class Table(torch.nn.Embedding):
        def forward(self, tokens, leaf, shift):
            return super().forward(tokens), leaf, shift

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ModuleList([self.Table(11, 5), self.Table(11, 5)])
        self.shift = torch.nn.Parameter(torch.randn(5))
        self.head = torch.nn.Linear(5, 3)

    def forward(self, tokens, leaf):
        first, leaf, shift = self.tables[0](tokens, leaf, self.shift)
        second, leaf, shift = self.tables[1](10 - tokens, leaf, shift)
        return self.head(torch.tanh(first + second + leaf).mean(1) + shift), leaf, self.shift


def hooks_on_what_passes_through(stage: str) -> None:
    """A leaf and a parameter that go through a unit's output have no more hooks after eight steps than before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model = parts.seeded(PassesOn), parts.seeded(PassesOn)
    engine, optimizer = parts.STAGES[stage](model, MOMENTUM), MOMENTUM(plain.parameters())
    leaf = torch.zeros(5, dtype=torch.float64, requires_grad=True)

    def backward(model, step, who, leaf, scale=1):
        tokens, targets = parts.token_batch(step, who)
        out, passed, shift = model(tokens, leaf)
        ((F.cross_entropy(out, targets) + passed.square().sum() + shift.square().sum()) / scale).backward()

    def hooks():
        return [len(tensor._backward_hooks or ()) for tensor in (leaf, *model.parameters())]

    before = hooks()
    for step in range(8):
        for other in range(world_size):
            backward(plain, step, other, leaf.detach().requires_grad_(), world_size)
        optimizer.step()
        optimizer.zero_grad()
        backward(engine, step, rank, leaf)
        engine.step()
        engine.zero_grad()
    assert hooks() == before, hooks()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)

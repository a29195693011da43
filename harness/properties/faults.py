"""Faults in a step, forgotten parameters and freed weights: clear errors, and training goes on."""

import copy
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.properties import parts
from harness.properties.loops import Trip
from harness.properties.property import expect, holds, refused, same
from harness.properties.training import Pair

ADAMW = parts.ADAMW


class Forgetful(parts.OddModel):
    """A parameter that forward does not use, and one that it uses only when asked to."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 2)
        self.ask = nn.Parameter(torch.ones(3))

    def forward(self, tokens, asked=False):
        return super().forward(tokens) * (self.ask if asked else 1)


@holds("misuse", sizes=(2,), further_sizes=(1, 3))
def a_parameter_without_gradient_is_named(engine):
    """A step after a backward that did not reach all parameters names those, and no others."""
    trained = engine(parts.seeded(Forgetful), ADAMW)
    tokens, targets = parts.token_batch(0, dist.get_rank())
    F.cross_entropy(trained(tokens, asked=True), targets).backward()
    said = refused(trained.step, "spare.weight", "spare.bias", "requires_grad_(False)", error=RuntimeError, step=3)
    expect("head" not in said and "'ask'" not in said, "the parameters that are named", "the two that lack one", said)
    trained.zero_grad()
    F.cross_entropy(trained(tokens), targets).backward()
    refused(trained.step, "'ask'", error=RuntimeError, step=3)
    trained.zero_grad()
    refused(trained.step, "no backward() was called", error=RuntimeError, step=3)


@holds("life", sizes=(2,), further_sizes=(1, 3),
       cases=({"options": {}}, {"options": {"bucket_mb": 0}, "on": ("zero2",)}),
       further_cases=({"options": {"find_unused": True}},))  # fmt: skip
def faults_reach_the_caller_and_training_goes_on(engine, options):
    """An exception in forward, loss or backward reaches the caller as it is; after `zero_grad` training goes on."""
    pair, now = Pair(engine, parts.OddModel, ADAMW, **options), {"where": None}
    trained, model = pair.trained, pair.trained.model

    def trip(module, args):
        if now["where"] == "forward":
            raise ZeroDivisionError("tripped in forward")
        return (Trip.apply(args[0]),) if now["where"] == "backward" else None

    model.blocks[1].register_forward_pre_hook(trip)

    def loss_fn(outputs, targets):
        if now["where"] == "loss":
            raise ZeroDivisionError("tripped in loss")
        return F.cross_entropy(outputs, targets)

    for step, now["where"] in enumerate((None, "forward", "loss", "backward", None, "forward")):
        if where := now["where"]:
            batch = parts.token_batch(step, pair.rank)
            refused(lambda batch=batch: trained.training_step(*batch, loss_fn), f"tripped in {where}",
                    error=ZeroDivisionError, step=2)  # fmt: skip
            if engine.like == "zero3" and where == "forward":
                pair.nothing_gathered("a fault in forward", 1)
                refused(lambda: model.blocks[0](torch.ones(2, 5).double()), "sharded", error=RuntimeError, step=1)
            if where == "backward":  # before that nothing was accumulated: the next step works as it is
                trained.zero_grad()
            now["where"] = None
        pair.backward(step)
        pair.step()
    pair.same_weights()


@holds("misuse", engines=("zero3",), sizes=(2,), further_sizes=(1,))
def looking_at_freed_weights_is_an_error_and_no_crash(engine):
    """Every way to look at or use a freed weight says so and names the way out; what needs no values still answers."""
    engine.needs("zero3")
    trained = engine(parts.seeded(parts.OddModel), ADAMW)
    model, x = trained.model, torch.ones(2, 5, dtype=torch.float64)
    weight, whole = model.blocks[0].up.weight, parts.seeded(parts.OddModel).blocks[0].up.weight
    for moment in range(2):  # right after construction, and after a step
        for action in (
            lambda: model.state_dict(),
            lambda: copy.deepcopy(model),
            lambda: repr(weight),
            lambda: model.head(x),
            lambda: model.blocks[0](x),
            lambda: model.blocks[1].up(x),
            lambda: weight.sum(),
            lambda: weight.clone(),
            lambda: weight.detach(),
            lambda: weight.data.sum(),
            lambda: weight.numpy(),
            lambda: weight.tolist(),
            lambda: weight.cpu(),
            lambda: weight[0],
            lambda: weight.copy_(torch.ones_like(weight)),
            lambda: torch.stack([torch.ones(7, 5, dtype=torch.float64), weight]),
            lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
            lambda: torch.save(model, io.BytesIO()),
            lambda: model.to(torch.float32),
        ):
            refused(action, "sharded", "full_state_dict", error=RuntimeError, step=1)
        for ask in (
            len,
            lambda p: p.type(),
            lambda p: p.is_shared(),
            lambda p: p.is_inference(),
            lambda p: p.data.shape,
            lambda p: p.data.dtype,
            lambda p: torch.empty_like(p).shape,
            lambda p: torch.empty_like(p, dtype=torch.int8).dtype,
            lambda p: (p.size(), p.size(0), p.stride(), p.dim(), p.numel(), p.element_size(), p.is_contiguous()),
            lambda p: (p.shape, p.dtype, p.device, p.layout, p.ndim, p.requires_grad, p.is_leaf, p.grad, p.grad_fn),
            lambda p: isinstance(p, nn.Parameter),
        ):
            same("what a freed weight answers", ask(weight), ask(whole), step=1)
        assert isinstance(weight._version, int) and isinstance(weight.data_ptr(), int)
        same("the bytes under a freed weight", weight.untyped_storage().nbytes(), 0, step=1)
        assert len(list(model.parameters())) == len(list(model.named_parameters())) and "OddBlock" in repr(model)
        trained.training_step(*parts.token_batch(moment, dist.get_rank()), F.cross_entropy)
    parts.OddModel().double().load_state_dict(trained.full_state_dict())


@holds("bytes", engines=("zero3",), sizes=(2,), further_sizes=(1, 3))
def freeing_gives_the_storage_back(engine):
    """While a unit is freed, the bytes under its weights are gone, under the views that autograd has saved as well."""
    engine.needs("zero3")
    trained, seen = engine(parts.seeded(parts.OddModel), ADAMW), {}

    def storage(param):
        with torch._C.DisableTorchFunctionSubclass():
            return param.untyped_storage().nbytes()

    def held_by_all() -> int:
        return sum(map(storage, trained.model.parameters()))

    weights = [block.up.weight for block in trained.model.blocks]
    trained.model.blocks[1].register_forward_pre_hook(lambda m, i: seen.update(inside=[storage(w) for w in weights]))
    tokens, targets = parts.token_batch(0, dist.get_rank())
    loss = F.cross_entropy(trained(tokens), targets)
    # The unit at work, and the next, which is gathered ahead; a rank that is alone gathers nothing ahead.
    alone = dist.get_world_size() == 1
    same("units with memory while the second runs", [n > 0 for n in seen["inside"]], [False, True, not alone], step=1)
    same("bytes of the units after forward", [storage(weight) for weight in weights], [0, 0, 0], step=1)
    assert storage(trained.model.head.weight) > 0, "the root stays for backward"
    loss.backward()
    same("bytes of all parameters after backward", held_by_all(), 0, step=2)
    with torch.no_grad():  # a forward without backward leaves nothing behind
        trained(tokens)
    same("bytes of all parameters after an evaluation", held_by_all(), 0, step=1)


class Nested(nn.Module):
    """Containers in containers, a shared block, a bare parameter beside them: all must be managed by somebody."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(4, 4)
        self.towers = nn.ModuleList(
            [nn.ModuleList([nn.Linear(4, 4), shared]), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.ReLU()]
        )
        self.by_name = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.tail = nn.Sequential(shared, nn.Linear(4, 3))
        self.loose = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, x):
        for module in (*self.towers[0], self.towers[1], self.towers[2], self.by_name["a"], self.tail):
            x = module(x * self.loose[0])
        return x


@holds("values", sizes=(2,), further_sizes=(3,))
def nested_containers_are_managed_whole(engine):
    """Every parameter of nested containers has one owner; a block in two containers is one unit, which runs twice."""
    pair = Pair(engine, Nested, ADAMW, loss=lambda model, x, y: F.mse_loss(model(x), y[:, :3]),
                batch=lambda step, who: parts.vector_batch(step, who, 4, torch.float64))  # fmt: skip
    managed = [id(param) for bucket in pair.trained.buckets for param in bucket.params]
    same(
        "how often each parameter is managed", sorted(managed), sorted(map(id, pair.trained.model.parameters())), step=0
    )
    if engine.like == "zero3":
        names = [unit.name for unit in pair.trained.units]
        same("the units", names, ["towers.0.0", "towers.0.1", "towers.1", "tail.1"], step=0)
    pair.train(4)
    pair.same_weights()

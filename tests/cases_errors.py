"""Run on every rank: what is wrong is said on every rank, and nothing hangs or crashes."""

import copy
import io

import parts
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.memory import storage_bytes

ADAMW = parts.OPTIMIZERS["adamw"]


def message(action, *kinds) -> str:
    kinds = kinds or (Exception,)
    try:
        action()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def bad_models_and_options(stage: str) -> list[str]:
    """The messages of constructions that cannot work; each on every rank, and a good one works afterwards."""
    engine = parts.STAGES[stage]

    def model():
        return parts.seeded(parts.OddModel)

    frozen = model().requires_grad_(False)
    meta = nn.Linear(3, 3, device="meta")
    found = [
        message(lambda: engine(frozen, ADAMW)),
        message(lambda: engine(meta, ADAMW)),
        message(lambda: engine(model(), lambda shards: "an optimizer")),
        message(lambda: engine(model(), lambda shards: torch.optim.AdamW(model().parameters()))),
        message(lambda: engine("a model", ADAMW)),
        message(lambda: engine(nn.LazyLinear(3), ADAMW)),
    ]
    if stage == "zero3":
        whole, other = model(), model()
        found += [
            message(lambda: engine(whole, ADAMW, units=[other.blocks[0]])),
            message(lambda: engine(whole, ADAMW, units=[whole.blocks[0], whole.blocks[0].up])),
            message(lambda: engine(whole, ADAMW, units=[whole.blocks[0], whole.blocks[0]])),
            message(lambda: engine(whole, ADAMW, units=["blocks.0"])),
            message(lambda: engine(whole, ADAMW, units=[whole.blocks])),
            message(lambda: engine(whole, ADAMW, units=3)),
            message(lambda: engine(whole, ADAMW, prefetch=-1)),
        ]
    else:
        found += [message(lambda: engine(model(), ADAMW, bucket_mb=-1))]
        found += [message(lambda: engine(model(), ADAMW, bucket_mb="25"))]
    used = model()
    first = engine(used, ADAMW)
    first.training_step(*parts.token_batch(0, dist.get_rank()), F.cross_entropy)
    found.append(message(lambda: engine(used, ADAMW)))
    found.append(message(lambda: engine(model(), torch.optim.SGD(model().parameters()))))
    found.append(message(lambda: engine(model(), ADAMW, group=[0, 1])))
    found.append(message(lambda: engine(model(), torch.optim.Adafactor)))
    found.append(message(lambda: engine(nn.parallel.DistributedDataParallel(model()), ADAMW)))
    found.append(message(lambda: engine(nn.Sequential(nn.Embedding(3, 3, sparse=True)), ADAMW)))
    found.append(message(lambda: engine(model(), ADAMW, param_dtype=torch.int8)))
    found.append(message(lambda: engine(model(), ADAMW, reduce_dtype="bf16")))
    found.append(message(lambda: engine(model(), ADAMW, find_unused="yes")))
    return found


def wrong_on_one_rank(stage: str) -> list[str]:
    """A model that is bad on rank 1 only, or another one there: an error on all, at once."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage]
    model = parts.seeded(parts.OddModel)
    bad = model.requires_grad_(False) if rank == 1 else model
    first = message(lambda: engine(bad, ADAMW))
    second = message(lambda: engine(parts.seeded(lambda: parts.OddModel(blocks=2 + rank)), ADAMW))
    low = {0: torch.bfloat16}.get(rank)
    third = message(lambda: engine(parts.seeded(parts.OddModel), ADAMW, param_dtype=low))
    return [first, second, third]


def other_options_on_one_rank(stage: str) -> int:
    """Whatever makes the last rank's collectives other than the others' is found out before the first. How many did."""
    engine, last = parts.STAGES[stage], dist.get_rank() == dist.get_world_size() - 1

    def build(change):
        model = parts.seeded(parts.OddModel)
        options = (change(model) or {}) if last else {}
        engine(model, ADAMW, **options)

    changes = [
        lambda model: {"find_unused": True},
        lambda model: {"reduce_dtype": torch.float32},
        lambda model: setattr(model.head.bias, "requires_grad", False),
        lambda model: setattr(model.head.bias, "data", model.head.bias.data.float()),
        lambda model: model.register_buffer("more", torch.zeros(2)),
        lambda model: setattr(model, "shift", torch.zeros(1, 5)),
    ]
    if stage == "zero3":
        changes += [lambda model: {"units": []}, lambda model: {"prefetch": 2}]
        changes += [lambda model: {"reshard_after_forward": False}, lambda model: {"units": [model.blocks[1]]}]
    else:
        changes += [lambda model: {"bucket_mb": 0}]
    for change in changes:
        assert "another model" in message(lambda change=change: build(change), ValueError)
    return len(changes)


class Forgetful(parts.OddModel):
    """A parameter that forward does not use, and one that it uses only when asked to."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 2)
        self.ask = nn.Parameter(torch.ones(3))

    def forward(self, tokens, asked=False):
        return super().forward(tokens) * (self.ask if asked else 1)


def no_gradient(stage: str) -> str:
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(Forgetful), ADAMW)
    tokens, targets = parts.token_batch(0, rank)
    F.cross_entropy(engine(tokens, asked=True), targets).backward()
    found = message(engine.step, RuntimeError)
    engine.zero_grad()
    assert "spare.weight" in found and "spare.bias" in found and "head" not in found and "'ask'" not in found
    F.cross_entropy(engine(tokens), targets).backward()
    assert "'ask'" in message(engine.step, RuntimeError)
    engine.zero_grad()
    # without a backward at all
    assert "no backward() was called" in message(engine.step, RuntimeError)
    return found


def faults_in_a_step(stage: str, options: dict) -> None:
    """An exception in forward, loss or backward reaches the caller as it is; after zero_grad() training goes on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    class Trip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("tripped in backward")

    _, expected = parts.oracle(parts.seeded(parts.OddModel), ADAMW, F.cross_entropy, parts.token_batch, 10, world_size)
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), ADAMW, **options)
    where = {"now": None}

    def trip(module, args):
        if where["now"] == "forward":
            raise ZeroDivisionError("tripped in forward")
        return (Trip.apply(args[0]),) if where["now"] == "backward" else None

    engine.model.blocks[1].register_forward_pre_hook(trip)

    def loss_fn(outputs, targets):
        if where["now"] == "loss":
            raise ZeroDivisionError("tripped in loss")
        return F.cross_entropy(outputs, targets)

    for step in range(10):
        batch = parts.token_batch(step, rank)
        where["now"] = (None, "forward", "loss", "backward", None)[step % 5]
        if where["now"]:
            found = message(lambda batch=batch: engine.training_step(*batch, loss_fn), ZeroDivisionError)
            assert found == f"ZeroDivisionError: tripped in {where['now']}"
            if stage == "zero3" and where["now"] == "forward":
                assert storage_bytes(engine.model.parameters()) == 0, "gathered parameters outlive a fault in forward"
                assert "sharded" in message(lambda: engine.model.blocks[0](torch.ones(2, 5).double()), RuntimeError)
            if where["now"] == "backward":  # before that nothing was accumulated: the next step works as it is
                engine.zero_grad()
            where["now"] = None
        engine.training_step(*batch, loss_fn)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


def looking_at_freed_weights() -> list[str]:
    """Every way to look at or use a freed weight says so; none kills the process, and training goes on after."""
    rank = dist.get_rank()
    engine = parts.ZeRO3(parts.seeded(parts.OddModel), ADAMW)
    model = engine.model
    x = torch.ones(2, 5, dtype=torch.float64)
    weight = model.blocks[0].up.weight
    found = []
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
            found.append(message(action, RuntimeError))
            assert "sharded" in found[-1] and "full_state_dict" in found[-1], found[-1]
        # what needs no values still answers
        assert weight.shape == (7, 5) and weight.numel() == 35 and weight.requires_grad and weight.grad is None
        assert len(list(model.parameters())) == len(list(model.named_parameters())) and "OddBlock" in repr(model)
        engine.training_step(*parts.token_batch(moment, rank), F.cross_entropy)
    state = engine.full_state_dict()
    plain = parts.OddModel().double()
    plain.load_state_dict(state)
    return found


def the_storage_is_what_is_freed() -> None:
    """While freed, the bytes under a weight are gone, the views that autograd saved included."""
    engine = parts.ZeRO3(parts.seeded(parts.OddModel), ADAMW)
    seen = {}

    def storage(param):
        with torch._C.DisableTorchFunctionSubclass():
            return param.untyped_storage().nbytes()

    weights = [block.up.weight for block in engine.model.blocks]
    engine.model.blocks[1].register_forward_pre_hook(lambda m, i: seen.update(inside=[storage(w) for w in weights]))
    tokens, targets = parts.token_batch(0, dist.get_rank())
    loss = F.cross_entropy(engine(tokens), targets)
    after = [storage(w) for w in weights]
    past, present, prefetched = seen["inside"]
    assert past == 0 and present > 0 and (prefetched > 0) == (dist.get_world_size() > 1)  # alone there is none
    assert after == [0, 0, 0]
    assert storage(engine.model.head.weight) > 0  # the root stays for backward
    loss.backward()
    assert [storage(p) for p in engine.model.parameters()] == [0] * len(list(engine.model.parameters()))
    # a forward without backward leaves nothing behind
    with torch.no_grad():
        engine(tokens)
    assert [storage(p) for p in engine.model.parameters()] == [0] * len(list(engine.model.parameters()))


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


def nested_containers() -> list[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(10 * step + who)
        return torch.randn(2, 4, generator=generator, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)

    class Tail(Nested):
        def __init__(self):
            super().__init__()
            # a tail that takes what the loose parameter scales
            self.tail = nn.Sequential(self.towers[0][1], nn.Linear(4, 3))

    _, expected = parts.oracle(parts.seeded(Tail), ADAMW, F.mse_loss, batch_of, 10, world_size)
    engine = parts.ZeRO3(parts.seeded(Tail), ADAMW)
    managed = [id(param) for bucket in engine.buckets for param in bucket.params]
    assert sorted(managed) == sorted(id(param) for param in engine.model.parameters())
    for step in range(10):
        engine.training_step(*batch_of(step, rank), F.mse_loss)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
    return [unit.name for unit in engine.units]

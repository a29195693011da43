"""What cannot be built is refused: in words, on every rank, before a collective could hang; the model stays whole."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.properties import fixtures
from harness.properties.property import ask, expect, holds, refused, same
from harness.properties.training import Pair
from harness.properties.values import groups_of

ADAMW = fixtures.ADAMW


def odd():
    return fixtures.seeded(fixtures.OddModel)


def with_graph():
    model = odd()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def raising(error_at: int):
    """An optimizer class that cannot be built the `error_at`-th time: 2 is when the model is cut already."""
    calls = []

    def optimizer_cls(params):
        calls.append(1)
        if len(calls) >= error_at:
            raise ZeroDivisionError("of the caller's own")
        return ADAMW(params)

    return optimizer_cls


# What cannot work, as a function of the engine and of a model, and words of the error: ours, torch's or Python's.
CONSTRUCTIONS = (
    (lambda e, m: e(m.requires_grad_(False), ADAMW), ("no trainable parameter", "requires_grad")),
    (lambda e, m: e(nn.Linear(3, 3, device="meta"), ADAMW), ("'weight'", "meta")),
    (lambda e, m: e(m, lambda shards: torch.optim.AdamW(odd().parameters())), ("not this rank's pieces",)),
    (lambda e, m: e("a model", ADAMW), ("str",)),
    (lambda e, m: e(nn.LazyLinear(3), ADAMW), ("uninitialized",)),
    (lambda e, m: e(m, torch.optim.SGD(odd().parameters())), ("SGD",)),
    (lambda e, m: e(m, ADAMW, group=[0, 1]), ("mesh.get_group", "list")),
    (lambda e, m: e(m, torch.optim.Adafactor), ("Adafactor", "AdamW")),
    (lambda e, m: e(m, raising(1)), ("of the caller's own",)),
    (lambda e, m: e(m, raising(2)), ("of the caller's own",)),
    (lambda e, m: e(with_graph(), ADAMW), ("'graph'", "to_dense()")),
    (lambda e, m: e(nn.Sequential(nn.Embedding(11, 3, max_norm=0.1)), ADAMW), ("'0'", "max_norm")),
    (lambda e, m: e(nn.parallel.DistributedDataParallel(m), ADAMW), ("DistributedDataParallel", ".module")),
)
OPTIONS = {"param_dtype": torch.int8, "reduce_dtype": "bf16", "find_unused": "yes"}
OF_UNITS = {"prefetch": -1, "reshard_after_forward": 2}
UNITS = (
    (lambda m: [odd().blocks[0]], ("units[0]", "not a module of the model")),
    (lambda m: [m.blocks[0], m.blocks[0].up], ("'blocks.0'", "'blocks.0.up'", "overlap")),
    (lambda m: [m.blocks[0].up, m.blocks[0]], ("'blocks.0'", "'blocks.0.up'", "overlap")),
    (lambda m: [m.blocks[0], m.blocks[0]], ("overlap",)),
    (lambda m: ["blocks.0"], ("units[0]", "'blocks.0'")),
    (lambda m: [m.blocks], ("'blocks'", "ModuleList", "entries")),
    (lambda m: 3, ("int",)),
)
GROUPS = (
    (lambda m: groups_of(m)[:2], ("'head.weight'", "'head.bias'", "in no group")),
    (lambda m: [*groups_of(m), {"params": [m.head.weight]}], ("'head.weight' is twice",)),
    (lambda m: [*groups_of(m), {"params": [m.frozen]}], ("(5,)",)),
    (lambda m: list(m.parameters()), ("param_groups[0]", "dictionary")),
    (lambda m: [{"params": [("theirs", torch.zeros(2))]}], ("param_groups[0]", "(2,)")),
)


def all_of(model: nn.Module):
    """The objects, how many hooks they have, and their values."""
    params = {
        name: (id(p), type(p), len(vars(p)), bool(p._post_accumulate_grad_hooks))
        for name, p in model.named_parameters()
    }
    return params, fixtures.hooks_on(model), {name: value.tolist() for name, value in model.state_dict().items()}


@holds("misuse", ask(ranks=3, more_ranks=1), of_stages=True)
def constructions_that_cannot_work_are_refused(engine):
    """Models, optimizers, groups and options that cannot work are refused by name, and the model stays as it was."""
    refusals = [*CONSTRUCTIONS]
    refusals += [(lambda e, m, of=of: e(m, ADAMW, param_groups=of(m)), words) for of, words in GROUPS]
    if engine.like == "zero3":
        refusals += [(lambda e, m, of=of: e(m, ADAMW, units=of(m)), words) for of, words in UNITS]
    for name, value in {**OPTIONS, **(OF_UNITS if engine.like == "zero3" else {"bucket_mb": -1})}.items():
        refusals.append((lambda e, m, own={name: value}: e(m, ADAMW, **own), (name, repr(value))))
    for build, words in refusals:
        model = odd()
        before = all_of(model)
        refused(lambda build=build, model=model: build(engine, model), *words, error=Exception)
        same("the model after the refusal", all_of(model), before)
    plain = odd()
    for module in (plain, model):  # trained by plain PyTorch first, and then by an engine
        optimizer = ADAMW([param for param in module.parameters() if param.requires_grad])
        F.cross_entropy(module(fixtures.token_batch(0, 0)[0]), fixtures.token_batch(0, 0)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    pair = Pair(engine, (plain, model))
    pair.alike()
    refused(lambda: pair.trained and engine(model, ADAMW), "sharded by another engine")


# What the last rank has otherwise: it makes its collectives other than those of the others.
CHANGES = [
    lambda model: {"find_unused": True},
    lambda model: {"reduce_dtype": torch.float32},
    lambda model: {"param_dtype": torch.bfloat16},
    lambda model: setattr(model.head.bias, "requires_grad", False),
    lambda model: setattr(model.head.bias, "data", model.head.bias.data.float()),
    lambda model: model.register_buffer("more", torch.zeros(2)),
    lambda model: setattr(model, "shift", torch.zeros(1, 5)),
    lambda model: model.blocks.extend([fixtures.OddBlock(5, 7).double()]) and None,
]
IN_BUCKETS = [lambda model: {"bucket_mb": 0}]
IN_UNITS = [
    lambda model: {"units": []},
    lambda model: {"prefetch": 2},
    lambda model: {"reshard_after_forward": False},
    lambda model: {"units": [model.blocks[1]]},
]


@holds("misuse", ask(ranks=3), of_stages=True)
def what_is_wrong_on_one_rank_is_an_error_on_all(engine):
    """A model or an optimizer that is bad on one rank, or other options there: every rank says where."""
    last = dist.get_rank() == dist.get_world_size() - 1
    here = f"[{dist.get_world_size() - 1}]"
    refused(lambda: engine(odd().requires_grad_(not last), ADAMW), "trainable" if last else here)
    refused(lambda: engine(odd(), raising(1) if last else ADAMW), "of the caller's own" if last else here,
            error=Exception)  # fmt: skip
    refused(lambda: engine(odd(), torch.optim.AdamW if last else ADAMW), here, "another optimizer", error=ValueError)
    for change in [*CHANGES, *(IN_UNITS if engine.like == "zero3" else IN_BUCKETS)]:
        model = odd()
        options = (change(model) or {}) if last else {}
        refused(lambda model=model, options=options: engine(model, ADAMW, **options), here, "another model",
                error=ValueError)  # fmt: skip


class OneBuffer(fixtures.OddModel):
    """Two modules that share a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.head.register_buffer("count", self.count)


@holds("misuse", ask("zero3"), of_stages=True)
def an_init_fn_that_raises_on_one_rank_is_an_error_on_all(engine):
    """The others hear of it, and the model is on `meta` as before: another try works, and fills each buffer once."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with torch.device("meta"):
        model = OneBuffer()
    weight, names = model.blocks[1].up.weight, []

    def bad(name, tensor):
        if rank == last and name == "blocks.1.up.weight":
            raise ZeroDivisionError("of the caller's own")
        tensor.fill_(0.1)

    words = "of the caller's own" if rank == last else f"[{last}]"
    refused(lambda: engine(model, fixtures.MOMENTUM, init_fn=bad), words, error=Exception)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.blocks[1].up.weight is weight and type(weight) is nn.Parameter and weight.requires_grad
    trained = engine(model, fixtures.MOMENTUM, init_fn=lambda name, tensor: (names.append(name), tensor.fill_(0.1)))
    expect(model.count is model.head.count, "the buffer of two modules", "one object", "two")
    same("how it is filled", [name for name in names if "count" in name], ["count"])
    trained.training_step(*fixtures.token_batch(0, rank), F.cross_entropy)
    state = trained.full_state_dict()
    assert not model.count.is_meta and not any(value.is_meta for value in state.values())
    trained.load_full_state_dict(state)

"""What cannot work is refused: in words, on every rank, and before a collective could hang. A good one works after."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.properties import parts
from harness.properties.property import expect, holds, refused, same
from harness.properties.values import groups_of

ADAMW = parts.ADAMW


def odd(**options):
    return parts.seeded(lambda: parts.OddModel(**options))


def with_graph():
    model = odd()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def frozen():
    return odd().requires_grad_(False)


# (what cannot work, words of the error): a function of the engine.
CONSTRUCTIONS = {
    "nothing to train": (lambda e: e(frozen(), ADAMW), ("no trainable parameter", "requires_grad")),
    "meta": (lambda e: e(nn.Linear(3, 3, device="meta"), ADAMW), ("'weight'", "meta")),
    "no optimizer": (lambda e: e(odd(), lambda shards: "an optimizer"), ("str", "torch.optim.Optimizer")),
    "another's optimizer": (lambda e: e(odd(), lambda shards: torch.optim.AdamW(odd().parameters())),
                            ("not this rank's pieces",)),
    "no model": (lambda e: e("a model", ADAMW), ("torch.nn.Module", "'a model'")),
    "lazy": (lambda e: e(nn.LazyLinear(3), ADAMW), ("'weight'", "no shape yet")),
    "an optimizer that is built": (lambda e: e(odd(), torch.optim.SGD(odd().parameters())),
                                   ("SGD", "cannot be called")),
    "a list as group": (lambda e: e(odd(), ADAMW, group=[0, 1]), ("mesh.get_group", "list")),
    "not elementwise": (lambda e: e(odd(), torch.optim.Adafactor), ("Adafactor", "AdamW")),
    "sparse": (lambda e: e(nn.Sequential(nn.Embedding(3, 3, sparse=True)), ADAMW), ("'0'", "sparse=False")),
    "sparse buffer": (lambda e: e(with_graph(), ADAMW), ("'graph'", "to_dense()")),
    "max_norm": (lambda e: e(nn.Sequential(nn.Embedding(11, 3, max_norm=0.1)), ADAMW), ("'0'", "max_norm")),
    "batch norm": (lambda e: e(nn.Sequential(nn.BatchNorm1d(3)), ADAMW, param_dtype=torch.bfloat16),
                   ("'0'", "bfloat16", "CPU")),
    "param_dtype": (lambda e: e(odd(), ADAMW, param_dtype=torch.int8), ("param_dtype", "torch.int8")),
    "reduce_dtype": (lambda e: e(odd(), ADAMW, reduce_dtype="bf16"), ("reduce_dtype", "'bf16'")),
    "find_unused": (lambda e: e(odd(), ADAMW, find_unused="yes"), ("find_unused", "'yes'")),
    "DDP": (lambda e: e(nn.parallel.DistributedDataParallel(odd()), ADAMW), ("DistributedDataParallel", ".module")),
}  # fmt: skip
BUCKETS = {
    "negative": (lambda e: e(odd(), ADAMW, bucket_mb=-1), ("bucket_mb", "-1")),
    "a string": (lambda e: e(odd(), ADAMW, bucket_mb="25"), ("bucket_mb", "'25'")),
}


def with_units(units, words):
    """A construction of ZeRO-3 with `units(model)`."""

    def build(engine):
        model = odd()
        engine(model, ADAMW, units=units(model))

    return build, words


UNITS = {
    "of another model": with_units(lambda m: [odd().blocks[0]], ("units[0]", "not a module of the model")),
    "one in another": with_units(lambda m: [m.blocks[0], m.blocks[0].up], ("'blocks.0'", "'blocks.0.up'", "overlap")),
    "twice": with_units(lambda m: [m.blocks[0], m.blocks[0]], ("units[0]", "units[1]", "overlap")),
    "by name": with_units(lambda m: ["blocks.0"], ("units[0]", "'blocks.0'", "str")),
    "a list of modules": with_units(lambda m: [m.blocks], ("'blocks'", "ModuleList", "entries")),
    "a number": with_units(lambda m: 3, ("units must be a list", "int")),
    "prefetch": (lambda e: e(odd(), ADAMW, prefetch=-1), ("prefetch", "-1")),
}


@holds("misuse", sizes=(3,), further_sizes=(1,))
def constructions_that_cannot_work_are_refused(engine):
    """Models, optimizers and options that cannot work are refused by name; a good construction works afterwards."""
    refusals = {**CONSTRUCTIONS, **(UNITS if engine.like == "zero3" else BUCKETS)}
    for build, words in refusals.values():
        refused(lambda build=build: build(engine), *words)
    used = odd()
    trained = engine(used, ADAMW)
    trained.training_step(*parts.token_batch(0, dist.get_rank()), F.cross_entropy)
    refused(lambda: trained and engine(used, ADAMW), "sharded by another engine")


@holds("misuse", sizes=(3,))
def what_is_wrong_on_one_rank_is_an_error_on_all(engine):
    """A model that is bad on one rank, another one there, or other options: every rank says where."""
    rank = dist.get_rank()
    refused(lambda: engine(frozen() if rank == 1 else odd(), ADAMW), "trainable" if rank == 1 else "[1]")
    refused(lambda: engine(odd(blocks=2 + rank), ADAMW), "[1, 2]", "model")
    low = {0: torch.bfloat16}.get(rank)
    refused(lambda: engine(odd(), ADAMW, param_dtype=low), "[1, 2]", "model", "options")


@holds("misuse", sizes=(3,))
def other_options_on_one_rank_are_an_error_on_all(engine):
    """Whatever makes the last rank's collectives other than the others' is found out before the first."""
    last = dist.get_rank() == dist.get_world_size() - 1
    changes = [
        lambda model: {"find_unused": True},
        lambda model: {"reduce_dtype": torch.float32},
        lambda model: setattr(model.head.bias, "requires_grad", False),
        lambda model: setattr(model.head.bias, "data", model.head.bias.data.float()),
        lambda model: model.register_buffer("more", torch.zeros(2)),
        lambda model: setattr(model, "shift", torch.zeros(1, 5)),
    ]
    if engine.like == "zero3":
        changes += [lambda model: {"units": []}, lambda model: {"prefetch": 2}]
        changes += [lambda model: {"reshard_after_forward": False}, lambda model: {"units": [model.blocks[1]]}]
    else:
        changes += [lambda model: {"bucket_mb": 0}]
    for change in changes:
        model = odd()
        options = (change(model) or {}) if last else {}
        refused(lambda model=model, options=options: engine(model, ADAMW, **options), "another model", error=ValueError)


@holds("misuse")
def groups_that_cannot_work_are_refused(engine):
    """A parameter in no group, in two, not trained, or no groups at all: the error names it."""
    for change, words in (
        (lambda model, groups: groups[:2], ("'head.weight'", "'head.bias'", "in no group")),
        (lambda model, groups: [*groups, {"params": [model.head.weight]}], ("'head.weight' is twice",)),
        (lambda model, groups: [*groups, {"params": [model.frozen]}], ("(5,)",)),
        (lambda model, groups: list(model.parameters()), ("param_groups[0]", "dictionary")),
        (lambda model, groups: [{"params": [("theirs", torch.zeros(2))]}], ("param_groups[0]", "(2,)")),
        (lambda model, groups: [{"params": ["weight"]}], ("param_groups[0]", "'weight'")),
    ):
        model = odd()
        given = change(model, groups_of(model))
        refused(lambda model=model, given=given: engine(model, ADAMW, param_groups=given), *words)


# What changes after the engine was built.


@holds("misuse", sizes=(2,), further_sizes=(3,))
def changed_flags_are_refused_with_the_way_out(engine):
    """`requires_grad` that changes after the build is an error that names the parameter, and the way out works."""
    rank, model = dist.get_rank(), odd()
    trained, batch = engine(model, parts.DECAY), parts.token_batch(0, rank)
    trained.training_step(*batch, F.cross_entropy)
    model.head.bias.requires_grad_(False)
    said = refused(lambda: trained.training_step(*batch, F.cross_entropy), "'head.bias'", "full_state_dict", step=1)
    expect("'frozen'" not in said, "the parameters that are named", "those that have changed", said)
    model.head.bias.requires_grad_(True)
    trained.training_step(*batch, F.cross_entropy)
    model.frozen.requires_grad_(True)
    said = refused(lambda: trained.training_step(*batch, F.cross_entropy), "'frozen'", "find_unused=True", step=1)
    expect("head" not in said, "the parameters that are named", "those that have changed", said)
    state = trained.full_state_dict()
    fresh = parts.seeded(parts.OddModel, seed=1)
    fresh.load_state_dict(state)
    fresh.frozen.requires_grad_(True)
    fresh.head.bias.requires_grad_(False)
    trained = engine(fresh, parts.DECAY)
    for step in range(2):
        trained.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    after = trained.full_state_dict()
    changed = [name for name in ("frozen", "head.bias") if not torch.equal(after[name], state[name])]
    same("which of the two parameters is trained now", changed, ["frozen"], step=4)


@holds("misuse", sizes=(2,), further_sizes=(3,))
def what_happens_behind_the_engines_back_is_refused(engine):
    """A module added later, weights loaded past the shards, a state on one rank only: nothing is lost silently."""
    rank, model = dist.get_rank(), odd()
    trained, batch = engine(model, parts.DECAY), parts.token_batch(0, rank)
    trained.training_step(*batch, F.cross_entropy)
    model.blocks.append(parts.seeded(lambda: parts.OddBlock(5, 7)))
    refused(lambda: trained.training_step(*batch, F.cross_entropy), "'blocks.3.up.weight'",
            "after the engine was built", step=1)  # fmt: skip
    del model.blocks[-1]
    trained.training_step(*batch, F.cross_entropy)
    low = parts.seeded(parts.OddModel, dtype=torch.float32)
    engine(low, parts.DECAY, param_dtype=torch.bfloat16)
    refused(lambda: low.load_state_dict(parts.OddModel().state_dict()), "load_full_state_dict")
    refused(lambda: low.head.load_state_dict(parts.OddModel().head.state_dict()), "load_full_state_dict")
    state = trained.full_state_dict()
    # Rank 0 has passed a state, the others none.
    refused(lambda: trained.load_full_state_dict(state if rank == 0 else None), "[1" if rank == 0 else "every rank")
    trained.load_full_state_dict(state)
    trained.training_step(*batch, F.cross_entropy)

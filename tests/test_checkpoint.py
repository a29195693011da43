"""Sharded checkpoints: runs resume to the bit, and move to any stage, number of ranks or torch class.

Tests of the files themselves (crashes, malicious lists, rectangles) are in test_checkpoint_files.py.
"""

import contextlib
import copy
import os
import resource
import shutil
import warnings
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import EXACT, WORDS, batch, mse, mse_loss, on_every_rank, own_batch, raised_on_every_rank, same, seeded
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import keystr, tree_flatten_with_path

from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine, checkpoint
from zerolab.engine.checkpoint import folders, metadata
from zerolab.engine.optimizers import as_list

STAGES = [ZeRO1Engine, ZeRO2Engine, ZeRO3Engine]
ADAMW = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),  # has a state from the start
    "nadam": partial(torch.optim.NAdam, lr=0.01),  # has two scalars besides the moments
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
}

two_ranks = pytest.mark.parametrize("ranks", [2])
three_ranks = pytest.mark.parametrize("ranks", [3])
stages = pytest.mark.parametrize("stage", STAGES)


class Zoo(nn.Module):
    """A model with tied, frozen, unused and odd parameters, buffers, and values that are not tensors.

    Takes tokens (batch, 6), returns (batch, 3). FSDP2 does not support the parameters that `odd` adds.
    """

    def __init__(self, odd=True, norm=nn.BatchNorm1d):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5)
        first = nn.Sequential(nn.Linear(5, 7, bias=False), norm(7), nn.Linear(7, 5))
        second = nn.Sequential(nn.Linear(5, 9, bias=False), nn.Linear(9, 5))
        self.blocks = nn.ModuleList([first, second])
        second[1].bias.requires_grad_(False)
        self.mix = nn.Parameter(torch.randn(3, 5, 5) / 9)
        self.row = nn.Linear(5, 1, bias=False)  # Adafactor's state `col_var` has the shape of this weight
        self.factor = nn.Parameter(torch.linspace(0.5, 1, 5), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.7)) if odd else 0.7
        self.empty = nn.Parameter(torch.zeros(0, 5)) if odd else torch.zeros(0, 5)
        self.head = nn.Linear(5, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-0.2, 0.2, 5))
        self.register_buffer("table", torch.ones(5), persistent=False)
        self.seen = {"steps": 0, "of": {"words": [1, 2]}}

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.factor
        x = x + (self.shift * self.table).to(x.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = x + self.row(x)
        for matrix in self.mix:
            x = x + self.scale * (x @ matrix)
        if self.training:
            self.seen["steps"] += 1
        return self.head(x + self.empty.sum())[:, :3]

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = copy.deepcopy(state)


def groups_of(model):
    """Matrices decay, and all other parameters have a different learning rate. The groups include frozen parameters."""
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    others = [param for param in model.parameters() if param.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]


def build(stage, seed=0, make_optimizer=ADAMW, groups=groups_of, odd=True, dtype=torch.float64, **options):
    norm = nn.LayerNorm if "param_dtype" in options else nn.BatchNorm1d  # BatchNorm has no bfloat16 on a CPU
    model = seeded(Zoo, odd, norm, seed=seed, dtype=dtype)
    options = {"find_unused": True, **options}
    if stage is not ZeRO3Engine:
        options["bucket_mb"] = 0.0005  # several buckets
    return stage(model, make_optimizer(groups(model)), **options)


def train(engine, steps, dtype=torch.float64):
    """Each rank's losses on its own batches."""
    return [engine.training_step(*own_batch(step, dtype=dtype), mse_loss).item() for step in steps]


def state_of(engine):
    """Copies of everything that loading may change: {where it is: a tensor or a value}. A collective.

    Buffers of other ranks are missing, because loading replaces them by rank 0's.
    """
    optimizer = engine.optimizer
    state = {"model": engine.full_state_dict(), "shards": [bucket.shard for bucket in engine.all_buckets], "groups": []}
    state["weights"] = {}
    if not isinstance(engine, ZeRO3Engine):  # whole weights must follow the shards
        state["weights"] = dict(engine.model.named_parameters())
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        state["groups"].append((options, [dict(optimizer.state.get(piece, {})) for piece in group["params"]]))
    leaves = tree_flatten_with_path(state)[0]
    return {keystr(path): leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves}


def same_states(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for where, value in expected.items():
        assert type(found[where]) is type(value), (where, found[where], value)
        if isinstance(value, torch.Tensor):
            assert found[where].dtype == value.dtype, where
        same(found[where], value, what=where)


def is_resumed(engine, other, folder, save=checkpoint.save, **options):
    """`other` loads what `engine` saves, and both continue with equal losses and states.

    They are equal to the bit, because both do the same operations on the same numbers.
    """
    train(engine, range(3), **options)
    train(other, range(7, 9), **options)
    expected = state_of(engine)
    saved = save(engine, folder, step=3)
    ahead = train(engine, range(3, 6), **options)
    if save is checkpoint.async_save:
        saved.result()
    assert checkpoint.load(other, folder) == {"step": 3}
    same_states(state_of(other), expected)
    assert train(other, range(3, 6), **options) == ahead
    same_states(state_of(other), state_of(engine))


# A run resumes.


@two_ranks
@stages
@on_every_rank
def test_a_run_resumes_to_the_bit(ranks, stage, tmp_path):
    """A run that is loaded into an engine that was trained differently continues like the saved run."""
    is_resumed(build(stage), build(stage, seed=3), tmp_path)


@two_ranks
@on_every_rank
def test_training_continues_during_a_save(ranks, tmp_path):
    """`async_save` saves the values at the time of the call, although training changes them meanwhile."""
    is_resumed(build(ZeRO2Engine), build(ZeRO2Engine, seed=3), tmp_path, save=checkpoint.async_save)


@two_ranks
@pytest.mark.parametrize("stage", [ZeRO1Engine, ZeRO3Engine])
@on_every_rank
def test_mixed_precision_saves_the_float32_shards(ranks, stage, tmp_path):
    """Under `param_dtype` no digit of the float32 shards is lost."""
    engine, other = (build(stage, seed, dtype=torch.float32, param_dtype=torch.bfloat16) for seed in (0, 3))
    is_resumed(engine, other, tmp_path, dtype=torch.float32)


@two_ranks
@on_every_rank
def test_an_offloaded_run_resumes(ranks, tmp_path):
    """With offload shards have their own memory. Loading must write to it, and update the weights."""
    engine, other = (build(ZeRO2Engine, seed, offload_policy=CPUOffloadPolicy(pin_memory=False)) for seed in (0, 3))
    is_resumed(engine, other, tmp_path)


@two_ranks
@pytest.mark.parametrize("name", ["sgd", "adagrad", "nadam"])
@on_every_rank
def test_other_optimizers_resume(ranks, name, tmp_path):
    """With all values in their states, which differ in kind."""
    engine, other = (build(ZeRO3Engine, seed, OPTIMIZERS[name]) for seed in (0, 3))
    is_resumed(engine, other, tmp_path)


@two_ranks
@on_every_rank
def test_options_of_groups_come_back(ranks, tmp_path):
    """Numpy and tensor learning rates, and options that a scheduler adds, replace the existing options."""
    engine, other = build(ZeRO1Engine), build(ZeRO1Engine, seed=3)
    torch.optim.lr_scheduler.StepLR(engine.optimizer, 2)
    first, second = engine.optimizer.param_groups
    first["lr"] = numpy.float64(0.25)
    second["betas"] = (0.5, 0.6)
    second["lr"] = torch.tensor(0.125)
    second["note"] = {"a": [1, (2.0, None)], "b": "text"}
    checkpoint.save(engine, tmp_path)
    other.optimizer.param_groups[1]["note"] = "another"
    checkpoint.load(other, tmp_path)
    first["lr"] = 0.25
    for found, expected in zip(other.optimizer.param_groups, (first, second)):
        for key in expected.keys() - {"params"}:
            assert str(found[key]) == str(expected[key]), key
            assert type(found[key]) is type(expected[key]), key


@two_ranks
@on_every_rank
def test_the_callers_values_come_back(ranks, tmp_path):
    """Each rank gets back its own values with the same types, including keys and containers that DCP would change."""
    engine = build(ZeRO2Engine)
    value = {1: (2, [3.0]), "5": {7: None}, "empty": {}, "list": [], "deep": {"a": [{"b": True}]}}
    draws = torch.get_rng_state()
    checkpoint.save(engine, tmp_path, rank=dist.get_rank(), value=value, number=numpy.float32(0.5), draws=draws)
    found = checkpoint.load(engine, tmp_path)
    assert torch.equal(found.pop("draws"), draws)
    assert str(found) == str({"rank": dist.get_rank(), "value": value, "number": 0.5})


@two_ranks
@on_every_rank
def test_a_parameter_that_no_step_used_has_no_state_afterwards(ranks, tmp_path):
    """Loading removes a state that the checkpoint does not have. Otherwise AdamW would continue its step count."""
    engine, other = build(ZeRO2Engine), build(ZeRO2Engine, seed=3)
    checkpoint.save(engine, tmp_path)
    train(other, range(2))
    assert other.optimizer.state
    checkpoint.load(other, tmp_path)
    assert not other.optimizer.state


@two_ranks
@on_every_rank
def test_all_ranks_load_the_buffers_of_rank_0(ranks, tmp_path):
    """Ranks have seen different data, so BatchNorm's statistics differ. They must not be mixed."""
    engine = build(ZeRO2Engine)
    train(engine, range(2))
    expected = [copy.deepcopy(dict(engine.model.named_buffers()))]
    own = expected[0]["blocks.0.1.running_mean"]
    dist.broadcast_object_list(expected, src=0)
    if dist.get_rank() == 1:
        assert not torch.equal(own, expected[0]["blocks.0.1.running_mean"])
    checkpoint.save(engine, tmp_path)
    checkpoint.load(engine, tmp_path)
    for name, buffer in engine.model.named_buffers():
        same(buffer, expected[0][name], what=name)


@two_ranks
@on_every_rank
def test_a_load_waits_for_the_save_that_is_written(ranks, tmp_path):
    """One save at a time: a load right after `async_save` gets its values."""
    engine = build(ZeRO1Engine)
    checkpoint.async_save(engine, tmp_path, step=1)
    checkpoint.async_save(engine, tmp_path, step=2)
    assert checkpoint.load(engine, tmp_path) == {"step": 2}
    future = checkpoint.async_save(engine, tmp_path, step=3)
    assert checkpoint.load_newest(engine, tmp_path) == (tmp_path / "000003", {"step": 3}) and future.done()


# It moves: to other stages, numbers of ranks, and torch's own classes.


def last_ranks(number):
    """A group of the last ranks, whose ranks in the group and in the world differ. None on other ranks."""
    ranks = list(range(dist.get_world_size() - number, dist.get_world_size()))
    group = dist.new_group(ranks)
    return group if dist.get_rank() in ranks else None


def everything(folder):
    """All values of a checkpoint by torch's own conversion: {name: value}, without the class of the optimizer.

    torch keeps a state for an empty parameter, of which an engine has no piece.
    """
    file = f"{folder} of rank {dist.get_rank()}.pt"
    dcp_to_torch_save(checkpoint.newest(folder), file)
    state = torch.load(file, weights_only=True)
    found, optim = dict(state["model"]), state["optim"]
    for group in optim["param_groups"]:
        found |= {(name, "options"): {**group, "params": None} for name in group["params"]}
    for name, values in optim["state"].items():
        found |= {(name, key): value for key, value in values.items()}
    found = {str(key): value for key, value in found.items() if "empty" not in key[0]}
    found |= {f"dtype of {key}": value.dtype for key, value in found.items() if isinstance(value, torch.Tensor)}
    return found


def same_files(found, expected):
    found, expected = everything(found), everything(expected)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        same(found[name], value, what=name)


def train_on_rank_0s_batches(trained, steps):
    """Every rank has the same batch, so a mean over any number of ranks is the loss of one process."""
    for step in steps:
        inputs, targets = batch(step, 0)
        if isinstance(trained, tuple):
            model, optimizers = trained
            mse(model, inputs, targets).backward()
            for optimizer in as_list(optimizers):
                optimizer.step()
                optimizer.zero_grad()
        else:
            trained.training_step(inputs, targets, mse_loss)


def torch_run(odd=True, group=None, sharded=False):
    """(model, optimizer) in torch, with FSDP2 or plain."""
    model = seeded(Zoo, odd, seed=5)
    if sharded:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    return model, ADAMW(groups_of(model))


def torch_save(trained, folder, group=None):
    model, optimizer = trained
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)


def torch_load(trained, folder, group=None):
    model, optimizer = trained
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # the unused parameter has no state
    path = checkpoint.newest(folder)
    dcp.load(state, checkpoint_id=path, planner=planner, process_group=group, no_dist=group is None)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=StateDictOptions(strict=False))


def travel(legs, folder, make, odd=True):
    """Each leg (stage, number of ranks, options) continues the run of the leg before, and saves it.

    `make` gets a model and returns its optimizers. Loading and saving again gives the same file content, and training
    matches one process.
    """
    source = None
    for leg, (stage, number, options) in enumerate(legs):
        group = last_ranks(number)
        if group is not None:
            engine = build(stage, seed=leg, group=group, make_optimizer=list, groups=make, odd=odd, **options)
            if source:
                assert checkpoint.load(engine, source) == {"leg": leg - 1}
                checkpoint.save(engine, folder / f"{leg} again")
                same_files(folder / f"{leg} again", source)
            train_on_rank_0s_batches(engine, (2 * leg, 2 * leg + 1))
            checkpoint.save(engine, folder / str(leg), leg=leg)
        source = folder / str(leg)
        dist.barrier()
    if dist.get_rank() == 0:
        model = seeded(Zoo, odd)
        plain = model, make(model)
        train_on_rank_0s_batches(plain, range(2 * len(legs)))
        torch_save(plain, folder / "plain")
        found, expected = everything(source), everything(folder / "plain")
        for name in expected.keys() - {key for key in expected if "unused" in key and "'" in key}:
            if "step" not in name and "_extra_state" not in name and isinstance(expected[name], torch.Tensor):
                same(found[name], expected[name], EXACT, name)


@three_ranks
@pytest.mark.parametrize("order", [STAGES, STAGES[::-1]])
@on_every_rank
def test_a_run_moves_to_other_stages_and_numbers_of_ranks(ranks, order, tmp_path):
    legs = [(stage, number, {}) for stage, number in zip(order, (3, 2, 1))]
    travel(legs, tmp_path, lambda model: [ADAMW(groups_of(model))])


def two_optimizers(model):
    """Matrices have a momentum, and the other parameters have AdamW's moments."""
    matrices, others = groups_of(model)
    return [OPTIMIZERS["sgd"]([matrices]), ADAMW([others])]


def adafactor(model):
    """Its state has the shapes of rows and columns, so it is whole where the parameter is."""
    return [torch.optim.Adafactor(groups_of(model), lr=0.01)]


WHOLE, CUT = {"whole": True}, {}
JOURNEYS = {
    "whole, cut, whole": (two_optimizers, [WHOLE, CUT, WHOLE]),
    "Adafactor": (adafactor, [WHOLE, WHOLE, WHOLE]),
}


@three_ranks
@pytest.mark.parametrize("journey", JOURNEYS)
@on_every_rank
def test_a_run_moves_between_whole_and_cut_parameters(ranks, journey, tmp_path):
    make, options = JOURNEYS[journey]
    legs = list(zip(STAGES, (3, 2, 3), options))
    travel(legs, tmp_path, make, odd=make is not adafactor)  # Adafactor divides by the size of an empty parameter


@two_ranks
@on_every_rank
def test_whole_states_are_refused_where_they_do_not_fit(ranks, tmp_path):
    """Adafactor's means of rows fit only whole parameters, and optimizers only the ones that were saved."""

    class RowWise(torch.optim.Adafactor):
        """Its name is not known to the engine, so it can be built over cut parameters."""

    def row_wise(params):
        return RowWise(params, lr=0.01)

    engine = build(ZeRO3Engine, make_optimizer=row_wise, odd=False, whole=True)
    train(engine, range(1))
    checkpoint.save(engine, tmp_path / "rows")
    cut = build(ZeRO3Engine, make_optimizer=row_wise, odd=False)
    raised_on_every_rank(ValueError, "build the engine with whole=True", checkpoint.load, cut, tmp_path / "rows")
    engine = build(ZeRO3Engine, make_optimizer=list, groups=two_optimizers)
    checkpoint.save(engine, tmp_path / "two")
    swapped = build(ZeRO3Engine, make_optimizer=list, groups=lambda model: two_optimizers(model)[::-1])
    raised_on_every_rank(ValueError, "SGD, AdamW, but", checkpoint.load, swapped, tmp_path / "two")
    exchanged = build(ZeRO3Engine, make_optimizer=list, groups=two_optimizers_exchanged)
    raised_on_every_rank(ValueError, "is not from SGD", checkpoint.load, exchanged, tmp_path / "two")


def two_optimizers_exchanged(model):
    matrices, others = groups_of(model)
    return [OPTIMIZERS["sgd"]([others]), ADAMW([matrices])]


class Experts(nn.Module):
    """One of four linear layers computes."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, expert):
        return torch.tanh(self.experts[expert](x))


class Mixture(nn.Module):
    """All experts of a block are in one unit, because all ranks gather the same units."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, tokens, expert):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = block(x, expert)
        return self.head(x)


@two_ranks
@on_every_rank
def test_experts_of_different_ranks_resume_in_another_stage(ranks, tmp_path):
    """Each rank uses a different expert in each step, and one is unused until the run has moved to the other stage."""
    plain = seeded(Mixture)
    optimizer = ADAMW(plain.parameters())
    engines = []
    for seed, stage in enumerate((ZeRO1Engine, ZeRO3Engine)):
        model = seeded(Mixture, seed=seed)
        engines.append(stage(model, ADAMW(model.parameters()), find_unused=True))

    def loss_of(model, step, rank):
        tokens, targets = batch(step, rank)
        return nn.functional.mse_loss(model(tokens, (2 * (step > 2) + step + rank) % 4), targets)

    for step in range(5):
        for rank in range(2):
            (loss_of(plain, step, rank) / 2).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            checkpoint.save(engines[0], tmp_path)
            checkpoint.load(engines[1], tmp_path)
        engine = engines[step >= 2]
        loss_of(engine, step, dist.get_rank()).backward()
        same(engine.clip_grad_norm_(0.05), expected, EXACT, f"the norm in step {step}")
        engine.step()
        engine.zero_grad()
    for name, value in engines[1].full_state_dict().items():
        same(value, plain.state_dict()[name], EXACT, name)


class OddNames(nn.Module):
    """Names that checkpoints or optimizers use for other things, or that are no names in Python."""

    NAMES = ["0", "1e3", "a b", "ä/ß", "param_groups", "state", "step", "exp_avg", "_extra_state"]

    def __init__(self):
        super().__init__()
        self.optim = nn.ParameterDict({name: torch.randn(3, 2) for name in self.NAMES})
        self.model = nn.ModuleDict({"model": nn.Linear(6, 3), "a\nb": nn.Linear(3, 3)})

    def forward(self, tokens):
        x = self.model["a\nb"](self.model["model"](tokens.double()))
        return x + torch.stack(list(self.optim.values())).sum(0).sum(1)


@two_ranks
@on_every_rank
def test_odd_names_come_back(ranks, tmp_path):
    """Weights and moments go to the parameter of the same name, whatever the name is."""
    models = seeded(OddNames), seeded(OddNames, seed=3)
    engine, other = (ZeRO3Engine(model, ADAMW(model.parameters())) for model in models)
    train(engine, range(2))
    checkpoint.save(engine, tmp_path / "ä b")
    checkpoint.load(other, tmp_path / "ä b")
    for each in (engine, other):
        train(each, range(2, 4))
    expected = engine.full_state_dict()
    assert len(expected) == len(OddNames.NAMES) + 4
    for name, value in other.full_state_dict().items():
        same(value, expected[name], EXACT, name)


@three_ranks
@on_every_rank
def test_a_rank_that_was_not_there_gets_rank_0s_values(ranks, tmp_path):
    """`extra` with more ranks than before: old ranks get their own values."""
    group = last_ranks(2)
    if group is not None:
        checkpoint.save(build(ZeRO2Engine, group=group), tmp_path, rank=dist.get_rank(group))
    dist.barrier()
    found = checkpoint.load(build(ZeRO3Engine), tmp_path)
    assert found == {"rank": [0, 1, 0][dist.get_rank()]}


@two_ranks
@pytest.mark.parametrize("sharded", [False, True], ids=["one process", "FSDP2"])
@on_every_rank
def test_torch_and_an_engine_exchange_checkpoints(ranks, sharded, tmp_path):
    """Each saves again exactly what it has loaded from the other."""
    engine = build(ZeRO3Engine, odd=not sharded)
    train(engine, range(2))
    checkpoint.save(engine, tmp_path / "ours")
    group = dist.group.WORLD if sharded else None
    if sharded or dist.get_rank() == 0:
        theirs = torch_run(not sharded, group, sharded)
        torch_load(theirs, tmp_path / "ours", group)
        torch_save(theirs, tmp_path / "theirs", group)
        train_on_rank_0s_batches(theirs, range(2))
        torch_save(theirs, tmp_path / "trained", group)
    dist.barrier()
    found, expected = everything(tmp_path / "theirs"), everything(tmp_path / "ours")
    for name, value in expected.items():  # torch gives the unused parameter a state
        same(found[name], value, what=name)
    assert checkpoint.load(engine, tmp_path / "trained") == {}
    checkpoint.save(engine, tmp_path / "again")
    same_files(tmp_path / "again", tmp_path / "trained")


@two_ranks
@on_every_rank
def test_it_survives_torchs_conversion_into_one_file(ranks, tmp_path):
    """`dcp_to_torch_save` and back: no value changes, including the caller's."""
    engine = build(ZeRO2Engine)
    train(engine, range(2))
    checkpoint.save(engine, tmp_path / "ours", value={1: {}})
    expected = state_of(engine)
    if dist.get_rank() == 0:
        dcp_to_torch_save(checkpoint.newest(tmp_path / "ours"), tmp_path / "all.pt")
        torch_save_to_dcp(tmp_path / "all.pt", tmp_path / "back")
    train(engine, range(1))
    dist.barrier()
    assert checkpoint.load(engine, tmp_path / "back") == {"value": {1: {}}}
    same_states(state_of(engine), expected)


@pytest.mark.parametrize("ranks", [4])
@on_every_rank
def test_replicas_write_each_shard_once(ranks, tmp_path):
    """One of the ranks with the same shard writes it, and the run resumes on all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    engine, other = (build(ZeRO3Engine, seed, group=mesh) for seed in (0, 3))
    train(engine, range(2))
    saved = checkpoint.save(engine, tmp_path)
    files = list((tmp_path / "000001").glob(f"__{dist.get_rank()}_*"))
    with_shard = sum(file.stat().st_size for file in files)
    assert (with_shard > 20_000) == (dist.get_rank() < 2), saved
    checkpoint.load(other, tmp_path)
    same_states(state_of(other), state_of(engine))


def fill(name, tensor):
    """For values that are in no checkpoint, such as a buffer that is not persistent."""
    tensor.fill_(1)


@two_ranks
@on_every_rank
def test_a_model_on_meta_gets_its_weights_from_a_folder(ranks, tmp_path):
    """`state_dict=` can be a checkpoint's folder, even from a different stage."""
    engine = build(ZeRO1Engine)
    train(engine, range(2))
    checkpoint.save(engine, tmp_path)
    with torch.device("meta"):
        model = Zoo().double()
    optimizer = ADAMW(groups_of(model))
    other = ZeRO3Engine(model, optimizer, state_dict=tmp_path, init_fn=fill, find_unused=True)
    expected = engine.full_state_dict()
    expected.pop("_extra_state")
    for name, value in other.full_state_dict().items():
        if name in expected:
            same(value, expected[name], what=name)


# The files of each rank.


@two_ranks
@stages
@on_every_rank
def test_each_rank_writes_its_part(ranks, stage, tmp_path):
    """Half of parameters and moments, and small headers. Also in ZeRO-1 and -2, whose ranks have whole parameters."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(WORDS, 256), nn.Flatten(), nn.Linear(6 * 256, 256)))
    engine = stage(model, torch.optim.AdamW(model.parameters()))
    tokens, _ = own_batch(0)
    engine(tokens).sum().backward()
    engine.step()
    whole = 3 * sum(param.nbytes for param in model.parameters())
    if stage is ZeRO3Engine:
        whole = 3 * 8 * sum(param.numel() for param in model.parameters())
    written = checkpoint.save(engine, tmp_path).nbytes
    assert whole / 2 - 10_000 < written < whole / 2 + 100_000, (whole / 2, written)


@two_ranks
@on_every_rank
def test_old_checkpoints_go(ranks, tmp_path):
    """The newest `keep` stay, also after crashes between the rename and the deletion, and each loads by its path."""
    engine = build(ZeRO1Engine)
    checkpoint.save(engine, tmp_path, keep=2, step=1)
    if dist.get_rank() == 0:
        for number in (2, 3, 4):
            shutil.copytree(tmp_path / "000001", tmp_path / f"{number:06d}")
    dist.barrier()
    for step in (5, 6):
        checkpoint.save(engine, tmp_path, keep=2, step=step)
    assert sorted(os.listdir(tmp_path)) == ["000005", "000006"]
    assert checkpoint.load(engine, tmp_path / "000005") == {"step": 5}
    assert checkpoint.load(engine, tmp_path) == {"step": 6}
    for _ in range(2):
        checkpoint.save(engine, tmp_path, keep=None)
    assert len(checkpoint.complete(tmp_path)) == 4


@two_ranks
@on_every_rank
def test_the_users_own_files_stay(ranks, tmp_path):
    """Only folders that a save has named are deleted, and a number that exists is not used."""
    engine = build(ZeRO1Engine)
    own = ["000008.partial", "000009.partial", "1²", "3notes.partial", "notes"]
    if dist.get_rank() == 0:
        for name in own[2:]:
            (tmp_path / name).mkdir()
        (tmp_path / own[0]).write_text("a file")
        (tmp_path / own[1]).symlink_to(tmp_path / "notes")
    dist.barrier()
    checkpoint.save(engine, tmp_path, keep=1)
    checkpoint.save(engine, tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == sorted([*own, "000011"])


# Errors: the same on every rank, and nothing has changed.


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


def is_refused(engine, folder, error, text):
    """Loading raises the same error on every rank, and leaves the engine as it was, buffers of each rank included."""
    before, buffers = state_of(engine), copy.deepcopy(list(engine.model.buffers()))
    messages = [None] * dist.get_world_size(engine.group)
    with pytest.raises(error) as caught:
        checkpoint.load(engine, folder)
    assert text in str(caught.value), str(caught.value)
    dist.all_gather_object(messages, str(caught.value), group=engine.group)
    assert set(messages) == {messages[0]}, messages
    same_states(state_of(engine), before)
    for found, expected in zip(engine.model.buffers(), buffers):
        same(found, expected)


def flip(file):
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def cut_off(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def remove(file):
    file.unlink()


@two_ranks
@pytest.mark.parametrize(
    "damage, file, error, text",
    [
        (flip, "__1_0.distcp", checkpoint.Damaged, "__1_0.distcp' is not what was written"),
        (flip, ".metadata", checkpoint.Damaged, ".metadata' is not what was written"),
        (cut_off, "__0_0.distcp", checkpoint.Damaged, "__0_0.distcp' is not what was written"),
        (remove, "__1_0.distcp", checkpoint.Damaged, "__1_0.distcp"),
        (remove, "SHA256SUMS", checkpoint.Damaged, "SHA256SUMS' is missing"),
        (cut_off, "SHA256SUMS", checkpoint.Damaged, ".distcp' is not what was written"),
        (remove, ".metadata", FileNotFoundError, "no complete checkpoint"),
    ],
)
@on_every_rank
def test_a_damaged_checkpoint_is_refused(ranks, damage, file, error, text, tmp_path):
    """One wrong bit or one missing file is enough. The message names the file. An older good checkpoint loads."""
    engine = build(ZeRO3Engine)
    train(engine, range(1))
    good = state_of(engine)
    checkpoint.save(engine, tmp_path / "good")
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "good" / "000001", tmp_path / "bad")
        damage(tmp_path / "bad" / file)
    dist.barrier()
    train(engine, range(1, 2))
    is_refused(engine, tmp_path / "bad", error, text)
    checkpoint.load(engine, tmp_path / "good")
    same_states(state_of(engine), good)


@two_ranks
@on_every_rank
def test_the_newest_good_checkpoint_is_loaded(ranks, tmp_path):
    """Damaged ones are skipped, with a warning by rank 0. If none is good it is an error; without any, None."""
    engine = build(ZeRO2Engine)
    assert checkpoint.load_newest(engine, tmp_path) is None
    states = []
    for step in range(3):
        train(engine, range(step, step + 1))
        states.append(state_of(engine))
        checkpoint.save(engine, tmp_path, step=step)
    if dist.get_rank() == 0:
        flip(tmp_path / "000003" / "__1_0.distcp")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoint.load_newest(engine, tmp_path) == (tmp_path / "000002", {"step": 1})
    messages = [str(warning.message) for warning in caught if "not loaded" in str(warning.message)]
    assert len(messages) == (dist.get_rank() == 0) and all("000003/__1_0.distcp" in message for message in messages)
    same_states(state_of(engine), states[1])
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in ("000001", "000002"):
            remove(tmp_path / folder / "SHA256SUMS")
    dist.barrier()
    raised_on_every_rank(RuntimeError, "is good", checkpoint.load_newest, engine, tmp_path)
    same_states(state_of(engine), states[1])


@two_ranks
@on_every_rank
def test_a_model_on_meta_does_not_load_a_damaged_folder(ranks, tmp_path):
    checkpoint.save(build(ZeRO1Engine), tmp_path)
    if dist.get_rank() == 0:
        flip(tmp_path / "000001" / "__1_0.distcp")
    dist.barrier()
    with torch.device("meta"):
        model = Zoo().double()
    raised_on_every_rank(
        checkpoint.Damaged,
        "000001",
        ZeRO3Engine,
        model,
        ADAMW(groups_of(model)),
        state_dict=tmp_path,
        init_fn=fill,
    )


@two_ranks
@on_every_rank
def test_a_value_that_runs_code_is_refused(ranks, tmp_path):
    """A learning rate that calls a function when it is unpickled. torch's own reader calls it; ours does not.

    That a list of contents calls no function is tested in test_checkpoint_files.py.
    """
    engine = build(ZeRO2Engine)
    if dist.get_rank() == 0:
        model, optimizer = torch_run()
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        state["optim"]["param_groups"][0]["lr"] = Runs(tmp_path / "ran")
        dcp.save(state, checkpoint_id=tmp_path / "evil", no_dist=True)
        (tmp_path / "ran").unlink(missing_ok=True)
    dist.barrier()
    is_refused(engine, tmp_path / "evil", checkpoint.Unsafe, "tensors and plain values")
    assert not (tmp_path / "ran").exists()


def with_another_shape(model):
    """The same number of elements under the same name."""
    model.mix = nn.Parameter(torch.zeros(5, 3, 5, dtype=torch.float64))
    return groups_of(model)


def one_group(model):
    return [{"params": list(model.parameters())}]


def without_mix(model):
    first, second = groups_of(model)
    first["params"] = [param for param in first["params"] if param is not model.mix]
    second["params"].append(model.mix)
    return [first, second]


@two_ranks
@pytest.mark.parametrize(
    "there, here, text",
    [
        ({"odd": False}, {}, "missing 'scale', 'empty'"),
        ({}, {"odd": False}, "has a different model: unexpected '"),  # DCP would load the values that fit
        ({"dtype": torch.float32}, {}, "torch.float32 of shape"),
        ({"groups": with_another_shape}, {}, "'mix' is torch.float64 of shape (5, 3, 5)"),
        ({"groups": one_group}, {}, "Group 0 here differs from the closest group there: only"),
        ({"groups": without_mix}, {}, "Group 0 here differs from the closest group there: only here 'mix'. Build"),
        ({"make_optimizer": OPTIMIZERS["adam"]}, {}, "is from Adam, but the optimizer here is AdamW"),
    ],
)
@on_every_rank
def test_another_run_is_refused(ranks, there, here, text, tmp_path):
    """A checkpoint of a different model or optimizer, although some values would fit."""
    checkpoint.save(build(ZeRO3Engine, **there), tmp_path)
    is_refused(build(ZeRO2Engine, **here), tmp_path, ValueError, text)


@two_ranks
@on_every_rank
def test_what_torch_has_saved_is_refused_where_it_does_not_fit(ranks, tmp_path):
    """Weights without an optimizer, a different optimizer, and numbers in place of names, which DDP scripts save."""
    if dist.get_rank() == 0:
        model, optimizer = torch_run()
        train_on_rank_0s_batches((model, optimizer), range(1))
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "plain.pt")
        torch_save_to_dcp(tmp_path / "plain.pt", tmp_path / "numbers")
        dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "weights", no_dist=True)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "model", no_dist=True)
        torch_save((model, OPTIMIZERS["adam"](groups_of(model))), tmp_path / "adam")
    dist.barrier()
    engine = build(ZeRO2Engine)
    for folder, text in (
        ("numbers", "has numbers in place of parameter names"),
        ("weights", "has a different model: missing"),
        ("model", "the optimizer state in "),
        ("adam", "is not from AdamW"),  # DCP does not save the class: Adam and AdamW differ in one option
    ):
        is_refused(engine, tmp_path / folder, ValueError, text)


@two_ranks
@on_every_rank
def test_a_module_that_refuses_its_extra_state_stops_the_load(ranks, tmp_path):
    """`set_extra_state` is the module's own code. If it raises an error on one rank, no rank changes."""
    engine = build(ZeRO2Engine)
    checkpoint.save(engine, tmp_path)
    train(engine, range(2))
    if dist.get_rank() == 1:
        accept = engine.model.set_extra_state

        def refuse(state):
            if state["steps"] == 0:
                raise KeyError("no such step")
            accept(state)

        engine.model.set_extra_state = refuse
    is_refused(engine, tmp_path, KeyError, "rank 1: no such step")
    assert engine.model.seen["steps"] == 2


@two_ranks
@on_every_rank
def test_loading_in_inference_mode_is_refused(ranks, tmp_path):
    """Tensors that are made there could not be trained."""
    engine = build(ZeRO2Engine)
    checkpoint.save(engine, tmp_path)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="load outside"):
        checkpoint.load(engine, tmp_path)
    train(engine, range(1))


NOT_PLAIN = [len.__call__, numpy.zeros(2), {"a": [Runs(os.devnull)]}]


@two_ranks
@on_every_rank
def test_what_could_not_be_loaded_is_not_saved(ranks, tmp_path):
    """A function, an array or an object, in `extra` or in an option. The message has its name; no folder is made."""
    engine = build(ZeRO1Engine)
    folder = tmp_path / "run"
    for value in NOT_PLAIN:
        raised_on_every_rank(ValueError, "'what' cannot be saved", checkpoint.save, engine, folder, what=value)
    one_ranks = NOT_PLAIN[0] if dist.get_rank() == 1 else 1
    raised_on_every_rank(ValueError, "rank 1: 'what' cannot", checkpoint.save, engine, folder, what=one_ranks)
    engine.optimizer.param_groups[1]["note"] = NOT_PLAIN[0]
    raised_on_every_rank(ValueError, "'note' of parameter group 1", checkpoint.save, engine, folder)
    assert not folder.exists()


@two_ranks
@on_every_rank
def test_a_state_that_has_no_place_is_not_saved(ranks, tmp_path):
    """Optimizer state that belongs to no parameter, or whose parts on the ranks cannot be put together."""
    engine = build(ZeRO1Engine)
    train(engine, range(1))
    states = engine.optimizer.state
    piece = next(iter(states))
    states[piece]["rows"] = torch.zeros(2, 2)
    raised_on_every_rank(ValueError, "'rows' in the optimizer state of", checkpoint.save, engine, tmp_path / "run")
    del states[piece]["rows"]
    states["of all"] = {"steps": 1}
    raised_on_every_rank(ValueError, "'of all' belongs to no parameter", checkpoint.save, engine, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@two_ranks
@on_every_rank
def test_wrong_arguments_are_refused(ranks, tmp_path):
    """A `keep` that keeps nothing, and a folder that is a checkpoint itself or a file."""
    engine = build(ZeRO1Engine)
    path = checkpoint.save(engine, tmp_path / "run").path
    raised_on_every_rank(ValueError, "keep must be", checkpoint.save, engine, tmp_path / "run", keep=0)
    raised_on_every_rank(ValueError, "is a checkpoint itself", checkpoint.save, engine, path)
    raised_on_every_rank(FileExistsError, "SHA256SUMS", checkpoint.save, engine, path / "SHA256SUMS")
    raised_on_every_rank(FileNotFoundError, "no complete checkpoint", checkpoint.load, engine, tmp_path / "none")


@contextlib.contextmanager
def files_of_at_most(nbytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@two_ranks
@pytest.mark.parametrize("in_background, full", [(False, 0), (True, 1)])
@on_every_rank
def test_a_full_disk_of_one_rank_is_an_error_on_all(ranks, in_background, full, tmp_path):
    """The error names the rank, no files are left, and the earlier checkpoint and the next save are good."""
    engine = build(ZeRO1Engine)

    def save(**extra):
        if in_background:
            return checkpoint.async_save(engine, tmp_path, **extra).result()
        return checkpoint.save(engine, tmp_path, **extra)

    save(step=1)
    limit = files_of_at_most(2_000) if dist.get_rank() == full else contextlib.nullcontext()
    usage = SimpleNamespace(free=1_000 if dist.get_rank() == full else 10**12)
    with limit, warnings.catch_warnings(record=True, action="always") as warned:
        raised_on_every_rank(RuntimeError, f"rank {full}: OSError(27, 'File too large')). Earlier", save, step=2)
        text = f"is full: rank {full} has 0.0 MB to write, and 0.0 MB are free"
        with patch("shutil.disk_usage", Mock(return_value=usage)):
            raised_on_every_rank(RuntimeError, text, save, step=2)
        engine.saving and engine.saving.thread.submit(int).result()  # the thread warns after its future has its error
    assert [str(each.message) for each in warned if "was not saved" in str(each.message)] or not in_background
    dist.barrier()
    assert os.listdir(tmp_path) == ["000001"]
    assert checkpoint.load(engine, tmp_path) == {"step": 1}
    save(step=3)
    assert checkpoint.load(engine, tmp_path) == {"step": 3}


@two_ranks
@on_every_rank
def test_a_save_by_one_rank_names_its_cause(ranks, tmp_path):
    """The others never call it. The error after the group's timeout says so, and has torch's own error in it."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    engine = build(ZeRO2Engine, group=group)
    text = "All ranks of the engine must call this together, and not only rank 0"
    if dist.get_rank() == 0:
        raised_on_every_rank(RuntimeError, text, checkpoint.save, engine, tmp_path)
        raised_on_every_rank(RuntimeError, text, engine.full_state_dict)
    dist.barrier()


def no_space(*_):
    raise OSError(28, "No space left on device")


@two_ranks
@pytest.mark.parametrize(
    "function, error",
    [(f"{folders.__name__}.sync_folder", RuntimeError), (f"{metadata.__name__}.rebuild", checkpoint.Damaged)],
)
@on_every_rank
def test_a_checkpoint_that_cannot_be_completed_is_deleted(ranks, function, error, tmp_path):
    """If rank 0 fails at the end, or cannot read the new checkpoint, every rank raises an error."""
    engine = build(ZeRO1Engine)
    with patch(function, no_space):
        raised_on_every_rank(error, "rank 0: ", checkpoint.save, engine, tmp_path)
    dist.barrier()
    assert os.listdir(tmp_path) == []


@two_ranks
@on_every_rank
def test_tensor_parallelism_is_refused(ranks, tmp_path):
    """The ranks of one data dimension have only one part of each matrix, so a checkpoint would lack the others."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(seeded(lambda: nn.Linear(4, 4)), mesh["tensor"], ColwiseParallel())
    engine = ZeRO2Engine(model, ADAMW(model.parameters()), group=mesh["data"])
    for function in (checkpoint.save, checkpoint.async_save, checkpoint.load):
        raised_on_every_rank(ValueError, "tensor parallelism has split this model", function, engine, tmp_path)

"""Weights, pieces, groups and modules that are changed past the engine: right as in plain PyTorch, or refused.

An engine of ours refuses in the words that are given here. Another one may train on, and is compared with plain
PyTorch.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim.swa_utils import get_ema_multi_avg_fn

from harness.engine import checkpoint
from harness.engine.state import swapped
from harness.properties.fixtures import OddModel, TiedAcross, all_params, own_tokens, pieces_of, seeded
from harness.properties.misuse import Acting
from harness.properties.precision import of_tokens
from harness.properties.property import ask, ask_each, ask_thorough, holds, only, refused, same, stages_hold
from harness.properties.training import EXACT, Pair
from harness.run.shared_folder import shared_folder

OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64}  # sums that plain PyTorch makes to the bit


def refused_or_right(pair: Pair, right: bool, act: Callable, *words: str) -> None:
    """`act(model, optimizer)` and a step after it: an engine of ours says `words`.

    Another one, or ours where that is `right`, trains on as plain PyTorch does.
    """
    if pair.engine.foreign or right:
        for side in pair.both:
            act(*side)
        pair.alike()
        return
    with refused(*words):
        act(pair.trained.model, pair.trained.optimizer)
        pair.step_alone()
    pair.trained.zero_grad()


# Weights.


@torch.no_grad()
def clamp(model, _):
    model.head.weight.clamp_(-0.1, 0.1)


def clamp_data(model, _):
    model.head.weight.data.clamp_(-0.1, 0.1)


def fill_a_part(model, _):
    model.head.weight.data.view(-1)[3:9].fill_(0.25)


def initialize(model, _):
    nn.init.constant_(model.head.weight, 0.1)


def load(model, _):
    model.load_state_dict(seeded(OddModel, seed=8, dtype=None).state_dict())


def load_a_part(model, _):
    model.head.load_state_dict(nn.Linear(5, 3).state_dict())


@holds(
    "misuse",
    *ask_each("write", (clamp, clamp_data)),
    *ask_each("write", (fill_a_part, initialize, load), ("zero1", "zero2")),
    only(("zero1", "zero2"), write=clamp_data, **OFFLOAD),
    *ask_each("write", (fill_a_part, load_a_part), ("zero1", "zero2"), **LOW),
    *ask_each("write", (clamp, initialize, load), asks=ask_thorough, **OFFLOAD),
    *ask_each("write", (clamp, initialize, load), asks=ask_thorough, **LOW),
)
def what_is_written_into_weights_counts_or_is_refused(engine, write, **options):
    """Weights that are written between two steps count, as in plain PyTorch; where they would be lost it is said.

    They would be where shards have memory of their own: in ZeRO-3, in mixed precision and in offload.
    """
    pair = Pair(engine, OddModel, **options)
    pair.train(1)
    before, kept = pair.trained.full_state_dict(), not options and engine.like != "zero3"
    name = "load" if write in (load, load_a_part) else "head.weight"
    refused_or_right(pair, kept, write, name, "full_state_dict(")
    if not (kept or engine.foreign):
        same("the weights after the refusal", pair.trained.full_state_dict(), before)
        pair.step_alone()  # said once; from here on the shards count again


@stages_hold(
    "misuse",
    ask(write=clamp, **OFFLOAD),
    ask(("zero1", "zero2"), write=clamp_data, **OFFLOAD),
    ask_thorough(write=clamp_data, **LOW),
)
def what_would_be_lost_is_not_given_out(engine, write, **options):
    """Weights that were written past the shards, and no forward since: nobody gets or saves the old ones in silence."""
    pair = Pair(engine, OddModel, **options)
    trained = pair.trained
    with shared_folder() as folder:
        save = partial(checkpoint.save, trained, folder)
        for take in (trained.full_state_dict, save, trained.step, trained.close):
            pair.alone(0).backward()
            with refused("'head.weight'", error=RuntimeError):
                write(trained.model, None)
                take()
            trained.zero_grad()


@stages_hold("misuse", only(("zero1", "zero2")))
def moved_weights_are_not_given_out_as_they_were(engine):
    """`param.data = ...` and no forward since: the whole state and a save refuse once, and then give the shards."""
    pair = Pair(engine, OddModel)
    pair.train(1)
    state = pair.trained.full_state_dict()
    weight = pair.trained.model.head.weight
    weight.data = weight.detach() + 1
    with refused("'head.weight'", "moved out of the engine's buffer", error=RuntimeError):
        pair.trained.full_state_dict()
    same("the shards after the refusal", pair.trained.full_state_dict(), state)


def by_data(block):
    block.up.weight.data.clamp_(-0.2, 0.2)


def under_no_grad(block):
    block.up.weight.div_(block.up.weight.norm())


@holds(
    "misuse",
    *ask_each("write", (by_data, under_no_grad)),
    ask_thorough("zero3", write=by_data, prefetch=0, reshard_after_forward=False),
    *[ask_thorough(write=by_data, **options) for options in (LOW, OFFLOAD)],
)
def a_forward_that_writes_into_its_weights_counts_or_is_refused(engine, write, **options):
    """A forward that clamps or scales its own weights: as in plain PyTorch, and where it would be lost it is said."""
    pair = Pair(engine, partial(Acting, write), **options)
    right = write is by_data and not options and engine.like != "zero3"
    refused_or_right(pair, right, lambda *_: None, "'blocks.1.up.weight'", "was written to")


@stages_hold("misuse", ask(), ask_thorough(**LOW), ask_thorough(**OFFLOAD))
def weights_that_are_loaded_between_forward_and_backward_are_an_error(engine, **options):
    """A backward of a forward with other weights raises, as in plain PyTorch; the next step is right."""
    pair = Pair(engine, OddModel, **options)
    pair.train(1)
    with shared_folder() as folder:
        state = pair.trained.full_state_dict()
        checkpoint.save(pair.trained, folder)
        for loader in (
            partial(pair.trained.load_full_state_dict, state),
            partial(checkpoint.load, pair.trained, folder),
        ):
            loss = pair.alone(0)
            loader()
            with refused("version", error=RuntimeError):
                loss.backward()
            pair.trained.zero_grad()
    pair.alike(1)


# The optimizer and its pieces.


class Averaging(torch.optim.SGD):
    """Schedule-free in its form: `eval()` puts the averages into the weights, `train()` puts back what is trained."""

    @torch.no_grad()
    def step(self):
        super().step()
        for param in all_params(self):
            mean = self.state[param].setdefault("mean", param.clone())
            mean.lerp_(param, 0.25)

    @torch.no_grad()
    def eval(self):
        for param in all_params(self):
            kept, mean = param.clone(), self.state[param]["mean"]
            param.copy_(mean)
            mean.copy_(kept)

    train = eval  # it changes them back


@holds("misuse", ask(ranks=(2, 3), more_ranks=1))
def an_optimizer_that_swaps_its_weights_is_right(engine):
    """Optimizers with `eval()` and `train()`, as schedule-free ones: what they write is in use at once."""
    pair = Pair(engine, OddModel, lambda params: Averaging(params, lr=0.05))
    for step in range(3):
        pair.train(2)
        for model, optimizer in pair.both:
            optimizer.eval()
            model.eval()
        with torch.no_grad():
            tokens, _ = pair.batch(step, pair.rank)
            same("what the averages compute", pair.trained(tokens), pair.plain(tokens), pair.atol)
        pair.same_weights()
        for model, optimizer in pair.both:
            optimizer.train()
            model.train()
    pair.alike()


@torch.no_grad()
def decay(model, optimizer):
    for param in all_params(optimizer):
        param.mul_(0.9)


def decay_by_data(model, optimizer):
    for param in all_params(optimizer):
        param.data.mul_(0.9)


@holds(
    "misuse",
    *ask_each("write", (decay, decay_by_data), ranks=(2, 3)),
    ask_thorough(write=decay, **LOW),
    ask_thorough(write=decay, **OFFLOAD),
)
def pieces_that_are_written_outside_a_step_count_or_are_refused(engine, write, **options):
    """Decay by hand between two steps: ZeRO-3 gathers it; in ZeRO-1 and -2 the other ranks would not have it."""
    pair = Pair(engine, TiedAcross, **options)  # nothing is frozen: DDP's optimizer is given all parameters
    pair.train(1)
    right = engine.like == "zero3"
    refused_or_right(pair, right, write, "outside of engine.step()")
    if not (right or engine.foreign):
        return
    pair.backward(0)  # between backward and step everybody may
    for side in pair.both:
        write(*side)
    pair.step()
    pair.same_weights()


def add_a_stranger(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})


def add_its_own(model, optimizer):
    optimizer.add_param_group({"params": [model.frozen.requires_grad_()]})


def append_a_group(model, optimizer):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [torch.ones(3, requires_grad=True)]})


def lengthen_a_group(model, optimizer):
    optimizer.param_groups[0]["params"].append(torch.ones(3, requires_grad=True))


def lose_a_parameter(model, optimizer):
    optimizer.param_groups[0]["params"].pop()


def empty_a_group(model, optimizer):
    optimizer.param_groups[0]["params"] = []


REGROUPS = (add_a_stranger, add_its_own, append_a_group, lengthen_a_group, lose_a_parameter, empty_a_group)


@stages_hold("misuse", *ask_each("regroup", REGROUPS))
def groups_that_change_after_the_build_are_refused(engine, regroup):
    """A parameter more or less in the optimizer's groups: each rank would train its own, or leave one out."""
    pair = Pair(engine, OddModel)
    pair.train(1)
    pair.alone(0).backward()
    with refused("the optimizer's groups", "param_groups="):
        regroup(pair.trained.model, pair.trained.optimizer)
        pair.trained.step()


@stages_hold("values", ask(), ask(**LOW), ask_thorough(**OFFLOAD))
def averages_of_the_shards_precision_can_be_kept_and_used(engine, **options):
    """An average of each piece is kept by this rank, put in place for an evaluation or a save, and taken out again."""
    pair, update = Pair(engine, OddModel, loss=of_tokens, **options), get_ema_multi_avg_fn(0.9)
    pieces, params = pieces_of(pair.trained), all_params(pair.optimizer)
    averages, expected = ([each.detach().clone() for each in side] for side in (pieces, params))
    for _ in range(3):
        pair.train(1)
        with torch.no_grad():
            update(averages, pieces, None)
            update(expected, params, None)
    plain, (tokens, _) = copy.deepcopy(pair.plain), own_tokens(0)
    for param, value in zip((param for param in plain.parameters() if param.requires_grad), expected):
        param.data = value
    with swapped(pair.trained, averages), torch.no_grad():
        same("the weights", pair.trained.full_state_dict(), plain.state_dict(), EXACT)
        # Offload computes in the dtype of the shards, mixed precision in another one.
        same("what the averages compute", pair.trained(tokens), plain(tokens), 0.05 if options == LOW else EXACT)
    pair.same_weights()
    with refused("a value for each piece", error=ValueError):
        swapped(pair.trained, averages[:-1]).__enter__()
    same("an average's dtype", {average.dtype for average in averages}, {torch.float64})
    pair.alike(1)


# Modules.


class Wrapped(nn.Module):
    """As LoRA's: the layer as it was, and another one beside it."""

    def __init__(self, inner: nn.Module, more: bool):
        super().__init__()
        self.inner = inner
        self.more = nn.Linear(5, 3).double() if more else None

    def forward(self, x):
        return self.inner(x) + (self.more(x) if self.more else 0)


def another_head(model, _):
    model.head = seeded(lambda: nn.Linear(5, 3), 4)


def another_head_inside(model, _):
    model.blocks[1].up = seeded(lambda: nn.Linear(5, 9), 4)


def a_lora(model, _):
    model.head = Wrapped(model.head, more=True)


def blocks_of_another_model(model, _):
    model.blocks = seeded(OddModel, 4).blocks


def without_a_head(model, _):
    model.head = nn.Flatten()


SWAPS = {  # and whose parameter is missed or new
    another_head: "'head.weight'",
    another_head_inside: "'blocks.1.up.weight'",
    a_lora: "'head.more.weight'",
    blocks_of_another_model: "'blocks.0.up.weight'",
    without_a_head: "'head.weight'",
}


@stages_hold("misuse", *ask_each("swap", SWAPS, more_ranks=()))
def a_child_that_is_swapped_is_refused(engine, swap):
    """Another module in the place of one, also with as many parameters: the engine would train what nobody uses."""
    pair = Pair(engine, OddModel)
    pair.train(1)
    refused_or_right(pair, False, swap, SWAPS[swap], "after the engine was built")


@holds("misuse")
def a_wrapper_around_a_child_is_no_swap(engine):
    """Modules may be wrapped after the build, as long as parameters are the same: training goes on."""
    pair = Pair(engine, OddModel)
    pair.train(1)
    for model, _ in pair.both:
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
        model.head = Wrapped(model.head, more=False)
    pair.train(2)
    expected = pair.plain.state_dict()  # under other names
    found = dict(zip(expected, pair.trained.full_state_dict().values(), strict=True))
    same("the weights", found, expected, pair.atol)

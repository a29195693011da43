"""What would train wrong without a word is refused, with what it is about and the way out; and what is right passes.

After a refusal the engine goes on, and is compared with plain PyTorch then.
"""

import contextlib
import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import get_ema_multi_avg_fn

from zerolab.engine import checkpoint
from zerolab.engine.all_or_none import all_or_none
from zerolab.engine.state import swapped
from zerolab.properties.fixtures import (
    ADAMW,
    EXACT,
    EXACT_LOW,
    OFFLOAD,
    SGD,
    Averaging,
    OddBlock,
    OddModel,
    Pair,
    TiedAcross,
    all_params,
    alone,
    odd,
    own_tokens,
    pieces_of,
    seeded,
    through_a_file,
)
from zerolab.properties.property import ask, ask_each, ask_thorough, holds, only, refused, same, stages_hold
from zerolab.properties.shared_folder import shared_folder

# The standard loop.


# (who takes gradients from the model, or steps past the engine; words of the error)
TAKERS = (
    (lambda e: e.optimizer.step(), ("engine.step()",)),
    (lambda e: clip_grad_norm_(e.parameters(), 1.0), ("engine.clip_grad_norm_(", "'embedding.weight'")),
    (lambda e: clip_grad_value_(e.model.head.weight, 1.0), ("'head.weight'",)),
    (lambda e: clip_grad_norm_(pieces_of(e), 1.0), ("engine.clip_grad_norm_(",)),
    (lambda e: clip_grad_value_(pieces_of(e), 1.0), ("engine.clip_grad_value_(",)),
    (lambda e: e.model.zero_grad(), ("engine.zero_grad()",)),
    (lambda e: SGD(e.parameters()).step(), ("engine.step()", "'embedding.weight'")),
)


@holds("misuse")
def who_takes_gradients_past_the_engine_is_refused(engine):
    """Torch's clipping, `zero_grad` and `step` past the engine, between backward and step, name the engine's own."""
    pair = Pair(engine)
    for step, (taker, words) in enumerate(TAKERS):
        pair.backward(step)
        with refused(*words, error=Exception):
            taker(pair.trained)
        pair.step()
        pair.same_weights()


def with_torchs_scaler(pair):
    """It would skip a step on one rank alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(pair.alone()).backward()
    scaler.step(pair.trained.optimizer)


def called_with_other_weights(pair):
    others = {name: torch.zeros_like(value) for name, value in pair.plain.named_parameters()}
    torch.func.functional_call(pair.model, others, pair.own_batch(0)[:1])


def an_optimizer_in_a_hook(pair):
    """As in recipes for small memory: it would part the ranks."""
    pair.model.head.weight.register_post_accumulate_grad_hook(lambda p: SGD([p]).step())
    pair.step_alone()


def acting(act) -> OddModel:
    """A unit that in its forward does something to a layer's weights first, as an RNN's flatten_parameters() does."""
    model = OddModel()

    @torch.no_grad()
    def first(layer, inputs):
        act(layer)

    model.blocks[1].up.register_forward_pre_hook(first)
    return model


def under_func(pair):
    """Where ZeRO-3 cannot see what autograd saves."""
    tokens, _ = pair.own_batch(0)
    torch.func.vmap(lambda _: pair.trained(tokens))(torch.zeros(2))


LOOPS = {  # and words of the error
    under_func: ("torch.func", "vmap"),
    with_torchs_scaler: ("engine.gradients", "GradScaler"),
    called_with_other_weights: (".weight'", "functional_call"),
    an_optimizer_in_a_hook: ("'head.weight'",),
}


@stages_hold(
    "misuse",
    ask("zero1", act=with_torchs_scaler),
    ask("zero2", act=an_optimizer_in_a_hook),
    ask("zero3", act=called_with_other_weights),
    only("zero3", act=under_func),
)
def loops_that_would_train_wrong_are_refused(engine, act):
    """What torch's loops may do and an engine cannot follow is an error that says so; training goes on after it."""
    pair = Pair(engine)
    with refused(*LOOPS[act]):
        act(pair)
    pair.trained.zero_grad()
    if act is not an_optimizer_in_a_hook:  # the model itself is of no use then
        pair.alike()


# The model is moved or changed after the build.


class Pictures(OddModel):
    """With a weight of four dimensions, whose memory format can be another."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Parameter(torch.randn(5, 2, 2, 2))

    def forward(self, tokens):
        return super().forward(tokens) + self.picture.mean()


class Wrapped(nn.Module):
    """As LoRA's: the layer as it was, and another one beside it."""

    def __init__(self, inner: nn.Module, more: nn.Module | None = None):
        super().__init__()
        self.inner, self.more = inner, more

    def forward(self, x):
        return self.inner(x) + (self.more(x) if self.more else 0)


def zeros():
    return torch.zeros(3, 5, dtype=torch.float64)


# (what is done to the model, words of the error): after `MOVES` the shards can still be asked for.
AFTER = "after the engine was built"
MOVES = {
    "float": (lambda model: model.float(), ("'",)),
    "there and back": (lambda model: model.float().double(), ("'",)),
    "channels_last": (lambda model: model.to(memory_format=torch.channels_last), ("'picture'",)),
    "data": (lambda model: setattr(model.head.weight, "data", zeros()), ("'",)),
    "frozen": (lambda model: model.head.bias.requires_grad_(False), ("'head.bias'", "full_state_dict")),
    "thawed": (lambda model: model.frozen.requires_grad_(True), ("'frozen'", "find_unused=True")),
    "a new module": (lambda model: model.blocks.append(OddBlock(7).double()),
                     ("'blocks.3.up.weight'", AFTER)),
}  # fmt: skip
CHANGES = {
    "setattr": (lambda model: setattr(model.head, "weight", nn.Parameter(zeros())), ("'",)),
    "delattr": (lambda model: delattr(model.head, "bias"), ("'head.bias'",)),
    "None": (lambda model: setattr(model.head, "bias", None), ("'head.bias'",)),
    "weight_norm": (lambda model: nn.utils.parametrizations.weight_norm(model.head), ("arameter",)),
    "assign": (lambda model: model.load_state_dict(seeded(Pictures).state_dict(), assign=True), ("'",)),
}
# Another module in the place of one, also with as many parameters: the engine would train what nobody uses.
SWAPS = {
    "another head": (lambda model: setattr(model, "head", seeded(lambda: nn.Linear(5, 3), 4)),
                     ("'head.weight'", AFTER)),
    "another layer": (lambda model: setattr(model.blocks[1], "up", seeded(lambda: nn.Linear(5, 9), 4)),
                      ("'blocks.1.up.weight'", AFTER)),
    "a LoRA": (lambda model: setattr(model, "head", Wrapped(model.head, nn.Linear(5, 3).double())),
               ("'head.more.weight'", AFTER)),
    "blocks of another model": (lambda model: setattr(model, "blocks", seeded(OddModel, 4).blocks),
                                ("'blocks.0.up.weight'", AFTER)),
    "no head": (lambda model: setattr(model, "head", nn.Flatten()), ("'head.weight'", AFTER)),
}  # fmt: skip


@stages_hold(
    "misuse",
    *ask_each("change", ("float", "channels_last", "thawed", "delattr", "weight_norm"), "zero1"),
    *ask_each("change", ("there and back", "data", "a new module", "None", "assign"), "zero2"),
    *ask_each("change", ("frozen", "setattr"), "zero3"),
    *ask_each("change", SWAPS, more_ranks=()),
    only(("zero1", "zero2"), change="data", use=Pair.same_weights),
)
def a_model_that_changes_after_the_build_is_refused(engine, change, use=Pair.step_alone):
    """A model that is moved, or whose parameters are others, is refused at once or when it is used; the shards stay.

    The whole state is refused once: weights in use and shards are two. Then it is the shards'.
    """
    pair = Pair(engine, Pictures)
    pair.alike()
    act, words = (MOVES | CHANGES | SWAPS)[change]
    own = () if change == "weight_norm" else ("engine",)  # torch's words are of a Parameter, ours of a parameter
    if use is Pair.same_weights:
        own = "'head.weight'", "moved out of the engine's buffer"
    before = pair.trained.full_state_dict()
    with refused(*words, *own, error=(RuntimeError, TypeError, KeyError)) as said:
        act(pair.model)
        use(pair)
    if change in MOVES:
        same("whether one that did not change is named", "'head.weight'" in said[0] and words != ("'",), False)
        state = pair.trained.full_state_dict()
        same("the shards after the refusal", {name: state[name] for name in before}, before)
        for name, param in pair.plain.named_parameters():
            same(f"{name} after the refusal", state[name], param, 1e-12)


def there_and_back(layer):
    old, layer.weight.data = layer.weight.data, layer.weight.data.clone()
    layer.weight.data = old


MOVES_OF_FORWARD = {
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "set_": lambda layer: layer.weight.set_(layer.weight.clone()),
    "half and double": lambda layer: layer.half().double(),
}


@holds(
    "misuse",
    ask("zero1", how="data"),
    ask("zero2", how="set_"),
    ask("zero3", how="half and double"),
    *ask_each("how", MOVES_OF_FORWARD, "zero3", asks=ask_thorough, reshard_after_forward=False),
)
def a_forward_that_moves_its_weights_is_refused(engine, how, **options):
    """A forward that gives its weights other memory: the first step trains right or is refused, later ones are."""
    pair, shards = Pair(engine, partial(acting, MOVES_OF_FORWARD[how]), **options), []
    for step in range(3):
        again = refused("'blocks.1.up.weight'", "moved out of the engine's buffer")
        with again if step else contextlib.suppress(RuntimeError):
            pair.step_alone()
        pair.trained.zero_grad()
        with contextlib.suppress(RuntimeError):  # it may say once that weights were moved
            pair.trained.full_state_dict()
        shards.append(pair.trained.full_state_dict())
    same("the weights after a refused step", shards[1], shards[0])  # no step after the first one counts
    model = pair.model
    pair.trained.close()
    broken = [name for name, param in model.named_parameters() if param.isnan().any()]
    same("parameters with NaN after close()", broken, [])


@holds("misuse", ask(), ask_thorough("zero3", reshard_after_forward=False))
def what_changes_nothing_is_no_misuse(engine, **options):
    """Moves to where the model is, modes and flags as they are, a look: training goes on."""
    pair = Pair(engine, partial(acting, there_and_back), **options)
    pair.alike()
    model = pair.model
    for move in (
        lambda: model.type(engine.dtype),
        lambda: model.cpu(),
        lambda: model.to("cpu", engine.dtype),
        lambda: model.to(torch.zeros(1, dtype=engine.dtype)),
        lambda: model.train().eval().train(),
        lambda: model.requires_grad_(True).frozen.requires_grad_(False),
        lambda: model.apply(lambda module: None),
        lambda: repr(model),
    ):
        move()
        pair.alike(1)


# Optimizer state.


@stages_hold("misuse")
def optimizer_state_that_does_not_fit_is_refused(engine):
    """State of other ranks, another stage or layout, or of no engine is refused; what fits goes on as the old one."""
    pair = Pair(engine, OddModel, ADAMW)
    pair.alike()
    everyone = all_or_none(pair.trained.optimizer.state_dict, None)
    for optimizer in (
        odd(engine, group=alone()).optimizer,
        odd(engine.another()).optimizer,
        engine(seeded(lambda: OddModel(blocks=2)), ADAMW).optimizer,
        pair.optimizer,
        None,
    ):
        state = optimizer.state_dict() if optimizer else everyone[pair.rank - 1]  # of the same shapes, perhaps
        with refused("optimizer's state", "zerolab.engine.checkpoint", error=ValueError):
            pair.trained.optimizer.load_state_dict(state)
        pair.alike(1)
    # Through a file into a new engine, which goes on as the old one would have.
    weights, state = pair.trained.full_state_dict(), through_a_file(pair.trained.optimizer.state_dict())
    pair.trained = engine(seeded(OddModel, seed=5), ADAMW)
    pair.trained.load_full_state_dict(weights)
    pair.trained.optimizer.load_state_dict(state)
    pair.alike(3)
    # Rank 0 has passed a state, the others none.
    state = pair.trained.full_state_dict()
    with refused("rank 1: ", "NoneType", error=TypeError):
        pair.trained.load_full_state_dict(None if pair.rank else state)
    pair.alike(1)


# What may be asked, and what users expect.


@holds("misuse")
def an_engine_is_like_its_model_and_says_where_not(engine):
    """Modes and lists of parameters, modules and buffers are the model's; what an engine has not is an error."""
    pair = Pair(engine)
    trained, model = pair.trained, pair.model
    assert trained.eval() is trained and not trained.training and not model.blocks[1].training
    assert trained.train() is trained and trained.training and model.blocks[1].training
    assert not trained.train(False).training
    for kind in ("parameters", "modules", "buffers"):
        named = list(getattr(model, f"named_{kind}")(prefix="x"))
        found = list(zip(getattr(trained, f"named_{kind}")(prefix="x"), getattr(trained, kind)(), strict=True))
        assert len(found) == len(named) > 0, kind
        for (name, expected), ((own, first), second) in zip(named, found):
            assert own == name and first is second is expected, name
    for name in ("state_dict", "cuda", "backward", "blocks"):
        with refused(repr(name), error=AttributeError):
            getattr(trained, name)
    pair.alike()


# Weights, pieces, groups and modules that are changed past the engine. Ours refuse, others are compared with torch.


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
        act(pair.model, pair.trained.optimizer)
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
    ask(write=clamp, **OFFLOAD),
    only(("zero1", "zero2"), write=clamp_data, **OFFLOAD),
    *ask_each("write", (fill_a_part, load_a_part), ("zero1", "zero2"), **EXACT_LOW),
    *ask_each("write", (initialize, load), asks=ask_thorough, **OFFLOAD),
    *ask_each("write", (clamp, clamp_data, initialize, load), asks=ask_thorough, **EXACT_LOW),
)
def what_is_written_into_weights_counts_or_is_refused(engine, write, **options):
    """Weights that are written between two steps count, as in plain PyTorch; where they would be lost it is said.

    They would be where shards have memory of their own: in ZeRO-3, in mixed precision and in offload. There nobody
    gets or saves the old ones in silence, until they are loaded.
    """
    pair = Pair(engine, **options)
    pair.train(1)
    trained, kept = pair.trained, not options and engine.like != "zero3"
    before = trained.full_state_dict()
    name = "load" if write in (load, load_a_part) else "head.weight"
    refused_or_right(pair, kept, write, name, "full_state_dict(")
    if kept or engine.foreign:
        return
    if engine.like != "zero3":  # whole weights are not gathered before the next step, so they are still wrong
        with refused("full_state_dict("):
            pair.alone(0)
        trained.load_full_state_dict(before)
    same("the weights after the refusal", trained.full_state_dict(), before)
    with shared_folder() as folder:
        save = partial(checkpoint.save, trained, folder)
        for take in (trained.full_state_dict, save, trained.step, trained.close, CLIPPED):
            pair.alone(0).backward()
            if take is CLIPPED:  # all has been looked at once, before the write
                trained.clip_grad_norm_(1.0)
                take = trained.step
            with refused("'head.weight'" if write in (clamp, clamp_data) else "head."):
                write(trained.model, None)
                take()
            trained.zero_grad()
            trained.load_full_state_dict(before)  # the way out


CLIPPED = "a step whose gradients were clipped"


def by_data(layer):
    layer.weight.data.clamp_(-0.2, 0.2)


def under_no_grad(layer):
    layer.weight.div_(layer.weight.norm())


@holds(
    "misuse",
    *ask_each("write", (by_data, under_no_grad)),
    ask_thorough("zero3", write=by_data, prefetch=0, reshard_after_forward=False),
    ask_thorough(write=by_data, **EXACT_LOW),
    ask_thorough(write=by_data, **OFFLOAD),
)
def a_forward_that_writes_into_its_weights_counts_or_is_refused(engine, write, **options):
    """A forward that clamps or scales its own weights: as in plain PyTorch, and where it would be lost it is said."""
    pair = Pair(engine, partial(acting, write), **options)
    right = write is by_data and not options and engine.like != "zero3"
    refused_or_right(pair, right, lambda *_: None, "'blocks.1.up.weight'", "was written to")
    if engine.like == "zero3":  # what was written is gone with the next gather
        pair.model.blocks[1].up._forward_pre_hooks.clear()
        pair.step_alone()


@stages_hold("misuse", ask(), ask_thorough(**EXACT_LOW), ask_thorough(**OFFLOAD))
def weights_that_are_loaded_between_forward_and_backward_are_an_error(engine, **options):
    """A backward of a forward before a load, or a step, raises as in plain PyTorch; the next step is right."""
    pair = Pair(engine, **options)
    pair.train(1)
    with shared_folder() as folder:
        state = pair.trained.full_state_dict()
        checkpoint.save(pair.trained, folder)
        for loader in (
            partial(pair.trained.load_full_state_dict, state),
            partial(checkpoint.load, pair.trained, folder),
            partial(pair.train, 1),
        ):
            loss = pair.alone(0)
            loader()
            with refused("version"):
                loss.backward()
            pair.trained.zero_grad()
    pair.alike(1)


# The optimizer and its pieces.


@holds("misuse", ask(ranks=(2, 3), more_ranks=1))
def an_optimizer_that_swaps_its_weights_is_right(engine):
    """Optimizers with `eval()` and `train()`, as schedule-free ones: what they write is in use at once."""
    pair = Pair(engine, OddModel, lambda params: Averaging(params, lr=0.05))
    for step in range(3):
        pair.train(2)
        for _, optimizer in pair.both:
            optimizer.eval()
        pair.evaluate("what the averages compute", step)
        pair.same_weights()
        for _, optimizer in pair.both:
            optimizer.train()
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
    ask_thorough(write=decay, **EXACT_LOW),
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
    pair = Pair(engine)
    pair.train(1)
    pair.alone(0).backward()
    with refused("the optimizer's groups", "param_groups="):
        regroup(pair.model, pair.trained.optimizer)
        pair.trained.step()


@stages_hold("values", ask(), ask(**EXACT_LOW), ask_thorough(**OFFLOAD))
def averages_of_the_shards_precision_can_be_kept_and_used(engine, **options):
    """An average of each piece is kept by this rank, put in place for an evaluation or a save, and taken out again."""
    pair, update = Pair(engine, **options), get_ema_multi_avg_fn(0.9)
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
        same("what the averages compute", pair.trained(tokens), plain(tokens), 0.05 if options == EXACT_LOW else EXACT)
    pair.same_weights()
    with refused("a value for each piece", error=ValueError):
        swapped(pair.trained, averages[:-1]).__enter__()
    same("an average's dtype", {average.dtype for average in averages}, {torch.float64})
    pair.alike(1)


@holds("misuse")
def a_wrapper_around_a_child_is_no_swap(engine):
    """Modules may be wrapped after the build, as long as parameters are the same: training goes on."""
    pair = Pair(engine)
    pair.train(1)
    for model, _ in pair.both:
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
        model.head = Wrapped(model.head)
    pair.train(2)
    expected = pair.plain.state_dict()  # under other names
    found = dict(zip(expected, pair.trained.full_state_dict().values(), strict=True))
    same("the weights", found, expected, pair.atol)

"""What would train wrong without a word is refused, with what it is about and the way out; and what is right passes.

After a refusal the engine goes on, and is compared with plain PyTorch then.
"""

import contextlib
import copy
import io
import pickle
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from harness.properties import parts
from harness.properties.property import STAGES, holds, in_turn, refused, same
from harness.properties.training import Pair

ADAMW, MOMENTUM, SGD = parts.ADAMW, parts.MOMENTUM, parts.SGD


# The standard loop.


# (who takes gradients from the model, or steps past the engine; words of the error)
TAKERS = (
    (lambda e: e.optimizer.step(), ("engine.step()",)),
    (lambda e: clip_grad_norm_(e.parameters(), 1.0), ("engine.clip_grad_norm_(", "'embedding.weight'")),
    (lambda e: clip_grad_value_(e.model.parameters(), 1.0), ("'embedding.weight'",)),
    (lambda e: clip_grad_norm_(parts.pieces_of(e), 1.0), ("engine.clip_grad_norm_(",)),
    (lambda e: clip_grad_value_(parts.pieces_of(e), 1.0), ("engine.clip_grad_value_(",)),
    (lambda e: clip_grad_norm_(e.model.head.weight, 1.0), ("engine.clip_grad_norm_(", "'head.weight'")),
    (lambda e: e.model.zero_grad(), ("engine.zero_grad()",)),
    (lambda e: e.model.head.zero_grad(), ("engine.zero_grad()", "'head.weight'")),
    (lambda e: SGD(e.parameters()).step(), ("engine.step()", "'embedding.weight'")),
    (lambda e: torch.optim.AdamW(e.parameters(), foreach=False).step(), ("engine.step()", "'embedding.weight'")),
    (lambda e: SGD(e.parameters()).zero_grad(), ("engine.zero_grad()", "'embedding.weight'")),
    (lambda e: e.step(lambda: 0.0), ("closure", "engine.step()")),
    (lambda e: e.clip_grad_norm_(-1.0), ("max_norm", "-1.0")),
    (lambda e: e.clip_grad_value_(float("nan")), ("clip_value", "nan")),
    (copy.copy, ("cannot be copied", "checkpoint.save")),
    (pickle.dumps, ("cannot be copied or pickled",)),
)


@holds("misuse", further_sizes=(3,))
def who_takes_gradients_past_the_engine_is_refused(engine):
    """Torch's clipping, `zero_grad` and `step` past the engine, between backward and step, name the engine's own."""
    pair = Pair(engine, parts.OddModel)
    for step, (taker, words) in enumerate(TAKERS):
        pair.backward(step)
        errors = (RuntimeError, TypeError, ValueError, AssertionError)
        refused(lambda taker=taker: taker(pair.trained), *words, error=errors, step=4)
        pair.step()
        pair.same_weights()


def with_torchs_scaler(pair):
    """It would skip a step on one rank alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(pair.alone()).backward()
    scaler.step(pair.trained.optimizer)


def backward_after_the_step(pair):
    """Of a forward before it: torch itself refuses gradients of weights that have changed since."""
    old = pair.alone()
    pair.train(1)
    old.backward()


def called_with_other_weights(pair):
    others = {name: torch.zeros_like(value) for name, value in pair.plain.named_parameters()}
    torch.func.functional_call(pair.trained.model, others, (parts.token_batch(0, pair.rank)[0],))


def an_optimizer_in_a_hook(pair):
    """As in recipes for small memory: it would part the ranks."""
    pair.trained.model.head.weight.register_post_accumulate_grad_hook(lambda p: SGD([p]).step())
    pair.step_alone()


class Looked(nn.Module):
    """A table that is looked up by a function whose gradient is sparse: no module tells before."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(11, 5)), nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(F.embedding(tokens, self.table, sparse=True).mean(1))


class Acting(parts.OddModel):
    """A unit whose forward first does something to its own weights, as an RNN's flatten_parameters() does."""

    class Block(parts.OddBlock):
        def forward(self, x):
            with torch.no_grad():
                self.act(self)
            return super().forward(x)

    def __init__(self, act):
        super().__init__()
        self.blocks[1] = self.Block(5, 9)
        self.blocks[1].act = act


def scaled(block):
    block.up.weight.div_(block.up.weight.norm())


LOOPS = {
    "torch's GradScaler": (parts.OddModel, with_torchs_scaler, ("engine.gradients", "GradScaler")),
    "a backward after the step": (parts.OddModel, backward_after_the_step, ("version",)),
    "functional_call": (parts.OddModel, called_with_other_weights, (".weight'", "functional_call")),
}
ENDS = {  # the model itself is of no use then
    "an optimizer in a hook": (parts.OddModel, an_optimizer_in_a_hook, ("'head.weight'",)),
    "a sparse gradient": (Looked, Pair.step_alone, ("'table'", "sparse=False")),
    "a forward that writes": (partial(Acting, scaled), Pair.step_alone, ("'blocks.1.up.weight'", "written to")),
}


@holds("misuse", engines=STAGES, further_sizes=(3,), cases=in_turn(what=LOOPS | ENDS))
def loops_that_would_train_wrong_are_refused(engine, what):
    """What torch's loops may do and an engine cannot follow is an error that says so; training goes on after it."""
    build, act, words = {**LOOPS, **ENDS}[what]
    pair = Pair(engine, build)
    refused(lambda: act(pair), *words, error=RuntimeError, step=None)
    pair.trained.zero_grad()
    if what in LOOPS:
        pair.alike()


# The model is moved or changed after the build.


class Pictures(parts.OddModel):
    """With a weight of four dimensions, whose memory format can be another."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Conv2d(2, 5, 2)

    def forward(self, tokens):
        picture = torch.ones(1, 2, 2, 2, dtype=torch.float64)
        return super().forward(tokens) + self.picture(picture).mean()


def zeros():
    return torch.zeros(3, 5, dtype=torch.float64)


# (what is done to the model, words of the error): after the first ones the shards can still be asked for.
MOVES = {
    "float": (lambda model: model.float(), ("'",)),
    "there and back": (lambda model: model.float().double(), ("'",)),
    "to a dtype": (lambda model: model.to(torch.bfloat16), ("'",)),
    "channels_last": (lambda model: model.to(memory_format=torch.channels_last), ("'picture.weight'",)),
    "data": (lambda model: setattr(model.head.weight, "data", zeros()), ("'",)),
    "frozen": (lambda model: model.head.bias.requires_grad_(False), ("'head.bias'", "full_state_dict")),
    "thawed": (lambda model: model.frozen.requires_grad_(True), ("'frozen'", "find_unused=True")),
    "a new module": (lambda model: model.blocks.append(parts.OddBlock(5, 7).double()),
                     ("'blocks.3.up.weight'", "after the engine was built")),
}  # fmt: skip
CHANGES = {
    "setattr": (lambda model: setattr(model.head, "weight", nn.Parameter(zeros())), ("'",)),
    "delattr": (lambda model: delattr(model.head, "bias"), ("'head.bias'",)),
    "None": (lambda model: setattr(model.head, "bias", None), ("'head.bias'",)),
    "another module": (lambda model: setattr(model, "head", nn.Linear(5, 3).double()), ("'",)),
    "weight_norm": (lambda model: nn.utils.parametrizations.weight_norm(model.head), ("'",)),
    "assign": (lambda model: model.load_state_dict(parts.seeded(Pictures).state_dict(), assign=True), ("'",)),
}


@holds("misuse", engines=STAGES, cases=in_turn(change=MOVES | CHANGES))
def a_model_that_changes_after_the_build_is_refused(engine, change):
    """A model that is moved, or whose parameters are others, is refused at once or in forward; the shards stay."""
    pair = Pair(engine, Pictures)
    pair.alike()
    act, words = {**MOVES, **CHANGES}[change]

    def go():
        act(pair.trained.model)
        pair.step_alone()

    said = refused(go, *words, "engine", error=(RuntimeError, TypeError, KeyError), step=1)
    same("whether one that did not change is named", "'head.weight'" in said and len(words) > 1, False)
    if change in MOVES:
        state = pair.trained.full_state_dict()
        for name, param in pair.plain.named_parameters():
            same(f"{name} after the refusal", state[name], param, 1e-12, step=5)


def there_and_back(block):
    old, block.up.weight.data = block.up.weight.data, block.up.weight.data.clone()
    block.up.weight.data = old


MOVES_OF_FORWARD = {
    "data": lambda block: setattr(block.up.weight, "data", block.up.weight.data.clone()),
    "set_": lambda block: block.up.weight.set_(block.up.weight.clone()),
    "half and double": lambda block: block.up.half().double(),
}


@holds("misuse", cases=in_turn(how=MOVES_OF_FORWARD),
       further_cases=tuple({"how": how, "reshard_after_forward": False, "on": ("zero3",)} for how in MOVES_OF_FORWARD)
       )  # fmt: skip
def a_forward_that_moves_its_weights_is_refused(engine, how, **options):
    """A forward that gives its weights other memory: the first step trains right or is refused, later ones are."""
    pair, shards = Pair(engine, lambda: Acting(MOVES_OF_FORWARD[how]), **options), []
    words = "'blocks.1.up.weight'", "moved out of the engine's buffer"
    for step in range(3):
        if step == 0:
            with contextlib.suppress(RuntimeError):
                pair.step_alone()
        else:
            refused(pair.step_alone, *words, error=RuntimeError, step=1)
        pair.trained.zero_grad()
        shards.append(pair.trained.full_state_dict())
    same("the weights after a refused step", shards[1], shards[0], step=4)  # no step after the first one counts
    model = pair.trained.model
    pair.trained.close()
    broken = [name for name, param in model.named_parameters() if param.isnan().any()]
    same("parameters with NaN after close()", broken, [])


def clamp(model):
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)


@holds("misuse", engines=STAGES)
def weights_may_be_written_only_where_it_counts(engine):
    """Weights may be clamped by hand between two steps in ZeRO-1 and -2; where it would be lost it is refused.

    So is what would be loaded past the shards.
    """
    pair = Pair(engine, parts.OddModel)
    words = "'head.weight'", "full_state_dict()"
    if engine.like == "zero3":  # there is nothing to write to
        refused(lambda: clamp(pair.trained.model), *words, error=RuntimeError)
        pair.alike()
    else:
        for step in range(2):
            for model, _ in pair.both:
                clamp(model)
            pair.backward(step)
            pair.step()
        pair.same_weights()
    low, batch = parts.seeded(parts.OddModel, dtype=torch.float32), parts.token_batch(0, pair.rank)
    mixed = engine(low, MOMENTUM, param_dtype=torch.bfloat16)
    for module, other in ((low, parts.OddModel()), (low.head, parts.OddModel().head)):
        refused(lambda m=module, o=other: m.load_state_dict(o.state_dict()), "load_full_state_dict")
    if engine.like != "zero3":
        clamp(low)
        refused(lambda: mixed.training_step(*batch, lambda *_: 0), *words, error=RuntimeError)
    # Said once; from here on the shards count again.
    mixed.training_step(*batch, parts.in_float32)


@holds("misuse", cases=({},), further_cases=({"reshard_after_forward": False, "on": ("zero3",)},))
def what_changes_nothing_is_no_misuse(engine, **options):
    """Moves to where the model is, modes and flags as they are, a look: training goes on."""
    pair = Pair(engine, lambda: Acting(there_and_back), **options)
    pair.alike()
    model = pair.trained.model
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


@holds("misuse", engines=STAGES, further_sizes=(3,))
def optimizer_state_that_does_not_fit_is_refused(engine):
    """State of other ranks, stage, layout or model, or of no engine: both sides are named; what fits goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    here = f"{engine.like.replace('zero', 'ZeRO')}, rank {rank} of {size}"
    other = engine.another()
    alone = [dist.new_group([each]) for each in range(size)][rank]

    def state_of(engine, build=parts.OddModel, **options):
        trained = engine(parts.seeded(build), ADAMW, **options)
        trained.training_step(*parts.token_batch(0, rank), F.cross_entropy)
        return trained.optimizer.state_dict()

    def plain_state(model, *batch):
        optimizer = ADAMW(model.parameters())
        model(*batch).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    def is_refused(trained, state, words):
        refused(lambda: trained.optimizer.load_state_dict(state), here, "harness.engine.checkpoint", words,
                error=ValueError)  # fmt: skip

    pair = Pair(engine, parts.OddModel, ADAMW)
    pair.alike()
    layout = {"units": []} if engine.like == "zero3" else {"bucket_mb": 0}
    for state, words in (
        (state_of(engine, group=alone), f"{here.split(',')[0]}, rank 0 of 1"),
        (state_of(other), f"{other.like.replace('zero', 'ZeRO')}, rank {rank} of {size}"),
        (state_of(engine, **layout), "other pieces"),
        (state_of(engine, lambda: parts.OddModel(blocks=2)), "other pieces"),
        (plain_state(parts.seeded(parts.OddModel), parts.token_batch(0, 0)[0]), "no engine"),
    ):
        is_refused(pair.trained, state, words)
        pair.alike(1)
    # One parameter, of which a rank has less than plain PyTorch: torch itself sees nothing wrong.
    one = partial(nn.Linear, 8, 8, bias=False)
    is_refused(engine(one(), ADAMW), plain_state(one(), torch.ones(8)), "no engine")
    # Through a file into a new engine, which goes on as the old one would have.
    weights, file = pair.trained.full_state_dict(), io.BytesIO()
    torch.save(pair.trained.optimizer.state_dict(), file)
    pair.trained = engine(parts.seeded(parts.OddModel, seed=5), ADAMW)
    pair.trained.load_full_state_dict(weights)
    file.seek(0)
    pair.trained.optimizer.load_state_dict(torch.load(file))
    pair.alike(3)
    state = pair.trained.full_state_dict()
    # Rank 0 has passed a state, the others none.
    words = "[1" if rank == 0 else "every rank"
    refused(lambda: pair.trained.load_full_state_dict(state if rank == 0 else None), words)
    pair.alike(1)


# What may be asked, and what users expect.


# (what a module has and an engine has not, a word of the error)
ATTRIBUTES = {
    "state_dict": "full_state_dict()",
    "load_state_dict": "load_full_state_dict",
    "cuda": "then build",
    "to": "then build",
    "half": "param_dtype",
    "requires_grad_": "before building",
    "backward": "loss.backward()",
    "blocks": "engine.model.blocks",
    "nonsense": "'nonsense'",
}


@holds("misuse")
def an_engine_is_like_its_model_and_says_where_not(engine):
    """Modes and lists of parameters, modules and buffers are the model's; what an engine has not says what to use."""
    pair = Pair(engine, parts.OddModel)
    trained, model = pair.trained, pair.trained.model
    assert trained.eval() is trained and not trained.training and not model.blocks[1].training
    assert trained.train() is trained and trained.training and model.blocks[1].training
    assert not trained.train(False).training
    for name in ("parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers"):
        ours, theirs = list(getattr(trained, name)()), list(getattr(model, name)())
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs):
            assert (a[0] == b[0] and a[1] is b[1]) if isinstance(a, tuple) else a is b, name
    assert [name for name, _ in trained.named_parameters(prefix="x")][0].startswith("x.")
    for name, word in ATTRIBUTES.items():
        refused(lambda name=name: getattr(trained, name), word, error=AttributeError)
    pair.alike()

"""What would train wrong without a word is refused, with what it is about and the way out; and what is right passes.

After a refusal the engine goes on, and is compared with plain PyTorch then.
"""

import contextlib
import io
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from harness.properties import fixtures
from harness.properties.property import STAGES, ask, ask_each, ask_thorough, holds, refused, same
from harness.properties.training import Pair

ADAMW, MOMENTUM, SGD = fixtures.ADAMW, fixtures.MOMENTUM, fixtures.SGD


# The standard loop.


# (who takes gradients from the model, or steps past the engine; words of the error)
TAKERS = (
    (lambda e: e.optimizer.step(), ("engine.step()",)),
    (lambda e: clip_grad_norm_(e.parameters(), 1.0), ("engine.clip_grad_norm_(", "'embedding.weight'")),
    (lambda e: clip_grad_value_(e.model.head.weight, 1.0), ("'head.weight'",)),
    (lambda e: clip_grad_norm_(fixtures.pieces_of(e), 1.0), ("engine.clip_grad_norm_(",)),
    (lambda e: clip_grad_value_(fixtures.pieces_of(e), 1.0), ("engine.clip_grad_value_(",)),
    (lambda e: e.model.zero_grad(), ("engine.zero_grad()",)),
    (lambda e: SGD(e.parameters()).step(), ("engine.step()", "'embedding.weight'")),
    (lambda e: e.step(lambda: 0.0), ()),
)


@holds("misuse")
def who_takes_gradients_past_the_engine_is_refused(engine):
    """Torch's clipping, `zero_grad` and `step` past the engine, between backward and step, name the engine's own."""
    pair = Pair(engine, fixtures.OddModel)
    for step, (taker, words) in enumerate(TAKERS):
        pair.backward(step)
        errors = (RuntimeError, TypeError, ValueError, AssertionError)
        refused(lambda taker=taker: taker(pair.trained), *words, error=errors)
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
    torch.func.functional_call(pair.trained.model, others, (fixtures.token_batch(0, pair.rank)[0],))


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


class Acting(fixtures.OddModel):
    """A unit whose forward first does something to its own weights, as an RNN's flatten_parameters() does."""

    class Block(fixtures.OddBlock):
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


def under_func(pair):
    """Where ZeRO-3 cannot see what autograd saves."""
    tokens, _ = fixtures.token_batch(0, pair.rank)
    torch.func.vmap(lambda _: pair.trained(tokens))(torch.zeros(2))


LOOPS = {
    "vmap": (fixtures.OddModel, under_func, ("torch.func", "vmap")),
    "torch's GradScaler": (fixtures.OddModel, with_torchs_scaler, ("engine.gradients", "GradScaler")),
    "a backward after the step": (fixtures.OddModel, backward_after_the_step, ("version",)),
    "functional_call": (fixtures.OddModel, called_with_other_weights, (".weight'", "functional_call")),
}
ENDS = {  # the model itself is of no use then
    "an optimizer in a hook": (fixtures.OddModel, an_optimizer_in_a_hook, ("'head.weight'",)),
    "a sparse gradient": (Looked, Pair.step_alone, ("'table'", "sparse=False")),
    "a forward that writes": (partial(Acting, scaled), Pair.step_alone, ("'blocks.1.up.weight'", "written to")),
}


@holds(
    "misuse",
    *ask_each("what", ("torch's GradScaler", "an optimizer in a hook"), "zero1", more_engines=STAGES, more_ranks=3),
    *ask_each("what", ("a backward after the step", "a sparse gradient"), "zero2", more_engines=STAGES, more_ranks=3),
    *ask_each("what", ("functional_call", "a forward that writes"), "zero3", more_engines=STAGES, more_ranks=3),
    ask("zero3", what="vmap"),
    of_stages=True,
)
def loops_that_would_train_wrong_are_refused(engine, what):
    """What torch's loops may do and an engine cannot follow is an error that says so; training goes on after it."""
    build, act, words = {**LOOPS, **ENDS}[what]
    pair = Pair(engine, build)
    refused(lambda: act(pair), *words, error=RuntimeError)
    pair.trained.zero_grad()
    if what in LOOPS:
        pair.alike()


# The model is moved or changed after the build.


class Pictures(fixtures.OddModel):
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
    "channels_last": (lambda model: model.to(memory_format=torch.channels_last), ("'picture.weight'",)),
    "data": (lambda model: setattr(model.head.weight, "data", zeros()), ("'",)),
    "frozen": (lambda model: model.head.bias.requires_grad_(False), ("'head.bias'", "full_state_dict")),
    "thawed": (lambda model: model.frozen.requires_grad_(True), ("'frozen'", "find_unused=True")),
    "a new module": (lambda model: model.blocks.append(fixtures.OddBlock(5, 7).double()),
                     ("'blocks.3.up.weight'", "after the engine was built")),
}  # fmt: skip
CHANGES = {
    "setattr": (lambda model: setattr(model.head, "weight", nn.Parameter(zeros())), ("'",)),
    "delattr": (lambda model: delattr(model.head, "bias"), ("'head.bias'",)),
    "None": (lambda model: setattr(model.head, "bias", None), ("'head.bias'",)),
    "another module": (lambda model: setattr(model, "head", nn.Linear(5, 3).double()), ("'",)),
    "weight_norm": (lambda model: nn.utils.parametrizations.weight_norm(model.head), ("Parameter",)),
    "assign": (lambda model: model.load_state_dict(fixtures.seeded(Pictures).state_dict(), assign=True), ("'",)),
}


@holds(
    "misuse",
    *ask_each("change", ("float", "channels_last", "thawed", "delattr", "weight_norm"), "zero1", more_engines=STAGES),
    *ask_each("change", ("there and back", "data", "a new module", "None", "assign"), "zero2", more_engines=STAGES),
    *ask_each("change", ("frozen", "setattr", "another module"), "zero3", more_engines=STAGES),
    of_stages=True,
)
def a_model_that_changes_after_the_build_is_refused(engine, change):
    """A model that is moved, or whose parameters are others, is refused at once or in forward; the shards stay."""
    pair = Pair(engine, Pictures)
    pair.alike()
    act, words = {**MOVES, **CHANGES}[change]

    def go():
        act(pair.trained.model)
        pair.step_alone()

    own = () if change == "weight_norm" else ("engine",)  # torch's words are of a parameter of this class
    said = refused(go, *words, *own, error=(RuntimeError, TypeError, KeyError))
    same("whether one that did not change is named", "'head.weight'" in said and len(words) > 1, False)
    if change in MOVES:
        state = pair.trained.full_state_dict()
        for name, param in pair.plain.named_parameters():
            same(f"{name} after the refusal", state[name], param, 1e-12)


def there_and_back(block):
    old, block.up.weight.data = block.up.weight.data, block.up.weight.data.clone()
    block.up.weight.data = old


MOVES_OF_FORWARD = {
    "data": lambda block: setattr(block.up.weight, "data", block.up.weight.data.clone()),
    "set_": lambda block: block.up.weight.set_(block.up.weight.clone()),
    "half and double": lambda block: block.up.half().double(),
}


@holds(
    "misuse",
    ask("zero1", more_engines=STAGES, how="data"),
    ask("zero2", more_engines=STAGES, how="set_"),
    ask("zero3", more_engines=STAGES, how="half and double"),
    *[ask_thorough("zero3", how=how, reshard_after_forward=False) for how in MOVES_OF_FORWARD],
)
def a_forward_that_moves_its_weights_is_refused(engine, how, **options):
    """A forward that gives its weights other memory: the first step trains right or is refused, later ones are."""
    pair, shards = Pair(engine, lambda: Acting(MOVES_OF_FORWARD[how]), **options), []
    words = "'blocks.1.up.weight'", "moved out of the engine's buffer"
    for step in range(3):
        if step == 0:
            with contextlib.suppress(RuntimeError):
                pair.step_alone()
        else:
            refused(pair.step_alone, *words, error=RuntimeError)
        pair.trained.zero_grad()
        with contextlib.suppress(RuntimeError):  # it may say once that weights were moved
            pair.trained.full_state_dict()
        shards.append(pair.trained.full_state_dict())
    same("the weights after a refused step", shards[1], shards[0])  # no step after the first one counts
    model = pair.trained.model
    pair.trained.close()
    broken = [name for name, param in model.named_parameters() if param.isnan().any()]
    same("parameters with NaN after close()", broken, [])


def clamp(model):
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)


@holds("misuse", of_stages=True)
def weights_may_be_written_only_where_it_counts(engine):
    """Weights may be clamped by hand between two steps in ZeRO-1 and -2; where it would be lost it is refused.

    So is what would be loaded past the shards.
    """
    pair = Pair(engine, fixtures.OddModel)
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
    low, batch = fixtures.seeded(fixtures.OddModel, dtype=torch.float32), fixtures.token_batch(0, pair.rank)
    mixed = engine(low, MOMENTUM, param_dtype=torch.bfloat16)

    def load_and_train(module, other):
        module.load_state_dict(other.state_dict())
        mixed.training_step(*batch, fixtures.in_float32)

    for module, other in ((low, fixtures.OddModel()), (low.head, fixtures.OddModel().head)):
        refused(partial(load_and_train, module, other), "load_full_state_dict", error=RuntimeError)
    if engine.like != "zero3":
        clamp(low)
        refused(lambda: mixed.training_step(*batch, lambda *_: 0), *words, error=RuntimeError)
    # Said once; from here on the shards count again.
    mixed.training_step(*batch, fixtures.in_float32)


@holds("misuse", ask(), ask_thorough("zero3", reshard_after_forward=False))
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


@holds("misuse", of_stages=True)
def optimizer_state_that_does_not_fit_is_refused(engine):
    """State of other ranks, another stage or layout, or of no engine is refused; what fits goes on as the old one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    plain = fixtures.seeded(fixtures.OddModel)
    pair = Pair(engine, fixtures.OddModel, ADAMW)
    pair.alike()
    everyone = [None] * size
    dist.all_gather_object(everyone, pair.trained.optimizer.state_dict())
    states = [
        everyone[rank - 1],  # of the same shapes, perhaps
        engine(fixtures.seeded(fixtures.OddModel), ADAMW, group=alone).optimizer.state_dict(),
        engine.another()(fixtures.seeded(fixtures.OddModel), ADAMW).optimizer.state_dict(),
        engine(fixtures.seeded(lambda: fixtures.OddModel(blocks=2)), ADAMW).optimizer.state_dict(),
        ADAMW(plain.parameters()).state_dict(),
    ]
    for state in states:
        load = partial(pair.trained.optimizer.load_state_dict, state)
        refused(load, "optimizer's state", "harness.engine.checkpoint", error=ValueError)
        pair.alike(1)
    # Through a file into a new engine, which goes on as the old one would have.
    weights, file = pair.trained.full_state_dict(), io.BytesIO()
    torch.save(pair.trained.optimizer.state_dict(), file)
    pair.trained = engine(fixtures.seeded(fixtures.OddModel, seed=5), ADAMW)
    pair.trained.load_full_state_dict(weights)
    file.seek(0)
    pair.trained.optimizer.load_state_dict(torch.load(file))
    pair.alike(3)
    # Rank 0 has passed a state, the others none.
    state = pair.trained.full_state_dict()
    refused(lambda: pair.trained.load_full_state_dict(state if rank == 0 else None), "rank 1: ", "NoneType")
    pair.alike(1)


# What may be asked, and what users expect.


@holds("misuse")
def an_engine_is_like_its_model_and_says_where_not(engine):
    """Modes and lists of parameters, modules and buffers are the model's; what an engine has not is an error."""
    pair = Pair(engine, fixtures.OddModel)
    trained, model = pair.trained, pair.trained.model
    assert trained.eval() is trained and not trained.training and not model.blocks[1].training
    assert trained.train() is trained and trained.training and model.blocks[1].training
    assert not trained.train(False).training
    for name in ("parameters", "modules", "buffers"):
        ours, theirs = list(getattr(trained, name)()), list(getattr(model, name)())
        assert len(ours) == len(theirs) > 0 and all(a is b for a, b in zip(ours, theirs)), name
        names = [key for key, _ in getattr(trained, f"named_{name}")(prefix="x")]
        assert names == [key for key, _ in getattr(model, f"named_{name}")(prefix="x")], name
    for name in ("state_dict", "cuda", "backward", "blocks"):
        refused(lambda name=name: getattr(trained, name), repr(name), error=AttributeError)
    pair.alike()

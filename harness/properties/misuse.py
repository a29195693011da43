"""What would train wrong without a word is refused, with what it is about and the way out; and what is right passes.

After a refusal the engine goes on, and is compared with plain PyTorch then.
"""

import contextlib
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from harness.properties.fixtures import ADAMW, SGD, OddBlock, OddModel, odd, pieces_of, seeded, token_batch
from harness.properties.property import ask, ask_each, ask_thorough, holds, only, refused, same, stages_hold
from harness.properties.training import Pair

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
    pair = Pair(engine, OddModel)
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


def backward_after_the_step(pair):
    """Of a forward before it: torch itself refuses gradients of weights that have changed since."""
    old = pair.alone()
    pair.train(1)
    old.backward()


def called_with_other_weights(pair):
    others = {name: torch.zeros_like(value) for name, value in pair.plain.named_parameters()}
    torch.func.functional_call(pair.trained.model, others, (token_batch(0, pair.rank)[0],))


def an_optimizer_in_a_hook(pair):
    """As in recipes for small memory: it would part the ranks."""
    pair.trained.model.head.weight.register_post_accumulate_grad_hook(lambda p: SGD([p]).step())
    pair.step_alone()


class Acting(OddModel):
    """A unit whose forward first does something to its own weights, as an RNN's flatten_parameters() does."""

    class Block(OddBlock):
        def forward(self, x):
            with torch.no_grad():
                self.act(self)
            return super().forward(x)

    def __init__(self, act):
        super().__init__()
        self.blocks[1] = self.Block(5, 9)
        self.blocks[1].act = act


def under_func(pair):
    """Where ZeRO-3 cannot see what autograd saves."""
    tokens, _ = token_batch(0, pair.rank)
    torch.func.vmap(lambda _: pair.trained(tokens))(torch.zeros(2))


LOOPS = {  # and words of the error
    under_func: ("torch.func", "vmap"),
    with_torchs_scaler: ("engine.gradients", "GradScaler"),
    backward_after_the_step: ("version",),
    called_with_other_weights: (".weight'", "functional_call"),
    an_optimizer_in_a_hook: ("'head.weight'",),
}


@stages_hold(
    "misuse",
    *ask_each("act", (with_torchs_scaler, an_optimizer_in_a_hook), "zero1", more_ranks=3),
    ask("zero2", more_ranks=3, act=backward_after_the_step),
    ask("zero3", more_ranks=3, act=called_with_other_weights),
    only("zero3", act=under_func),
)
def loops_that_would_train_wrong_are_refused(engine, act):
    """What torch's loops may do and an engine cannot follow is an error that says so; training goes on after it."""
    pair = Pair(engine, OddModel)
    with refused(*LOOPS[act], error=RuntimeError):
        act(pair)
    pair.trained.zero_grad()
    if act is not an_optimizer_in_a_hook:  # the model itself is of no use then
        pair.alike()


# The model is moved or changed after the build.


class Pictures(OddModel):
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
    "a new module": (lambda model: model.blocks.append(OddBlock(5, 7).double()),
                     ("'blocks.3.up.weight'", "after the engine was built")),
}  # fmt: skip
CHANGES = {
    "setattr": (lambda model: setattr(model.head, "weight", nn.Parameter(zeros())), ("'",)),
    "delattr": (lambda model: delattr(model.head, "bias"), ("'head.bias'",)),
    "None": (lambda model: setattr(model.head, "bias", None), ("'head.bias'",)),
    "weight_norm": (lambda model: nn.utils.parametrizations.weight_norm(model.head), ("Parameter",)),
    "assign": (lambda model: model.load_state_dict(seeded(Pictures).state_dict(), assign=True), ("'",)),
}


@stages_hold(
    "misuse",
    *ask_each("change", ("float", "channels_last", "thawed", "delattr", "weight_norm"), "zero1"),
    *ask_each("change", ("there and back", "data", "a new module", "None", "assign"), "zero2"),
    *ask_each("change", ("frozen", "setattr"), "zero3"),
)
def a_model_that_changes_after_the_build_is_refused(engine, change):
    """A model that is moved, or whose parameters are others, is refused at once or in forward; the shards stay."""
    pair = Pair(engine, Pictures)
    pair.alike()
    act, words = (MOVES | CHANGES)[change]
    own = () if change == "weight_norm" else ("engine",)  # torch's words are of a parameter of this class
    with refused(*words, *own, error=(RuntimeError, TypeError, KeyError)) as said:
        act(pair.trained.model)
        pair.step_alone()
    same("whether one that did not change is named", "'head.weight'" in said[0] and len(words) > 1, False)
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
    ask("zero1", how="data"),
    ask("zero2", how="set_"),
    ask("zero3", how="half and double"),
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
            with refused(*words, error=RuntimeError):
                pair.step_alone()
        pair.trained.zero_grad()
        with contextlib.suppress(RuntimeError):  # it may say once that weights were moved
            pair.trained.full_state_dict()
        shards.append(pair.trained.full_state_dict())
    same("the weights after a refused step", shards[1], shards[0])  # no step after the first one counts
    model = pair.trained.model
    pair.trained.close()
    broken = [name for name, param in model.named_parameters() if param.isnan().any()]
    same("parameters with NaN after close()", broken, [])


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


@stages_hold("misuse")
def optimizer_state_that_does_not_fit_is_refused(engine):
    """State of other ranks, another stage or layout, or of no engine is refused; what fits goes on as the old one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    plain = seeded(OddModel)
    pair = Pair(engine, OddModel, ADAMW)
    pair.alike()
    everyone = [None] * size
    dist.all_gather_object(everyone, pair.trained.optimizer.state_dict())
    states = [
        everyone[rank - 1],  # of the same shapes, perhaps
        odd(engine, group=alone).optimizer.state_dict(),
        odd(engine.another()).optimizer.state_dict(),
        engine(seeded(lambda: OddModel(blocks=2)), ADAMW).optimizer.state_dict(),
        ADAMW(plain.parameters()).state_dict(),
    ]
    for state in states:
        with refused("optimizer's state", "harness.engine.checkpoint", error=ValueError):
            pair.trained.optimizer.load_state_dict(state)
        pair.alike(1)
    # Through a file into a new engine, which goes on as the old one would have.
    weights, file = pair.trained.full_state_dict(), io.BytesIO()
    torch.save(pair.trained.optimizer.state_dict(), file)
    pair.trained = engine(seeded(OddModel, seed=5), ADAMW)
    pair.trained.load_full_state_dict(weights)
    file.seek(0)
    pair.trained.optimizer.load_state_dict(torch.load(file))
    pair.alike(3)
    # Rank 0 has passed a state, the others none.
    state = pair.trained.full_state_dict()
    with refused("rank 1: ", "NoneType"):
        pair.trained.load_full_state_dict(state if rank == 0 else None)
    pair.alike(1)


# What may be asked, and what users expect.


@holds("misuse")
def an_engine_is_like_its_model_and_says_where_not(engine):
    """Modes and lists of parameters, modules and buffers are the model's; what an engine has not is an error."""
    pair = Pair(engine, OddModel)
    trained, model = pair.trained, pair.trained.model
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

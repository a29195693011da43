"""What would train wrong without a word is refused, with what it is about and the way out; and what is right passes.

After a refusal the engine goes on, and is compared with plain PyTorch then.
"""

import contextlib
import io
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from harness.properties import parts
from harness.properties.overlap import replaced
from harness.properties.property import Subject, expect, holds, refused, same, subject
from harness.properties.training import Pair, of_output

ADAMW, MOMENTUM = parts.ADAMW, parts.MOMENTUM


def trained_alike(pair: Pair, steps: int = 2) -> None:
    pair.train(steps)
    pair.same_weights()


def backward_alone(pair: Pair, step: int = 9) -> None:
    """Of the engine, and not of plain PyTorch."""
    of_output(pair.trained, *parts.token_batch(step, pair.rank)).backward()


def step_alone(pair: Pair) -> None:
    backward_alone(pair)
    pair.trained.step()


# The standard loop.


def pieces(engine) -> list[torch.Tensor]:
    return [piece for group in engine.optimizer.param_groups for piece in group["params"]]


# (who takes gradients from the model, or steps past the engine; words of the error)
TAKERS = (
    (lambda e: e.optimizer.step(), ("engine.step()",)),
    (lambda e: clip_grad_norm_(e.parameters(), 1.0), ("engine.clip_grad_norm_(", "'embedding.weight'")),
    (lambda e: clip_grad_value_(e.model.parameters(), 1.0), ("'embedding.weight'",)),
    (lambda e: clip_grad_norm_(pieces(e), 1.0), ("engine.clip_grad_norm_(",)),
    (lambda e: clip_grad_value_(pieces(e), 1.0), ("engine.clip_grad_value_(",)),
    (lambda e: clip_grad_norm_(e.model.head.weight, 1.0), ("engine.clip_grad_norm_(", "'head.weight'")),
    (lambda e: e.model.zero_grad(), ("engine.zero_grad()",)),
    (lambda e: e.model.head.zero_grad(), ("engine.zero_grad()", "'head.weight'")),
    (lambda e: torch.optim.SGD(e.parameters(), lr=0.1).step(), ("engine.step()", "'embedding.weight'")),
    (lambda e: torch.optim.AdamW(e.parameters(), foreach=False).step(), ("engine.step()", "'embedding.weight'")),
    (lambda e: torch.optim.SGD(e.parameters()).zero_grad(), ("engine.zero_grad()", "'embedding.weight'")),
    (lambda e: e.step(lambda: 0.0), ("closure", "engine.step()")),
)


@holds("misuse", sizes=(2,), further_sizes=(3,))
def who_takes_gradients_past_the_engine_is_refused(engine):
    """Torch's clipping, `zero_grad` and `step` past the engine, between backward and step, name the engine's own."""
    pair = Pair(engine, parts.OddModel)
    for step, (taker, words) in enumerate(TAKERS):
        pair.backward(step)
        errors = (RuntimeError, TypeError, AssertionError)
        refused(lambda taker=taker: taker(pair.trained), *words, error=errors, step=4)
        pair.step()
        pair.same_weights()


@holds("values", sizes=(3,))
def clipping_by_value_is_torchs_on_the_whole_model(engine):
    """`engine.clip_grad_value_` is torch's on the whole model, also between two backwards of one step."""
    pair = Pair(engine, parts.OddModel)
    for step in range(3):
        pair.backward(step)
        for _ in range(2 if step == 2 else 1):
            pair.trained.clip_grad_value_(0.01)
            clip_grad_value_(pair.plain.parameters(), 0.01)
            if step == 2:
                pair.backward(3)
        pair.step()
        pair.same_weights()
    refused(lambda: pair.trained.clip_grad_value_(pieces(pair.trained)), "engine.clip_grad_value_(1.0)",
            error=TypeError, step=3)  # fmt: skip


@holds("values", sizes=(2,), further_sizes=(3,))
def the_optimizers_own_zero_grad_is_the_engines(engine):
    """`engine.optimizer.zero_grad()` is the engine's: after a step, and for gradients that are not wanted."""
    pair = Pair(engine, parts.OddModel)
    for step in range(4):
        if step % 2:
            backward_alone(pair)  # another batch's gradients, thrown away
            pair.trained.optimizer.zero_grad(set_to_none=bool(step // 2))
        pair.backward(step)
        for _, optimizer in pair.both:
            (pair.trained if optimizer is pair.trained.optimizer else optimizer).step()
            optimizer.zero_grad()
    pair.same_weights()


@holds("misuse")
def an_optimizer_that_steps_inside_backward_is_refused(engine):
    """An optimizer in a parameter's hook, as in recipes for small memory, would part the ranks: the weight is named."""
    pair = Pair(engine, parts.OddModel)
    trained_alike(pair)
    weight = pair.trained.model.head.weight
    weight.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())
    refused(lambda: step_alone(pair), "'head.weight'", error=RuntimeError, step=3)


def with_torchs_scaler(pair):
    """It would skip a step on one rank alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(of_output(pair.trained, *parts.token_batch(0, pair.rank))).backward()
    scaler.step(pair.trained.optimizer)


def backward_after_the_step(pair):
    """Of a forward before it: torch itself refuses gradients of weights that have changed since."""
    old = of_output(pair.trained, *parts.token_batch(7, pair.rank))
    pair.train(1)
    old.backward()


def called_with_other_weights(pair):
    others = {name: torch.zeros_like(value) for name, value in pair.plain.named_parameters()}
    torch.func.functional_call(pair.trained.model, others, (parts.token_batch(0, pair.rank)[0],))


LOOPS = {
    "torch's GradScaler": (with_torchs_scaler, ("engine.gradients", "GradScaler")),
    "a backward after the step": (backward_after_the_step, ("version",)),
    "functional_call": (called_with_other_weights, (".weight'", "functional_call")),
}


@holds("misuse", sizes=(2,), further_sizes=(3,), cases=tuple({"what": what} for what in LOOPS))
def loops_that_would_train_wrong_are_refused(engine, what):
    """What torch's loops may do and an engine cannot follow is an error that says so; training goes on after it."""
    pair, (act, words) = Pair(engine, parts.OddModel), LOOPS[what]
    refused(lambda: act(pair), *words, error=RuntimeError, step=None)
    pair.trained.zero_grad()
    trained_alike(pair)


class TwoHeads(nn.Module):
    """Two heads, each a unit of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.embedding = nn.Embedding(11, 5)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return [head(x) for head in self.heads]


@holds("misuse", sizes=(3,),
       cases=tuple({"no_sync": n, "find_unused": f} for n in (True, False) for f in (True, False)))  # fmt: skip
def a_backward_for_each_head_is_right_or_refused(engine, no_sync, find_unused):
    """Two backwards through one body, each by a head of its own: right, or refused with a way that is right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, trained = parts.seeded(TwoHeads), engine(parts.seeded(TwoHeads), MOMENTUM, find_unused=find_unused)
    optimizer = MOMENTUM(plain.parameters())

    def losses(model, who):
        tokens, targets = parts.token_batch(0, who)
        return [F.cross_entropy(out, targets) for out in model(tokens)]

    for other in range(world_size):
        (sum(losses(plain, other)) / world_size).backward()
    optimizer.step()
    try:
        first, second = losses(trained, rank)
        with trained.no_sync() if no_sync else contextlib.nullcontext():
            first.backward(retain_graph=True)
        second.backward()
        trained.step()
    except RuntimeError as error:
        right = engine.like != "zero1" and not find_unused and "find_unused=True" in str(error)
        expect(right and "heads" in str(error), "the error", "none, or one that names find_unused=True", error, step=3)
        trained.zero_grad()
        sum(losses(trained, rank)).backward()
        trained.step()
    same("the weights", trained.full_state_dict(), plain.state_dict(), 1e-12, step=5)


@holds("traffic")
def nested_no_sync_ends_at_the_outer_exit(engine):
    """The inner exit of nested `no_sync()` does not end the outer one: nothing is sent before that."""
    pair, sent, issue = Pair(engine, parts.OddModel), [], dist.reduce_scatter_single
    with replaced(reduce_scatter_single=lambda *args, **options: (sent.append(1), issue(*args, **options))[1]):
        with pair.trained.no_sync():
            with pair.trained.no_sync():
                pair.backward(0)
            pair.backward(1)
            same("reductions under no_sync", len(sent), 0, step=3)
        pair.backward(2)
    same("whether a backward after no_sync sends", bool(sent), engine.like != "zero1", step=3)
    pair.step()
    pair.same_weights()


class Looked(nn.Module):
    """A table that is looked up by a function whose gradient is sparse: no module tells before."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(11, 5)), nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(F.embedding(tokens, self.table, sparse=True).mean(1))


@holds("misuse")
def a_sparse_gradient_is_named(engine):
    """A gradient that is sparse is an error in backward, which names the parameter."""
    trained = engine(parts.seeded(Looked), MOMENTUM)
    loss = of_output(trained, *parts.token_batch(0, dist.get_rank()))
    refused(loss.backward, "'table'", "sparse=False", error=RuntimeError, step=2)


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


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said to be old
        nn.utils.weight_norm(module)


# (what is done to the model, a word of the error): after the first ones the shards can still be asked for.
MOVES = {
    "float": (lambda model: model.float(), "'"),
    "half": (lambda model: model.half(), "'"),
    "there and back": (lambda model: model.float().double(), "'"),
    "to a dtype": (lambda model: model.to(torch.bfloat16), "'"),
    "channels_last": (lambda model: model.to(memory_format=torch.channels_last), "'picture.weight'"),
    "data": (lambda model: setattr(model.head.weight, "data", zeros()), "'"),
}
CHANGES = {
    "setattr": (lambda model: setattr(model.head, "weight", nn.Parameter(zeros())), "'"),
    "delattr": (lambda model: delattr(model.head, "bias"), "'head.bias'"),
    "None": (lambda model: setattr(model.head, "bias", None), "'head.bias'"),
    "another module": (lambda model: setattr(model, "head", nn.Linear(5, 3).double()), "'"),
    "weight_norm": (lambda model: nn.utils.parametrizations.weight_norm(model.head), "'"),
    "old weight_norm": (lambda model: old_weight_norm(model.head), "'"),
    "parametrize": (lambda model: nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Tanh()), "'"),
    "assign": (lambda model: model.load_state_dict(parts.seeded(Pictures).state_dict(), assign=True), "'"),
}


@holds("misuse", cases=tuple({"change": change} for change in (*MOVES, *CHANGES)))
def a_model_that_changes_after_the_build_is_refused(engine, change):
    """A model that is moved or whose parameters are replaced is refused at once or in forward; the shards stay."""
    pair = Pair(engine, Pictures)
    trained_alike(pair)
    act, named = {**MOVES, **CHANGES}[change]

    def go():
        act(pair.trained.model)
        step_alone(pair)

    refused(go, named, "engine", error=(RuntimeError, TypeError, KeyError), step=1)
    if change in MOVES:
        state = pair.trained.full_state_dict()
        for name, param in pair.plain.named_parameters():
            same(f"{name} after the refusal", state[name], param, 1e-12, step=5)


def set_to_a_copy(block):
    with torch.no_grad():
        block.up.weight.set_(block.up.weight.clone())


def there_and_back(block):
    old, block.up.weight.data = block.up.weight.data, block.up.weight.data.clone()
    block.up.weight.data = old


def scaled(block):
    with torch.no_grad():
        block.up.weight.div_(block.up.weight.norm())


MOVES_OF_FORWARD = {
    "data": lambda block: setattr(block.up.weight, "data", block.up.weight.data.clone()),
    "set_": set_to_a_copy,
    "half and double": lambda block: block.up.half().double(),
}


class Acting(parts.OddModel):
    """A unit whose forward first does something to its own weights, as an RNN's flatten_parameters() does."""

    class Block(parts.OddBlock):
        def forward(self, x):
            self.act(self)
            return super().forward(x)

    def __init__(self, act):
        super().__init__()
        self.blocks[1] = self.Block(5, 9)
        self.blocks[1].act = act


@holds("misuse", cases=tuple({"how": how} for how in MOVES_OF_FORWARD),
       further_cases=tuple({"how": how, "reshard_after_forward": False, "on": ("zero3",)} for how in MOVES_OF_FORWARD)
       )  # fmt: skip
def a_forward_that_moves_its_weights_is_refused(engine, how, **options):
    """A forward that gives its weights other memory: the first step trains right or is refused, later ones are."""
    pair, shards = Pair(engine, lambda: Acting(MOVES_OF_FORWARD[how]), **options), []
    words = "'blocks.1.up.weight'", "moved out of the engine's buffer"
    for step in range(3):
        if step == 0:
            with contextlib.suppress(RuntimeError):
                step_alone(pair)
        else:
            refused(lambda: step_alone(pair), *words, error=RuntimeError, step=1)
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


@holds("misuse")
def weights_may_be_written_only_where_it_counts(engine):
    """Weights may be clamped by hand between two steps in ZeRO-1 and -2; where it would be lost it is refused."""
    pair = Pair(engine, parts.OddModel)
    words = "'head.weight'", "full_state_dict()"
    if engine.like == "zero3":  # there is nothing to write to
        refused(lambda: clamp(pair.trained.model), *words, error=RuntimeError)
        return trained_alike(pair)
    for step in range(2):
        for model, _ in pair.both:
            clamp(model)
        pair.backward(step)
        pair.step()
    pair.same_weights()
    low, batch = parts.seeded(parts.OddModel, dtype=torch.float32), parts.token_batch(0, pair.rank)
    mixed = engine(low, MOMENTUM, param_dtype=torch.bfloat16)

    def loss_fn(out, targets):
        return F.cross_entropy(out.float(), targets)

    mixed.training_step(*batch, loss_fn)
    clamp(low)
    refused(lambda: mixed.training_step(*batch, loss_fn), *words, error=RuntimeError)
    mixed.training_step(*batch, loss_fn)  # said once; from here on the shards count again


@holds("misuse")
def forwards_that_write_into_weights_are_refused(engine):
    """A forward that writes into its own weights is refused, and the weight is named."""
    trained = engine(parts.seeded(lambda: Acting(scaled)), MOMENTUM)
    batch = parts.token_batch(0, dist.get_rank())
    refused(lambda: trained.training_step(*batch, F.cross_entropy), "'blocks.1.up.weight'", "written to",
            error=RuntimeError, step=1)  # fmt: skip


@holds("misuse", cases=({},), further_cases=({"reshard_after_forward": False, "on": ("zero3",)},))
def what_changes_nothing_is_no_misuse(engine, **options):
    """Moves to where the model is, modes and flags as they are, a look: training goes on."""
    pair = Pair(engine, lambda: Acting(there_and_back), **options)
    trained_alike(pair)
    model = pair.trained.model
    for move in (
        lambda: model.double(),
        lambda: model.cpu(),
        lambda: model.to("cpu"),
        lambda: model.to(torch.float64),
        lambda: model.to("cpu", torch.float64),
        lambda: model.to(torch.zeros(1, dtype=torch.float64)),
        lambda: model.train().eval().train(),
        lambda: model.requires_grad_(True).frozen.requires_grad_(False),
        lambda: model.apply(lambda module: None),
        lambda: repr(model),
    ):
        move()
        trained_alike(pair, 1)


# Optimizer state.


@holds("misuse", sizes=(2,), further_sizes=(3,))
def optimizer_state_that_does_not_fit_is_refused(engine):
    """State of other ranks, stage, layout or model, or of no engine: both sides are named; what is there goes on."""
    engine.needs("zero1", "zero2", "zero3")
    rank, size = dist.get_rank(), dist.get_world_size()
    here = f"{engine.like.replace('zero', 'ZeRO')}, rank {rank} of {size}"
    other = {"zero1": "zero2", "zero2": "zero3", "zero3": "zero1"}[engine.like]
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

    pair = Pair(engine, parts.OddModel, ADAMW)
    trained_alike(pair)
    layout = {"units": []} if engine.like == "zero3" else {"bucket_mb": 0}
    for state, words in (
        (state_of(engine, group=alone), f"{here.split(',')[0]}, rank 0 of 1"),
        (state_of(subject(other)), f"{other.replace('zero', 'ZeRO')}, rank {rank} of {size}"),
        (state_of(engine, **layout), "other pieces"),
        (state_of(engine, lambda: parts.OddModel(blocks=2)), "other pieces"),
        (plain_state(parts.seeded(parts.OddModel), parts.token_batch(0, 0)[0]), "no engine"),
    ):
        refused(lambda state=state: pair.trained.optimizer.load_state_dict(state), here, "harness.engine.checkpoint",
                words, error=ValueError)  # fmt: skip
        trained_alike(pair, 1)
    # One parameter, of which a rank has less than plain PyTorch: torch itself sees nothing wrong.
    one = partial(nn.Linear, 8, 8, bias=False)
    state, trained = plain_state(one(), torch.ones(8)), engine(one(), ADAMW)
    refused(lambda: trained.optimizer.load_state_dict(state), here, "harness.engine.checkpoint", "no engine",
            error=ValueError)  # fmt: skip


@holds("life", sizes=(2,), further_sizes=(3,))
def optimizer_state_that_fits_goes_on(engine):
    """Through a file into a new engine, which goes on as the old one would have."""
    pair = Pair(engine, parts.OddModel, ADAMW)
    trained_alike(pair)
    weights, file = pair.trained.full_state_dict(), io.BytesIO()
    torch.save(pair.trained.optimizer.state_dict(), file)
    pair.trained = engine(parts.seeded(parts.OddModel, seed=5), ADAMW)
    pair.trained.load_full_state_dict(weights)
    file.seek(0)
    pair.trained.optimizer.load_state_dict(torch.load(file))
    trained_alike(pair, 3)


# A build that is refused.


@holds("misuse", sizes=(2,), further_sizes=(3,))
def a_refused_build_leaves_the_model_as_it_was(engine):
    """The same objects, memory and hooks: the model trains plainly then, and an engine can be built over it."""
    model, last = parts.seeded(parts.OddModel), dist.get_world_size() - 1

    def raises_on_one(params):
        if dist.get_rank() == last:
            raise ZeroDivisionError("of the caller's own")
        return MOMENTUM(params)

    def as_it_is():
        own = [(id(p), type(p), p.data_ptr(), p.requires_grad, len(vars(p))) for p in model.parameters()]
        hooks = [
            (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._load_state_dict_pre_hooks))
            for m in model.modules()
        ]
        return own, hooks, [bool(p._post_accumulate_grad_hooks) for p in model.parameters()]

    before, values = as_it_is(), {name: value.clone() for name, value in model.state_dict().items()}
    for optimizer_cls, groups, words in (
        (lambda params: "no optimizer", None, ("str", "torch.optim.Optimizer")),
        (MOMENTUM, [{"params": [model.head.weight]}], ("in no group", "'embedding.weight'")),
        (MOMENTUM, [{"params": model.parameters()}], ("param_groups[0]",)),
        (raises_on_one, None, ("of the caller's own" if dist.get_rank() == last else f"[{last}]",)),
        (torch.optim.LBFGS, None, ("LBFGS",)),
    ):
        options = {} if groups is None else {"param_groups": groups}
        refused(lambda o=optimizer_cls, k=options: engine(model, o, **k), *words, error=Exception)
        same("the model's objects, hooks and hooks of gradients", as_it_is(), before, step=0)
        same("the model's values", model.state_dict(), values, step=0)
    plain = parts.seeded(parts.OddModel)
    for module in (plain, model):  # by plain PyTorch first
        optimizer = MOMENTUM([param for param in module.parameters() if param.requires_grad])
        of_output(module, *parts.token_batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    given = iter((plain, model))
    trained_alike(Pair(engine, lambda: next(given)))


@holds("misuse")
def a_build_that_fails_late_gives_the_model_back(engine):
    """What raises only over the real pieces, when the model is cut already: its weights are whole again."""
    model, calls = parts.seeded(parts.OddModel), []
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def raises_later(params):
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError("the second time")
        return MOMENTUM(params)

    refused(lambda: engine(model, raises_later), "the second time", error=ZeroDivisionError)
    same("the parameters' types", {type(param) for param in model.parameters()}, {nn.Parameter}, step=0)
    same("the model's values", model.state_dict(), before, step=0)
    engine(model, MOMENTUM).training_step(*parts.token_batch(0, dist.get_rank()), F.cross_entropy)


@holds("misuse", engines=("zero3",), sizes=(2,), further_sizes=(3,))
def an_init_fn_that_raises_on_one_rank_is_an_error_on_all(engine):
    """The others hear of it, and the model is on `meta` as before: another try works."""
    engine.needs("zero3")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with torch.device("meta"):
        model = parts.OddModel()
    weight = model.blocks[1].up.weight

    def bad(name, tensor):
        if rank == last and name == "blocks.1.up.weight":
            raise ZeroDivisionError("of the caller's own")
        tensor.fill_(0.1)

    words = "of the caller's own" if rank == last else f"[{last}]"
    refused(lambda: engine(model, MOMENTUM, init_fn=bad), words, error=Exception)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.blocks[1].up.weight is weight and type(weight) is nn.Parameter and weight.requires_grad
    trained = engine(model, MOMENTUM, init_fn=lambda name, tensor: tensor.fill_(0.1))
    trained.training_step(*parts.token_batch(0, rank), F.cross_entropy)
    assert not any(value.is_meta for value in trained.full_state_dict().values())


class OneBuffer(parts.OddModel):
    """Two modules that share a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.head.register_buffer("count", self.count)


@holds("life", engines=("zero3",))
def a_buffer_under_two_names_stays_one(engine):
    """Also on `meta`, where it is filled once."""
    engine.needs("zero3")
    with torch.device("meta"):
        model = OneBuffer()
    names = []

    def fill(name, tensor):
        names.append(name)
        tensor.fill_(0.1)

    trained = engine(model, MOMENTUM, init_fn=fill)
    expect(model.count is model.head.count, "the buffer of two modules", "one object", "two", step=0)
    same("how it is filled", [name for name in names if "count" in name], ["count"], step=0)
    assert not model.count.is_meta
    trained.load_full_state_dict(trained.full_state_dict())


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
    trained_alike(pair)


@holds("misuse")
def a_mesh_may_stand_for_a_group(engine):
    """A DeviceMesh of one dimension is a group, of two it has replicas; one of three is refused."""
    size = dist.get_world_size()

    def over(mesh) -> Subject:
        return Subject(engine.name, partial(engine, group=mesh), engine.like)

    trained_alike(Pair(over(parts.mesh(size)), parts.OddModel))
    mesh = parts.mesh(1, 1, size, names=("pipeline", "replicas", "shards"))
    refused(lambda: engine(parts.seeded(parts.OddModel), MOMENTUM, group=mesh), "3 dimensions", "mesh[",
            error=ValueError)  # fmt: skip
    trained_alike(Pair(over(mesh["shards"]), parts.OddModel))


class Tagged(nn.Parameter):
    """A parameter of a class of the caller's."""


@holds("life", sizes=(2,), further_sizes=(3,))
def parameters_of_ones_own_class_stay_so(engine):
    """They can be printed, and stay of their class while they are gathered and while they are not."""

    def build():
        model = parts.OddModel()
        model.head.weight = Tagged(model.head.weight.detach())
        return model

    pair = Pair(engine, build)
    trained_alike(pair)
    head = pair.trained.model.head
    assert isinstance(head.weight, Tagged)
    if engine.like == "zero3":
        refused(lambda: repr(head.weight), "'head.weight'", error=RuntimeError)
    else:
        assert "requires_grad=True" in repr(head.weight)
    pair.trained.close()
    assert type(head.weight) is Tagged and "requires_grad=True" in repr(head.weight)

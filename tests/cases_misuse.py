"""Run on every rank: what would train wrong without a word is refused, and what is right passes.

Every case goes on after the refusal, and is compared with plain PyTorch then.
"""

import contextlib
import copy
import io
import warnings

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch import nn
from torch.nn import functional as F

MOMENTUM = parts.OPTIMIZERS["momentum"]
ADAMW = parts.OPTIMIZERS["adamw"]


class Beside:
    """An engine and plain PyTorch, which train on the same batches."""

    def __init__(self, stage: str, build=parts.OddModel, optimizer_cls=MOMENTUM, **options):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.plain = parts.seeded(build)
        self.optimizer = optimizer_cls([param for param in self.plain.parameters() if param.requires_grad])
        self.model = parts.seeded(build)
        self.engine = parts.STAGES[stage](self.model, optimizer_cls, **options)
        self.number = 0

    def backward(self):
        for other in range(self.world_size):
            tokens, targets = parts.token_batch(self.number, other)
            (F.cross_entropy(self.plain(tokens), targets) / self.world_size).backward()
        self.engine_backward()
        self.number += 1

    def engine_backward(self):
        tokens, targets = parts.token_batch(self.number, self.rank)
        F.cross_entropy(self.engine(tokens), targets).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.step()
        self.engine.zero_grad()

    def train(self, steps: int = 2):
        for _ in range(steps):
            self.backward()
            self.step()
        self.same()

    def same(self):
        parts.assert_same_state(self.engine.full_state_dict(), self.plain.state_dict(), atol=1e-12)


# The standard loop.


def takers_of_gradients(stage: str) -> dict[str, str]:
    """Who takes gradients from the model, or steps past the engine, is refused between backward and step."""
    found = {}

    takers = {
        "optimizer.step": lambda engine: engine.optimizer.step(),
        "clip_grad_norm_": lambda engine: nn.utils.clip_grad_norm_(engine.parameters(), 1.0),
        "clip_grad_value_": lambda engine: nn.utils.clip_grad_value_(engine.model.parameters(), 1.0),
        "clip_grad_norm_ of pieces": lambda engine: nn.utils.clip_grad_norm_(pieces(engine), 1.0),
        "clip_grad_value_ of pieces": lambda engine: nn.utils.clip_grad_value_(pieces(engine), 1.0),
        "clip of one": lambda engine: nn.utils.clip_grad_norm_(engine.model.head.weight, 1.0),
        "model.zero_grad": lambda engine: engine.model.zero_grad(),
        "module.zero_grad": lambda engine: engine.model.head.zero_grad(),
        "another SGD": lambda engine: torch.optim.SGD(engine.parameters(), lr=0.1).step(),
        "another AdamW": lambda engine: torch.optim.AdamW(engine.parameters(), lr=0.1, foreach=False).step(),
        "another zero_grad": lambda engine: torch.optim.SGD(engine.parameters(), lr=0.1).zero_grad(),
        "a closure": lambda engine: engine.step(lambda: 0.0),
    }
    beside = Beside(stage)
    for name, taker in takers.items():
        beside.backward()
        found[name] = message(lambda taker=taker: taker(beside.engine), RuntimeError, TypeError, AssertionError)
        beside.step()
        beside.same()
    return found


def pieces(engine) -> list[torch.Tensor]:
    return [piece for group in engine.optimizer.param_groups for piece in group["params"]]


def clipping_by_value(stage: str) -> str:
    """`engine.clip_grad_value_` is torch's on the whole model, also between two backwards of one step."""
    beside = Beside(stage)
    for step in range(3):
        beside.backward()
        for _ in range(2 if step == 2 else 1):
            beside.engine.clip_grad_value_(0.01)
            nn.utils.clip_grad_value_(beside.plain.parameters(), 0.01)
            if step == 2:
                beside.backward()
        beside.step()
        beside.same()
    return message(lambda: beside.engine.clip_grad_value_(pieces(beside.engine)), TypeError)


def torchs_scaler(stage: str) -> str:
    """It would skip a step on one rank alone. After it was refused the engine's own goes on."""
    beside = Beside(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    tokens, targets = parts.token_batch(0, beside.rank)
    scaler.scale(F.cross_entropy(beside.engine(tokens), targets)).backward()
    found = message(lambda: scaler.step(beside.engine.optimizer), RuntimeError)
    beside.engine.zero_grad()
    beside.train()
    return found


def the_optimizers_own_zero_grad(stage: str) -> None:
    """`engine.optimizer.zero_grad()` is the engine's: after a step, and in place of gradients that are not wanted."""
    beside = Beside(stage)
    for step in range(4):
        if step % 2:
            beside.engine_backward()  # another batch's gradients, thrown away
            beside.engine.optimizer.zero_grad(set_to_none=bool(step // 2))
        beside.backward()
        beside.optimizer.step()
        beside.optimizer.zero_grad()
        beside.engine.step()
        beside.engine.optimizer.zero_grad()
    beside.same()


def a_scheduler_over_the_optimizer(stage: str) -> None:
    """It sees the optimizer's step, so it warns of nothing, and it changes the rate that counts."""
    beside = Beside(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = torch.optim.lr_scheduler.OneCycleLR(beside.engine.optimizer, 0.2, total_steps=9)
        theirs = torch.optim.lr_scheduler.OneCycleLR(beside.optimizer, 0.2, total_steps=9)
        for _ in range(4):
            beside.backward()
            beside.step()
            ours.step()
            theirs.step()
    assert ours.get_last_lr() == theirs.get_last_lr()
    beside.same()


def steps_inside_backward(stage: str) -> str:
    """An optimizer that steps in a hook of a parameter, as recipes for small memory do, would part the ranks."""
    beside = Beside(stage)
    beside.train()
    weight = beside.model.head.weight
    hook = weight.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())

    def go():
        beside.engine_backward()
        beside.engine.step()

    found = message(go, RuntimeError)
    hook.remove()
    return found


def a_backward_after_the_step(stage: str) -> str:
    """Of a forward before it: torch itself refuses to compute gradients of weights that have changed since."""
    beside = Beside(stage)
    tokens, targets = parts.token_batch(7, beside.rank)
    old = F.cross_entropy(beside.engine(tokens), targets)
    beside.train()
    found = message(old.backward, RuntimeError)
    beside.engine.zero_grad()
    beside.train()
    return found


class TwoHeads(nn.Module):
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


def a_backward_for_each_head(stage: str, no_sync: bool, find_unused: bool) -> str | None:
    """Two backwards through one body, each through a head of its own: right, or refused with a way that is right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(TwoHeads)
    engine = parts.STAGES[stage](parts.seeded(TwoHeads), MOMENTUM, find_unused=find_unused)
    optimizer = MOMENTUM(plain.parameters())

    def losses(model, who):
        tokens, targets = parts.token_batch(0, who)
        return [F.cross_entropy(out, targets) for out in model(tokens)]

    for other in range(world_size):
        (sum(losses(plain, other)) / world_size).backward()
    optimizer.step()
    found = None
    try:
        first, second = losses(engine, rank)
        with engine.no_sync() if no_sync else contextlib.nullcontext():
            first.backward(retain_graph=True)
        second.backward()
        engine.step()
    except RuntimeError as error:
        found = str(error)
        engine.zero_grad()
        sum(losses(engine, rank)).backward()
        engine.step()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    return found


def nested_no_sync(stage: str) -> None:
    """The inner exit does not end the outer one: nothing is sent before it."""
    sent, issue = [], dist.reduce_scatter_single
    beside = Beside(stage)
    dist.reduce_scatter_single = lambda *args, **options: (sent.append(1), issue(*args, **options))[1]
    try:
        with beside.engine.no_sync():
            with beside.engine.no_sync():
                beside.backward()
            beside.backward()
            assert not sent
        beside.backward()
        assert bool(sent) == (stage != "zero1")
    finally:
        dist.reduce_scatter_single = issue
    beside.step()
    beside.same()


class Looked(nn.Module):
    """A table that is looked up by a function whose gradient is sparse: no module tells before."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(F.embedding(tokens, self.table, sparse=True).mean(1))


def sparse_gradients(stage: str) -> str:
    engine = parts.STAGES[stage](parts.seeded(Looked), MOMENTUM)
    tokens, targets = parts.token_batch(0, dist.get_rank())
    return message(lambda: F.cross_entropy(engine(tokens), targets).backward(), RuntimeError)


# The model is moved or changed after the build.


class Pictures(parts.OddModel):
    """With a weight of four dimensions, whose memory format can be another."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Conv2d(2, 5, 2)

    def forward(self, tokens):
        picture = torch.ones(1, 2, 2, 2, dtype=torch.float64)
        return super().forward(tokens) + self.picture(picture).mean()


def other_data(model):
    model.head.weight.data = torch.zeros(3, 5, dtype=torch.float64)


def other_parameter(model):
    model.head.weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))


MOVES = {
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "there and back": lambda model: model.float().double(),
    "to a dtype": lambda model: model.to(torch.bfloat16),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "data": other_data,
    "setattr": other_parameter,
    "delattr": lambda model: delattr(model.head, "bias"),
    "None": lambda model: setattr(model.head, "bias", None),
    "another module": lambda model: setattr(model, "head", nn.Linear(5, 3).double()),
    "weight_norm": lambda model: nn.utils.parametrizations.weight_norm(model.head),
    "old weight_norm": lambda model: old_weight_norm(model.head),
    "parametrize": lambda model: nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Tanh()),
    "assign": lambda model: model.load_state_dict(parts.seeded(Pictures).state_dict(), assign=True),
}


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said to be old
        nn.utils.weight_norm(module)


def moved(stage: str, move: str) -> str:
    """A move is refused by itself, or by the next forward. What was trained is still there."""
    beside = Beside(stage, Pictures)
    beside.train()

    def go():
        MOVES[move](beside.model)
        beside.engine_backward()
        beside.engine.step()

    found = message(go, RuntimeError, TypeError, KeyError)
    if move in ("float", "half", "there and back", "to a dtype", "channels_last", "data"):
        state = beside.engine.full_state_dict()  # the shards are as they were
        for name, param in beside.plain.named_parameters():
            torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-12)
    return found


class MovesItself(parts.OddModel):
    """A unit whose forward gives a weight other memory, as an RNN's flatten_parameters() does."""

    class Block(parts.OddBlock):
        def forward(self, x):
            MOVES_OF_FORWARD[self.how](self)
            return super().forward(x)

    def __init__(self, how: str):
        super().__init__()
        self.blocks[1] = self.Block(5, 9)
        self.blocks[1].how = how


def set_to_a_copy(block):
    with torch.no_grad():
        block.up.weight.set_(block.up.weight.clone())


def there_and_back(block):
    old, block.up.weight.data = block.up.weight.data, block.up.weight.data.clone()
    block.up.weight.data = old


MOVES_OF_FORWARD = {
    "data": lambda block: setattr(block.up.weight, "data", block.up.weight.data.clone()),
    "set_": set_to_a_copy,
    "half and double": lambda block: block.up.half().double(),
    "there and back": there_and_back,
}


def moved_in_forward(stage: str, how: str, options: dict) -> list[str]:
    """What is said in the second step and after it. The first one trains right, or is refused as well."""
    beside = Beside(stage, lambda: MovesItself(how), **options)
    if how == "there and back":
        beside.train(3)
        return []

    def step():
        beside.engine_backward()
        beside.engine.step()

    found, shards = [], []
    for number in range(3):
        try:
            step()
        except RuntimeError as error:
            found += [str(error)] * (number > 0)
        beside.engine.zero_grad()
        shards.append(beside.engine.full_state_dict())
    parts.assert_same_state(shards[1], shards[0], atol=0)  # no step after the first one counts
    beside.engine.close()
    assert not any(parameter.isnan().any() for parameter in beside.model.parameters())
    return found


def functional(stage: str) -> str:
    """The model called with other tensors in the place of its parameters."""
    beside = Beside(stage)
    others = {name: torch.zeros_like(value) for name, value in beside.plain.named_parameters()}
    tokens, _ = parts.token_batch(0, beside.rank)
    found = message(lambda: torch.func.functional_call(beside.model, others, (tokens,)), RuntimeError)
    beside.train()
    return found


def moves_that_change_nothing(stage: str) -> None:
    beside = Beside(stage)
    beside.train()
    model = beside.model
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
        beside.train(1)


def written_between_steps(stage: str) -> str | None:
    """Plain float32 weights may be changed by hand between two steps (as some models clamp theirs), in ZeRO-1 and -2.

    Under mixed precision it would be lost; in ZeRO-3 there is nothing to write to.
    """
    beside = Beside(stage, parts.OddModel)
    if stage == "zero3":
        found = message(lambda: clamp(beside.model), RuntimeError)
        beside.train()
        return found
    for _ in range(2):
        clamp(beside.model)
        clamp(beside.plain)
        beside.backward()
        beside.step()
    beside.same()
    low = parts.seeded(parts.OddModel, dtype=torch.float32)
    engine = parts.STAGES[stage](low, MOMENTUM, param_dtype=torch.bfloat16)
    batch = parts.token_batch(0, beside.rank)

    def loss_fn(out, targets):
        return F.cross_entropy(out.float(), targets)

    engine.training_step(*batch, loss_fn)
    clamp(low)
    found = message(lambda: engine.training_step(*batch, loss_fn), RuntimeError)
    engine.training_step(*batch, loss_fn)  # said once; from here on the shards count again
    return found


def clamp(model):
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)


class Writing(parts.OddModel):
    """A forward that writes into its unit's weights."""

    class Block(parts.OddBlock):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.div_(self.up.weight.norm())
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.blocks[1] = self.Block(5, 9)


def forward_writes(stage: str) -> list[str]:
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(Writing), MOMENTUM)
    tokens, targets = parts.token_batch(0, rank)
    found = [message(lambda: engine.training_step(tokens, targets, F.cross_entropy), RuntimeError)]

    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 3, max_norm=0.1)

        def forward(self, tokens):
            return self.embedding(tokens).mean(1)

    found.append(message(lambda: parts.STAGES[stage](parts.seeded(Limited), MOMENTUM), ValueError))
    return found


# Optimizer state.


def optimizer_state(stage: str) -> dict[str, str]:
    """What does not fit is refused, with what it is and what it should be; and what is there stays and goes on."""
    other = {"zero1": "zero2", "zero2": "zero3", "zero3": "zero1"}[stage]
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def state_of(stage, build=parts.OddModel, **options):
        engine = parts.STAGES[stage](parts.seeded(build), ADAMW, **options)
        engine.training_step(*parts.token_batch(0, dist.get_rank()), F.cross_entropy)
        return engine.optimizer.state_dict()

    plain = parts.seeded(parts.OddModel)
    optimizer = ADAMW(plain.parameters())
    F.cross_entropy(plain(parts.token_batch(0, 0)[0]), parts.token_batch(0, 0)[1]).backward()
    optimizer.step()
    states = {
        "another number of ranks": state_of(stage, group=alone),
        "another stage": state_of(other),
        "another layout": state_of(stage, **({"units": []} if stage == "zero3" else {"bucket_mb": 0})),
        "another model": state_of(stage, lambda: parts.OddModel(blocks=2)),
        "plain": optimizer.state_dict(),
    }
    beside = Beside(stage, optimizer_cls=ADAMW)
    beside.train()
    found = {}
    for name, state in states.items():
        found[name] = message(lambda state=state: beside.engine.optimizer.load_state_dict(state), ValueError)
        beside.train(1)
    # one parameter, of which a rank has less than plain PyTorch: torch itself sees nothing wrong
    one = nn.Linear(8, 8, bias=False)
    optimizer = ADAMW(one.parameters())
    one(torch.ones(8)).sum().backward()
    optimizer.step()
    engine = parts.STAGES[stage](nn.Linear(8, 8, bias=False), ADAMW)
    found["one parameter"] = message(lambda: engine.optimizer.load_state_dict(optimizer.state_dict()), ValueError)
    return found


def optimizer_state_that_fits(stage: str) -> None:
    """Through a file into a new engine, which goes on as the old one would have."""
    beside = Beside(stage, optimizer_cls=ADAMW)
    beside.train()
    weights, file = beside.engine.full_state_dict(), io.BytesIO()
    torch.save(beside.engine.optimizer.state_dict(), file)
    beside.model = parts.seeded(parts.OddModel, seed=5)
    beside.engine = parts.STAGES[stage](beside.model, ADAMW)
    beside.engine.load_full_state_dict(weights)
    file.seek(0)
    beside.engine.optimizer.load_state_dict(torch.load(file))
    beside.train(3)


# A build that is refused.


def refused_builds(stage: str) -> list[str]:
    """The model is as it was: the same objects, memory and hooks. It trains plainly, and an engine can be built."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage]

    def raises_on_one(params):
        if rank == world_size - 1:
            raise ZeroDivisionError("of the caller's own")
        return MOMENTUM(params)

    def as_it_was():
        own = [(id(p), type(p), p.data_ptr(), p.requires_grad, len(vars(p))) for p in model.parameters()]
        hooks = [
            (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._load_state_dict_pre_hooks))
            for m in model.modules()
        ]
        hooks += [bool(p._post_accumulate_grad_hooks) for p in model.parameters()]
        return own, hooks, {name: value.clone() for name, value in model.state_dict().items()}

    before, found = as_it_was(), []
    for optimizer_cls, options in (
        (lambda params: "no optimizer", {}),
        (MOMENTUM, {"param_groups": [{"params": [model.head.weight]}]}),
        (MOMENTUM, {"param_groups": [{"params": model.parameters()}]}),
        (raises_on_one, {}),
        (torch.optim.LBFGS, {}),
    ):
        found.append(message(lambda o=optimizer_cls, k=options: engine(model, o, **k)))
        after = as_it_was()
        assert after[:2] == before[:2]
        parts.assert_same_state(after[2], before[2], atol=0)
    plain = parts.seeded(parts.OddModel)
    for module in (plain, model):  # by plain PyTorch first
        optimizer = MOMENTUM([param for param in module.parameters() if param.requires_grad])
        tokens, targets = parts.token_batch(0, 0)
        F.cross_entropy(module(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    beside = Beside(stage, lambda: copy.deepcopy(plain))
    beside.model, beside.engine = model, engine(model, MOMENTUM)
    beside.train()
    return found


def a_build_that_fails_late(stage: str) -> str:
    """What raises only over the real pieces, when the model is cut already: its weights are whole again."""
    model, calls = parts.seeded(parts.OddModel), []
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def raises_later(params):
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError("the second time")
        return MOMENTUM(params)

    found = message(lambda: parts.STAGES[stage](model, raises_later), ZeroDivisionError)
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * len(list(model.parameters()))
    parts.assert_same_state(model.state_dict(), before, atol=0)
    parts.STAGES[stage](model, MOMENTUM).training_step(*parts.token_batch(0, dist.get_rank()), F.cross_entropy)
    return found


def init_fn_raises_on_one() -> str:
    """The others hear of it, and the model is on `meta` as before: another try works."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = parts.OddModel()
    weight = model.blocks[1].up.weight

    def bad(name, tensor):
        if rank == world_size - 1 and name == "blocks.1.up.weight":
            raise ZeroDivisionError("of the caller's own")
        tensor.fill_(0.1)

    found = message(lambda: parts.ZeRO3(model, MOMENTUM, init_fn=bad))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.blocks[1].up.weight is weight and type(weight) is nn.Parameter and weight.requires_grad
    engine = parts.ZeRO3(model, MOMENTUM, init_fn=lambda name, tensor: tensor.fill_(0.1))
    engine.training_step(*parts.token_batch(0, rank), F.cross_entropy)
    assert not any(value.is_meta for value in engine.full_state_dict().values())
    return found


def named_pairs(stage: str) -> list[str]:
    """Groups of (name, parameter) pairs, as torch's optimizers take them, also beside a group without names."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model = parts.seeded(parts.OddModel), parts.seeded(parts.OddModel)

    def groups(model, pairs):
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        weights, others = ([(n, p) for n, p in named if (p.dim() > 1) == flag] for flag in (True, False))
        rest = iter(others) if pairs else [p for _, p in others]
        return [{"params": weights if pairs else [p for _, p in weights], "lr": 0.02}, {"params": rest}]

    engine = parts.STAGES[stage](model, MOMENTUM, param_groups=groups(model, True))
    optimizer = MOMENTUM(groups(plain, False))
    for step in range(2):
        for other in range(world_size):
            x, y = parts.token_batch(step, other)
            (F.cross_entropy(plain(x), y) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    model = parts.seeded(parts.OddModel)
    strangers = [[("theirs", torch.zeros(2))], ["weight"]]
    return [message(lambda s=s: parts.STAGES[stage](model, MOMENTUM, param_groups=[{"params": s}])) for s in strangers]


class WithGraph(parts.OddModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse())


def sparse_buffers(stage: str) -> str:
    return message(lambda: parts.STAGES[stage](parts.seeded(WithGraph), MOMENTUM), ValueError)


class OneBuffer(parts.OddModel):
    """Two modules that share a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.head.register_buffer("count", self.count)


def a_buffer_under_two_names() -> None:
    """On `meta`, too: it is filled once, and stays one."""
    with torch.device("meta"):
        model = OneBuffer()
    names = []

    def fill(name, tensor):
        names.append(name)
        tensor.fill_(0.1)

    engine = parts.ZeRO3(model, MOMENTUM, init_fn=fill)
    assert model.count is model.head.count and not model.count.is_meta
    assert [name for name in names if "count" in name] == ["count"]
    engine.load_full_state_dict(engine.full_state_dict())


# What may be asked, and what users expect.


def metadata_of_freed_weights() -> None:
    """What reads no value answers as a whole weight would."""
    engine = parts.ZeRO3(parts.seeded(parts.OddModel), MOMENTUM)
    whole, freed = parts.seeded(parts.OddModel).blocks[0].up.weight, engine.model.blocks[0].up.weight
    for ask in (
        len,
        lambda p: p.type(),
        lambda p: p.is_shared(),
        lambda p: p.is_inference(),
        lambda p: p.data.shape,
        lambda p: p.data.dtype,
        lambda p: torch.empty_like(p).shape,
        lambda p: torch.empty_like(p, dtype=torch.int8).dtype,
        lambda p: (p.size(), p.size(0), p.stride(), p.dim(), p.numel(), p.element_size(), p.is_contiguous()),
        lambda p: (p.shape, p.dtype, p.device, p.layout, p.ndim, p.requires_grad, p.is_leaf, p.grad, p.grad_fn),
        lambda p: isinstance(p, nn.Parameter),
    ):
        assert ask(freed) == ask(whole)
    assert isinstance(freed._version, int) and isinstance(freed.data_ptr(), int)
    assert freed.untyped_storage().nbytes() == 0
    assert "sharded" in message(lambda: freed.data.sum(), RuntimeError)


def an_engine_is_like_its_model(stage: str) -> list[str]:
    beside = Beside(stage)
    engine, model = beside.engine, beside.model
    assert engine.eval() is engine and not engine.training and not model.blocks[1].training
    assert engine.train() is engine and engine.training and model.blocks[1].training
    assert not engine.train(False).training
    for name in ("parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers"):
        ours, theirs = list(getattr(engine, name)()), list(getattr(model, name)())
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs):
            assert (a[0] == b[0] and a[1] is b[1]) if isinstance(a, tuple) else a is b
    assert [name for name, _ in engine.named_parameters(prefix="x")][0].startswith("x.")
    names = ("state_dict", "load_state_dict", "cuda", "to", "half", "requires_grad_", "backward", "blocks", "nonsense")
    found = [message(lambda name=name: getattr(engine, name), AttributeError) for name in names]
    beside.train()
    return found


def a_mesh_for_a_group(stage: str) -> str:
    """A DeviceMesh of one dimension is a group, of two it has replicas; of three it is refused."""
    world_size = dist.get_world_size()
    beside = Beside(stage, group=parts.mesh(world_size))
    beside.train()
    mesh = parts.mesh(1, 1, world_size, names=("pipeline", "replicas", "shards"))
    found = message(lambda: Beside(stage, group=mesh), ValueError)
    Beside(stage, group=mesh["shards"]).train()
    return found


def batch_norm_in_bfloat16(stage: str) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return message(lambda: parts.STAGES[stage](model, MOMENTUM, param_dtype=torch.bfloat16), ValueError)


class Tagged(nn.Parameter):
    """A parameter of a class of the caller's."""


def parameters_of_ones_own_class(stage: str) -> None:
    """They can be printed, and stay of their class while they are gathered and while they are not."""

    def build():
        model = parts.OddModel()
        model.head.weight = Tagged(model.head.weight.detach())
        return model

    beside = Beside(stage, build)
    beside.train()
    weight = beside.model.head.weight
    assert isinstance(weight, Tagged)
    text = message(lambda: repr(weight), RuntimeError) if stage == "zero3" else repr(weight)
    assert ("'head.weight'" if stage == "zero3" else "requires_grad=True") in text
    beside.engine.close()
    assert type(beside.model.head.weight) is Tagged and "requires_grad=True" in repr(weight)

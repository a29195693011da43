"""Engines that go are freed, closed ones leave a plain model, and copies of a model belong to no engine."""

import copy
import gc
import time
import weakref

import torch
from torch import nn

from zerolab.engine.gradients import GradScaler
from zerolab.engine.safety.guard import EngineParameter
from zerolab.properties.fixtures import (
    EXACT_LOW,
    MOMENTUM,
    SGD,
    Pair,
    Twice,
    a_step,
    hooks_on,
    odd,
    of_output,
    own_tokens,
    seeded,
    through_a_file,
    trained_params,
    vector_batch,
)
from zerolab.properties.property import (
    STAGES,
    NotApplicable,
    ask,
    ask_each,
    holds,
    only,
    refused,
    same,
    stages_hold,
)


def used_up(engine, how: str) -> list[weakref.ref]:
    """All that belongs to an engine that has trained."""
    trained = odd(engine, **({"param_dtype": torch.bfloat16} if how == "mixed precision" else {}))
    model = trained.model
    scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 1)
    if how == "mixed precision":
        scaler = GradScaler("cpu")
        scaler.scale(of_output(trained, *own_tokens(0))).backward()
        scaler.step(trained)
    else:
        a_step(trained)
    if how == "between forward and backward":
        of_output(trained, *own_tokens(0))
    if how == "after an error":
        with refused(error=Exception):
            trained("no tokens")
    if how == "closed":
        trained.close()
    things = [trained, scheduler, model, model.head, *model.parameters()]
    if how != "closed" and not engine.foreign:
        things.append(trained.optimizer)
        for bucket in trained.all_buckets:
            things += [bucket.shard, bucket.flat, *bucket.pieces]
    return [weakref.ref(thing) for thing in things]


@holds(
    "life",
    *ask_each("how", ("trained", "after an error"), "zero1"),
    *ask_each("how", ("mixed precision", "closed"), "zero2"),
    ask("zero3", how="between forward and backward"),
)
def an_engine_that_goes_leaves_nothing_alive(engine, how):
    """After `del` and a collection nothing of an engine is alive: itself, its model, parameters, shards, optimizer."""
    if "to be destroyed" in engine.more:
        raise NotApplicable(f"{engine.name} goes by a call, `destroy`")
    gone = []
    for _ in range(3):
        gone += used_up(engine, how)
    gc.collect()
    deadline = time.monotonic() + 30  # a gloo thread lets go of a collective's buffers a moment after `wait()`
    while (alive := [reference() for reference in gone if reference() is not None]) and time.monotonic() < deadline:
        del alive
        time.sleep(0.05)
        gc.collect()  # what it had may be in a cycle
    same("what is alive", sorted({type(thing).__name__ for thing in alive}), [])


class Tagged(nn.Parameter):
    """A parameter of a class of the caller's."""


def own_class() -> nn.Module:
    model = Twice()
    model.head.weight = model.embedding.weight = Tagged(model.head.weight.detach())
    return model


@stages_hold("life", ask(), ask(**EXACT_LOW), only("zero3", reshard_after_forward=False))
def closing_gives_a_plain_model(engine, **options):
    """`close()` gives a plain model with the shards' values, its objects and ties; another engine may follow.

    Between backward and step it leaves nothing in flight, and drops the gradients.
    """
    pair, fresh = Pair(engine, own_class, **options), seeded(own_class)
    model, trained, (tokens, _) = pair.model, pair.trained, own_tokens(0)
    model.head.register_forward_hook(lambda *_: None)  # the caller's own stays
    objects = dict(model.named_parameters())
    assert isinstance(model.head.weight, Tagged)
    if engine.like != "zero3":
        assert "requires_grad=True" in repr(model.head.weight)
    pair.train(2)
    before = trained.full_state_dict()
    with trained.no_sync():
        pair.alone().backward()
    pair.alone().backward()
    trained.close()
    same("the plain model's state", model.state_dict(), before)
    rounded = [torch.equal(param, param.bfloat16().double()) for param in model.parameters()]
    assert not all(rounded), "the plain model's values are bfloat16 numbers, and not those of the shards"
    same("the dtype of what the model computes", model(tokens).dtype, torch.float64)  # inputs are not cast any more
    model.load_state_dict(before)  # and loading is not refused
    for name, param in model.named_parameters():
        assert param is objects[name] and type(param) is type(fresh.get_parameter(name)), f"{name} is another object"
        assert param.requires_grad and param.grad is None and "requires_grad=True" in repr(param), name
        same(f"marks on {name}", [key for key in vars(param) if key.startswith("zero_")], [])
        # Memory of its own, and no bucket's: moves and `param.data` are as ever.
        same(f"bytes of the storage under {name}", param.untyped_storage().nbytes(), param.nbytes)
    assert model.head.weight is model.embedding.weight, "the tied weight is two objects"
    same("hooks that are left", hooks_on(model), hooks_on(fresh) + 1)
    for name in ("step", "__call__", "full_state_dict", "close"):
        with refused(error=AttributeError):
            getattr(trained, name)()
    twin = copy.deepcopy(model)
    Pair(engine.another(), (twin, model)).alike()


@stages_hold(
    "life",
    ask("zero1", copied=copy.deepcopy, mixed=False),
    ask("zero2", copied=copy.deepcopy, mixed=True),
    ask("zero3", copied=through_a_file, mixed=False),
    ask("zero1", copied=through_a_file, mixed=True),
)
def a_copy_of_the_model_belongs_to_no_engine(engine, copied, mixed):
    """A deep copy, or one through a file, is a plain model with its own memory (or refused), and the engine goes on."""

    pair = Pair(engine, **(EXACT_LOW if mixed else {}))
    model, (tokens, targets) = pair.model, own_tokens(3)
    pair.train(1)
    if engine.like == "zero3":
        with refused("sharded", "full_state_dict"):
            copied(model)
    else:
        twin = copied(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        same("the copy's state", twin.state_dict(), before)
        for param, own in zip(twin.parameters(), model.parameters()):
            marked = engine.foreign or isinstance(own, EngineParameter)  # the copies of others must be plain, too
            plain = type(param) is nn.Parameter and param.grad is None and param.requires_grad == own.requires_grad
            assert plain and marked, "the copy's parameter is no plain one"
        # The copy trains by itself, with torch's own tools, and the engine's model does not notice.
        optimizer = SGD(trained_params(twin))
        of_output(twin, tokens, targets).backward()
        assert nn.utils.clip_grad_norm_(twin.parameters(), 1e9) > 0
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(twin.head.weight, before["head.weight"])
        same("the engine's weights after the copy was trained", model.state_dict(), before)
        if mixed:  # a copy is plain: moved to float32 it computes in float32
            same("the dtype that the moved copy computes in", twin.float()(tokens).dtype, torch.float32)
        else:  # it may have an engine of its own
            a_step(engine(twin, MOMENTUM), 3)
    pair.alike(1)


class Branching(nn.Module):
    """A branch that the loss need not use, of operations that save their own results for backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.side, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.seen = []

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.seen.append(weakref.ref(x))
        self.extra = torch.softmax(torch.tanh(self.side(x)), -1).exp()
        self.seen.append(weakref.ref(self.extra))
        return torch.sigmoid(self.head(x))


@holds(
    "life",
    ask("zero1", chapters=STAGES, way="forward alone"),
    ask("zero2", way="a branch that the loss leaves out"),
    ask("zero3", way="a graph that is retained"),
)
def what_autograd_has_saved_goes_with_the_graph(engine, way):
    """After a forward alone, or with a branch that the loss leaves out, no result outlives its graph.

    An operation that saves its own result (tanh, softmax, exp) makes a cycle through C++, which only a backward opens.
    """
    options = {} if engine.chapter else {"find_unused": True}
    trained = engine(seeded(Branching), MOMENTUM, **options)
    model = trained.model
    for step in range(3):
        x, _ = vector_batch(step, engine.rank, 5, torch.float64)
        out = trained(x.requires_grad_())
        model.seen.append(weakref.ref(out))
        if way != "forward alone":
            out.square().mean().backward(retain_graph=way == "a graph that is retained")
            trained.step()
            trained.zero_grad()
        model.extra = out = None
        alive = [reference() for reference in model.seen if reference() is not None]
        same(f"results that are alive after step {step}", len(alive), 0)
        del alive

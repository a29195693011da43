"""Engines that go are freed, closed ones leave a plain model, and copies of a model belong to no engine."""

import copy
import gc
import io
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.engine.gradients import GradScaler
from harness.engine.safety.guard import EngineParameter
from harness.properties import fixtures
from harness.properties.property import STAGES, NotApplicable, ask, ask_each, expect, holds, refused, same
from harness.properties.training import Pair


@holds(
    "life",
    *ask_each("how", ("trained", "after an error"), "zero1", more_engines=STAGES),
    *ask_each("how", ("mixed precision", "closed"), "zero2", more_engines=STAGES),
    ask("zero3", more_engines=STAGES, how="between forward and backward"),
)
def an_engine_that_goes_leaves_nothing_alive(engine, how):
    """After `del` and a collection nothing of an engine is alive: itself, its model, parameters, shards, optimizer."""
    gone, rank = [], dist.get_rank()
    for _ in range(3):
        model = fixtures.seeded(fixtures.OddModel)
        options = {"param_dtype": torch.bfloat16} if how == "mixed precision" else {}
        trained = engine(model, fixtures.ADAMW, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 1)
        tokens, targets = fixtures.token_batch(0, rank)
        if how == "mixed precision":
            scaler = GradScaler("cpu")
            scaler.scale(fixtures.in_float32(trained(tokens), targets)).backward()
            scaler.step(trained)
            del scaler
        else:
            trained.training_step(tokens, targets, F.cross_entropy)
        if how == "between forward and backward":
            loss = F.cross_entropy(trained(tokens), targets)
            del loss
        if how == "after an error":
            refused(lambda trained=trained: trained("no tokens"), error=Exception)
        if how == "closed":
            trained.close()
        gone += [weakref.ref(thing) for thing in (trained, model, model.head, *model.parameters())]
        if "to be destroyed" in engine.more:
            raise NotApplicable(f"{engine.name} goes by a call, `destroy`")
        if how != "closed" and not engine.foreign:
            buckets = trained.all_buckets
            gone += [weakref.ref(thing) for thing in (trained.optimizer,)]
            gone += [weakref.ref(tensor) for bucket in buckets for tensor in (bucket.shard, bucket.flat)]
            gone += [weakref.ref(piece) for bucket in buckets for piece in bucket.pieces]
            del buckets
        del trained, model, scheduler
    gc.collect()
    deadline = time.monotonic() + 30  # a gloo thread lets go of a collective's buffers a moment after `wait()`
    while (alive := [reference() for reference in gone if reference() is not None]) and time.monotonic() < deadline:
        del alive
        time.sleep(0.05)
    same("what is alive", sorted({type(thing).__name__ for thing in alive}), [])


class Tagged(nn.Parameter):
    """A parameter of a class of the caller's."""


def own_class() -> nn.Module:
    model = fixtures.Twice()
    model.head.weight = model.embedding.weight = Tagged(model.head.weight.detach())
    return model


@holds(
    "life",
    ask(),
    ask("zero3", reshard_after_forward=False),
    of_stages=True,
)
def closing_gives_a_plain_model(engine, **options):
    """`close()` gives a plain model with the trained values, its objects and ties; another engine may follow."""
    pair, fresh = Pair(engine, own_class, **options), fixtures.seeded(own_class)
    model, trained = pair.trained.model, pair.trained
    model.head.register_forward_hook(lambda *_: None)  # the caller's own stays
    objects = dict(model.named_parameters())
    expect(isinstance(model.head.weight, Tagged), "the head's weight", "a Tagged", type(model.head.weight))
    if engine.like != "zero3":
        assert "requires_grad=True" in repr(model.head.weight)
    pair.train(2)
    before = trained.full_state_dict()
    trained.close()
    same("the plain model's state", model.state_dict(), before)
    for name, param in model.named_parameters():
        kept = param is objects[name] and type(param) is type(fresh.get_parameter(name)) and param.requires_grad
        kept = kept and param.grad is None and "requires_grad=True" in repr(param)
        expect(kept, f"the parameter {name}", "the same object, of its class, without gradient", type(param).__name__)
        expect(not [key for key in vars(param) if key.startswith("zero_")], f"marks on {name}", "none", vars(param))
        # Memory of its own, and no bucket's: moves and `param.data` are as ever.
        same(f"bytes of the storage under {name}", param.untyped_storage().nbytes(), param.nbytes)
    expect(model.head.weight is model.embedding.weight, "the tied weight", "one object", "two")
    same("hooks that are left", fixtures.hooks_on(model), fixtures.hooks_on(fresh) + 1)
    for asked in (lambda: trained.step(), lambda: trained(1), lambda: trained.full_state_dict(), trained.close):
        refused(asked, error=AttributeError)
    twin = copy.deepcopy(model)
    Pair(engine.another(), (twin, model)).alike()


@holds("life", ask(mixed=False), ask(mixed=True))
def closing_drops_gradients_and_takes_the_shards_values(engine, mixed):
    """Between backward and step `close()` leaves nothing in flight; a model in mixed precision is float32 then."""
    model = fixtures.seeded(fixtures.OddModel, dtype=torch.float32)
    trained = engine(model, fixtures.ADAMW, param_dtype=torch.bfloat16 if mixed else None)
    tokens, targets = fixtures.token_batch(0, dist.get_rank())

    trained.training_step(tokens, targets, fixtures.in_float32)
    before = trained.full_state_dict()
    with trained.no_sync():
        fixtures.in_float32(trained(tokens), targets).backward()
    fixtures.in_float32(trained(tokens), targets).backward()
    trained.close()
    same("the plain model's state", model.state_dict(), before)
    same("parameters with a gradient", [n for n, p in model.named_parameters() if p.grad is not None], [])
    same("dtypes of parameters", {param.dtype for param in model.parameters()}, {torch.float32})
    rounded = all((param == param.bfloat16().float()).all() for param in model.parameters())
    expect(not rounded, "the plain model's values", "those of the shards", "all are bfloat16 numbers")
    same("the dtype of what the model computes", model(tokens).dtype, torch.float32)  # inputs are not cast any more
    model.load_state_dict(before)  # and loading is not refused


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@holds(
    "life",
    ask("zero1", more_engines=STAGES, copied=copy.deepcopy, mixed=False),
    ask("zero2", more_engines=STAGES, copied=copy.deepcopy, mixed=True),
    ask("zero3", more_engines=STAGES, copied=through_a_file, mixed=False),
    ask("zero1", more_engines=STAGES, copied=through_a_file, mixed=True),
    of_stages=True,
)
def a_copy_of_the_model_belongs_to_no_engine(engine, copied, mixed):
    """A deep copy, or one through a file, is a plain model with its own memory (or refused), and the engine goes on."""

    def build():
        model = fixtures.seeded(fixtures.OddModel, dtype=torch.float32)
        return engine(model, fixtures.MOMENTUM, param_dtype=torch.bfloat16 if mixed else None)

    def step_both(step):
        for each in (trained, untouched):
            each.training_step(*fixtures.token_batch(step, dist.get_rank()), fixtures.in_float32)

    trained, untouched = build(), build()
    model = trained.model
    step_both(0)
    if engine.like == "zero3":
        refused(lambda: copied(model), "sharded", "full_state_dict", error=RuntimeError)
    else:
        twin = copied(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        same("the copy's state", twin.state_dict(), before)
        for param, own in zip(twin.parameters(), model.parameters()):
            marked = engine.foreign or isinstance(own, EngineParameter)  # the copies of others must be plain, too
            plain = type(param) is nn.Parameter and marked and param.grad is None
            plain = plain and param.requires_grad == own.requires_grad
            expect(plain, "the copy's parameter", "an nn.Parameter of its own", type(param).__name__)
        # The copy trains by itself, with torch's own tools, and the engine's model does not notice.
        optimizer = torch.optim.SGD([param for param in twin.parameters() if param.requires_grad], lr=0.1)
        tokens, targets = fixtures.token_batch(3, dist.get_rank())
        fixtures.in_float32(twin(tokens), targets).backward()
        assert nn.utils.clip_grad_norm_(twin.parameters(), 1e9) > 0
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(twin.head.weight, before["head.weight"])
        same("the engine's weights after the copy was trained", model.state_dict(), before)
        if mixed:  # a copy is plain: moved to float32 it computes in float32
            same("the dtype that the moved copy computes in", twin.float()(tokens).dtype, torch.float32)
        else:  # it may have an engine of its own
            engine(twin, fixtures.MOMENTUM).training_step(tokens, targets, fixtures.in_float32)
    step_both(1)
    # The same engine on the same data: the same operations.
    same("the weights, beside an engine's whose model was never copied", trained.full_state_dict(),
         untouched.full_state_dict())  # fmt: skip


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
    ask("zero1", more_engines=STAGES, chapters=STAGES, way="forward alone"),
    ask("zero2", more_engines=STAGES, way="a branch that the loss leaves out"),
    ask("zero3", more_engines=STAGES, way="a graph that is retained"),
)
def what_autograd_has_saved_goes_with_the_graph(engine, way):
    """After a forward alone, or with a branch that the loss leaves out, no result outlives its graph.

    An operation that saves its own result (tanh, softmax, exp) makes a cycle through C++, which only a backward opens.
    """
    options = {} if engine.chapter else {"find_unused": True}
    trained = engine(fixtures.seeded(Branching), fixtures.MOMENTUM, **options)
    model = trained.model
    for step in range(3):
        x, y = fixtures.vector_batch(step, dist.get_rank(), 5, torch.float64)
        out = trained(x.requires_grad_())
        model.seen.append(weakref.ref(out))
        if way != "forward alone":
            F.mse_loss(out, y[:, :3]).backward(retain_graph=way == "a graph that is retained")
            trained.step()
            trained.zero_grad()
        model.extra = out = None
        alive = [reference() for reference in model.seen if reference() is not None]
        same(f"results that are alive after step {step}", len(alive), 0)
        del alive

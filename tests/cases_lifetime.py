"""Run on every rank: engines that go, models that become plain again, and copies that belong to no engine."""

import copy
import gc
import io
import pickle
import time
import weakref

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from cases_paths import MOMENTUM, LowRank, vectors
from torch import nn
from torch.nn import functional as F

from harness.engine.gradients import GradScaler
from harness.engine.guard import EngineParameter
from harness.measure.memory import storage_bytes

ADAMW = parts.OPTIMIZERS["adamw"]


def train(engine, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        engine.training_step(*parts.token_batch(step, dist.get_rank()), F.cross_entropy)


def train_plainly(model: nn.Module, steps: int = 2, first: int = 0) -> None:
    """The same steps by plain PyTorch on the whole batch."""
    optimizer = MOMENTUM([param for param in model.parameters() if param.requires_grad])
    for step in range(first, first + steps):
        tokens, targets = parts.whole(parts.token_batch, step, dist.get_world_size())
        F.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def engines_that_go(stage: str, how: str) -> None:
    """After `del` and a collection nothing of an engine is alive: itself, its model, parameters, shards, optimizer."""
    gone = []
    for _ in range(4):
        model = parts.seeded(parts.OddModel)
        options = {"param_dtype": torch.bfloat16} if how == "mixed precision" else {}
        engine = parts.STAGES[stage](model, ADAMW, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        if how == "mixed precision":
            scaler = GradScaler("cpu")
            tokens, targets = parts.token_batch(0, dist.get_rank())
            scaler.scale(F.cross_entropy(engine(tokens).float(), targets)).backward()
            scaler.step(engine)
            del scaler
        else:
            train(engine)
        if how == "between forward and backward":
            loss = F.cross_entropy(engine(parts.token_batch(0, dist.get_rank())[0]), torch.zeros(4, dtype=torch.long))
            del loss
        if how == "after an error":
            message(lambda engine=engine: engine("no tokens"))
        if how == "closed":
            engine.close()
        gone += [weakref.ref(thing) for thing in (engine, model, model.head, *model.parameters())]
        if how != "closed":
            buckets = engine.buckets
            gone += [weakref.ref(thing) for thing in (engine.optimizer, engine.moments)]
            gone += [weakref.ref(bucket.shard) for bucket in buckets] + [weakref.ref(b.flat) for b in buckets]
            gone += [weakref.ref(piece) for bucket in buckets for _, piece in bucket.pieces]
            del buckets
        del engine, model, scheduler
    gc.collect()
    deadline = time.monotonic() + 10  # a gloo thread lets go of a collective's buffers a moment after `wait()`
    while (alive := [reference() for reference in gone if reference() is not None]) and time.monotonic() < deadline:
        del alive
        time.sleep(0.05)
    assert not alive, f"{len(alive)} of {len(gone)} are alive: {sorted({type(thing).__name__ for thing in alive})}"


def closing(stage: str, options: dict) -> None:
    """`close()` gives a plain model with the values that were trained, its objects and ties; and another engine."""
    other = {"zero1": "zero3", "zero2": "zero1", "zero3": "zero2"}[stage]
    plain, model = parts.seeded(parts.Twice), parts.seeded(parts.Twice)
    objects, hooks = dict(model.named_parameters()), hooks_of(model)
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(1))  # the caller's own stays
    train_plainly(plain)
    engine = parts.STAGES[stage](model, MOMENTUM, **options)
    train(engine)
    before = engine.full_state_dict()
    engine.close()
    parts.assert_same_state(model.state_dict(), before, atol=0)
    parts.assert_same_state(model.state_dict(), plain.state_dict(), atol=1e-12)
    for name, param in model.named_parameters():
        assert param is objects[name] and type(param) is nn.Parameter and param.requires_grad and param.grad is None
        assert not [key for key in vars(param) if key.startswith("zero_")]
        # memory of its own, and no bucket's: moves and `param.data` are as ever
        assert param.untyped_storage().nbytes() == param.nbytes
    assert model.head.weight is model.embedding.weight
    assert hooks_of(model) == hooks + 1
    for asked in (lambda: engine.step(), lambda: engine(1), lambda: engine.full_state_dict(), lambda: engine.close()):
        assert "closed" in message(asked, AttributeError)
    seen.clear()
    train_plainly(model, first=2)
    train_plainly(plain, first=2)
    assert len(seen) == 2
    parts.assert_same_state(model.state_dict(), plain.state_dict(), atol=1e-12)
    model.float().double()
    for value in plain.parameters():
        value.data = value.data.float().double()
    again = parts.STAGES[other](model, MOMENTUM)
    train(again, first=4)
    train_plainly(plain, first=4)
    parts.assert_same_state(again.full_state_dict(), plain.state_dict(), atol=1e-12)


def hooks_of(model: nn.Module) -> int:
    """How many hooks there are on modules and parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_load_state_dict_pre_hooks")
    count = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return count + sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def closing_mixed_precision(stage: str) -> None:
    """The model gets the float32 values of the shards, and not the rounded ones."""
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    engine = parts.STAGES[stage](model, ADAMW, param_dtype=torch.bfloat16)
    tokens, targets = parts.token_batch(0, dist.get_rank())
    engine.training_step(tokens, targets, lambda out, target: F.cross_entropy(out.float(), target))
    before = engine.full_state_dict()
    engine.close()
    parts.assert_same_state(model.state_dict(), before, atol=0)
    assert all(param.dtype == torch.float32 for param in model.parameters())
    assert any((param != param.bfloat16().float()).any() for param in model.parameters())
    assert model(tokens).dtype == torch.float32  # inputs are not cast any more
    model.load_state_dict(before)  # and loading is not refused


def closing_in_the_middle(stage: str) -> None:
    """Between backward and step: gradients are dropped, and nothing is left in flight or gathered."""
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, MOMENTUM)
    train(engine)
    before = engine.full_state_dict()
    tokens, targets = parts.token_batch(5, dist.get_rank())
    with engine.no_sync():
        F.cross_entropy(engine(tokens), targets).backward()
    F.cross_entropy(engine(tokens), targets).backward()
    engine.close()
    parts.assert_same_state(model.state_dict(), before, atol=0)
    assert all(param.grad is None for param in model.parameters())


def copies(stage: str, how: str, mixed: bool) -> None:
    """A deep copy, or one through a file, is a plain model with its own memory, and the engine goes on."""
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    options = {"param_dtype": torch.bfloat16} if mixed else {}
    engine = parts.STAGES[stage](model, MOMENTUM, **options)

    def loss_fn(out, targets):
        return F.cross_entropy(out.float(), targets)

    def step(number):
        engine.training_step(*parts.token_batch(number, dist.get_rank()), loss_fn)

    def copied():
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    step(0)
    if stage == "zero3":
        found = message(copied, RuntimeError)
        assert "sharded" in found and "full_state_dict" in found
        step(1)
        return
    twin = copied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts.assert_same_state(twin.state_dict(), before, atol=0)
    for param, own in zip(twin.parameters(), model.parameters()):
        assert type(param) is nn.Parameter and isinstance(own, EngineParameter)
        assert param.requires_grad == own.requires_grad and param.grad is None
    # the copy trains by itself, with torch's own tools, and the engine's model does not notice
    optimizer = torch.optim.SGD([param for param in twin.parameters() if param.requires_grad], lr=0.1)
    tokens, targets = parts.token_batch(3, dist.get_rank())
    loss_fn(twin(tokens), targets).backward()
    assert nn.utils.clip_grad_norm_(twin.parameters(), 1e9) > 0
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(twin.head.weight, before["head.weight"])
    parts.assert_same_state(model.state_dict(), before, atol=0)
    # and the engine goes on as one that was never copied
    other = parts.STAGES[stage](
        parts.seeded(parts.OddModel, dtype=torch.float32),
        MOMENTUM,
        **({"param_dtype": torch.bfloat16} if mixed else {}),
    )
    other.training_step(*parts.token_batch(0, dist.get_rank()), loss_fn)
    step(1)
    other.training_step(*parts.token_batch(1, dist.get_rank()), loss_fn)
    parts.assert_same_state(engine.full_state_dict(), other.full_state_dict(), atol=0)
    # the copy may have an engine of its own
    if not mixed:
        parts.STAGES[stage](twin, MOMENTUM).training_step(*parts.token_batch(1, dist.get_rank()), loss_fn)


def a_copy_in_mixed_precision_is_moved(stage: str) -> None:
    """A copy is plain: when it is moved to float32 it computes in float32."""
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    parts.STAGES[stage](model, MOMENTUM, param_dtype=torch.bfloat16)
    twin = copy.deepcopy(model).float()
    assert twin(parts.token_batch(0, 0)[0]).dtype == torch.float32


def a_leaf_that_stays(stage: str) -> None:
    """The same input tensor in every step: no hooks of earlier steps stay on it, and its gradients are right."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(LowRank), MOMENTUM)
    plain = parts.seeded(LowRank)
    x, y = vectors(0, rank)
    twin = x.detach().clone().requires_grad_()
    for _ in range(5):
        F.cross_entropy(engine(x), y).backward()
        plain.load_state_dict(engine.full_state_dict())
        F.cross_entropy(plain(twin), y).backward()
        torch.testing.assert_close(x.grad, twin.grad, rtol=0, atol=1e-12)
        assert not x._backward_hooks and not x._post_accumulate_grad_hooks
        engine.step()
        engine.zero_grad()
        if stage == "zero3":
            assert storage_bytes(engine.model.parameters()) == 0


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


def graphs_that_nobody_goes_through(stage: str, way: str) -> None:
    """What autograd has saved goes with the graph: after a forward alone, and in a branch that the loss leaves out."""
    model = parts.seeded(Branching)
    engine = parts.STAGES[stage](model, MOMENTUM, find_unused=True)
    for step in range(3):
        x, y = vectors(step, dist.get_rank())
        out = engine(x)
        model.seen.append(weakref.ref(out))
        if way != "forward alone":
            F.cross_entropy(out, y).backward(retain_graph=way == "a graph that is retained")
            engine.step()
            engine.zero_grad()
        model.extra = out = None
        alive = [reference() for reference in model.seen if reference() is not None]
        assert not alive, f"{len(alive)} of {len(model.seen)} results are alive after step {step}"

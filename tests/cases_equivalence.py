"""Run on every rank: the stages against plain PyTorch, DDP and FSDP2."""

import copy
import dataclasses
from functools import partial

import parts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.run.model import GPT, next_token_loss, preset


def against_the_oracle(stage: str, optimizer: str, options: dict, steps: int = 12) -> None:
    """Float64, uneven sizes, other data on every rank: losses and weights equal the whole batch in one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    adam = parts.OPTIMIZERS[optimizer]
    losses, expected = parts.oracle(
        parts.seeded(parts.OddModel), adam, F.cross_entropy, parts.token_batch, steps, world_size
    )
    # rank 0 has the oracle's weights and every other rank something else: construction must make them equal
    model = parts.seeded(parts.OddModel, seed=rank)
    with torch.no_grad():
        model.shift.add_(rank)
        model.frozen.add_(rank)  # no seed makes these differ
    engine = parts.build_engine(stage, model, adam, options)
    for step in range(steps):
        loss = engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
        assert not loss.requires_grad
        torch.testing.assert_close(parts.mean_over_ranks(loss), losses[step], rtol=0, atol=1e-12)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
    # each rank's own loss, not the mean: they differ, or the data did not
    if world_size > 1:
        everyone = [torch.empty_like(loss) for _ in range(world_size)]
        dist.all_gather(everyone, loss)
        assert len({value.item() for value in everyone}) == world_size


def own_loop(stage: str, options: dict | None = None) -> None:
    """`loss.backward(); engine.step(); engine.zero_grad()`, keyword arguments, and a scheduler on engine.optimizer."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = parts.seeded(parts.OddModel)
    plain = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    engine = parts.build_engine(stage, parts.seeded(parts.OddModel), sgd, options or {})
    schedules = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, gamma=0.5)
    for step in range(10):
        tokens, targets = parts.whole(parts.token_batch, step, world_size)
        F.cross_entropy(model(tokens), targets).backward()
        plain.step()
        plain.zero_grad()
        schedule.step()
        tokens, targets = parts.token_batch(step, rank)
        loss = F.cross_entropy(engine(tokens=tokens), targets)
        loss.backward()
        engine(tokens)  # a forward without backward, right before the weights change: nothing gathered may survive
        engine.step()
        engine.zero_grad()
        schedules.step()
        if step % 3 == 0:  # an evaluation between two steps changes nothing
            with torch.no_grad():
                a = engine(tokens)
            engine.model.eval()
            assert torch.equal(a, engine(tokens).detach())
            engine.model.train()
    parts.assert_same_state(engine.full_state_dict(), model.state_dict(), atol=1e-12)


def like_ddp_and_fsdp2(stage: str, options: dict, steps: int = 10, device: str = "cpu") -> None:
    """Float32, N at most 2: a GPT's losses and weights equal DDP's and FSDP2's to the bit.

    With more ranks the sums have another order: then in float64, and equal to 1e-10.
    """
    rank, few = dist.get_rank(), dist.get_world_size() <= 2
    config = preset("toy")
    atol = 0.0 if few else 1e-10

    def batch(step):
        generator = torch.Generator().manual_seed(77 * step + rank)
        rows = torch.randint(256, (3, config.seq + 1), generator=generator)
        return rows[:, :-1].to(device), rows[:, 1:].to(device)

    def adamw(params):
        return torch.optim.AdamW(params, lr=1e-2, fused=device == "cuda")

    def train(model, optimizer):
        losses = []
        for step in range(steps):
            inputs, targets = batch(step)
            loss = next_token_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)

    def gpt():
        return parts.seeded(lambda: GPT(config), dtype=torch.float32 if few else torch.float64, device=device)

    ddp = DistributedDataParallel(gpt())
    expected = train(ddp, adamw(ddp.parameters()))
    state = ddp.module.state_dict()
    fsdp = gpt()
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)  # by default it is of whatever accelerator there is
    for block in fsdp.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(fsdp, mesh=mesh)
    torch.testing.assert_close(train(fsdp, adamw(fsdp.parameters())), expected, rtol=0, atol=atol)
    engine = parts.build_engine(stage, gpt(), adamw, options)
    losses = torch.stack([engine.training_step(*batch(step), next_token_loss) for step in range(steps)])
    torch.testing.assert_close(losses, expected, rtol=0, atol=atol)
    parts.assert_same_state(engine.full_state_dict(), {name: value.cpu() for name, value in state.items()}, atol=atol)
    assert losses[-1] != losses[0]


def one_exact_step(stage: str) -> None:
    """Integer data, a sum as the loss: every number is exact at any N, and so must be the step, in float32."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def integers():
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7, bias=False))
        for number, param in enumerate(model.parameters()):
            with torch.no_grad():
                param.copy_(torch.arange(param.numel()).view(param.shape) % 5 - 2 + number % 2)
        return model

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(who)
        x = torch.randint(-4, 5, (3, 5), generator=generator)
        return x.float(), torch.randint(-4, 5, (3, 7), generator=generator).float()

    def total(outputs, targets):
        return (outputs * targets).sum()

    plain = integers()
    total(plain(batch_of(0, 0)[0]), batch_of(0, 0)[1])
    inputs, targets = parts.whole(batch_of, 0, world_size)
    (total(plain(inputs), targets)).backward()
    gradients = {name: param.grad / world_size for name, param in plain.named_parameters()}
    expected = {name: param.detach() - gradients[name] for name, param in plain.named_parameters()}
    engine = parts.STAGES[stage](integers(), lambda shards: torch.optim.SGD(shards, lr=1.0))
    engine.training_step(*batch_of(0, rank), total)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=0)


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    extra: dict


class Fancy(nn.Module):
    """Units that take keyword arguments and return tuples, dictionaries and dataclasses."""

    class Unit(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.linear, self.kind = nn.Linear(5, 5), kind

        def forward(self, *, x):
            x = torch.tanh(self.linear(x))
            return {"tuple": (x, None), "dict": {"x": x}, "dataclass": Answer(x, {})}[self.kind]

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList([self.Unit("tuple"), self.Unit("dict"), self.Unit("dataclass")])

    def forward(self, batch, scale=1.0):
        x = self.units[0](x=batch["x"])[0]
        x = self.units[1](x=x)["x"]
        x = self.units[2](x=x).logits
        return Answer(x * scale, {"unused": x.exp()})


def any_inputs_and_outputs(stage: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, sgd = parts.seeded(Fancy), parts.OPTIMIZERS["momentum"]
    optimizer = sgd(plain.parameters())
    engine = parts.STAGES[stage](parts.seeded(Fancy), sgd)
    for step in range(10):
        x = parts.whole(lambda s, r: parts.vector_batch(s, r, 5, torch.float64), step, world_size)[0]
        plain({"x": x}, scale=2.0).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        answer = engine({"x": x[rank : rank + 1]}, scale=2.0)
        assert isinstance(answer, Answer)
        answer.logits.square().mean().backward()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def state_in_and_out(stage: str) -> None:
    """What one engine gives out another takes in, at once and after more training."""
    rank = dist.get_rank()
    adam = parts.OPTIMIZERS["adamw"]
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), adam)
    engine.training_step(*parts.token_batch(0, rank), F.cross_entropy)
    state = engine.full_state_dict()
    other = parts.STAGES[stage](parts.seeded(parts.OddModel, seed=5), adam)
    other.load_full_state_dict(state)
    parts.assert_same_state(other.full_state_dict(), state, atol=0)
    for name, value in state.items():  # no view of a bucket, all of which torch.save would write for each entry
        assert value.untyped_storage().nbytes() == value.nbytes, name
    tokens, _ = parts.token_batch(3, rank)
    with torch.no_grad():
        assert torch.equal(other(tokens), engine(tokens))  # the weights in use, not only those on file
    plain = parts.seeded(parts.OddModel)
    plain.load_state_dict(state)
    for broken, error in (
        ({k: v for k, v in state.items() if k != "head.bias"}, "head.bias"),
        ({**state, "nobody": torch.ones(1)}, "nobody"),
        ({**state, "head.bias": torch.ones(4)}, "head.bias"),
    ):
        try:
            other.load_full_state_dict(broken)
        except (KeyError, ValueError) as raised:
            assert error in str(raised)
        else:
            raise AssertionError(f"a state with a wrong {error} was loaded")
    parts.assert_same_state(other.full_state_dict(), state, atol=0)


def backwards_that_add_up(stage: str, options: dict) -> None:
    """Two backwards before a step add up, also a backward through two forwards."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, sgd = parts.seeded(parts.OddModel), parts.OPTIMIZERS["adamw"]
    optimizer = sgd([param for param in plain.parameters() if param.requires_grad])
    engine = parts.build_engine(stage, parts.seeded(parts.OddModel), sgd, options)
    for step in range(10):
        for micro in (2 * step, 2 * step + 1):
            tokens, targets = parts.whole(parts.token_batch, micro, world_size)
            (F.cross_entropy(plain(tokens), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        first, second = parts.token_batch(2 * step, rank), parts.token_batch(2 * step + 1, rank)
        if step % 2:
            losses = [F.cross_entropy(engine(tokens), targets) / 2 for tokens, targets in (first, second)]
            sum(losses).backward()
        else:
            for tokens, targets in (first, second):
                (F.cross_entropy(engine(tokens), targets) / 2).backward()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def awkward_models(stage: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    adam = parts.OPTIMIZERS["adamw"]
    losses, expected = parts.oracle(parts.seeded(parts.Twice), adam, F.cross_entropy, parts.token_batch, 10, world_size)
    engine = parts.STAGES[stage](parts.seeded(parts.Twice), adam)
    for step in range(10):
        loss = engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
        torch.testing.assert_close(parts.mean_over_ranks(loss), losses[step], rtol=0, atol=1e-12)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


class PartlyFrozen(nn.Module):
    """Units that mix frozen and trainable parameters, one of them trained only after its frozen part (LoRA)."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(5, 5)
            self.base.requires_grad_(False)
            self.low, self.high = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

        def forward(self, x):
            return torch.tanh(self.base(x) + self.high(self.low(x)))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([self.Adapter() for _ in range(3)])
        self.blocks[1].requires_grad_(False)  # a unit with nothing to train, in between
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def frozen_among_trainable(stage: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    adam = parts.OPTIMIZERS["adamw"]
    _, expected = parts.oracle(parts.seeded(PartlyFrozen), adam, F.cross_entropy, parts.token_batch, 10, world_size)
    engine = parts.STAGES[stage](parts.seeded(PartlyFrozen), adam)
    for step in range(10):
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


class TwoTypes(nn.Module):
    """Parameters of two dtypes, in the root and in every unit."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gain = nn.Linear(5, 5), nn.Parameter(torch.ones(5))

        def forward(self, x):
            return torch.tanh(self.linear(x).double() * self.gain).float()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])
        self.gain, self.bias = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.double() * self.gain + self.bias


def two_dtypes(stage: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def build():
        model = parts.seeded(TwoTypes, dtype=torch.float32)
        for gain in (model.gain, *(block.gain for block in model.blocks)):
            gain.data = gain.data.double()
        return model

    plain, sgd = build(), parts.OPTIMIZERS["sgd"]
    optimizer = sgd(plain.parameters())
    engine = parts.STAGES[stage](copy.deepcopy(plain), sgd)
    for step in range(5):
        x = parts.whole(lambda s, r: parts.vector_batch(s, r, 5), step, world_size)[0]
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.training_step(x[rank : rank + 1], None, lambda y, _: y.square().mean())
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-6)

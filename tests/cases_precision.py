"""Run on every rank: mixed precision against FSDP2's, its bytes, and loss scaling."""

import dataclasses
from functools import partial

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from harness.engine.gradients import GradScaler
from harness.measure.memory import MemoryLedger, held_bytes
from harness.measure.traffic import TrafficLedger
from harness.properties import models
from harness.run.model import GPT, PRESETS, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def gpt(device=None) -> GPT:
    return parts.seeded(lambda: GPT(PRESETS["toy"]), dtype=torch.float32, device=device)


def byte_batch(step: int, rank: int, device=None):
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    tokens = torch.randint(256, (2, 17), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def equals_fsdp2(stage: str, param_dtype, reduce_dtype, micro_batches: int = 1, no_sync: bool = False) -> float:
    """Losses and weights of the stage and of `fully_shard` with the same policy; returns the largest difference."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = gpt()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    mesh = parts.mesh(world_size)
    for block in reference.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(reference, mesh=mesh, mp_policy=policy)
    optimizer = ADAMW(reference.parameters())
    engine = parts.STAGES[stage](gpt(), ADAMW, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    differences = []
    for step in range(6):
        for micro in range(micro_batches):
            inputs, targets = byte_batch(step * micro_batches + micro, rank)
            last = micro == micro_batches - 1
            reference.set_requires_gradient_sync(last or not no_sync)
            logits = reference(inputs)
            expected = next_token_loss(logits, targets) / micro_batches
            expected.backward()
            if no_sync and not last:
                with engine.no_sync():
                    loss = next_token_loss(engine(inputs), targets) / micro_batches
                    loss.backward()
            else:
                outputs = engine(inputs)
                assert outputs.dtype == logits.dtype == (param_dtype or torch.float32)
                loss = next_token_loss(outputs, targets) / micro_batches
                loss.backward()
            differences.append((loss - expected).abs().item())
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        engine.zero_grad()
    state = engine.full_state_dict()
    for name, param in reference.named_parameters():
        whole = param.full_tensor()
        assert state[name].dtype == whole.dtype == torch.float32  # the master weights, not their low-precision copy
        differences.append((state[name] - whole).abs().max().item())
    return max(differences)


def bytes_per_parameter(stage: str) -> dict[str, float]:
    """Held after step 3 per parameter, by dtype and category; and what the collectives of one step sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    width, layers = 48, 4

    def build():
        model = parts.Stack(layers, width)
        for layer in model.layers:
            layer.bias = None  # every shard of a weight is a multiple of 16 bytes at N = 2, 3 and 4: no padding
        return model

    def batch_of(step):
        return parts.vector_batch(step, rank, width)

    params = layers * width * width
    engine = parts.STAGES[stage](
        parts.seeded(build, dtype=torch.float32), ADAMW, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    held = {}

    def loss_fn(output, target):  # of one dtype: torch 2.11 does not cast by itself
        return F.mse_loss(output.float(), target)

    engine.training_step(*batch_of(0), loss_fn)
    engine.optimizer.register_step_pre_hook(lambda *_: held.update(held_bytes(engine)))
    with TrafficLedger() as traffic:
        engine.training_step(*batch_of(1), loss_fn)
    for group in engine.optimizer.param_groups:
        for piece in group["params"]:
            state = engine.optimizer.state[piece]
            assert piece.dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    sent = {}
    factor = params * max(1, world_size - 1) / world_size
    for collective in traffic.collectives:
        sent[collective.kind] = sent.get(collective.kind, 0) + collective.sent_bytes / factor
    pieces = len(engine.optimizer.param_groups[0]["params"])
    held["optimizer"] -= 4 * pieces  # AdamW's counters
    return {**{kind: n / params for kind, n in held.items()}, **sent}


def nothing_besides(stage: str) -> None:
    """What construction leaves alive is what the engine is said to hold: no whole float32 weights that nobody uses."""
    engine_class, group = parts.STAGES[stage], parts.silent_group()
    with MemoryLedger() as memory:
        model = parts.seeded(lambda: parts.Stack(4, 48), dtype=torch.float32)
        engine = engine_class(model, ADAMW, group=group, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    held = held_bytes(engine)
    held["gradients"] = sum(bucket.flat_gradient.nbytes for bucket in engine.trained) if stage == "zero1" else 0
    assert memory.live == sum(held.values()), (memory.live, held)


class Mixed(nn.Module):
    """A float32 buffer between bfloat16 modules, a frozen scale, integer inputs, keywords, a dictionary out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.full((6,), 1.0 + 2**-12), requires_grad=False)  # not a bfloat16
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.head = nn.Linear(6, 3)
        self.seen = []

    def forward(self, tokens, *, extra=None):
        self.seen = [self.embedding.weight.dtype, self.scale.dtype, self.shift.dtype, tokens.dtype, extra.dtype]
        x = self.embedding(tokens).mean(1) * self.scale + extra
        for block in self.blocks:
            x = block(x + self.shift)  # float32 goes in; the unit casts it
        return {"logits": self.head(x)}


def dtypes_of_a_mixed_model(stage: str) -> None:
    rank = dist.get_rank()
    model = parts.seeded(Mixed, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = parts.STAGES[stage](model, ADAMW, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    state = engine.full_state_dict()
    parts.assert_same_state(state, before, atol=0)  # float32, the frozen one too
    tokens, targets = parts.token_batch(0, rank)
    extra = torch.full((6,), 1.0 + 2**-12)
    for _ in range(3):
        output = engine(tokens, extra=extra)["logits"]
        assert output.dtype == torch.bfloat16
        low = torch.bfloat16
        assert model.seen == [low, low, torch.float32, torch.int64, low], model.seen
        F.cross_entropy(output.float(), targets).backward()
        engine.step()
        engine.zero_grad()
    after = engine.full_state_dict()
    assert all(value.dtype == torch.float32 for value in after.values())
    assert torch.equal(after["scale"], before["scale"]) and not torch.equal(after["head.weight"], before["head.weight"])
    # an update too small for bfloat16 is not lost: lr 1e-3 beside weights near 1 rounds away there
    changed = after["blocks.0.weight"] != after["blocks.0.weight"].bfloat16().float()
    assert changed.float().mean() > 0.9
    # and the way back in
    fresh = parts.STAGES[stage](parts.seeded(Mixed, 1, torch.float32), ADAMW, param_dtype=torch.bfloat16)
    fresh.load_full_state_dict(after)
    parts.assert_same_state(fresh.full_state_dict(), after, atol=0)
    a, b = engine(tokens, extra=extra)["logits"], fresh(tokens, extra=extra)["logits"]
    assert torch.equal(a, b)


class Between(nn.Module):
    """A unit of the caller's choice, behind a float32 buffer and in no container."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 5))

    def forward(self, x):
        return self.second(self.first(x) + self.shift)


def units_of_ones_own() -> None:
    """The inputs of the units that were passed, by an iterator here, are cast as those of the default units are."""
    model = parts.seeded(Between, dtype=torch.float32)
    engine = parts.ZeRO3(model, ADAMW, units=iter([model.second]), param_dtype=torch.bfloat16)
    before = engine.full_state_dict()["second.weight"]
    x, y = parts.vector_batch(0, dist.get_rank(), 5)
    assert engine.training_step(x, y[:, :3], lambda out, target: F.mse_loss(out.float(), target)).isfinite()
    assert not torch.equal(engine.full_state_dict()["second.weight"], before)


def clipping_in_mixed_precision(stage: str, reduce_dtype) -> None:
    """What clip returns is the norm of what the optimizer gets, and the pieces are really scaled."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](gpt(), ADAMW, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    inputs, targets = byte_batch(0, rank)
    next_token_loss(engine(inputs), targets).backward()
    before = engine.clip_grad_norm_(1e9)
    after = engine.clip_grad_norm_(before.item() / 4)
    assert torch.equal(before, after) and before > 0
    torch.testing.assert_close(engine.clip_grad_norm_(1e9), before / 4, rtol=2e-2, atol=0)


def scaling_skips_on_all(stage: str, overflow_on: int, device: str = "cpu") -> list:
    """float16 with an overflow in one step on one rank: all ranks skip that step and no other."""
    rank = dist.get_rank()
    adamw = partial(ADAMW, fused=device == "cuda")
    engine = parts.STAGES[stage](gpt(device), adamw, param_dtype=torch.float16, reduce_dtype=torch.float32)
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=2)
    assert scaler.is_enabled()
    changed, scales = [], []
    before = engine.full_state_dict()
    for step in range(5):
        inputs, targets = byte_batch(step, rank, device)
        loss = next_token_loss(engine(inputs), targets)
        if step == 2 and rank == overflow_on:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(engine)
            engine.clip_grad_norm_(1.0)
        scaler.step(engine)
        scaler.update()
        engine.zero_grad()
        after = engine.full_state_dict()
        changed.append(any(not torch.equal(before[name], after[name]) for name in after))
        assert all(torch.isfinite(value).all() for value in after.values())
        before = after
        scales.append(scaler.get_scale())
    return [changed, scales]


def scaling_changes_nothing_else(stage: str) -> None:
    """A scale that is a power of two leaves float32 losses and weights as they are, to the bit."""
    rank = dist.get_rank()
    plain = parts.STAGES[stage](gpt(), ADAMW)
    scaled = parts.STAGES[stage](gpt(), ADAMW)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        inputs, targets = byte_batch(step, rank)
        plain.training_step(inputs, targets, next_token_loss)
        scaler.scale(next_token_loss(scaled(inputs), targets)).backward()
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
    parts.assert_same_state(scaled.full_state_dict(), plain.full_state_dict(), atol=0)


def the_scaler_takes_an_engine(stage: str) -> str:
    """Not the optimizer, which would skip on one rank alone; and a scaler that is switched off does nothing."""
    engine = parts.STAGES[stage](parts.seeded(lambda: nn.Linear(3, 3), dtype=torch.float32), ADAMW)
    scaler = GradScaler("cpu", enabled=False)
    before = engine.full_state_dict()["weight"]
    scaler.scale(engine(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(engine)
    scaler.step(engine)
    scaler.update()
    assert not torch.equal(before, engine.full_state_dict()["weight"])
    return message(lambda: GradScaler("cpu").step(engine.optimizer), TypeError)


def a_rank_of_padding_scales_along(stage: str) -> None:
    """One parameter of one element at N > 1: ranks without a piece must still join the verdict."""
    model = nn.Linear(1, 1, bias=False)
    engine = parts.STAGES[stage](parts.seeded(lambda: model, dtype=torch.float32), ADAMW)
    scaler = GradScaler("cpu", init_scale=4.0)
    for value in (1.0, torch.inf):
        before = engine.full_state_dict()["weight"]
        scaler.scale((engine(torch.ones(1, 1)) * value).sum()).backward()
        scaler.step(engine)
        scaler.update()
        engine.zero_grad()
        assert torch.equal(before, engine.full_state_dict()["weight"]) == (value == torch.inf)
    assert scaler.get_scale() == 2.0


def peak_in_forward(dtype) -> int:
    """ZeRO-3's gathered parameters in forward: half as many bytes in bfloat16."""
    engine = parts.ZeRO3(
        parts.seeded(lambda: parts.Stack(8, 64), dtype=torch.float32),
        ADAMW,
        group=parts.silent_group(),
        param_dtype=dtype,
    )
    x, _ = parts.vector_batch(0, dist.get_rank())
    with MemoryLedger() as memory, torch.no_grad():
        engine(x)
    return memory.peak


def low_precision_everywhere(model: str) -> None:
    """bfloat16 through every stage and option: the same losses and weights, to the bit on two ranks."""
    rank = dist.get_rank()
    build = {
        "twice": parts.Twice,
        "tied": models.TiedAcross,
        "around": lambda: models.Checkpointed("around"),
    }[model]
    found = []
    for stage, options in (
        ("zero1", {}),
        ("zero2", {"bucket_mb": 0}),
        ("zero3", {}),
        ("zero3", {"prefetch": 0, "find_unused": True}),
        ("zero3", {"reshard_after_forward": False}),
    ):
        engine = parts.STAGES[stage](
            parts.seeded(build, dtype=torch.float32),
            parts.DECAY,
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            **options,
        )
        for step in range(4):
            tokens, targets = parts.token_batch(step, rank)
            F.cross_entropy(engine(tokens).float(), targets).backward()
            engine.clip_grad_norm_(1e9)
            engine.step()
            engine.zero_grad()
        found.append(engine.full_state_dict())
    for other in found[1:]:
        parts.assert_same_state(other, found[0], atol=0)


class Given(nn.Module):
    """Units whose gradients are their inputs."""

    def __init__(self, count: int):
        super().__init__()
        self.rows = nn.ModuleList([nn.Linear(count, 1, bias=False), nn.Linear(count, 1, bias=False)])

    def forward(self, x):
        return sum(row(x).sum() for row in self.rows)


def gradients_of(stage: str, reduce_dtype, values: torch.Tensor) -> torch.Tensor:
    """The reduced gradient of each of two weights, whose gradient on this rank is `values`: (2, n), on every rank."""
    model = parts.seeded(lambda: Given(len(values)), dtype=torch.float32)
    engine = parts.STAGES[stage](model, partial(torch.optim.SGD, lr=1.0), reduce_dtype=reduce_dtype)
    whole = torch.full((2, len(values)), torch.nan)
    engine(values[None].float()).backward()
    engine.optimizer.register_step_pre_hook(lambda *_: found.extend(_pieces(engine)))
    found = []
    engine.step()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    for number, start, gradient in sum(everyone, []):
        whole[number, start : start + len(gradient)] = gradient
    assert not whole.isnan().any() or values.isnan().any()
    return whole


def _pieces(engine) -> list[tuple]:
    """(number of the weight, where the piece starts in it, its gradient)"""
    weights = [id(row.weight) for row in engine.model.rows]
    return [
        (
            weights.index(id(bucket.params[index])),
            max(0, bucket.start - bucket.offsets[index]),
            piece.grad.detach().clone(),
        )
        for bucket in engine.trained
        for index, piece in bucket.pieces
    ]


def means_over_ranks(stage: str, reduce_dtype) -> None:
    """The mean of gradients is rounded once, after the sum: in any dtype, with sums that are exact in it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    most = {torch.bfloat16: 256, torch.float16: 2048}.get(reduce_dtype, 2**24) // world_size
    values = torch.randint(-most, most, (world_size, 999), generator=generator)
    expected = (values.sum(0).double() / world_size).to(reduce_dtype or torch.float32).float()
    parts_first = sum((v.to(reduce_dtype or torch.float32) / world_size) for v in values).float()
    assert world_size == 2 or not torch.equal(parts_first, expected)  # else this tests nothing
    for whole in gradients_of(stage, reduce_dtype, values[rank]):
        assert torch.equal(whole, expected)


def sums_beyond_float16(stage: str) -> None:
    """The sum of the ranks' gradients has no place in float16, and their mean has."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = {2: (61440, 40960), 3: (20000, 30000, 40000), 4: (30000, 40000, 60000, 30000)}[world_size]
    assert sum(values) > 65504
    mean = torch.tensor(sum(values) / world_size).half().float()
    for sign in (1, -1):
        found = gradients_of(stage, torch.float16, torch.full((50,), sign * values[rank]))
        assert (found == sign * mean).all(), found
    found = gradients_of(stage, torch.float16, torch.full((50,), 30000))
    assert (found == 30000).all()
    # and what is too large on one rank alone is still seen
    found = gradients_of(stage, torch.float16, torch.full((50,), torch.inf if rank == 0 else 1.0))
    assert found.isinf().all()


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    extra: dict
    name: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    mask: torch.Tensor
    batch: Batch


class OfDataclasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)
        self.seen = None

    def forward(self, frozen, *, more):
        batch = frozen.batch
        values = [frozen.mask, batch.tokens, batch.extra["shift"][0], more.extra["shift"][0]]
        self.seen = [value.dtype for value in values], type(frozen), type(batch), batch.name
        return self.head(self.blocks[0](values[2] + values[3]))


def dataclass_inputs(stage: str) -> None:
    """Floating point tensors in dataclasses, frozen or not, are cast as others are; the caller's stay as they are."""
    engine = parts.STAGES[stage](parts.seeded(OfDataclasses, dtype=None), ADAMW, param_dtype=torch.bfloat16)
    mask, tokens, shift = torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.long), torch.ones(2, 5)
    frozen = Frozen(mask, Batch(tokens, {"shift": [shift]}, "text"))
    more = Batch(tokens, {"shift": [shift]}, "more")
    engine(frozen, more=more).float().sum().backward()
    engine.step()
    low = [torch.bool, torch.int64, torch.bfloat16, torch.bfloat16]
    assert engine.model.seen == (low, Frozen, Batch, "text")
    assert frozen.batch.extra["shift"][0] is shift and shift.dtype == torch.float32 and more.extra["shift"][0] is shift


def the_scaler_steps_once(stage: str) -> list[str]:
    """A second step or unscale without `update()` is refused, as torch's is, and changes nothing."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](gpt(), ADAMW)
    scaler = GradScaler("cpu", init_scale=4.0)

    def backward(step):
        inputs, targets = byte_batch(step, rank)
        scaler.scale(next_token_loss(engine(inputs), targets)).backward()

    backward(0)
    scaler.step(engine)
    before = engine.full_state_dict()
    found = [message(lambda: scaler.step(engine), RuntimeError), message(lambda: scaler.unscale_(engine), RuntimeError)]
    parts.assert_same_state(engine.full_state_dict(), before, atol=0)
    scaler.update()
    engine.zero_grad()
    backward(1)
    scaler.unscale_(engine)
    found.append(message(lambda: scaler.unscale_(engine), RuntimeError))
    scaler.step(engine)
    scaler.update()
    engine.zero_grad()
    # twice the same as without a scaler
    other = parts.STAGES[stage](gpt(), ADAMW)
    for step in range(2):
        other.training_step(*byte_batch(step, rank), next_token_loss)
    parts.assert_same_state(engine.full_state_dict(), other.full_state_dict(), atol=0)
    return found


def scaling_where_the_default_is_float64(stage: str) -> list:
    torch.set_default_dtype(torch.float64)
    try:
        return scaling_skips_on_all(stage, overflow_on=dist.get_world_size() - 1)
    finally:
        torch.set_default_dtype(torch.float32)

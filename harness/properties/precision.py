"""Mixed precision and loss scaling: what is computed, sent, kept and rounded in which dtype."""

import copy
import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from harness.engine.gradients import GradScaler
from harness.measure.memory import MemoryLedger, held_bytes
from harness.measure.traffic import TrafficLedger
from harness.properties import models, parts
from harness.properties.property import expect, holds, refused, same
from harness.properties.training import EXACT
from harness.run.model import next_token_loss

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = {"param_dtype": BF16, "reduce_dtype": FP32}


# The same numbers as others'.


def trains_like_fsdp2(engine, mesh, own, param_dtype=None, reduce_dtype=None, micro_batches=1, no_sync=False,
                      max_norm=None, **options):  # fmt: skip
    """Losses, norms and weights of the engine and of `fully_shard` on the same mesh; `own` is the shards' dtype.

    In float32 to the bit, and in float64 to 1e-12: see the properties that call it. ZeRO-1 sends once in a step, when
    all micro-batches have been added up. FSDP2 does so where its synchronisation waits for the last micro-batch, and is
    told to: otherwise one side adds (a1+a2+a3) + (b1+b2+b3) of two ranks, and the other (a1+b1) + (a2+b2) + (a3+b3).
    """
    rank, atol = dist.get_rank(), 0.0 if own == FP32 else EXACT
    at_once = no_sync or engine.like == "zero1"
    fsdp, policy = models.gpt(own), MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for module in (*fsdp.blocks, fsdp):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = parts.ADAMW(fsdp.parameters())
    trained = engine(models.gpt(own), parts.ADAMW, param_dtype=param_dtype, reduce_dtype=reduce_dtype, **options)
    for step in range(4):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            inputs, targets = models.byte_batch(step * micro_batches + micro, rank)
            fsdp.set_requires_gradient_sync(last or not at_once)
            expected = next_token_loss(fsdp(inputs), targets) / micro_batches
            expected.backward()
            with trained.no_sync() if no_sync and not last else torch.enable_grad():
                outputs = trained(inputs)
                loss = next_token_loss(outputs, targets) / micro_batches
                loss.backward()
            same("the dtype of what the model computes", outputs.dtype, param_dtype or own, step=1)
            same(f"the loss of step {step}", loss, expected, atol, step=1)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(fsdp.parameters(), max_norm).full_tensor()
            same("the gradients' norm", trained.clip_grad_norm_(max_norm), norm, atol * max(1.0, norm.item()), step=3)
        for each in (optimizer, trained):
            each.step()
            each.zero_grad()
    state = trained.full_state_dict()
    expected = {name: param.full_tensor().detach() for name, param in fsdp.named_parameters(remove_duplicate=False)}
    # The weights that the optimizer updates, not the low-precision ones that compute.
    same("the dtypes of the weights", {value.dtype for value in state.values()}, {own}, step=4)
    same("the weights, beside FSDP2's", state, expected, atol, step=5)


@holds("values", sizes=(2,), further_sizes=(3,), cases=({**LOW, "micro_batches": 3}, {"param_dtype": BF16}),
       further_cases=(LOW, {**LOW, "micro_batches": 3, "no_sync": True}, {"reduce_dtype": BF16}))  # fmt: skip
def mixed_precision_equals_fsdp2s(engine, param_dtype=None, reduce_dtype=None, **how):
    """Losses and weights in mixed precision equal FSDP2's with the same policy: to the bit on two ranks.

    Two ranks add the same two numbers, a + b or b + a, and the half of a sum is exact. Three would add in the library's
    order. There the shards and the sums are in float64, where three bfloat16 numbers add up exactly in any order,
    unless one is a million million times another: then to 1e-12.
    """
    if dist.get_world_size() > 2:
        return trains_like_fsdp2(engine, parts.mesh(dist.get_world_size()), FP64, param_dtype, FP64, **how)
    trains_like_fsdp2(engine, parts.mesh(dist.get_world_size()), FP32, param_dtype, reduce_dtype, **how)


MODELS = {"Twice": parts.Twice, "TiedAcross": models.TiedAcross, "Checkpointed": lambda: models.Checkpointed("around")}


@holds("values", sizes=(2,), further_sizes=(3,),
       cases=tuple({"model": name, "reduce_dtype": dtype} for name, dtype in zip(MODELS, (FP64, FP64, BF16))),
       further_cases=tuple({"model": name, "options": options, "on": on} for name in MODELS for options, on in (
           ({"bucket_mb": 0}, ("zero1", "zero2")), ({"prefetch": 0, "find_unused": True}, ("zero3",)),
           ({"reshard_after_forward": False}, ("zero3",)))))  # fmt: skip
def mixed_precision_is_a_rounded_copy_that_computes(engine, model, reduce_dtype=FP64, options=None):
    """Norms and weights are those of plain PyTorch with a bfloat16 copy that computes, whose gradients are handed over.

    Sums over ranks are exact in float64, and rounded once in bfloat16 on two ranks: the rest agrees to 1e-12.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    reduce_dtype = reduce_dtype if size <= 2 else FP64
    plain = parts.seeded(MODELS[model])
    low, optimizer = copy.deepcopy(plain).to(BF16), parts.DECAY(plain.parameters())
    trained = engine(parts.seeded(MODELS[model]), parts.DECAY, param_dtype=BF16, reduce_dtype=reduce_dtype,
                     **(options or {}))  # fmt: skip
    for step in range(4):
        low.load_state_dict(plain.state_dict())
        totals = [torch.zeros_like(param, dtype=reduce_dtype) for param in plain.parameters()]
        for other in range(size):
            low.zero_grad()
            tokens, targets = parts.token_batch(step, other)
            F.cross_entropy(low(tokens).float(), targets).backward()
            for total, param in zip(totals, low.parameters()):
                total += param.grad.to(reduce_dtype)
        for param, total in zip(plain.parameters(), totals):
            param.grad = total.to(FP64) / size
        tokens, targets = parts.token_batch(step, rank)
        F.cross_entropy(trained(tokens).float(), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert norm > 0.05, "nothing is clipped"
        same("the gradients' norm", trained.clip_grad_norm_(0.05), norm, EXACT, step=3)
        for each in (optimizer, trained):
            each.step()
        trained.zero_grad()
    same("the weights", trained.full_state_dict(), plain.state_dict(), EXACT, step=5)


# Bytes.

# bfloat16 to compute in, float32 to reduce in, AdamW: bytes per parameter, of which those that are cut take 1/N.
BYTES = {  # (parameters whole, cut), (gradients whole, cut), (optimizer state whole, cut)
    "zero1": ((2, 4), (4, 0), (0, 8)),  # 6 + 12/N
    "zero2": ((2, 4), (0, 4), (0, 8)),  # 2 + 16/N
    "zero3": ((0, 4), (0, 4), (0, 8)),  # 16/N
}
SENT = {
    "zero1": {"all-reduce": 8, "all-gather": 2},
    "zero2": {"reduce-scatter": 4, "all-gather": 2},
    "zero3": {"reduce-scatter": 4, "all-gather": 4},
}


def of_one_dtype(output, target):  # torch 2.11 does not cast by itself
    return F.mse_loss(output.float(), target)


@holds("bytes", sizes=(2,), further_sizes=(1, 3))
def mixed_precision_holds_and_sends_what_the_theory_says(engine):
    """Bytes that are held and sent are 2 for bfloat16 and 4 for float32; no float32 weights stay besides the shards."""
    engine.needs("zero1", "zero2", "zero3")
    rank, size, width, layers = dist.get_rank(), dist.get_world_size(), 48, 4

    def build():
        model = parts.Stack(layers, width)
        for layer in model.layers:
            layer.bias = None  # every shard of a weight is a multiple of 16 bytes at N = 2 and 3: no padding
        return model

    with MemoryLedger() as memory:
        trained = engine(parts.seeded(build, dtype=FP32), parts.ADAMW, group=parts.silent_group(), **LOW)
    held = held_bytes(trained)
    if engine.like == "zero1":  # its buffer is there before there are gradients
        held["gradients"] = sum(bucket.flat_gradient.nbytes for bucket in trained.trained_buckets)
    same("bytes that construction leaves alive", memory.live, sum(held.values()), step=0)
    trained.training_step(*parts.vector_batch(0, rank, width), of_one_dtype)
    trained.optimizer.register_step_pre_hook(lambda *_: held.update(held_bytes(trained)))
    with TrafficLedger() as traffic:
        trained.training_step(*parts.vector_batch(1, rank, width), of_one_dtype)
    pieces = [piece for group in trained.optimizer.param_groups for piece in group["params"]]
    states = [trained.optimizer.state[piece] for piece in pieces]
    dtypes = {p.dtype for p in pieces} | {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")}
    same("the dtypes of pieces and moments", dtypes, {FP32}, step=4)
    held["optimizer"] -= 4 * len(pieces)  # AdamW's counters
    params = layers * width * width
    for kind, (whole, cut) in zip(("parameters", "gradients", "optimizer"), BYTES[engine.like]):
        same(f"bytes of {kind} that are held", held[kind], whole * params + cut * params // size, step=4)
    sent = dict.fromkeys(SENT[engine.like], 0)
    for one in traffic.collectives:
        sent[one.kind] = sent.get(one.kind, 0) + one.sent_bytes
    expected = {kind: each * params * (size - 1) // size for kind, each in SENT[engine.like].items()}
    same("bytes that are sent", sent, expected, step=3)


@holds("bytes", engines=("zero3",))
def gathered_units_are_half_as_large_in_bfloat16(engine):
    """ZeRO-3's peak in a forward halves with the dtype; what comes on top is the rounded shard, for sending."""
    peaks, (x, _) = [], parts.vector_batch(0, dist.get_rank())
    for dtype in (None, BF16):
        model = parts.seeded(lambda: parts.Stack(8, 64), dtype=FP32)
        trained = engine(model, parts.ADAMW, group=parts.silent_group(), param_dtype=dtype)
        with MemoryLedger() as memory, torch.no_grad():
            trained(x)
        peaks.append(memory.peak)
    # Two shards of a unit may be on their way; on two ranks a bfloat16 shard has a byte per parameter of the unit.
    most = peaks[0] / 2 + 2 * 2 * (64 * 64 + 64) + 1024
    expect(peaks[1] < most, "the peak of a forward in bfloat16", f"less than {most:.0f} bytes", peaks[1], step=1)


# What is cast, and what is not.


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


@holds("values", sizes=(2,), further_sizes=(3,), cases=({}, {"own_units": True, "on": ("zero3",)}))
def states_stay_float32_in_mixed_precision(engine, own_units=False):
    """Parameters and floating point inputs are cast, buffers are not; states are float32 and lose no small update."""
    model = parts.seeded(Mixed, dtype=FP32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    units = {"units": iter(model.blocks)} if own_units else {}  # an iterator: it can be gone through once
    trained = engine(model, parts.ADAMW, **LOW, **units)
    same("the state at the start", trained.full_state_dict(), before, step=0)  # copies, the frozen scale's too
    tokens, targets = parts.token_batch(0, dist.get_rank())
    extra = torch.full((6,), 1.0 + 2**-12)
    for _ in range(3):
        output = trained(tokens, extra=extra)["logits"]
        same("the dtype of the output", output.dtype, BF16, step=1)
        same("the dtypes that forward sees", model.seen, [BF16, BF16, FP32, torch.int64, BF16], step=1)
        F.cross_entropy(output.float(), targets).backward()
        trained.step()
        trained.zero_grad()
    after = trained.full_state_dict()
    same("the dtypes of the state", {value.dtype for value in after.values()}, {FP32}, step=5)
    same("the frozen scale", after["scale"], before["scale"], step=4)
    expect(not torch.equal(after["head.weight"], before["head.weight"]), "the head", "trained", "as it was", step=4)
    # An update that is small beside its weight would round away in bfloat16.
    weight = after["blocks.0.weight"]
    kept = (weight != weight.to(BF16).float()).float().mean().item()
    expect(kept > 0.9, "the share of weights that are no bfloat16 numbers", "above 0.9", kept, step=4)
    # And the way back in: the same weights, and the same operations on them.
    fresh = engine(parts.seeded(Mixed, 1, FP32), parts.ADAMW, param_dtype=BF16)
    fresh.load_full_state_dict(after)
    same("the state after loading", fresh.full_state_dict(), after, step=5)
    found, expected = (each(tokens, extra=extra)["logits"] for each in (fresh, trained))
    same("the outputs after loading", found, expected, step=1)


@dataclasses.dataclass
class Batch:
    mask: torch.Tensor
    extra: dict


@dataclasses.dataclass(frozen=True)
class Frozen:
    tokens: torch.Tensor
    batch: Batch


class OfDataclasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.seen = nn.ModuleList([nn.Linear(5, 5)]), None

    def forward(self, frozen, *, more):
        values = [frozen.tokens, frozen.batch.mask, frozen.batch.extra["shift"][0], more.extra["shift"][0]]
        self.seen = [value.dtype for value in values], type(frozen), type(frozen.batch)
        return self.blocks[0](values[2] + values[3])


@holds("values")
def inputs_in_dataclasses_are_cast(engine):
    """Floating point tensors in dataclasses, frozen or not, are cast as others are; the caller's stay as they are."""
    trained = engine(parts.seeded(OfDataclasses, dtype=None), parts.ADAMW, param_dtype=BF16)
    shift = torch.ones(2, 5)
    more = Batch(torch.ones(2, dtype=torch.bool), {"shift": [shift]})
    trained(Frozen(torch.ones(2, dtype=torch.long), more), more=more).float().sum().backward()
    trained.step()
    same("what forward sees", trained.model.seen, ([torch.int64, torch.bool, BF16, BF16], Frozen, Batch), step=1)
    kept = more.extra["shift"][0] is shift and shift.dtype == FP32
    expect(kept, "the caller's tensors", "as they were", "replaced or cast", step=1)


# Means over ranks: rounded once, and in the range of their dtype.


class Given(nn.Module):
    """Units whose gradients are their inputs, and whose weights begin at 0."""

    def __init__(self, count: int):
        super().__init__()
        self.rows = nn.ModuleList([nn.Linear(count, 1, bias=False), nn.Linear(count, 1, bias=False)])
        for row in self.rows:
            nn.init.zeros_(row.weight)

    def forward(self, x):
        return sum(row(x).sum() for row in self.rows)


def mean_of(engine, reduce_dtype, values: torch.Tensor) -> list[torch.Tensor]:
    """The mean over the ranks of the gradients of two weights, whose gradient on this rank is `values`.

    From 0 a step of SGD with the rate 1 leads to just the negative of the gradient.
    """
    model = parts.seeded(lambda: Given(len(values)), dtype=FP32)
    trained = engine(model, lambda pieces: torch.optim.SGD(pieces, lr=1.0), reduce_dtype=reduce_dtype)
    trained(values[None].float()).backward()
    trained.step()
    return [-weight[0] for weight in trained.full_state_dict().values()]


@holds("values", sizes=(3,), further_sizes=(2,), cases=tuple({"reduce_dtype": dtype} for dtype in (None, BF16, FP16)))
def the_mean_over_ranks_is_rounded_once(engine, reduce_dtype):
    """The mean of gradients is rounded once, after the sum. To the bit in any order: the sums here are exact."""
    rank, size = dist.get_rank(), dist.get_world_size()
    most = {BF16: 256, FP16: 2048}.get(reduce_dtype, 2**24) // size  # integers that the dtype holds, and their sum
    values = torch.randint(-most, most, (size, 999), generator=torch.Generator().manual_seed(3))
    expected = (values.sum(0).double() / size).to(reduce_dtype or FP32).float()
    divided_first = sum(each.to(reduce_dtype or FP32) / size for each in values).float()
    assert size == 2 or not torch.equal(divided_first, expected), "divided before the sum it is the same"
    for mean in mean_of(engine, reduce_dtype, values[rank]):
        same("the mean of gradients", mean, expected, step=3)


@holds("values", sizes=(3,), further_sizes=(2, 4))
def sums_beyond_float16_have_a_mean(engine):
    """The sum of the ranks' gradients may have no place in float16 where their mean has; an inf on one rank is seen."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = {2: (61440, 40960), 3: (20000, 30000, 40000), 4: (30000, 40000, 60000, 30000)}[size]
    assert sum(values) > torch.finfo(FP16).max
    infinite = [torch.inf, *[1.0] * (size - 1)]
    for each in (values, [-value for value in values], [30000] * size, infinite):
        expected = torch.full((50,), sum(each) / size).half().float()  # multiples of 16 and 32: rounded once if at all
        for mean in mean_of(engine, FP16, torch.full((50,), each[rank])):
            same("the mean of gradients", mean, expected, step=3)


# Loss scaling.


@holds("values", sizes=(2,), further_sizes=(3,), cases=({"overflow_on": 0}, {"overflow_on": 1, "default": FP64}),
       further_cases=({"overflow_on": 2},))  # fmt: skip
def an_overflow_on_one_rank_skips_the_step_on_all(engine, overflow_on, default=FP32, device="cpu"):
    """In float16 all ranks skip the step in which one overflows, and no other, whatever torch's default dtype is."""
    rank, overflow_on = dist.get_rank(), overflow_on % dist.get_world_size()

    def adamw(pieces):
        return torch.optim.AdamW(pieces, lr=1e-3, fused=device != "cpu")

    torch.set_default_dtype(default)
    try:
        trained = engine(models.gpt(device=device), adamw, param_dtype=FP16, reduce_dtype=FP32)
        scaler = engine.more.get("scaler", GradScaler)(device, init_scale=2.0**10, growth_interval=2)
        assert scaler.is_enabled()
        changed, scales, before = [], [], trained.full_state_dict()
        for step in range(5):
            loss = models.of_bytes(trained, *models.byte_batch(step, rank, device))
            scaler.scale(loss * torch.inf if step == 2 and rank == overflow_on else loss).backward()
            if step % 2:
                scaler.unscale_(trained)
                trained.clip_grad_norm_(1.0)
            scaler.step(trained)
            scaler.update()
            trained.zero_grad()
            after = trained.full_state_dict()
            changed.append(any(not torch.equal(before[name], after[name]) for name in after))
            expect(all(value.isfinite().all() for value in after.values()), "the weights", "finite", "inf or NaN", 4)
            before = after
            scales.append(scaler.get_scale())
    finally:
        torch.set_default_dtype(FP32)
    same("steps that change the weights", changed, [True, True, False, True, True], step=4)
    # Halved by the overflow, doubled after two good steps.
    same("the scale after each step", scales, [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11], step=4)


@holds("values", sizes=(2, 3))
def an_inf_in_one_ranks_shard_is_heard_by_all(engine):
    """One parameter of one element: the ranks that own only padding join the verdict on an overflow."""
    model = parts.seeded(lambda: nn.Linear(1, 1, bias=False), dtype=FP32)
    trained = engine(model, parts.ADAMW)
    scaler = engine.more.get("scaler", GradScaler)("cpu", init_scale=4.0)
    for value in (1.0, torch.inf):
        before = trained.full_state_dict()["weight"]
        scaler.scale((trained(torch.ones(1, 1)) * value).sum()).backward()
        scaler.step(trained)
        scaler.update()
        trained.zero_grad()
        skipped = torch.equal(before, trained.full_state_dict()["weight"])
        same(f"whether the step with a gradient of {value} is skipped", skipped, value == torch.inf, step=4)
    same("the scale", scaler.get_scale(), 2.0, step=4)


@holds("values", sizes=(2,), further_sizes=(3,), cases=({"enabled": True}, {"enabled": False}))
def scaling_by_a_power_of_two_changes_nothing(engine, enabled):
    """Weights under a loss scaler are those without. It refuses what comes twice without `update()`, and an optimizer.

    To the bit: a power of two changes exponents alone, and both sides add the same numbers in the same order.
    """
    scaled, plain = (engine(models.gpt(), parts.ADAMW) for _ in range(2))
    scaler = engine.more.get("scaler", GradScaler)("cpu", init_scale=2.0**8, enabled=enabled)
    for step in range(3):
        batch = models.byte_batch(step, dist.get_rank())
        plain.training_step(*batch, next_token_loss)
        scaler.scale(models.of_bytes(scaled, *batch)).backward()
        # An optimizer's step would be skipped on one rank alone.
        refused(lambda: scaler.step(scaled.optimizer), "engine", "AdamW", error=TypeError, step=4)
        if step == 1:
            scaler.unscale_(scaled)
        if step == 1 and enabled:
            refused(lambda: scaler.unscale_(scaled), "update()", error=RuntimeError, step=3)
        scaler.step(scaled)
        if enabled:
            refused(lambda: scaler.step(scaled), "update()", error=RuntimeError, step=4)
            refused(lambda: scaler.unscale_(scaled), error=RuntimeError, step=3)
        scaler.update()
        scaled.zero_grad()
        same(f"the weights after step {step}", scaled.full_state_dict(), plain.full_state_dict(), step=5)

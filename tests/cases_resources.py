"""Run on every rank: what the engines hold, send and when, against arithmetic done here."""

import math
import time

import parts
import torch
import torch.distributed as dist
from cases_equivalence import PartlyFrozen
from cases_models import Skipping
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness.measure.memory import MemoryLedger, held_bytes, storage_bytes
from harness.measure.traffic import TrafficLedger

ADAMW = parts.OPTIMIZERS["adamw"]


def padded(sizes, world_size: int, align: int = 4) -> tuple[int, int]:
    """(elements of the buffer, elements of a shard) for parameters of these sizes, each 16-byte aligned."""
    end = sum(math.ceil(size / align) * align for size in sizes)
    shard = math.ceil(end / (world_size * align)) * align
    return shard * world_size, shard


def owned(sizes, rank: int, world_size: int, align: int = 4) -> list[int]:
    """How many elements of each parameter lie in this rank's shard; only those with any."""
    _, shard = padded(sizes, world_size, align)
    found, offset = [], 0
    for size in sizes:
        overlap = min(offset + size, (rank + 1) * shard) - max(offset, rank * shard)
        if overlap > 0:
            found.append(overlap)
        offset += math.ceil(size / align) * align
    return found


def sizes_by_bucket(model: nn.Module, stage: str, bucket_mb: float = 25) -> list[list[int]]:
    """The layout, worked out anew: buckets in reverse order for ZeRO-1 and -2, units and root for ZeRO-3."""
    named = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    if stage == "zero3":
        frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
        children = [name for name, module in model.named_children() if isinstance(module, nn.ModuleList)]
        units = {}
        for name, size in named:
            inside = name.split(".")[0] in children
            units.setdefault(".".join(name.split(".")[:2]) if inside else "root", []).append(size)
        root = units.pop("root", None)
        return [*units.values(), *([root] if root else []), *([frozen] if frozen else [])]
    buckets, nbytes = [], 0
    for _, size in reversed(named):
        if not buckets or nbytes + 4 * size > bucket_mb * 2**20:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(size)
        nbytes += 4 * size
    return buckets


def settle(memory: MemoryLedger, expected: int) -> None:
    """Give gloo's thread a moment: it lets go of a collective's buffers shortly after `wait()` returns, not before."""
    for _ in range(100):
        if memory.live <= expected:
            return
        time.sleep(0.01)


def held_after_step_3(stage: str, engine_name: str | None = None) -> None:
    """Parameters, gradients and optimizer state to the byte, on every rank, padding included by name."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    layout = sizes_by_bucket(model, stage)
    batches = [parts.token_batch(step, rank) for step in range(2)]
    held = {}
    with MemoryLedger() as memory:
        memory.track(model.shift)
        for tensor in [t for batch in batches for t in batch]:
            memory.track(tensor)
        outside = memory.live
        for param in model.parameters():
            memory.track(param)
        engine = parts.engine_class(engine_name or stage)(model, ADAMW)
        engine.training_step(*batches[0], F.cross_entropy)
        loss = F.cross_entropy(engine(batches[1][0]), batches[1][1])
        loss.backward()

        def look(optimizer, *_):
            settle(memory, outside + sum(held_bytes(engine).values()) + 4)
            held.update(held_bytes(engine), live=memory.live - outside)

        engine.optimizer.register_step_pre_hook(look)
        engine.step()
    trained = layout[:-1] if stage == "zero3" else layout  # the last is the root's frozen scale
    whole = 4 * sum(padded(sizes, world_size)[0] for sizes in trained)
    shard = 4 * sum(padded(sizes, world_size)[1] for sizes in trained)
    pieces = [size for sizes in trained for size in owned(sizes, rank, world_size)]
    expected = {
        "parameters": shard + 4 * padded([frozen], world_size)[1]
        if stage == "zero3"
        else whole + 4 * padded([frozen], world_size)[0],
        "gradients": whole if stage == "zero1" else shard,
        # AdamW: two moments per element and a 4-byte counter per piece; padding has no state
        "optimizer": 8 * sum(pieces) + 4 * len(pieces),
    }
    live = held.pop("live")
    assert held == expected, f"held {held}, expected {expected}"
    # and nothing else is alive anywhere: only the loss of the forward before
    assert live == sum(expected.values()) + 4, f"{live - sum(expected.values())} bytes are alive besides the held state"


def gradients_in_backward(engine_name: str = "zero2", reverse: bool = False) -> None:
    """ZeRO-2: live bytes in backward never exceed parameters, state, 1/N of the gradients and two buckets."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    group = parts.silent_group()
    batches = [parts.vector_batch(step, rank, width) for step in range(3)]
    with MemoryLedger() as memory:
        model = parts.seeded(lambda: parts.Stack(layers, width, reverse), dtype=torch.float32)
        # a bucket per layer
        engine = parts.engine_class(engine_name)(model, ADAMW, bucket_mb=layer / 2**20, group=group)
        for batch in batches[:2]:
            engine.training_step(*batch, F.mse_loss)
        between = memory.live
        loss = F.mse_loss(engine(batches[2][0]), batches[2][1])
        memory.reset_peak()
        loss.backward()
        most = memory.peak - between
    allowed = layers * layer / world_size + 2 * layer
    activations = (4 + layers) * 4 * width  # all of the layers' inputs, and the gradients between them
    if reverse:
        # documented: every bucket waits for bucket 0, whose gradients come last
        assert most > allowed + activations, "in the opposite order all gradients should be whole at once"
        assert most <= layers * layer + 2 * layer + activations
    else:
        assert most <= allowed + activations, f"{most} bytes of gradients at the worst moment, allowed {allowed}"
        assert most > allowed - layer, "the bound is far from tight: what was measured here?"


def parameters_in_a_step(options: dict) -> None:
    """ZeRO-3: whole parameters alive are the root, the unit at work and `prefetch` more; none after backward."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 12, 64
    prefetch, group = options.get("prefetch", 1), parts.silent_group()
    layer = 4 * (width * width + width)
    state = layers * layer / world_size * 3  # parameters, and AdamW's two moments
    counters = 4 * 2 * layers
    noise = (16 + 2 * layers) * 4 * width
    batches = [parts.vector_batch(step, rank, width) for step in range(3)]
    with MemoryLedger() as memory:
        model = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32)
        engine = parts.ZeRO3(model, ADAMW, group=group, **options)
        assert memory.live <= layers * layer / world_size + noise, "whole parameters outlive the construction"
        for batch in batches[:2]:
            engine.training_step(*batch, F.mse_loss)
        between = memory.live
        assert between <= state + counters + noise
        memory.reset_peak()
        loss = F.mse_loss(engine(batches[2][0]), batches[2][1])
        in_forward, after_forward = memory.peak - between, memory.live - between
        memory.reset_peak()
        loss.backward()
        in_backward, after_backward = memory.peak - between, memory.live - between
    if options.get("reshard_after_forward", True):
        units = 1 + min(prefetch, layers - 1)
        assert in_forward <= units * layer + noise, f"{in_forward / layer:.2f} units whole in forward"
        assert in_forward >= units * layer, "fewer units than promised were whole: is prefetching on?"
        assert after_forward <= noise, f"{after_forward / layer:.2f} units whole after forward"
        # backward adds the gradients' shards and at most two units of whole gradients
        assert in_backward <= (units + 2) * layer + layers * layer / world_size + noise
    else:
        assert layers * layer <= after_forward <= layers * layer + noise
    assert after_backward <= layers * layer / world_size + noise, "whole parameters outlive backward"


def sequence_of_collectives(stage: str, engine_name: str | None = None) -> None:
    """Kind, bytes, order and step of every collective of a training step, and what they send in all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 4, 12
    model = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32)
    sizes = [width * width, width]
    whole = 4 * padded(sizes, world_size)[0]
    options = {} if stage == "zero3" else {"bucket_mb": 4 * sum(sizes) / 2**20}
    engine = parts.engine_class(engine_name or stage)(model, ADAMW, **options)
    for step in range(2):
        engine.training_step(*parts.vector_batch(step, rank, width), F.mse_loss)
    batch = parts.vector_batch(2, rank, width)
    with TrafficLedger() as traffic:
        engine.training_step(*batch, F.mse_loss)
    gather, reduce = ("all-gather", "step 5 gather parameters"), ("reduce-scatter", "step 3 reduce gradients")
    expected = {
        "zero1": [("all-reduce", "step 3 reduce gradients")] * layers + [gather] * layers,
        "zero2": [reduce] * layers + [gather] * layers,
        # Forward gathers every unit; so does backward, each before the reduction of the unit behind it. A rank that
        # is alone gathers nothing ahead.
        "zero3": [gather] * layers + [gather] + [gather, reduce] * (layers - 1) + [reduce]
        if world_size > 1
        else [gather] * layers + [gather, reduce] * layers,
    }[stage]
    found = [(collective.kind, collective.step) for collective in traffic.collectives]
    assert found == expected, f"found {found}, expected {expected}"
    assert {collective.whole_bytes for collective in traffic.collectives} == {whole}
    factor = (world_size - 1) / world_size
    times = {"zero1": 3 * layers, "zero2": 2 * layers, "zero3": 3 * layers}[stage]
    assert traffic.sent_bytes == round(times * whole * factor), (traffic.sent_bytes, times * whole * factor)


class _Order(TorchDispatchMode):
    """Names of all-gathers and reduce-scatters (by their buffer's size) and of matrix products, as they are issued."""

    def __init__(self, layer_of_size: dict[int, int]):
        super().__init__()
        self.layer_of_size, self.events = layer_of_size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::_allgather_base_" and args[0].is_floating_point():  # not what the first step compares
            self.events.append(("gather", self.layer_of_size[args[0].numel()]))
        elif name == "c10d::_reduce_scatter_base_":
            self.events.append(("reduce", self.layer_of_size[args[1].numel()]))
        elif name == "aten::addmm":  # a Linear's forward
            self.events.append(("forward", self.layer_of_size[-args[2].shape[0] * args[2].shape[1]]))
        return func(*args, **(kwargs or {}))


class Funnel(nn.Module):
    """Linear layers of different sizes, so that a collective's size names the layer."""

    def __init__(self, widths=(3, 5, 7, 9, 11)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def prefetch_is_issued_before_the_compute(prefetch: int) -> None:
    world_size = dist.get_world_size()
    model = parts.seeded(Funnel, dtype=torch.float32)
    names = {}
    for index, layer in enumerate(model.layers):
        names[padded([layer.weight.numel(), layer.bias.numel()], world_size)[0]] = index
        names[-layer.weight.numel()] = index
    engine = parts.ZeRO3(model, ADAMW, prefetch=prefetch)
    for step in range(2):
        x, y = torch.randn(2, 3), torch.randn(2, 11)
        with _Order(names) as order:
            engine.training_step(x, y, F.mse_loss)
        count, expected, gathered = len(model.layers), [], set()

        def gather(index, expected=expected, gathered=gathered, count=count):
            if 0 <= index < count and index not in gathered:
                gathered.add(index)
                expected.append(("gather", index))

        for index in range(prefetch):
            gather(index)
        for index in range(count):
            for ahead in range(prefetch + 1):
                gather(index + ahead)
            expected.append(("forward", index))
        gathered.clear()
        for index in reversed(range(count)):
            for ahead in range(prefetch + 1):
                gather(index - ahead)
            expected.append(("reduce", index))  # issued in between: hidden behind the next layer's backward
        assert order.events == expected, f"step {step}: {order.events}, expected {expected}"


class _Watched:
    """A collective's work that notes when it is waited for."""

    def __init__(self, work, events: list, name: tuple):
        self.work, self.events, self.name = work, events, name

    def wait(self):
        self.events.append(("wait", *self.name))
        return self.work.wait()


class _Products(TorchDispatchMode):
    """Notes every matrix product, the work that a collective can hide behind."""

    def __init__(self, events: list):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::addmm", "aten::mm"):
            self.events.append("compute")
        return func(*args, **(kwargs or {}))


class Rooted(parts.Stack):
    """A root that computes before the first unit and after the last: units to gather meanwhile."""

    def __init__(self, layers: int, width: int, reverse: bool):
        super().__init__(layers, width, reverse)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.last(super().forward(self.first(x)))


def collectives_run_while_computing(stage: str, root: bool = False, reverse: bool = False) -> None:
    """Between issuing a collective and waiting for it the rank computes: reductions and prefetched gathers."""
    rank, layers, events, issued = dist.get_rank(), 6, [], {"gather": 0, "reduce": 0}
    options = {} if stage == "zero3" else {"bucket_mb": 4 * (16 * 16 + 16) / 2**20}
    kind = Rooted if root else parts.Stack
    engine = parts.STAGES[stage](parts.seeded(lambda: kind(layers, 16, reverse), dtype=torch.float32), ADAMW, **options)
    for _ in range(2):  # in the first forward ZeRO-3 learns the order, and the second is the first of its kind
        engine.training_step(*parts.vector_batch(0, rank, 16), F.mse_loss)
    real = {"gather": dist.all_gather_single, "reduce": dist.reduce_scatter_single}

    def watched(kind):
        def issue(*args, **kwargs):
            name = (kind, issued[kind])
            issued[kind] += 1
            events.append(("issue", *name))
            return _Watched(real[kind](*args, **kwargs), events, name)

        return issue

    dist.all_gather_single, dist.reduce_scatter_single = watched("gather"), watched("reduce")
    try:
        with _Products(events):
            engine.training_step(*parts.vector_batch(1, rank, 16), F.mse_loss)
    finally:
        dist.all_gather_single, dist.reduce_scatter_single = real["gather"], real["reduce"]

    def computed_meanwhile(kind, number) -> bool:
        start, end = events.index(("issue", kind, number)), events.index(("wait", kind, number))
        return "compute" in events[start:end]

    # the last reduction has no backward left to hide behind
    reductions = layers + root
    assert issued["reduce"] == reductions
    assert [computed_meanwhile("reduce", n) for n in range(reductions)] == [True] * (reductions - 1) + [False], events
    if stage == "zero3":
        # in forward the first gather has nothing in front of it, in backward (this model has no root) the last unit's
        expected = [False] + [True] * (layers - 1) + [False] + [True] * (layers - 1)
        if root:  # the first gather is the root's, and in backward, where it is whole, every unit's has its head's
            expected = [False] + [True] * layers + [True] * layers
        assert issued["gather"] == len(expected)
        assert [computed_meanwhile("gather", n) for n in range(len(expected))] == expected, events


class _Late:
    """A collective that runs at the last moment that is allowed: inside `wait()`."""

    def __init__(self, run, pending: list):
        self.run, self.pending = run, pending
        pending.append(self)

    def wait(self):
        self.pending.remove(self)
        self.run()


def collectives_that_run_late(stage: str, model: str) -> None:
    """A slow network: until a collective is waited for its output is NaN and its input still needed. All as ever then,
    and no collective is forgotten, not even that of a unit which was gathered ahead and not used."""
    rank, world_size, pending = dist.get_rank(), dist.get_world_size(), []
    build = {"partly frozen": PartlyFrozen, "skipping": lambda: Skipping((8, 9, 8, 9))}[model]
    real = {name: getattr(dist, name) for name in ("all_gather_single", "reduce_scatter_single", "all_reduce")}

    def late(name):
        def issue(output, *inputs, async_op=False, **options):
            if not async_op:
                return real[name](output, *inputs, **options)
            if inputs:
                kept = inputs[0].clone()
                output.fill_(torch.nan)
                inputs[0].copy_(kept)  # it may be a part of the output
            return _Late(lambda: real[name](output, *inputs, **options), pending)

        return issue

    def batch_of(step, who):
        return parts.token_batch(step, who) if model != "skipping" else parts.vector_batch(step, who, 8, torch.float64)

    loss_fn = F.mse_loss if model == "skipping" else F.cross_entropy
    plain = parts.seeded(build)
    optimizer = ADAMW([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(build), ADAMW, find_unused=model == "skipping")
    for name in real:
        setattr(dist, name, late(name))
    try:
        for step in range(4):
            plain.skip = engine.model.skip = (None, 1, 3, None)[step]
            inputs, targets = parts.whole(batch_of, step, world_size)
            loss_fn(plain(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            inputs, targets = batch_of(step, rank)
            engine.training_step(inputs, targets, loss_fn)
            engine.model.skip = 2  # which is then gathered ahead for nothing
            with torch.no_grad():
                engine(inputs)
            if stage == "zero3":
                assert storage_bytes(engine.model.parameters()) == 0, "a unit that was gathered for nothing stays"
            assert not pending, f"{len(pending)} collectives were never waited for"
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


class ByKeyword(parts.Stack):
    def forward(self, x):
        for layer in self.layers:
            x = layer(input=x)
        return x


def frozen_units_in_backward(kind: str) -> None:
    """ZeRO-3: a frozen unit has no gradient that tells when to free it, and is freed in time all the same."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)

    def build():
        model = {"Stack": parts.Stack, "ByKeyword": ByKeyword}[kind](layers, width)
        for frozen in model.layers[1:]:
            frozen.requires_grad_(False)
        return model

    engine = parts.ZeRO3(parts.seeded(build, dtype=torch.float32), ADAMW, group=parts.silent_group())
    x, y = parts.vector_batch(0, dist.get_rank(), width)
    with MemoryLedger() as memory:
        loss = F.mse_loss(engine(x), y)
        before = memory.live
        memory.reset_peak()
        loss.backward()
    most = memory.peak - before
    assert most <= 4 * layer, f"{most / layer:.2f} units whole in backward"


def evaluation_frees_at_once() -> None:
    """`reshard_after_forward=False` keeps units for backward; where none will come, it keeps none."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    engine = parts.ZeRO3(
        parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32),
        ADAMW,
        group=parts.silent_group(),
        reshard_after_forward=False,
    )
    x, _ = parts.vector_batch(0, dist.get_rank(), width)
    with MemoryLedger() as memory, torch.no_grad():
        engine(x)
    assert memory.peak <= 2 * layer + 16 * 4 * width, f"{memory.peak / layer:.2f} units whole in an evaluation"


def units_under_no_sync() -> None:
    """ZeRO-3 under `no_sync()`: gradients stay whole, as documented, parameters do not."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    engine = parts.ZeRO3(
        parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32), ADAMW, group=parts.silent_group()
    )
    x, y = parts.vector_batch(0, dist.get_rank(), width)
    with MemoryLedger() as memory, engine.no_sync():
        loss = F.mse_loss(engine(x), y)
        before = memory.live
        memory.reset_peak()
        loss.backward()
    most = memory.peak - before - layers * layer
    assert most <= 2.5 * layer, f"{most / layer:.2f} units whole besides the gradients"


def units_in_another_order() -> None:
    """ZeRO-3 gathers ahead by the last forward's order. Where the next takes another, it stops, and keeps few whole."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    model = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32)
    engine = parts.ZeRO3(model, ADAMW, group=parts.silent_group())
    batch = parts.vector_batch(0, dist.get_rank(), width)
    engine.training_step(*batch, F.mse_loss)
    model.reverse = True
    with MemoryLedger() as memory:
        engine(batch[0])
    assert memory.peak <= 3.5 * layer, f"{memory.peak / layer:.2f} units whole in forward"


def hooks_on_the_model(stage: str) -> None:
    """The engine's hooks are set once: steps of every kind leave as many as they found."""
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, ADAMW, find_unused=True)
    tokens, targets = parts.token_batch(0, dist.get_rank())

    def hooks() -> int:
        owners = (*model.modules(), engine.optimizer)
        return sum(len(value or ()) for owner in owners for key, value in vars(owner).items() if "hooks" in key)

    before = hooks()
    for _ in range(2):
        engine.training_step(tokens, targets, F.cross_entropy)
        with torch.no_grad():
            engine(tokens)
        with engine.no_sync():
            F.cross_entropy(engine(tokens), targets).backward()
        F.cross_entropy(engine(tokens), targets).backward()
        engine.clip_grad_norm_(1.0)
        engine.step()
        engine.zero_grad()
        engine.load_full_state_dict(engine.full_state_dict())
        assert hooks() == before > 0


def order_of_reductions(reverse: bool) -> None:
    """ZeRO-2's buckets are reduced last parameters first, in whatever order autograd finishes, and rightly."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected_losses, state = parts.oracle(
        parts.seeded(lambda: parts.Stack(5, 8, reverse)),
        ADAMW,
        F.mse_loss,
        lambda s, r: parts.vector_batch(s, r, 8, torch.float64),
        10,
        world_size,
    )
    engine = parts.ZeRO2(parts.seeded(lambda: parts.Stack(5, 8, reverse)), ADAMW, bucket_mb=0)
    for step in range(10):
        with TrafficLedger() as traffic:
            engine.training_step(*parts.vector_batch(step, rank, 8, torch.float64), F.mse_loss)
        sizes = [c.whole_bytes for c in traffic.collectives if c.kind == "reduce-scatter"]
        bias, weight = 8 * padded([8], world_size, 2)[0], 8 * padded([64], world_size, 2)[0]
        assert sizes == [bias, weight] * 5, sizes
    parts.assert_same_state(engine.full_state_dict(), state, atol=1e-12)


def weights_start_aligned(stage: str, param_dtype) -> None:
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    engine = parts.STAGES[stage](model, ADAMW, param_dtype=param_dtype)
    for bucket in engine.buckets:
        size = bucket.flat.element_size()
        assert all(offset * size % 16 == 0 for offset in bucket.offsets)
        assert bucket.shard_numel * size % 16 == 0 and bucket.numel == bucket.shard_numel * engine.world_size
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda m, i: seen.extend(p.data_ptr() % 16 for p in m.parameters()))
    tokens, targets = parts.token_batch(0, dist.get_rank())
    F.cross_entropy(engine(tokens).float(), targets).backward()
    assert seen == [0] * len(seen) and seen


def only_padding(stage: str) -> None:
    """Two elements over N ranks: the first owns both, the others nothing but padding, and still take part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def build():
        return parts.seeded(lambda: nn.Linear(2, 1, bias=False))

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(10 * step + who)
        return torch.randn(2, 2, generator=generator, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)

    _, expected = parts.oracle(build(), ADAMW, F.mse_loss, batch_of, 10, world_size)
    engine = parts.STAGES[stage](build(), ADAMW)
    for step in range(10):
        engine.training_step(*batch_of(step, rank), F.mse_loss)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
    owners = torch.tensor([sum(p.numel() for g in engine.optimizer.param_groups for p in g["params"])])
    assert bool(owners) == (rank == 0), "two elements of float64 make 16 bytes, which are not cut"
    dist.all_reduce(owners)
    assert owners.item() == 2, "each element has exactly one owner"


def failure(of: str, **arguments) -> str:
    """The message with which another case fails, on every rank and between collectives, so that the ranks go on."""
    try:
        globals()[of](**arguments)
    except AssertionError as error:
        return str(error)
    raise RuntimeError(f"{of} passes with {arguments}")

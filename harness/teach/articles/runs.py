"""What the claims run: engines on a process group that moves nothing, small models, and what was counted there."""

import contextlib
import functools
import gc
import warnings
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from harness.measure.dry_run import fake_ranks
from harness.measure.memory import MemoryLedger, held_bytes
from harness.measure.traffic import TrafficLedger
from harness.run.model import GPT, GPTConfig, next_token_loss, number_of_parameters, preset
from harness.run.recompute import checkpoint_blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's own modules, about torch.jit
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

CHAPTERS = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}
SGD = partial(torch.optim.SGD, lr=0.01)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
GATHER, REDUCE, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"


@contextlib.contextmanager
def one_rank():
    """A real group of one rank over gloo: DDP's reducer is C++ and needs one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # DDP's reducer, before its group
        dist.destroy_process_group()


def chain(layers: int = 8, width: int = 64) -> nn.Sequential:
    """Equal square matrices and nothing else: for ZeRO-3 `layers` units, and a root that holds nothing."""
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def gpt(name: str = "toy", **shape) -> GPT:
    """A GPT of a preset's shape, or with some of it changed."""
    return GPT(GPTConfig(**{**vars(preset(name)), **shape}))


toy = partial(gpt, "toy")
small_gpt = partial(gpt, "toy", layers=8, width=64)


@functools.cache
def parameters_of(name: str) -> int:
    """How many parameters a preset has."""
    return number_of_parameters(preset(name))


def batch_for(model: nn.Module, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) that fit `chain` or `gpt`."""
    if isinstance(model, GPT):
        tokens = torch.arange(batch * (model.config.seq + 1)).view(batch, -1) % model.config.vocab
        return tokens[:, :-1], tokens[:, 1:]
    width = model[0].in_features
    return torch.ones(batch, width), torch.zeros(batch, width)


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean squared error in the dtype of the targets. Backward of torch 2.11's own wants one dtype."""
    return nn.functional.mse_loss(outputs.to(targets.dtype), targets)


def forward(engine, batch: int = 2) -> torch.Tensor:
    """The loss of a batch that fits the engine's model."""
    model = getattr(engine.model, "module", engine.model)  # inside DDP or FSDP1
    inputs, targets = batch_for(model, batch)
    return (next_token_loss if isinstance(model, GPT) else squared_error)(engine(inputs), targets)


def update(engine) -> None:
    """The end of a training step: the optimizer's, and the gradients go."""
    engine.step()
    engine.zero_grad()


class Plain:
    """Model and optimizer without a sharding engine, or with a wrapper of torch's around the model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad

    def __call__(self, inputs):
        return self.model(inputs)

    def no_sync(self):
        return self.model.no_sync()


def build(name: str, model: nn.Module, optimizer_cls=SGD, units=None, replicas: int = 1, **options):
    """The engine `name` around `model`: plain, ddp, zero1, zero2, zero3, fsdp1 or fsdp2.

    `units(model)` are the modules that are gathered as one each, for ZeRO-3 and FSDP2; `replicas` is for FSDP2 alone.
    """
    blocks = list(model.blocks if isinstance(model, GPT) else model)
    if name in CHAPTERS:
        return CHAPTERS[name](model, optimizer_cls, **options, **({"units": units(model)} if units else {}))
    if name == "ddp":
        model = DistributedDataParallel(model, **options)
    elif name == "fsdp1":
        wrap = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: any(module is block for block in blocks))
        options = {"device_id": torch.device("cpu"), "use_orig_params": True, "auto_wrap_policy": wrap, **options}
        model = FullyShardedDataParallel(model, **options)
    elif name == "fsdp2":
        rows = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", rows, mesh_dim_names=("copies", "shards"))
        for module in units(model) if units else (*blocks, model):
            fully_shard(module, mesh=mesh if replicas > 1 else mesh["shards"], **options)
    return Plain(model, optimizer_cls(model.parameters()))


@contextlib.contextmanager
def running(name: str, model_of=chain, ranks: int = 8, rank: int = 0, **options):
    """`build(name, model_of(), ...)` as one of `ranks`, of which there is no other; DDP in a real group of one."""
    with one_rank() if name == "ddp" else fake_ranks(ranks, rank):
        yield build(name, model_of(), **options)


def collectives(name: str, model_of=chain, **options) -> list:
    """The collectives of one forward and backward."""
    with running(name, model_of, **options) as engine, TrafficLedger() as ledger:
        forward(engine).backward()
        del engine
    return ledger.collectives


class Step:
    """What one training step of an engine did, the third one: `collectives`, bytes `held` and at the `peak`."""

    def __init__(self, name, model_of, ranks=8, rank=0, micro_batches=1, no_sync=False, **options):
        self.held, model = {}, model_of()
        self.parameters = sum(p.numel() for p in model.parameters())  # Ψ
        self.parameter_bytes = sum(p.nbytes for p in model.parameters())
        del model
        options = {"optimizer_cls": ADAMW, **options}
        with MemoryLedger() as memory, running(name, model_of, ranks, rank, **options) as engine:
            engine.optimizer.register_step_pre_hook(lambda *_: self.held.update(held_bytes(engine)))
            for _ in range(3):  # the first makes the optimizer's state, in the second DDP rearranges its buckets
                memory.reset_peak()
                with TrafficLedger() as traffic:
                    for turn in range(micro_batches):
                        quiet = no_sync and turn < micro_batches - 1
                        with engine.no_sync() if quiet else contextlib.nullcontext():
                            forward(engine).backward()
                    update(engine)
            self.peak, self.collectives = memory.peak, traffic.collectives
            engine = None  # before the group goes
        self.count = Counter(collective.kind for collective in self.collectives)

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer state that the rank holds when the optimizer steps."""
        return sum(self.held.values())

    def sent(self, *kinds: str) -> float:
        """Elements that a rank sends by the collectives of these kinds or all, in Ψ (N-1)/N: independent of N."""
        return sum(
            (2 if c.kind == ALL_REDUCE else 1) * c.whole_bytes / c.element_bytes / self.parameters
            for c in self.collectives
            if not kinds or c.kind in kinds
        )


@functools.cache
def step(name: str, model=chain, **options) -> Step:
    """One step of an engine over `model()`, run once however many claims look at it."""
    return Step(name, model, **options)


@contextlib.contextmanager
def new_dtype(dtype: torch.dtype):
    """Models built inside have parameters of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def saved_bytes(name: str, batch: int, seq: int, dtype=torch.bfloat16, recompute=False, run=None, kernel=None, **shape):
    """Bytes that a GPT keeps for backward when its forward is over: all that is alive but the model and its input.

    On fake tensors, which have sizes and no memory. The logits, which the loss needs, are among them. `run` is another
    forward than the model's own, `kernel` another attention.
    """
    attention = sdpa_kernel(kernel) if kernel else contextlib.nullcontext()
    with FakeTensorMode(), new_dtype(dtype), attention, MemoryLedger() as memory:
        model = gpt(name, **shape)
        if recompute:
            checkpoint_blocks(model, casts=False)
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        before = memory.live
        logits = run(model, tokens) if run else model(tokens)
        saved = memory.live - before
        del logits
    return saved

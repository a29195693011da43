"""What the claims run: engines on a process group that moves nothing, small models, and what was counted there."""

import contextlib
import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from zerolab.measure.fake_ranks import all_reduce_bucket, fake_ranks
from zerolab.measure.ledger import MemoryLedger, PartsLedger
from zerolab.measure.sweeps import UNITS
from zerolab.measure.watched_step import watched_step
from zerolab.run.engines import ENGINES, STAGES
from zerolab.run.model import GPT, GPTConfig, next_token_loss, number_of_parameters, preset
from zerolab.run.recompute import checkpoint_blocks

SGD = partial(torch.optim.SGD, lr=0.01)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
GATHER, REDUCE, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"


class Chain(nn.Sequential):
    @property
    def blocks(self) -> list[nn.Module]:
        """What the registry's engines make units of."""
        return list(self)


def chain(layers: int = 8, width: int = 64) -> Chain:
    """Equal square matrices and nothing else: for ZeRO-3 `layers` units, and a root that holds nothing."""
    return Chain(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def gpt(name: str = "toy", **shape) -> GPT:
    """A GPT of a preset's shape, or with some of it changed."""
    return GPT(GPTConfig(**{**vars(preset(name)), **shape}))


toy = partial(gpt, "toy")
small_gpt = partial(gpt, "toy", layers=8, width=64)


def size_of(model_of: Callable) -> int:
    """Bytes of the parameters of `model_of()`."""
    return sum(param.nbytes for param in model_of().parameters())


@functools.cache
def parameters_of(name: str) -> int:
    """How many parameters a preset has."""
    return number_of_parameters(preset(name))


def batch_for(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) that fit `chain` or `gpt`."""
    if isinstance(model, GPT):
        tokens = torch.arange(2 * (model.config.seq + 1)).view(2, -1) % model.config.vocab
        return tokens[:, :-1], tokens[:, 1:]
    width = model[0].in_features
    return torch.ones(2, width), torch.zeros(2, width)


def forward(engine) -> torch.Tensor:
    """The loss of a batch that fits the engine's model, in float32."""
    model = getattr(engine.model, "module", engine.model)  # inside DDP or FSDP1
    inputs, targets = batch_for(model)
    outputs = engine(inputs)
    if isinstance(model, GPT):
        return next_token_loss(outputs, targets)
    return nn.functional.mse_loss(outputs.float(), targets)


def update(engine) -> None:
    """The end of a training step: the optimizer's, and the gradients go."""
    engine.step()
    engine.zero_grad()


@contextlib.contextmanager
def running(name: str, model_of=chain, ranks=8, rank=0, replicas=1, units=None, make_optimizer=SGD, **options):
    """The registry's engine over `model_of()`, as one of `ranks`, of which there is no other.

    `units(model)` are the modules that ZeRO-3 gathers as one each. `options` are the engine's own, also those that no
    command has.
    """
    with fake_ranks(ranks, rank):
        model = model_of()
        if units:
            options["units"] = units(model)
        if replicas > 1:
            shape, names = (replicas, ranks // replicas), ("replicas", "shards")
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        optimizer = make_optimizer(model.parameters())
        engine = ENGINES[name].build(model, optimizer, torch.device("cpu"), **options)
        if name == "ddp":
            engine.model.register_comm_hook(None, all_reduce_bucket)
        yield engine


@functools.cache
def step(name: str, model_of=chain, ranks=8, rank=0, micro_batches=1, no_sync=False, **options) -> dict[str, float]:
    """Numbers of one training step of an engine over `model_of()`, the third; run once however many claims ask.

    The bytes that the rank holds of each part when the optimizer steps, of all parts ("bytes"), and "of all ranks";
    its "share of parameters" in float32, and of the other parts.
    Of Ψ, the number of parameters: the bytes of all parts ("state"), at the "peak" and "over the state"; elements
    "sent" in Ψ (N-1)/N, which does not depend on N; also by each kind of collective ("sent by all-gathers"). How many
    "collectives", and of each kind ("all-gathers").
    """
    psi = sum(param.numel() for param in model_of().parameters())
    options = {"make_optimizer": ADAMW, **options}
    with MemoryLedger() as memory, running(name, model_of, ranks, rank, **options) as engine:
        for _ in range(3):  # the first makes the optimizer's state, in the second DDP rearranges its buckets
            with watched_step(engine, memory) as seen:
                for turn in range(micro_batches):
                    quiet = no_sync and turn < micro_batches - 1
                    syncs = engine if name in STAGES else engine.model
                    with syncs.no_sync() if quiet else contextlib.nullcontext():
                        forward(engine).backward()
                update(engine)
        engine = None  # before the group goes
    held = sum(seen.held.values())
    found = {**seen.held, "bytes": held, "state": held / psi, "peak": seen.peak / psi}
    found |= {f"share of {part}": nbytes / (4 * psi) for part, nbytes in seen.held.items()}
    found |= {"of all ranks": held * ranks, "over the state": (seen.peak - held) / psi}
    found |= {"sent": 0, "collectives": len(seen.collectives)}
    for kind in (GATHER, REDUCE, ALL_REDUCE):
        elements = sum(one.whole_bytes / one.element_bytes for one in seen.collectives if one.kind == kind)
        found[f"{kind}s"] = seen.count[kind]
        found[f"sent by {kind}s"] = (2 if kind == ALL_REDUCE else 1) * elements / psi
        found["sent"] += found[f"sent by {kind}s"]
    return found


def adapted_gpt() -> GPT:
    """All frozen but the last matrix of each block's MLP, as fine-tuning freezes."""
    model = small_gpt()
    for name, param in model.named_parameters():
        param.requires_grad = "down.weight" in name
    return model


def recomputed_gpt() -> GPT:
    model = small_gpt()
    checkpoint_blocks(model, casts=False)
    return model


# What claims.toml calls them.
MODELS = {"toy": toy, "small": small_gpt, "adapted": adapted_gpt, "recomputed": recomputed_gpt}
MODELS |= {f"{layers} layers": partial(chain, layers) for layers in (4, 8, 16)}


def of_a_step(engine: str, what: str, model: str = "8 layers", units: str = "", dtype: str = "", **options) -> float:
    """What a claim asks of a training step; `options` are those of `step`."""
    if dtype:
        options["dtype"] = getattr(torch, dtype)
    return step(engine, MODELS[model], units=UNITS.get(units), **options)[what]


def worst_moment(model_of, of, **options) -> int:
    """The most of what `of(moment)` counts, in bytes, that there is at once in a step of ZeRO-3."""
    with running("zero3", model_of, **options) as engine, PartsLedger(engine) as ledger:
        for _ in range(2):  # the first makes the optimizer's state
            forward(engine).backward()
            update(engine)
    return of(ledger.peak_moment(of))


@contextlib.contextmanager
def in_bfloat16():
    """Models built inside have bfloat16 parameters. (Fake tensors cannot be converted by `Module.to`.)"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def saved_bytes(name: str, batch: int, seq: int, recompute=False, kernel=None, **shape):
    """Bytes that a GPT keeps for backward when its forward is over: all that is alive but the model and its input.

    On fake tensors, which have sizes and no memory. The logits, which the loss needs, are among them. `kernel` is
    another attention than the fused one.
    """
    attention = sdpa_kernel(getattr(SDPBackend, kernel)) if kernel else contextlib.nullcontext()
    with FakeTensorMode(), in_bfloat16(), attention, MemoryLedger() as memory:
        model = gpt(name, **shape)
        if recompute:
            checkpoint_blocks(model, casts=False)
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        before = memory.live
        logits = model(tokens)
        saved = memory.live - before
        del logits
    return saved

"""Runs for the claims: engines on a process group that sends nothing, small models, and dry runs of large ones.

Ψ is the number of parameters. Traffic is counted in elements, as in the ZeRO paper: "2Ψ" is short for 2Ψ (N-1)/N
elements that one rank sends in a step. The factor in front of Ψ does not depend on N.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zerolab.measure import memory
from zerolab.measure.fake_ranks import all_reduce_bucket, fake_ranks
from zerolab.measure.held import buckets_of
from zerolab.measure.ledger import GATHERED, MemoryLedger, PartsLedger
from zerolab.measure.traffic import Collective
from zerolab.measure.watched_step import watched_step
from zerolab.run.engines import ENGINES, STAGES
from zerolab.run.model import GPT, GPTConfig, next_token_loss, number_of_parameters, preset
from zerolab.run.recompute import checkpoint_blocks

GATHER, REDUCE, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
GB = 1e9


# Models. The articles' models are replaced by small ones where the result does not depend on the size.


class Chain(nn.Sequential):
    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that the registry's engines gather as a unit."""
        return list(self)


def chain(layers: int = 8) -> Chain:
    """Equal square matrices and nothing else: for ZeRO-3 `layers` units, and a root without parameters."""
    return Chain(*[nn.Linear(64, 64, bias=False) for _ in range(layers)])


def chain_of_16() -> Chain:
    return chain(16)


def gpt(name: str = "toy", **shape) -> GPT:
    """A GPT of a preset's shape, or with a part of the shape changed."""
    return GPT(GPTConfig(**{**vars(preset(name)), **shape}))


def small_gpt() -> GPT:
    return gpt("toy", layers=8, width=64)


def recomputed_gpt() -> GPT:
    model = small_gpt()
    checkpoint_blocks(model, casts=False)
    return model


def whole_model(model: nn.Module) -> list[nn.Module]:
    """The choice of units in which ZeRO-3 gathers all parameters at once."""
    return [model]


def size_of(make_model: Callable) -> int:
    """Bytes of the parameters of `make_model()`."""
    return sum(param.nbytes for param in make_model().parameters())


@functools.cache
def parameters_of(name: str) -> int:
    """The number of parameters of a preset."""
    return number_of_parameters(preset(name))


# A training step of an engine, on one of several ranks. The other ranks do not exist.


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


@contextlib.contextmanager
def running(name: str, make_model=chain, ranks: int = 8, units=None, **options):
    """The registry's engine over `make_model()` with AdamW, on rank 0 of `ranks`.

    `units(model)` returns the modules that ZeRO-3 gathers. `options` are the engine's.
    """
    with fake_ranks(ranks):
        model = make_model()
        if units:
            options["units"] = units(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        engine = ENGINES[name].build(model, optimizer, torch.device("cpu"), **options)
        if name == "ddp":
            engine.model.register_comm_hook(None, all_reduce_bucket)
        yield engine


@dataclass(frozen=True)
class Step:
    """The measurements of one training step on one rank."""

    ranks: int
    psi: int  # Ψ, the number of parameters
    held: dict[str, int]  # bytes of "parameters", "gradients" and "optimizer" when the optimizer steps
    peak: int  # the most bytes alive at once
    collectives: list[Collective]

    @property
    def state(self) -> float:
        """Bytes held, per parameter."""
        return sum(self.held.values()) / self.psi

    @property
    def above_state(self) -> float:
        """The peak above the held state, in bytes per parameter."""
        return self.peak / self.psi - self.state

    def count(self, kind: str) -> int:
        return sum(one.kind == kind for one in self.collectives)

    @property
    def sent(self) -> float:
        """Elements sent, in Ψ (N-1)/N."""
        elements = sum(one.sent_elements for one in self.collectives)
        return elements / (self.psi * (self.ranks - 1) / self.ranks)


def without_sync(name: str, engine):
    """A context in which backward sends nothing. Our engines have the method no_sync, and DDP's model has it."""
    if name in STAGES:
        return engine.no_sync()
    return engine.model.no_sync()


@functools.cache
def step(name: str, make_model=chain, ranks: int = 8, micro_batches: int = 1, no_sync=False, **options) -> Step:
    """The third training step of an engine: the first makes the optimizer's state, the second DDP's buckets.

    With `no_sync` all micro-batches except the last run under the engine's no_sync().
    """
    with MemoryLedger() as ledger, running(name, make_model, ranks, **options) as engine:
        for _ in range(3):
            with watched_step(engine, ledger) as seen:
                for turn in range(micro_batches):
                    if no_sync and turn < micro_batches - 1:
                        with without_sync(name, engine):
                            forward(engine).backward()
                    else:
                        forward(engine).backward()
                engine.step()
                engine.zero_grad()
        engine = None  # before the process group ends
    psi = sum(param.numel() for param in make_model().parameters())
    return Step(ranks, psi, seen.held, seen.peak, seen.collectives)


@functools.cache
def kept_for_backward(name: str, make_model=small_gpt, **options) -> int:
    """Bytes that an engine's forward leaves for backward, without the parameters it has gathered."""
    with MemoryLedger() as ledger, running(name, make_model, **options) as engine:
        flats = [bucket.flat.untyped_storage() for bucket in buckets_of(engine)]
        before = ledger.live - sum(flat.nbytes() for flat in flats)
        loss = forward(engine)
        after = ledger.live - sum(flat.nbytes() for flat in flats)
        del loss
    return after - before


def ledger_of_zero3(make_model, **options) -> PartsLedger:
    """What is alive for what purpose, through two steps of ZeRO-3: `peak_moment()` is the worst moment."""
    with running("zero3", make_model, **options) as engine, PartsLedger(engine) as ledger:
        for _ in range(2):  # the first makes the optimizer's state
            forward(engine).backward()
            engine.step()
            engine.zero_grad()
    return ledger


def gathered_bytes(moment) -> int:
    return moment.parts[GATHERED]


def most_gathered(make_model, **options) -> float:
    """The largest share of the parameters that ZeRO-3 has gathered at once in a step."""
    moment = ledger_of_zero3(make_model, **options).peak_moment(of=gathered_bytes)
    return gathered_bytes(moment) / size_of(make_model)


# Large models, without memory.


@functools.cache
def dry_run(engine: str, *options: str) -> dict:
    """A dry run of an engine on 8 ranks with the preset 7b: its row of `./launch.sh memory`."""
    return memory.measure_alone(engine, memory.arguments(["--preset", "7b", "8", *options]))


def held_gb(engine: str, *options: str) -> list[float]:
    """GB of parameters, gradients and optimizer state that one of 8 ranks holds of the preset 7b."""
    held = dry_run(engine, *options)["held_bytes"]
    return [held[part] / GB for part in ("parameters", "gradients", "optimizer")]


@functools.cache
def activations(name: str, recompute=False, **shape) -> float:
    """GB that a GPT keeps for backward of the articles' 4 sequences of 2,048 tokens, logits included, in bfloat16.

    It is measured on fake tensors.
    """
    before_bfloat16 = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # fake tensors cannot be converted by Module.to
    try:
        with FakeTensorMode(), MemoryLedger() as ledger:
            model = gpt(name, **shape)
            if recompute:
                checkpoint_blocks(model, casts=False)
            tokens = torch.zeros(4, 2048, dtype=torch.int64)
            before = ledger.live
            logits = model(tokens)
            saved = ledger.live - before
            del logits
    finally:
        torch.set_default_dtype(before_bfloat16)
    return saved / GB


def recomputed_activations(name: str, **shape) -> float:
    """The same with every block recomputed: the inputs of all blocks, and the activations of one block."""
    one_block = activations(name, **{**shape, "layers": 2}) - activations(name, **{**shape, "layers": 1})
    return activations(name, recompute=True, **shape) + one_block

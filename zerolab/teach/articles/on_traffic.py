"""Claims about what is sent and when, what is gathered and freed: the collectives that the engines really issue.

Ψ is the number of parameters, and traffic is counted in elements, as in the ZeRO paper. "2Ψ" below is short for
2Ψ (N-1)/N elements, sent by one rank in one step: the factor in front of Ψ is the same for every N. The
articles' models are replaced by small ones: a ratio of counts does not depend on the size. Of time only order is seen
here: what is issued before a computation can hide behind it.
"""

import functools
from functools import partial

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from zerolab.measure.held import storage_bytes
from zerolab.measure.ledger import GATHERED
from zerolab.measure.traffic import TrafficLedger, kind_of
from zerolab.teach import by_hand
from zerolab.teach.articles.runs import (
    ALL_REDUCE,
    GATHER,
    MODELS,
    REDUCE,
    UNITS,
    batch_for,
    chain,
    fake_ranks,
    forward,
    running,
    size_of,
    toy,
    update,
    worst_moment,
)

# How much is sent.


def ring_all_reduce():
    """A ring all-reduce of 8 ranks, run in one process: the share of the buffer that one sends, and whether it sums."""
    buffers = [[shard + rank for shard in range(8)] for rank in range(8)]
    expected = [sum(column) for column in zip(*buffers)]
    sent = by_hand.ring(buffers, by_hand.reduce_round) + by_hand.ring(buffers, by_hand.gather_round)
    return [sent / 8, buffers == [expected] * 8]


# Units and shards.


def wrapped(units) -> tuple[float, float]:
    """Shares of a GPT with fully_shard on these modules: of the largest all-gather, and of what stays unsharded."""
    with fake_ranks(8), TrafficLedger() as ledger:
        model = toy()
        for module in units(model):
            fully_shard(module, mesh=init_device_mesh("cpu", (8,)))
        model(batch_for(model)[0]).sum().backward()
        whole = sum(param.nbytes for param in model.parameters() if not isinstance(param, DTensor))
    largest = max(c.whole_bytes for c in ledger.collectives if c.kind == GATHER)
    return largest / size_of(toy), whole / size_of(toy)


def root_wrapped_too():
    both, _ = wrapped(lambda gpt: [*gpt.blocks, gpt])
    only_root, _ = wrapped(lambda gpt: [gpt])
    _, unsharded = wrapped(lambda gpt: gpt.blocks)
    return [both, only_root, unsharded]


def per_parameter_dtensor():
    with running("fsdp2") as engine:
        params = list(engine.model.parameters())
        share = storage_bytes(params) / size_of(chain)
        shapes = [tuple(shape) for shape in (params[0].shape, params[0].to_local().shape)]
    kinds = {type(param).__name__ for param in params}
    return [" and ".join(kinds), *shapes, share]


# What is gathered at once.


def most_gathered(model: str, units: str = "", layers: int = 1, **options) -> float:
    """The largest share of the parameters that ZeRO-3 has gathered at once in a step, in layers if there are some."""
    model_of, options["units"] = MODELS[model], UNITS.get(units)
    return layers * worst_moment(model_of, of=lambda moment: moment.parts[GATHERED], **options) / size_of(model_of)


def flops_of_a_rank(name: str) -> int:
    with running(name, MODELS["small"]) as engine, FlopCounterMode(display=False) as counter:
        forward(engine).backward()
        return counter.get_total_flops()


# In which order.


LETTERS = {GATHER: "G", REDUCE: "R", ALL_REDUCE: "R", "aten::mm": "C", "aten::addmm": "C"}


class Events(TorchDispatchMode):
    """The order of all-gathers (G), matrix products (C) and reductions (R)."""

    letters = ""

    def mark(self) -> None:
        self.letters += "|"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.letters += LETTERS.get(kind_of(func) or func._schema.name, "")
        return func(*args, **(kwargs or {}))


@functools.cache
def order(name: str, layers: int = 4, **options) -> list[str]:
    """The events of an engine over `layers` layers in [forward, backward, before the update, after its beginning].

    Of the third step: after two it knows the order of its units.
    """
    with running(name, partial(chain, layers), **options) as engine:
        engine.optimizer.register_step_pre_hook(lambda *_: events.mark())
        for _ in range(3):
            with Events() as events:
                loss = forward(engine)
                events.mark()
                loss.backward()
                events.mark()
                update(engine)
        del engine, loss
    return events.letters.split("|")


def both_passes(name: str, **options) -> str:
    return "|".join(order(name, **options)[:2])


def events(name: str, part: int, letter: str) -> int:
    """How many events of this kind there are in one of the parts that `order` returns."""
    return order(name)[part].count(letter)


def before_the_last_gradient(**options) -> float:
    """The share of its all-reduces that DDP has issued before the last gradient is computed."""
    backward = order("ddp", **options)[1]
    return backward[: backward.rindex("C")].count("R") / backward.count("R")


def backward_prefetch():
    """The article names the option (its snippet only imports it): is the next unit gathered early enough?"""
    choices = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None
    return [order("fsdp1", backward_prefetch=choice)[1] for choice in choices]

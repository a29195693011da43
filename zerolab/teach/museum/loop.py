"""The training loop of the museum: a small GPT, and the measurements of each step that a visitor sees."""

import contextlib
import functools
import gc
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zerolab.measure.ledger import GATHERED, PartsLedger
from zerolab.measure.timeline import Timeline
from zerolab.measure.watched_step import watched_step
from zerolab.run.data import Batches, load_text
from zerolab.run.model import GPT, GPTConfig, initialize, next_token_loss

# Large enough for several of the chapters' default buckets, of 1 MiB. With an odd width there is padding, and with
# short sequences memory is parameters and gradients rather than activations.
SHAPE = GPTConfig(layers=6, width=129, heads=3, seq=8)
BATCH = 2  # sequences per rank


def make_model(seed):
    return GPT(SHAPE, seed)


def reinitialize(model, seed):
    """Initialize a model again with `seed`, after its modules were changed."""
    for name, param in model.named_parameters():
        initialize(name, param.data, seed)


def adamw(params):
    # `fused` allocates no temporary tensors, which would hide other peaks.
    return torch.optim.AdamW(params, lr=3e-3, fused=True)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, fused=True)


@functools.cache
def text():
    return load_text(None, SHAPE.seq)


class Loop:
    """The training of an exhibit on one rank. `build_stage` is `exhibit.build` or `exhibit.correct`.

    engine = loop.build()
    for number in range(exhibit.steps):
        loop.step(engine, number)
    """

    def __init__(self, exhibit, build_stage, rank, steps=None):
        self.exhibit = exhibit
        self.build_stage = build_stage
        self.rank = rank
        draw = Batches(text(), BATCH, SHAPE.seq, seed=0)
        count = (steps or exhibit.steps) * exhibit.micro_batches
        self.batches = [draw(number, rank) for number in range(count)]  # each rank has its own
        self.losses = []
        self.norms = []
        self.scales = []

    def build(self, seed=0):
        """The engine around a new model. Each rank has its own seed: a stage starts all ranks with rank 0's weights."""
        model = self.exhibit.make_model(seed + self.rank)
        trained = [param for param in model.parameters() if param.requires_grad]
        return self.build_stage(model, self.exhibit.make_optimizer(trained), torch.device("cpu"))

    def step(self, engine, number, after_backward=None):
        """One training step. If the engine has a `scaler` or its own `run_backward`, the step uses it."""
        scaler = getattr(engine, "scaler", None)
        count = self.exhibit.micro_batches
        micro_batches = self.batches[number * count : (number + 1) * count]
        if hasattr(engine, "run_backward"):  # the mistake is in the loss
            losses = engine.run_backward(engine, micro_batches)
        else:
            losses = run_backward(engine, micro_batches, scaler)
        if after_backward is not None:
            after_backward()
        self.losses.append(sum(losses) / count)
        if self.exhibit.max_norm is not None:
            self.norms.append(engine.clip_grad_norm_(self.exhibit.max_norm).item())
        if scaler is None:
            engine.step()
        else:
            scaler.step(engine)
            scaler.update()
            self.scales.append(scaler.get_scale())
        engine.zero_grad()

    def resume(self, engine):
        """Save the engine, and load it into a new one with other weights. Returns the new one."""
        with shared_folder() as folder:
            engine.save(folder)
            dist.barrier()
            engine = self.build(seed=100)
            engine.load(folder)
        gc.collect()  # torch.distributed.checkpoint leaves tensors in cycles
        return engine


def run_backward(engine, micro_batches, scaler):
    """Forward and backward of a step. Returns this rank's loss of each micro-batch."""
    losses = []
    for inputs, targets in micro_batches:
        with record_function("step 1 forward"):
            loss = next_token_loss(engine(inputs), targets) + extra_loss(engine.model)
        with record_function("step 2 backward"):
            mean = loss / len(micro_batches)
            if scaler is not None:
                mean = scaler.scale(mean)
            mean.backward()
        losses.append(loss.item())
    return losses


def extra_loss(model):
    """The sum of the losses that modules keep in an attribute, like the router of a mixture of experts."""
    return sum(module.extra_loss for module in model.modules() if hasattr(module, "extra_loss"))


@contextlib.contextmanager
def shared_folder():
    """A new folder, the same one on all ranks. A collective at entry and at exit."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    yield Path(path[0])
    dist.barrier()  # no rank reads it any more
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


# The measurements that a visitor sees.


def visit(exhibit, build, rank):
    """Train on this rank. Returns the measurements, including an exception if one was raised:

    {"losses", "norms", "scales": one number per step, "counted": {line of the report: number} or None, "error"}
    """
    loop = Loop(exhibit, build, rank)
    counted = error = None
    try:
        counted = train(loop)
    except Exception as raised:
        error = f"stopped after {len(loop.losses)} losses: {type(raised).__name__}: {raised}"
    gc.collect()
    return {"losses": loop.losses, "norms": loop.norms, "scales": loop.scales, "counted": counted, "error": error}


def train(loop):
    """All steps. Returns the counts of the last one."""
    with PartsLedger() as memory:
        engine = loop.build()
        for number in range(loop.exhibit.steps - 1):
            if number == loop.exhibit.resume_at:
                engine = loop.resume(engine)
            loop.step(engine, number)
        in_backward = Counter()
        with watched_step(engine, memory) as seen, Timeline() as timeline:
            loop.step(engine, loop.exhibit.steps - 1, after_backward=lambda: in_backward.update(seen.count))
        return count(seen, memory, timeline, in_backward)


def count(seen, memory, timeline, in_backward):
    """{line of the report: number} of one watched step. Lines of bytes are listed in `BYTES`."""
    peaks = Counter()
    gathered = 0
    for moment in memory.moments():
        peaks[moment.phase] = max(peaks[moment.phase], moment.live)
        if moment.phase == "1 forward":
            gathered = max(gathered, moment.parts[GATHERED])
    return {
        "parameters held": seen.held["parameters"],
        "gradients held": seen.held["gradients"],
        "optimizer held": seen.held["optimizer"],
        "peak in forward": peaks["1 forward"],
        "peak in backward": peaks["2 backward"],
        "gathered at once in forward": gathered,
        "sent": seen.sent_bytes,
        "all-reduces": seen.count["all-reduce"],
        "reduce-scatters": seen.count["reduce-scatter"],
        "all-gathers": seen.count["all-gather"],
        "reductions inside backward": in_backward["all-reduce"] + in_backward["reduce-scatter"],
        "reductions hidden behind computation": sum(timeline.computed_meanwhile("all-reduce", "reduce-scatter")),
    }


BYTES = {
    "parameters held",
    "gradients held",
    "optimizer held",
    "peak in forward",
    "peak in backward",
    "gathered at once in forward",
    "sent",
}

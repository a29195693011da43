"""An engine on all ranks, compared with plain torch in one process on the batches of all ranks."""

import contextlib
import copy

import torch
import torch.distributed as dist
from helpers import EXACT, MOMENTUM, batch, different_on_ranks, mse, same
from torch.distributed.device_mesh import DeviceMesh

from conformance.subjects import of_class
from zerolab.engine.optimizers import as_list


class Pair:
    """`trained` is the engine under test, with a copy of `model`. `plain` is the model itself. Both start equal.

    Every rank runs the plain side too, so that it can compare. The plain side adds up the gradients of the ranks'
    losses, each divided by N, so a loss may be any function `loss(model, *batch)` of a model or an engine.

    engine          a `Subject`, or the class of a chapter
    make_optimizer  called with the parameters, or with `groups(model)`; returns an optimizer, or a list of them
    data            `data(step, rank)` is a tuple, different in every step and on every rank
    ranks           the ranks that train together. Default: all
    options         of the engine. With a `param_dtype` a rounded copy of `plain` computes
    """

    def __init__(
        self,
        engine,
        model,
        make_optimizer=MOMENTUM,
        *,
        groups=None,
        data=batch,
        loss=mse,
        tolerance=EXACT,
        ranks=None,
        start=None,
        **options,
    ):
        engine = of_class(engine) if isinstance(engine, type) else engine
        self.engine, self.data, self.loss, self.tolerance = engine, data, loss, tolerance
        group = options.get("group")
        self.group = None if isinstance(group, DeviceMesh) else group
        self.ranks = list(ranks or range(dist.get_world_size()))
        self.rank = self.ranks.index(dist.get_rank())
        self.cast = None
        if engine.dtype != torch.float64 and next(model.parameters()).dtype == torch.float64:
            self.cast, self.tolerance = engine.dtype, max(tolerance, engine.documented.tolerance)
            model = model.to(engine.dtype)
            if start is not None:
                start = start.to(engine.dtype)
        self.plain = model
        if start is None:
            # The first rank has the correct initial weights. The others must get them from it.
            start = different_on_ranks(model) if engine.broadcasts and self.rank else copy.deepcopy(model)
        self.model = start
        make = [make_optimizer(groups(each) if groups else each.parameters()) for each in (self.plain, self.model)]
        self.optimizer, mine = make
        self.computes = self.rounded(options["param_dtype"]) if options.get("param_dtype") else self.plain
        self.trained = engine(self.model, mine, **options)

    def rounded(self, dtype):
        """Mixed precision by hand: a copy in `dtype` that passes each of its gradients to `plain`."""
        low = copy.deepcopy(self.plain).to(dtype)
        for buffer, exact in zip(low.buffers(), self.plain.buffers()):
            buffer.data = exact.data  # buffers keep their dtype
        for param, of_low in zip(self.plain.parameters(), low.parameters()):

            def hand_over(of_low, param=param):
                gradient = of_low.grad.to(param.dtype) / len(self.ranks)
                param.grad = gradient if param.grad is None else param.grad + gradient
                of_low.grad = None

            if param.requires_grad:
                of_low.register_post_accumulate_grad_hook(hand_over)
        return low

    @property
    def optimizers(self):
        """The optimizers of plain torch and of the engine, for loops that change both."""
        return self.optimizer, self.trained.optimizer

    def batch(self, step, rank=None):
        """The batch of a rank, by default of this one."""
        found = self.data(step, self.ranks[self.rank if rank is None else rank])
        if self.cast is None:
            return found
        return tuple(each.to(self.cast) if each.is_floating_point() else each for each in found)

    def backward(self, step, quiet=False):
        """Forward and backward of both on the batches of this step. `quiet`: the engine's under `no_sync`."""
        expected = self.backward_of_plain(step)
        with self.trained.no_sync() if quiet else contextlib.nullcontext():
            found = self.loss(self.trained, *self.batch(step))
            found.backward()
        same(found.detach(), expected[self.rank].detach(), self.tolerance, f"this rank's loss in step {step}")

    def backward_of_plain(self, step):
        parts = len(self.ranks)
        if self.computes is not self.plain:
            self.computes.load_state_dict(self.plain.state_dict())
            parts = 1  # `hand_over` divides
        losses = [self.loss(self.computes, *self.batch(step, rank)) for rank in range(len(self.ranks))]
        for loss in losses:
            (loss / parts).backward()
        return losses

    def step(self):
        for optimizer in as_list(self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.trained.step()
        self.trained.zero_grad()

    def train(self, steps=3, first=0):
        """Train both for some steps, and check that the weights are equal."""
        for step in range(first, first + steps):
            self.backward(step)
            self.step()
        self.check_weights()

    def clip(self, max_norm, norm_type=2.0):
        """Clip both, and check that the norms are equal. Returns the engine's norm."""
        expected = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm, norm_type)
        found = self.trained.clip_grad_norm_(max_norm, norm_type)
        same(found.double(), expected.double(), self.tolerance * max(1, expected.item()), f"the {norm_type}-norm")
        return found

    def evaluate(self, step=9):
        """Check that both compute the same from this rank's batch."""
        inputs = self.batch(step)[:-1]
        with torch.no_grad():
            same(self.trained(*inputs), self.plain(*inputs), self.tolerance, "an evaluation")

    def loss_of_engine(self, step=9):
        """This rank's loss of the engine. The plain side does nothing."""
        return self.loss(self.trained, *self.batch(step))

    def check_weights(self):
        found = self.engine.weights(self.trained)
        for name, expected in self.plain.named_parameters():
            same(found[name].to(expected.device), expected.detach(), self.tolerance, f"the weight {name}")

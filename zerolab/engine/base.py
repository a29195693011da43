"""What every stage offers beside its steps. None of it is the lesson, and no step is hidden here."""

import contextlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from zerolab.engine import gradients, optimizer, state
from zerolab.engine.bucket import EngineReduction
from zerolab.engine.hooks import WeakHook, not_compiled, when_backward_ends
from zerolab.engine.options.placement import Placement
from zerolab.engine.safety import guard, refusals
from zerolab.engine.safety.waiting import name_some


def _of_the_model(name: str):
    return lambda engine, *args, **kwargs: getattr(engine.model, name)(*args, **kwargs)


def _megabytes(tensors) -> float:
    """What the storages under these tensors have, each counted once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) / 1e6


class Engine:
    """A stage is called like its model, clips gradients, gives and takes whole weights, and can be closed."""

    def prepare(self, model, optimizer_cls, param_groups, own: dict, source=None, *, group=None, param_dtype=None,
                reduce_dtype=None, find_unused=False, offload_policy=None) -> None:  # fmt: skip
        """The beginning of step 0. Every stage has these options, and `own` ones.

        `group` is the process group or DeviceMesh to shard over (default: all ranks). A mesh of two dimensions has
        replicas along the first. `offload_policy` moves shards to the host (both: options/placement.py). `param_groups`
        are a torch optimizer's, over the model's parameters. `param_dtype` is that of weights and computation,
        `reduce_dtype` (default: the same) that of gradients when they are sent; shards keep the model's.
        `find_unused=True` lets a step leave parameters without a gradient. `source`: see `refusals.check`.
        """
        if isinstance(own.get("units"), Iterable):
            own["units"] = list(own["units"])
        placement, dtypes = Placement(group, offload_policy), (param_dtype, reduce_dtype)
        # The names of the parameters in each of the optimizer's groups.
        self.groups = refusals.check(model, optimizer_cls, param_groups, placement, dtypes, find_unused, source, **own)
        self.model, self.group, self.placement = model, placement.group, placement
        self.dtypes, self.find_unused = dtypes, find_unused
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.all_buckets = []  # trained and frozen; `buckets` are the trained ones
        self.look = None  # compares the model with what it was at the build, before every forward
        self.handles = []  # of the hooks on modules and parameters
        self.updating = False  # whether `step()` runs: only then the optimizer may step
        self.gradients_are_reduced = False  # whether step 3 was made since the last gradient came
        self.divisor = None  # by which a pipeline wants the gradients divided (options/pipelines.py)
        self.sync = True  # False under `no_sync`
        self.backward_number = None  # autograd's number of the backward that is running, once it has shown itself
        self.backward_brought = False  # whether that backward has brought any gradient
        self.saving = None  # the future of the last `checkpoint.async_save`
        self.background = None  # (group, thread) of such saves

    def over_pieces(self, optimizer_cls, param_groups):
        """What the chapter takes for `optimizer_cls`: an optimizer over guarded pieces, in the user's groups."""
        return lambda pieces: optimizer.over_pieces(self, optimizer_cls, param_groups)

    @not_compiled
    def step(self) -> None:
        """The chapter's `step()`; meanwhile, and only then, the optimizer may step."""
        before, self.updating = self.updating, True
        try:
            super().step()
            self.look.note_shards()
        finally:
            self.updating = before

    def forget_gradients(self) -> None:
        """Drop all gradients, and what is known of their way."""
        if self.placement.elsewhere:
            self.placement.finish()  # else the next step would wait for it, and add it
        self.gradients_are_reduced, self.divisor = False, None
        for bucket in self.buckets:
            guard.drop_gradients(bucket.params)
            for piece in bucket.pieces:
                piece.grad = None
            bucket.used, bucket.kept = set(), {}

    def require_all(self) -> None:
        """The end of step 3: every trained parameter has its gradient, or is left alone by the update.

        Raises RuntimeError for parameters that the step left without a gradient, unless `find_unused`, and for
        gradients that were not reduced, which would otherwise be lost. With `find_unused` a parameter that no rank has
        used loses the zeros that were reduced for it.
        """
        if self.placement.elsewhere:
            self.placement.finish_all()
        missing, left, written = [], [], []  # names
        for bucket in self.buckets:
            got = bucket.used - bucket.missing
            missing += [name for index, name in enumerate(bucket.names) if index not in got]
            left += [bucket.names[index] for index in (*bucket.kept, *guard.with_gradient(bucket.params))]
            if bucket.flat.untyped_storage().nbytes():
                written += guard.written(bucket)
        if missing and not self.find_unused:
            past = " (A zero-bubble pipeline computes gradients past autograd's hooks: take 1F1B or GPipe)"
            raise RuntimeError(
                f"no gradient for {name_some(missing)}: the loss does not depend on it, or no backward() was called "
                "since zero_grad() (outside no_sync()). Use every parameter in forward, freeze those that are not "
                "trained with requires_grad_(False) before building the engine, or build it with find_unused=True."
                + (past if left else "")
            )
        if left:
            raise RuntimeError(
                f"gradients of {name_some(left)} were not reduced: the last backward before step() must run outside "
                "no_sync() and reach the same buckets as those before it, or the engine be built with find_unused=True"
            )
        if written:
            raise RuntimeError(
                f"{name_some(written)} was written to before step(), by a forward that writes into its weights or an "
                "optimizer that steps inside backward. The ranks' weights would part: only engine.step() may write"
            )
        if self.find_unused and not self.gradients_are_reduced:
            gradients.drop_unused(self.buckets, self.placement.everyone)
        self.gradients_are_reduced = True
        if self.divisor is not None:
            gradients.scale(self.buckets, torch.tensor(1 / self.divisor, dtype=torch.float64))
            self.divisor = None

    def stepped(self) -> None:
        """The optimizer has changed the shards."""
        for bucket in self.buckets:
            guard.stepped(bucket.params)

    def shards_changed(self) -> None:
        """Somebody else has: a backward of an earlier forward is an error, as in plain PyTorch."""
        self.stepped()
        for bucket in self.all_buckets:
            if not bucket.trained:
                guard.stepped(bucket.params)
        self.look.note_shards()

    def refuse_lost(self) -> None:
        """Raise RuntimeError if the model's weights were changed past the shards, which would be given out."""
        guard.refuse_lost(self.all_buckets)
        self.look.refuse_moved()

    def __repr__(self) -> str:
        """What it is, over which ranks, and what this one holds at the moment."""
        if "model" not in vars(self):
            return f"a closed {type(self).__name__}"
        parameters, gradients = [], []
        for bucket in self.all_buckets:
            parameters += [bucket.flat, bucket.shard]
            gradients += [bucket.gradient, *(piece.grad for piece in bucket.pieces), *bucket.kept.values()]
        state = tree_leaves([*self.optimizer.state.values()])
        numel = sum(param.numel() for param in self.parameters())
        held = {"parameters": parameters, "gradients": gradients, "optimizer": state}
        words = ", ".join(f"{part} {_megabytes(tensors):.2f} MB" for part, tensors in held.items())
        of = f"{type(self).__name__} of a {type(self.model).__name__} with {numel:,} parameters"
        return f"{of}, rank {self.rank} of {self.world_size}; it holds {words}"

    @contextlib.contextmanager
    def no_sync(self):
        """`with engine.no_sync():` around all but the last of several backwards before a step.

        Gradients then add up on this rank, whole, and nothing is sent. (ZeRO-1 sends nothing before `step()` anyway.)
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    clip_grad_norm_ = gradients.clip_grad_norm_
    clip_grad_value_ = gradients.clip_grad_value_
    full_state_dict = state.full_state_dict
    load_full_state_dict = state.load_full_state_dict
    close = state.close

    def train(self, mode: bool = True):
        """`model.train(mode)`; returns the engine, as the model's returns the model."""
        self.model.train(mode)
        return self

    def eval(self):
        """`model.eval()`; returns the engine."""
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.model.training

    # The model's own. Parameters' values are for the model's forward, and their gradients are in the pieces.
    parameters, named_parameters = _of_the_model("parameters"), _of_the_model("named_parameters")
    buffers, named_buffers = _of_the_model("buffers"), _of_the_model("named_buffers")
    modules, named_modules = _of_the_model("modules"), _of_the_model("named_modules")


class SendingEngine(Engine):
    """What ZeRO-2 and ZeRO-3 have in common: gradients are sent while backward goes on."""

    def notice_backward(self) -> None:
        """A backward shows a sign. Autograd has no hook for its end: at the first sign a callback is queued."""
        if self.backward_number is None:
            self.backward_number = when_backward_ends(WeakHook(self.end_backward))
            self.backward_brought = False
            self.begin_backward()

    def send(self, bucket) -> None:
        with record_function("step 3 reduce gradients"):
            self.receive()
            self.in_flight = EngineReduction(bucket)

    @not_compiled
    def zero_grad(self) -> None:
        self.receive()  # of a backward that did not finish
        self.forget_gradients()
        self.begin_backward()
        self.backward_number = None

    def reduce_gradients(self) -> None:
        """Normally nothing is left: at the end of backward `end_backward` has received what was sent last."""
        self.receive()
        self.require_all()

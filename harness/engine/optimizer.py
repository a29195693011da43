"""The optimizer over this rank's pieces, with the parameter groups that the user wrote over whole parameters."""

import sys
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types

from harness.engine import state
from harness.engine.all_or_none import on_all
from harness.engine.hooks import not_compiled
from harness.engine.safety.optimizer_refusals import handed_out


class Piece(torch.Tensor):
    """A piece looks like a plain tensor, but torch's clipping finds no gradient in it before step 3 is over.

    What is reduced is not there yet, or not all of it, and the norm of one rank's shard is not the model's.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # results are plain tensors

    @property
    def grad(self):
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            engine = _living(self.zero_engine)
            if engine is not None and not engine.gradients_are_reduced:
                raise RuntimeError(
                    "torch's clipping over the optimizer's pieces would miss gradients that are not reduced yet, and "
                    "see this rank's shard alone: call engine.clip_grad_norm_(max_norm) or "
                    "engine.clip_grad_value_(clip_value) on every rank, between backward and engine.step()"
                )
        return torch._C.TensorBase.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        torch._C.TensorBase.grad.__set__(self, value)


def _living(reference):
    """The engine that a weak reference is of; None if it is gone, or was closed."""
    engine = reference()
    return engine if engine is not None and vars(engine) else None


# torch's optimizers work on all tensors at once (foreach, fused) if they know their class. DTensor adds itself, too.
_foreach_supported_types.append(Piece)


def over_pieces(engine, optimizer_cls, param_groups=None) -> torch.optim.Optimizer:
    """`optimizer_cls` called with this rank's pieces, or with one group of pieces per entry of `param_groups`.

    `param_groups` are the dictionaries that a torch optimizer takes, over the model's own parameters; a group
    of which this rank owns nothing stays, empty, so that every rank has the same groups. A rank that owns only
    padding hands in one empty tensor. What can be wrong with it was found out before, in safety/optimizer_refusals.py.
    """
    buckets = engine.buckets
    pieces = {id(b.params[index]): piece for b in buckets for index, piece in b.numbered(b.pieces)}
    groups = handed_out(buckets[0].shard, pieces, param_groups)
    for piece in [*pieces.values(), *(groups if param_groups is None else ())]:
        if not isinstance(piece, FakeTensor):
            piece.__class__, piece.zero_engine = Piece, weakref.ref(engine)
    try:  # the build has come far, and may fail on some rank
        what = "all ranks to make their optimizer"
        optimizer = on_all(lambda: optimizer_cls(groups), engine.placement.everyone, what, engine.model)
    except Exception:
        state.restore(engine)
        raise
    _watch_steps(weakref.ref(engine), optimizer)
    # What an optimizer's state of one rank fits: the stage, the ranks, and which elements this rank owns.
    owned = [(b.names[index], piece.numel()) for b in buckets for index, piece in b.numbered(b.pieces)]
    layout = {"stage": type(engine).__name__, "world_size": engine.world_size, "rank": engine.rank, "pieces": owned}
    _keep_layout(layout, optimizer)
    return optimizer


def _watch_steps(this, optimizer) -> None:
    """Only `engine.step()` steps, over the groups of the build; what else the optimizer writes is gathered."""

    def members():
        return [[id(piece) for piece in group["params"]] for group in optimizer.param_groups]

    built = members()

    @not_compiled
    def before_step(optimizer, args, kwargs):
        engine = _living(this)
        if engine is not None and not engine.updating:
            for left in ("grad_scale", "found_inf"):  # by torch's GradScaler
                vars(optimizer).pop(left, None)
            raise RuntimeError(
                "optimizer.step() alone would update this rank's shard with gradients that were not reduced, and leave "
                "the other ranks without it: call engine.step(). A scheduler over engine.optimizer sees that step. "
                "For float16 take harness.engine.gradients.GradScaler, with the engine in the optimizer's place"
            )
        if members() != built:
            _refuse_groups()

    @not_compiled
    def after_step(optimizer, args, kwargs):
        if this() is not None:
            this().stepped()

    def gathering(method):
        """`train()` or `eval()` of an optimizer that swaps weights, as schedule-free ones do."""

        def call(*args, **kwargs):
            method(*args, **kwargs)
            if engine := _living(this):
                engine.shards_changed()

        return call

    for name in ("train", "eval"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, gathering(getattr(optimizer, name)))
    optimizer.add_param_group = _refuse_groups
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    optimizer._step_supports_amp_scaling = True  # so that torch's GradScaler calls `step`, and `before_step` answers
    # The pieces' gradients alone are not all that a stage keeps of a step.
    optimizer.zero_grad = lambda set_to_none=True: this().zero_grad()


def _refuse_groups(*_) -> None:
    raise RuntimeError(
        "the optimizer's groups have other members than at the build. The engine shards, reduces and gathers the "
        "parameters that it was built with: pass them in groups, as param_groups=[...]; for other ones build another "
        "model and engine. Options of a group, such as its learning rate, may change"
    )


def _keep_layout(layout: dict, optimizer) -> None:
    """The optimizer's state of this rank is loaded where it fits, and nowhere else."""

    def saved(optimizer, state):
        state["zero_layout"] = layout

    def about_to_load(optimizer, state):
        if state.get("zero_layout") != layout:
            raise ValueError(
                "this is not the optimizer's state of this rank: one rank's state fits the same stage, number of "
                "ranks, bucket size and units only. Build the engine as it was saved, or save and load by "
                "harness.engine.checkpoint, whose checkpoints fit any stage and number of ranks"
            )

    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(about_to_load)

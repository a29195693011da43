"""The optimizer over this rank's pieces, with the parameter groups that the user wrote over whole parameters."""

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zerolab.engine import state
from zerolab.engine.all_or_none import on_all
from zerolab.engine.safety.guard import Piece
from zerolab.engine.safety.optimizer_refusals import handed_out
from zerolab.engine.safety.unchanged import watch_optimizer


def over_pieces(engine, optimizer_cls, param_groups=None) -> torch.optim.Optimizer:
    """`optimizer_cls` called with this rank's pieces, or with one group of pieces per entry of `param_groups`.

    `param_groups` are the dictionaries that a torch optimizer takes, over the model's own parameters; a group
    of which this rank owns nothing stays, empty, so that every rank has the same groups. A rank that owns only
    padding hands in one empty tensor. What can be wrong with it was found out before, in safety/optimizer_refusals.py.
    """
    buckets = engine.buckets
    pieces = {}  # id of a parameter -> its piece
    owned = []  # (name, how many elements) of each piece
    for bucket in buckets:
        for index, piece in bucket.numbered(bucket.pieces):
            pieces[id(bucket.params[index])] = piece
            owned.append((bucket.names[index], piece.numel()))
    if not pieces and param_groups is None:  # torch refuses an empty list, and takes an empty group
        pieces[None] = buckets[0].shard[:0].detach().requires_grad_()
    groups = handed_out(pieces, param_groups)
    for piece in pieces.values():
        if not isinstance(piece, FakeTensor):
            piece.__class__, piece.zero_engine = Piece, weakref.ref(engine)
    try:  # the build has come far, and may fail on some rank
        what = "all ranks to make their optimizer"
        optimizer = on_all(lambda: optimizer_cls(groups), engine.placement.everyone, what)
    except Exception:
        state.restore(engine)
        raise
    watch_optimizer(engine, optimizer)
    # What an optimizer's state of one rank fits: the stage, the ranks, and which elements this rank owns.
    layout = {"stage": type(engine).__name__, "world_size": engine.world_size, "rank": engine.rank, "pieces": owned}
    _keep_layout(layout, optimizer)
    return optimizer


def _keep_layout(layout: dict, optimizer) -> None:
    """The optimizer's state of this rank is loaded where it fits, and nowhere else."""

    def saved(optimizer, state):
        state["zero_layout"] = layout

    def about_to_load(optimizer, state):
        if state.get("zero_layout") != layout:
            raise ValueError(
                "this is not the optimizer's state of this rank: one rank's state fits the same stage, number of "
                "ranks, bucket size and units only. Build the engine as it was saved, or save and load by "
                "zerolab.engine.checkpoint, whose checkpoints fit any stage and number of ranks"
            )

    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(about_to_load)

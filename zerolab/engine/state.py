"""Whole weights out of an engine and into one, the buffers, and the way back to a plain model."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from zerolab.engine.all_or_none import all_or_none, on_all
from zerolab.engine.layout import in_three, pieces
from zerolab.engine.options import tensor_parallel
from zerolab.engine.options.precision import sendable
from zerolab.engine.safety import guard
from zerolab.engine.safety.waiting import not_alike, waiting_for


def broadcast_buffers(model, group) -> None:
    """All ranks start from rank 0's buffers. A collective sends memory as it lies, so it is given contiguous memory."""
    for buffer in model.buffers():
        whole = buffer.detach().contiguous()
        dist.broadcast(sendable(whole), group_src=0, group=group)
        if whole.data_ptr() == buffer.data_ptr():
            continue
        if 0 in buffer.stride():  # expanded: several elements in one place of memory
            buffer.data = whole
        else:
            buffer.copy_(whole)


def gather_whole(bucket) -> torch.Tensor:
    """The bucket's values from all ranks' shards, in the shards' dtype, on the device: (numel,)."""
    flat = torch.empty(bucket.numel, dtype=bucket.shard.dtype, device=bucket.flat.device)
    with waiting_for(f"the all-gather of {bucket.label}"):
        dist.all_gather_single(sendable(flat), sendable(bucket.shard.to(flat.device)), group=bucket.group)
    return flat


def full_state_dict(engine) -> dict[str, torch.Tensor]:
    """Names, shapes, dtypes and values of the whole model's `state_dict()`, on CPU, on every rank. A collective.

    Parameters are gathered from the shards, bucket by bucket. Buffers (BatchNorm's running statistics,
    for example) are every rank's own and may differ, as each has seen other data: rank 0's are returned. So is what
    modules give by `get_extra_state()`.
    """
    what = "all ranks to call full_state_dict()"
    everyone = all_or_none(lambda: _to_give(engine), engine.placement.everyone, what)
    _compare([buffers for buffers, _ in everyone])
    values = {}  # id of the model's own tensor -> its whole value on CPU
    with torch.no_grad():
        for bucket in engine.all_buckets:
            for param, view in zip(bucket.params, bucket.views(gather_whole(bucket))):
                values[id(param)] = tensor_parallel.whole(param, view).to("cpu", copy=True)
        params, buffers, _ = in_three(engine)
        for buffer in buffers.values():
            if id(buffer) not in values:
                whole = buffer.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(sendable(whole), group_src=0, group=engine.placement.everyone)
                values[id(buffer)] = whole.cpu()
    state = engine.model.state_dict(keep_vars=True)  # the tensors themselves: a freed one cannot be read
    for key, tensor in (params | buffers).items():
        state[key] = values[id(tensor)]
    state.update(everyone[0][1])
    return state


def _to_give(engine) -> tuple[dict, dict]:
    """({name of a buffer: what it is}, {name: what a module keeps besides}) of this rank's model."""
    engine.refuse_lost()
    _, buffers, extras = in_three(engine)
    kinds = {key: f"{buffer.dtype} of shape {tuple(buffer.shape)}" for key, buffer in buffers.items()}
    kept = {key: value for key, (_, value) in extras.items()}
    return kinds, tree_map_only(torch.Tensor, lambda tensor: tensor.to("cpu", copy=True), kept)


def _compare(everyone: list[dict]) -> None:
    for rank, other in enumerate(everyone):
        for key in {**everyone[0], **other}:
            here, there = (of.get(key, "not there") for of in (everyone[0], other))
            if here != there:
                raise ValueError(
                    f"{key!r} is {here} on rank 0, and {there} on rank {rank}: the whole state has rank 0's buffers, "
                    "so all ranks must have buffers of the same names, shapes and dtypes"
                )


@contextlib.contextmanager
def swapped(engine, values: list[torch.Tensor]):
    """`with swapped(engine, values):` the optimizer's pieces have these values, in its own order. A collective.

    For averages of weights, of which each rank keeps its own part, in the precision of the shards: inside, `engine(x)`,
    `full_state_dict()` and checkpoints have them, and nobody trains. Afterwards `values` are as they were.
    """
    _swap(engine, values)
    try:
        yield
    finally:
        _swap(engine, values)


def _swap(engine, values) -> None:
    own = []
    for group in engine.optimizer.param_groups:
        own += group["params"]

    def fit():
        wanted, found = ([tuple(each.shape) for each in some] for some in (own, values))
        if wanted != found:
            raise ValueError(f"swapped() needs a value for each piece, of the shapes {wanted}, got {found}")

    on_all(fit, engine.placement.everyone, "all ranks to swap weights")
    engine.placement.finish_all()
    with torch.no_grad():
        for piece, value in zip(own, values):
            kept = piece.clone()
            piece.copy_(value)
            value.copy_(kept)
    engine.shards_changed()


def load_full_state_dict(engine, state: dict[str, torch.Tensor]) -> None:
    """Load what `full_state_dict` returned, at any world size: this rank's part of every parameter. A collective.

    Every rank passes the whole `state`. Raises KeyError for missing or unexpected names and ValueError for another
    shape, on every rank, before anything is written; so does what modules raise that take their part by
    `set_extra_state()`.
    """
    what = "all ranks to call load_full_state_dict()"
    on_all(lambda: _check_state(engine, state), engine.placement.everyone, what)
    params, buffers, extras = in_three(engine)
    keys = {id(param): key for key, param in params.items()}
    values = [(buffer, state[key]) for key, buffer in buffers.items()]
    for _, param, piece, _, first in pieces(engine.all_buckets):
        value = tensor_parallel.part(param, state[keys[id(param)]]).reshape(-1)
        values.append((piece, value[first : first + piece.numel()]))
    take_in(engine, [(module, state[key]) for key, (module, _) in extras.items()], values)
    engine.shards_changed()


def take_in(engine, modules: list[tuple], values: list[tuple]) -> None:
    """`modules` (module, value) take their values, on all ranks or on none; then `values` (place, value) are written.

    `set_extra_state()` is the modules' own code, which may raise. So it comes before anything else. A collective.
    """
    before = [(module, copy.deepcopy(module.get_extra_state())) for module, _ in modules]
    try:
        if modules:
            on_all(lambda: [module.set_extra_state(value) for module, value in modules], engine.placement.everyone)
    except Exception:
        for module, value in before:
            module.set_extra_state(value)
        raise
    engine.placement.finish_all()
    with torch.no_grad():
        for place, value in values:
            place.copy_(value)


def _check_state(engine, state) -> None:
    params, buffers, extras = in_three(engine)
    tensors = params | buffers
    missing = [key for key in (*tensors, *extras) if key not in state]
    unexpected = [key for key in state if key not in tensors and key not in extras]
    if missing or unexpected:
        raise KeyError(f"the state does not fit the model: {not_alike(missing, unexpected)}")
    for key, tensor in tensors.items():
        if tensor.shape != state[key].shape:
            raise ValueError(f"{key!r} has shape {tuple(state[key].shape)} in the state, {tuple(tensor.shape)} here")


def close(engine) -> None:
    """The way back: the model is plain again, with whole parameters in memory of their own. A collective.

    All hooks are gone, and the engine cannot be used any more. Another one may be built on the model.
    """
    on_all(engine.refuse_lost, engine.placement.everyone, "all ranks to call close()")
    engine.zero_grad()
    for owner in (engine, *engine.all_buckets):
        for handle in owner.handles:
            handle.remove()
    restore(engine)
    vars(engine).clear()


@torch.no_grad()
def restore(engine) -> None:
    """The model is plain again."""
    for bucket in engine.all_buckets:
        guard.release(bucket.params)
        for param, view in zip(bucket.params, bucket.views(gather_whole(bucket))):
            tensor_parallel.local(param).data = view.clone()

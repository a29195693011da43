"""Checkpoints that any stage loads at any number of ranks, and torch's own classes too.

    checkpoint.save(engine, "run", step=100)     # a new folder run/000001; `step` is the caller's own value
    extra = checkpoint.load(engine, "run")       # the newest one; {"step": 100}

Every rank writes what it has: its rectangles (rectangles.py) of each parameter and of the optimizer's state. Nothing is
gathered. Names and layout are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`.

How the files come to disk is in checkpoint_write.py, how they are read in safe_reader.py.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import io
import time
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.engine import checkpoint_fit, checkpoint_write, groups, tensor_parallel
from harness.engine.layout import elementwise, entries, extra_states, first_element, keys_of, pieces, plain_name
from harness.engine.rectangles import Cut
from harness.engine.safe_reader import Damaged, Folder, Unsafe, complete, newest
from harness.engine.state import set_extra_states
from harness.engine.together import on_all, together

__all__ = ["Damaged", "Saved", "Unsafe", "async_save", "complete", "load", "newest", "save"]


@dataclasses.dataclass
class Saved:
    """What a save took on this rank."""

    path: Path
    rank: int
    nbytes: int  # that this rank has written
    seconds: float  # until the checkpoint was complete on all ranks
    stood_still: float  # seconds of these in which training could not go on

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.nbytes:,} bytes to {self.path} in {self.seconds:.2f} s; "
            f"training stood still for {self.stood_still:.2f} s"
        )


def save(engine, folder, keep: int | None = 3, **extra) -> Saved:
    """Save model, optimizer and `extra` in a new folder inside `folder`, which all ranks can reach. A collective.

    Of the complete checkpoints in `folder` the newest `keep` stay (None: all). `extra` are tensors and plain values,
    each rank's own. Raises the same error on every rank (RuntimeError for a full disk); earlier checkpoints stay.
    """
    return _begin(engine, folder, keep, extra, engine.placement.everyone, in_background=False)()


def async_save(engine, folder, keep: int | None = 3, **extra) -> concurrent.futures.Future:
    """As `save`, but training goes on as soon as this rank's part is copied. The future's result is a `Saved`.

    The copy is in host memory, as large as what the rank writes. A later `save` or `load` waits for the future. Ask for
    `result()` before the process group is destroyed. The first call makes a gloo group, for the files' own collectives:
    in the background they must not mix with training's.
    """
    _wait_for_last(engine)
    if "background" not in vars(engine):
        group = groups.new(dist.get_process_group_ranks(engine.placement.everyone or dist.group.WORLD), "gloo")
        engine.background = group, concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    group, thread = engine.background
    engine.saving = thread.submit(_begin(engine, folder, keep, extra, group, in_background=True))
    engine.saving.add_done_callback(_warn)
    return engine.saving


def load(engine, folder) -> dict:
    """Load the newest checkpoint in `folder`, or `folder` itself, into the engine. Returns `extra`. A collective.

    `extra` is what this rank has saved; a rank that was not there gets rank 0's. Raises the same kind of error on every
    rank before anything is changed: FileNotFoundError, `Damaged`, `Unsafe`, or ValueError for another model or
    optimizer. Until then values are in host memory of their own.
    """
    _wait_for_last(engine)
    _refuse_parts(engine)
    place = engine.placement
    path = together(lambda: newest(folder) if place.rank == 0 else None, place.everyone)[0]
    names = _names_of_groups(engine)
    source = on_all(lambda: Folder(path, place.rank, place.world_size), place.everyone)
    return _install(engine, *on_all(lambda: checkpoint_fit.read(engine, source, names), place.everyone))


def _refuse_parts(engine) -> None:
    if tensor_parallel.dimension(engine.buckets) is not None:
        raise ValueError(
            "tensor parallelism has cut this model, and the ranks of one data dimension have parts of it alone: save "
            "engine.full_state_dict() on one rank"
        )


def _begin(engine, folder, keep, extra, group, in_background: bool):
    """Everything that needs the engine. Returns the rest as a function: it may run while training goes on."""
    _refuse_parts(engine)
    _wait_for_last(engine)
    began, rank, everyone = time.perf_counter(), engine.placement.rank, engine.placement.everyone
    names = _names_of_groups(engine)
    state = on_all(lambda: _state(engine, extra, names, in_background), everyone)
    path = together(lambda: checkpoint_write.new_folder(folder, keep) if rank == 0 else None, everyone)[0]
    ready = time.perf_counter()

    def write() -> Saved:
        nbytes = checkpoint_write.write(state, path, keep, rank, group)
        ended = time.perf_counter()
        return Saved(path.with_suffix(""), rank, nbytes, ended - began, (ready if in_background else ended) - began)

    return write


def _state(engine, extra: dict, names: list[list[str]], copied: bool) -> dict[tuple, object]:
    """{path: value} that this rank writes, as torch lays it out; with `copied`, in host memory of its own.

    What is no part of something that is cut, rank 0 writes.
    """
    own = (lambda tensor: tensor.detach().to("cpu", copy=True)) if copied else torch.Tensor.detach
    state, first = {}, engine.placement.rank == 0
    keys, cuts = keys_of(engine), {}  # cuts: id of a parameter -> its `Cut`; None if this rank has nothing of it
    extras = extra_states(engine.model)
    with torch.no_grad():
        for bucket in engine.buckets:
            cuts.update(dict.fromkeys(map(id, bucket.params)))
            for index, part in bucket.cut(bucket.shard):
                cuts[id(bucket.params[index])] = Cut.of(own(part), bucket.shapes[index], first_element(bucket, index))
            for param in bucket.params:
                if param.numel() == 0:
                    cuts[id(param)] = torch.empty(param.shape, dtype=bucket.shard.dtype)
        for key, value in keys.items():
            if id(value) in cuts:
                if cuts[id(value)] is not None:
                    state["model", key] = cuts[id(value)]  # tied parameters go under all of their names
            elif first and isinstance(value, torch.Tensor) and key not in extras:
                state["model", key] = own(value)
            elif first:
                state.update(entries(_plain(value), ("model", key)))
        for name, piece, shape, start in pieces(engine):
            for path, value in entries(engine.optimizer.state.get(piece, {}), ("optim", "state", name)):
                if elementwise(value, piece):
                    state[path] = Cut.of(own(value), shape, start)
                elif any(torch.is_tensor(leaf) and leaf.numel() > 1 for leaf in tree_leaves(value)):
                    raise ValueError(
                        f"{'.'.join(path[2:])!r} in the optimizer's state: each rank has another part of it, and only "
                        "tensors with a number for each element, also in dictionaries, can be put together"
                    )
                elif path[3:]:  # else there is no state yet
                    state[path] = _plain(value)
    if first:
        for number, (group, there) in enumerate(zip(engine.optimizer.param_groups, names)):
            for key, value in {**group, "params": there}.items():
                state.update(entries(_plain(value), ("optim", "param_groups", number, key)))
        about = {"optimizer": type(engine.optimizer).__name__, "stage": type(engine).__name__}
        state.update(entries({**about, "ranks": engine.placement.world_size}, ("zero",)))
    _must_be_plain({".".join(map(str, path[1:])): value for path, value in state.items()})
    _must_be_plain(extra := _plain(extra))
    state["extra", str(engine.placement.rank)] = extra
    return state


def _plain(value):
    """A copy of `value` in which numpy's numbers are Python's: a schedule may have computed with them."""
    if type(value) in (dict, OrderedDict):
        return type(value)((_plain(key), _plain(inner)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value).__module__ == "numpy" and hasattr(value, "item") and value.shape == ():
        return value.item()
    with contextlib.suppress(Exception):  # what cannot be copied is refused by its name, in a moment
        value = copy.deepcopy(value)
    return value


def _names_of_groups(engine) -> list[list[str]]:
    """The names in each group of the optimizer. A rank knows those that it has pieces of. A collective."""
    names = {id(piece): name for name, piece, _, _ in pieces(engine)}
    mine = [[names[id(p)] for p in g["params"] if id(p) in names] for g in engine.optimizer.param_groups]
    everyone = together(lambda: mine, engine.placement.everyone)
    order = {plain_name(name): place for place, (name, _) in enumerate(engine.model.named_parameters())}
    return [sorted({n for groups in everyone for n in groups[g]}, key=order.get) for g in range(len(mine))]


def _must_be_plain(named: dict) -> None:
    """Raises ValueError, which names it, if there is a value that could not be read without running code."""
    for name, value in named.items():
        if type(value) in (torch.Tensor, Cut):
            continue
        stream = io.BytesIO()
        try:
            torch.save(value, stream)
            stream.seek(0)
            torch.load(stream, weights_only=True)
        except Exception as error:  # what cannot be pickled raises many kinds
            raise ValueError(
                f"{name!r}: a checkpoint takes tensors, numbers, strings, and lists and dictionaries of them, which "
                f"can be read without running code. {str(error).splitlines()[0]}"
            ) from None


def _install(engine, modules, values, options, state, extra) -> dict:
    """All ranks have read all they need: when modules have taken theirs nothing can fail. Returns `extra`."""
    set_extra_states(engine, modules)
    engine.placement.finish_all()
    with torch.no_grad():
        for place, value in values:
            place.copy_(value)
    for group, there in zip(engine.optimizer.param_groups, options):
        group.update(there)
    groups = {id(piece): group for group in engine.optimizer.param_groups for piece in group["params"]}
    for piece, own in state:
        on_device = groups[id(piece)].get("capturable") or groups[id(piece)].get("fused")
        engine.optimizer.state.pop(piece, None)
        if own:
            engine.optimizer.state[piece] = _placed(own, piece.device, numbers=on_device)
    engine._shards_changed()
    return extra


def _placed(state: dict, device, numbers: bool) -> dict:
    """An optimizer's state on the device, a step counter only if the optimizer wants `numbers` there."""
    return tree_map_only(torch.Tensor, lambda value: value.to(device) if value.dim() or numbers else value, state)


def _wait_for_last(engine) -> None:
    """One save at a time. Its errors are those of the future that the caller has."""
    if "saving" in vars(engine):
        concurrent.futures.wait([engine.saving])


def _warn(future) -> None:
    if future.exception() is not None:  # not everybody asks for the result
        warnings.warn(f"a checkpoint was not saved: {future.exception()}", stacklevel=1)

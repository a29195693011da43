"""What an engine saves, and when: at once, or in the background while training goes on."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import io
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from zerolab.engine import groups
from zerolab.engine.all_or_none import all_or_none
from zerolab.engine.checkpoint import files
from zerolab.engine.checkpoint.rectangles import Cut
from zerolab.engine.layout import entries, name_of, pieces, with_plain_names
from zerolab.engine.options import tensor_parallel
from zerolab.engine.safety.optimizer_refusals import options_of


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
    return _begin(engine, folder, keep, extra, in_background=False)(engine.placement.everyone)


def async_save(engine, folder, keep: int | None = 3, **extra) -> concurrent.futures.Future:
    """As `save`, but training goes on as soon as this rank's part is copied. The future's result is a `Saved`.

    The copy is in host memory, as large as what the rank writes. A later `save` or `load` waits for the future. Ask for
    `result()` before the process group is destroyed. The first call makes a gloo group, for the files' own collectives:
    in the background they must not mix with training's.
    """
    write = _begin(engine, folder, keep, extra, in_background=True)
    if engine.background is None:
        group = groups.new(dist.get_process_group_ranks(engine.placement.everyone), "gloo")
        engine.background = group, concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    group, thread = engine.background
    engine.saving = thread.submit(write, group)
    engine.saving.add_done_callback(_warn)
    return engine.saving


def refuse_parts(engine) -> None:
    if tensor_parallel.dimension(engine.all_buckets) is not None:
        raise ValueError(
            "tensor parallelism has cut this model, and the ranks of one data dimension have parts of it alone: save "
            "engine.full_state_dict() on one rank"
        )


def _begin(engine, folder, keep, extra, in_background: bool):
    """Everything that needs the engine. Returns the rest, a function of a group: it may run while training goes on."""
    refuse_parts(engine)
    wait_for_last(engine)
    began, rank, everyone = time.perf_counter(), engine.placement.rank, engine.placement.everyone
    state = {}

    def collect() -> dict:
        state.update(_state(engine, extra, in_background))
        return _must_be_alike(engine, state)

    name = "async_save" if in_background else "save"
    _refuse_different(all_or_none(collect, everyone, f"all ranks to call checkpoint.{name}()"))
    path = all_or_none(lambda: files.new_folder(folder, keep) if rank == 0 else None, everyone)[0]
    ready = time.perf_counter()

    def write(group) -> Saved:
        nbytes = files.write(state, path, keep, rank, group)
        ended = time.perf_counter()
        return Saved(path.with_suffix(""), rank, nbytes, ended - began, (ready if in_background else ended) - began)

    return write


def _state(engine, extra: dict, copied: bool) -> dict[tuple, object]:
    """{path: value} that this rank writes, as torch lays it out; with `copied`, in host memory of its own.

    What is no part of something that is cut, rank 0 writes.
    """
    own = _copied_to_host if copied else torch.Tensor.detach
    with torch.no_grad():
        engine.refuse_lost()
        state = _model(engine, own) | _optimizer_state(engine, own)
        if engine.placement.rank == 0:
            state |= _options(engine)
    named = {name_of(path): value for path, value in state.items()}
    if len(named) < len(state):
        raise ValueError("two values have one name, as {'a': {'b': 1}, 'a.b': 2} has in the optimizer's state")
    _must_be_plain(named)
    _must_be_plain(extra := _plain(extra))
    state["extra", str(engine.placement.rank)] = extra
    return state


def _copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _model(engine, own) -> dict[tuple, object]:
    """What this rank has of each parameter; of tied ones under all their names, and of empty ones all of it.

    On rank 0 also buffers, and what modules keep besides tensors.
    """
    cuts = {}  # id of a parameter -> its `Cut`
    for _, param, piece, shape, first in pieces(engine.all_buckets):
        cuts[id(param)] = Cut.of(own(piece), shape, first)
    for bucket in engine.all_buckets:
        for param in bucket.params:
            if param.numel() == 0:
                cuts[id(param)] = torch.empty(param.shape, dtype=bucket.shard.dtype)
    params, buffers, extras = with_plain_names(engine)
    state = {("model", key): cuts[id(param)] for key, param in params.items() if id(param) in cuts}
    if engine.placement.rank == 0:
        state |= {("model", key): own(buffer) for key, buffer in buffers.items()}
        for key, (_, value) in extras.items():
            state.update(entries(_plain(value), ("model", key)))
    return state


def _optimizer_state(engine, own) -> dict[tuple, object]:
    state = {}
    for key in engine.optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise ValueError(
                f"{key!r} in the optimizer's state belongs to no parameter, and a checkpoint has no place for it: keep "
                "it in an option of a group"
            )
    for name, _, piece, shape, start in pieces(engine.buckets):
        for path, value in entries(engine.optimizer.state.get(piece, {}), ("optim", "state", name)):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == piece.shape:  # a number per element
                state[path] = Cut.of(own(value), shape, start)
            elif any(torch.is_tensor(leaf) and leaf.numel() > 1 for leaf in tree_leaves(value)):
                raise ValueError(
                    f"{'.'.join(path[2:])!r} in the optimizer's state: each rank has another part of it, and only "
                    "tensors with a number for each element, also in dictionaries, can be put together"
                )
            elif path[3:]:  # else there is no state yet
                state[path] = _plain(value)
    return state


def _options(engine) -> dict[tuple, object]:
    """The options of the optimizer's groups, and who has saved them."""
    state = {}
    for number, (group, there) in enumerate(zip(engine.optimizer.param_groups, engine.groups)):
        for key, value in {**group, "params": there}.items():
            state.update(entries(_plain(value), ("optim", "param_groups", number, key)))
    state["zero", "optimizer"] = type(engine.optimizer).__name__
    state["zero", "stage"] = type(engine).__name__
    state["zero", "ranks"] = engine.placement.world_size
    return state


def _plain(value):
    """A copy of `value` in which numpy's numbers are Python's: a schedule may have computed with them."""

    def one(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        if type(leaf).__module__ == "numpy" and getattr(leaf, "shape", None) == ():
            return leaf.item()
        with contextlib.suppress(Exception):  # what cannot be copied is refused by its name, in a moment
            leaf = copy.deepcopy(leaf)
        return leaf

    return tree_map(one, value)


def _must_be_alike(engine, state: dict[tuple, object]) -> dict[str, dict]:
    """{name of a parameter or group: {path in its state: what all ranks must have there, as text}}.

    A group's options may part where a schedule goes by a rank's own loss.
    """
    found = {}
    for number, group in enumerate(engine.optimizer.param_groups):
        found[f"group {number}"] = {"options": options_of(group)}
    for path, value in state.items():
        if path[:2] == ("optim", "state"):
            plain = None if type(value) is Cut else tree_map_only(torch.Tensor, torch.Tensor.tolist, value)
            found.setdefault(path[2], {})[path[3:]] = repr(plain)
    return found


def _refuse_different(everyone: list[dict]) -> None:
    """Raises ValueError if ranks have other numbers or keys in one parameter's state, or in a group's options."""
    together = {}
    for found in everyone:
        for name, own in found.items():
            if together.setdefault(name, own) != own:
                raise ValueError(
                    f"ranks disagree on {name!r} in the optimizer's state, in a key or in a number: {together[name]} "
                    f"and {own}. One checkpoint cannot hold both, and the ranks' weights part. A schedule must have "
                    "the same numbers on all ranks, as the mean of their losses is"
                )


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


def wait_for_last(engine) -> None:
    """One save at a time. Its errors are those of the future that the caller has."""
    if engine.saving is not None:
        concurrent.futures.wait([engine.saving])


def _warn(future) -> None:
    if future.exception() is not None:  # not everybody asks for the result
        warnings.warn(f"a checkpoint was not saved: {future.exception()}", stacklevel=1)

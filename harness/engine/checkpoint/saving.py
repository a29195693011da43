"""What an engine saves, and when: at once, or in the background while training goes on."""

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

from harness.engine import groups
from harness.engine.all_or_none import all_or_none, on_all
from harness.engine.checkpoint import files
from harness.engine.checkpoint.rectangles import Cut
from harness.engine.layout import elementwise, entries, extra_states, keys_of, pieces, plain_name
from harness.engine.options import tensor_parallel
from harness.engine.safety import guard
from harness.engine.safety.optimizer_refusals import options_of


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
    wait_for_last(engine)
    on_all(lambda: None, engine.placement.everyone, "all ranks to call checkpoint.async_save()")
    if "background" not in vars(engine):
        group = groups.new(dist.get_process_group_ranks(engine.placement.everyone or dist.group.WORLD), "gloo")
        engine.background = group, concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    group, thread = engine.background
    engine.saving = thread.submit(_begin(engine, folder, keep, extra, group, in_background=True))
    engine.saving.add_done_callback(_warn)
    return engine.saving


def refuse_parts(engine) -> None:
    if tensor_parallel.dimension(engine.all_buckets) is not None:
        raise ValueError(
            "tensor parallelism has cut this model, and the ranks of one data dimension have parts of it alone: save "
            "engine.full_state_dict() on one rank"
        )


def _begin(engine, folder, keep, extra, group, in_background: bool):
    """Everything that needs the engine. Returns the rest as a function: it may run while training goes on."""
    refuse_parts(engine)
    wait_for_last(engine)
    began, rank, everyone = time.perf_counter(), engine.placement.rank, engine.placement.everyone
    names = names_of_groups(engine, "all ranks to call checkpoint.save()")
    state = on_all(lambda: _state(engine, extra, names, in_background), everyone)
    _must_go_together(engine, state)
    path = all_or_none(lambda: files.new_folder(folder, keep) if rank == 0 else None, everyone)[0]
    ready = time.perf_counter()

    def write() -> Saved:
        nbytes = files.write(state, path, keep, rank, group)
        ended = time.perf_counter()
        return Saved(path.with_suffix(""), rank, nbytes, ended - began, (ready if in_background else ended) - began)

    return write


def _state(engine, extra: dict, names: list[list[str]], copied: bool) -> dict[tuple, object]:
    """{path: value} that this rank writes, as torch lays it out; with `copied`, in host memory of its own.

    What is no part of something that is cut, rank 0 writes.
    """
    own = _copied_to_host if copied else torch.Tensor.detach
    with torch.no_grad():
        guard.refuse_lost(engine.all_buckets)
        state = _parameters(engine, own) | _optimizer_state(engine, own)
        if engine.placement.rank == 0:
            state |= _beside_parameters(engine, own) | _options(engine, names)
    named = {".".join(map(str, path)): value for path, value in state.items()}
    if len(named) < len(state):
        raise ValueError("two values have one name, as {'a': {'b': 1}, 'a.b': 2} has in the optimizer's state")
    _must_be_plain(named)
    _must_be_plain(extra := _plain(extra))
    state["extra", str(engine.placement.rank)] = extra
    return state


def _copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _parameters(engine, own) -> dict[tuple, object]:
    """What this rank has of each parameter; of tied ones under all their names, and of empty ones all of it."""
    cuts = {}  # id of a parameter -> its `Cut`
    for _, param, piece, shape, first in pieces(engine.all_buckets):
        cuts[id(param)] = Cut.of(own(piece), shape, first)
    for bucket in engine.all_buckets:
        for param in bucket.params:
            if param.numel() == 0:
                cuts[id(param)] = torch.empty(param.shape, dtype=bucket.shard.dtype)
    return {("model", key): cuts[id(value)] for key, value in keys_of(engine).items() if id(value) in cuts}


def _beside_parameters(engine, own) -> dict[tuple, object]:
    """Buffers, and what modules keep besides tensors."""
    state, extras = {}, extra_states(engine.model)
    parameters = {id(param) for bucket in engine.all_buckets for param in bucket.params}
    for key, value in keys_of(engine).items():
        if isinstance(value, torch.Tensor) and key not in extras:
            if id(value) not in parameters:
                state["model", key] = own(value)
        else:
            state.update(entries(_plain(value), ("model", key)))
    return state


def _optimizer_state(engine, own) -> dict[tuple, object]:
    state = {}
    for name, _, piece, shape, start in pieces(engine.buckets):
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
    return state


def _options(engine, names: list[list[str]]) -> dict[tuple, object]:
    """The options of the optimizer's groups, and who has saved them."""
    state = {}
    for number, (group, there) in enumerate(zip(engine.optimizer.param_groups, names)):
        for key, value in {**group, "params": there}.items():
            state.update(entries(_plain(value), ("optim", "param_groups", number, key)))
    state["zero", "optimizer"] = type(engine.optimizer).__name__
    state["zero", "stage"] = type(engine).__name__
    state["zero", "ranks"] = engine.placement.world_size
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


def names_of_groups(engine, what: str) -> list[list[str]]:
    """The names in each group of the optimizer. A rank knows those that it has pieces of. A collective."""
    names = {id(piece): name for name, _, piece, _, _ in pieces(engine.buckets)}
    mine = [[names[id(p)] for p in g["params"] if id(p) in names] for g in engine.optimizer.param_groups]
    order = [plain_name(name) for name, _ in engine.model.named_parameters()]
    found = []
    for same_group in zip(*all_or_none(lambda: mine, engine.placement.everyone, what)):
        there = set().union(*same_group)
        found.append([name for name in order if name in there])
    return found


def _must_go_together(engine, state: dict[tuple, object]) -> None:
    """Raises ValueError if ranks have other numbers or keys in one parameter's state, or in a group's options.

    A collective. A group's options may part where a schedule goes by a rank's own loss.
    """
    mine = {}  # name of a parameter or group -> {path in its state: what all ranks must have there}
    for number, group in enumerate(engine.optimizer.param_groups):
        mine[f"group {number}"] = {"options": options_of(group)}
    for path, value in state.items():
        if path[:2] == ("optim", "state"):
            plain = None if type(value) is Cut else tree_map_only(torch.Tensor, torch.Tensor.tolist, value)
            mine.setdefault(path[2], {})[path[3:]] = repr(plain)
    together = {}
    for other in all_or_none(lambda: mine, engine.placement.everyone):
        for name, own in other.items():
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
    if "saving" in vars(engine):
        concurrent.futures.wait([engine.saving])


def _warn(future) -> None:
    if future.exception() is not None:  # not everybody asks for the result
        warnings.warn(f"a checkpoint was not saved: {future.exception()}", stacklevel=1)

"""Checkpoints that any stage loads at any number of ranks, and torch's own classes too.

    checkpoint.save(engine, "run", step=100)     # a new folder run/000001; `step` is the caller's own value
    extra = checkpoint.load(engine, "run")       # the newest one; {"step": 100}

Every rank writes what it has: its rectangles (rectangles.py) of each parameter and of the optimizer's state. Nothing is
gathered. Names and layout are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`.

A save must never damage an earlier one. So it goes to a new folder "000007.partial", which gets its name "000007" when
all ranks' files are on disk. Renaming is one act of the file system: it happens or it does not.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import hashlib
import io
import os
import pickle
import shutil
import time
import warnings
from collections import OrderedDict, defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from harness.engine.rectangles import Cut
from harness.engine.safe_reader import METADATA, SUMS, Damaged, Folder, Unsafe, complete, newest
from harness.engine.waiting import name_some


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
    return _begin(engine, folder, keep, extra, engine.group, in_background=False)()


def async_save(engine, folder, keep: int | None = 3, **extra) -> concurrent.futures.Future:
    """As `save`, but training goes on as soon as this rank's part is copied. The future's result is a `Saved`.

    The copy is in host memory, as large as what the rank writes. A later `save` or `load` waits for the future. Ask for
    `result()` before the process group is destroyed. The first call makes a gloo group, for the files' own collectives:
    in the background they must not mix with training's.
    """
    _wait_for_last(engine)
    if "background" not in vars(engine):
        ranks = dist.get_process_group_ranks(engine.group or dist.group.WORLD)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
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
    path = _together(lambda: newest(folder) if engine.rank == 0 else None, engine.group)[0]
    groups = _names_of_groups(engine)
    source = _on_all(lambda: Folder(path, engine.rank, engine.world_size), engine.group)
    return _install(engine, *_on_all(lambda: _read(engine, source, groups), engine.group))


# What is saved.


def _begin(engine, folder, keep, extra, group, in_background: bool):
    """Everything that needs the engine. Returns the rest as a function: it may run while training goes on."""
    _wait_for_last(engine)
    began = time.perf_counter()
    state = _on_all(lambda: _state(engine, extra, in_background), engine.group)
    state["optim"]["param_groups"] = _groups(engine)
    path = _together(lambda: _new_folder(folder, keep) if engine.rank == 0 else None, engine.group)[0]
    rank, ready = engine.rank, time.perf_counter()

    def write() -> Saved:
        nbytes = _write(state, path, keep, rank, group)
        ended = time.perf_counter()
        return Saved(path.with_suffix(""), rank, nbytes, ended - began, (ready if in_background else ended) - began)

    return write


def _state(engine, extra: dict, copied: bool) -> dict:
    """What this rank writes, laid out as torch lays it out; with `copied`, in host memory of its own."""
    own = (lambda tensor: tensor.detach().to("cpu", copy=True)) if copied else torch.Tensor.detach
    model, optim = {}, {}
    keys, cuts = _keys(engine), {}  # cuts: id of a parameter -> its `Cut`; None if this rank has nothing of it
    with torch.no_grad():
        for bucket in engine.buckets:
            cuts.update(dict.fromkeys(map(id, bucket.params)))
            for index, part in bucket.cut(bucket.shard):
                cuts[id(bucket.params[index])] = Cut.of(own(part), bucket.shapes[index], _first(bucket, index))
            for param in bucket.params:
                if param.numel() == 0:
                    cuts[id(param)] = torch.empty(param.shape, dtype=bucket.shard.dtype)
        for key, value in keys.items():
            if id(value) in cuts:
                model[key] = cuts[id(value)]  # tied parameters go under all of their names
            else:
                model[key] = own(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, piece, shape, first in _pieces(engine):
            for key, value in engine.optimizer.state.get(piece, {}).items():
                if isinstance(value, torch.Tensor):
                    value = Cut.of(own(value), shape, first) if _elementwise(value, piece) else own(value)
                optim.setdefault(name, {})[key] = value
    extra = copy.deepcopy(extra)
    _must_be_plain(extra)
    about = {"optimizer": type(engine.optimizer).__name__, "stage": type(engine).__name__, "ranks": engine.world_size}
    model = {key: value for key, value in model.items() if value is not None}
    return {"model": model, "optim": {"state": optim}, "zero": about, "extra": {str(engine.rank): [extra]}}


def _keys(engine) -> dict:
    """{name: tensor or value} of the model's `state_dict()`. A freed parameter is not touched."""
    state = engine.model.state_dict(keep_vars=True)
    return {plain_name(key): value for key, value in state.items()}


def plain_name(key: str) -> str:
    """A name without what torch.compile and activation checkpointing put into it: that is how torch saves it."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _first(bucket, index: int) -> int:
    """Which element of parameter `index` is the first in this rank's shard."""
    return max(0, bucket.start - bucket.offsets[index])


def _pieces(engine):
    """(name, piece, shape of the parameter, first element) of what this rank's optimizer has."""
    for bucket in engine.trained:
        for index, piece in bucket.pieces:
            yield plain_name(bucket.names[index]), piece, bucket.shapes[index], _first(bucket, index)


def _elementwise(value, piece: torch.Tensor) -> bool:
    """Whether a value of the optimizer has a number for each element, as moments have, and a step counter has not."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == piece.shape


def _names_of_groups(engine) -> list[list[str]]:
    """The names in each group of the optimizer. A rank knows those that it has pieces of. A collective."""
    names = {id(piece): name for name, piece, _, _ in _pieces(engine)}
    mine = [[names[id(p)] for p in g["params"] if id(p) in names] for g in engine.optimizer.param_groups]
    everyone = _together(lambda: mine, engine.group)
    order = {plain_name(name): place for place, (name, _) in enumerate(engine.model.named_parameters())}
    return [sorted({n for groups in everyone for n in groups[g]}, key=order.get) for g in range(len(mine))]


def _groups(engine) -> list[dict]:
    options = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    return [{**copy.deepcopy(o), "params": names} for o, names in zip(options, _names_of_groups(engine))]


def _must_be_plain(extra: dict) -> None:
    stream = io.BytesIO()
    torch.save(extra, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name_some(list(extra))}: a checkpoint takes tensors, numbers, strings, and lists and dictionaries of "
            f"them, which can be read without running code. {str(error).splitlines()[0]}"
        ) from None


# How it is written.


class _Files(FileSystem):
    """torch's access to files, which also takes the SHA-256 of what it writes: `written` {name: (digest, bytes)}."""

    def __init__(self):
        self.written = {}

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as stream:
            yield (stream := _Hashed(stream))
        self.written[Path(path).name.removesuffix(".tmp")] = stream.digest.hexdigest(), stream.nbytes


class _Hashed:
    """A file that is written from its beginning to its end."""

    def __init__(self, stream):
        self.stream, self.digest, self.nbytes = stream, hashlib.sha256(), 0

    def write(self, data) -> int:
        self.digest.update(data)
        self.nbytes += memoryview(data).nbytes
        return self.stream.write(data)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


class _Planner(dcp.DefaultSavePlanner):
    """torch's planner. What all ranks have alike, such as buffers, rank 0 writes; and `extra` stays in one piece."""

    def __init__(self):
        super().__init__(dedup_save_to_lowest_rank=True)

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        rest = {key: value for key, value in state_dict.items() if key != "extra"}
        super().set_up_planner(rest, storage_meta, is_coordinator)
        for rank, (value,) in state_dict["extra"].items():
            self.state_dict[f"extra.{rank}"], self.mappings[f"extra.{rank}"] = value, ("extra", rank)


def _new_folder(folder, keep) -> Path:
    """Rank 0 alone: an empty folder with a new number. What a run that died has left unfinished goes."""
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a number of checkpoints, 1 or more, or None for all, got {keep!r}")
    folder = Path(folder)
    if (folder / METADATA).exists():
        raise ValueError(f"{str(folder)!r} is a checkpoint itself: pass the folder that it is in")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("[0-9]*.partial"):
        shutil.rmtree(left)
    taken = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()]
    path = folder / f"{max(taken, default=0) + 1:06d}.partial"
    path.mkdir()
    return path


def _write(state: dict, path: Path, keep, rank: int, group) -> int:
    """Write this rank's part of the checkpoint, and make it complete together. Returns this rank's bytes."""
    writer = dcp.FileSystemWriter(path)
    writer.fs = _Files()
    try:
        try:
            dcp.save(state, storage_writer=writer, planner=_Planner(), process_group=group)
        except CheckpointException as error:  # the same one on all ranks, with what each has met
            met = "; ".join(f"rank {other}: {found[0]!r}" for other, found in error.failures.items())
            raise RuntimeError(f"no checkpoint {path.stem} ({met}); the earlier ones are as they were") from None
        everyone = _together(lambda: writer.fs.written, group)
        _on_all(lambda: _finish(path, everyone, keep) if rank == 0 else None, group)
    except Exception:
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise
    return sum(nbytes for _, nbytes in writer.fs.written.values())


def _finish(path: Path, everyone: list[dict], keep) -> None:
    """Rank 0 alone, when all files are on disk: the checkpoint gets its name, and old ones go."""
    with open(path / SUMS, "w") as stream:
        for name, (digest, _) in sorted(pair for written in everyone for pair in written.items()):
            stream.write(f"{digest}  {name}\n")
        stream.flush()
        os.fsync(stream.fileno())
    _sync(path)
    path.rename(path.with_suffix(""))
    _sync(path.parent)
    for old in complete(path.parent)[: -keep if keep else 0]:
        with contextlib.suppress(OSError):  # what cannot be deleted stays
            shutil.rmtree(old.rename(old.with_suffix(".partial")))  # first its name, so that half of it is not taken


def _sync(folder: Path) -> None:
    """New names in a folder are on disk as well."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# How it is read.


def _read(engine, source: Folder, groups: list[list[str]]) -> tuple:
    """All values of this rank, in memory of their own: (pairs (place, value), optimizer, values of modules, extra)."""
    names = {path[1]: name for path, name in source.entries.items() if path[0] == "model"}
    keys = _keys(engine)
    missing, unexpected = [key for key in keys if key not in names], [key for key in names if key not in keys]
    if missing or unexpected:
        raise ValueError(
            f"{str(source.path)!r} is of another model: missing {name_some(missing) or 'nothing'}; "
            f"unexpected {name_some(unexpected) or 'nothing'}"
        )
    wanted, places = {}, []
    name_of = {id(value): names[key] for key, value in keys.items()}
    dtypes = {id(param): bucket.shard.dtype for bucket in engine.buckets for param in bucket.params}
    for key, value in keys.items():
        if isinstance(value, torch.Tensor):
            here = tuple(value.shape), dtypes.get(id(value), value.dtype)
            there = tuple(source.size(names[key]) or ()), source.dtype(names[key])
            if here != there:
                raise ValueError(f"{key!r} is {there[1]} of shape {there[0]} in {str(source.path)!r}, {here} here")
        if id(value) not in dtypes:  # a buffer, or what a module keeps besides
            wanted[names[key]] = torch.empty(value.shape, dtype=value.dtype) if torch.is_tensor(value) else None
            places.append((key if wanted[names[key]] is None else value, names[key], None))
    for bucket in engine.buckets:
        for index, part in bucket.cut(bucket.shard):
            values, name = torch.empty(part.shape, dtype=part.dtype), name_of[id(bucket.params[index])]
            wanted[name] = Cut.of(values, bucket.shapes[index], _first(bucket, index))
            places.append((part, name, values))
    options = _options(engine, source, groups)
    state = _optimizer_state(engine, source, options, wanted)
    extra = source.entries.get(("extra", str(engine.rank)), source.entries.get(("extra", "0")))
    if extra is not None:
        wanted[extra] = None
    source.read(wanted)
    values = [(place, wanted[name] if values is None else values) for place, name, values in places]
    state = [(piece, {k: wanted[v] if isinstance(v, str) else v for k, v in own.items()}) for piece, own in state]
    return values, options, state, wanted.get(extra, {})


def _options(engine, source: Folder, groups: list[list[str]]) -> list[dict]:
    """The saved options of each group of the optimizer (learning rate, decay), by the parameters in it."""
    where = f"the optimizer's state in {str(source.path)!r}"
    found = {path: name for path, name in source.entries.items() if path[:2] == ("optim", "param_groups")}
    about = {path: name for path, name in source.entries.items() if path[0] == "zero"}
    if not found:
        raise ValueError(f"{where} is not there, or not laid out as torch's get_optimizer_state_dict does it")
    read = source.read({name: _blank(source, name) for name in (*found.values(), *about.values())})
    kind, own = read.get(about.get(("zero", "optimizer"))), type(engine.optimizer).__name__
    if kind is not None and kind != own:
        raise ValueError(f"{where} is of {kind}, and here is {own}: build the engine with {kind}")
    saved = defaultdict(dict)
    for path, name in found.items():
        saved[path[2]][path[3]] = read[name]
    trained = {name for names in groups for name in names}
    sets = {number: trained.intersection(group.pop("params", ())) for number, group in saved.items()}
    result = []
    for number, (names, group) in enumerate(zip(groups, engine.optimizer.param_groups)):
        same = [other for other, names_there in sets.items() if names_there == set(names)]
        if not same:
            raise ValueError(
                f"{where} has other groups: {name_some(names)} is a group here. Pass the same param_groups as when it "
                "was saved"
            )
        there = saved[number if number in same else same[0]]
        lacking = [key for key in engine.optimizer.defaults if key not in there]
        other = there.get("decoupled_weight_decay", False) != group.get("decoupled_weight_decay", False)
        if kind is None and (lacking or other):  # torch does not save the optimizer's name
            raise ValueError(f"{where} is of another class than {own}: it has {', '.join(sorted(there))}")
        result.append(there)
    return result


def _blank(source: Folder, name: str, shape=None) -> torch.Tensor | None:
    size = source.size(name) if shape is None else shape
    return None if size is None else torch.empty(size, dtype=source.dtype(name))


def _optimizer_state(engine, source: Folder, options: list[dict], wanted: dict) -> list[tuple]:
    """(piece, {key: values, or a name in `wanted`}) for each piece. A parameter without state has none here, too."""
    optimizer, result = engine.optimizer, []
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    keeps = {}  # number of a group -> {key: whether it has a number for each element}
    saved = defaultdict(dict)
    for path, name in source.entries.items():
        if path[:2] == ("optim", "state"):
            saved[path[2]][".".join(map(str, path[3:]))] = name
    for name, piece, shape, first in _pieces(engine):
        number, own = group_of[id(piece)], {}
        if saved[name] and number not in keeps:
            keeps[number] = _what_it_keeps(optimizer, optimizer.param_groups[number], options[number], piece)
        if saved[name] and saved[name].keys() != keeps[number].keys():
            raise ValueError(
                f"the optimizer's state in {str(source.path)!r} has {sorted(saved[name])} for {name!r}, and "
                f"{type(optimizer).__name__} keeps {sorted(keeps[number])}: build the engine with the optimizer that "
                "it was saved with"
            )
        for key, place in saved[name].items():
            if keeps[number][key] and source.size(place) is not None:
                if source.size(place) != shape:
                    raise ValueError(f"{place!r} has shape {tuple(source.size(place))}, the parameter {tuple(shape)}")
                own[key] = _blank(source, place, piece.shape)
                wanted[place] = Cut.of(own[key], shape, first)
            else:
                if (source.size(place) or torch.Size()).numel() > 1:
                    raise ValueError(f"{place!r} has shape {tuple(source.size(place))}: one number was expected")
                wanted[place], own[key] = _blank(source, place), place
        result.append((piece, own))
    return result


def _what_it_keeps(optimizer, group: dict, options: dict, piece: torch.Tensor) -> dict[str, bool]:
    """{key: whether it has a number for each element} of the state that `optimizer` makes, found out on one number."""
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer), state=defaultdict(dict))
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    one = torch.zeros(1, dtype=piece.dtype, device=piece.device, requires_grad=True)
    one.grad = torch.zeros_like(one)
    probe.param_groups = [copy.deepcopy({k: v for k, v in group.items() if k != "params"} | options)]
    probe.param_groups[0]["params"] = [one]
    try:
        type(optimizer).step(probe)  # not `probe.step`, which a schedule may have tied to the real optimizer
        return {key: _elementwise(value, one) for key, value in probe.state[one].items()}
    except Exception:  # Adagrad makes its state when it is built, not in its first step
        return {key: _elementwise(value, piece) for key, value in optimizer.state.get(piece, {}).items()}


def _install(engine, values, options, state, extra) -> dict:
    """All ranks have read all they need: from here on nothing can fail. Returns `extra`."""
    with torch.no_grad():
        for place, value in values:
            if isinstance(place, str):  # a module's `get_extra_state`
                engine.model.get_submodule(place.rpartition(".")[0]).set_extra_state(value)
            else:
                place.copy_(value)
    for group, there in zip(engine.optimizer.param_groups, options):
        group.update(there)
    groups = {id(piece): group for group in engine.optimizer.param_groups for piece in group["params"]}
    for piece, own in state:
        on_device = groups[id(piece)].get("capturable") or groups[id(piece)].get("fused")
        engine.optimizer.state.pop(piece, None)
        for key, value in own.items():
            if isinstance(value, torch.Tensor) and (value.dim() or on_device):
                value = value.to(piece.device)
            engine.optimizer.state[piece][key] = value
    engine._shards_changed()
    return extra


# All ranks go on, or none.


def _together(work, group) -> list:
    """Every rank does `work`, and gets what all ranks' `work` returned. An error of one rank is one on all."""
    result = problem = None
    try:
        result = work()
    except Exception as error:
        problem = error
    everyone = [None] * dist.get_world_size(group)
    said = None if problem is None else (type(problem).__name__, str(problem))
    dist.all_gather_object(everyone, (said, result), group=group)
    if problem is not None:
        raise problem
    for rank, (said, _) in enumerate(everyone):
        if said is not None:
            raise _KINDS.get(said[0], RuntimeError)(f"rank {rank}: {said[1]}")
    return [result for _, result in everyone]


_KINDS = {kind.__name__: kind for kind in (Damaged, Unsafe, ValueError, TypeError, FileNotFoundError, PermissionError)}


def _on_all(work, group):
    """As `_together`, for results that the other ranks have no use for."""
    kept = []
    _together(lambda: kept.append(work()), group)
    return kept[0]


def _wait_for_last(engine) -> None:
    """One save at a time. Its errors are those of the future that the caller has."""
    if "saving" in vars(engine):
        concurrent.futures.wait([engine.saving])


def _warn(future) -> None:
    if future.exception() is not None:  # not everybody asks for the result
        warnings.warn(f"a checkpoint was not saved: {future.exception()}", stacklevel=1)

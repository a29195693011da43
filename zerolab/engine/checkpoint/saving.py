"""The layout of the saved state, and saving in the background while training continues.

The state has DCP's layout for models and optimizers, with two additional entries, `extra` and `zero`:

    model    {name: parameter, buffer or extra state}                        each rank's pieces; all else is rank 0's
    optim    state         {name of a parameter: {key: value}}               each rank's pieces
             param_groups  [{option: value, "params": names of parameters}]  rank 0's
    extra    {rank: the caller's values}                                     each rank's own
    zero     {"optimizer": name of its class, or of several}                 rank 0's

On a CPU `save` copies nothing. From a GPU it copies one tensor at a time. `async_save` first copies this rank's part to
the host, 12Ψ/N bytes with float32 and AdamW. Then training continues, and a thread writes the copy. DCP's own
`async_save` does the same, but copies whole storages.
"""

import concurrent.futures
import dataclasses
import io
import time
import warnings
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from zerolab.engine import tensor_parallel
from zerolab.engine.checkpoint import folders
from zerolab.engine.checkpoint.rectangles import Piece
from zerolab.engine.checks import names_of
from zerolab.engine.groups import first_element
from zerolab.engine.state_dict import own_parts, own_state, plain_name, split_state
from zerolab.engine.together import all_succeed, make_group, on_all_ranks


@dataclasses.dataclass
class Saved:
    """The cost of a save on this rank: bytes written, seconds in all, and the seconds for which training paused."""

    path: Path
    rank: int
    nbytes: int
    seconds: float
    paused: float

    def __str__(self):
        return (
            f"rank {self.rank}: {self.nbytes:,} bytes to {self.path} in {self.seconds:.2f} s; "
            f"training paused for {self.paused:.2f} s"
        )


class Background:
    """A thread that writes. It has its own process group, so that its collectives do not mix with training's."""

    def __init__(self, group):
        self.group = make_group(dist.get_process_group_ranks(group or dist.group.WORLD), [group])
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self.future = None

    def start(self, write):
        self.future = self.thread.submit(write, self.group)
        self.future.add_done_callback(warn_of_failure)
        return self.future


def save(engine, folder, keep=3, **extra):
    """Save model, optimizer and `extra` in a new folder inside `folder`, which all ranks can reach. A collective.

    Returns a `Saved`. The newest `keep` complete checkpoints in `folder` stay (with None, all stay). `extra` has this
    rank's own tensors and plain values. Raises the same error on every rank: ValueError for a value that could not be
    loaded again, and RuntimeError if a rank cannot write. After an error earlier checkpoints are unchanged.
    """
    write = prepare(engine, folder, keep, extra, in_background=False)
    return write(engine.options.all_ranks)


def async_save(engine, folder, keep=3, **extra):
    """Like `save`, but training can continue when this returns. Returns a future, whose result is the `Saved`.

    A later `save` or `load` waits for it. Call `result()` before you destroy the process group.
    """
    write = prepare(engine, folder, keep, extra, in_background=True)
    if engine.saving is None:
        engine.saving = Background(engine.options.all_ranks)
    return engine.saving.start(write)


def prepare(engine, folder, keep, extra, in_background):
    """Do everything that needs the engine. Returns a function of a group, which writes, even during training."""
    began = time.perf_counter()
    refuse_tensor_parallel(engine)
    wait_for_last(engine)
    group = engine.options.all_ranks
    rank = dist.get_rank(group)
    state = all_succeed(lambda: collect(engine, extra, in_background), group)
    path = on_all_ranks(lambda: folders.make_folder(folder, keep) if rank == 0 else None, group)[0]
    ready = time.perf_counter()

    def write(group):
        nbytes = folders.write(state, path, keep, group)
        ended = time.perf_counter()
        paused = (ready if in_background else ended) - began
        return Saved(path.with_suffix(""), rank, nbytes, ended - began, paused)

    return write


def refuse_tensor_parallel(engine):
    params = [param for bucket in engine.all_buckets for param in bucket.params]
    if tensor_parallel.mesh_of(params) is not None:
        raise ValueError(
            "tensor parallelism has split this model, and the ranks of this engine have only one part of it: save "
            "engine.full_state_dict() on one rank instead"
        )


def wait_for_last(engine):
    """Wait for the save in the background. An error of this save is in its future, and is not raised here."""
    if engine.saving is not None:
        concurrent.futures.wait([engine.saving.future])


def warn_of_failure(future):
    if future.exception() is not None:  # the caller may never call `result()`
        warnings.warn(f"a checkpoint was not saved: {future.exception()}", stacklevel=1)


@torch.no_grad()
def collect(engine, extra, copied):
    """The state that this rank writes, in the layout above. With `copied` it is a copy on the host."""

    def take(tensor):
        return tensor.detach().to("cpu", copy=True) if copied else tensor.detach()

    rank = dist.get_rank(engine.options.all_ranks)
    state = {
        "model": collect_model(engine, take, rank),
        "optim": {"state": collect_optimizer_state(engine, take)},
        # In a tuple, because DCP flattens dictionaries, and loses empty ones and keys that are not strings.
        "extra": {str(rank): ({key: copy_plain(f"{key!r}", value) for key, value in extra.items()},)},
    }
    if rank == 0:
        state["optim"]["param_groups"] = collect_options(engine)
        state["zero"] = {"optimizer": names_of(engine.optimizers)}
    return state


def collect_model(engine, take, rank):
    """This rank's piece of each parameter, under each of its names. On rank 0 also the values that are not sharded."""
    mine = {}  # id of a parameter -> this rank's piece
    for bucket in engine.all_buckets:
        for param, piece in own_parts(bucket):
            mine[id(param)] = as_piece(bucket, param, take(piece))
        for param in bucket.params:
            if param.numel() == 0:
                mine[id(param)] = torch.empty(param.shape, dtype=bucket.shard.dtype)
    params, whole, extras = split_state(engine, own_state(engine.model))
    state = {key: mine[id(param)] for key, param in params.items() if id(param) in mine}
    if rank == 0:
        for key, tensor in whole.items():
            if tensor.layout is torch.strided:  # DCP cannot write sparse tensors
                state[key] = take(tensor)
        for key, (_, value) in extras.items():
            state[key] = copy_plain(f"the extra state {key!r}", value)
    return state


def collect_optimizer_state(engine, take):
    """{name of a parameter: {key: value}} for the pieces of this rank that have a state."""
    everything = engine.optimizer.state
    for key in everything:
        if not isinstance(key, torch.Tensor):
            raise ValueError(f"the optimizer state {key!r} belongs to no parameter: keep it in a group's options")
    states = {}
    for bucket in engine.buckets:
        names = dict(zip(bucket.params, bucket.names))
        for param, piece in bucket.pieces.items():
            state = states[plain_name(names[param])] = {}
            for key, value in everything.get(piece, {}).items():
                name = f"{key!r} in the optimizer state of {names[param]!r}"
                if not isinstance(value, torch.Tensor):
                    state[key] = copy_plain(name, value)
                elif value.shape == piece.shape:  # one value per element
                    state[key] = as_piece(bucket, param, take(value))
                elif value.dim() == 0 or bucket.owners is not None:  # whole, as its parameter
                    state[key] = take(value)
                else:
                    raise ValueError(
                        f"{name} has shape {tuple(value.shape)}: a checkpoint can put together only tensors with one "
                        "value per element of the parameter, unless the parameter is whole: pass whole=True"
                    )
    return states


def as_piece(bucket, param, elements):
    index = next(index for index, each in enumerate(bucket.params) if each is param)
    return Piece.of(elements, bucket.shapes[index], first_element(bucket, param))


def collect_options(engine):
    groups = []
    for index, (group, names) in enumerate(zip(engine.optimizer.param_groups, engine.group_names)):
        options = {}
        for key, value in group.items():
            options[key] = names if key == "params" else copy_plain(f"{key!r} of parameter group {index}", value)
        groups.append(options)
    return groups


def copy_plain(name, value):
    """A copy of a value, made in the way that `load` reads it. Raises ValueError if loading would need to run code.

    Numbers of numpy, which many schedules use, become Python numbers.
    """
    value = tree_map_only(numpy.generic, lambda number: number.item(), value)
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # pickling can raise any error
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} cannot be saved: a checkpoint can contain tensors, numbers, strings, and lists, tuples and "
            f"dictionaries of these, which are loaded without running code ({reason})"
        ) from None

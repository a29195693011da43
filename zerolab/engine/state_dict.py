"""Get whole weights out of an engine or into one: for inference, for export, or for any other tool.

`full_state_dict()` gathers bucket by bucket. Its result is what `model.state_dict()` of the plain model returns, on the
CPU and on every rank, which takes 4Ψ bytes there. On the device it needs memory for one bucket. To resume training use
a sharded checkpoint instead (checkpoint/), which gathers nothing and includes the optimizer state.

FSDP2 does this in `torch.distributed.checkpoint.state_dict.get_model_state_dict` with `full_state_dict=True`.
"""

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from zerolab.engine import offload, tensor_parallel
from zerolab.engine.groups import cut, first_element
from zerolab.engine.precision import sendable
from zerolab.engine.together import on_all_ranks


def plain_name(key):
    """A name without the parts that torch.compile and activation checkpointing insert. Torch saves under this name."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def split_state_dict(engine):
    """The model's `state_dict()` in three parts: {name: parameter}, {name: buffer}, {name: (module, extra state)}.

    Extra states are values that modules save besides tensors (`get_extra_state`). Nothing is copied or read.
    """
    sharded = {id(param) for bucket in engine.all_buckets for param in bucket.params}
    modules = {}
    for name, module in engine.model.named_modules(remove_duplicate=False):
        modules[plain_name(f"{name}.").removeprefix(".")] = module
    params, buffers, extras = {}, {}, {}
    for key, value in engine.model.state_dict(keep_vars=True).items():
        owner = plain_name(key).removesuffix("_extra_state")
        if owner in modules:
            extras[key] = modules[owner], value
        elif id(value) in sharded:
            params[key] = value
        else:
            buffers[key] = value
    return params, buffers, extras


@torch.no_grad()
def full_state_dict(engine):
    """Names, shapes, dtypes and values of the whole model's `state_dict()`, on the CPU, on every rank. A collective.

    Buffers, such as BatchNorm's running statistics, may differ between ranks, because each rank has seen different
    data. Rank 0's buffers are returned, and also rank 0's extra states (`get_extra_state()`).
    """
    params, buffers, extras = split_state_dict(engine)
    kinds = {key: (buffer.dtype, tuple(buffer.shape)) for key, buffer in buffers.items()}
    extra = {key: tree_map_only(torch.Tensor, torch.Tensor.cpu, value) for key, (_, value) in extras.items()}
    everyone = on_all_ranks(lambda: (kinds, extra), engine.options.everyone)
    for rank, (other, _) in enumerate(everyone):
        if other != everyone[0][0]:
            raise ValueError(f"the buffers of rank {rank} have different names, shapes or dtypes from rank 0's")
    values = {}  # id of the model's own tensor -> its whole value
    for bucket in engine.all_buckets:
        flat = bucket.gather_exact()
        for index, param in enumerate(bucket.params):
            values[id(param)] = tensor_parallel.gather_whole(param, bucket.place(flat, index)).to("cpu", copy=True)
    for buffer in buffers.values():
        if id(buffer) not in values and buffer.layout is torch.strided:
            whole = buffer.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(sendable(whole), group_src=0, group=engine.options.everyone)
            values[id(buffer)] = whole.cpu()
    state = engine.model.state_dict(keep_vars=True)
    for key, tensor in (params | buffers).items():
        state[key] = values.get(id(tensor), tensor)
    state.update(everyone[0][1])
    return state


@torch.no_grad()
def load_full_state_dict(engine, state):
    """Load what `full_state_dict` returned, at any number of ranks. Every rank passes the whole `state`. A collective.

    Raises KeyError for missing or unexpected names and ValueError for a different shape, on every rank, before anything
    is written.
    """
    on_all_ranks(lambda: check_state(engine, state), engine.options.everyone)
    params, buffers, extras = split_state_dict(engine)
    for key, (module, _) in extras.items():
        module.set_extra_state(state[key])
    for key, buffer in buffers.items():
        buffer.copy_(state[key])
    keys = {id(param): key for key, param in params.items()}
    offload.wait_for_copies(engine.all_buckets[0].flat.device)
    for bucket in engine.all_buckets:
        for param, piece in own_parts(bucket):
            values = tensor_parallel.take_part(param, state[keys[id(param)]]).reshape(-1)
            first = first_element(bucket, param)
            piece.copy_(values[first : first + piece.numel()])
    engine.shards_changed()


def own_parts(bucket):
    """(parameter, this rank's elements of it) for each parameter, trained or frozen, that has any on this rank."""
    return cut(bucket, bucket.shard.detach()).items()


def check_state(engine, state):
    params, buffers, extras = split_state_dict(engine)
    tensors = params | buffers
    missing = [key for key in (*tensors, *extras) if key not in state]
    unexpected = [key for key in state if key not in tensors and key not in extras]
    if missing or unexpected:
        raise KeyError(f"the state does not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]}")
    for key, tensor in tensors.items():
        if tensor.shape != state[key].shape:
            raise ValueError(f"{key!r} has shape {tuple(state[key].shape)} in the state and {tuple(tensor.shape)} here")

"""Read whole weights from an engine, or load them into one: for inference, for export, or for any other tool.

`full_state_dict()` gathers bucket by bucket. Its result is what `model.state_dict()` of the plain model returns, on the
CPU and on every rank, which takes 4Ψ bytes there. On the device it needs memory for one bucket. To resume training,
use a sharded checkpoint instead (checkpoint/), which gathers nothing and includes the optimizer state.

Names are the same here, in checkpoints and in `state_dict=` of a model on meta: the names of `model.named_parameters()`
and `named_buffers()`, without what torch.compile and activation checkpointing insert. Hooks that change a module's
`state_dict()` do not run, because they may return tensors that are neither parameters nor buffers. For example, a hook
may split a fused weight into q, k and v, and these could not be loaded into the shards again.

FSDP2 does this in `torch.distributed.checkpoint.state_dict.get_model_state_dict` with `full_state_dict=True`.
"""

from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from zerolab.engine import offload, tensor_parallel
from zerolab.engine.groups import cut, first_element
from zerolab.engine.precision import sendable
from zerolab.engine.together import all_succeed, on_all_ranks

INSERTED = ("_orig_mod", "_checkpoint_wrapped_module")  # names of attributes of the wrappers


def plain_name(key):
    """A name without the parts that torch.compile and activation checkpointing insert. torch also saves this name."""
    return ".".join(part for part in key.split(".") if part not in INSERTED)


def own_state(model):
    """{name: parameter, buffer, or (module, extra state)}, in the order of `model.state_dict()`. Nothing is copied.

    Extra states are values that modules save besides tensors (`get_extra_state`).
    """
    state = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = plain_name(f"{prefix}.") if prefix else ""
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and key not in module._non_persistent_buffers_set:
                state[prefix + key] = tensor
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state[f"{prefix}_extra_state"] = module, module.get_extra_state()
    return state


def split_state(engine, state):
    """`own_state` in three parts: {name: sharded parameter}, {name: other tensor}, {name: (module, extra state)}."""
    sharded = {id(param) for bucket in engine.all_buckets for param in bucket.params}
    params, whole, extras = {}, {}, {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            extras[key] = value
        elif id(value) in sharded:
            params[key] = value
        else:
            whole[key] = value
    return params, whole, extras


@torch.no_grad()
def full_state_dict(engine):
    """Names, shapes, dtypes and values of the whole model's `state_dict()`, on the CPU, on every rank. A collective.

    Buffers, such as BatchNorm's running statistics, may differ between ranks, because each rank has seen different
    data. Rank 0's buffers are returned, and also rank 0's extra states (`get_extra_state()`).
    """
    own = own_state(engine.model)
    params, buffers, extras = split_state(engine, own)
    kinds = {key: (buffer.dtype, tuple(buffer.shape)) for key, buffer in buffers.items()}
    extra = {key: tree_map_only(torch.Tensor, torch.Tensor.cpu, value) for key, (_, value) in extras.items()}
    found = on_all_ranks(lambda: (kinds, extra), engine.options.all_ranks)
    for rank, (other, _) in enumerate(found):
        if other != found[0][0]:
            raise ValueError(f"the buffers of rank {rank} have different names, shapes or dtypes from rank 0's")
    values = {}  # id of the model's own tensor -> its whole value
    for bucket in engine.all_buckets:
        flat = bucket.gather_exact()
        for index, param in enumerate(bucket.params):
            values[id(param)] = tensor_parallel.gather_whole(param, bucket.place(flat, index)).to("cpu", copy=True)
    for buffer in buffers.values():
        if id(buffer) not in values and buffer.layout is torch.strided:
            whole = buffer.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(sendable(whole), group_src=0, group=engine.options.all_ranks)
            values[id(buffer)] = whole.cpu()
    state = OrderedDict.fromkeys(own)  # in the model's order
    for key, tensor in (params | buffers).items():
        state[key] = values.get(id(tensor), tensor)
    state.update(found[0][1])
    modules = engine.model.named_modules(remove_duplicate=False)
    # As in `model.state_dict()`: modules read it when they load a state, and may convert states of older versions.
    state._metadata = {plain_name(key): {"version": each._version} for key, each in modules}
    return state


@torch.no_grad()
def load_full_state_dict(engine, state):
    """Load what `full_state_dict` returned, on any number of ranks. Every rank passes the whole `state`. A collective.

    Raises TypeError if a rank passes no dictionary, KeyError for missing or unexpected names, and ValueError for a
    different shape, on every rank, before anything is written.
    """
    own = own_state(engine.model)
    state = all_succeed(lambda: check_state(own, state), engine.options.all_ranks)
    params, buffers, extras = split_state(engine, own)
    for key, (module, _) in extras.items():
        module.set_extra_state(state[key])
    for key, buffer in buffers.items():
        buffer.copy_(state[key])
    keys = {id(param): key for key, param in params.items()}
    offload.wait_for_copies(engine.all_buckets)
    for bucket in engine.all_buckets:
        for param, piece in own_parts(bucket):
            values = tensor_parallel.take_part(param, state[keys[id(param)]]).reshape(-1)
            first = first_element(bucket, param)
            piece.copy_(values[first : first + piece.numel()].view(piece.shape))
    engine.shards_changed()


def own_parts(bucket):
    """(parameter, this rank's elements of it) for each parameter, trained or frozen, that has any on this rank."""
    return cut(bucket, bucket.shard.detach()).items()


def check_state(own, state):
    """`state` with plain names. Raises an error if it does not fit the model, whose `own_state` is `own`."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"expected a dictionary {{name: tensor}}, got {type(state).__name__}: every rank must pass the whole "
            "state. If only one rank has it, send it to the others first, for example with dist.broadcast_object_list"
        )
    state = {plain_name(key): value for key, value in state.items()}
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    if missing or unexpected:
        raise KeyError(f"the state does not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]}")
    for key, tensor in own.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if not isinstance(state[key], torch.Tensor):
            raise TypeError(f"{key!r} is {type(state[key]).__name__} in the state, and a tensor is expected")
        if tensor.shape != state[key].shape:
            raise ValueError(f"{key!r} has shape {tuple(state[key].shape)} in the state and {tuple(tensor.shape)} here")
    return state

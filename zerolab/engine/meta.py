"""A model on torch's device `meta`: it has shapes and no memory, and it never exists whole.

    with torch.device("meta"):
        model = Model()                                      # no memory
    engine = ZeRO3Engine(model, torch.optim.AdamW(model.parameters(), fused=True), init_fn=init_fn)

Otherwise every rank must hold the whole model once, 4Ψ bytes, before ZeRO-3 can shard it. Here each unit gets memory on
this rank's device and its values, and is freed before the next unit. So the peak during the build is the shards and two
copies of one unit. The values come from `init_fn(name, tensor)`, which fills a tensor in place, or from `state_dict`.
This is a dictionary of whole tensors, or the folder of a checkpoint, from which rank 0 reads one tensor at a time.
Rank 0's values are broadcast, so only rank 0's values matter. Extra states (`get_extra_state`) are not set.

With FSDP2, `fully_shard` shards a model on `meta`. Then `to_empty` gives the shards memory, and your code fills them.
"""

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from zero1 import broadcast_whole
from zerolab.engine import accelerator
from zerolab.engine.checkpoint import reader
from zerolab.engine.state_dict import own_state, plain_name
from zerolab.engine.together import on_all_ranks


class Source:
    """Where a model on `meta` gets its values from. For other models this class does nothing."""

    def __init__(self, init_fn, state_dict):
        if isinstance(state_dict, Mapping):
            state_dict = {plain_name(name): value for name, value in state_dict.items()}
        self.init_fn = init_fn
        self.state_dict = state_dict  # {name: tensor}, or a folder
        self.folder = None  # the checkpoint, if `state_dict` is a folder
        self.error = None  # the error that `init_fn` raised; `finish` raises it on all ranks

    def check(self, model, options):
        """Raise an error on all ranks if values are missing, are not needed, or do not fit the model."""
        on_all_ranks(lambda: self.check_here(model, options), options.all_ranks)

    def check_here(self, model, options):
        tensors = (*model.named_parameters(), *model.named_buffers())
        on_meta = {plain_name(name): tensor for name, tensor in tensors if tensor.is_meta}
        given = self.init_fn is not None or self.state_dict is not None
        if not on_meta:
            if given:
                raise ValueError(
                    "init_fn and state_dict are for a model on the meta device, and this one has values already: leave "
                    "them out (engine.load_full_state_dict(state) loads weights into any engine)"
                )
            return
        if not given:
            raise ValueError(
                f"{list(on_meta)[:3]} are on the meta device and have no values: pass init_fn=, which is called as "
                "init_fn(name, tensor) and fills the tensor in place, or state_dict=, which contains the values"
            )
        if self.state_dict is None:
            return
        values = self.values(options.all_ranks)
        own = own_state(model)
        unexpected = [name for name in values if name not in own]
        missing = [name for name in on_meta if name not in values and self.init_fn is None]
        if unexpected or any(name in own for name in missing):
            raise KeyError(f"state_dict does not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]}")
        if missing:
            raise KeyError(
                f"{missing[:5]} are on the meta device and are not in state_dict, because these buffers are not "
                "persistent. Pass init_fn= as well, which is called as init_fn(name, tensor) for each of them"
            )
        for name, tensor in on_meta.items():
            if name in values and values[name].shape != tensor.shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(values[name].shape)} in state_dict and {tuple(tensor.shape)} here"
                )

    def values(self, group):
        """{name: tensor}. For the folder of a checkpoint these are tensors on meta, which have only the shapes."""
        if isinstance(self.state_dict, (str, os.PathLike)):
            path = reader.newest(self.state_dict)
            return reader.Folder(path, dist.get_rank(group), dist.get_world_size(group)).model_on_meta()
        return self.state_dict

    def open(self, model, options):
        """At the beginning of step 0: find the device, and open the checkpoint if there is one."""
        self.model, self.options = model, options
        self.device = device_for(model, options.group)
        if isinstance(self.state_dict, (str, os.PathLike)):
            self.folder = reader.Folder(reader.newest(self.state_dict), check=False)

    def fill_parameters(self, named_params):
        """Give memory and values to parameters that are on `meta`. Each parameter stays the same object."""
        for name, param in named_params:
            if param.is_meta:
                data = torch.zeros(param.shape, dtype=param.dtype, device=self.device)
                real = nn.Parameter(data, requires_grad=param.requires_grad)
                # `torch.utils.swap_tensors` is not used, because it rejects parameters with weak references, which an
                # LSTM has. The object, its class and its attributes stay, and only its tensor is exchanged.
                torch._C._swap_tensor_impl(param, real)
                # The parameter's hooks are stored in the object, but autograd looks for them in the tensor.
                param._backward_hooks = param._backward_hooks
                param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
                self.fill(plain_name(name), param.data)

    def fill(self, name, tensor):
        """Fill one tensor. An error is stored until `finish`, because other ranks wait in the next broadcast."""
        if self.error is not None:
            return
        try:
            if self.folder is not None and name in self.folder.model:
                if dist.get_rank(self.options.all_ranks) == 0:
                    tensor.copy_(self.folder.values(self.folder.model[name]))
            elif isinstance(self.state_dict, dict) and name in self.state_dict:
                tensor.copy_(self.state_dict[name])
            else:
                result = self.init_fn(name, tensor)
                if isinstance(result, torch.Tensor) and result.data_ptr() != tensor.data_ptr():
                    raise TypeError(
                        f"init_fn returned a new tensor for {name!r}: it must fill its argument in place, for example "
                        "with tensor.normal_()"
                    )
        except Exception as error:
            self.error = error

    def finish(self):
        """The end of step 0: buffers get memory and values too. Raises an error of `init_fn` on all ranks."""
        filled = []
        made = {}  # a buffer may have several names
        for prefix, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    if id(buffer) not in made:
                        made[id(buffer)] = torch.empty_like(buffer, device=self.device)
                        self.fill(plain_name(f"{prefix}.{key}" if prefix else key), made[id(buffer)])
                        filled.append(made[id(buffer)])
                    module._buffers[key] = made[id(buffer)]
        on_all_ranks(self.raise_error, self.options.all_ranks)
        broadcast_whole(filled, self.options.all_ranks)

    def raise_error(self):
        if self.error is not None:
            raise self.error


def device_for(model, group):
    """The device of parameters that are not on `meta`, else this rank's accelerator if the group communicates there."""
    for param in model.parameters():
        if not param.is_meta:
            return param.device
    if accelerator.sends_from_accelerator(group):
        return accelerator.device_of(group)
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default

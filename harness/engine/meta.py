"""A model on `meta` gets its memory a bucket at a time, so that it never exists whole."""

import weakref

import torch
import torch.distributed as dist
from torch import nn

from harness.engine import accelerator, guard, refusals, safe_reader


def device_for(group) -> torch.device:
    """Where a model on `meta` is to live: this rank's GPU, if the group's collectives do; else torch's default."""
    if accelerator.carries(group):
        return accelerator.device_of(group)
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


class Source:
    """Where the values of a model on `meta` come from: `state_dict`, else `init_fn(name, tensor)`.

    `state_dict` is a dictionary, or a checkpoint's folder. Of that rank 0 alone reads one tensor after the other, for
    the values of rank 0 are sent to the others anyway.

    What `init_fn` raises on one rank is kept until `finish`, where all ranks hear of it. Else the others would wait in
    the next collective. The model is then on `meta` again.
    """

    def __init__(self, model: nn.Module, group, init_fn, state_dict):
        self._model, self._group, self._init_fn, self._state = model, group, init_fn, state_dict
        self._problem, self._began, self._folder = None, [], None
        if safe_reader.is_folder(state_dict):
            self._folder = safe_reader.Folder(safe_reader.newest(state_dict), check=False)
            self._state = self._folder.model_on_meta()
        for module in self._recurrent():
            module._flat_weight_refs = []  # what has weak references cannot be exchanged

    def _recurrent(self) -> list[nn.RNNBase]:
        return [module for module in self._model.modules() if isinstance(module, nn.RNNBase)]

    def flatten(self, bucket) -> None:
        """`bucket.flatten()`. Every parameter that is on `meta` gets a device and the memory of one element before it.

        It stays the same object, tied or in a parameter group as it may be. It gets its values in its place.
        """
        on_meta = [(name, param) for name, param in zip(bucket.names, bucket.params) if param.is_meta]
        for _, param in on_meta:
            one = torch.zeros((), dtype=param.dtype, device=device_for(self._group))
            real = nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)
            real.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, real)
        self._began += on_meta
        bucket.flatten()
        self.fill(on_meta)

    def fill(self, named) -> None:
        """The values of (name, tensor) pairs."""
        for name, tensor in named:
            if self._problem is not None:
                return
            try:
                self._fill_one(name, tensor)
            except Exception as error:
                error.add_note(f"while {name!r} was to be filled, {tuple(tensor.shape)} of {tensor.dtype}")
                self._problem = error

    def _fill_one(self, name: str, tensor: torch.Tensor) -> None:
        if self._state is not None and name in self._state:
            if self._folder is None:
                tensor.data.copy_(self._state[name])
            elif dist.get_rank(self._group) == 0:
                tensor.data.copy_(self._folder.of_model(name))
            return
        result = self._init_fn(name, tensor.data)
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            raise TypeError(
                f"init_fn returned a new tensor for {name!r}: it must fill the one that it is given, in place, "
                "for example tensor.normal_() or tensor.copy_(values)"
            )

    def finish(self) -> None:
        """Make the buffers that are on `meta` real, and fill them. Raises on every rank what was raised on one."""
        made, real = [], {}  # real: id of a buffer on `meta` -> what takes its place, under all of its names
        for prefix, module in self._model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    made.append((module, key, buffer))
                    if id(buffer) not in real:
                        real[id(buffer)] = torch.empty_like(buffer, device=device_for(self._group))
                        self.fill([(f"{prefix}.{key}" if prefix else key, real[id(buffer)])])
                    module._buffers[key] = real[id(buffer)]
        try:
            refusals.agree(self._problem, "", self._group, self._model)
        except Exception:
            for module, key, buffer in made:
                module._buffers[key] = buffer
            params = [param for _, param in self._began]
            guard.open(params)
            guard.release(params)
            for param in params:
                torch.utils.swap_tensors(
                    param, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                )
            raise
        for module in self._recurrent():
            module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights]

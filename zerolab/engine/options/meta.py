"""A model on `meta` gets its memory a bucket at a time, so that it never exists whole."""

import os
import weakref

import torch
import torch.distributed as dist
from torch import nn

from zerolab.engine import accelerator
from zerolab.engine.all_or_none import on_all
from zerolab.engine.checkpoint import reader
from zerolab.engine.safety import guard
from zerolab.engine.safety.waiting import name_some, not_alike


def device_for(group) -> torch.device:
    """Where a model on `meta` is to live: this rank's GPU, if the group's collectives do; else torch's default."""
    if accelerator.carries(group):
        return accelerator.device_of(group)
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _is_folder(state) -> bool:
    """Whether `state`, which a user has passed as a model's values, names a checkpoint's folder."""
    return isinstance(state, (str, os.PathLike))


def check_source(model: nn.Module, source, group) -> None:
    """What is wrong with a model on `meta`, or with where its values are to come from."""
    named = [*model.named_parameters(), *model.named_buffers()]
    meta = {name: tensor for name, tensor in named if tensor.is_meta}
    if not meta:
        if source and source != (None, None):
            raise ValueError(
                "init_fn and state_dict are for a model on the meta device, and nothing of this one is: leave them out "
                "(engine.load_full_state_dict(state) loads weights into any engine)"
            )
        return None
    if source is None:
        raise ValueError(
            f"{name_some(list(meta))} on the meta device, without values: this stage holds all parameters whole, so "
            "materialise the model first (model.to_empty(device=...), then initialise it), or shard it by "
            "ZeRO3(model, ..., init_fn=...)"
        )
    init_fn, state = source
    if init_fn is None and state is None:
        raise ValueError(
            f"{name_some(list(meta))} on the meta device, without values: pass init_fn=, called as"
            " init_fn(name, tensor), to fill each parameter and buffer in place, or state_dict=, which has their values"
        )
    if state is None:
        return None
    if _is_folder(state):
        path = reader.newest(state)
        state = reader.Folder(path, dist.get_rank(group), dist.get_world_size(group)).model_on_meta()
    own = model.state_dict(keep_vars=True)
    missing = [name for name in meta if name not in state] if init_fn is None else []
    unexpected = [name for name in state if name not in own]
    if missing or unexpected:
        raise KeyError(
            f"the state_dict does not fit the model: {not_alike(missing, unexpected)} (it may leave out buffers, "
            "which init_fn= fills)"
        )
    for name, tensor in meta.items():
        if name in state and state[name].shape != tensor.shape:
            raise ValueError(f"{name!r} has shape {tuple(state[name].shape)} in state_dict, {tuple(tensor.shape)} here")


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
        if _is_folder(state_dict):
            self._folder = reader.Folder(reader.newest(state_dict), check=False)
            self._state = self._folder.model_on_meta()
        for module in self._recurrent():
            module._flat_weight_refs = []  # what has weak references cannot be exchanged

    def _recurrent(self) -> list[nn.RNNBase]:
        return [module for module in self._model.modules() if isinstance(module, nn.RNNBase)]

    def begin(self, names, params) -> list:
        """Every parameter that is on `meta` gets a device and the memory of one element. Returns (name, parameter).

        It stays the same object, tied or in a parameter group as it may be. It gets its values in its place.
        """
        on_meta = [(name, param) for name, param in zip(names, params) if param.is_meta]
        for _, param in on_meta:
            one = torch.zeros((), dtype=param.dtype, device=device_for(self._group))
            real = nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)
            real.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, real)
        self._began += on_meta
        return on_meta

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
                tensor.data.copy_(self._folder.values(self._folder.model[name]))
            return
        result = self._init_fn(name, tensor.data)
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            raise TypeError(
                f"init_fn returned a new tensor for {name!r}: it must fill the one that it is given, in place, "
                "for example tensor.normal_() or tensor.copy_(values)"
            )

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

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
            on_all(self._raise_problem, self._group, "all ranks to fill the model")
        except Exception:
            for module, key, buffer in made:
                module._buffers[key] = buffer
            params = [param for _, param in self._began]
            guard.release(params)
            for param in params:
                torch.utils.swap_tensors(
                    param, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                )
            raise
        for module in self._recurrent():
            module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights]

"""A model on `meta` gets its memory a bucket at a time, so that it never exists whole."""

import torch
import torch.distributed as dist
from torch import nn


def device_for(group) -> torch.device:
    """Where a model on `meta` is to live: this rank's GPU under NCCL, else torch's default device."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def parameters(bucket, group) -> list[tuple[str, nn.Parameter]]:
    """Give every parameter of `bucket` that is on `meta` a device and the memory of one element.

    It stays the same object, tied or in a parameter group as it may be. Returns (name, parameter) of those,
    for `fill`, once `bucket.flatten()` has given them their place.
    """
    on_meta = [(name, param) for name, param in zip(bucket.names, bucket.params) if param.is_meta]
    for _, param in on_meta:
        one = torch.zeros((), dtype=param.dtype, device=device_for(group))
        real = nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)
        real.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, real)
    return on_meta


def fill(named, init_fn, state) -> None:
    """The values of (name, tensor) pairs: from `state` where it has the name, else by `init_fn(name, tensor)`."""
    for name, tensor in named:
        if state is not None and name in state:
            tensor.data.copy_(state[name])
            continue
        try:
            result = init_fn(name, tensor.data)
        except Exception as error:
            error.add_note(f"while init_fn was to fill {name!r}, {tuple(tensor.shape)} of {tensor.dtype}")
            raise
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            raise TypeError(
                f"init_fn returned a new tensor for {name!r}: it must fill the one that it is given, in place, "
                "for example tensor.normal_() or tensor.copy_(values)"
            )


def buffers(model: nn.Module, group, init_fn, state) -> None:
    """Make the buffers that are on `meta` real, and fill them."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                real = torch.empty_like(buffer, device=device_for(group))
                fill([(f"{prefix}.{key}" if prefix else key, real)], init_fn, state)
                module._buffers[key] = real

"""This machine's accelerator, for any build of torch: CUDA, AMD's ROCm (torch calls it cuda), XPU and others.

The code uses `torch.accelerator`, and `torch.get_device_module(device)` for the functions that it does not have.
"""

import torch
import torch.distributed as dist


def kind() -> str:
    """torch's name for the accelerator, for example "cuda" or "xpu", or "cpu" if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def count() -> int:
    """The number of accelerators of this machine, which may be 0."""
    return torch.accelerator.device_count()


def sends_from_accelerator(group=None) -> bool:
    """Whether the group's collectives work on tensors on the accelerator, and not only in host memory ("cpu:gloo")."""
    if kind() == "cpu":
        return False
    backends = dist.get_backend_config(group)  # also if `init_process_group()` was called without a backend
    return any(part.rpartition(":")[2] not in ("gloo", "fake") for part in backends.split(","))


def device_of(group=None) -> torch.device:
    """The device of this rank's tensors for the group's collectives: the CPU, or this rank's accelerator."""
    if not sends_from_accelerator(group):
        return torch.device("cpu")
    return torch.device(kind(), torch.accelerator.current_device_index())

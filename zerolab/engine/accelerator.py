"""This machine's accelerator, whatever torch was built for: CUDA, AMD's ROCm (torch calls it cuda), XPU and others.

One path for all: `torch.accelerator`, and `torch.get_device_module(device)` for what a kind has besides.
"""

import torch
import torch.distributed as dist


def kind() -> str:
    """What torch calls it, "cuda" or "xpu" for example; "cpu" where it sees none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def count() -> int:
    """How many there are: 0 without one."""
    return torch.accelerator.device_count()


def carries(group=None) -> bool:
    """Whether the group's collectives take tensors on the accelerator, and not in the host's memory ("cpu:gloo")."""
    return any(part.rpartition(":")[2] not in ("gloo", "fake") for part in dist.get_backend(group).split(","))


def device_of(group=None) -> torch.device:
    """Where this rank's tensors for the group's collectives must be: the CPU, or this rank's accelerator."""
    if not carries(group):
        return torch.device("cpu")
    return torch.device(kind(), torch.accelerator.current_device_index())

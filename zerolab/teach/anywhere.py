"""The check at the start of each notebook. Its first cell finds the project, or clones it."""

import os

import torch

NEEDED = (2, 11)  # torch


def ready(device: str | None = None) -> str:
    """The device for the runs of a notebook: "cpu", or the accelerator, "cuda" for example. Prints what was found.

    The default is ZERO_NOTEBOOK_DEVICE, or "cpu", which works everywhere. Raises RuntimeError for a torch that is too
    old, and for a device that does not exist here.
    """
    device = device or os.environ.get("ZERO_NOTEBOOK_DEVICE", "cpu")
    if os.name == "nt":
        raise RuntimeError("the notebooks start bash: open them in WSL, not in Windows itself")
    version = torch.__version__.split("+")[0]
    if tuple(int(part) for part in version.split(".")[:2]) < NEEDED:
        needed = ".".join(map(str, NEEDED))
        raise RuntimeError(
            f"torch {version} is installed, and {needed} or newer is needed: run `%pip install -U 'torch>={needed}'` "
            "in a cell above, then restart the kernel"
        )
    from zerolab.engine import accelerator
    from zerolab.run import process_group

    possible = ["cpu", accelerator.kind()] if process_group.count_gpus() else ["cpu"]
    if device not in possible:
        raise RuntimeError(f"the device {device!r} was chosen, and here are only: {', '.join(possible)}")
    print(f"torch {version}, devices: {', '.join(possible)}. The runs use: {device}")
    return device

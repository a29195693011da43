"""The check at the start of each notebook. Its first cell finds the project, or clones it."""

import os

NEEDED = (2, 11)  # torch


def ready(device: str | None = None) -> str:
    """The device for the runs of a notebook: "cpu", or the accelerator, "cuda" for example. Prints what was found.

    The default is ZERO_NOTEBOOK_DEVICE, or "cpu", which works everywhere. Raises RuntimeError for a torch that is too
    old, and for a package or a device that does not exist here.
    """
    device = device or os.environ.get("ZERO_NOTEBOOK_DEVICE", "cpu")
    if os.name == "nt":
        raise RuntimeError("the notebooks start bash: open them in WSL, not in Windows itself")
    try:
        import matplotlib  # noqa: F401
        import torch
    except ImportError as error:
        raise RuntimeError(f"{error.name} is not installed: run `%pip install {error.name}` in a cell above") from error
    version = torch.__version__.split("+")[0]
    if tuple(int(part) for part in version.split(".")[:2]) < NEEDED:
        needed = ".".join(map(str, NEEDED))
        raise RuntimeError(
            f"torch {version} is installed, and {needed} or newer is needed: run `%pip install -U 'torch>={needed}'` "
            "in a cell above, then restart the kernel"
        )
    from zerolab.engine import accelerator
    from zerolab.run import process_group

    gpus = process_group.count_gpus()
    kind = accelerator.kind() if gpus else "cuda"
    if device not in ("cpu", kind):
        raise RuntimeError(f'the device must be "cpu" or "{kind}", got {device!r}')
    if device == kind and not gpus:
        raise RuntimeError(f'"{kind}" was chosen, and torch sees no GPU here: choose "cpu"')
    there = f"{gpus} x {torch.get_device_module(kind).get_device_name(0)}" if gpus else "no GPU"
    choice = f' (for the GPU: anywhere.ready("{kind}"))' if gpus and device == "cpu" else ""
    print(f"torch {version}, {os.cpu_count()} CPU cores, {there}. The runs use: {device}{choice}")
    return device

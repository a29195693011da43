"""A GPU that is not there: a device for fake tensors, so that a dry run can tell the device's bytes from the host's.

Fake tensors have a device's name and no memory. Of "cuda" torch wants more than the name as soon as backward runs: a
thread and a stream for each device, which without CUDA do not exist. So this registers an accelerator of its own, in
Python. It computes nothing. Its streams and events do nothing, as nobody has work to wait for.
"""

import torch
from torch.utils import backend_registration

NAME = "fake_gpu"


def nothing(*args, **kwargs) -> None:
    """What there is to do on a device that computes nothing."""


class Stream(torch.Stream):
    """A queue in which nothing ever waits."""

    def __new__(cls, *args, **kwargs):
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)  # torch's word for an accelerator from outside
        return super().__new__(cls, stream_id=0, device_index=0, device_type=kind)

    __init__ = nothing

    def __enter__(self):
        return self

    __exit__ = nothing

    def record_event(self, event=None):
        return event or Event()

    wait_stream = wait_event = synchronize = nothing


class Event:
    """A signal that has always been given."""

    __init__ = nothing

    record = wait = synchronize = nothing


class FakeGPU(backend_registration._DummyBackendModule):
    """What `torch.get_device_module("fake_gpu")` returns: of `torch.cuda` as much as the engines and FSDP2 ask for."""

    Stream, Event = Stream, Event

    synchronize = nothing

    def is_available(self) -> bool:
        """No: nothing runs on it. So weights lie as on a CPU, and a row with offload is like one without."""
        return False

    def current_stream(self, device=None) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Stream:
        return stream


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """The fused operator that a CPU takes, which like a GPU's never keeps the seq x seq scores.

    For an unknown device torch would take the operations one by one, and these keep them.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


_kernels = []  # they live as long as this


def register() -> torch.device:
    """The device, registered at the first call. That must come before the first backward of the process.

    Then autograd starts its threads, one per device. Nor can a registered device go again, and torch may take it for
    the accelerator to use by default: so give it a process of its own.
    """
    if not _kernels:
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=FakeGPU())
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
        library.impl("record_stream", lambda tensor, stream: None, "Meta")
        _kernels.append(library)
    return torch.device(NAME, 0)


def require() -> None:
    """Raises ValueError where torch has no such door: it is experimental there (from 2.11 to 2.15 it is open)."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        raise ValueError(
            f"--offload wants an accelerator registered from Python, which torch {torch.__version__} cannot: "
            "use torch 2.11 to 2.15, or --device cuda"
        )

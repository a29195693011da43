"""The memory ledger: which bytes are alive, now and at the worst moment.

Memory means live storages: whole ones, each counted once, whoever keeps it alive (a variable, the model, or
autograd for backward). On CUDA use the allocator's own peak, which sees temporaries of kernels as well.
"""

import time
import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zerolab.measure.held import engine_tensors, storage_under, tensor_leaves


class MemoryLedger(TorchDispatchMode):
    """`with MemoryLedger() as memory:` around building an engine and its steps; read `live` and `peak` (bytes).

    It sees every operation's results, so it must be open when the storages are made. Or
    `with MemoryLedger(engine) as memory: engine.training_step(...)`, which starts from what can be reached of an
    engine (anything with `model` and `optimizer`); `track` adds other tensors. Resizing a storage, which is
    no operation, is watched as well.
    """

    reserved = 0  # that is known of an allocator alone

    def __init__(self, engine=None):
        super().__init__()
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}  # a storage's address -> its bytes
        self._references: dict[int, weakref.ref] = {}
        for tensor in [] if engine is None else engine_tensors(engine):
            self.track(tensor)

    def begin(self, engine=None) -> None:
        """A step of `engine` begins."""
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget earlier peaks: from now on `peak` is the most since this call."""
        self.peak = self.live

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage under `tensor`, if it is not counted yet."""
        with torch._C.DisableTorchFunctionSubclass():
            tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own part
            if tensor.is_meta and type(tensor) is torch.Tensor or tensor.layout != torch.strided:
                return
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            self._born(key)
            # torch keeps one Python object per storage for as long as C++ keeps the storage, so
            # this reference dies with the memory and not with the variable.
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))
        self._set(key, storage.nbytes())

    def key(self, tensor: torch.Tensor) -> int:
        """What the ledger knows the storage under `tensor` by."""
        return storage_under(tensor)._cdata

    def _born(self, key: int) -> None:
        """For ledgers that tell storages apart."""

    def _set(self, key: int, nbytes: int) -> None:
        self.live += nbytes - self._bytes[key]
        self._bytes[key] = nbytes
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self._references.pop(key, None)
        self.live -= self._bytes.pop(key, 0)

    def _out_of_memory(self) -> None:
        """For ledgers that know what is alive: an operation, or a storage that grows, has found no memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            result = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self._out_of_memory()
            raise
        for tensor in tensor_leaves(result):
            self.track(tensor)
        return result

    def __enter__(self):
        plain = self._plain_resize = torch.UntypedStorage.resize_

        def resize_(storage, size):
            try:
                plain(storage, size)
            except torch.OutOfMemoryError:
                self._out_of_memory()
                raise
            if storage._cdata in self._bytes:
                self._set(storage._cdata, storage.nbytes())
            return storage

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._plain_resize
        return super().__exit__(*exception)


def let_go(device: torch.device) -> None:
    """Have torch give back what earlier engines have sent, before the allocator is asked for its bytes. A collective.

    Over NCCL it keeps the tensors of a collective that only C++ has waited for (DDP's buckets) until a thread that
    looks ten times a second has seen it end, and the group's next collective begins.
    """
    if device.type != "cpu" and dist.get_backend() != "gloo":
        torch.accelerator.synchronize(device)
        time.sleep(0.2)
        dist.barrier()


def warm_up(device: torch.device) -> None:
    """Have CUDA's libraries allocate what they keep for good, before anything is counted; synchronises.

    cuBLAS takes a workspace of some 32 MB from the caching allocator in its first product, and another one in the
    thread in which backward runs. It is no engine's, and would be counted as the first engine's.
    """
    weight = torch.ones(16, 16, device=device, requires_grad=True)
    bias = torch.ones(16, device=device, requires_grad=True)
    torch.nn.functional.linear(torch.ones(16, 16, device=device), weight, bias).sum().backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Python imports this before everything else if this folder is in PYTHONPATH. Then this process simulates GPUs.

If a library of the same name is loaded already, the loader uses it for torch. So ours are loaded before torch is
imported. LD_LIBRARY_PATH would not work, because torch's libraries have their own path, which comes first.
"""

import ctypes
import os
from importlib.machinery import SourceFileLoader

FOLDER = os.environ["SIMULATED_GPU_LIBRARIES"]
for name in ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2"):
    ctypes.CDLL(os.path.join(FOLDER, name), mode=ctypes.RTLD_GLOBAL)


def exec_module(self, module, execute=SourceFileLoader.exec_module):
    """Run a module's file as usual. After torch's file, register the kernels."""
    execute(self, module)
    if module.__name__ == "torch":
        library = ctypes.CDLL(os.path.join(FOLDER, "libkernels.so"))
        library.simulated_kernels()
        module.cuda._lazy_call(library.simulated_allocator)
        library.simulated_sleep.restype = None
        module.cuda._sleep = lambda cycles: library.simulated_sleep()


SourceFileLoader.exec_module = exec_module

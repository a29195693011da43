"""Python imports this first of all, where this folder is in PYTHONPATH: GPUs are simulated in this process.

The loader takes a library that is loaded already for one of the same name that torch asks for. So ours are loaded
before torch is imported. (LD_LIBRARY_PATH would not do: torch's libraries have a path of their own, which comes first.)
"""

import ctypes
import os
import sys
from importlib.machinery import PathFinder

FOLDER = os.environ["SIMULATED_GPU_LIBRARIES"]
for name in ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2"):
    ctypes.CDLL(os.path.join(FOLDER, name), mode=ctypes.RTLD_GLOBAL)


class AfterTorch:
    """Finds `torch` as ever, and puts the kernels in when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            library = ctypes.CDLL(os.path.join(FOLDER, "libkernels.so"))
            library.simulated_kernels()
            module.cuda._lazy_call(library.simulated_allocator)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterTorch())

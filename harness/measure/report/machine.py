"""Part 1: what this machine is, as JSON. Whatever cannot be found out is left out, and stops nothing.

Run it: python -m harness.measure.report.machine FILE
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

SMI = ("index", "name", "driver_version", "memory.total", "memory.used", "utilization.gpu", "power.limit",
       "clocks.max.sm", "pcie.link.gen.max", "pcie.link.width.max", "mig.mode.current", "ecc.mode.current")  # fmt: skip
PACKAGES = ("numpy", "matplotlib", "pytest", "pytest-xdist")
PREFIXES = ("NCCL_", "CUDA_", "TORCH_NCCL_", "PYTORCH_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW_TF32")


def said(*command: str, seconds: float = 15) -> str:
    """What a command prints; nothing where there is no such command, or it fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def host() -> dict:
    """The processor, its memory, and the software beside torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"processor": processor(), "cores": cores, "system": f"{platform.system()} {platform.release()}",
             "python": platform.python_version()}  # fmt: skip
    with contextlib.suppress(OSError, ValueError):
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["commit"] = said("git", "rev-parse", "--short=12", "HEAD")
    found["changed_files"] = len(said("git", "status", "--porcelain", "--untracked-files=no").splitlines())
    found["environment"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return found


def driver() -> dict:
    """What nvidia-smi says of the GPUs, of the links between them, and of who else uses them."""
    rows = said("nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader").splitlines()
    gpus = [dict(zip(SMI, (cell.strip() for cell in row.split(",")))) for row in rows if row.count(",") == len(SMI) - 1]
    busy = said("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader").splitlines()
    topology = said("nvidia-smi", "topo", "-m") if rows else ""
    return {"nvidia_smi": gpus, "other_processes": len(busy), "topology": topology}


def torch_and_gpus() -> dict:
    """torch's version, and the GPUs as torch sees them."""
    import torch
    import torch.distributed as dist

    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    found["gloo"], found["nccl"] = dist.is_gloo_available(), None
    found["parallel"] = f"{torch.get_num_threads()} thread(s)"
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(Exception):
            found["cudnn"] = torch.backends.cudnn.version()
        count = torch.cuda.device_count()
        for number in range(count):
            about = torch.cuda.get_device_properties(number)
            gpu = {
                "name": about.name,
                "memory_bytes": about.total_memory,
                "multiprocessors": about.multi_processor_count,
            }
            peers = [other for other in range(count) if other != number and _peer(torch, number, other)]
            found["gpus"].append({**gpu, "capability": f"{about.major}.{about.minor}", "reaches": peers})
        # In use before this report has taken anything: by somebody else.
        free, total = torch.cuda.mem_get_info(0)
        found["free_bytes_of_gpu_0"], found["bf16"] = free, torch.cuda.is_bf16_supported()
        found["tf32"] = {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32}
    return found


def _peer(torch, number: int, other: int) -> bool:
    with contextlib.suppress(Exception):
        return torch.cuda.can_device_access_peer(number, other)
    return False


def describe() -> dict:
    found = {"gpus": [], "torch": None}
    for ask in (host, driver, torch_and_gpus):
        try:
            found |= ask()
        except Exception as error:  # a broken driver or torch is a finding as well
            found[f"{ask.__name__}_failed"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        json.dump(describe(), file, indent=1)

"""What this machine is, in words and as JSON. Whatever cannot be found out is left out, and stops nothing.

Run it: python -m harness.measure.report.machine --json FILE
"""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

SMI = ("index,name,driver_version,memory.total,memory.used,utilization.gpu,power.limit,clocks.max.sm,"
       "pcie.link.gen.max,pcie.link.width.max,mig.mode.current,ecc.mode.current")  # fmt: skip
PREFIXES = ("NCCL_", "CUDA_", "TORCH_NCCL_", "PYTORCH_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW_TF32")


def said(*command: str) -> str:
    """What a command prints; nothing where there is no such command, or it fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def host() -> dict:
    """The processor, its memory, and the software beside torch."""
    found = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        found["processor"] = (names or [found["processor"]])[0]
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["system"] = f"{platform.system()} {platform.release()}"
    found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for package in ("numpy", "matplotlib", "pytest"):
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
    busy = said("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader").splitlines()
    return {"nvidia_smi": said("nvidia-smi", f"--query-gpu={SMI}", "--format=csv"),
            "topology": said("nvidia-smi", "topo", "-m"), "other_processes": len(busy)}  # fmt: skip


def torch_and_gpus() -> dict:
    """torch's version, and the GPUs as torch sees them."""
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cudnn"] = torch.backends.cudnn.version()
        found["bf16"] = torch.cuda.is_bf16_supported()
        found["free_bytes_of_gpu_0"] = torch.cuda.mem_get_info(0)[0]  # others may be using it
        count = range(torch.cuda.device_count())
        for number, about in enumerate(map(torch.cuda.get_device_properties, count)):
            reaches = [other for other in count if other != number and torch.cuda.can_device_access_peer(number, other)]
            found.setdefault("gpus", []).append(
                {"name": about.name, "memory_bytes": about.total_memory, "capability": f"{about.major}.{about.minor}",
                 "multiprocessors": about.multi_processor_count, "reaches": reaches})  # fmt: skip
    return found


def describe() -> dict:
    found = {"gpus": [], "torch": None}
    for ask in (host, driver, torch_and_gpus):
        try:
            found |= ask()
        except Exception as error:  # a broken driver or torch is a finding as well
            found[f"{ask.__name__}_failed"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    known = describe()
    for name, value in known.items():
        for line in value if isinstance(value, list) else [value]:
            print(f"{name.replace('_', ' ')}: {line}")
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump(known, file, indent=1)

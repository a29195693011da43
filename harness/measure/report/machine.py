"""What this machine is, in words and as JSON. Whatever cannot be found out is left out, and stops nothing.

Run it: python -m harness.measure.report.machine --json FILE
"""

import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

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


def host(found: dict) -> None:
    """The processor, its memory, the software beside torch, and what the driver says of GPUs, links and other users."""
    about = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", about.read_text() if about.exists() else "", re.MULTILINE)
    found["processor"] = names[0] if names else platform.processor() or platform.machine()
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found["system"], found["python"] = f"{platform.system()} {platform.release()}", platform.python_version()
    installed = {package.name.lower(): package.version for package in distributions()}
    found |= {package: installed.get(package) for package in ("numpy", "matplotlib", "pytest")}
    found["commit"] = said("git", "rev-parse", "--short=12", "HEAD")
    found["changed_files"] = len(said("git", "status", "--porcelain", "--untracked-files=no").splitlines())
    found["environment"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    found["nvidia_smi"] = said("nvidia-smi", f"--query-gpu={SMI}", "--format=csv")
    found["topology"] = said("nvidia-smi", "topo", "-m")
    busy = said("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader")
    found["other_processes"] = len(busy.splitlines())


def torch_and_gpus(found: dict) -> None:
    """torch's version, and the GPUs as torch sees them."""
    import torch

    from harness.engine import accelerator

    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    for number in range(accelerator.count()):
        about = torch.get_device_module(accelerator.kind()).get_device_properties(number)
        found["gpus"].append({"name": about.name, "memory_bytes": about.total_memory})
        if torch.version.cuda:
            found["gpus"][-1] |= {"capability": f"{about.major}.{about.minor}",
                                  "multiprocessors": about.multi_processor_count}  # fmt: skip
    found["accelerator"], found["backend"] = accelerator.kind(), accelerator.backend()
    if found["gpus"] and torch.version.cuda:  # of other kinds these are not known
        found["bf16"], found["cudnn"] = torch.cuda.is_bf16_supported(), torch.backends.cudnn.version()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))


if __name__ == "__main__":
    known = {"gpus": [], "torch": None}
    for ask in (host, torch_and_gpus):
        try:
            ask(known)
        except Exception as error:  # a broken driver or torch is a finding as well
            known[f"{ask.__name__}_failed"] = f"{type(error).__name__}: {error}"
    for name, value in known.items():
        for line in value if isinstance(value, list) else [value]:
            print(f"{name.replace('_', ' ')}: {line}")
    Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(known, indent=1))

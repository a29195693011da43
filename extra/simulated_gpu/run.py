"""./launch.sh test --simulated-gpus N [pytest arguments]: run the tests with N simulated GPUs."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from extra.simulated_gpu import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main(gpus: str = "", *arguments: str) -> int:
    if not (gpus.isdigit() and 1 <= int(gpus) <= 16):
        build.fail(f"--simulated-gpus must be followed by the number of GPUs, 1 to 16, got {gpus!r}")
    path = [str(HERE / "front"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {  # of this run's processes: in all of them GPUs are simulated
        "SIMULATED_GPUS": gpus,
        "SIMULATED_GPU_LIBRARIES": str(build.libraries()),
        "PYTHONPATH": os.pathsep.join(path),
    }
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        arguments = ("tests/test_cuda.py", "extra/simulated_gpu", *arguments)
    print("+", "python -m pytest", *arguments, flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "extra.simulated_gpu.findings", *arguments]
    with tempfile.TemporaryDirectory() as findings:
        return subprocess.run(command, env={**os.environ, **settings, "SIMULATED_GPU_FINDINGS": findings}).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

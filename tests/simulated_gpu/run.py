"""./launch.sh test --simulated-gpus N [pytest arguments]: the tests on a machine that has N GPUs, on paper."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import build

HERE = Path(__file__).resolve().parent
DEFAULT = ["tests/test_cuda.py", "tests/test_simulated.py"]


def environment(gpus: int, findings: str) -> dict[str, str]:
    """That of a process, and of all that it starts, in which GPUs are simulated."""
    path = [str(HERE / "front"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "SIMULATED_GPUS": str(gpus),
        "SIMULATED_GPU_LIBRARIES": str(build.libraries()),
        "SIMULATED_GPU_FINDINGS": findings,
        "PYTHONPATH": os.pathsep.join(path),
    }


def main(gpus: str = "", *arguments: str) -> int:
    if not (gpus.isdigit() and 1 <= int(gpus) <= 16):
        print(f"launch.sh: --simulated-gpus takes a number of GPUs, 1 to 16, got {gpus!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as findings:
        try:
            env = environment(int(gpus), findings)
        except build.Missing as missing:
            print(f"launch.sh: {missing}", file=sys.stderr)
            return 2
        if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
            arguments = (*DEFAULT, *arguments)
        command = [sys.executable, "-m", "pytest", "-p", "findings", *arguments]
        print("+", "python -m pytest", *arguments, flush=True)
        return subprocess.run(command, env=env).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

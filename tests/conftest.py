"""Common to all tests: where modules are found, GPUs that most tests do not see, and options of tests/conformance."""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent  # zerolab.run.ranks has it too, but cannot be imported yet
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that: tests send it to some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def without_gpus(request):
    """Hide GPUs from most tests, so that a test is the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in ("test_cuda", "test_simulated"):
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module")
def on_gpus():
    """`on_gpus(2, function, **arguments)` calls a function of a module on two ranks with GPUs (gpu_ranks.py)."""
    from gpu_ranks import OnGpus

    ranks = OnGpus()
    yield ranks
    ranks.close()


def pytest_addoption(parser):
    # For tests/conformance. They are here because pytest reads options before it comes to a folder below.
    parser.addoption(
        "--engine", action="append", default=[], metavar="NAME|FILE", help="test this engine (can be repeated)"
    )
    parser.addoption("--ranks", type=int, help="the number of ranks, for tests that support it")
    parser.addoption("--conform-json", metavar="FILE", help="write the outcomes for each --engine to this file")
    parser.addoption("--patience", type=int, metavar="SECONDS", help="seconds that a collective may take (default 60)")

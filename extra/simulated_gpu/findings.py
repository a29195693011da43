"""The detector's findings in this process, and for pytest in all processes that a test has started."""

import ctypes
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ["SIMULATED_GPU_FINDINGS"])
_forgotten = ""


def _findings() -> str:
    file = FOLDER / str(os.getpid())  # which the runtime writes
    return file.read_text() if file.exists() else ""


def found() -> list[str]:
    """The findings of this process so far, one line each."""
    return _findings().removeprefix(_forgotten).replace("[simulated GPU] ", "").splitlines()


def forget() -> None:
    """Forget the findings, and the operations that memory remembers."""
    global _forgotten
    _forgotten = _findings()
    ctypes.CDLL("libcudart.so.13").simulated_forget()  # ours: it is loaded


def waits() -> dict[str, int]:
    """How often this process has waited so far: for a whole device, for a stream, for an event."""
    library = ctypes.CDLL("libcudart.so.13")
    library.simulated_waits.restype = ctypes.c_long
    return {what: library.simulated_waits(kind) for kind, what in enumerate(("device", "stream", "event"))}


def take_all() -> str:
    """Return the findings of all processes of this run, and delete them."""
    files = [*FOLDER.iterdir()]
    texts = [file.read_text() for file in files]
    for file in files:
        file.unlink()
    return "".join(texts)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail a test if something was found while it ran, unless it has the marker `finds`."""
    report = (yield).get_result()
    if call.when == "call" and (text := take_all()) and item.get_closest_marker("finds") is None:
        report.outcome, report.longrepr = "failed", f"{report.longreprtext}\nthe simulated GPUs have found:\n{text}"


def pytest_configure(config):
    config.addinivalue_line("markers", "finds: this test breaks something on purpose, for the detector to find")

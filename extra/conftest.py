"""The tests of the tools use the helpers, the fixtures and the options of tests/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import conftest
from conftest import on_gpus, without_gpus  # noqa: F401  pytest finds them by their names


def pytest_addoption(pluginmanager):
    """Register tests/conftest.py here too, unless pytest runs tests of both folders and has it already."""
    if not pluginmanager.has_plugin(conftest.__file__):
        pluginmanager.register(conftest, conftest.__file__)

"""Runs without simulated GPUs: the lines that the detector's tests remove are still in the source."""

import ast
import importlib.util
from pathlib import Path

import pytest

from extra.simulated_gpu.lines_that_wait import OF_CHAPTERS, OF_ENGINES, OF_LOADING, each

LINES = {f"chapter: {name}": line for name, line in each(OF_CHAPTERS).items()}
LINES |= {f"engine: {name}": line for name, line in each(OF_ENGINES | OF_LOADING).items()}


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_once_in_its_source_and_without_it_the_rest_is_python(name):
    module, line, instead, *_ = LINES[name]
    source = Path(importlib.util.find_spec(module).origin).read_text()
    assert source.count(line) == 1, f"{line!r} is {source.count(line)} times in {module}"
    ast.parse(source.replace(line, instead))

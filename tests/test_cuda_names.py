"""Every name of `torch.cuda` and `torch._C` that the code uses is there in a build of torch for CUDA.

A build for CPUs lacks many of them, and nothing else would notice a wrong one before somebody has a GPU. The names are
in tests/cuda_names.txt. To write that anew: a CUDA wheel of torch, which needs no GPU for this, and
`python tests/test_cuda_names.py > tests/cuda_names.txt`.
"""

import ast
import functools
import json
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
OF_CUDA = ("_cuda", "_cudnn", "_nccl", "_nvtx", "_cublas")  # how names of torch._C begin that only such a build has


def uses(text: str) -> set[tuple[str, str]]:
    """{("torch.cuda" or "torch._C", name)} of what the program `text` uses, whatever it calls the modules."""
    tree, called, found = ast.parse(text), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called |= {alias.asname or (first := alias.name.split(".")[0]): alias.name if alias.asname else first
                       for alias in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and not node.level:
            called |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}

    def full(node) -> str:
        """ "torch.cuda.Event" for what the program may call gpu.Event."""
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return called.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    found |= {full(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    pairs = {(".".join(words[:2]), words[2]) for words in (name.split(".") for name in found) if len(words) > 2}
    return {pair for pair in pairs if pair[0] in ("torch.cuda", "torch._C")}


def programs() -> dict[str, str]:
    """{place: text} of all our Python, the notebooks' cells too."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("harness/**/*.py"), *ROOT.glob("tests/*.py")]
    found = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    for file in ROOT.glob("notebooks/*.ipynb"):
        for number, cell in enumerate(json.loads(file.read_text())["cells"]):
            if cell["cell_type"] == "code":
                lines = "".join(cell["source"]).splitlines()
                text = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
                found[f"{file.name}, cell {number}"] = text
    return found


@functools.cache
def known() -> dict[str, set[str]]:
    lines = [line for line in (ROOT / "tests" / "cuda_names.txt").read_text().splitlines() if line[:1] not in ("", "#")]
    names = {"torch.cuda": set(), "torch._C": {name for name in dir(torch._C) if not name.startswith(OF_CUDA)}}
    module = ""
    for line in lines:
        if line.endswith(":"):
            module = line.removesuffix(":")
        else:
            names[module].update(line.split())
    return names


def unknown(text: str) -> list[str]:
    names = known()
    return sorted(f"{module}.{name}" for module, name in uses(text) if name not in names[module])


def test_every_name_is_in_a_build_for_cuda():
    every = programs()
    wrong = {place: names for place, text in every.items() if (names := unknown(text))}
    assert not wrong, wrong
    assert sum(len(uses(text)) for text in every.values()) > 40  # it does find what the code uses


def test_a_name_that_is_not_there_is_found_however_it_is_written():
    text = """
import torch
import torch.cuda as gpu
from torch import _C, cuda
from torch.cuda import synchronize, no_such_5

def later():
    gpu.no_such_1()
    cuda.no_such_2.more()
    _C._cuda_no_such_3(torch.cuda.current_stream())
    return torch.cuda.Event, torch._C._no_such_4
"""
    assert unknown(text) == [
        "torch._C._cuda_no_such_3", "torch._C._no_such_4", *(f"torch.cuda.no_such_{number}" for number in (1, 2, 5))
    ]  # fmt: skip
    assert len(uses(text)) == 8


if __name__ == "__main__":
    assert torch.version.cuda, "this build of torch is for CPUs"
    print(f"# Names in torch {torch.__version__.partition('+')[0]} built for CUDA; tests/test_cuda_names.py says how.")
    for module, names in (
        ("torch.cuda", [name for name in dir(torch.cuda) if not name.startswith("__")]),
        ("torch._C", [name for name in dir(torch._C) if name.startswith(OF_CUDA)]),
    ):
        print(f"\n{module}:\n" + textwrap.fill(" ".join(names), 120, break_on_hyphens=False))

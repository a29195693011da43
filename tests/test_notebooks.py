"""The notebooks: committed without outputs, built alike, and run to the end at toy size."""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.teach import notebook

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 60  # the longest that a cell may take

each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def cells_of(file: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == kind]


def test_there_are_six_and_each_leads_to_the_next():
    assert [int(file.name[:2]) for file in FILES] == [1, 2, 3, 4, 5, 6]
    for file, following in zip(FILES, FILES[1:]):
        assert f"({following.name})" in "".join(cells_of(file, "markdown")[-1]["source"])


@each
def test_no_outputs_are_kept(file):
    for cell in cells_of(file, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        assert "execution" not in cell["metadata"], cell["id"]  # the times that nbclient writes
    ids = [cell["id"] for kind in ("code", "markdown") for cell in cells_of(file, kind)]
    assert len(set(ids)) == len(ids) and all(re.fullmatch("[a-z0-9-]+", one) for one in ids), "names, not random ids"


@each
def test_each_says_its_end_asks_before_it_runs_and_folds_its_answers_away(file):
    texts = ["".join(cell["source"]) for cell in cells_of(file, "markdown")]
    assert "**At the end you can say**" in texts[0]
    assert sum("**Predict" in text for text in texts) >= 3
    questions = texts[-1].partition("## Questions")[2]
    asked = len(re.findall(r"^\*\*\d+\.\*\*", questions, re.MULTILINE))
    assert (
        asked >= 5 and questions.count("<details><summary>Answer</summary>") == questions.count("</details>") == asked
    )


@each
def test_links_lead_somewhere(file):
    for text in ("".join(cell["source"]) for cell in cells_of(file, "markdown")):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or (file.parent / target).exists(), target


@pytest.fixture(scope="module")
def executed(quick_python):
    """{file: what came out of executing it, or the exception}: two notebooks at a time, as most of it is waiting.

    Their commands are started by the kernel's Python, so all of them need not import torch.
    """
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed here (pip install jupyter)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed here (pip install jupyter)")
    import nbformat
    from jupyter_client import AsyncKernelManager

    small = {"ZERO_NOTEBOOK_PRESET": "toy", "ZERO_NOTEBOOK_RANKS": "2", "ZERO_NOTEBOOK_CLAIMS": "fully_shard"}
    environment = {**os.environ, **small, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}

    def execute(file: Path):
        cells = nbformat.read(file, as_version=4)
        where = {"metadata": {"path": str(file.parent)}}
        with tempfile.TemporaryDirectory() as folder:
            # The kernel is spoken to by sockets in a folder: a port of its own may be one that a rank has taken.
            kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
            kernel.kernel_spec.argv[0] = quick_python
            client = nbclient.NotebookClient(cells, km=kernel, timeout=CELL_SECONDS, resources=where)
            try:
                client.execute(env=environment, cleanup_kc=True)
            except Exception as error:
                return error
        return cells

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(FILES, pool.map(execute, FILES)))


@each
def test_it_runs_to_the_end(file, executed):
    result = executed[file]
    if isinstance(result, Exception):
        raise result
    pictures, texts = 0, ""
    for cell in result.cells:
        for output in cell.get("outputs", ()):
            texts += output.get("text", "")
            assert output.output_type != "error"
            pictures += "image/png" in output.get("data", {})
            said = output.get("text", "")
            assert "Warning" not in said, f"{cell.id}: {said}"
    assert pictures >= 2
    if file.stem == "04_zero2":
        assert "Step 0 partition: 7 buckets" in texts and "3 reduce gradients: reduce-scatter" in texts
        assert "2.000 Ψ x (N-1)/N" in texts


def test_a_command_is_shown_and_its_output_returned(capfd):
    returned = notebook.run("./launch.sh help")
    shown = capfd.readouterr().out
    assert shown == f"$ ./launch.sh help\n{returned}" and "zero1|zero2|zero3" in shown
    quiet = notebook.run("./launch.sh help", show=False)
    assert capfd.readouterr().out == "$ ./launch.sh help\n"
    assert notebook.part(quiet, "Environment", "  NNODES").splitlines()[0] == "Environment:"
    with pytest.raises(ValueError, match="no lines from 'Environment' to 'nothing'"):
        notebook.part(quiet, "Environment", "nothing")


def test_a_command_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"ended with exit status 2:\n.*no command 'zero4'"):
        notebook.run("./launch.sh zero4 2", show=False)


def test_a_command_runs_with_this_python_and_outside_of_any_torchrun(tmp_path, monkeypatch, quick_python):
    monkeypatch.setattr(sys, "executable", quick_python)
    monkeypatch.setenv("RANK", "3")
    program = tmp_path / "print_it.py"
    program.write_text("import os, sys, harness\nprint(sys.executable, os.environ.get('WORLD_SIZE'))\n")
    monkeypatch.setenv("WORLD_SIZE", "7")
    said = notebook.run(f"torchrun --standalone --nproc-per-node 1 {program}", show=False)
    assert said.split() == [sys.executable, "1"]


def test_bars_draw_what_they_are_given():
    rows = {"a": {"parameters": 3e6, "optimizer": 1e6}, "b": {"parameters": 2e6}}
    figure = notebook.bars(rows, "a title", formula={"b": 2.5e6}, lines=[1e6, 9e9])
    axes = figure.axes[0]
    assert [patch.get_width() for patch in axes.patches] == [3, 1, 2]
    assert {line.get_segments()[0][0][0] for line in axes.collections} == {2.5}  # the tick of the formula
    assert axes.get_xlabel() == "MB (10⁶ bytes) on one rank" and len(axes.lines) == 1
    assert notebook.unit(12) == ("bytes", 1) and notebook.unit(5e9)[1] == 1e9


def test_the_command_that_opens_them(tmp_path):
    """launch.sh hands Jupyter Lab the folder and the reader's options; a Python without it is told so."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\necho "$@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(fake)}
    result = subprocess.run(
        [str(ROOT / "launch.sh"), "notebooks", "--no-browser"], env=environment, capture_output=True, text=True
    )
    root = " --allow-root" * (os.getuid() == 0)
    assert result.stdout == f"-m jupyterlab --notebook-dir={ROOT / 'notebooks'}{root} --no-browser\n", result.stderr
    fake.write_text('#!/bin/sh\ncase "$2" in *jupyterlab*) exit 1 ;; esac\n')
    result = subprocess.run([str(ROOT / "launch.sh"), "notebooks"], env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "has no Jupyter" in result.stderr

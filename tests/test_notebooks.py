"""The notebooks: committed without outputs, they open anywhere, and run to the end at toy size."""

import html
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from zerolab.engine import accelerator
from zerolab.run.ranks import ROOT
from zerolab.teach import anywhere, notebook, quiz, watch_page

FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))

each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def cells_of(file: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == kind]


@each
def test_no_outputs_are_kept(file):
    for cell in cells_of(file, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        assert "execution" not in cell["metadata"], cell["id"]  # the times that nbclient writes


@each
def test_a_prediction_is_asked_and_kept_before_it_is_answered(file):
    """The reader writes below each "Predict", and the measurement comes after it."""
    cells = json.loads(file.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    asked = [place for place, text in enumerate(sources) if "**Predict.**" in text]
    answers = {}  # question -> the cell that says what was found
    for place, text in enumerate(sources):
        for found in re.findall(r'quiz\.compare\(\s*"(.*?)"', text):
            answers[found] = place
    for place in asked:
        question = re.match(r'quiz\.keep\(\s*"(.*?)"[^)]*=\.\.\.', sources[place + 1])
        assert answers.pop(question[1]) > place + 1
    assert not answers


@each
def test_links_lead_somewhere_and_to_the_next_notebook(file):
    texts = ["".join(cell["source"]) for cell in cells_of(file, "markdown")]
    for target in re.findall(r"\]\(([^)#]+)\)", "".join(texts)):
        assert target.startswith("http") or (file.parent / target).exists(), target
    for following in FILES[FILES.index(file) + 1 :][:1]:
        assert f"({following.name})" in texts[-1]


@pytest.mark.thorough
@each
def test_it_runs_to_the_end(file):
    """The commands are started by the kernel's Python."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed here (pip install jupyter)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed here (pip install jupyter)")
    import nbformat
    from jupyter_client import AsyncKernelManager

    small = {"ZERO_NOTEBOOK_PRESET": "toy", "ZERO_NOTEBOOK_RANKS": "2"}
    cells = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # The kernel uses sockets in a folder, because a rank may already use the port that it would choose.
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        where = {"metadata": {"path": str(file.parent)}}
        client = nbclient.NotebookClient(cells, km=kernel, timeout=300, resources=where)
        result = client.execute(env={**os.environ, **small, "PYTHONPATH": ""}, cleanup_kc=True)
    outputs = sum((cell.get("outputs", []) for cell in result.cells), [])
    texts = "".join(output.get("text", "") for output in outputs)
    assert not any(output.output_type == "error" for output in outputs) and "Warning" not in texts, texts
    written_by_readers = sum("practice.check(" in cell.source for cell in result.cells)
    assert texts.count("not yet: ") == written_by_readers, "a cell that is still blank was not recognized"
    drawn = [cell for cell in result.cells if re.search(r"^(figures|pictures)\.", cell.source, re.MULTILINE)]
    for cell in drawn:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.id
    if file.stem == "04_zero2":  # the chapter that tests/test_launch.py does not start
        assert "Step 0 partition: 7 buckets" in texts and "3 reduce gradients: reduce-scatter" in texts
        assert "2.000 Ψ x (N-1)/N" in texts


def test_the_recorded_step_is_shown_as_it_was_asked_for(tmp_path):
    """A frame shows the whole page of docs/ at another event. A file that is not such a page raises an error."""
    shown = watch_page.show(run="zero3", event=7, beside='"><b>')._repr_html_()
    (inside,) = re.findall(r'srcdoc="([^"]*)"', shown)
    opened = re.compile(r'<body data-run="([^"]*)" data-event="([^"]*)" data-beside="([^"]*)">')
    page, ready = html.unescape(inside), watch_page.READY.read_text()
    assert [html.unescape(word) for word in opened.search(page).groups()] == ["zero3", "7", '"><b>']
    assert opened.sub("", page) == opened.sub("", ready)
    (tmp_path / "empty.html").write_text("<body></body>")
    with pytest.raises(ValueError, match="has no recordings"):
        watch_page.show(tmp_path / "empty.html")


# The start of each notebook.


def run_first_cell(folder: Path, address: str = ""):
    """In Python without torch: what it prints is the project's folder."""
    (code,) = {"".join(cells_of(file, "code")[0]["source"]) for file in FILES}  # the same one in all notebooks
    code = code.replace('ADDRESS = ""', f"ADDRESS = {address!r}") + "\nprint(project)\n"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_the_first_cell_finds_the_project_clones_it_or_names_where_it_looked(tmp_path):
    for folder in (ROOT, ROOT / "notebooks"):
        assert run_first_cell(folder).stdout.strip() == str(ROOT)
    lost = run_first_cell(tmp_path)
    assert lost.returncode == 1 and f"no zero1.py above {tmp_path}" in lost.stderr.splitlines()[-1]
    origin, opened = tmp_path / "origin", tmp_path / "alone"
    opened.mkdir()
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    (origin / "zero1.py").write_text("")
    for line in (["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "m"]):
        subprocess.run(["git", "-C", str(origin), *line], check=True)
    for _ in range(2):  # the second time it is there
        result = run_first_cell(opened, origin.as_uri())
        assert result.stdout.strip() == str(opened / "zero-from-scratch"), result.stderr


def test_ready_chooses_the_cpu_and_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.delenv("ZERO_NOTEBOOK_DEVICE", raising=False)
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    assert anywhere.ready() == "cpu" and anywhere.ready("cuda") == "cuda"
    first, second = capsys.readouterr().out.splitlines()
    assert "devices: cpu, cuda. The runs use: cpu" in first and "The runs use: cuda" in second
    monkeypatch.setenv("ZERO_NOTEBOOK_DEVICE", "cuda")
    assert anywhere.ready() == "cuda"
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    with pytest.raises(RuntimeError, match="'cuda' was chosen, and here are only: cpu"):
        anywhere.ready()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(RuntimeError, match="torch 2.9.1 is installed, and 2.11 or newer is needed"):
        anywhere.ready("cpu")


# Functions that all notebooks use.


def test_a_command_is_run_as_typed_and_its_failure_is_explained(tmp_path, capfd):
    returned = notebook.run("./launch.sh help")
    assert capfd.readouterr().out.startswith("$  ./launch.sh help\n") and "zero1|zero2|zero3" in returned
    assert notebook.part(returned, "Run", "Extras").splitlines()[0] == "Run and measure"
    with pytest.raises(ValueError, match="no lines from 'Run' to 'nothing'"):
        notebook.part(returned, "Run", "nothing")
    with pytest.raises(RuntimeError, match=r"ended with exit status 2:\n.*no command 'zero4'"):
        notebook.run("./launch.sh zero4 2")
    program = tmp_path / "print_it.py"
    program.write_text("import os, sys, zerolab\nprint(sys.executable, os.environ['WORLD_SIZE'])\n")
    line = f"torchrun --standalone --nproc-per-node 1 {program}"
    assert notebook.run(line).split() == [sys.executable, "1"]


def test_answers_are_kept_and_compared_with_the_result(capsys):
    quiz.keep("a question", a_part=4, another=..., third="Yes", fourth=12)
    quiz.compare("a question", a_part=4.1, another=7, third="yes", fourth=13)
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("1 of 4 without an answer yet")
    rows = [re.split(r"  +", line.strip()) for line in table[1:]]
    others = [["third", "Yes", "yes", "right"], ["fourth", "12", "13", "no"]]
    assert rows == [["a part", "4", "4.1", "right"], ["another", "-", "7"], *others]


def test_what_a_traced_step_does_is_counted():
    """A collective belongs to the numbered step around all others: a reduction inside backward to step 2."""
    found = notebook.events(notebook.read(ROOT / "results" / "trace-zero3-cpu-2ranks.json"))
    once = {(1, "all-gather", "root"), (2, "reduce-scatter", "root")}
    for number in range(6):
        unit = f"blocks.{number}"
        once |= {(1, "all-gather", unit), (2, "all-gather", unit), (2, "reduce-scatter", unit)}
    assert {event: times for event, times in found.items() if event[0]} == dict.fromkeys(once, 1)
    assert notebook.sent("sent in this step: 10 elements = 1.500 Ψ x (N-1)/N, with N = 2") == 1.5

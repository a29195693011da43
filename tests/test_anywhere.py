"""Notebooks that open anywhere: their first cell in a folder of its own, what is checked, and the pages for readers."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.teach import anywhere, html_copies, notebook, quiz, roofline

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_every_notebook_has_the_first_cell_as_it_is_generated(tmp_path):
    for file in FILES:
        copy = tmp_path / file.name
        copy.write_text(file.read_text())
        assert not anywhere.write(copy), f"{file.name}: python -m harness.teach.anywhere writes it"


def run_first_cell(folder: Path, address: str = ""):
    code = anywhere.FIRST_CELL.format(address=address) + "\nprint(project)\n"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_the_first_cell_finds_the_project_from_inside_and_says_where_it_looked(tmp_path):
    for folder in (ROOT, ROOT / "notebooks"):
        assert run_first_cell(folder).stdout.strip() == str(ROOT)
    lost = run_first_cell(tmp_path)
    assert lost.returncode == 1 and f"no zero1.py above {tmp_path}" in lost.stderr.splitlines()[-1]


def test_the_first_cell_clones_the_project_where_it_is_not(tmp_path):
    origin, opened = tmp_path / "origin", tmp_path / "alone"
    opened.mkdir()
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for line in (["init", "-q", str(origin)], ["-C", str(origin), "commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run([*git, *line], check=True)
    (origin / "zero1.py").write_text("")
    subprocess.run([*git, "-C", str(origin), "add", "."], check=True)
    subprocess.run([*git, "-C", str(origin), "commit", "-q", "-m", "m"], check=True)
    for _ in range(2):  # the second time it is there
        result = run_first_cell(opened, origin.as_uri())
        assert result.stdout.strip() == str(opened / "zero-from-scratch"), result.stderr
    assert (opened / "zero-from-scratch" / "zero1.py").exists()


def test_the_badge_comes_with_the_address(tmp_path, monkeypatch):
    copy = tmp_path / FILES[2].name
    copy.write_text(FILES[2].read_text())
    monkeypatch.setattr(anywhere, "ADDRESS", "https://github.com/somebody/zero-from-scratch")
    assert anywhere.write(copy) and not anywhere.write(copy)
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(copy.read_text())["cells"]}
    badge = f"https://colab.research.google.com/github/somebody/zero-from-scratch/blob/main/notebooks/{copy.name}"
    assert badge in cells["title"].splitlines()[1]
    assert 'ADDRESS = "https://github.com/somebody/zero-from-scratch"' in cells["find-project"]
    monkeypatch.undo()
    assert anywhere.write(copy) and copy.read_text() == FILES[2].read_text()


def test_ready_chooses_the_cpu_and_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.delenv("ZERO_NOTEBOOK_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    assert anywhere.ready() == "cpu" and anywhere.ready("cuda") == "cuda"
    first, second = capsys.readouterr().out.splitlines()
    assert "2 x Tesla T4" in first and 'anywhere.ready("cuda")' in first and "The runs use: cuda" in second
    monkeypatch.setenv("ZERO_NOTEBOOK_DEVICE", "cuda")
    assert anywhere.ready() == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device, version, said in (
        ("cuda", "2.13.0", "torch sees no GPU here"),
        ("tpu", "2.13.0", "got 'tpu'"),
        ("cpu", "2.9.1+cu128", "torch 2.9.1 is installed, and 2.11 or newer is needed"),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(RuntimeError, match=said):
            anywhere.ready(device)


def test_long_lines_are_broken_and_short_ones_are_not(capsys):
    notebook.say("  " + "word " * 40 + "\n  short   line")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(len(line) <= notebook.COLUMNS for line in lines)
    assert lines[1].startswith("      word") and lines[3] == "  short   line"
    notebook.table(["a", "number"], [["long name", 1], ["b", 22]])
    assert capsys.readouterr().out == "a          number\nlong name       1\nb              22\n"


def test_a_quiet_command_shows_that_it_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(notebook._Dots, "SECONDS", 0.05)
    monkeypatch.setattr(notebook, "ROOT", Path("/"))
    notebook.run("sleep 0.3", show=False)
    line, dots = capsys.readouterr().out.splitlines()
    assert line == "$ sleep 0.3" and dots.startswith("..") and dots.endswith(" 0 s")


def test_the_quiz_asks_claims_that_exist_and_tells_only_what_was_voted_on(capsys):
    recorded = {row["claim"]: row for row in json.loads((ROOT / "results" / "articles.json").read_text())}
    verdicts = [quiz.kind(recorded[claim]["verdict"]) for claim in quiz.ASKED]
    assert len(verdicts) == 12 and {verdicts.count(vote) for vote in quiz.VOTES} == {4}
    assert quiz.reveal({}) == 0
    assert capsys.readouterr().out == "\n0 of 0 right; 12 without a vote yet\n"
    right = dict(enumerate(verdicts, 1))
    assert quiz.reveal(right) == 12
    assert quiz.reveal(right | {1: "maybe", 2: "not"}, [recorded[quiz.ASKED[2]]]) == 10
    out = capsys.readouterr().out
    assert "it is 'maybe'" in out and out.count("run just now") == 1
    quiz.ask()
    assert "verdict" not in capsys.readouterr().out


def test_a_gather_hides_where_the_formulas_meet():
    numbers = {"ranks": 8, "latency": 1e-5, "bandwidth": 50e9}
    tokens = roofline.hides_from(10**6, flops=4e14, **numbers)
    sent = roofline.gather_seconds(2 * 10**6, **numbers)
    assert sent == pytest.approx(7 * 1e-5 + 7 / 8 * 2e6 / 50e9)
    assert roofline.forward_seconds(10**6, tokens, 4e14) == pytest.approx(sent)
    free = [roofline.hides_from(size, 8, 4e14, 0.0, 50e9) for size in (10**6, 10**9)]
    assert free == pytest.approx([7 / 8 * 4e14 / 50e9] * 2)  # without latency the size drops out


def test_html_copies_are_executed_and_lead_to_each_other(tmp_path, monkeypatch, capsys):
    pytest.importorskip("nbconvert", reason="nbconvert is not installed here (pip install jupyter)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed here (pip install jupyter)")

    def cell(kind, source):
        code = {"outputs": [], "execution_count": None} if kind == "code" else {}
        return {"cell_type": kind, "id": f"{kind}-{len(source)}", "metadata": {}, "source": source, **code}

    def write(name, *cells):
        text = {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / name).write_text(json.dumps(text))

    write("01_a.ipynb", cell("markdown", "[next](02_b.ipynb)"), cell("code", "print(6 * 7 * 1000)"))
    monkeypatch.setattr(html_copies, "NOTEBOOKS", tmp_path)
    assert html_copies.main([str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "01_a.html").read_text()
    assert "42000" in page and 'href="02_b.html"' in page

    def fails(file, folder):
        raise nbclient.exceptions.CellExecutionError("traceback", "ZeroDivisionError", "division by zero")

    monkeypatch.setattr(html_copies, "convert", fails)
    assert html_copies.main([]) == 1
    assert "01_a ... failed: ZeroDivisionError: division by zero" in capsys.readouterr().out
    assert html_copies.main(["--only", "nothing"]) == 2


def test_launch_sh_makes_html_copies(tmp_path):
    fake = SimpleNamespace(path=tmp_path / "python")
    fake.path.write_text('#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\necho "$@"\n')
    fake.path.chmod(0o755)
    result = subprocess.run([str(ROOT / "launch.sh"), "notebooks", "--html", "pages"], capture_output=True, text=True,
                            env={"PATH": "/usr/bin:/bin", "PYTHON": str(fake.path)})  # fmt: skip
    assert result.stdout == "-m harness.teach.html_copies pages\n", result.stderr

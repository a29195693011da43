"""./launch.sh report: it keeps its time, loses one command at most, and its programs accept its commands."""

import json
import shlex
import time
from pathlib import Path

import psutil
import pytest
import typed_commands

from zerolab.engine import accelerator
from zerolab.measure import report
from zerolab.run import json_file

REFEREE = Path(__file__).parent.parent / "results" / "referee-cpu-2ranks-3.json"
HANGS = "import subprocess, time; print('child', subprocess.Popen(['sleep', '999']).pid, flush=True); time.sleep(999)"
FAILS = "print(3, 'passed, 1 failed'); raise SystemExit(3)"


def python(code: str) -> str:
    return f"python -c {shlex.quote(code)}"


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_fails_or_hangs_is_a_line_in_the_page_and_the_rest_runs(tmp_path, monkeypatch):
    """Of what hangs nothing is left, and the page says where it was."""
    folder = tmp_path / "new"
    codes = python(HANGS), python(FAILS)
    copies = f"assert 'failed with' in open('report.md').read(); shutil.copy({str(REFEREE)!r}, 'compare-1.json')"
    works = python(f"import os, shutil; os.chdir({str(folder)!r}); {copies}")  # the page is written after each command
    chosen = [report.Command("what it shows", line, limit=2) for line in (*codes, works)]
    monkeypatch.setattr(report, "chosen_commands", lambda *_: chosen)
    assert report.main([str(folder)]) == 1
    page = (folder / "report.md").read_text()
    assert f"- `{codes[0]}` ended after 2 s" in page and f"- `{codes[1]}` failed with exit status 3" in page
    assert f"- `{works}`" not in page and f"`{works}`: done" in page and "left out" not in page
    child = int(page.partition("\nchild ")[2].split()[0])
    assert "Current thread" in page
    assert ended(child)
    runs = json.loads(REFEREE.read_text())["runs"]
    exact = sum(run["difference"] == 0 for run in runs.values()) - 1
    assert f"| 2 gloo | {exact} to the bit, 1 near | 3 |\n" in page
    with pytest.raises(SystemExit, match="2"):
        report.main([str(folder)])  # a report is not written over
    assert (folder / "report.md").read_text() == page


def test_the_minutes_are_kept_and_what_does_not_fit_is_listed(tmp_path, monkeypatch):
    """A command that is still running when they are over is no failure."""
    codes = {
        "begins": "print('begins ran')",
        "hangs": "import time; time.sleep(999)",
        "late": "print('late ran')",
    }
    chosen = [report.Command(name, python(code), limit=600) for name, code in codes.items()]
    monkeypatch.setattr(report, "chosen_commands", lambda *_: chosen)
    monkeypatch.setattr(report, "ENDING", 1)
    began = time.monotonic()
    assert report.main([str(tmp_path / "new"), "--minutes", "0.05"]) == 0
    assert 0.05 * 60 - 1 <= time.monotonic() - began < 10
    page = (tmp_path / "new" / "report.md").read_text()
    assert "begins ran\n" in page and "No command has failed" in page and "when the minutes were over" in page
    left_out = page.partition("What was left out")[2].partition("## ")[0]
    assert [command.shows for command in chosen if command.line in left_out] == ["late"]


def test_results_that_cannot_be_written_leave_the_ones_before(tmp_path):
    file = tmp_path / "results.json"
    json_file.write(file, {"first": 1})
    with pytest.raises(TypeError):
        json_file.write(file, {"second": object()})
    assert json.loads(file.read_text()) == {"first": 1} and [*tmp_path.iterdir()] == [file]
    json_file.write("/dev/null", {"third": 3})
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("gpus", (0, 1, 2, 8))
def test_every_command_is_one_that_its_program_accepts(gpus, tmp_path, monkeypatch):
    """Its options and number of ranks, on machines with so many GPUs. The GPUs need not be here."""
    monkeypatch.setattr(accelerator, "count", lambda: gpus)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda" if gpus else "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    chosen = report.chosen_commands(str(tmp_path), gpus)
    for command in chosen:
        program, *words = shlex.split(command.line)
        if program == "./launch.sh":
            assert typed_commands.python_arguments(*words), command
    files = [word for command in chosen for word in shlex.split(command.line) if word.endswith(".json")]
    assert len(files) == len({*files}) and all(Path(file).parent == tmp_path for file in files)
    assert len({command.line for command in chosen}) == len(chosen)

"""./launch.sh report on a CPU: what fails or hangs costs no other command, and each command is one that is there."""

import json
import shlex
from functools import partial
from pathlib import Path

import psutil
import pytest

import fsdp2_compare
from zerolab.engine import accelerator
from zerolab.measure import bench, memory, report, walkthrough
from zerolab.run import process_group
from zerolab.run.engines import CHAPTERS

REFEREE = Path(__file__).parent.parent / "results" / "referee-cpu-2ranks-3.json"
HANGS = "import subprocess, time; print('child', subprocess.Popen(['sleep', '999']).pid, flush=True); time.sleep(999)"
FAILS = "print(3, 'passed, 1 failed'); raise SystemExit(3)"


def test_what_fails_or_hangs_is_a_line_in_the_page_and_the_rest_goes_on(tmp_path, monkeypatch):
    """Of what hangs nothing is left, and the page says where it was."""
    folder = tmp_path / "new"
    codes = f"python -c {shlex.quote(HANGS)}", f"python -c {shlex.quote(FAILS)}"
    works = f"cp {REFEREE} {folder}/compare-1.json"
    monkeypatch.setattr(report, "commands", lambda *_: [*codes, works])
    monkeypatch.setattr(report, "SECONDS", 3)
    assert report.main([str(folder)]) == 1
    page = (folder / "report.md").read_text()
    assert f"- `{codes[0]}` ended after 3 s" in page and f"- `{codes[1]}` failed with exit status 3" in page
    assert f"- `{works}`" not in page and f"## `{works}`\n\ndone" in page
    child = int(page.partition("\nchild ")[2].split()[0])
    assert "Current thread" in page
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    runs = json.loads(REFEREE.read_text())["runs"]
    exact = sum(run["difference"] == 0 for run in runs.values()) - 1
    assert f"| 2 gloo | {exact} to the bit, 1 near | 3 |\n" in page
    with pytest.raises(SystemExit, match="2"):
        report.main([str(folder)])  # a report is not written over
    assert (folder / "report.md").read_text() == page


@pytest.mark.parametrize("quick", (False, True))
@pytest.mark.parametrize("gpus", (0, 1, 2, 8))
def test_every_command_is_one_that_its_program_takes(gpus, quick, tmp_path, monkeypatch):
    """Options and ranks, as the program reads them, on machines with so many GPUs that are not here."""
    monkeypatch.setattr(accelerator, "count", lambda: gpus)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda" if gpus else "cpu")
    parsers = {"compare": fsdp2_compare.arguments, "memory": memory.arguments, "bench": bench.arguments}
    parsers |= {name: partial(walkthrough.arguments, stage, "A chapter.") for name, stage in CHAPTERS.items()}
    started = set()
    for command in report.commands(str(tmp_path), gpus, quick):
        program, name, *words = shlex.split(command)
        if program == "./launch.sh" and name in parsers:
            ranks = int(words.pop(0)) if words[0].isdigit() else 1
            options = parsers[name](words)
            process_group.choose(getattr(options, "backend", "auto"), "auto", 0, ranks, gpus)
            started.add(name)
    assert started == {*parsers}

"""./launch.sh report on a CPU: what fails, hangs or has no memory costs no other command, an interruption no result."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import forked
import pytest

from harness.measure.report import __main__ as report
from harness.measure.report import commands, page

ROOT = Path(__file__).resolve().parent.parent
A_HANG = 600  # seconds after which a test is taken to hang; a busy machine may take a good part of them

# A report whose commands are these: (part, Python code, seconds). The code finds its file for results at sys.argv[2].
STARTED = """
import shlex, sys
from harness.measure.report import __main__ as report, commands
sys.executable = {python!r}  # a command is a child of its own, so that it can be ended
made_up = [commands.Command(part, "python -c " + shlex.quote(code), "", seconds)
           for part, code, seconds in {made_up!r}]
commands.planned = lambda machine, quick: made_up
sys.exit(report.main({argv!r}))
"""
REFEREE = ROOT / "results" / "referee-cpu-2ranks-3.json"
WORKS = ("referee", f"import shutil, sys; print('a table'); shutil.copy({str(REFEREE)!r}, sys.argv[2])", 300)
FAILS = ("tests", "print('3 passed, 1 failed, 2 errors, 5 skipped in 8.05s'); raise SystemExit(3)", 300)
NO_MEMORY = ("memory", "raise RuntimeError('torch.OutOfMemoryError: CUDA out of memory.')", 300)
SAYS_NOTHING = ("sweeps", "pass", 300)
HANGS = ("timeline", """
import subprocess, sys, time
wait = [sys.executable, "-c", "import time; time.sleep(1200)"]
print("hangs with child", subprocess.Popen(wait, start_new_session=True).pid, flush=True)
time.sleep(1200)""")  # fmt: skip


def start(folder: Path, *made_up: tuple) -> subprocess.Popen:
    code = STARTED.format(python=sys.executable, made_up=made_up, argv=[str(folder)])
    return subprocess.Popen([forked.python(), "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)  # fmt: skip


def alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read(folder: Path) -> tuple[dict, str]:
    return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """(exit status, report.json, report.md, folder) of a report in which most that can happen happens."""
    folder = tmp_path_factory.mktemp("report") / "folder"
    process = start(folder, FAILS, (*HANGS, 5), NO_MEMORY, SAYS_NOTHING, WORKS)
    said, _ = process.communicate(timeout=A_HANG)
    assert (folder / "report.md").exists(), said
    return process.returncode, *read(folder), folder


def test_what_fails_costs_no_other_command(broken):
    status, known, text, _ = broken
    assert status == 1 and known["status"] == "done" and known["machine"]["cores"] > 0
    found = {name: [job["status"] for job in part["jobs"]] for name, part in known["parts"].items()}
    drawn = found.pop("figures", ["done"])
    assert found == {"machine": ["done"], "tests": ["failed"], "timeline": ["timed out"], "memory": ["out of memory"],
                     "sweeps": ["failed"], "referee": ["done"]}  # fmt: skip
    assert drawn in (["done"], ["left out"])  # without matplotlib
    failed = text.partition("## What failed")[2].partition("## What this machine could not show")[0]
    for words in ("exit status 3", "its limit was 5 s", "Out of memory after", "it has written no results"):
        assert words.lower() in failed.lower(), failed


def test_what_was_measured_is_on_the_page_and_in_the_json(broken):
    _, known, text, folder = broken
    assert "a table" in text and (folder / "losses.png").exists() == ("losses.png" in text)
    assert page.tests_in_all(known) == (3, 3, 5)
    (job,) = page.jobs_with_results(known, "referee")
    assert job["results"]["runs"] == json.loads(REFEREE.read_text())["runs"]
    assert "equal to DDP to the bit, at every step and on every rank: zero1," in text


def test_nothing_of_what_hung_is_left_and_it_says_where_it_was(broken):
    _, _, text, _ = broken
    assert not alive(int(re.search(r"with child (\d+)", text).group(1)))
    assert "Current thread" in text  # Python's fault handler


def test_the_folder_does_not_say_where_it_was_written(broken):
    folder = broken[-1]
    everything = "".join(path.read_text() for path in folder.iterdir() if path.suffix in (".txt", ".json", ".md"))
    assert str(ROOT) not in everything and sys.prefix not in everything and str(folder) not in everything


@pytest.mark.parametrize("number", (signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)))
def test_an_interrupted_report_keeps_what_it_has(tmp_path, number):
    folder = tmp_path / "folder"
    process = start(folder, WORKS, (*HANGS, 3 * A_HANG), FAILS)
    process_ends, child, log = time.monotonic() + A_HANG, None, folder / "timeline-1.txt"
    while child is None and time.monotonic() < process_ends and process.poll() is None:
        child = re.search(r"with child (\d+)", log.read_text()) if log.exists() else None
    assert child and alive(int(child.group(1)))
    process.send_signal(number)
    said, _ = process.communicate(timeout=A_HANG)
    assert process.returncode == 128 + number, said
    assert not alive(int(child.group(1)))
    known, text = read(folder)
    assert known["status"] == "interrupted" and "**Interrupted**" in text and "a table" in text
    assert [(name, part["jobs"][0]["status"]) for name, part in known["parts"].items()] == [
        ("machine", "done"), ("referee", "done"), ("timeline", "interrupted"), ("tests", "left out"),
    ]  # fmt: skip
    assert "the report ended before" in text


def test_from_the_command_line(tmp_path):
    folder = tmp_path / "folder"
    done = forked.launch("report", str(folder), "--quick", "--minutes", "10", "--only", "host")
    assert done.returncode == 0, done.stdout + done.stderr
    known, text = read(folder)
    assert "referee: left out by --only" in text and "no GPU" in text and "--quick" in text
    host = json.loads((folder / "host-1.json").read_text())
    assert {"plain", "ddp", "zero1", "zero2", "zero3", "fsdp2"} <= {*host["ms"]} and host["ranks"] == 8
    assert all(min(times) > 0 for times in host["ms"].values())
    assert [job["status"] for job in known["parts"]["host"]["jobs"]] == ["done"] and "beside torch's own" in text


def test_a_command_for_which_no_time_is_left_is_not_started(tmp_path):
    made = report.Report(report.arguments([str(tmp_path / "new")]))
    made.ends = time.monotonic() + 20
    made.command(commands.Command("host", "python -c pass", seconds=100))
    (row,) = made.known["parts"]["host"]["jobs"]
    assert row["status"] == "left out" and "--minutes 20 gives it more" in row["skip"]


# The commands, on machines that are not here.


def a_machine(count: int) -> dict:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 10**9}
    return {"gpus": [gpu] * count, "pytest": "9", "python": "3.12", "torch": "2.11", "bf16": True}


@pytest.mark.parametrize("quick", (False, True))
@pytest.mark.parametrize("count", (0, 1, 2, 8))
def test_every_command_is_one_that_its_program_takes(count, quick, monkeypatch):
    """The options of each command, as the program that they are for reads them; and ranks that there are GPUs for."""
    import fsdp2_compare
    from harness.engine import accelerator
    from harness.measure import bench, memory, sweeps, walkthrough
    from harness.properties.parts import STAGES
    from harness.run import process_group

    parsers = {"compare": fsdp2_compare.arguments, "memory": memory.arguments, "sweeps": sweeps.arguments,
               "harness.measure.bench": bench.arguments}  # fmt: skip
    parsers |= {name: partial(walkthrough.arguments, stage, "A chapter.") for name, stage in STAGES.items()}
    monkeypatch.setattr(accelerator, "count", lambda: count)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda" if count else "cpu")
    planned = commands.planned(a_machine(count), quick)
    for command in planned:
        program, *argv = shlex.split(command.line)[1 + command.line.startswith("python") :]
        if command.part == "tests":
            assert program == "test" and (ROOT / argv[0]).exists()
            continue
        ranks = int(argv.pop(0)) if argv[0].isdigit() else 0
        options = parsers[program]([*argv, command.option, os.devnull])
        if ranks:
            process_group.choose(options.backend, options.device, 0, ranks, count)
    assert {command.part for command in planned} == {*commands.PARTS} - {"machine"}
    assert quick or len(planned) == len({command.line for command in planned}) > 12


def test_the_referee_covers_what_the_machine_has():
    one = [command.name for command in commands.planned(a_machine(1), quick=False)]
    for words in ("1 rank over NCCL", "2 ranks that share", "4 ranks that share"):
        assert any(words in name for name in one), one
    for name in ("tiny", "small", "medium", "1b"):
        assert {f"{name}, fp32, 1 rank over NCCL", f"{name}, bf16, 1 rank over NCCL"} <= set(one)
    eight = [command.name for command in commands.planned(a_machine(8), quick=False)]
    assert any("8 ranks over NCCL" in name for name in eight) and not any("share" in name for name in eight)
    old = commands.planned({**a_machine(1), "bf16": False}, quick=False)
    assert not any("bf16" in command.line for command in old)

"""./launch.sh report: it keeps its time, loses one command at most, and its programs accept its commands."""

import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from conformance import conform_options

import fsdp2_compare
from zerolab.engine import accelerator
from zerolab.measure import bench, memory, one_gpu, report, walkthrough_options
from zerolab.run import enough_memory, json_file, process_group, ranks
from zerolab.run.engines import CHAPTERS

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
    works = f"cp {REFEREE} {folder}/compare-1.json"
    chosen = [report.Command("what it shows", line, least=1, limit=2) for line in (*codes, works)]
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


@pytest.mark.parametrize("left, seconds", [(200, 60), (65, 60), (50, 45), (25, 20), (24.9, 0), (0, 0), (-3, 0)])
def test_a_command_takes_its_limit_or_what_is_left_and_begins_only_with_enough(left, seconds):
    """The last 5 seconds are for ending the command."""
    assert report.seconds_for(report.Command("", "", least=20, limit=60), left) == seconds


def test_the_minutes_are_kept_and_what_does_not_fit_is_listed(tmp_path, monkeypatch, capsys):
    """A command that is still running when they are over is no failure; a short one may fit behind a long one."""
    names = {"begins": (1, 600), "long": (300, 600), "hangs": (1, 600), "late": (1, 600)}
    chosen = []
    for name, (least, limit) in names.items():
        code = "import time; time.sleep(999)" if name == "hangs" else f"print('{name} ran')"
        chosen.append(report.Command(name, python(code), least, limit))
    monkeypatch.setattr(report, "chosen_commands", lambda *_: chosen)
    monkeypatch.setattr(report, "ENDING", 1)
    began = time.monotonic()
    assert report.main([str(tmp_path / "new"), "--minutes", "0.07"]) == 0
    assert 0.07 * 60 - 1 <= time.monotonic() - began < 10
    page = (tmp_path / "new" / "report.md").read_text()
    assert "begins ran\n" in page and "No command has failed" in page and "when the minutes were over" in page
    left_out = page.partition("What was left out:")[2].partition("## ")[0]
    assert [command.shows for command in chosen if command.line in left_out] == ["long", "late"]
    assert capsys.readouterr().out.count("left out") == 2


DRIVER = """
import sys
from conformance import conform_options
from zerolab.measure import report
first = report.Command("first", "cp {referee} {folder}/compare-1.json", least=1, limit=60)
second = report.Command("second", "torchrun --nproc-per-node 1 {script}", least=1, limit=600)
third = report.Command("third", "python -c 3", least=1, limit=60)
report.chosen_commands = lambda *_: [first, second, third]
sys.exit(report.main(["{folder}"]))
"""
# A rank that does not watch the process that started it, like a script that imports only torch.
RANK = """
import os, time
open('{pid}.part', 'w').write(str(os.getpid()))
os.rename('{pid}.part', '{pid}')
time.sleep(999)
"""


@pytest.mark.long
@pytest.mark.parametrize("by, status", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_stopping_it_loses_one_command(tmp_path, by, status):
    """Whatever is there is complete, and no process is left."""
    folder, script, pid = tmp_path / "new", tmp_path / "rank.py", tmp_path / "pid"
    script.write_text(RANK.format(pid=pid))
    code = DRIVER.format(referee=REFEREE, folder=folder, script=script)
    with subprocess.Popen([sys.executable, "-c", code], env=ranks.environment(), stderr=subprocess.PIPE) as process:
        while not pid.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        assert int(pid.read_text()) in [one.pid for one in started]
        process.send_signal(by)
        assert process.wait(30) == status
    until = time.monotonic() + 30
    while not all(ended(one.pid) for one in started) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(ended(one.pid) for one in started)
    page = (folder / "report.md").read_text()
    assert "## first\n" in page and "## second\n" not in page and page.endswith("```\n")
    left_out = page.partition("What was left out:")[2].partition("## ")[0]
    assert str(script) in left_out and "python -c 3" in left_out
    assert sorted(file.name for file in folder.iterdir()) == ["compare-1.json", "report.md"]
    assert json.loads((folder / "compare-1.json").read_text())


def test_results_that_cannot_be_written_leave_the_ones_before(tmp_path):
    file = tmp_path / "results.json"
    json_file.write(file, {"first": 1})
    with pytest.raises(TypeError):
        json_file.write(file, {"second": object()})
    assert json.loads(file.read_text()) == {"first": 1} and [*tmp_path.iterdir()] == [file]
    json_file.write("/dev/null", {"third": 3})
    assert Path("/dev/null").is_char_device()


def chapter_arguments(name, words):
    return walkthrough_options.arguments([name, *words])


def parsed(command: report.Command, gpus: int) -> str:
    """The name of what the command runs, if its program accepts the command line."""
    parsers = {"compare": fsdp2_compare.arguments, "memory": memory.arguments, "bench": bench.arguments}
    parsers |= {"conform": conform_options.arguments}
    parsers |= {name: partial(chapter_arguments, name) for name in CHAPTERS}
    program, *words = shlex.split(command.line)
    if program == "torchrun":
        option, number_of_ranks, script, *words = words
        assert option == "--nproc-per-node"
        name = words.pop(0) if script == "-m" else {"fsdp2_compare.py": "compare"}.get(script, script)
    elif program == "./launch.sh":
        name = words.pop(0)
        number_of_ranks = words.pop(0) if name != "memory" and words[0].isdigit() else "1"
    else:
        name, number_of_ranks = words.pop(words.index("-m") + 1) if "-m" in words else program, "1"
        words = words[words.index("-m") + 1 :] if "-m" in words else words
    if name == "zerolab.measure.one_gpu":
        asked = one_gpu.arguments(words)
        if asked.what == "memory":
            for preset in asked.presets:
                one_gpu.of_memory(preset, asked.seq)
        return f"one_gpu {asked.what}"
    if name in parsers:
        asked = parsers[name](words)
        process_group.choose(getattr(asked, "backend", "auto"), "auto", 0, int(number_of_ranks), gpus)
    return name


@pytest.mark.parametrize("gpus", (0, 1, 2, 8))
def test_every_command_is_one_that_its_program_accepts(gpus, tmp_path, monkeypatch):
    """Its options and number of ranks, on machines with so many GPUs. The GPUs need not be here."""
    monkeypatch.setattr(accelerator, "count", lambda: gpus)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda" if gpus else "cpu")
    chosen = report.chosen_commands(str(tmp_path), gpus, report.SIZES)
    started = {parsed(command, gpus) for command in chosen}
    assert {"compare", "bench", "zero3", "zero3.py", "torch.utils.collect_env"} <= started
    assert ("test" if gpus else "conform") in started
    assert ("one_gpu memory" if gpus else "memory") in started
    assert gpus != 1 or "one_gpu host" in started
    assert all(0 < command.least <= command.limit for command in chosen)
    files = [word for command in chosen for word in shlex.split(command.line) if word.endswith(".json")]
    assert len(files) == len({*files}) and all(Path(file).parent == tmp_path for file in files)
    assert len({command.line for command in chosen}) == len(chosen)


@pytest.mark.thorough
def test_an_engine_that_does_not_fit_has_a_prediction_and_nothing_measured(monkeypatch):
    """The rows of a GPU, without one: the dry run replaces real allocations. Its prediction is made meanwhile."""
    asked = one_gpu.of_memory("toy", "8", "--engines", "ddp,zero3")
    expected = memory.measure_all(asked)["engines"]
    rows = {"ddp": {"out_of_memory": "torch's words"}, "zero3": dict(expected["zero3"])}
    monkeypatch.setattr(memory, "row_of", lambda name, _: rows[name])
    monkeypatch.setattr(memory.json_file, "about", lambda *_: {})
    asked.device = "cuda"
    results = memory.measure_all(asked)
    predicted = {name: row["dry_run_peak_bytes"] for name, row in results["engines"].items()}
    assert predicted == {name: row["peak_bytes"] for name, row in expected.items()}
    lines = {}
    for line in filter(None, one_gpu.memory_table(results).splitlines()):
        lines.setdefault(line.split()[0], line)  # on a narrow terminal the table is split, and the peaks come first
    assert "OUT OF MEMORY" in lines["ddp"] and f"{predicted['ddp'] / 1e6:.2f}" in lines["ddp"]
    assert lines["zero3"].split()[1] == lines["zero3"].split()[2] == f"{predicted['zero3'] / 1e6:.2f}"


CARD = 75e9  # bytes, of a card that is sold as 80 GB


@pytest.mark.thorough
@pytest.mark.parametrize("preset", report.SIZES.memory)
def test_what_is_allocated_on_one_gpu_fits_or_is_meant_not_to(preset):
    """By the dry run: what fits on no CPU, and could only be tried on the card."""
    rows = memory.measure_all(one_gpu.of_memory(preset, str(report.SIZES.seq)))["engines"]
    too_large = [(preset, name) for name, row in rows.items() if row["peak_bytes"] > CARD]
    assert too_large == [pair for pair in report.SIZES.too_large if pair[0] == preset]


@pytest.mark.long
def test_what_the_referee_trains_on_one_gpu_fits(tmp_path):
    """All engines at once, because their steps are timed in turn; two ranks share the card."""
    lines = [shlex.split(command.line) for command in report.on_one_gpu(str(tmp_path), report.SIZES)]
    compared = [line for line in lines if "fsdp2_compare.py" in line]
    assert len(compared) == 3
    for _, _, number_of_ranks, _, *words in compared:
        asked, size = fsdp2_compare.arguments(words), int(number_of_ranks)
        state = size * enough_memory.needed(asked, asked.preset, asked.engines, size)
        assert state <= 0.7 * CARD  # the rest is for activations


def test_sizes_for_a_test_change_no_other_part_of_the_list(tmp_path):
    """So a rehearsal with small models rehearses the whole list."""
    small = dataclasses.replace(
        report.SIZES, shared="toy", single="toy", batch=2, memory=("toy",), seq=32, tests="tests"
    )
    full, short = (report.on_one_gpu(str(tmp_path), sizes) for sizes in (report.SIZES, small))
    assert [command.shows for command in full] == [command.shows for command in short]
    assert [shlex.split(command.line)[:2] for command in full] == [shlex.split(command.line)[:2] for command in short]

"""launch.sh and the referee as a user runs them, mistakes included."""

import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import started
import torch
import torch.distributed as dist
import typed_commands
from torch.distributed.run import parse_args

import fsdp2_compare as referee
from zerolab.run import launch, pool, progress, torchrun
from zerolab.run import ranks as run_ranks
from zerolab.run.engines import ENGINES
from zerolab.run.process_group import World
from zerolab.run.ranks import ROOT


def test_the_referee_compares(tmp_path):
    """What its report has of each engine. tests/conformance compares the training of all engines."""
    names, file = ("single", "ddp", "zero1", "zero3", "fsdp2"), tmp_path / "out.json"
    options = ("--preset", "toy", "--steps", "4", "--timed-steps", "1", "--batch", "2")
    result = started.launch("compare", "2", *options, "--engines", ",".join(names), "--json", str(file))
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(file.read_text())
    assert "MATCH: all 5 engines train alike." in result.stdout and "Warning" not in result.stderr + result.stdout
    expected = {"device": "cpu", "backend": "gloo", "world_size": 2, "preset": "toy", "steps": 4, "parameters": 34_688}
    assert report["match"] is True and expected.items() <= report.items()
    psi, root = 4 * 34_688, 37_120  # bytes; ZeRO-3 and FSDP2 gather the root once, and the units twice
    for name in names:
        run, (shared_out, sent) = report["runs"][name], ENGINES[name].promise
        assert len(run["losses"]) == 4 and run["losses"][-1] < run["losses"][0]
        assert run["difference"] == 0 or name == "single"
        held = dict(run["held_bytes"])
        assert run["peak_bytes"] > sum(held.values()) and run["step_ms"] > 0 and run["tokens_per_s"] > 0
        counters = held.pop("optimizer") - 2 * psi / (1 + ("optimizer" in shared_out))
        assert 0 < counters <= 4 * 40, name
        assert held == {part: psi / (1 + (part in shared_out)) for part in held}, name
        assert run["sent_bytes"] == (sent * psi - (root if "parameters" in shared_out else 0)) / 2, name


SMALL = ["--preset", "toy", "--steps", "1", "--timed-steps", "0", "--engines", "ddp"]


@pytest.mark.long
def test_the_referee_writes_its_results_where_the_user_stands(tmp_path):
    """No file of that folder is imported in place of the project's."""
    (tmp_path / "zerolab.py").write_text("raise SystemExit('not this one')")
    result = started.launch("compare", "1", *SMALL, "--json", "out.json", folder=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    file = tmp_path / "out.json"
    assert result.stdout.endswith(f"written: {file}\n") and json.loads(file.read_text())["match"]


@pytest.mark.long
def test_what_cannot_be_written_is_named_below_the_results():
    (result,) = started.on_ranks(["fsdp2_compare.py", *SMALL, "--json", "/dev/full"], 1)
    assert result.returncode == 2 and "diff to ddp" in result.stdout and "written" not in result.stdout
    assert "error: cannot write /dev/full: No space left on device" in result.stderr, result.stderr


@pytest.mark.thorough
def test_the_referee_in_bfloat16(tmp_path):
    """The report has the dtype and its bytes. tests/conformance compares the training."""
    file = tmp_path / "out.json"
    options = (
        f"--preset toy --steps 3 --timed-steps 0 --batch 2 --dtype bf16 --engines ddp,zero3,fsdp1_article --json {file}"
    )
    first, second = started.on_ranks(["fsdp2_compare.py", *options.split()], 2)
    assert first.returncode == second.returncode == 0, first.stderr[-3000:] + second.stderr[-3000:]
    assert "bfloat16 with float32 reduction" in first.stdout and "Warning" not in first.stderr + second.stderr
    report = json.loads(file.read_text())
    assert report["dtype"] == "bf16" and report["match"] is True
    low, full = (sum(report["runs"][name]["held_bytes"].values()) for name in ("zero3", "ddp"))
    assert low < 1.1 * full / 2


@pytest.mark.long
@pytest.mark.parametrize("stage", ("zero1", "zero3"))
def test_a_chapter_walks_through_a_step(tmp_path, stage):
    """ZeRO-2's is in its notebook, which tests/test_notebooks.py runs."""
    trace = tmp_path / "trace.json"
    more = ["--bucket-mb", "0", "--map"] if stage == "zero1" else []
    options = ["--device", "cpu", "--preset", "toy", "--steps", "2", *more, "--trace", str(trace)]
    result = started.launch(stage, "2", *options)
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr[-3000:]
    for words in ("Step 0 partition", "Step 1 forward", "Step 2 backward", "Step 3 reduce", "Step 4 update", "holds"):
        assert words in result.stdout, words
    if stage == "zero1":  # with a bucket per parameter, as two articles cut, every rank owns a part of each
        assert "Step 5 gather parameters" in result.stdout
        assert "3.000 Ψ x (N-1)/N" in result.stdout
        assert len([line for line in result.stdout.splitlines() if "ranks 0 to 1" in line]) == 28, result.stdout
    written = json.loads(trace.read_text())
    events = written["traceEvents"]
    for rank in (0, 1):
        mine = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        alive = [event["args"]["MB"] for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert len(alive) > 100 and min(alive) > 0
        units = {event["args"].get("unit") for event in mine if event["cat"] == "collectives"}
        assert units == ({"root", "blocks.0", "blocks.1"} if stage == "zero3" else {f"bucket {b}" for b in range(28)})


# Commands that launch.sh starts. tests/test_refusals.py has those that it refuses.


@pytest.mark.parametrize(
    "words, program",
    [
        ("compare", "fsdp2_compare"),
        ("zero1", "zerolab.measure.walkthrough zero1"),
        ("zero3", "zerolab.measure.walkthrough zero3"),
        ("train zero2", "zerolab.run.train zero2"),
        ("bench", "zerolab.measure.bench"),
    ],
)
def test_a_command_with_ranks_is_started_by_torchrun(words, program, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for ranks in (["3"], []):
        line = typed_commands.python_arguments(*words.split(), *ranks, "--preset", "toy")
        assert line[:2] == ["-m", "zerolab.run.torchrun"]
        found = parse_args(line[2:])
        assert found.max_restarts == (3 if words.startswith("train") else 0)
        assert found.standalone and found.nproc_per_node == (ranks or ["2"])[0] and found.module
        module, *more = program.split()
        assert found.training_script == module and importlib.util.find_spec(module)
        assert found.training_script_args == [*more, "--preset", "toy"]
        assert f"torchrun {shlex.join(line[2:])}\n" in capsys.readouterr().out  # the line to paste


def test_a_command_without_ranks_is_one_process():
    for words in ("memory 4", "plan", "bug 3", "report", "articles", "docs --check", "exercise zero1", "check zero1"):
        command, *given = words.split()
        line = typed_commands.python_arguments(*words.split())
        assert line == ["-m", launch.COMMANDS[command].module, *given] and importlib.util.find_spec(line[1])
    assert typed_commands.python_arguments("bench", "--host") == ["-m", "zerolab.measure.bench", "--host"]


def test_without_a_number_there_is_a_rank_per_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,7")
    assert parse_args(typed_commands.python_arguments("compare")[2:]).nproc_per_node == "4"
    assert parse_args(typed_commands.python_arguments("compare", "--device", "cpu")[2:]).nproc_per_node == "2"


WRONG_OPTIONS = """
import contextlib, sys
from zerolab.run import launch
for command in launch.COMMANDS:
    with contextlib.suppress(SystemExit):
        launch.main([command, "--nonsense"])
    print(command, "torch" in sys.modules)
"""


def test_no_command_imports_torch_to_read_its_options():
    """So --help and mistakes take less than half a second."""
    ended = started.alone(["-c", WRONG_OPTIONS])
    assert ended.stdout.splitlines() == [f"{command} False" for command in launch.COMMANDS]
    assert ended.stderr.count("error: no option --nonsense") == len(launch.COMMANDS), ended.stderr


def test_an_old_python_and_one_without_torch_are_named(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.1\nexit 1\n')
    old.chmod(0o755)
    result = started.launch("compare", PYTHON=old)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: PYTHON={old} is Python 3.10.1. Set PYTHON to Python 3.11 or newer\n"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    result = started.launch("compare", "2", PYTHON=tmp_path / "empty" / "bin" / "python")
    python = tmp_path / "empty" / "bin" / "python"
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    assert "has no torch, numpy, matplotlib, psutil. Install what is missing: " in result.stderr
    assert f"{python} -m pip install 'torch>=2.11' numpy matplotlib psutil " in result.stderr, result.stderr


def test_a_package_that_is_too_old_is_named_with_its_version(monkeypatch):
    versions = {"torch": "2.10.1+cpu", "numpy": "2.0", "matplotlib": "3.0", "psutil": "7.0"}
    monkeypatch.setenv("PYTHON", "python3")
    monkeypatch.setattr("importlib.metadata.version", versions.get)
    with pytest.raises(
        ValueError, match=r"no torch 2.11 or newer \(it has 2.10.1\+cpu\)\. .*install 'torch>=2.11'  Or"
    ):
        launch.check_packages([])


def test_without_a_command_the_command_that_runs_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert typed_commands.python_arguments()[-1] == "fsdp2_compare"
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Without a command, ./launch.sh runs compare: ")


SLEEPS = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as if it were lost, in an import or in C++
def end(number, frame):
    os.write(1, b"ended by SIGTERM\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, f"rank {os.getpid()}\\n".encode())
time.sleep(600)
"""
STARTS = """
import sys
from zerolab.run import launch
sys.exit(launch.start([sys.executable, *sys.argv[1:]]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["Ctrl-C", "SIGTERM", "kill -9"],
)
def test_no_process_is_left_when_a_command_is_stopped(tmp_path, number, status):
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    line = [sys.executable, "-c", STARTS, *run_ranks.torchrun(2), str(script)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=run_ranks.environment(), **streams) as process:
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        processes = [*map(psutil.Process, pids), *psutil.Process(process.pid).children()]
        process.send_signal(number)
        process.wait(100)
        assert process.returncode == status
        _, alive = psutil.wait_procs(processes, 60)
        assert not alive
        assert process.stdout.read() == "ended by SIGTERM\n" * 2  # none was left alone for 30 s, and then killed
        if number == signal.SIGINT:
            assert process.stderr.read() == "\nstopped by Ctrl-C\n"


# What a user sees if ranks fail. {fate} is the third step of the last rank; `world` is every rank.
FAILING = """
import ctypes, os, signal, time
import torch
import torch.distributed as dist
from zerolab.run import process_group
from zerolab.engine import ZeRO{stage}Engine

def helper(table):
    return table["nothing"]

def main():
    world = process_group.start()
    pids = process_group.gathered(os.getpid())
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    engine = ZeRO{stage}Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if step == 2 and world.rank == world.world_size - 1:
            {fate}
        engine.training_step(torch.ones(1, 8), torch.ones(1, 8), torch.nn.functional.mse_loss)

process_group.run(main)
"""


def failing(tmp_path, stage: int, fate: str) -> list[str]:
    file = tmp_path / "failing.py"
    file.write_text(FAILING.format(stage=stage, fate=fate))
    return [str(file)]


@pytest.mark.long
def test_of_a_mistake_that_nobody_has_foreseen_there_is_one_traceback(tmp_path):
    """All ranks make it."""
    program = failing(tmp_path, 1, "pass")
    file = tmp_path / "failing.py"
    file.write_text(file.read_text().replace("pids = ", "helper({})\n    pids = "))
    ended = started.ranks_of(program, 2)
    assert ended.returncode == 1 and ended.stderr.endswith("KeyError: 'nothing'\n")
    assert ended.stderr.count("Traceback") == ended.stderr.count("in helper") == 1, ended.stderr


@pytest.mark.long
def test_of_a_crash_outside_of_python_its_place_is_printed(tmp_path):
    ended = started.ranks_of(failing(tmp_path, 1, "ctypes.string_at(0)"), 2)
    assert ended.returncode == 128 + signal.SIGSEGV
    assert ended.stderr.count("Fatal Python error: Segmentation fault") == 1 and "failing.py" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: rank 1 was killed by SIGSEGV: "), ended.stderr


@pytest.mark.long
def test_of_a_rank_that_hangs_its_number_is_printed(tmp_path):
    """After ZERO_TIMEOUT the other rank gives up. It has not caused that."""
    ended = started.ranks_of(failing(tmp_path, 3, "time.sleep(10**6)"), 2, ZERO_TIMEOUT=5)
    error, missing = ended.stderr.splitlines()[-2:]
    assert ended.returncode == 1 and ended.stderr.count("error:") == 1, ended.stderr
    assert error.startswith("[rank 0] error: ") and missing.startswith("Rank(s) 1 were still running"), ended.stderr


@pytest.mark.long
def test_an_engine_file_that_raises_on_all_ranks_gives_one_message_with_its_lines(tmp_path):
    (tmp_path / "raises.py").write_text("""\
def build(model, optimizer, device):
    return helper(model)

def helper(model):
    raise ValueError("a bigger model, please")
""")
    options = [*SMALL, "--engine-file", str(tmp_path / "raises.py"), "--json", str(tmp_path / "out.json")]
    ended = started.launch("compare", "2", *options)
    assert ended.returncode == 1
    first, *traced = ended.stderr.splitlines()
    assert first.endswith("error: raises.py, line 5: ValueError: a bigger model, please"), ended.stderr
    frames = [line.split(", ", 1)[1] for line in traced if line.startswith("  File")]
    assert frames == ["line 2, in build", "line 5, in helper"], ended.stderr


@pytest.mark.long
def test_under_plain_torchrun_each_rank_prints_its_error(tmp_path):
    ended = started.plain_torchrun(failing(tmp_path, 2, "raise ValueError('I have had enough')"), 2)
    assert ended.returncode == 1 and "[rank 1] error: I have had enough\n" in ended.stderr


def test_the_first_failure_is_the_one_that_made_the_others_fail():
    """Times are in whole seconds. A rank that torch killed 30 s after its SIGTERM is not the first, either."""

    def failure(exitcode: int, timestamp: int, text: str | None = None, lost: bool = False):
        message = "no file" if text is None else {"message": text, "extraInfo": {"lost": lost}}
        return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, message=message)

    waits = failure(1, 7, "[rank 0] error: Connection closed by peer\n", lost=True)
    raises = failure(2, 7, "[rank 1] error: too large\n")
    assert torchrun.report({0: waits, 1: raises, 2: failure(-15, 7)}) == ("[rank 1] error: too large\n", 2)
    text, status = torchrun.report({0: waits, 1: failure(-9, 37), 2: failure(-15, 8)})
    assert status == 1 and text.splitlines()[1].startswith("Rank(s) 1, 2 were still running")
    text, status = torchrun.report({0: waits, 1: failure(-9, 7)}, max_restarts=3)
    assert status == 137 and text.splitlines()[0] == "The ranks have failed 4 times. The last time:"
    assert text.splitlines()[1].startswith("error: rank 1 was killed by SIGKILL")
    assert "on the others" in torchrun.report({0: waits})[0]  # another machine's rank is the first
    assert torchrun.report({0: failure(1, 7, "")}) == ("", 1)  # it has printed why
    assert torchrun.report({0: failure(141, 7)}) == ("", 141)  # `| head`


@pytest.mark.long
@pytest.mark.parametrize("stage, fate", [(1, "os.kill(os.getpid(), 9)"), (3, "while alive(pids[0]): time.sleep(0.1)")])
def test_when_a_rank_dies_or_hangs_every_other_one_ends_with_an_error(tmp_path, stage, fate):
    """Nobody ends the others: they must do it themselves. A rank that hangs does so until they have."""
    program = failing(tmp_path, stage, fate.replace("alive(pids[0])", "os.path.exists(f'/proc/{pids[0]}')"))
    *others, last = started.on_ranks(program, 3 if stage == 1 else 2, ZERO_TIMEOUT=5)
    assert last.returncode == (-9 if stage == 1 else 1)
    for rank, other in enumerate(others):
        assert other.returncode == 1, other.stderr
        assert f"[rank {rank}] error: " in other.stderr and "another rank" in other.stderr.lower(), other.stderr
        assert "Warning" not in other.stderr


def work_that_takes_longer_than_a_collective() -> None:
    """`single` trains on rank 0 only, here with a first step that is longer than the group's timeout."""
    step = referee.Referee.step
    seconds = [6]

    def slow_step(self, engine, batch):
        time.sleep(seconds.pop() if seconds else 0)
        return step(self, engine, batch)

    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
    options = referee.arguments(["--engines", "single", "--preset", "toy", "--steps", "1", "--timed-steps", "1"])
    with mock.patch.object(referee.Referee, "step", slow_step):
        passes = referee.Referee(options, torch.zeros(100, dtype=torch.uint8), world)
        passes.time({"single": passes.train("single")})


@pytest.mark.long
def test_rank_0_alone_may_take_longer_than_a_collective():
    """The other ranks wait for it, and in no collective, which would end them."""
    own = pool.Pool(2, timeout=4)
    own.timeout = pool.TIMEOUT  # of the whole function
    try:
        own.run(work_that_takes_longer_than_a_collective, (), {})
    finally:
        own.kill()


@pytest.mark.long
def test_two_machines_on_loopback():
    """The lines of docs/machines.md, an agent of torchrun each, and a port that is free here."""
    port = started.free_port()
    page = (ROOT / "docs" / "machines.md").read_text()
    typed = r"^(NNODES=2 NODE_RANK=\d RDZV_ENDPOINT=localhost):29400 \./launch\.sh (.*)$"
    assert len(lines := re.findall(typed, page, re.MULTILINE)) == 2

    def machine(line):
        environment = dict(word.split("=") for word in line[0].split())
        environment["RDZV_ENDPOINT"] += f":{port}"
        return started.launch(*line[1].split(), "--preset", "toy", "--steps", "2", **environment)

    with ThreadPoolExecutor(2) as both:
        first, second = both.map(machine, lines)
    for node, result in enumerate((first, second)):
        assert result.returncode == 0, result.stderr[-3000:]
        assert f"--nnodes 2 --node-rank {node} --rdzv-backend static --rdzv-endpoint localhost:{port}" in result.stdout
        assert "Warning" not in result.stderr
    # One job of two ranks and not two of one: what is shared, what is sent, and who speaks.
    assert "2 rank(s), gloo" in first.stdout and "3.000 Ψ x (N-1)/N" in first.stdout, first.stdout
    assert "training step" not in second.stdout


def test_long_work_reports_its_progress(capsys, monkeypatch):
    assert list(progress.with_progress("abc", "letters")) == [*"abc"]
    assert capsys.readouterr().err == ""  # it was quick
    monkeypatch.setattr(progress, "QUIET", -1)
    assert list(progress.with_progress("abc", "letters")) == [*"abc"]
    first, _, last = capsys.readouterr().err.splitlines()
    assert first == "[1/3] letters: a" and last == "[3/3] letters: c, about 0 s left"
    list(progress.with_progress("abc", "letters", shown=False))
    assert capsys.readouterr().err == ""

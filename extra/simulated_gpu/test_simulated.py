"""The GPU path as users run it, and races in it, on simulated GPUs: ./launch.sh test --simulated-gpus N.

Without them all of this is skipped. tests/test_cuda.py runs there as well. A test fails if the detector has found
something in any process that the test has started (findings.py).
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import started
import torch
from gpu_ranks import OnGpus
from torch.distributed.fsdp import CPUOffloadPolicy

from zerolab.measure import report
from zerolab.run import engines
from zerolab.run.ranks import ROOT

if "SIMULATED_GPUS" not in os.environ:
    pytest.skip("./launch.sh test --simulated-gpus N", allow_module_level=True)
from extra.simulated_gpu import cases_simulated as cases

GPUS = torch.cuda.device_count()
RANKS = max(2, GPUS)  # on one GPU two ranks share it, over gloo
several = pytest.mark.skipif(GPUS < 2, reason="NCCL's ranks need a GPU each: two at least")
finds = pytest.mark.finds


def launch(*arguments) -> str:
    """Run `./launch.sh ...` to its end. Returns what it has printed."""
    done = started.launch(*map(str, arguments))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


# The commands.


COMPARED = {"compare-2-tiny": (2, "gloo"), "compare-1-fp32": (1, "nccl"), "compare-1-bf16": (1, "nccl")}
FILES = (*COMPARED, "host", "memory-1b", "memory-7b", "sweeps", "trace-zero3")


def small(command: report.Command) -> report.Command:
    """The same command with a small model, and with one of the tests. Its limit is not a GPU's."""
    line = re.sub(r"--preset \w+", "--preset toy", command.line)
    line = line.replace("--seq 512", "--seq 32").replace("test_cuda.py", "test_cuda.py -k ddp_leaves")
    return replace(command, line=line, limit=600)


@pytest.mark.skipif(GPUS > 1, reason="the rehearsal is for one GPU: --simulated-gpus 1")
def test_the_whole_report_of_one_gpu_is_rehearsed(tmp_path, monkeypatch):
    """Every command that it would run on a real card starts, ends and writes its file; the models are small."""
    folder = tmp_path / "report"
    chosen = [small(command) for command in report.chosen_commands(str(folder), gpus=1)]
    monkeypatch.setattr(report, "chosen_commands", lambda *_: chosen)
    assert report.main([str(folder), "--minutes", "60"]) == 0, (folder / "report.md").read_text()[:3000]
    page = (folder / "report.md").read_text()
    for command in chosen:
        assert f"`{command.line}`: done in " in page, page[:3000]
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in FILES}
    assert sorted(file.stem for file in folder.glob("*.json")) == sorted(FILES)
    for name, (number, backend) in COMPARED.items():
        compared = found[name]
        assert compared["match"] and (compared["world_size"], compared["backend"]) == (number, backend)
        for run in compared["runs"].values():  # the allocator rounds up
            assert run["step_ms"] > 0 and 0 < run["ledger_peak_bytes"] <= run["peak_bytes"]
    for row in found["memory-7b"]["engines"].values():
        assert row["peak_bytes"] > 0
    assert "Simulated GPU" in found["memory-7b"]["hardware"]


def test_the_allocators_peaks_are_those_of_the_dry_run():
    """To 0.25%."""
    code = "from extra.simulated_gpu import cases_simulated; cases_simulated.print_peaks('--preset', 'tiny', '4')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 5
    for name, (expected, peak) in found.items():
        assert abs(peak - expected) < 0.0025 * expected, name


def test_trace(tmp_path):
    launch("zero3", RANKS, "--preset", "toy", "--trace", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize("file", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda file: file.stem)
def test_notebooks(file, tmp_path):
    """Its cells, one after the other, without Jupyter, of which they need only `%%writefile`."""
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    code = []
    for cell in cells:
        first, _, rest = "".join(cell["source"]).partition("\n")
        if first.startswith("%%writefile "):
            text = f"open(f{first.split()[1]!r}, 'w').write({rest!r})"
        else:
            text = "\n".join(line for line in "".join(cell["source"]).split("\n") if not line.startswith("%"))
        code.append(text)
    (tmp_path / "cells.py").write_text("\n".join(code))
    small = {"ZERO_NOTEBOOK_PRESET": "toy", "ZERO_NOTEBOOK_RANKS": str(RANKS)}
    env = {**os.environ, **small, "ZERO_NOTEBOOK_DEVICE": "cuda", "MPLBACKEND": "agg"}
    command = [sys.executable, str(tmp_path / "cells.py")]
    done = subprocess.run(command, env=env, cwd=file.parent, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "The runs use: cuda" in done.stdout


# Groups.


def test_some_ranks_train_while_another_is_idle(monkeypatch, tmp_path):
    """On five GPUs, over NCCL with a `device_id`, where a new NCCL group needs all ranks. It also ends: see `close`."""
    monkeypatch.setenv("SIMULATED_GPUS", "5")  # of the ranks, which start here
    on_five = OnGpus()
    try:
        on_five(5, cases.some_ranks_train, stages=["zero1", "zero3"], folder=str(tmp_path))
    finally:
        on_five.close()


# Mistakes that a GPU would not report, and a simulated one does.


@pytest.fixture(scope="module")
def on_all(on_gpus):
    """`on_all(function, ...)` calls it on all ranks."""
    return partial(on_gpus, RANKS)


@finds
@pytest.mark.parametrize("case, words", {
    "freed_memory": ("add", "shape [64]", "memory was freed"),
    "unknown_operation": ("aten::_convert_weight_to_int4pack is not simulated", "cases_simulated.py"),
    "tensors_on_two_devices": ("same device", "add", "on the CPU"),
    "the_host_reads_before_a_copy_is_over": ("memcpy", "default stream", "the host reads", "pinned memory"),
}.items(), ids=str)  # fmt: skip
def test_what_is_wrong_is_named(on_all, case, words):
    for found in on_all(getattr(cases, case)):
        found = found if isinstance(found, str) else "\n".join(found)
        assert all(word in found for word in words), found


@finds
@several
def test_ranks_that_issue_different_collectives_are_named(on_all):
    from zerolab.run.pool import RankFailed

    for found in on_all(cases.different_collectives):
        assert "different collectives" in found and "all-reduce from 6 to 6 float32" in found, found
        assert "all-reduce from 8 to 8 float32" in found, found
    with pytest.raises(RankFailed):  # the group is of no use any more: the next case has new ranks
        on_all(cases.stop)


@finds
def test_a_host_that_touches_device_memory_is_named():
    code = "import ctypes, torch; ctypes.string_at(torch.ones(4, device='cuda').data_ptr(), 4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV and "the host reads device memory: bytes 0 to 1" in done.stderr, done


# Waits.


@several
@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy()}], ids=("on the GPU", "offload"))
@pytest.mark.parametrize("stage", engines.STAGES)
def test_a_step_waits_for_no_device(on_all, stage, options):
    """The host runs ahead of the GPU. With offload it waits once for each bucket's copies, before the update."""
    for found in on_all(cases.waits_of_a_step, stage=stage, options=options):
        buckets = found.pop("buckets")
        assert buckets > 2
        nothing = {"device": 0, "stream": 0, "event": 0}
        assert found.pop("step") == {**nothing, "event": buckets if options else 0}
        assert found == {"backward 0": nothing, "backward 1": nothing}


# Races.

OFFLOAD, LOW = {"offload": True}, cases.LOW
OPTIONS = [{}, LOW, OFFLOAD, {"offload": False}, {**OFFLOAD, **LOW}, {"find_unused": True}]
OF_ZERO3 = [
    {"prefetch": 0},
    {"prefetch": 2},
    {"reshard_after_forward": False},
    {"reshard_after_forward": False, **OFFLOAD},
]
REPLICAS = [{"replicas": True}, {"replicas": True, **OFFLOAD}] if GPUS > 1 else []
ALL = [(stage, options) for stage in engines.STAGES for options in OPTIONS + REPLICAS + OF_ZERO3 * (stage == "zero3")]


@pytest.mark.parametrize("stage, options", ALL, ids=str)
def test_no_races(on_all, stage, options):
    assert not any(found := on_all(cases.trains, stage=stage, options=options)), found


@pytest.mark.parametrize("stage", engines.STAGES)
def test_no_races_in_a_chapter(on_all, stage):
    assert not any(found := on_all(cases.chapter_trains, stage=stage)), found


def named(lines: list[str]) -> bool:
    """Each finding has the two operations, their streams and the bytes, or the engine has raised an error."""
    return bool(lines) and all("stream" in line and "bytes" in line or "is freed" in line for line in lines)


@finds
@several
@pytest.mark.parametrize("stage", engines.STAGES)
def test_copies_that_are_not_waited_for_are_found(on_all, stage):
    for found in on_all(cases.offloads_without_waiting, stage=stage):
        assert named(found), found
        print("\n".join(found[:2]))


@finds
@several
@pytest.mark.parametrize("stage", engines.STAGES)
def test_collectives_that_are_not_waited_for_are_found(on_all, stage):
    for found in on_all(cases.chapter_trains_without_waiting, stage=stage):
        assert named(found), found
        print("\n".join(found[:2]))


@pytest.mark.parametrize("of_a_checkpoint", (False, True), ids=("a state", "a checkpoint"))
@pytest.mark.parametrize("stage", engines.STAGES)
def test_loading_waits_for_copies(on_gpus, stage, of_a_checkpoint):
    """On one rank. Several ranks first agree, and the host waits for that, which hides the race.

    Reading a checkpoint hides it too, because torch waits for the device there, although it does not promise to. So
    this test begins after everything is read.
    """
    (found,) = on_gpus(1, cases.loads, stage=stage, of_a_checkpoint=of_a_checkpoint)
    assert not found, found

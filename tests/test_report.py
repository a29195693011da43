"""./launch.sh report on a CPU: a part that fails and one that hangs cost no other, and an interruption no result."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.measure import gpus
from harness.measure.report import __main__ as report
from harness.measure.report import figures, jobs, page, plan, results
from harness.run.model import PRESETS, preset

ROOT = Path(__file__).resolve().parent.parent


def start(folder: Path, *options: str, **environment: str) -> subprocess.Popen:
    """./launch.sh report, without a GPU and without the variables of a torchrun around us."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return subprocess.Popen(
        [str(ROOT / "launch.sh"), "report", str(folder), *options],
        env={**clean, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def read(folder: Path) -> tuple[dict, str]:
    return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """(exit status, what it printed, folder) of a report in which a part fails and another one hangs."""
    folder = tmp_path_factory.mktemp("report") / "folder"
    chosen = ("--only", "tests,memory,host", "--minutes", "3")
    process = start(folder, "--quick", *chosen, ZERO_REPORT_BREAK="tests:fail,memory:hang:3")
    said, _ = process.communicate(timeout=180)
    return process.returncode, said, folder


def test_a_failure_and_a_hang_cost_no_other_part(broken):
    status, said, folder = broken
    known, _ = read(folder)
    assert status == 1, said
    assert known["status"] == "done" and list(known["parts"]) == ["machine", "tests", "memory", "host"]
    found = {name: part["status"] for name, part in known["parts"].items()}
    assert found == {"machine": "done", "tests": "failed", "memory": "timed out", "host": "done"}, said
    assert known["machine"]["cores"] > 0 and known["machine"]["gpus"] == []
    (host,) = known["parts"]["host"]["jobs"]
    assert {"plain", "ddp", "zero1", "zero2", "zero3", "fsdp2"} == set(host["results"]["ms"])
    assert len(host["results"]["profile"]) == 10
    assert "./launch.sh bench --" in host["results"]["command"]  # to repeat: without a file that is gone
    assert "--json" not in host["results"]["command"]
    assert known["parts"]["memory"]["seconds"] < 10


def test_a_job_that_fails_costs_no_other_job_of_its_part(broken):
    _, _, folder = broken
    known, _ = read(folder)
    first, *others = known["parts"]["tests"]["jobs"]
    assert first["status"] == "failed" and "broken on purpose" in first["tail"]
    assert [job["status"] for job in others] == ["done"]
    counts = [row for job in others for row in job["results"]["tests"].values()]
    assert sum(row[0] for row in counts) > 5 and sum(row[1] for row in counts) == 0


def test_each_part_has_its_own_file(broken):
    _, _, folder = broken
    known, _ = read(folder)
    for name, part in known["parts"].items():
        assert json.loads((folder / f"{name}.json").read_text()) == part
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 5 * 10**6


def test_nothing_of_what_hung_is_left_and_it_says_where_it_was(broken):
    _, _, folder = broken
    known, _ = read(folder)
    said = known["parts"]["memory"]["jobs"][0]["tail"]
    assert not alive(int(re.search(r"with child (\d+)", said).group(1)))
    assert "Current thread" in said and "File" in said  # Python's fault handler


def test_the_page_says_what_failed_and_what_is_missing(broken):
    _, _, folder = broken
    _, text = read(folder)
    failed, missing = text.partition("## What failed")[2].split("## What this machine could not show")
    assert "broken on purpose" in failed and "hangs on purpose" in failed and "its limit was 3 s" in failed
    assert "no GPU" in missing and "--quick" in missing and "referee: left out by --only" in missing
    assert "| `zero3` |" in text and "passed" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) <= 9, line  # 8 columns
    everything = "".join(path.read_text(errors="ignore") for path in folder.rglob("*.*") if path.suffix != ".gz")
    assert str(ROOT) not in everything and sys.prefix not in everything


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_an_interrupted_report_keeps_what_it_has(tmp_path, number):
    folder = tmp_path / "folder"
    process = start(folder, "--quick", "--only", "tests,memory,host", ZERO_REPORT_BREAK="machine:fail,tests:hang")
    log, child = folder / "logs" / "tests-0.txt", None
    for _ in range(400):
        child = child or (log.exists() and re.search(r"with child (\d+)", log.read_text()))
        if child:
            break
        time.sleep(0.1)
    assert child and alive(int(child.group(1)))
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number, said
    assert not alive(int(child.group(1)))
    known, text = read(folder)
    assert known["status"] == "interrupted" and known["not_reached"] == ["memory", "host"]
    assert {name: part["status"] for name, part in known["parts"].items()} == {
        "machine": "failed", "tests": "interrupted",
    }  # fmt: skip
    assert "**Interrupted**" in text and "host: the report ended before" in text


@pytest.mark.parametrize(
    "arguments, words",
    (
        (["--minutes", "0"], ["--minutes", "0"]),
        (["--minutes", "nan"], ["--minutes", "nan"]),
        (["--only", "weather"], ["'weather'", "referee"]),
        (["--only", ","], ["--only is empty"]),
        (["--fast"], ["--fast"]),
    ),
    ids=str,
)
def test_mistakes_in_the_options(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        report.arguments([str(tmp_path / "new"), *arguments])
    said = capsys.readouterr().err
    assert left.value.code == 2 and all(word in said for word in words), said
    assert not (tmp_path / "new").exists()


def test_a_folder_that_has_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine", tmp_path / "mine" / "below"):
        with pytest.raises(SystemExit) as left:
            report.arguments([str(folder)])
        assert left.value.code == 2 and str(folder) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# The plan, on machines that are not here.


def a_machine(count: int, gigabytes: int = 80) -> dict:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": gigabytes * 10**9, "capability": "9.0",
           "multiprocessors": 132}  # fmt: skip
    return {"gpus": [gpu] * count, "pytest": "9", "python": "3.12", "torch": "2.11", "bf16": True}


@pytest.mark.parametrize("quick", (False, True))
@pytest.mark.parametrize("count", (0, 1, 2, 8))
def test_every_command_of_the_plan_is_one_that_its_program_takes(count, quick, monkeypatch):
    """The options of each job, as the program that they are for reads them; and ranks that the GPUs have room for."""
    import torch
    from parts import STAGES

    import fsdp2_compare
    from harness.measure import bench, dry_run, sweeps, walkthrough
    from harness.run import process_group

    parsers = {"fsdp2_compare.py": fsdp2_compare.arguments, "harness.measure.dry_run": dry_run.arguments,
               "harness.measure.sweeps": sweeps.arguments, "harness.measure.bench": bench.arguments}  # fmt: skip
    for name, stage in STAGES.items():
        parsers[f"{name}.py"] = lambda argv, stage=stage: walkthrough.arguments(stage, "A chapter.", argv)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    seen = set()
    for part in plan.PARTS:
        for job in part.jobs(a_machine(count), quick):
            argv, ranks = [word.replace("{file}", os.devnull) for word in job.argv], 1
            if argv[:2] == ["-m", "torch.distributed.run"]:
                ranks, argv = int(argv[4]), argv[5:]
            argv = argv[1:] if argv[0] == "-m" else argv
            if argv[0] in parsers:
                options = parsers[argv[0]](argv[1:])
                if ranks > 1 or "--backend" in argv:
                    process_group.choose(options.backend, options.device, 0, ranks, count)
            else:
                assert argv[0] in ("pytest", "harness.measure.report.machine")
                assert argv[0] != "pytest" or (ROOT / argv[1]).exists()
            seen.add(job.about.get("kind", part.name))
    assert seen == {"machine", "tests", "referee", "memory", "timeline", "sweeps", "host"}


def test_the_referee_covers_what_the_machine_has():
    one = [job.name for job in plan.referee_jobs(a_machine(1), quick=False)]
    for words in ("1 rank over NCCL", "2 ranks that share", "4 ranks that share"):
        assert any(words in name for name in one), one
    for preset_name in ("tiny", "small", "medium", "1b"):
        for dtype in ("fp32", "bf16"):
            assert f"{preset_name}, {dtype}, 1 rank over NCCL" in one
    eight = [job.name for job in plan.referee_jobs(a_machine(8), quick=False)]
    assert any("8 ranks over NCCL" in name for name in eight) and not any("share" in name for name in eight)
    skipped = {job.name: job.skip for job in plan.referee_jobs(a_machine(1, gigabytes=16), quick=False) if job.skip}
    assert set(skipped) == {"1b, fp32, 1 rank over NCCL", "1b, bf16, 1 rank over NCCL"}
    (reason, _) = skipped.values()
    assert "17 GB" in reason and "16" in reason


def test_the_plans_numbers_of_parameters_are_the_presets():
    import torch

    from harness.run.model import GPT

    for name, number in plan.PARAMETERS.items():
        with torch.device("meta"):
            assert sum(param.numel() for param in GPT(PRESETS[name]).parameters()) == number


def test_time_limits():
    """Whoever is quick leaves time; if all before take as much as they may, the last still gets what is guaranteed."""
    total, shares = 100.0, 5
    each, left = total / shares, total
    assert plan.limit(left, 0, each) == total
    for later in reversed(range(shares)):
        limit = plan.limit(left, later, each)
        assert limit >= plan.GUARANTEED * each - 1e-9
        left -= limit
    assert left == pytest.approx(0)


def test_larger_models_are_not_tried_after_one_that_was_out_of_memory(tmp_path, monkeypatch):
    sizes = {"small": 1, "large": 3, "medium": 2, "elsewhere": 3}
    planned = [jobs.Job(name, ["-c", "raise RuntimeError('torch.OutOfMemoryError: CUDA out of memory.')"
                               if name == "medium" else "open(r'{file}', 'w').write('{}')"], name, 1, {},
                        "" if name == "elsewhere" else "here", size)
               for name, size in sorted(sizes.items(), key=lambda entry: entry[1])]  # fmt: skip
    part = plan.Part("referee", "The referee", 1.0, lambda machine, quick: planned)
    monkeypatch.setattr(results, "read", lambda kind, file, keep_as=None: {"runs": {}} if file.exists() else None)
    done = report.Report(report.arguments([str(tmp_path / "new")]))
    done.part(part)
    found = {job["name"]: job["status"] for job in done.known["parts"]["referee"]["jobs"]}
    assert found == {"small": "done", "medium": "out of memory", "large": "skipped", "elsewhere": "done"}
    assert done.known["parts"]["referee"]["status"] == "done"  # a result, and no failure


def test_a_job_for_which_no_time_is_left_is_not_started(tmp_path):
    """Three jobs that take 0.5 s each, 0.6 s in all, and at least 0.3 for each that is started."""
    wait = ["-c", "import time; time.sleep(0.5); open(r'{file}', 'w').write('{\"here\": 1}')"]
    planned = [jobs.Job(str(number), wait, "", 1.0, {"kind": "referee"}) for number in range(3)]
    done = report.Report(report.arguments([str(tmp_path / "new"), "--only", "referee"]))
    done.least, done.options.minutes = 0.3, 0.6 / 60
    done.part(plan.Part("referee", "The referee", 4.5, lambda machine, quick: planned))
    found = [(job["status"], job.get("skip", "")) for job in done.known["parts"]["referee"]["jobs"]]
    assert found[0][0] == "timed out" and found[-1][0] == "skipped" and "no time" in found[-1][1], found


def test_a_folder_that_is_too_large_to_send_loses_its_largest_traces(tmp_path):
    done = report.Report(report.arguments([str(tmp_path / "new")]))
    for number, size in enumerate((4, 2, 1)):
        (tmp_path / "new" / f"trace-zero{number}.json.gz").write_bytes(os.urandom(size * 10**6))
    done.shrink()
    assert [path.name for path in sorted((tmp_path / "new").glob("trace-*"))] == [
        "trace-zero1.json.gz", "trace-zero2.json.gz",
    ]  # fmt: skip
    assert "trace-zero0.json.gz (4.0 MB)" in done.known["notes"][0]


# What is kept, on results that are known.


def test_overlap_of_compute_and_collectives():
    def event(lane, start, length, rank=0):
        return {"ph": "X", "pid": rank, "cat": lane, "ts": 1000 + start, "dur": length}

    events = [event("steps", 0, 100), event("compute", 0, 40), event("compute", 30, 30), event("compute", 80, 20),
              event("collectives", 50, 20), event("collectives", 55, 35), event("compute", -500, 100),
              event("collectives", 0, 99, rank=1)]  # fmt: skip
    found = results.overlap({"traceEvents": events, "otherData": {"step_begins_ms": 1.0}})
    assert found == {"step_ms": 0.1, "compute_ms": 0.08, "collectives_ms": 0.04, "both_ms": 0.02, "collectives": 2}


def test_what_the_tests_said_is_kept(tmp_path):
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase name="test_a[1]"/>'
        '<testcase name="test_a[2]"><failure message="assert 1 == 2"/></testcase>'
        '<testcase name="test_b[1]"><skipped message="needs a GPU"/></testcase>'
        '<testcase name="test_b[2]"><skipped message="needs a GPU"/></testcase></testsuite></testsuites>'
    )
    found = results.tests(file)
    assert found["tests"] == {"test_a": [1, 1, 0], "test_b": [0, 0, 2]}
    assert found["said"] == ["FAILED test_a[2]: assert 1 == 2", "2 skipped: needs a GPU"]


def test_the_page_of_a_gpu(tmp_path):
    """Made-up results of a machine with a GPU: the columns that a CPU has not, and rows that are out of memory."""
    run = {"losses": [1.0], "held_bytes": {"parameters": 4e6, "gradients": 4e6, "optimizer": 8e6}, "peak_bytes": 20e6,
           "reserved_bytes": 24e6, "sent_bytes": 0, "difference": 0.0, "tolerance": 0.0, "match": True,
           "step_ms": 10.0, "tokens_per_s": 1e5, "mfu": 0.4321}  # fmt: skip
    off = {**run, "difference": 0.5, "match": False, "step_ms": 12.5}
    memory = {"held_bytes": {"parameters": 4e9}, "formula_bytes": 4e9, "peak_bytes": 11e9, "dry_run_peak_bytes": 10e9,
              "ledger_peak_bytes": 11e9}  # fmt: skip
    rows = {
        "referee": {"device": "cuda", "runs": {"ddp": run, "zero3": run, "fsdp2": off}},
        "memory": {"device": "cuda", "parameters": 7e9, "engines": {
            "ddp": {"out_of_memory": "CUDA out of memory", "dry_run_peak_bytes": 131e9}, "zero3": memory}},
    }  # fmt: skip
    parts = {name: {"title": name, "status": "done", "jobs": [
        {"name": name, "shown": "", "status": "done", "seconds": 1.0, "results": found}]}
        for name, found in rows.items()}  # fmt: skip
    known = {"command": "", "date": "", "seconds": 60, "status": "done", "quick": False, "machine": a_machine(1),
             "parts": parts, "left_out": [], "not_reached": [], "notes": []}  # fmt: skip
    text = page.page(known, tmp_path)
    assert "# 1 x NVIDIA H100 80GB HBM3" in text
    assert "| `zero3` | 0, to the bit | 16.0 | 20.0 | 24.0 | 10.0 | 1.00 | 43.2% |" in text
    assert "equal to DDP to the bit, at every step and on every rank: `zero3`; **does not match**: `fsdp2`" in text
    assert "| `ddp` | out of memory |" in text and "| 11.00 | 10.00 | +10.00% | +0.00% |" in text
    assert "0.80" in text  # zero3 beside fsdp2
    assert "could not be written" not in text and "one GPU" in text and "no MFU" not in text


def test_the_figures_of_a_report(tmp_path):
    """Two rows of a memory table from two jobs are drawn together; a figure that cannot be drawn costs no other."""
    pytest.importorskip("matplotlib")
    referee = json.loads((ROOT / "results" / "referee-cpu-2ranks-3.json").read_text())
    trace = (ROOT / "results" / "trace-zero3-cpu-2ranks.json").read_bytes()
    for number in range(2):
        with gzip.open(tmp_path / f"trace-zero3-{number}.json.gz", "wb") as packed:
            packed.write(trace)
    (tmp_path / "referee.json").write_text(json.dumps({"jobs": [{"results": referee}]}))
    (tmp_path / "sweeps.json").write_text(json.dumps({"jobs": [{"results": {"sweeps": {"prefetch": {"0": {}}}}}]}))
    assert figures.main(tmp_path) == 1
    assert {path.name for path in tmp_path.glob("*.png")} == {"losses.png", "lanes.png"}


# The peak rates, which MFU needs.


@pytest.mark.parametrize(
    "name, bf16, fp32",
    (
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("Tesla T4", None, 8.1e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        # Near to a known one by name, and another model: there is no rate for it.
        ("NVIDIA L40S", None, None),
        ("NVIDIA L40", None, None),
        ("NVIDIA T400 4GB", None, None),
        ("NVIDIA GeForce RTX 3090 Ti", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA GeForce RTX 4090 SUPER", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA H100 80GB HBM2e", None, None),
        ("NVIDIA GH200 480GB", None, None),
        ("GRID A100-40C", None, None),
        ("", None, None),
        ("NVIDIA GeForce GTX 1080", None, None),
    ),
)
def test_peak_rates(name, bf16, fp32):
    assert (gpus.peak_flops(name, "bf16"), gpus.peak_flops(name, "fp32")) == (bf16, fp32)


def test_flops_per_token_are_those_that_torch_counts():
    """Against torch's own counter over forward and backward, which leaves out what is no matrix product."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from harness.run.model import GPT, next_token_loss

    config = preset("toy")
    model, tokens = GPT(config), torch.zeros(2, config.seq + 1, dtype=torch.int64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    ours = gpus.flops_per_token(config, plan.PARAMETERS["toy"], config.seq) * 2 * config.seq
    assert counted.get_total_flops() == pytest.approx(ours, rel=0.03)  # biases and norms are no matrix products


@pytest.mark.parametrize(
    "name, ranks, gpus_here, divided_by", (("ddp", 2, 1, 1), ("ddp", 8, 8, 8), ("single", 8, 8, 1))
)
def test_mfu_is_of_the_gpus_in_use(name, ranks, gpus_here, divided_by, monkeypatch):
    import torch

    import fsdp2_compare as referee

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus_here)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    options = referee.arguments(["--preset", "small", "--dtype", "bf16"])
    me = referee.Rank(0, ranks, torch.device("cuda", 0), "nccl", "")
    found = referee.Referee(options, torch.zeros(1000, dtype=torch.uint8), me).rates(name, 1e6)
    flops = 6 * (plan.PARAMETERS["small"] - 512 * 768) + 12 * 12 * 768 * 512
    assert found["mfu"] == pytest.approx(flops * 1e6 / (989e12 * divided_by), abs=1e-4)
    working = 1 if name == "single" else ranks
    assert found["tokens_per_s_per_rank"] == round(1e6 / working, 1)
    assert found["flops_per_s_per_rank"] == pytest.approx(flops * 1e6 / working)


def test_a_dry_run_keeps_what_it_has_after_each_engine():
    from harness.measure import dry_run

    kept = []
    options = dry_run.arguments(["--preset", "toy", "--ranks", "2", "--engines", "zero1,zero3"])
    last = dry_run.measure_all(options, keep=lambda found: kept.append(json.loads(json.dumps(found))))
    assert [list(found["engines"]) for found in kept] == [["zero1"], ["zero1", "zero3"]]
    assert kept[-1] == json.loads(json.dumps(last))

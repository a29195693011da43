"""The parts of a report, in the order in which they run, and what each starts on a machine with so many GPUs.

Nothing here imports torch: a report of a machine on which torch does not start says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

from harness.measure.report.jobs import Job

# Parameters of the presets (a test counts them), to skip what cannot fit: 16 bytes for each without sharding.
PARAMETERS = {"toy": 34_688, "tiny": 4_837_376, "small": 85_645_824, "medium": 303_622_144, "1b": 1_076_899_840}
STEPS = {"toy": (8, 4, 2), "tiny": (20, 10, 4), "small": (10, 8, 4), "medium": (6, 6, 2), "1b": (4, 4, 1)}
ENGINES = "ddp,zero1,zero_redundancy_optimizer,zero2,fsdp2_no_reshard,zero3,fsdp2"


@dataclass(frozen=True)
class Part:
    """One part: `share` of the minutes is what it is expected to take; `jobs(machine, quick)` what it starts."""

    name: str
    title: str
    share: float
    jobs: Callable[[dict, bool], list[Job]]


@dataclass(frozen=True)
class Place:
    """Where ranks run: how many, and the options that put them there. `per_gpu` of them share a GPU."""

    words: str
    ranks: int
    options: tuple[str, ...]
    per_gpu: int = 0


def places(machine: dict) -> list[Place]:
    """The ways to run ranks here, the most telling one first."""
    gpus = len(machine.get("gpus", ()))
    if gpus == 0:
        return [Place(f"{ranks} ranks over gloo on the CPU", ranks, ("--device", "cpu")) for ranks in (2, 4)]
    nccl, gloo = ("--backend", "nccl"), ("--backend", "gloo")
    if gpus == 1:
        shared = [Place(f"{n} ranks that share the GPU over gloo", n, gloo, n) for n in (2, 4)]
        return [Place("1 rank over NCCL", 1, nccl, 1), *shared]
    fewer = [Place("2 ranks over NCCL", 2, nccl, 1)] if gpus > 2 else []
    return [Place(f"{gpus} ranks over NCCL", gpus, nccl, 1), *fewer, Place("1 rank over NCCL", 1, nccl, 1)]


def several(machine: dict) -> Place:
    """Where collectives have something to send: a GPU per rank, else two ranks that share one, else the CPU."""
    return next(place for place in places(machine) if place.ranks > 1)


def on_ranks(place: Place, script: list[str], options: list[str]) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(place.ranks), *script, *options,
            *place.options]  # fmt: skip


def shown(place: Place, command: str, options: list[str]) -> str:
    return " ".join(["./launch.sh", command, str(place.ranks), *options, *place.options])


# The parts.


def machine_jobs(machine: dict, quick: bool) -> list[Job]:
    return [Job("machine", ["-m", "harness.measure.report.machine", "{file}"], "nvidia-smi, torch and the system")]


def test_jobs(machine: dict, quick: bool) -> list[Job]:
    """On GPUs tests/test_cuda.py, all of it; on a CPU a selection of the suite, and that file's cases on the CPU."""
    missing = "" if machine.get("pytest") or not machine.get("python") else "this Python has no pytest"
    options = ["-q", "-p", "no:cacheprovider", "--color=no"]
    # Several files in one process are quicker, and one process for all would lose all when it hangs.
    on_cpu = [("overlap", ["tests/test_overlap.py"], []), ("cuda", ["tests/test_cuda.py"], [])]
    if machine.get("gpus"):
        chosen = on_cpu[1:]
    elif quick:
        chosen = on_cpu
    else:
        chosen = [
            ("overlap, cuda", ["tests/test_overlap.py", "tests/test_cuda.py"], []),
            ("equivalence", ["tests/test_equivalence.py"], ["-k", "to_the_bit or integers"]),
            ("bytes, traffic", ["tests/test_memory_held.py", "tests/test_traffic.py"], []),
        ]
    return [
        Job(name, ["-m", "pytest", *files, *more, *options, "--junit-xml={file}"],
            " ".join(["./launch.sh test", *files, *(f'"{word}"' if " " in word else word for word in more)]),
            1.0, {"kind": "tests"}, skip=missing)
        for name, files, more in chosen
    ]  # fmt: skip


def referee_jobs(machine: dict, quick: bool) -> list[Job]:
    here = places(machine)
    if not machine.get("gpus"):
        chosen = [(here[0], "toy", "fp32"), (here[0], "toy", "bf16")] if quick else [
            (here[0], "tiny", "fp32"), (here[0], "tiny", "bf16"), (here[1], "toy", "fp32"), (here[1], "toy", "bf16")
        ]  # fmt: skip
    elif quick:
        chosen = [(here[0], "tiny", "fp32"), (here[0], "tiny", "bf16"), (here[1], "tiny", "fp32")]
    else:
        first, second, last = here[0], here[1], here[-1]
        chosen = [(first, "tiny", "fp32"), (first, "tiny", "bf16"), (second, "tiny", "fp32"), (first, "small", "bf16"),
                  (first, "medium", "bf16"), (first, "1b", "bf16"), (first, "small", "fp32"), (second, "tiny", "bf16"),
                  (first, "medium", "fp32"), (first, "1b", "fp32"), (second, "small", "bf16"), (last, "tiny", "fp32"),
                  (last, "tiny", "bf16")]  # fmt: skip
        chosen = list(dict.fromkeys(chosen))
    found = []
    for place, preset, dtype in chosen:
        shared = place.options[-1] == "gloo"  # whether FSDP1 runs there nobody has seen: it gets a job of its own
        engines = ENGINES + ("" if shared else ",fsdp1")
        engines = f"single,{engines}" if preset in ("toy", "tiny") else engines
        found.append(_referee(place, preset, dtype, engines, machine))
        if shared and (preset, dtype) == ("tiny", "fp32") and not any("FSDP1" in job.name for job in found):
            job = _referee(place, preset, dtype, "ddp,fsdp1", machine)
            job.name, job.weight = f"FSDP1, {job.name}", 0.5
            found.append(job)
    return found


def _referee(place: Place, preset: str, dtype: str, engines: str, machine: dict) -> Job:
    steps, timed, batch = STEPS[preset] if machine.get("gpus") or preset == "toy" else (6, 5, 4)
    options = ["--preset", preset, "--dtype", dtype, "--steps", str(steps), "--timed-steps", str(timed),
               "--batch", str(batch), "--engines", engines]  # fmt: skip
    reason, needed = "", 16 * PARAMETERS[preset] * max(1, place.per_gpu)
    memory = min((gpu["memory_bytes"] for gpu in machine.get("gpus", ())), default=None)
    if memory and needed > memory:
        reason = f"DDP needs more than {needed / 1e9:.0f} GB for it, and the GPU has {memory / 1e9:.0f}"
    if dtype == "bf16" and machine.get("bf16") is False:
        reason = "the GPU has no bfloat16"
    return Job(
        f"{preset}, {dtype}, {place.words}", on_ranks(place, ["fsdp2_compare.py"], [*options, "--json", "{file}"]),
        shown(place, "compare", options), 2.0 if preset in ("medium", "1b") else 1.0,
        {"kind": "referee", "place": place.words, "preset": preset, "dtype": dtype},
        f"{dtype}, {place.words}", PARAMETERS[preset], reason,
    )  # fmt: skip


def memory_jobs(machine: dict, quick: bool) -> list[Job]:
    def job(preset: str, device: str, engines: str, weight: float) -> Job:
        options = ["--preset", preset, "--ranks", "8", "--engines", engines, "--device", device]
        words = "by real allocations" if device == "cuda" else "dry run"
        return Job(f"{preset}, {words}, {engines.replace(',', ', ')}",
                   ["-m", "harness.measure.dry_run", *options, "--json", "{file}"],
                   " ".join(["./launch.sh memory", *options]), weight,
                   {"kind": "memory", "preset": preset})  # fmt: skip

    if not machine.get("gpus"):
        return [job("tiny" if quick else "7b", "fake", "ddp,zero1,zero2,zero3,fsdp2_no_reshard,fsdp2", 1)]
    if quick:
        return [job("1b", "cuda", "ddp,zero1,zero2,zero3,fsdp2", 1)]
    # Two processes: what kills one (an illegal access, say) leaves the other.
    return [job("7b", "cuda", "zero3,zero2,zero1,ddp", 4), job("7b", "cuda", "fsdp2,fsdp2_no_reshard", 2),
            job("1b", "cuda", "ddp,zero1,zero2,zero3,fsdp2_no_reshard,fsdp2", 2)]  # fmt: skip


def timeline_jobs(machine: dict, quick: bool) -> list[Job]:
    """A trace per stage, and ZeRO-3's without prefetching; then the sweeps."""
    place, gpus = several(machine), machine.get("gpus")
    preset = ("tiny" if quick else "small") if gpus else "toy" if quick else "tiny"
    stages = [("zero3", ["--prefetch", "1"]), ("zero3", ["--prefetch", "0"]), ("zero2", []), ("zero1", [])]
    found = []
    for stage, own in stages[:2] if quick else stages:
        options = ["--preset", preset, "--steps", "3", *own]
        words = f"{stage}{', prefetch ' + own[1] if own else ''}, {preset}, {place.words}"
        found.append(Job(words, on_ranks(place, [f"{stage}.py"], [*options, "--trace", "{file}"]),
                         shown(place, stage, options), 1.0,
                         {"kind": "timeline", "stage": stage, "prefetch": own[1] if own else ""}))  # fmt: skip
    return found


def sweep_jobs(machine: dict, quick: bool) -> list[Job]:
    place, gpus = several(machine), machine.get("gpus")
    preset = ("tiny" if quick else "small") if gpus else "toy" if quick else "tiny"
    found = []
    for sweep in ("prefetch",) if quick else ("prefetch", "bucket size", "units", "activations"):
        options = ["--preset", preset, "--rounds", "3" if quick else "6", "--only", sweep]
        line = shown(place, "sweeps", [f'"{word}"' if " " in word else word for word in options])
        found.append(Job(f"{sweep}, {preset}, {place.words}",
                         on_ranks(place, ["-m", "harness.measure.sweeps"], [*options, "--json", "{file}"]),
                         line, 2.0 if sweep == "bucket size" else 1.0, {"kind": "sweeps"}))  # fmt: skip
    return found


def host_jobs(machine: dict, quick: bool) -> list[Job]:
    def job(device: str, profile: str) -> Job:
        options = ["--host", "--rounds", "4" if quick else "25", "--profile", profile, "--device", device]
        where = "the GPU's kernels not waited for" if device == "cuda" else "tensors on the CPU"
        return Job(f"host time, {where}, profile of {profile}",
                   ["-m", "harness.measure.bench", *options, "--json", "{file}"],
                   " ".join(["python -m harness.measure.bench", *options]), 1.0,
                   {"kind": "host", "device": device})  # fmt: skip

    on_cpu = [job("cpu", "zero3")]
    return on_cpu + [job("cuda", "zero3")] if machine.get("gpus") else on_cpu


PARTS = (
    Part("machine", "The machine", 0.3, machine_jobs),
    Part("tests", "Tests", 1.7, test_jobs),
    Part("referee", "The referee", 4.5, referee_jobs),
    Part("memory", "Memory: one rank of 8", 1.3, memory_jobs),
    Part("timeline", "Timelines", 0.8, timeline_jobs),
    Part("sweeps", "Sweeps", 0.7, sweep_jobs),
    Part("host", "The host's time per step", 0.4, host_jobs),
)
GUARANTEED = 0.75  # of its share: what earlier parts leave a part, however long they take


def limit(left: float, later: float, each: float) -> float:
    """Seconds that what comes next may take of those `left`, with `later` shares of `each` seconds still to come.

    Somebody who is quick leaves time for the others; somebody who hangs cannot take what is guaranteed to them.
    """
    return left - GUARANTEED * later * each

"""The commands of a report, in the order in which they run: what tells most comes first, as the time may not suffice.

Each is a line that can be repeated by hand. Nothing here imports torch: it may be what does not start.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

PARTS = ("machine", "tests", "referee", "memory", "timeline", "sweeps", "host")
# Parameters of the presets (a test counts them), to leave out what cannot fit: 16 bytes for each without sharding.
PARAMETERS = {"toy": 34_688, "tiny": 4_837_376, "small": 85_645_824, "medium": 303_622_144, "1b": 1_076_899_840}
# Steps for the losses, steps that are timed, sequences per rank.
STEPS = {"toy": (8, 4, 2), "tiny": (20, 10, 4), "small": (10, 8, 4), "medium": (6, 6, 2), "1b": (4, 4, 1)}
ENGINES = "ddp,zero1,zero_redundancy_optimizer,zero2,fsdp2_no_reshard,zero3,fsdp2"
FIGURES = {  # which part's results each shows, of how many commands, and what
    "losses": ("referee", 1, "Losses of all engines, and how far each is from the reference"),
    "memory": ("memory", 1, "Held and at the peak, per engine"),
    "lanes": ("timeline", 2, "ZeRO-3's step: what a rank computes, and which collectives are under way"),
    "sweeps": ("sweeps", 1, "What the options cost"),
}


@dataclass
class Command:
    """`line` is what one would type, but for `option` and the file that it names, where the results go.

    `seconds` is its time limit in a report of ten minutes; `skip` a reason not to start it.
    """

    part: str
    line: str
    name: str = ""
    seconds: float = 120.0
    option: str = "--json"
    skip: str = ""

    def argv(self, file: Path) -> list[str]:
        program, *words = shlex.split(self.line)
        start = [sys.executable] if program == "python" else ["bash", program]
        return [*start, *words, *([self.option, str(file)] if self.option else [])]


@dataclass(frozen=True)
class Place:
    """Where ranks run: how many, the option that puts them there, and how many of them share a GPU."""

    words: str
    ranks: int
    option: str
    per_gpu: int = 0


MACHINE = Command("machine", "python -m harness.measure.report.machine", seconds=60)


def places(gpus: int) -> list[Place]:
    """The ways to run ranks on a machine with so many GPUs, the most telling one first."""
    if gpus == 0:
        return [Place(f"{ranks} ranks over gloo on the CPU", ranks, "--device cpu") for ranks in (2, 4)]
    one = Place("1 rank over NCCL", 1, "--backend nccl", 1)
    if gpus == 1:
        return [one, *(Place(f"{n} ranks that share the GPU over gloo", n, "--backend gloo", n) for n in (2, 4))]
    return [*(Place(f"{n} ranks over NCCL", n, "--backend nccl", 1) for n in dict.fromkeys((gpus, 2))), one]


def planned(machine: dict, quick: bool) -> list[Command]:
    """All commands but MACHINE and the figures, for what it said of the machine (nothing, if it failed)."""
    gpus = len(machine.get("gpus", ()))
    first, *others = places(gpus)
    several = next(place for place in (first, *others) if place.ranks > 1)  # where collectives have something to send
    small = "toy" if quick and not gpus else "tiny"

    # On GPUs tests/test_cuda.py, all of it; on a CPU that file's cases for a CPU, and some of the suite.
    # Several processes: one for all would lose all when it hangs.
    files = ["tests/test_cuda.py"] + ["tests/test_overlap.py"] * (not gpus)
    if not gpus and not quick:
        files += ["tests/test_equivalence.py -k 'to_the_bit or integers'", "tests/test_memory_held.py"]
    skip = "" if machine.get("pytest") or not machine.get("python") else "this Python has no pytest"
    found = [Command("tests", f"./launch.sh test {file} -q -rfEs", option="--junit-xml", skip=skip) for file in files]
    found += [referee(machine, first, small, "fp32"), referee(machine, several, small, "bf16")]

    # On a GPU by real allocations, and FSDP2 in a process of its own: what kills one leaves the other.
    ours, theirs, device = "ddp,zero1,zero2,zero3", "fsdp2_no_reshard,fsdp2", "cuda" if gpus else "fake"
    runs = [(("1b" if gpus else "tiny") if quick else "7b", engines)
            for engines in ([ours, theirs] if gpus else [f"{ours},{theirs}"])]  # fmt: skip
    found += [Command("memory", f"./launch.sh memory --preset {preset} --ranks 8 --engines {engines} --device {device}")
              for preset, engines in runs]  # fmt: skip

    model = small if quick or not gpus else "small"
    stages = ["zero3 {} --prefetch 1", "zero3 {} --prefetch 0", "zero2 {}", "zero1 {}"]
    found += [Command("timeline", f"./launch.sh {stage.format(several.ranks)} --preset {model} --steps 3 {several.option}",
                      option="--trace") for stage in (stages[:2] if quick else stages)]  # fmt: skip
    chosen = "--rounds 3 --only prefetch" if quick else "--rounds 6"
    found.append(Command("sweeps", f"./launch.sh sweeps {several.ranks} --preset {model} {chosen} {several.option}",
                         seconds=180))  # fmt: skip
    host = f"python -m harness.measure.bench --host --rounds {4 if quick else 25} --profile zero3 --device"
    found += [Command("host", f"{host} {device}") for device in (("cpu", "cuda") if gpus else ("cpu",))]
    if quick:
        return found

    dtypes = ("bf16", "fp32")
    found.append(referee(machine, first, "tiny", "bf16"))
    found += [referee(machine, place, "tiny" if gpus else "toy", dtype) for place in others for dtype in dtypes]
    # FSDP1 is no engine of the referee's unless asked for; where ranks share a GPU it may fail, and so it is alone.
    found.append(referee(machine, several, "tiny", "fp32", "ddp,fsdp1"))
    if gpus:
        found += [referee(machine, first, preset, dtype) for dtype in dtypes for preset in ("small", "medium", "1b")]
        found.append(referee(machine, several, "small", "bf16"))
    return list({command.line: command for command in found}.values())  # each once


def referee(machine: dict, place: Place, preset: str, dtype: str, engines: str = "") -> Command:
    steps, timed, batch = STEPS[preset] if machine.get("gpus") or preset == "toy" else (6, 5, 4)
    name = f"{preset}, {dtype}, {place.words}" + (f", {engines}" if engines else "")
    # `single` computes the batches of all ranks: too many for a large model.
    engines = engines or ("single," if preset in ("toy", "tiny") else "") + ENGINES
    line = f"./launch.sh compare {place.ranks} --preset {preset} --dtype {dtype} --steps {steps} --timed-steps {timed}"
    skip, needed = "", 16 * PARAMETERS[preset] * max(1, place.per_gpu)
    memory = min((gpu["memory_bytes"] for gpu in machine.get("gpus", ())), default=needed)
    if needed > memory:
        skip = f"DDP needs more than {needed / 1e9:.0f} GB for it, and the GPU has {memory / 1e9:.0f}"
    if dtype == "bf16" and machine.get("bf16") is False:
        skip = "the GPU has no bfloat16"
    return Command("referee", f"{line} --batch {batch} --engines {engines} {place.option}", name, skip=skip)


def figures(folder: Path, machine: dict) -> list[Command]:
    """What can be drawn of the results that are there."""
    skip, found = "" if machine.get("matplotlib") else "this Python has no matplotlib", []
    for name, (part, most, _) in FIGURES.items():
        files = [shlex.quote(str(file)) for file in sorted(folder.glob(f"{part}-*.json"))[:most]]
        line = f"./launch.sh figures {name} --json {' '.join(files)} --out {shlex.quote(str(folder))}"
        found += [Command("figures", line, name, 60, "", skip)] if files else []
    return found

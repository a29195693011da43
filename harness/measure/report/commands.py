"""The commands of a report, in the order in which they run: what tells most comes first, as the time may not suffice.

Each is a line that can be repeated by hand. torch is not imported before it is known to start.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PARTS = ("machine", "tests", "referee", "memory", "timeline", "sweeps", "host")
FSDP1 = "ddp,fsdp1"  # which the referee runs only where it is asked for
FIGURES = {"losses": ["referee-1.json"], "memory": ["memory-1.json"], "sweeps": ["sweeps-1.json"],
           "lanes": ["timeline-1.json", "timeline-2.json"]}  # fmt: skip


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


class Place(NamedTuple):
    """Where ranks run: how many, and the option that puts them there."""

    words: str
    ranks: int
    option: str


MACHINE = Command("machine", "python -m harness.measure.report.machine", seconds=60)


def places(gpus: int, backend: str = "nccl") -> list[Place]:
    """The ways to run ranks on a machine with so many GPUs, the most telling one first."""
    if gpus == 0:
        return [Place(f"{ranks} ranks over gloo on the CPU", ranks, "--device cpu") for ranks in (2, 4)]
    one = Place(f"1 rank over {backend.upper()}", 1, f"--backend {backend}")
    if gpus == 1:
        return [one, *(Place(f"{n} ranks that share the GPU over gloo", n, "--backend gloo") for n in (2, 4))]
    several = dict.fromkeys((gpus, 2))
    return [*(Place(f"{n} ranks over {backend.upper()}", n, f"--backend {backend}") for n in several), one]


def planned(machine: dict, quick: bool) -> list[Command]:
    """All commands but MACHINE and the figures, for what it said of the machine (nothing, if it failed)."""
    gpus = len(machine.get("gpus", ()))
    kind, backend = machine.get("accelerator", "cuda"), machine.get("backend", "nccl")
    first, *others = places(gpus, backend)
    several = next(place for place in (first, *others) if place.ranks > 1)  # where collectives have something to send
    small = "toy" if quick and not gpus else "tiny"

    dtypes = ("bf16", "fp32") if machine.get("bf16", True) else ("fp32",)

    # On GPUs all of tests/test_cuda.py; on a CPU some properties.
    # Several processes: one for all would lose all when it hangs.
    order = "rank_computes or before_it_computes or as_late_as"
    equal = "equals_ddp or integers or held_bytes or collectives_are"
    chosen = [f"tests/test_properties.py -k '{words}'" for words in ([order] if quick else [order, equal])]
    files = ["tests/test_cuda.py"] if gpus else chosen
    skip = "" if machine.get("pytest") or not machine.get("python") else "this Python has no pytest"
    found = [Command("tests", f"./launch.sh test {file} -q -rfEs", option="", skip=skip) for file in files]
    found += [referee(first, small, "fp32"), referee(several, small, dtypes[0])]
    memory = f"./launch.sh memory --ranks 8 --device {kind if gpus else 'fake'} --preset"  # cuda: real allocations
    found.append(Command("memory", f"{memory} {('1b' if gpus else 'tiny') if quick else '7b'}", seconds=180))
    here = f"{several.ranks} --preset {small if quick or not gpus else 'small'} {several.option}"
    stages = ["zero3 {} --prefetch 1", "zero3 {} --prefetch 0", "zero2 {}", "zero1 {}"]
    for stage in stages[:2] if quick else stages:
        found.append(Command("timeline", f"./launch.sh {stage.format(here)} --steps 3", option="--trace"))
    chosen = "--rounds 3 --only prefetch" if quick else "--rounds 6"
    found.append(Command("sweeps", f"./launch.sh sweeps {here} {chosen}", seconds=180))
    for device in ("cpu", kind) if gpus else ("cpu",):
        options = f"--rounds {4 if quick else 25} --profile zero3 --device {device}"
        found.append(Command("host", f"python -m harness.measure.bench --host {options}"))
    if quick:
        return found

    found += [referee(first, "tiny", dtype) for dtype in dtypes]
    found += [referee(place, "tiny" if gpus else "toy", dtype) for place in others for dtype in dtypes]
    # Where ranks share a GPU FSDP1 may fail, and so it is alone.
    found.append(referee(several, "tiny", "fp32", FSDP1))
    if gpus:
        found += [referee(first, preset, dtype) for dtype in dtypes for preset in ("small", "medium", "1b")]
        found += [referee(several, "small", dtypes[0]), Command("memory", f"{memory} 1b")]
    return list({command.line: command for command in found}.values())  # each once


def referee(place: Place, preset: str, dtype: str, engines: str = "") -> Command:
    if preset not in ("toy", "tiny"):  # without `single`, which computes the batches of all ranks
        from harness.run.engines import named  # imports torch, which has found a GPU by now

        engines = ",".join(named("report"))
    batch = {"medium": 2, "1b": 1}.get(preset, 4)
    line = (f"./launch.sh compare {place.ranks} --preset {preset} --dtype {dtype} --steps 8 --timed-steps 6 "
            f"--batch {batch} {place.option}")  # fmt: skip
    name = f"{preset}, {dtype}, {place.words}" + (f", {engines}" if engines == FSDP1 else "")
    return Command("referee", f"{line} --engines {engines}" if engines else line, name)


def figures(folder: Path, machine: dict) -> list[Command]:
    """What can be drawn of the results that are there."""
    skip = "" if machine.get("matplotlib") else "this Python has no matplotlib"
    found = []
    for name, files in FIGURES.items():
        paths = shlex.join(str(folder / file) for file in files if (folder / file).exists())
        line = f"./launch.sh figures {name} --json {paths} --out {shlex.quote(str(folder))}"
        found += [Command("figures", line, name, 60, "", skip)] if paths else []
    return found

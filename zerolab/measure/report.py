"""`./launch.sh report`: the main measurements of this machine, on one page, within a given number of minutes.

    ./launch.sh report                          in a new folder, report-DATE-TIME, within 10 minutes
    ./launch.sh report FOLDER --minutes 5

It runs a list of commands, starting with the ones that show the most. Each has a time limit, and what no longer fits
into the minutes is listed as left out. A command that fails or hangs is reported, and the others still run. The page
is written after each command, so if the report is killed, even by `kill -9`, one command is lost.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerolab.measure import report_options, tables
from zerolab.run import process_group, ranks
from zerolab.run.command_line import one_line
from zerolab.run.json_file import write_whole

ENDING = 5  # seconds kept for ending the last command
TITLES = ["machine", "torch", "ranks", "runs of an engine with DDP's losses", "tests passed"]
PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}


@dataclass(frozen=True)
class Command:
    """One command of the report.

    `line` is what a reader types in the project's folder. It begins only if `least` seconds are left, and is ended
    after `limit` seconds.
    """

    shows: str
    line: str
    least: int
    limit: int


@dataclass(frozen=True)
class Sizes:
    """What is trained on one GPU. The tests take smaller models.

    `shared` is the preset for two ranks that share the GPU over gloo, `single` the preset for one rank over NCCL with
    `batch` sequences. It is large enough that kernels and not launches take the time. `memory` are presets for one rank
    of eight with `seq` tokens. The (preset, engine) pairs in `too_large` are meant not to fit. `tests` are pytest's
    arguments.
    """

    shared: str = "tiny"
    single: str = "medium"
    batch: int = 8
    memory: tuple[str, ...] = ("1b", "7b")
    seq: int = 512
    too_large: tuple[tuple[str, str], ...] = (("7b", "ddp"),)
    tests: str = "tests/test_cuda.py"


SIZES = Sizes()
WITH_THEIR_PEERS = "ddp,zero1,zero2,zero3,fsdp2_no_reshard,fsdp2"


def chosen_commands(folder: str, gpus: int, sizes: Sizes) -> list[Command]:
    """The commands for a machine with this number of GPUs, which write their files into `folder`."""
    if gpus == 0:
        return on_a_cpu(folder)
    if gpus == 1:
        return on_one_gpu(folder, sizes)
    return on_several_gpus(folder, gpus)


def on_a_cpu(folder: str) -> list[Command]:
    """With seconds for two cores."""
    return [
        compare("float32, two ranks", f"{folder}/compare-2-fp32.json", 2, "tiny", timed_steps=0, limit=120),
        chapter("zero3", 2),
        compare("bfloat16, two ranks", f"{folder}/compare-2-bf16.json", 2, "tiny", dtype="bf16", limit=240),
        Command(
            "The chapters' promises: losses of one process, bytes held and sent",
            "./launch.sh conform zero1.py zero2.py zero3.py",
            least=30,
            limit=240,
        ),
        compare("float32, four ranks", f"{folder}/compare-4-fp32.json", 4, "toy", limit=120),
        Command(
            "Memory of one rank of eight with 7e9 parameters, by a dry run",
            f"./launch.sh memory 8 --preset 7b --json {folder}/memory-7b.json",
            least=60,
            limit=240,
        ),
        compare(
            "step times",
            f"{folder}/compare-times.json",
            2,
            "tiny",
            steps=3,
            engines=WITH_THEIR_PEERS,
            breakdown=True,
            limit=240,
        ),
        trace(folder),
        Command(
            "The host's time per step",
            f"./launch.sh bench --host zero3 --json {folder}/host.json",
            least=20,
            limit=60,
        ),
        sweeps(folder, 2),
        chapter("zero2", 2),
        chapter("zero1", 2),
        environment(),
    ]


def on_one_gpu(folder: str, sizes: Sizes) -> list[Command]:
    """With seconds estimated for an H100 and 16 cores: the GPU's from FLOP and bytes, the host's from runs on CPUs."""
    one_rank = {"engines": WITH_THEIR_PEERS, "batch": sizes.batch, "steps": 4, "timed_steps": 5}
    fp32, bf16 = f"{folder}/compare-1-fp32.json", f"{folder}/compare-1-bf16.json"
    presets = " ".join(sizes.memory)
    return [
        *cards(),
        chapter("zero3", 1),
        chapter("zero3", 2),
        compare("float32, two ranks share the GPU", f"{folder}/compare-2-fp32.json", 2, sizes.shared, limit=90),
        compare("float32, one rank", fp32, 1, sizes.single, **one_rank, limit=120),
        compare("bfloat16, one rank", bf16, 1, sizes.single, dtype="bf16", **one_rank, limit=90),
        Command(
            "Memory of one rank of eight, by real allocations, and the dry run's prediction",
            f"python -m zerolab.measure.one_gpu memory {folder} --presets {presets} --seq {sizes.seq}",
            least=40,
            limit=120,
        ),
        Command(
            "The host's time per step, one rank",
            f"torchrun --nproc-per-node 1 -m zerolab.measure.one_gpu host {folder}",
            least=15,
            limit=45,
        ),
        Command("The tests for GPUs", f"./launch.sh test {sizes.tests} -q -rfEs", least=60, limit=200),
        trace(folder, sizes.shared),
        sweeps(folder, 2, sizes.shared),
        chapter("zero2", 2),
        chapter("zero1", 2),
        environment(),
    ]


def on_several_gpus(folder: str, gpus: int) -> list[Command]:
    """A rank on each GPU, over NCCL."""
    found = [
        *cards(),
        chapter("zero3", gpus),
        compare(f"float32, {gpus} ranks", f"{folder}/compare-{gpus}-tiny-fp32.json", gpus, "tiny", limit=90),
    ]
    for preset in ("medium", "1b"):
        for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16")):
            own = {"dtype": dtype, "engines": WITH_THEIR_PEERS, "batch": 1, "breakdown": True, "limit": 120}
            file = f"{folder}/compare-{gpus}-{preset}-{dtype}.json"
            found.append(compare(f"{name}, {gpus} ranks", file, gpus, preset, **own))
    return [
        *found,
        Command(
            "Memory of one rank of eight, by real allocations, and the dry run's prediction",
            f"python -m zerolab.measure.one_gpu memory {folder}",
            least=40,
            limit=180,
        ),
        Command("The tests for GPUs", "./launch.sh test tests/test_cuda.py -q -rfEs", least=60, limit=240),
        trace(folder, "tiny", gpus),
        sweeps(folder, gpus),
        compare("float32, FSDP1", f"{folder}/compare-{gpus}-fsdp1.json", gpus, "tiny", engines="ddp,fsdp1", limit=90),
        environment(),
    ]


def chapter(name: str, number_of_ranks: int) -> Command:
    line = f"torchrun --nproc-per-node {number_of_ranks} {name}.py"
    return Command(f"A chapter, {number_of_ranks} rank(s)", line, least=10, limit=90)


def compare(
    what: str,
    file: str,
    number_of_ranks: int,
    preset: str,
    limit: int,
    dtype: str = "fp32",
    engines: str | None = None,
    batch: int | None = None,
    steps: int = 5,
    timed_steps: int = 6,
    least: int = 30,
    breakdown: bool = False,
) -> Command:
    """The referee, started by torchrun."""
    line = f"torchrun --nproc-per-node {number_of_ranks} fsdp2_compare.py --preset {preset} --dtype {dtype}"
    line += f" --steps {steps} --timed-steps {timed_steps} --json {file}"
    if engines:
        line += f" --engines {engines}"
    if batch:
        line += f" --batch {batch}"
    if breakdown:
        line += " --breakdown"
    return Command(f"The referee: {what}", line, least, limit)


def trace(folder: str, preset: str = "tiny", number_of_ranks: int = 2) -> Command:
    line = f"./launch.sh zero3 {number_of_ranks} --preset {preset} --steps 3 --trace {folder}/trace-zero3.json"
    return Command("A step of ZeRO-3 event by event, and its trace", line, least=20, limit=60)


def sweeps(folder: str, number_of_ranks: int, preset: str = "tiny") -> Command:
    line = f"./launch.sh bench {number_of_ranks} --sweeps --preset {preset} --rounds 4 --json {folder}/sweeps.json"
    return Command("Bucket size, units, prefetch and recomputation", line, least=30, limit=180)


def environment() -> Command:
    return Command("The environment", "python -W ignore -m torch.utils.collect_env", least=5, limit=60)


def cards() -> list[Command]:
    """Driver and cards, where there is a program that lists them."""
    if shutil.which("nvidia-smi") is None:
        return []
    return [Command("The GPUs and their driver", "nvidia-smi", least=1, limit=20)]


def seconds_for(command: Command, left: float) -> float:
    """How long the command may take if this number of seconds is left. 0 means that it does not start."""
    left -= ENDING
    return min(command.limit, left) if left >= command.least else 0


@dataclass
class Ended:
    """How a command ended, in a few words, what it has printed, and whether it is counted as a failure."""

    how: str
    printed: str
    failed: bool


def run(line: str, seconds: float, limit: float) -> Ended:
    """Run a command for at most this number of seconds, then end its processes. It fails if it reaches `limit`."""
    program, *arguments = shlex.split(line)
    argv = [*PROGRAMS.get(program, [program]), *arguments]
    # So that the ranks have this Python, and a process that hangs says where it was.
    environment = ranks.environment(PYTHON=sys.executable, PYTHONFAULTHANDLER="1")
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        with ranks.started(argv, by=signal.SIGABRT, cwd=ranks.ROOT, env=environment, **streams) as process:
            try:
                status = process.wait(seconds)
                how, failed = f"done in {time.monotonic() - began:.0f} s", False
                if status:
                    how, failed = f"failed with exit status {status}", True
            except subprocess.TimeoutExpired:
                how, failed = f"ended after {seconds:.0f} s, its limit", True
                if seconds < limit:
                    how, failed = f"ended after {seconds:.0f} s, when the minutes were over", False
        output.seek(0)
        return Ended(how, output.read().decode(errors="replace").replace("```", "'''").strip(), failed)


def row_of_machine(compared: list[dict], printed: str) -> list[str]:
    """This machine's cells under TITLES, which are also its row in docs/machines.md."""
    losses = Counter({"to the bit": 0})
    for report in compared:
        for name, run in report["runs"].items():
            if name != "ddp":
                kind = "to the bit" if run["difference"] == 0 else "near"
                losses[kind if run["match"] else "NOT"] += 1
    first = compared[0] if compared else {"hardware": "a machine", "torch": "?"}
    ways = dict.fromkeys(f"{report['world_size']} {report['backend']}" for report in compared)
    equal = ", ".join(f"{number} {kind}" for kind, number in losses.items())
    passed = sum(map(int, re.findall(r"(\d+) passed", printed)))
    return [first["hardware"], first["torch"], ", ".join(ways), equal, str(passed)]


@dataclass
class Page:
    """report.md, as far as it is known: written as a whole after each command."""

    folder: Path
    about: str
    left_out: dict[str, str]  # {line: why}; in the beginning all of them
    ended: dict[Command, Ended]

    def write(self) -> None:
        compared = [json.loads(file.read_text()) for file in sorted(self.folder.glob("compare-*.json"))]
        row = row_of_machine(compared, "".join(end.printed for end in self.ended.values()))
        failed = [f"- `{command.line}` {end.how}" for command, end in self.ended.items() if end.failed]
        parts = [f"# {row[0]}", tables.markdown([TITLES, row]), self.about]
        parts.append("\n".join(["What has failed:", "", *failed] if failed else ["No command has failed."]))
        if self.left_out:
            left_out = [f"- `{line}` ({why})" for line, why in self.left_out.items()]
            parts.append("\n".join(["What was left out:", "", *left_out]))
        for command, end in self.ended.items():
            parts.append(f"## {command.shows}\n\n`{command.line}`: {end.how}\n\n```\n{end.printed}\n```")
        write_whole(self.folder / "report.md", "\n\n".join(parts) + "\n")


@one_line(OSError)
def main(argv: list[str] | None = None, began: float | None = None) -> int:
    """Run the command; returns 0, or 1 if a command has failed or hung. `began`: when the process did (time.time)."""
    began = began or time.time()
    options = report_options.arguments(argv)
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    load = f"{os.getloadavg()[0]:.1f} processes at work on {os.cpu_count()} cores when it began"
    about = f"Written by `./launch.sh report --minutes {options.minutes:g}` on {time.strftime('%Y-%m-%d')}; {load}."
    chosen = chosen_commands(str(folder), process_group.count_gpus(), SIZES)
    page = Page(folder, about, {command.line: "had not ended when this page was written" for command in chosen}, {})
    page.write()
    for index, command in enumerate(chosen, 1):
        left = 60 * options.minutes - (time.time() - began)
        seconds = seconds_for(command, left)
        print(f"{index} of {len(chosen)}: {command.line}", flush=True)
        if not seconds:
            page.left_out[command.line] = f"needs {command.least} s or more, and {max(0, left - ENDING):.0f} were left"
            print(f"  left out: {page.left_out[command.line]}", flush=True)
            continue
        page.ended[command] = run(command.line, seconds, command.limit)
        print(f"  {page.ended[command].how}", flush=True)
        del page.left_out[command.line]
        page.write()
    page.write()
    print(f"written: {folder}/report.md; please send the folder")
    return int(any(end.failed for end in page.ended.values()))


if __name__ == "__main__":
    sys.exit(main(began=psutil.Process().create_time()))

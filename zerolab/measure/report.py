"""`./launch.sh report`: the main measurements of this machine, on one page, within a given number of minutes.

    ./launch.sh report                          in a new folder, report-DATE-TIME, within 10 minutes
    ./launch.sh report FOLDER --minutes 5

It runs a list of commands, starting with the ones that show the most. Each has a time limit, and what has not begun
when the minutes are over is listed as left out. A command that fails or hangs is reported, and the others still run.
The page is written after each command, so if the report is killed, even by `kill -9`, one command is lost.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerolab.engine import accelerator
from zerolab.measure import report_options, tables
from zerolab.run import process_group, ranks
from zerolab.run.command_line import one_line
from zerolab.run.json_file import write_whole

ENDING = 5  # seconds kept for ending the last command
TITLES = ["machine", "torch", "ranks", "runs of an engine with DDP's losses", "tests passed"]
PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}
WITH_THEIR_PEERS = "ddp,zero1,zero2,zero3,fsdp2_no_reshard,fsdp2"


@dataclass(frozen=True)
class Command:
    """What it shows, what a reader types in the project's folder, and after how many seconds it is ended."""

    shows: str
    line: str
    limit: int


def chosen_commands(folder: str, gpus: int) -> list[Command]:
    """The commands for a machine with this number of GPUs, which write their files into `folder`."""
    first, last = on_gpus(folder, gpus) if gpus else on_a_cpu(folder)
    number_of_ranks = max(2, gpus)
    return [
        *first,
        Command(
            "A step of ZeRO-3 event by event, and its trace",
            f"./launch.sh zero3 {number_of_ranks} --preset tiny --steps 3 --trace {folder}/trace-zero3.json",
            limit=60,
        ),
        *last,
        Command("The host's time per step", f"./launch.sh bench --host --json {folder}/host.json", limit=60),
        Command(
            "Bucket size, units, prefetch and recomputation",
            f"./launch.sh bench {number_of_ranks} --sweeps --preset tiny --rounds 4 --json {folder}/sweeps.json",
            limit=180,
        ),
        chapter("zero2", number_of_ranks),
        chapter("zero1", number_of_ranks),
        Command("The environment", "python -W ignore -m torch.utils.collect_env", limit=60),
    ]


def on_a_cpu(folder: str) -> tuple[list[Command], list[Command]]:
    """What comes first and last of the commands for a CPU. The limits are for two cores."""
    compare = "./launch.sh compare 2 --preset tiny"
    first = [
        referee("float32, two ranks", f"{compare} --steps 5 --timed-steps 0 --json {folder}/compare-2-fp32.json"),
        chapter("zero3", 2),
        referee("bfloat16, two ranks", f"{compare} --dtype bf16 --steps 5 --json {folder}/compare-2-bf16.json"),
        Command(
            "The chapters' promises: losses of one process, bytes held and sent",
            "./launch.sh conform zero1.py zero2.py zero3.py",
            limit=240,
        ),
        referee("float32, four ranks", f"./launch.sh compare 4 --preset toy --json {folder}/compare-4-fp32.json"),
    ]
    last = [
        Command(
            "Memory of one rank of eight with 7e9 parameters, by a dry run",
            f"./launch.sh memory 8 --preset 7b --json {folder}/memory-7b.json",
            limit=240,
        ),
        referee(
            "step times",
            f"{compare} --steps 3 --engines {WITH_THEIR_PEERS} --breakdown --json {folder}/compare-times.json",
        ),
    ]
    return first, last


def on_gpus(folder: str, gpus: int) -> tuple[list[Command], list[Command]]:
    """What comes first and last of the commands for GPUs.

    The referee trains a preset that is large enough that kernels take the time, and not launches. A GPU also runs rank
    0 of 8 by itself, with short sequences, so that ZeRO-1 with 7e9 parameters fits on a card of 80 GB. DDP does not.
    """
    sharing = max(2, gpus)  # two ranks share one GPU, over gloo
    compare = f"./launch.sh compare {gpus} --preset medium --batch 8 --steps 4 --timed-steps 5"
    compare += f" --engines {WITH_THEIR_PEERS}"
    memory = f"./launch.sh memory 8 --seq 512 --device {accelerator.kind()}"
    allocations = "Memory of one rank of eight, by real allocations"
    first = [
        chapter("zero3", gpus),
        referee(
            "float32, the model tiny",
            f"./launch.sh compare {sharing} --preset tiny --steps 5 --json {folder}/compare-{sharing}-tiny.json",
        ),
        referee("float32", f"{compare} --json {folder}/compare-{gpus}-fp32.json"),
        referee("bfloat16", f"{compare} --dtype bf16 --json {folder}/compare-{gpus}-bf16.json"),
    ]
    last = [
        Command(allocations, f"{memory} --preset 1b --json {folder}/memory-1b.json", limit=120),
        Command(allocations, f"{memory} --preset 7b --json {folder}/memory-7b.json", limit=120),
        Command("The tests for GPUs", "./launch.sh test tests/test_cuda.py -q -rfEs", limit=240),
    ]
    return first, last


def chapter(name: str, number_of_ranks: int) -> Command:
    line = f"torchrun --nproc-per-node {number_of_ranks} {name}.py"
    return Command(f"A chapter, {number_of_ranks} rank(s)", line, limit=90)


def referee(what: str, line: str) -> Command:
    return Command(f"The referee: {what}", line, limit=240)


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
    left_out: list[str]  # the lines of the commands that have not ended; in the beginning all of them
    ended: dict[Command, Ended]

    def write(self) -> None:
        compared = [json.loads(file.read_text()) for file in sorted(self.folder.glob("compare-*.json"))]
        row = row_of_machine(compared, "".join(end.printed for end in self.ended.values()))
        failed = [f"- `{command.line}` {end.how}" for command, end in self.ended.items() if end.failed]
        parts = [f"# {row[0]}", tables.markdown([TITLES, row]), self.about]
        parts.append("\n".join(["What has failed:", "", *failed] if failed else ["No command has failed."]))
        if self.left_out:
            left_out = [f"- `{line}`" for line in self.left_out]
            parts.append("\n".join(["What was left out, because the minutes were over:", "", *left_out]))
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
    chosen = chosen_commands(str(folder), process_group.count_gpus())
    page = Page(folder, about, [command.line for command in chosen], {})
    page.write()
    for index, command in enumerate(chosen, 1):
        left = 60 * options.minutes - (time.time() - began) - ENDING
        if left <= 0:
            print(f"left out, because the minutes are over: {len(page.left_out)} command(s)", flush=True)
            break
        print(f"{index} of {len(chosen)}: {command.line}", flush=True)
        page.ended[command] = run(command.line, min(command.limit, left), command.limit)
        print(f"  {page.ended[command].how}", flush=True)
        page.left_out.remove(command.line)
        page.write()
    print(f"written: {folder}/report.md; please send the folder")
    return int(any(end.failed for end in page.ended.values()))


if __name__ == "__main__":
    sys.exit(main(began=psutil.Process().create_time()))

"""`./launch.sh report`: what there is to know of this machine, on one page. It takes about ten minutes.

    ./launch.sh report              to a new folder, report-DATE-TIME
    ./launch.sh report FOLDER --quick

A list of commands, each with a limit of time. What a command prints is appended to the page, and one that fails or
hangs is a line there; the rest goes on. The page is written after every command, so Ctrl-C leaves what there is.
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
import tomllib
from collections import Counter
from pathlib import Path

from zerolab.engine import accelerator
from zerolab.measure import tables
from zerolab.run import ranks
from zerolab.run.command_line import Parser, one_line

SECONDS = 300  # that a command may take
TITLES = ["machine", "torch", "ranks", "runs of an engine with DDP's losses", "tests passed"]


def commands(folder: str, gpus: int, quick: bool) -> list[str]:
    """What is run on a machine with so many GPUs."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    own = rows["gpu" if gpus else "cpu"]
    words = {"folder": folder, "most": gpus or 2, "several": max(2, gpus), "other": 4 if gpus == 1 else 1}
    words |= {"small": "toy" if quick else "tiny", "size": own["quick_size"] if quick else "7b"}
    words["device"] = accelerator.kind() if gpus else "fake"  # on a GPU by real allocations
    found = own["first"]
    for number, run in enumerate(own["compare"] + ([] if quick else own.get("large", [])), 1):
        for dtype in ("fp32", "bf16"):
            file = f"{{folder}}/compare-{number}-{dtype}.json"
            found.append(f"./launch.sh compare {run} --dtype {dtype} --steps 8 --timed-steps 6 --json {file}")
    return [command.format(**words) for command in found + rows["rest"]]


def printed_by(command: str, seconds: float) -> tuple[str, str]:
    """(what a command prints, how it ends in a few words); of its processes none is left."""
    argv = shlex.split(command)
    if argv[0] == "python":
        argv[0] = sys.executable
    # So that the ranks have this Python, and a process that hangs says where it was.
    environment = ranks.environment(PYTHON=sys.executable, PYTHONFAULTHANDLER="1")
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        with ranks.started(argv, by=signal.SIGABRT, cwd=ranks.ROOT, env=environment, **streams) as process:
            try:
                status = process.wait(seconds)
                ended = f"done in {time.monotonic() - began:.0f} s"
                if status:
                    ended = f"failed with exit status {status}"
            except subprocess.TimeoutExpired:
                ended = f"ended after {seconds:g} s, its limit"
        output.seek(0)
        return output.read().decode(errors="replace").replace("```", "'''").strip(), ended


def row_of_machine(compared: list[dict], printed: str) -> list[str]:
    """This machine's cells under TITLES, which are its line in README.md, too."""
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


@one_line(OSError)
def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, or 1 if a command has failed or hung."""
    parser = Parser("report [FOLDER]", description=__doc__.splitlines()[0])
    folder = time.strftime("report-%Y%m%d-%H%M%S")
    parser.add_argument("folder", nargs="?", default=folder, help="a new folder (default: report-DATE-TIME)")
    parser.add_argument("--quick", action="store_true", help="small models: minutes")
    options = parser.parse_args(argv)
    folder = Path(options.folder).resolve()
    if folder.is_dir() and any(folder.iterdir()):
        parser.error(f"{str(folder)!r} holds other things: take a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    load = f"{os.getloadavg()[0]:.1f} processes at work on {os.cpu_count()} cores when it began"
    sections, broken = [], []
    chosen = commands(str(folder), accelerator.count(), options.quick)
    for number, command in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {command}", flush=True)
        printed, ended = printed_by(command, SECONDS)
        print(f"  {ended}", flush=True)
        sections.append(f"## `{command}`\n\n{ended}\n\n```\n{printed}\n```\n")
        if not ended.startswith("done"):
            broken.append(f"- `{command}` {ended}")
        compared = [json.loads(file.read_text()) for file in sorted(folder.glob("compare-*.json"))]
        row = row_of_machine(compared, "".join(sections))
        begun = f"Written by `./launch.sh report` on {time.strftime('%Y-%m-%d')}; {load}."
        failed = "\n".join(["What has failed:", "", *broken] if broken else ["No command has failed."])
        page = [f"# {row[0]}", tables.markdown([TITLES, row]), begun, failed, *sections]
        (folder / "report.md").write_text("\n\n".join(page))
    print(f"written: {folder}/report.md; please send the folder")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

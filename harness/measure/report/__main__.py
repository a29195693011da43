"""Everything worth knowing of this machine, with one command: tests, losses, memory, times; as a page and as JSON.

./launch.sh report                    all parts, in about ten minutes, to a new folder
./launch.sh report FOLDER --quick     small models and few steps

A loop over other commands, each with a time limit of its own. What fails or hangs is ended, and said on the page; the
others go on. Results are written as they come, so an interrupted report (Ctrl-C, SIGTERM) is one as well.
"""

import argparse
import gzip
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from harness.measure.report import commands, page, process
from harness.measure.report.commands import PARTS, Command
from harness.measure.report.process import DONE, FAILED, INTERRUPTED, LEFT_OUT
from harness.run.ending import Parser, one_line

FIGURES_SECONDS = 60


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's options; the folder is there from here on. Raises ValueError for what cannot work."""
    parser = Parser(prog="report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="where to write; a new folder (default: report-DATE-TIME)")
    parser.add_argument("--minutes", type=float, help="time for all parts together (default 10, with --quick 2)")
    parser.add_argument("--quick", action="store_true", help="small models and few steps")
    parser.add_argument("--only", help=f"parts, with commas, in place of all: {', '.join(PARTS)}")
    options = parser.parse_args(argv)
    options.minutes = (2.0 if options.quick else 10.0) if options.minutes is None else options.minutes
    if not 0 < options.minutes < 10_000:
        raise ValueError(f"--minutes must be above 0, got {options.minutes:g}")
    chosen = PARTS if options.only is None else [name.strip() for name in options.only.split(",") if name.strip()]
    if wrong := [f"no part {name!r}" for name in chosen if name not in PARTS] or ["--only is empty"] * (not chosen):
        raise ValueError(f"{wrong[0]}; there are: {', '.join(PARTS)}")
    options.only = [name for name in PARTS if name in chosen or name == "machine"]  # the others ask it for the GPUs
    folder = options.folder or time.strftime("report-%Y%m%d-%H%M%S")
    options.folder = Path(folder).resolve()
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        raise ValueError(f"{folder} is there already, and not an empty folder: name another one")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "machine-1.txt").touch()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from error
    return options


class Report:
    """What is known so far, and the folder that it is written to."""

    def __init__(self, options: argparse.Namespace):
        self.folder, self.options, self.started = options.folder, options, time.monotonic()
        self.ends = self.started + options.minutes * 60
        only = [] if options.only == [*PARTS] else [f"--only {','.join(options.only)}"]
        quick = ["--quick"] if options.quick else []
        self.known = {
            "report": 2,
            "command": " ".join(["./launch.sh report", *quick, f"--minutes {options.minutes:g}", *only]),
            "date": time.strftime("%Y-%m-%d"),
            "status": INTERRUPTED,  # until it has come to its end: a killed report says so too
            "seconds": 0.0,
            "quick": options.quick,
            "machine": {},
            "parts": {},
            "left_out": [name for name in PARTS if name not in options.only],
        }

    def run(self) -> None:
        """All commands, in turn."""
        self.command(commands.MACHINE)
        (row,) = self.known["parts"]["machine"]["jobs"]
        self.known["machine"] = row.get("results", {})
        planned = commands.planned(self.known["machine"], self.options.quick)
        self.all([command for command in planned if command.part in self.options.only])
        self.ends = max(self.ends, time.monotonic() + FIGURES_SECONDS)  # figures show what there is: not at its expense
        self.all(commands.figures(self.folder, self.known["machine"]))
        self.known["status"] = DONE

    def all(self, planned: list[Command]) -> None:
        ahead = iter(planned)
        try:
            for command in ahead:
                self.command(command)
        finally:
            for command in ahead:  # there are some after an interruption
                self.row(command, "the report ended before")

    def row(self, command: Command, reason: str = "") -> dict:
        """A new row for a command, in its part; `reason` is why it is not started."""
        shown = process.scrub(command.line, self.folder)
        row = {"name": command.name or shown, "shown": shown, "seconds": 0.0}
        row |= {"status": LEFT_OUT, "skip": reason} if reason else {"status": INTERRUPTED}
        self.known["parts"].setdefault(command.part, {"jobs": []})["jobs"].append(row)
        return row

    def command(self, command: Command) -> None:
        """Run one command, if at least a quarter of its time is left; what it wrote and said is kept in any case."""
        limit, started = command.seconds * max(1.0, self.options.minutes / 10), time.monotonic()
        no_time = f"no time was left; --minutes {2 * self.options.minutes:g} gives it more"
        row = self.row(command, command.skip or no_time * (self.ends - started < limit / 4))
        print(f"{command.part}: {row['name']}", flush=True)
        if row["status"] != LEFT_OUT:
            file = self.folder / f"{command.part}-{len(self.known['parts'][command.part]['jobs'])}.json"
            log = file.with_suffix(".txt")
            row["limit"], row["log"] = round(min(limit, self.ends - started), 1), log.name
            try:
                row["status"], row["exit"] = process.run(command.argv(file), row["limit"], log)
            finally:
                row["seconds"] = round(time.monotonic() - started, 1)
                process.shorten(log)
                self.keep(command, file, row)
                self.write()
        print(f"  {page.how(row)}", flush=True)

    def keep(self, command: Command, file: Path, row: dict) -> None:
        """The results in `file`, if any. A test run or a referee that fails has written what it found all the same."""
        if command.part == "tests":
            row["results"] = {"tests": {"all": page.counted(file.with_suffix(".txt").read_text())}}
        if not command.option:
            return
        try:
            file.write_text(process.scrub(file.read_text(), self.folder))
            found = json.loads(file.read_text())
            if command.part in ("machine", "referee"):  # what page and README read; the others' are in their files
                row["results"] = found
        except (OSError, ValueError):  # it was ended before it wrote, or meanwhile
            file.unlink(missing_ok=True)
            if row["status"] == DONE:
                row["status"], row["skip"] = FAILED, "it has written no results that can be read"

    def write(self) -> None:
        """The whole report, as JSON and as a page; each is whole at any time."""
        self.known["seconds"] = round(time.monotonic() - self.started, 1)
        texts = {"report.json": json.dumps(self.known, indent=1), "report.md": page.page(self.known, self.folder)}
        for name, text in texts.items():
            beside = self.folder / f"{name}.part"
            beside.write_text(text + "\n", encoding="utf-8")
            os.replace(beside, self.folder / name)


def _stop(number, frame):
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)  # what follows takes a second, and is not to be stopped
    print(f"interrupted by {signal.Signals(number).name}: what was measured is kept", flush=True)
    sys.exit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 1 if something failed or hung, 128 + a signal; wrong options end it with 2."""
    with one_line(ValueError):
        options = arguments(argv)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that hangs is aborted, and is to leave no core
    report = Report(options)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it, for one
            signal.signal(number, _stop)
    try:
        report.run()
    finally:
        for trace in options.folder.glob("timeline-*.json"):  # a tenth of the size, and ui.perfetto.dev opens it so
            with gzip.open(f"{trace}.gz", "wb") as packed:
                packed.write(trace.read_bytes())
            trace.unlink()
        report.write()
        print(f"\nwritten: {os.path.relpath(options.folder / 'report.md')}; please send the whole folder", flush=True)
    return int(any(row["status"] in page.BROKEN for part in report.known["parts"].values() for row in part["jobs"]))


if __name__ == "__main__":
    sys.exit(main())

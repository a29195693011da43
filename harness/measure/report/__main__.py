"""Everything worth knowing of this machine, with one command: tests, losses, memory, times; as a page and as JSON.

./launch.sh report                    all parts, in about ten minutes, to a new folder
./launch.sh report FOLDER --quick     small models and few steps

Each part has a time limit of its own. What fails or hangs is ended, and said on the page; the other parts go on.
Results are written as they come, so an interrupted report (Ctrl-C, SIGTERM) is one as well.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from harness.measure.report import jobs, page, plan, results
from harness.measure.report.jobs import DONE, FAILED, INTERRUPTED, OUT_OF_MEMORY, SKIPPED, TIMED_OUT, Interrupted, Job

NAMES = tuple(part.name for part in plan.PARTS)
MOST_BYTES = 5 * 10**6  # of the folder: it is to be sent
MOST_PER_FILE = 5 * 10**5
FIGURES_SECONDS = 60
LEAST_SECONDS = 30  # that a job gets, once it is started: it imports torch and starts ranks


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="where to write; a new folder (default: report-DATE-TIME)")
    parser.add_argument("--minutes", type=float, help="time for all parts together (default 10, with --quick 2)")
    parser.add_argument("--quick", action="store_true", help="small models and few steps")
    parser.add_argument("--only", help=f"parts, with commas, in place of all: {', '.join(NAMES)}")
    options = parser.parse_args(argv)
    options.minutes = (2.0 if options.quick else 10.0) if options.minutes is None else options.minutes
    if not 0 < options.minutes < 10_000:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    chosen = NAMES if options.only is None else [name.strip() for name in options.only.split(",") if name.strip()]
    for name in chosen:
        if name not in NAMES:
            parser.error(f"no part {name!r}; there are: {', '.join(NAMES)}")
    if not chosen:
        parser.error(f"--only is empty; there are: {', '.join(NAMES)}")
    options.only = [name for name in NAMES if name in chosen or name == "machine"]  # the others ask it for the GPUs
    folder = options.folder or time.strftime("report-%Y%m%d-%H%M%S")
    options.folder = Path(folder).resolve()
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        parser.error(f"{folder} is there already, and not an empty folder: name another one")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "logs").mkdir()
    except OSError as error:
        parser.error(f"cannot write to {folder}: {error.strerror}")
    return options


def broken() -> dict[str, tuple[str, float | None]]:
    """{part: ("fail" or "hang", its limit in seconds or None)}: so that tests see what a failure and a hang do."""
    wanted = [word.split(":") for word in os.environ.get("ZERO_REPORT_BREAK", "").split(",") if word]
    return {part: (how, float(limit[0]) if limit else None) for part, how, *limit in wanted}


FAIL = "raise SystemExit('broken on purpose')"
HANG = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
    "print('hangs on purpose, with child', child.pid, flush=True); time.sleep(600)"
)


class Report:
    """What is known so far, and the folder that it is written to."""

    def __init__(self, options: argparse.Namespace):
        self.folder, self.options, self.started = options.folder, options, time.monotonic()
        self.broken = broken()
        self.least = min(LEAST_SECONDS, options.minutes * 6)
        self.known = {
            "report": 1,
            "command": " ".join(["./launch.sh report", *(["--quick"] if options.quick else []),
                                 f"--minutes {options.minutes:g}",
                                 *([f"--only {','.join(options.only)}"] if len(options.only) < len(NAMES) else [])]),
            "date": time.strftime("%Y-%m-%d"),
            "status": INTERRUPTED,  # until it has come to its end: a killed report says so too
            "seconds": 0.0,
            "quick": options.quick,
            "machine": {},
            "parts": {},
            "left_out": [name for name in NAMES if name not in options.only],
            "not_reached": list(options.only),
            "notes": [],
        }  # fmt: skip

    def run(self) -> None:
        """All parts, in turn."""
        for part in plan.PARTS:
            if part.name in self.options.only:
                self.part(part)
        self.known["status"] = DONE
        self.figures()

    def left(self) -> float:
        return self.options.minutes * 60 - (time.monotonic() - self.started)

    def part(self, part: plan.Part) -> None:
        shares = {other.name: other.share for other in plan.PARTS if other.name in self.options.only}
        later = sum(shares[name] for name in self.known["not_reached"] if name != part.name)
        limit = max(self.least, plan.limit(self.left(), later, self.options.minutes * 60 / sum(shares.values())))
        how, own_limit = self.broken.get(part.name, (None, None))
        limit = own_limit or limit
        started, ends = time.monotonic(), time.monotonic() + limit
        self.known["not_reached"].remove(part.name)
        row = {"title": part.title, "status": INTERRUPTED, "limit": round(limit, 1), "seconds": 0.0, "jobs": []}
        self.known["parts"][part.name] = row
        print(f"{part.name}: at most {limit:.0f} s", flush=True)
        planned = part.jobs(self.known["machine"], self.options.quick)
        if how:
            planned[0].argv, planned[0].skip = ["-c", FAIL if how == "fail" else HANG], ""
        try:
            too_large: dict[str, float] = {}
            each = limit / sum(job.weight for job in planned)
            for number, job in enumerate(planned):
                if job.ladder in too_large and job.size > too_large[job.ladder]:
                    job.skip = "a smaller model ran out of memory here"
                after = sum(other.weight for other in planned[number + 1 :] if not other.skip)
                left = ends - time.monotonic()
                # Not a slice for everybody, too thin to start in: the first jobs tell more than the last.
                seconds = min(limit, max(self.least, plan.limit(left, after, each)))
                if number and left < self.least and not job.skip:
                    job.skip = f"no time was left; --minutes {2 * self.options.minutes:g} gives it more"
                done = self.job(part.name, number, job, seconds, row["jobs"])
                if done["status"] == OUT_OF_MEMORY and job.ladder:
                    too_large[job.ladder] = min(job.size, too_large.get(job.ladder, job.size))
            row["status"] = self.status_of(row["jobs"])
        finally:
            row["seconds"] = round(time.monotonic() - started, 1)
            if part.name == "machine" and row["jobs"] and row["jobs"][0].get("results"):
                self.known["machine"] = row["jobs"][0]["results"]
            self.write(part.name)

    @staticmethod
    def status_of(done: list[dict]) -> str:
        found = {job["status"] for job in done}
        return next((status for status in (FAILED, TIMED_OUT) if status in found), DONE)

    def job(self, part: str, number: int, job: Job, seconds: float, done: list[dict]) -> dict:
        """Run one job; its row is in `done` from the start, so that an interruption finds it there."""
        row = {key: value for key, value in asdict(job).items() if key in ("name", "shown", "about", "skip") and value}
        row |= {"status": SKIPPED if job.skip else INTERRUPTED, "limit": round(seconds, 1), "seconds": 0.0}
        done.append(row)
        if job.skip:
            print(f"  {job.name}: skipped, {job.skip}", flush=True)
            return row
        log, started = self.folder / "logs" / f"{part}-{number}.txt", time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "results"
            try:
                argv = [word.replace("{file}", str(file)) for word in job.argv]
                row["status"], row["exit"], _ = jobs.run(argv, seconds, log)
            finally:
                row["seconds"] = round(time.monotonic() - started, 1)
                row["tail"] = jobs.tail(log, 30 if row["status"] != DONE else 12)
                log.write_text(jobs.tail(log, 120) + "\n")
                self.keep(part, number, job, file, row)
        if row["status"] == DONE and not row.get("results"):
            row["status"] = FAILED  # it says that all is well, and has written nothing
        print(f"  {job.name}: {row['status']}, {row['seconds']:.0f} s", flush=True)
        return row

    def keep(self, part: str, number: int, job: Job, file: Path, row: dict) -> None:
        """The results in `file`, if any. A test run or a referee that fails has written what it found all the same."""
        kind = job.about.get("kind", part)
        trace = self.folder / f"trace-{job.about.get('stage')}-{number}.json.gz"
        try:
            found = results.read(kind, file, trace if kind == "timeline" else None)
        except Exception as error:  # of another form than was foreseen
            row["tail"] += f"\n{type(error).__name__} while its results were read: {error}"
            found = None
        if found is not None:
            row["results"] = found
        if row["status"] == DONE:
            row.pop("tail")

    def figures(self) -> None:
        if not self.known["machine"].get("matplotlib"):
            self.known["notes"].append("no figures: this Python has no matplotlib")
            return
        log = self.folder / "logs" / "figures.txt"
        status, _, _ = jobs.run(["-m", "harness.measure.report.figures", str(self.folder)], FIGURES_SECONDS, log)
        if status != DONE:
            self.known["notes"].append(f"figures: {status}: {jobs.tail(log, 3)}")

    def write(self, part: str | None = None) -> None:
        """The part's own file, and the whole report, as JSON and as a page; each is whole at any time."""
        self.known["seconds"] = round(time.monotonic() - self.started, 1)
        if part is not None:
            _put(self.folder / f"{part}.json", json.dumps(self.known["parts"][part], indent=1))
        _put(self.folder / "report.json", json.dumps(self.known, indent=1))
        _put(self.folder / "report.md", page.page(self.known, self.folder))

    def shrink(self) -> None:
        """Keep the folder small enough to send: leave out the largest of what the page can do without."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        total = sum(path.stat().st_size for path in files)
        spare = [path for path in files if path.name.startswith("trace-") or path.suffix in (".png", ".txt")]
        for path in sorted(spare, key=lambda path: path.stat().st_size, reverse=True):
            size = path.stat().st_size
            if total > MOST_BYTES - MOST_PER_FILE:
                path.unlink()
                total -= size
                self.known["notes"].append(f"{path.name} ({size / 1e6:.1f} MB) was left out: too large to send")


def _put(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".part")
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)


def _stop(number, frame):
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)  # what follows takes a second, and is not to be stopped
    raise Interrupted(number)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 1 if something failed or hung, 2 for wrong options, 128 + a signal that ended it."""
    options = arguments(argv)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that hangs is aborted, and is to leave no core
    report, status = Report(options), 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it, for one
            signal.signal(number, _stop)
    try:
        report.run()
    except Interrupted as stopped:
        status = 128 + stopped.number
        print(f"interrupted by {signal.Signals(stopped.number).name}: what was measured is kept", flush=True)
    report.shrink()
    report.write()
    found = {part["status"] for part in report.known["parts"].values()}
    print(f"\nwritten: {os.path.relpath(options.folder / 'report.md')}; please send the whole folder")
    return status or int(bool(found - {DONE}))


if __name__ == "__main__":
    sys.exit(main())

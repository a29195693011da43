"""Record a training step on real ranks, and write a page that plays it next to the code.

./launch.sh watch zero3 2        ZeRO-3 on two ranks, and all other engines to compare it with: watch-zero3.html
./launch.sh watch --bug 16       a bug from the museum next to the correct engine: watch-bug16.html
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from extra.watch import chromium, page
from extra.watch.merge_ranks import merge
from extra.watch.record_rank import record
from extra.watch.recordable import Recordable, of_engine, of_exhibit
from extra.watch.watch_options import arguments
from zerolab.run import json_file, process_group, ranks
from zerolab.run.command_line import one_line


def runs_of(options: argparse.Namespace) -> list[Recordable]:
    """Raises ValueError for a bug that no step shows."""
    if options.bug is not None:
        return of_exhibit(options.bug)
    return [of_engine(name, options.preset) for name in options.names]


def on_ranks(options: argparse.Namespace, folder: Path) -> None:
    """The program of every rank: make one recording after the other, and write each into the folder."""
    world = process_group.start("gloo", "cpu")
    for run in runs_of(options):
        seen = record(run, world)
        seen["about"] = {**run.about, "hardware": process_group.hardware(world.device), "torch": torch.__version__}
        json_file.write_whole(file_of(folder, run.name, world.rank), json.dumps(seen))
        world.print(f"recorded: {run.title}")
        if seen["error"] is not None:
            # A rank that leaves makes the others fail in a different way than they would have.
            until = time.monotonic() + 10
            while seen_by_all(folder, run.name, world.world_size) is None and time.monotonic() < until:
                time.sleep(0.01)
            return
    process_group.stop()


def file_of(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.json"


def seen_by_all(folder: Path, name: str, world_size: int) -> list[dict] | None:
    """What each rank has recorded of a run, or None if a rank has not."""
    files = [file_of(folder, name, rank) for rank in range(world_size)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else None


def record_all(options: argparse.Namespace, argv: list[str]) -> list[dict]:
    """Start the ranks, and merge their recordings. Raises RuntimeError if the ranks ended before they had recorded all.

    A bug's last run may be missing, because its ranks end after the first error.
    """
    found, runs = [], runs_of(options)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *ranks.torchrun(options.ranks), "-m", "extra.watch", *argv, "--on-ranks", folder]
        with ranks.started(command, env=ranks.environment(), stderr=subprocess.PIPE, text=True) as process:
            _, errors = process.communicate()
        for run in runs:
            seen = seen_by_all(Path(folder), run.name, options.ranks)
            if seen is None:
                break
            about = {**seen[0]["about"], "command": " ".join(["./launch.sh watch", *argv])}
            found.append(merge(seen, run.name, run.title, about))
    if len(found) < len(runs) and not (found and options.bug is not None):
        raise RuntimeError(f"the ranks ended before they had recorded all:\n{errors[-3000:]}")
    return found


@one_line(ValueError, RuntimeError, OSError)
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    if options.on_ranks:
        process_group.run(partial(on_ranks, options, Path(options.on_ranks)))
    if options.gif and (missing := chromium.missing()):
        raise ValueError(f"--gif needs a browser: {missing}")
    if options.source:
        recordings = page.recordings_of(options.source)
        if options.opens not in [recording["run"] for recording in recordings]:
            raise ValueError(f"--from {options.source!r} has no recording of {options.opens!r}")
    else:
        several = len(runs_of(options))
        hint = f" (about a minute; --engines {options.opens} records one)" if several > 2 else ""
        print(f"recording {several} engines on {options.ranks} ranks{hint}", flush=True)
        recordings = record_all(options, argv)
    text = page.build(recordings, options.opens, beside="" if options.bug is None else "right")
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
        print(f"written: {Path(options.out).resolve()} (a double click opens it)")
    if options.gif:
        from extra.watch import animation  # only here, because it imports Pillow

        print("drawing the animation")
        animation.draw(text, Path(options.gif))
        print(f"written: {Path(options.gif).resolve()} ({Path(options.gif).stat().st_size / 1e3:.0f} kB)")
    return 0

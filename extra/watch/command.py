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

from extra.watch import animation, page, watch_options
from extra.watch.merge_ranks import merge
from extra.watch.record_rank import record
from extra.watch.recordable import TITLES, Recordable, of_engine, of_exhibit
from zerolab.run import engine_file, json_file, process_group, ranks
from zerolab.run.command_line import one_line
from zerolab.run.engines import ENGINES
from zerolab.run.enough_memory import refuse_too_large
from zerolab.run.launch import default_ranks
from zerolab.run.shared_options import check_writable


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    options = watch_options.arguments(argv)
    settle(options)
    return options


def settle(options: argparse.Namespace) -> None:
    """Fill in defaults. Raises ValueError for options that cannot work."""
    settle_ranks(options)
    if options.bug is not None:
        of_exhibit(options.bug)  # raises ValueError for a bug that no step shows
    for name in engine_file.enter(options.engine_file):
        TITLES[name] = ENGINES[name].title
    settle_files(options)


def settle_ranks(options: argparse.Namespace) -> None:
    gpus = process_group.count_gpus()
    if options.ranks is None:
        options.ranks = min(default_ranks(options.backend, options.device, gpus, 1), watch_options.MOST_RANKS)
    options.ranks = int(options.ranks)
    process_group.choose(options.backend, options.device, 0, options.ranks, gpus)


def settle_files(options: argparse.Namespace) -> None:
    if options.source is not None:
        there = [recording["run"] for recording in page.recordings_of(options.source)]
        if options.opens not in there:
            raise ValueError(f"--from {options.source!r} has no recording of {options.opens!r}")
    if options.out is None and not (options.source and options.gif):
        options.out = f"watch-{options.opens}.html"
    for name in ("out", "json", "gif"):
        check_writable(f"--{name}", getattr(options, name))
    if options.gif is not None:
        if not options.gif.lower().endswith(".gif"):
            raise ValueError(f"--gif must name a file that ends with .gif, got {options.gif!r}")
        animation.check()


def check_memory(options: argparse.Namespace) -> None:
    """Raise ValueError if the ranks need more memory than is free. A bug's model is always small."""
    device = process_group.choose(options.backend, options.device, 0, options.ranks, process_group.count_gpus())[1]
    if options.bug is None and device == "cpu":
        alone = argparse.Namespace(**vars(options), timed_steps=0)  # one engine is alive at a time
        refuse_too_large(alone, options.names, options.ranks, options.ranks)


def runs_of(options: argparse.Namespace) -> list[Recordable]:
    return [of_engine(name, options) for name in options.names] if options.bug is None else of_exhibit(options.bug)


@engine_file.named_in_errors()
def on_ranks(options: argparse.Namespace, folder: Path) -> None:
    """The program of every rank: make one recording after the other, and write each into the folder."""
    device = "cpu" if options.bug is not None else options.device  # as the museum
    world = process_group.start("gloo" if options.bug is not None else options.backend, device)
    for run in runs_of(options):
        seen = record(run, world, options.tries)
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
    recordings = page.recordings_of(options.source) if options.source else None
    if recordings is None:
        check_memory(options)
        several = len(runs_of(options))
        hint = f" (about a minute; --engines {options.opens} records one)" if several > 2 else ""
        print(f"recording {several} engines on {options.ranks} ranks{hint}", flush=True)
        recordings = record_all(options, argv)
    json_file.write(options.json, recordings, indent=None)
    if options.out:
        text = page.build(recordings, options.opens, beside="" if options.bug is None else "right")
        done = "replaced" if Path(options.out).exists() else "written"
        Path(options.out).write_text(text, encoding="utf-8")
        size = f"{len(text.encode()) / 1e3:.0f} kB"
        print(f"{done}: {Path(options.out).resolve()} ({size}; a double click opens it)")
    if options.gif:
        print("drawing the animation")
        animation.draw(page.build(recordings, options.opens), Path(options.gif), options.dark)
        print(f"written: {Path(options.gif).resolve()} ({Path(options.gif).stat().st_size / 1e3:.0f} kB)")
    return 0

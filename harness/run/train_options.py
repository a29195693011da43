"""The options of `./launch.sh train`, and what is refused before any rank starts."""

import argparse
import math
import os
from pathlib import Path

from harness.engine import checkpoint
from harness.run import journal, process_group
from harness.run import options as common
from harness.run.engines import STAGES
from harness.run.folder import lock, refuse_others

PATIENCE = 5.0  # seconds for a run that is about to leave: more than ranks need to notice that their launcher is gone
# What a run may change when it goes on, and what then is another run than the one without a break.
KEPT = ("data", "steps", "global_batch", "accumulate", "dtype", "lr", "warmup", "clip", "seed")


def arguments(argv=None) -> argparse.Namespace:
    about = "A training run that comes back: the same line goes on."
    parser = common.Parser("train STAGE [N]", description=about)
    parser.add_argument("stage", choices=STAGES)
    common.add(parser, "folder", "preset", "steps", "global-batch", "accumulate", "dtype", steps=200, accumulate=1)
    common.add(parser, "lr", "warmup", "clip", "save-every", "keep", "evaluate-every", "print-every")
    common.add(parser, "data", "seed", "backend", "device", "anyway")
    options = parser.parse_args(argv)
    common.settle(options)
    options.folder = Path(options.folder or f"runs/{options.stage}-{options.preset}")
    if "ZERO_PREFLIGHT" in os.environ:
        check_batch(options, process_group.planned_world_size(options.backend, options.device))
        _check_folder(options)
    return options


def check_batch(options: argparse.Namespace, ranks: int) -> None:
    least = ranks * options.accumulate
    if options.global_batch < least:
        need = f"{ranks} rank(s) with --accumulate {options.accumulate} need {least} or more sequences per step"
        raise ValueError(f"--global-batch {options.global_batch} is too small: {need}, one for each backward")


def _check_folder(options: argparse.Namespace) -> None:
    refuse_others(options.folder)
    options.folder.mkdir(parents=True, exist_ok=True)
    if process_group.machines() == 1:  # of several, the others may have begun this run
        lock(options.folder, PATIENCE).release()
    starts = journal.of(journal.read(options.folder / journal.NAME), "start")
    if checkpoint.complete(options.folder) and starts and starts[-1]["preset"] != options.preset:
        other = f"--folder {str(options.folder)!r} has a run of another model than {options.preset!r}"
        raise ValueError(f"{other}: take --preset {starts[-1]['preset']}, or another --folder")


def kept(options: argparse.Namespace) -> dict:
    """What a checkpoint keeps of the options, so that the next start can say what is new."""
    return {name: getattr(options, name) for name in KEPT}


def changed(before: dict, options: argparse.Namespace) -> list[str]:
    """Which options are others than those `before`, as in "--batch 8 -> 16"."""
    found = []
    for name, value in kept(options).items():
        if before[name] != value:
            found.append(f"--{name.replace('_', '-')} {before[name]} -> {value}")
    return found


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Of the step after `step` others: it grows evenly to `--lr`, then falls as a cosine does, to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

"""The options of `./launch.sh train`, and what is refused before any rank starts."""

import argparse
import contextlib
import math
import os
from pathlib import Path

import torch

from harness.engine import checkpoint
from harness.engine.safe_reader import Folder
from harness.run import options as common
from harness.run import process_group
from harness.run.folder import refuse_others
from harness.run.journal import read
from harness.run.model import GPT, preset

STAGES = {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}
DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # to compute and gather in; shards and gradients' sums are float32

# What a run may change when it goes on, and what then is another run than the one without a break.
KEPT = ("data", "steps", "batch", "accumulate", "dtype", "lr", "warmup", "clip", "seed")
RATE = (
    "AdamW's, after the warm-up; then a cosine down to a tenth at --steps (another --steps is another curve) "
    "(default 1e-3)"
)


def arguments(argv=None) -> argparse.Namespace:
    usage = "./launch.sh train STAGE [N] [options]"
    parser = argparse.ArgumentParser(
        prog="train", usage=usage, description="A training run that comes back: the same line goes on."
    )
    parser.add_argument("stage", help=", ".join(STAGES))
    common.add(parser, "preset", "data", "seed", "backend", "device")
    parser.add_argument("--steps", type=int, default=200, help="of the whole run, with what is done (default 200)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, of all ranks together (default 8)")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards per step, each on a part (default 1)")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="to compute in (default fp32)")
    parser.add_argument("--lr", type=float, default=1e-3, help=RATE)
    parser.add_argument("--warmup", type=int, default=10, help="steps in which it grows to that (default 10)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients; 0: any (default 1)")
    parser.add_argument("--folder", help="checkpoints and losses.jsonl (default runs/STAGE-PRESET)")
    parser.add_argument("--save-every", type=int, default=50, help="steps from checkpoint to checkpoint (default 50)")
    parser.add_argument("--keep", type=int, default=3, help="so many checkpoints, the newest (default 3)")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps; on held-out text (default 50)")
    parser.add_argument("--print-every", type=int, default=10, help="steps (default 10)")
    options = parser.parse_args(argv)
    if options.stage not in STAGES:
        raise ValueError(f"no stage {options.stage!r}; there are: {', '.join(STAGES)}")
    common.settle(options, steps=1, batch=1, accumulate=1, save_every=1, keep=1, evaluate_every=1, print_every=1)
    for name in ("lr", "warmup", "clip"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"--{name} must be 0 or more, got {getattr(options, name)}")
    options.folder = Path(options.folder or f"runs/{options.stage}-{options.preset}")
    if "ZERO_PREFLIGHT" in os.environ:
        here = process_group.ranks_here(os.environ["ZERO_PREFLIGHT"], options.backend, options.device)
        check_batch(options, here * process_group.machines())
        _check_folder(options)
    return options


def check_batch(options: argparse.Namespace, ranks: int) -> None:
    least = ranks * options.accumulate
    if options.batch < least:
        raise ValueError(
            f"--batch {options.batch} is too small: {ranks} rank(s) with --accumulate {options.accumulate} need "
            f"{least} or more sequences per step, one for each backward"
        )


def _check_folder(options: argparse.Namespace) -> None:
    refuse_others(options.folder)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "losses.jsonl").touch()
    except OSError as error:
        raise ValueError(f"cannot write --folder {str(options.folder)!r}: {error.strerror}") from error
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in GPT(preset(options.preset)).state_dict().items()}
    for path in checkpoint.complete(options.folder)[-1:]:
        with contextlib.suppress(checkpoint.Damaged):  # the ranks will take the one before it
            there = {name: value.shape for name, value in Folder(path, check=False).model_on_meta().items()}
            if there != wanted:
                starts = [line for line in read(options.folder / "losses.jsonl") if line.get("event") == "start"]
                own = (
                    f"(preset {starts[-1]['preset']}): take --preset {starts[-1]['preset']}"
                    if starts
                    else "(see there): take its --preset"
                )
                raise ValueError(
                    f"--folder {str(options.folder)!r} has a run of another model than {options.preset!r} {own} or "
                    "another --folder"
                )


def kept(options: argparse.Namespace) -> dict:
    """What a checkpoint keeps of the options, so that the next start can say what is new."""
    return {name: getattr(options, name) for name in KEPT}


def changed(before: dict, options: argparse.Namespace) -> list[str]:
    """Which options are others than those `before`, as in "--batch 8 -> 16". An older checkpoint may have none."""
    now = kept(options)
    return [f"--{name} {before[name]} -> {now[name]}" for name in KEPT if name in before and before[name] != now[name]]


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Of the step after `step` others: it grows evenly to `--lr`, then falls as a cosine does, to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

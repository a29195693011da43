"""What commands have in common: options that mean the same in all of them, how they are checked, and the JSON."""

import argparse
import json
import math
import sys

from harness.run import process_group
from harness.run.command_line import Parser
from harness.run.model import PRESETS, preset

COMMON = {
    "preset": {"default": "tiny", "help": f"model shape: {', '.join(PRESETS)} (default %(default)s)"},
    "seq": {"type": int, "help": "tokens per sequence (default: all the preset has)"},
    "checkpoint-activations": {"action": "store_true", "help": "recompute each block in backward"},
    "data": {"help": "a file to train on (default: the Python standard library's sources)"},
    "lr": {"type": float, "default": 1e-3, "help": "AdamW's learning rate (default 1e-3)"},
    "seed": {"type": int, "default": 0, "help": "of weights and batches (default 0)"},
    "backend": {"default": "auto", "help": "auto, gloo, or the accelerator's own: nccl for CUDA"},
    "device": {"default": "auto", "help": "auto, cpu, or the accelerator: cuda for NVIDIA and AMD"},
    "json": {"help": "write the results to this file"},
}


def add(parser: Parser, *names: str, **defaults) -> None:
    """Add these of the common options, with other `defaults` where they are given."""
    for name in names:
        more = {"default": defaults[name]} if name in defaults else {}
        parser.add_argument(f"--{name}", **COMMON[name] | more)


def at_least(options: argparse.Namespace, **least: float) -> None:
    """Raises ValueError if one of these options, where it was given, is smaller than `least` says."""
    for name, number in least.items():
        given = getattr(options, name)
        if given is not None and not given >= number:  # not a number is refused, too
            raise ValueError(f"--{name.replace('_', '-')} must be {number} or more, got {given}")


def settle(options: argparse.Namespace, **least: float) -> None:
    """Fill in `seq` from the preset, and check: the preset, `seq`, `lr`, `clip`, the file of --json, and `at_least`.

    Raises ValueError, with one clear line.
    """
    at_least(options, **least)
    config = preset(options.preset) if hasattr(options, "preset") else None
    if config is not None and hasattr(options, "seq"):
        options.seq = config.seq if options.seq is None else options.seq
        if options.seq > config.seq:
            raise ValueError(f"--seq {options.seq}, but preset {options.preset} has {config.seq} positions at most")
    for name in ("lr", "clip"):
        if not 0 <= getattr(options, name, 0) < math.inf:
            raise ValueError(f"--{name} must be a finite number, 0 or more, got {getattr(options, name)}")
    process_group.check_writable("--json", getattr(options, "json", None))


def command(*words) -> str:
    """This run's command line, for its JSON: `words`, as "compare" and the number of ranks, and the options."""
    return " ".join(map(str, ["./launch.sh", *words, *sys.argv[1:]]))


def write_json(file: str | None, results: dict, indent: int | None = 1) -> None:
    """Write the results to the file of --json, if one is given."""
    if file:
        with open(file, "w") as opened:
            json.dump(results, opened, indent=indent)
            opened.write("\n")

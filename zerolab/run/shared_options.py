"""Options that several commands have, their types and their checks. Imports only the standard library.

A command's own options are in the file `*_options.py` next to the command. Its function `arguments()` accepts the words
behind the command's name (default: this process's) and returns the options. A mistake ends the process with one line
and exit status 2, before torch is imported.
"""

import argparse
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from zerolab.run.command_line import Parser, did_you_mean
from zerolab.run.names import ENGINES, PRESETS

RANKS = """\
N is the number of ranks, which are the processes that train together. Without N
there is one rank per GPU, or two ranks if the machine has fewer than two GPUs."""
ENGINE = "An engine is anything that trains a model, such as DDP."


def make_parser(usage: str, description: str, examples: str) -> Parser:
    """The parser of a command. `usage` is the command with its positional arguments.

    --help prints the description above the options and the examples below them, with the line breaks that they have.
    """
    keep_lines = argparse.RawDescriptionHelpFormatter
    return Parser(usage, description=description, epilog=f"examples:\n{examples}", formatter_class=keep_lines)


# Types of options: the text that was typed becomes a value, or an error.


def whole_number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text}")
    return number


def positive_int(text: str) -> int:
    return whole_number(text, 1)


def non_negative_int(text: str) -> int:
    return whole_number(text, 0)


def non_negative_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number, 0 or more, got {text}")
    return number


def preset(text: str) -> str:
    if text not in PRESETS:
        near = did_you_mean(text, PRESETS)
        raise argparse.ArgumentTypeError(f"no preset {text!r}{near} Use one of: {', '.join(PRESETS)}")
    return text


def existing_file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return text


def rank_and_seconds(text: str) -> tuple[int, float]:
    """(1, 0.05) from "1:0.05"."""
    found = re.fullmatch(r"(\d+):(\d*\.?\d+)", text)
    if found is None or float(found[2]) > 60:
        raise argparse.ArgumentTypeError(f"must be RANK:SECONDS with 0 to 60 seconds, such as 1:0.05, got {text!r}")
    return int(found[1]), float(found[2])


# Options that several commands have.


def add_preset(parser, default: str = "tiny") -> None:
    names = ", ".join(PRESETS)
    parser.add_argument(
        "--preset", type=preset, default=default, help=f"the size of the GPT: {names} (default {default})"
    )


def add_seq(parser) -> None:
    parser.add_argument(
        "--seq",
        type=positive_int,
        metavar="TOKENS",
        help="tokens per sequence (default: the most that the preset allows)",
    )


def add_steps(parser, default: int) -> None:
    parser.add_argument(
        "--steps", type=positive_int, default=default, help=f"the number of training steps (default {default})"
    )


def add_batch(parser, default: int) -> None:
    parser.add_argument(
        "--batch",
        type=positive_int,
        default=default,
        metavar="SEQUENCES",
        help=f"the number of sequences that each rank trains on in a step (default {default})",
    )


def add_accumulate(parser) -> None:
    parser.add_argument(
        "--accumulate",
        type=positive_int,
        default=1,
        metavar="COUNT",
        help="split each rank's batch into this number of micro-batches, each with its own forward and backward; "
        "--batch must be a multiple of it (default 1)",
    )


def add_checkpoint_activations(parser) -> None:
    parser.add_argument(
        "--checkpoint-activations",
        action="store_true",
        help="do not keep the activations inside the transformer blocks, but compute them again in backward",
    )


def add_dtype(parser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="with bf16, computation and gathered parameters are in bfloat16, and the optimizer updates float32 "
        "weights (default fp32)",
    )


def add_hardware(parser) -> None:
    backends = ("auto", "gloo", "nccl", "xccl")
    parser.add_argument(
        "--backend",
        choices=backends,
        default="auto",
        help="the library for collectives: nccl for NVIDIA's and AMD's GPUs, xccl for Intel's, gloo for CPUs and for "
        "ranks that share a GPU; auto chooses (default auto)",
    )
    devices = ("auto", "cpu", "cuda", "xpu")
    parser.add_argument(
        "--device",
        choices=devices,
        default="auto",
        help="where to compute: cuda stands for NVIDIA's and AMD's GPUs, and xpu for Intel's; auto uses the GPUs if "
        "there are any (default auto)",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="start even if the ranks seem to need more memory than is free"
    )


def add_engines(parser, default: tuple[str, ...]) -> None:
    parser.add_argument(
        "--engines",
        metavar="NAME,NAME",
        help=f"use only these engines; an unknown name prints the list of all names (default: {', '.join(default)})",
    )


def add_engine_file(parser) -> None:
    parser.add_argument(
        "--engine-file",
        metavar="FILE.py",
        action="append",
        default=[],
        help="also use the engine in this file, which docs/your-engine.md describes; the option can be repeated",
    )


def add_json(parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file, as JSON")


# Checks of several options together.


def check_engines(parser: Parser, options: argparse.Namespace, runs: Iterable[str] = ENGINES) -> list[str]:
    """Check that --engines has only names of engines that the command `runs`, and that --engine-file has files.

    Returns the names that are possible: `runs`, and the names of the files.
    """
    known = list(runs)
    for given in getattr(options, "engine_file", []):
        path = Path(given)
        if path.suffix != ".py" or not path.is_file():
            parser.error(
                f"--engine-file {given}: it must be a file whose name ends in .py, and {path.resolve()} is not one"
            )
        known.append(path.stem)
    if options.engines is not None:
        names = split(options.engines)
        if not names:
            parser.error(f"--engines is empty. Use one or more of: {', '.join(known)}")
        for name in names:
            check_name(parser, name, known)
    return known


def split(names: str) -> list[str]:
    """["zero1", "ddp"] from "zero1, ddp"."""
    return [name.strip() for name in names.split(",") if name.strip()]


def check_name(parser: Parser, name: str, known: list[str]) -> None:
    """End the command with one line if `name` is not one of the `known` engines."""
    if name not in known:
        parser.error(f"no engine {name!r}{did_you_mean(name, known)} Use one or more of: {', '.join(known)}")


def check_seq(parser: Parser, options: argparse.Namespace) -> None:
    """Fill in the default of --seq, and check that the preset allows it."""
    most = PRESETS[options.preset]["seq"]
    if options.seq is None:
        options.seq = most
    if options.seq > most:
        parser.error(f"--seq {options.seq} is too long: preset {options.preset} allows {most} tokens at most")


def check_batch(parser: Parser, options: argparse.Namespace) -> None:
    if options.batch % options.accumulate:
        parser.error(f"--batch must be a multiple of --accumulate {options.accumulate}, but it is {options.batch}")


def check_writable(option: str, path: str | None) -> None:
    """Raise ValueError if a file cannot be written, before the measurements whose results it is for.

    The check opens the file, because permissions are not the only reason for failure, and leaves it unchanged. The
    launcher checks it once, and the ranks do not check it again.
    """
    if path is None or "RANK" in os.environ:
        return
    new = not os.path.exists(path)
    try:
        open(path, "a").close()
    except OSError as error:
        raise ValueError(f"cannot write {option} {path!r}: {error.strerror}") from error
    if new:
        os.remove(path)


def check_world_size(options: argparse.Namespace, world_size: int) -> None:
    """Raise ValueError for options of `compare` and `train` that do not fit the number of ranks."""
    slow_rank = getattr(options, "slow_rank", None)
    if slow_rank and slow_rank[0] >= world_size:
        raise ValueError(f"--slow-rank {slow_rank[0]}: the ranks are 0 to {world_size - 1}")
    global_batch = getattr(options, "global_batch", world_size)
    if global_batch < world_size:
        raise ValueError(f"--global-batch {global_batch}: {world_size} rank(s) need {world_size} or more sequences")


# Environment variables.


def timeout() -> float:
    """ZERO_TIMEOUT: the seconds that a rank waits in a collective for the other ranks. Raises ValueError."""
    given = os.environ.get("ZERO_TIMEOUT", "120")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", given) or not 0 < float(given) <= 1e6:
        raise ValueError(f"ZERO_TIMEOUT must be a number of seconds above 0 and at most 1,000,000, got {given!r}")
    return float(given)


def machines() -> int:
    """NNODES: the number of machines, or the larger number of a range such as 1:2. Raises ValueError."""
    given = os.environ.get("NNODES") or "1"
    if not re.fullmatch("([0-9]+:)?[0-9]+", given):
        raise ValueError(f"NNODES must be a number of machines, such as 2, or a range, such as 1:2, got {given!r}")
    return int(given.rpartition(":")[2])

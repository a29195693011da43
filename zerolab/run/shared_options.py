"""Options that several commands have, their types and their checks. Imports only the standard library.

A command's own options are in `*_options.py` beside the command. `arguments()` there takes the words behind the
command's name (default: this process's) and returns the options. A mistake ends the process with one line and exit
status 2, before torch is imported.
"""

import argparse
import contextlib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from zerolab.run.command_line import Parser, did_you_mean
from zerolab.run.names import ENGINES, PRESETS

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


def vocabulary(text: str) -> int:
    return whole_number(text, 256)  # text is bytes


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
        raise argparse.ArgumentTypeError(f"no preset {text!r}{near} There are: {', '.join(PRESETS)}")
    return text


def existing_file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return text


def rank_and_seconds(text: str) -> tuple[int, float]:
    """(1, 0.05) from "1:0.05"."""
    found = re.fullmatch(r"(\d+):(\d*\.?\d+)", text)
    if found is None or float(found[2]) > 60:
        raise argparse.ArgumentTypeError(f"must be a rank and 0 to 60 seconds, such as 1:0.05, got {text!r}")
    return int(found[1]), float(found[2])


# Options that several commands have.


def add_preset(parser, default: str = "tiny") -> None:
    names = ", ".join(PRESETS)
    parser.add_argument(
        "--preset", type=preset, default=default, help=f"the size of the model: {names} (default {default})"
    )


def add_seq(parser) -> None:
    parser.add_argument("--seq", type=positive_int, help="tokens per sequence (default: as many as the preset allows)")


def add_steps(parser, default: int) -> None:
    parser.add_argument(
        "--steps", type=positive_int, default=default, help=f"number of training steps (default {default})"
    )


def add_batch(parser, default: int) -> None:
    parser.add_argument(
        "--batch",
        type=positive_int,
        default=default,
        help=f"sequences that each rank trains on per step (default {default})",
    )


def add_accumulate(parser) -> None:
    parser.add_argument(
        "--accumulate",
        type=positive_int,
        default=1,
        help="split each batch into this number of micro-batches, each with its own backward (default 1)",
    )


def add_checkpoint_activations(parser) -> None:
    parser.add_argument(
        "--checkpoint-activations",
        action="store_true",
        help="do not keep the activations of the blocks, but compute them again in backward",
    )


def add_dtype(parser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="with bf16, compute and gather in bfloat16 and keep float32 weights (default fp32)",
    )


def add_training(parser) -> None:
    """What is trained on, and how."""
    parser.add_argument(
        "--data", type=existing_file, help="the file to train on (default: the sources of Python's standard library)"
    )
    parser.add_argument(
        "--lr", type=non_negative_float, default=1e-3, help="the learning rate of AdamW (default 0.001)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of the weights and the batches (default 0)")


def add_hardware(parser) -> None:
    backends = ("auto", "gloo", "nccl", "xccl")
    parser.add_argument(
        "--backend",
        choices=backends,
        default="auto",
        help="the library for collectives; auto chooses nccl if each rank has its own GPU (default auto)",
    )
    devices = ("auto", "cpu", "cuda", "xpu")
    parser.add_argument(
        "--device",
        choices=devices,
        default="auto",
        help="where to compute; AMD's GPUs are also called cuda (default auto)",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="start even if there does not seem to be enough free memory"
    )


def add_engines(parser) -> None:
    parser.add_argument(
        "--engines", metavar="NAME,NAME", help="run only these engines; an unknown name prints the list of names"
    )


def add_engine_file(parser) -> None:
    parser.add_argument(
        "--engine-file",
        metavar="FILE.py",
        action="append",
        default=[],
        help="a file with your own engine, see docs/your-engine.md; can be given several times",
    )


def add_json(parser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")


# Checks of several options together.


def check_engines(parser: Parser, options: argparse.Namespace, runs: Iterable[str] = ENGINES) -> list[str]:
    """Whether --engines names engines that the command `runs`, and --engine-file files.

    Returns the names that are possible: `runs`, and those of the files.
    """
    known = list(runs)
    for given in getattr(options, "engine_file", []):
        path = Path(given)
        if path.suffix != ".py" or not path.is_file():
            parser.error(
                f"--engine-file {given}: it must be a file whose name ends in .py, and {path.resolve()} is not"
            )
        known.append(path.stem)
    if options.engines is not None:
        names = split(options.engines)
        if not names:
            parser.error(f"--engines is empty. Pass some of these: {', '.join(known)}")
        for name in names:
            check_name(parser, name, known)
    return known


def split(names: str) -> list[str]:
    """["zero1", "ddp"] from "zero1, ddp"."""
    return [name.strip() for name in names.split(",") if name.strip()]


def check_name(parser: Parser, name: str, known: list[str]) -> None:
    if name not in known:
        parser.error(f"no engine {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}")


def check_seq(parser: Parser, options: argparse.Namespace) -> None:
    """Without --seq it is all that the preset has."""
    most = PRESETS[options.preset]["seq"]
    if options.seq is None:
        options.seq = most
    if options.seq > most:
        parser.error(f"--seq {options.seq}, but preset {options.preset} has {most} positions at most")


def check_batch(parser: Parser, options: argparse.Namespace) -> None:
    if options.batch % options.accumulate:
        parser.error(f"--batch must be a multiple of --accumulate {options.accumulate}, but it is {options.batch}")


def check_writable(option: str, path: str | None) -> None:
    """Raise ValueError for a file that cannot be written, before the work that it is for.

    The file is opened, because permissions are not the only reason, and left unchanged. Ranks do not ask again.
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


def check_folder(folder: Path, instead: str) -> None:
    """Raise ValueError if no file can be written into `folder`, which may not exist yet. Leaves everything as it was.

    `instead` is the option that names another place.
    """
    if "RANK" in os.environ:
        return
    new, file = not folder.exists(), folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        file.write_bytes(bytes(4096))  # a full disk accepts an empty file
        file.unlink()
    except OSError as error:
        where = folder.absolute()
        raise ValueError(
            f"cannot write to {where}: {error.strerror}. Start in a different folder, or use {instead}"
        ) from error
    if new:
        with contextlib.suppress(OSError):  # another command may have put a file there meanwhile
            folder.rmdir()


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
    """ZERO_TIMEOUT, the seconds in which all ranks must join a collective. Raises ValueError."""
    given = os.environ.get("ZERO_TIMEOUT", "120")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", given) or not 0 < float(given) <= 1e6:
        raise ValueError(f"ZERO_TIMEOUT must be a number of seconds above 0, a million at most, got {given!r}")
    return float(given)


def machines() -> int:
    """NNODES, the number of machines; the larger number of NNODES=1:2. Raises ValueError."""
    given = os.environ.get("NNODES") or "1"
    if not re.fullmatch("([0-9]+:)?[0-9]+", given):
        raise ValueError(f"NNODES must be a number of machines, such as 2, or a range, such as 1:2, got {given!r}")
    return int(given.rpartition(":")[2])

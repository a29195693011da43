"""What commands have in common: options that mean the same in all of them, how they are checked, and the JSON."""

import argparse
import json
import math
import os
import platform
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import torch

from zerolab.run import process_group
from zerolab.run.command_line import Parser
from zerolab.run.model import preset

OPTIONS = tomllib.loads(Path(__file__).with_name("options.toml").read_text())
KINDS = {"int": int, "float": float}


def add(parser: Parser, *names: str, **defaults) -> None:
    """Add these of the options in options.toml, with other `defaults` where they are given."""
    for name in names:
        said = dict(OPTIONS[name])
        least = said.pop("least", -math.inf)
        if "type" in said:
            said["type"] = partial(number, KINDS[said["type"]], least)
        if name.replace("-", "_") in defaults:
            said["default"] = defaults[name.replace("-", "_")]
        parser.add_argument(f"--{name}", **said)


def number(kind: type, least: float, given: str):
    """The number that was typed. Raises argparse's error for another word, and for one that is too small."""
    try:
        found = kind(given)
        if least <= found < math.inf:  # not a number is refused, too
            return found
    except ValueError:
        pass
    what = "whole number" if kind is int else "finite number"
    raise argparse.ArgumentTypeError(f"must be a {what}, {least} or more, got {given}")


def settle(options: argparse.Namespace) -> None:
    """Fill in `seq` from the preset, and check: the preset, `seq`, and the file of --json.

    Raises ValueError, with one clear line.
    """
    config = preset(options.preset)
    if hasattr(options, "seq"):
        options.seq = config.seq if options.seq is None else options.seq
        if options.seq > config.seq:
            raise ValueError(f"--seq {options.seq}, but preset {options.preset} has {config.seq} positions at most")
    process_group.check_writable("--json", getattr(options, "json", None))


def file_of_results(given: str | None, command: str) -> str:
    """The file of --json, or one in runs/, where the user stands."""
    return given or time.strftime(f"runs/{command}-%Y%m%d-%H%M%S.json")


def command(*words) -> str:
    """This run's command line, for its JSON: `words`, as "compare" and the number of ranks, and the options."""
    return " ".join(map(str, ["./launch.sh", *words, *sys.argv[1:]]))


def about(device: torch.device, *words) -> dict[str, str]:
    """Where this run was measured, and by which command line, for its JSON."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"hardware": process_group.hardware(device), **versions, "command": command(*words)}


def write_whole(path: str | Path, text: str) -> None:
    """Write a file in one step: if this process is killed meanwhile, the file has its old content or the new one."""
    path = Path(path).resolve()  # a link stays a link
    if path.exists() and not path.is_file():  # /dev/stdout, for example
        path.write_text(text)
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def write_json(file: str | Path | None, results: dict | list, indent: int | None = 1, whole: bool = True) -> None:
    """Write the results to the file of --json, if one is given, and say where it is.

    Raises ValueError for a file that cannot be written. Of results that are not `whole` yet nothing is said: the end
    of the work will say it.
    """
    if not file:
        return
    path = os.path.abspath(file)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_whole(path, json.dumps(results, indent=indent, ensure_ascii=False) + "\n")
    except OSError as error:
        if whole:
            raise ValueError(f"cannot write {path}: {error.strerror}") from error
    if whole:
        print(f"written: {path}", flush=True)

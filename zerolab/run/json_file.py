"""The JSON files of --json: where a run was measured, by which command, and how a file is written."""

import json
import os
import platform
import sys
from pathlib import Path

import torch

from zerolab.run import code, process_group


def command(*words) -> str:
    """This run's command line, for its JSON: `words`, as "compare" and the number of ranks, and the options."""
    return " ".join(map(str, ["./launch.sh", *words, *sys.argv[1:]]))


def about(device: torch.device, *words) -> dict[str, str | None]:
    """Where this run was measured, on which code, and by which command line, for its JSON."""
    return {
        "hardware": process_group.hardware(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": code.commit(),
        "code": code.measured_hash(),
        "command": command(*words),
    }


def write_whole(path: str | Path, text: str) -> None:
    """Write a file in one step: if this process is killed meanwhile, the file has its old content or the new one."""
    path = Path(path).resolve()  # a link stays a link
    if path.exists() and not path.is_file():  # /dev/stdout, for example
        path.write_text(text)
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def write(file: str | Path | None, results: dict | list, indent: int | None = 1, whole: bool = True) -> None:
    """Write the results to the file of --json, if one is given, and print where it is.

    Raises ValueError for a file that cannot be written. Results that are not `whole` yet are written without a
    message, because the end of the work prints one.
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

"""Is there enough memory on the host for a command's ranks? This is checked before any of them starts.

Without enough memory Linux kills a process, without a message. On a GPU torch raises an error that says what happened,
so only the host's memory is checked. The check adds up the formulas for the state, without activations.
"""

import argparse
from pathlib import Path

from zerolab.run.names import ENGINES, PRESETS

BYTES = {"parameters": 4, "gradients": 4, "optimizer": 8}  # per parameter, in float32 with AdamW


def parameters(shape: dict[str, int]) -> int:
    """The number of parameters of a GPT with `layers`, `width`, `seq` and `vocab`: the others change nothing."""
    width = shape["width"]
    block = 12 * width**2 + 13 * width
    return shape["layers"] * block + width * (shape.get("vocab", 256) + shape["seq"] + 2)


def needed(options: argparse.Namespace, preset: str, engines: list[str], world_size: int) -> float:
    """Bytes that a rank needs at least. All engines are alive while they are timed, else one at a time."""
    number = parameters(PRESETS[preset])
    states = []
    for name in engines:
        shards = ENGINES[name].shards if name in ENGINES else ()  # an engine in a file may shard nothing
        states.append(sum(number * each / (world_size if part in shards else 1) for part, each in BYTES.items()))
    state = sum(states) if getattr(options, "timed_steps", 1) else max(states)
    return max(state, 4 * number)  # a model is whole before it is cut


def free_bytes() -> int | None:
    """What is free on this machine, or in its container. None where there is no /proc/meminfo (macOS)."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    (line,) = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    free = 1024 * int(line.split()[1])
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdecimal():
        free = min(free, int(limit.read_text()) - int(limit.with_name("memory.current").read_text()))
    return free


def refuse_too_large(options: argparse.Namespace, engines: list[str], ranks_here: int, world_size: int) -> None:
    """Raise ValueError if the ranks on this machine together need more memory than is free, unless --anyway."""
    free = free_bytes()
    need = ranks_here * needed(options, options.preset, engines, world_size)
    if options.anyway or free is None or need <= free:
        return
    names = list(PRESETS)
    advice = "use a smaller model"
    for name in names[: names.index(options.preset)]:
        if ranks_here * needed(options, name, engines, world_size) <= free:
            advice = f"use --preset {name}"
    raise ValueError(
        f"{ranks_here} rank(s) need {need / 1e9:.1f} GB or more, and {free / 1e9:.1f} GB are free on this machine: "
        f"{advice}, or --anyway"
    )

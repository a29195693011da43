"""Is there memory enough for what a command is about to build? A dry run says so, before any rank starts.

    python zerolab/run/start.py zerolab.measure.enough_memory zerolab.run.train zero3 --preset 70b

is how launch.sh has a command's options checked: that command itself does so, and this question is added.
"""

import argparse
import contextlib
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from zerolab.engine import accelerator
from zerolab.measure.dry_run import row_of
from zerolab.measure.fake_ranks import fake_ranks
from zerolab.measure.memory_formulas import held_by_formula
from zerolab.measure.tables import in_words
from zerolab.run import process_group
from zerolab.run.engines import named
from zerolab.run.model import PRESETS, number_of_parameters, preset

SURE = 0.1  # of what is free. If a model's state has less than this, and its batch is usual, nobody waits for a dry run
USUAL = 4096  # tokens of a rank
DEFAULTS = {"shape": {}, "seq": sys.maxsize, "dtype": "fp32", "accumulate": 1, "checkpoint_activations": False}


def refuse_too_large(options: argparse.Namespace, ranks: int, device: str) -> None:
    """Raises ValueError if `ranks` on this machine together need more memory than is free, unless --anyway."""
    if options.anyway:
        return
    free, where = free_bytes(device)
    sharing = ranks if device == "cpu" else -(-ranks // accelerator.count())  # one GPU's memory
    need = bytes_of_rank(options, options.preset, ranks, free / sharing, device)
    if need * sharing <= free:
        return
    take, smaller = "take a smaller model or batch", list(PRESETS)[: list(PRESETS).index(options.preset)]
    for name in reversed(smaller):
        with contextlib.suppress(ValueError):  # a --width that this one's heads do not divide
            if bytes_of_rank(options, name, ranks, free / sharing, device) * sharing <= free:
                take = f"take --preset {name}"
                break
    said = f"{sharing} rank(s) need {in_words(need)} each, as a dry run says, and {in_words(free)} are free {where}"
    raise ValueError(f"{said}: {take}, or --anyway")


def free_bytes(device: str) -> tuple[int, str]:
    """(how many bytes are free, where): on the GPU, or on the host, or in the container that is all we have of it."""
    if device != "cpu":
        return torch.get_device_module(torch.device(device)).mem_get_info()[0], "on the GPU"
    free, limit = psutil.virtual_memory().available, Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdecimal():
        free = min(free, int(limit.read_text()) - int(limit.with_name("memory.current").read_text()))
    return free, "on this machine"


def bytes_of_rank(options: argparse.Namespace, name: str, ranks: int, free: float, device: str = "cuda") -> float:
    """What a rank needs with the preset `name`: the largest peak of the engines, and what others hold meanwhile.

    Where the state alone is too much, or next to nothing of `free`, it is the state, by the formulas.
    """
    asked = argparse.Namespace(**DEFAULTS | vars(options) | {"preset": name, "device": "fake"})
    asked.config, asked.ranks = replace(preset(name), **asked.shape), ranks * process_group.machines()
    asked.seq = min(asked.seq, asked.config.seq)
    if not hasattr(asked, "batch"):  # a training run
        asked.batch = -(-asked.global_batch // asked.ranks)
        asked.engines = [asked.stage]
    parameters = number_of_parameters(asked.config)
    # DDP needs the most of all, so it stands for those that the dry run does not know.
    known = [engine if engine in named("memory") else "ddp" for engine in asked.engines]
    held = [held_by_formula(engine, asked.dtype, parameters, asked.ranks) for engine in known]
    others = sum(held) - max(held) if getattr(asked, "timed_steps", 1) else 0  # to be timed all of them are alive
    state = others + max(*held, 4 * parameters)  # before it is cut, a model is whole
    usual = asked.batch * asked.seq <= USUAL * asked.accumulate
    if state > free or (usual and state < SURE * free):
        return state
    with fake_ranks(asked.ranks):
        row = row_of(known[held.index(max(held))], asked)
    # Ranks on CPUs use gloo, which keeps copies that the dry run does not see.
    return others + row["peak_bytes"] + (row["gloo_copy_bytes"] if device == "cpu" else 0)


if __name__ == "__main__":
    process_group.CHECKS[:] = [refuse_too_large]
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)

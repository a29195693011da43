"""Names of presets, chapters, engines and exercises, for the options and for the modules that have the rest.

It imports only the standard library, so that `--help` and mistakes in options are answered before torch is imported.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())  # {name: the shape of a GPT}
CHAPTERS = ("zero1", "zero2", "zero3")


class Listed(NamedTuple):
    """An engine: what its ranks divide between steps, and the commands that run it without --engines."""

    shards: tuple[str, ...]
    commands: tuple[str, ...]


NOTHING = ()
OPTIMIZER = ("optimizer",)
GRADIENTS = ("gradients", "optimizer")
EVERYTHING = ("parameters", "gradients", "optimizer")

# In the order of the tables. zerolab/run/engines.py has the rest. memory, plan and watch know by name only the
# engines that they run by default.
ENGINES = {
    "single": Listed(NOTHING, ("compare",)),
    "ddp": Listed(NOTHING, ("compare", "memory", "plan", "watch", "conform")),
    "zero1": Listed(OPTIMIZER, ("compare", "memory", "plan", "watch", "conform")),
    "zero1_2psi": Listed(OPTIMIZER, ("plan",)),
    "zero_redundancy_optimizer": Listed(OPTIMIZER, ("compare", "conform")),
    "zero2": Listed(GRADIENTS, ("compare", "memory", "plan", "watch", "conform")),
    "fsdp2_no_reshard": Listed(EVERYTHING, ("compare", "memory", "conform")),
    "zero3": Listed(EVERYTHING, ("compare", "memory", "plan", "watch", "conform")),
    "zero3-prefetch0": Listed(EVERYTHING, ("watch",)),
    "fsdp2": Listed(EVERYTHING, ("compare", "memory", "watch", "conform")),
    "fsdp1": Listed(EVERYTHING, ()),
    "fsdp1_article": Listed(EVERYTHING, ()),
    "deepspeed1": Listed(OPTIMIZER, ("conform",)),
    "deepspeed2": Listed(GRADIENTS, ("conform",)),
    "deepspeed3": Listed(EVERYTHING, ("conform",)),
}
EXERCISES = (  # zerolab/teach/exercises has a file for each
    *("zero1", "zero1_2psi", "zero2", "zero3", "clip_gradients", "micro_batches", "uneven_units", "own_prefetch"),
    *("hidden_reduction", "whole_matrices", "two_machines", "second_shard"),
)


def engines_of(command: str) -> tuple[str, ...]:
    """The engines that `command` runs when none are named."""
    return tuple(name for name, listed in ENGINES.items() if command in listed.commands)

"""Names of presets, chapters, engines, sweeps and exercises, for the options and for the modules that have the rest.

It imports only the standard library, so that `--help` and mistakes in options are answered before torch is imported.
"""

import tomllib
from pathlib import Path

PRESETS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())  # {name: the shape of a GPT}
SHAPE = ("layers", "width", "heads", "vocab")  # of a model, in place of the preset's
CHAPTERS = ("zero1", "zero2", "zero3")

# {name: the commands that run the engine without --engines}, in the order of the tables. zerolab/run/engines.py has the
# rest. memory, bench, plan and watch know no other engines than those that they run by default.
ENGINES = {
    "single": ("compare",),
    "ddp": ("compare", "memory", "bench", "plan", "watch", "conform"),
    "zero1": ("compare", "memory", "bench", "plan", "watch", "conform"),
    "zero1_2psi": ("plan", "scale"),
    "zero_redundancy_optimizer": ("compare", "bench", "conform"),
    "zero2": ("compare", "memory", "bench", "plan", "watch", "conform", "scale"),
    "fsdp2_no_reshard": ("compare", "memory", "bench", "plan", "conform"),
    "hybrid": ("plan",),
    "zero3": ("compare", "memory", "bench", "plan", "watch", "conform", "scale"),
    "zero3-prefetch0": ("watch",),
    "fsdp2": ("compare", "memory", "bench", "plan", "watch", "conform"),
    "fsdp1": (),
    "fsdp1_article": (),
    "deepspeed1": ("conform",),
    "deepspeed2": ("conform",),
    "deepspeed3": ("conform",),
}
SWEEPS = ("bucket size, zero1", "bucket size, zero2", "units", "prefetch", "activations")  # of bench
FIGURES = ("stages", "memory", "live", "lanes", "curves", "scaling")  # zerolab/measure/figures.py draws them
EXERCISES = (  # zerolab/teach/exercises has a file for each
    *("zero1", "zero1_2psi", "zero2", "zero3", "clip_gradients", "micro_batches", "uneven_units", "own_prefetch"),
    *("hidden_reduction", "two_machines"),
)


def engines_of(command: str) -> tuple[str, ...]:
    """The engines that `command` runs when none are named."""
    return tuple(name for name, commands in ENGINES.items() if command in commands)

"""What an engine lets one choose, as variants that `./launch.sh bench --sweeps` measures beside each other.

A variant is a line of sweeps.toml: {"name": of the engine, "units", "recompute", and options of the engine}.
"""

import tomllib
from pathlib import Path

from torch import nn

from zerolab.run.engines import CHAPTERS
from zerolab.run.model import GPT
from zerolab.run.recompute import checkpoint_blocks

SWEEPS: dict[str, dict[str, dict]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def layers(model: GPT) -> list[nn.Module]:
    """Every module that has parameters of its own and shares none: Linear and LayerNorm layers inside the blocks."""
    found = []
    for block in model.blocks:
        found.extend(block.children())
    return found


def pairs(model: GPT) -> list[nn.Module]:
    """The blocks two by two, as modules that the model then runs."""
    blocks = list(model.blocks)
    found = [nn.Sequential(*blocks[start : start + 2]) for start in range(0, len(blocks), 2)]
    model.blocks = nn.ModuleList(found)
    return found


UNITS = {"layers": layers, "pairs of blocks": pairs, "the whole model": lambda model: [model]}


def prepared(variant: dict, model: GPT) -> dict:
    """The options of the engine; `model` is changed where the variant says so."""
    options = {key: value for key, value in variant.items() if key not in ("name", "recompute")}
    if "units" in options:
        options["units"] = UNITS[options["units"]](model)
    if "recompute" in variant:
        checkpoint_blocks(model, casts=False)
    return options


def with_their_engines(names) -> dict[str, dict]:
    """A row for each name, and for a chapter another one: its engine."""
    variants = {}
    for name in names:
        variants[name] = {"name": name}
        if name in CHAPTERS:
            variants[f"{name} engine"] = {"name": name, "engine": True}
    return variants

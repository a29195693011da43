"""What an engine lets one choose, as variants that `./launch.sh bench --sweeps` measures beside each other."""

from collections.abc import Callable
from functools import partial

from torch import nn

from harness.run.engines import CHAPTERS, named
from harness.run.model import GPT
from harness.run.recompute import checkpoint_blocks

# (engine, what is done to its model before; it returns the engine's options)
Variant = tuple[str, Callable[[GPT], dict]]


def with_options(model: GPT, **options) -> dict:
    """The model is left as it is."""
    return options


def unit_per_layer(model: GPT) -> dict:
    """Every module that has parameters of its own and shares none: Linear and LayerNorm layers inside the blocks."""
    layers = []
    for block in model.blocks:
        layers.extend(block.children())
    return {"units": layers}


def unit_per_pair(model: GPT) -> dict:
    """The blocks two by two, as modules that the model then runs."""
    blocks = list(model.blocks)
    pairs = [nn.Sequential(*blocks[start : start + 2]) for start in range(0, len(blocks), 2)]
    model.blocks = nn.ModuleList(pairs)
    return {"units": pairs}


def unit_of_all(model: GPT) -> dict:
    return {"units": [model]}


def as_engine(model: GPT) -> dict:
    """The engine in the place of its chapter."""
    return {"engine": True}


def recomputed(model: GPT) -> dict:
    """By the engine, which sees what is recomputed."""
    checkpoint_blocks(model, casts=False)
    return as_engine(model)


def with_their_engines(names) -> dict[str, Variant]:
    """A row for each name, and for a chapter another one: its engine."""
    variants = {}
    for name in names:
        variants[name] = (name, with_options)
        if name in CHAPTERS:
            variants[f"{name} engine"] = (name, as_engine)
    return variants


SWEEPS: dict[str, dict[str, Variant]] = {}
SIZES = {"one parameter": 0, "0.25 MiB": 0.25, "1 MiB": 1, "4 MiB": 4, "25 MiB": 25}
for _name in named("sweeps"):
    SWEEPS[f"bucket size, {_name}"] = {
        label: (_name, partial(with_options, bucket_mb=size)) for label, size in SIZES.items()
    }
SWEEPS["units"] = {
    "layers": ("zero3", unit_per_layer),
    "blocks": ("zero3", with_options),
    "pairs of blocks": ("zero3", unit_per_pair),
    "the whole model": ("zero3", unit_of_all),
}
SWEEPS["prefetch"] = {f"{ahead} ahead": ("zero3", partial(with_options, prefetch=ahead)) for ahead in (0, 1, 2, 4)}
SWEEPS["activations"] = {"activations kept": ("zero3", as_engine), "recomputed": ("zero3", recomputed)}

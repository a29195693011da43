"""The choices that `./launch.sh bench` compares: bucket sizes, units, prefetch, recomputation.

A variant is a dict: "name" is the engine in zerolab/run/engines.py, "units" a function of the model that returns the
modules to shard one by one, and "recompute" recomputes the activations of the blocks in backward. All other keys are
options of the engine.

Torch is imported inside the functions that need it, because `bench --help` and mistakes need only the names of SWEEPS.
"""


def layers(model) -> list:
    """The Linear and LayerNorm layers inside the blocks: every module that has parameters itself and shares none."""
    found = []
    for block in model.blocks:
        found.extend(block.children())
    return found


def pairs_of_blocks(model) -> list:
    """The blocks two by two. The model is changed to run these pairs."""
    from torch import nn

    blocks = list(model.blocks)
    found = [nn.Sequential(*blocks[start : start + 2]) for start in range(0, len(blocks), 2)]
    model.blocks = nn.ModuleList(found)
    return found


def the_whole_model(model) -> list:
    return [model]


def bucket_sizes(name: str) -> dict[str, dict]:
    """The engine `name` with buckets of different sizes, in MiB. With 0 each parameter is its own bucket."""
    variants = {"one parameter": {"name": name, "bucket_mb": 0}}
    for mebibytes in (0.25, 1, 4, 25):
        variants[f"{mebibytes} MiB"] = {"name": name, "bucket_mb": mebibytes}
    return variants


SWEEPS: dict[str, dict[str, dict]] = {
    "bucket size, zero1": bucket_sizes("zero1"),
    "bucket size, zero2": bucket_sizes("zero2"),
    "units": {
        "layers": {"name": "zero3", "units": layers},
        "blocks": {"name": "zero3"},
        "pairs of blocks": {"name": "zero3", "units": pairs_of_blocks},
        "the whole model": {"name": "zero3", "units": the_whole_model},
    },
    "prefetch": {f"{ahead} ahead": {"name": "zero3", "prefetch": ahead} for ahead in (0, 1, 2, 4)},
    "activations": {  # of the engine, which supports recomputation with hooks on the recomputed modules
        "activations kept": {"name": "zero3", "engine": True},
        "recomputed": {"name": "zero3", "engine": True, "recompute": True},
    },
}


def prepare(variant: dict, model) -> dict:
    """The engine's options of a variant. Changes `model` where the variant asks for it."""
    from zerolab.run.recompute import checkpoint_blocks

    options = {key: value for key, value in variant.items() if key not in ("name", "recompute")}
    if "units" in options:
        options["units"] = options["units"](model)
    if variant.get("recompute"):
        checkpoint_blocks(model, casts=False)
    return options

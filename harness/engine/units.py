"""Which modules ZeRO-3 gathers as one, when nobody says."""

from torch import nn


def default_units(model: nn.Module) -> list[nn.Module]:
    """The entries of every outermost ModuleList or Sequential, each once.

    An entry that is a ModuleList or ModuleDict itself is never called, so its own entries take its place.
    """
    found: dict[int, nn.Module] = {}

    def entries(container: nn.Module) -> None:
        for entry in container.children():
            if isinstance(entry, (nn.ModuleList, nn.ModuleDict)):
                entries(entry)
            else:
                found.setdefault(id(entry), entry)

    def search(module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            entries(module)
        else:
            for child in module.children():
                search(child)

    search(model)
    return list(found.values())


def parameters_by_unit(model: nn.Module, modules: list[nn.Module]) -> tuple[dict, list]:
    """({unit: [(name, parameter)]}, the root's [(name, parameter)]): every parameter once, in the model's order.

    A parameter that is used in two units, or in one and outside (tied weights), belongs to the root, which is
    gathered whenever either needs it.
    """
    home = {}  # id of a module -> the unit it lies in; None where two units share it
    for unit in modules:
        for inside in unit.modules():
            home[id(inside)] = None if id(inside) in home else unit
    homes = {}  # id of a parameter -> the units that use it, None for the root: {None, block} for a tied weight
    for module in model.modules():
        for param in module.parameters(recurse=False):
            homes.setdefault(id(param), set()).add(home.get(id(module)))
    held, rest = {unit: [] for unit in modules}, []
    for name, param in model.named_parameters():
        users = homes[id(param)]
        unit = next(iter(users)) if len(users) == 1 else None
        (rest if unit is None else held[unit]).append((name, param))
    return held, rest

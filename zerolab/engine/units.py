"""Which modules are ZeRO-3's units, and which parameters are in them."""

from torch import nn

import zero3

# Never called by their forward alone: a parent uses their weights or entries directly.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_AS_ONE = (nn.MultiheadAttention, nn.RNNBase)  # they use their children's weights themselves


def default_units(model: nn.Module) -> list[nn.Module]:
    """The chapter's units, each once; where these leave most to the root, the smallest large modules besides."""
    units = list(dict.fromkeys(zero3.default_units(model)))
    total = sum(param.numel() for param in model.parameters())
    inside = set()
    for unit in units:
        inside.update(unit.parameters())
    return units if 2 * sum(param.numel() for param in inside) >= total else _with_large_ones(model, units, total / 8)


def _with_large_ones(model: nn.Module, units: list[nn.Module], least: float) -> list[nn.Module]:
    """`units`, and besides them the smallest modules with `least` elements or more that are in no other unit.

    torch has the same idea for FSDP (`size_based_auto_wrap_policy`).
    """
    found = []

    def rest(module: nn.Module) -> int:
        """Elements of `module` that no unit has, after units were chosen inside it."""
        if module in units:
            found.append(module)
            return 0
        before = len(found)
        if isinstance(module, _AS_ONE):
            own = sum(param.numel() for param in module.parameters())
        else:
            own = sum(param.numel() for param in module.parameters(recurse=False))
            own += sum(rest(child) for child in module.children())
        # Units must not lie inside each other, so a module with one inside leaves its own rest to the root.
        if own < least or module is model or len(found) > before or isinstance(module, _CONTAINERS):
            return own
        found.append(module)
        return 0

    rest(model)
    return list(dict.fromkeys(found))


def parameters_by_unit(model: nn.Module, modules: list[nn.Module]) -> tuple[dict, list]:
    """({unit: [(name, parameter)]}, the root's [(name, parameter)]): every parameter once, in the model's order.

    A parameter that is used in two units, or in one and outside (tied weights), belongs to the root, which is
    gathered whenever either needs it.
    """
    home = {}  # module -> the unit it lies in; None where two units share it
    for unit in modules:
        for inside in unit.modules():
            home[inside] = None if inside in home else unit
    homes = {}  # parameter -> the units that use it, None for the root: {None, block} for a tied weight
    for module in model.modules():
        for param in module.parameters(recurse=False):
            homes.setdefault(param, set()).add(home.get(module))
    held = {unit: [] for unit in (None, *modules)}
    for name, param in model.named_parameters():
        users = homes[param]
        unit = users.pop() if len(users) == 1 else None
        held[unit].append((name, param))
    return held, held.pop(None)

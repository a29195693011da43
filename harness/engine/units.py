"""Which parameters travel together: lists of them, that ZeRO-1 and -2 make buckets of, and modules, ZeRO-3's units."""

from torch import nn


def default_bucket_mb(named_params) -> float:
    """At most 25 MiB, and at most a sixth of the parameters but not less than 1 MiB. So a small model has several
    buckets too: one is sent while backward fills the next."""
    total_mb = sum(param.numel() * param.element_size() for _, param in named_params) / 2**20
    return min(25, max(1, total_mb / 6))


def by_size(named_params, bucket_mb: float | None) -> list[list[tuple[str, nn.Parameter]]]:
    """(name, parameter) pairs in lists of at most `bucket_mb` MiB, last parameter first; behind them the frozen ones.

    By default (None) a list has `default_bucket_mb`. A larger parameter has a list of its own. A buffer has one dtype,
    so another dtype begins another list.
    """
    named, found = list(named_params), []
    for trained in (True, False):
        some = [(name, param) for name, param in named if param.requires_grad is trained]
        limit = 2**20 * (default_bucket_mb(some) if bucket_mb is None else bucket_mb)
        dtype, taken = None, 0
        for name, param in reversed(some):
            nbytes = param.numel() * param.element_size()
            if param.dtype != dtype or taken + nbytes > limit:
                found.append([])
                dtype, taken = param.dtype, 0
            found[-1].append((name, param))
            taken += nbytes
    return found


# Never called by their forward alone: a parent uses their weights or entries directly.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_AS_ONE = (nn.MultiheadAttention, nn.RNNBase, nn.Transformer)  # they use their children's weights themselves


def default_units(model: nn.Module) -> list[nn.Module]:
    """The entries of every outermost ModuleList or Sequential, each once; where these leave most to the root, by size.

    An entry that is a ModuleList or ModuleDict itself is never called, so its own entries take its place.
    """
    units = _entries_of_lists(model)
    total = sum(param.numel() for param in model.parameters())
    inside = {id(param): param.numel() for unit in units for param in unit.parameters()}
    return units if 2 * sum(inside.values()) >= total else _by_size(model, units, total / 8)


def _entries_of_lists(model: nn.Module) -> list[nn.Module]:
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
        elif not isinstance(module, _AS_ONE):
            for child in module.children():
                search(child)

    search(model)
    return list(found.values())


def _by_size(model: nn.Module, units: list[nn.Module], least: float) -> list[nn.Module]:
    """`units`, and besides them the smallest modules with `least` elements or more that are in no other unit.

    torch has the same idea for FSDP (`size_based_auto_wrap_policy`).
    """
    chosen = {id(unit) for unit in units}
    found = []

    def rest(module: nn.Module) -> int:
        """Elements of `module` that no unit has, after units were chosen inside it."""
        if id(module) in chosen:
            found.append(module)
            return 0
        own = sum(param.numel() for param in module.parameters(recurse=False))
        before = len(found)
        if isinstance(module, _AS_ONE):
            own = sum(param.numel() for param in module.parameters())
        else:
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

"""Whether a checkpoint fits an engine, and which of its values this rank wants.

A checkpoint that torch has written has no name of its optimizer. So an engine's own optimizer makes a step on one
number, and tells by that what it keeps.
"""

import copy
from collections import OrderedDict, defaultdict

import torch

from harness.engine.layout import elementwise, entries, extra_states, first_element, keys_of, nested, pieces
from harness.engine.rectangles import Cut
from harness.engine.safe_reader import Folder
from harness.engine.waiting import name_some, not_alike


def read(engine, source: Folder, groups: list[list[str]]) -> tuple:
    """All values of this rank, in memory of their own: (what modules take, pairs (place, value), optimizer, extra)."""
    keys, extras, saved = keys_of(engine), extra_states(engine.model), {}
    for path, name in source.under("model").items():
        saved.setdefault(path[0], {})[path[1:]] = name
    missing = [key for key in keys if key not in extras and () not in saved.get(key, ())]
    missing += [key for key in extras if key not in saved and keys[key] != {}]  # of an empty one torch saves nothing
    unexpected = [key for key in saved if key not in keys]
    if missing or unexpected:
        raise ValueError(f"{str(source.path)!r} is of another model: {not_alike(missing, unexpected)}")
    wanted, places = {}, []
    names = {key: saved[key][()] for key in keys if key not in extras}
    name_of = {id(keys[key]): name for key, name in names.items()}
    dtypes = {id(param): bucket.shard.dtype for bucket in engine.buckets for param in bucket.params}
    for key in names:
        value = keys[key]
        if isinstance(value, torch.Tensor):
            here = tuple(value.shape), dtypes.get(id(value), value.dtype)
            found = source.blank(names[key], "meta")
            there = ((), None) if found is None else (tuple(found.shape), found.dtype)
            if here != there:
                raise ValueError(f"{key!r} is {there[1]} of shape {there[0]} in {str(source.path)!r}, {here} here")
        if id(value) not in dtypes:  # a buffer
            wanted[names[key]] = torch.empty(value.shape, dtype=value.dtype)
            places.append((value, names[key], None))
    extras = {key: module for key, module in extras.items() if key in saved}
    wanted.update({name: source.blank(name) for key in extras for name in saved[key].values()})
    for bucket in engine.buckets:
        for index, part in bucket.cut(bucket.shard):
            values, name = torch.empty(part.shape, dtype=part.dtype), name_of[id(bucket.params[index])]
            wanted[name] = Cut.of(values, bucket.shapes[index], first_element(bucket, index))
            places.append((part, name, values))
    options = _options(engine, source, groups)
    state = _optimizer_state(engine, source, options, wanted)
    extra = source.entries.get(("extra", str(engine.placement.rank)), source.entries.get(("extra", "0")))
    if extra is not None:
        wanted[extra] = None
    source.read(wanted)
    values = [(place, wanted[name] if values is None else values) for place, name, values in places]
    modules = [(extras[key], nested({path: wanted[name] for path, name in saved[key].items()})) for key in extras]
    state = [(piece, {k: wanted[v] if isinstance(v, str) else v for k, v in own.items()}) for piece, own in state]
    return modules, values, options, [(piece, nested(own)) for piece, own in state], wanted.get(extra, {})


def _options(engine, source: Folder, groups: list[list[str]]) -> list[dict]:
    """The saved options of each group of the optimizer (learning rate, decay), by the parameters in it."""
    where = f"the optimizer's state in {str(source.path)!r}"
    found, about = source.under("optim", "param_groups"), source.under("zero")
    if not found:
        raise ValueError(f"{where} is not there, or not laid out as torch's get_optimizer_state_dict does it")
    read = source.read({name: source.blank(name) for name in (*found.values(), *about.values())})
    kind, own = read.get(about.get(("optimizer",))), type(engine.optimizer).__name__
    if kind is not None and kind != own:
        raise ValueError(f"{where} is of {kind}, and here is {own}: build the engine with {kind}")
    saved = nested({path: read[name] for path, name in found.items()})
    trained = {name for names in groups for name in names}
    sets = {number: trained.intersection(group.pop("params", ())) for number, group in enumerate(saved)}
    result = []
    for number, (names, group) in enumerate(zip(groups, engine.optimizer.param_groups)):
        same = [other for other, names_there in sets.items() if names_there == set(names)]
        if not same:
            raise ValueError(
                f"{where} has other groups: {name_some(names)} is a group here. Pass the same param_groups as when it "
                "was saved"
            )
        there = saved[number if number in same else same[0]]
        lacking = [key for key in engine.optimizer.defaults if key not in there]
        other = there.get("decoupled_weight_decay", False) != group.get("decoupled_weight_decay", False)
        if kind is None and (lacking or other):  # torch does not save the optimizer's name
            raise ValueError(f"{where} is of another class than {own}: it has {', '.join(sorted(there))}")
        result.append(there)
    return result


def _optimizer_state(engine, source: Folder, options: list[dict], wanted: dict) -> list[tuple]:
    """(piece, {key: values, or a name in `wanted`}) for each piece. A parameter without state has none here, too."""
    optimizer, result = engine.optimizer, []
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    keeps = {}  # number of a group -> {key: whether it has a number for each element}
    saved = defaultdict(dict)
    for path, name in source.under("optim", "state").items():
        saved[path[0]][path[1:]] = name
    for name, piece, shape, first in pieces(engine):
        number, own = group_of[id(piece)], {}
        if saved[name] and number not in keeps:
            keeps[number] = _what_it_keeps(optimizer, optimizer.param_groups[number], options[number], piece)
        if saved[name] and saved[name].keys() != keeps[number].keys():
            raise ValueError(
                f"the optimizer's state in {str(source.path)!r} has {sorted(saved[name])} for {name!r}, and "
                f"{type(optimizer).__name__} keeps {sorted(keeps[number])}: build the engine with the optimizer that "
                "it was saved with"
            )
        for key, place in saved[name].items():
            there = source.blank(place, "meta")
            if keeps[number][key] and there is not None:
                if there.shape != shape:
                    raise ValueError(f"{place!r} has shape {tuple(there.shape)}, the parameter {tuple(shape)}")
                own[key] = torch.empty(piece.shape, dtype=there.dtype)
                wanted[place] = Cut.of(own[key], shape, first)
            else:
                if there is not None and there.numel() > 1:
                    raise ValueError(f"{place!r} has shape {tuple(there.shape)}: one number was expected")
                wanted[place], own[key] = source.blank(place), place
        result.append((piece, own))
    return result


def _what_it_keeps(optimizer, group: dict, options: dict, piece: torch.Tensor) -> dict[str, bool]:
    """{key: whether it has a number for each element} of the state that `optimizer` makes, found out on one number."""
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer), state=defaultdict(dict))
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    one = torch.zeros(1, dtype=piece.dtype, device=piece.device, requires_grad=True)
    one.grad = torch.zeros_like(one)
    probe.param_groups = [copy.deepcopy({k: v for k, v in group.items() if k != "params"} | options)]
    probe.param_groups[0]["params"] = [one]
    try:
        type(optimizer).step(probe)  # not `probe.step`, which a schedule may have tied to the real optimizer
        return {path: elementwise(value, one) for path, value in entries(probe.state[one]) if path}
    except Exception:  # Adagrad makes its state when it is built, not in its first step
        return {path: elementwise(value, piece) for path, value in entries(optimizer.state.get(piece, {})) if path}

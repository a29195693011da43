"""Whether a checkpoint fits an engine, and how it is put into one."""

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_map_only

from harness.engine.all_or_none import all_or_none, on_all
from harness.engine.checkpoint.reader import Folder, newest
from harness.engine.checkpoint.rectangles import Cut
from harness.engine.checkpoint.saving import names_of_groups, refuse_parts, wait_for_last
from harness.engine.layout import extra_states, keys_of, nested, pieces
from harness.engine.safety.waiting import name_some, not_alike
from harness.engine.state import set_extra_states


def load(engine, folder) -> dict:
    """Load the newest checkpoint in `folder`, or `folder` itself, into the engine. Returns `extra`. A collective.

    `extra` is what this rank has saved; a rank that was not there gets rank 0's. Raises the same kind of error on every
    rank before anything is changed: FileNotFoundError, `Damaged`, `Unsafe`, or ValueError for another model or
    optimizer. Until then values are in host memory of their own.
    """
    wait_for_last(engine)
    refuse_parts(engine)
    place = engine.placement
    what = "all ranks to call checkpoint.load()"
    path = all_or_none(lambda: newest(folder) if place.rank == 0 else None, place.everyone, what)[0]
    names = names_of_groups(engine, what)
    source = on_all(lambda: Folder(path, place.rank, place.world_size), place.everyone)
    return _install(engine, *on_all(lambda: _read(engine, source, names), place.everyone))


def _install(engine, modules, values, options, state, extra) -> dict:
    """All ranks have read all they need: when modules have taken theirs nothing can fail. Returns `extra`."""
    set_extra_states(engine, modules)
    engine.placement.finish_all()
    with torch.no_grad():
        for place, value in values:
            place.copy_(value)
    for group, there in zip(engine.optimizer.param_groups, options):
        group.update(there)
    groups = {id(piece): group for group in engine.optimizer.param_groups for piece in group["params"]}
    for piece, own in state:
        on_device = groups[id(piece)].get("capturable") or groups[id(piece)].get("fused")
        engine.optimizer.state.pop(piece, None)
        if own:
            engine.optimizer.state[piece] = _placed(own, piece.device, numbers=on_device)
    engine.shards_changed()
    return extra


def _placed(state: dict, device, numbers: bool) -> dict:
    """An optimizer's state on the device, a step counter only if the optimizer wants `numbers` there."""
    return tree_map_only(torch.Tensor, lambda value: value.to(device) if value.dim() or numbers else value, state)


def _read(engine, source: Folder, groups: list[list[str]]) -> tuple:
    """All values of this rank, in memory of their own: (what modules take, pairs (place, value), optimizer, extra)."""
    saved, wanted = _of_this_model(engine, source), {}  # wanted: name in the checkpoint -> what it is read into
    places = _places_of_tensors(engine, source, saved, wanted)
    modules = {key: module for key, module in extra_states(engine.model).items() if key in saved}
    for key in modules:
        wanted.update({name: source.blank(name) for name in saved[key].values()})
    options = _options(engine, source, groups)
    state = _optimizer_state(engine, source, wanted)
    extra = source.under("extra", str(engine.placement.rank)) or source.under("extra", "0")
    wanted.update({name: source.blank(name) for name in extra.values()})
    found = {name: getattr(value, "part", value) for name, value in source.read(wanted).items()}

    def values(names: dict[tuple, str]):
        return nested({path: found[name] for path, name in names.items()})

    return (
        [(module, values(saved[key])) for key, module in modules.items()],
        [(place, found[name]) for place, name in places],
        options,
        [(piece, values(names)) for piece, names in state],
        values(extra),
    )


def _of_this_model(engine, source: Folder) -> dict[str, dict[tuple, str]]:
    """{key of the `state_dict()`: {rest of the path: name in the checkpoint}}; raises for another model's."""
    keys, extras, saved = keys_of(engine), extra_states(engine.model), {}
    for path, name in source.under("model").items():
        saved.setdefault(path[0], {})[path[1:]] = name
    missing = [key for key in keys if key not in extras and () not in saved.get(key, ())]
    missing += [key for key in extras if key not in saved and keys[key] != {}]  # of an empty one torch saves nothing
    unexpected = [key for key in saved if key not in keys]
    if missing or unexpected:
        raise ValueError(f"{str(source.path)!r} is of another model: {not_alike(missing, unexpected)}")
    return saved


def _places_of_tensors(engine, source: Folder, saved: dict, wanted: dict) -> list[tuple[torch.Tensor, str]]:
    """(where this rank has its values, name in the checkpoint) of parts of parameters, and of buffers."""
    places, name_of, extras = [], {}, extra_states(engine.model)  # name_of: by a parameter's id
    dtypes = {id(param): bucket.shard.dtype for bucket in engine.all_buckets for param in bucket.params}
    for key, value in keys_of(engine).items():
        if key in extras:
            continue
        name = saved[key][()]
        here, found = (tuple(value.shape), dtypes.get(id(value), value.dtype)), source.blank(name, "meta")
        there = ((), None) if found is None else (tuple(found.shape), found.dtype)
        if here != there:
            raise ValueError(f"{key!r} is {there[1]} of shape {there[0]} in {str(source.path)!r}, {here} here")
        if id(value) in dtypes:
            name_of[id(value)] = name
        else:
            wanted[name] = torch.empty(value.shape, dtype=value.dtype)
            places.append((value, name))
    for _, param, piece, shape, first in pieces(engine.all_buckets):
        name = name_of[id(param)]
        wanted[name] = Cut.of(torch.empty(piece.shape, dtype=piece.dtype), shape, first)
        places.append((piece, name))
    return places


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
        if kind is None:  # torch does not save the optimizer's name
            other = [key for key in engine.optimizer.defaults if key not in there]
            other += [
                key for key in there if key not in group and not key.endswith(("_lr", "_momentum"))
            ]  # a schedule's
            if other or there.get("decoupled_weight_decay") != group.get("decoupled_weight_decay"):
                raise ValueError(f"{where} is of another class than {own}: it has {', '.join(sorted(there))}")
        result.append(there)
    return result


def _optimizer_state(engine, source: Folder, wanted: dict) -> list[tuple]:
    """(piece, {path: name in the checkpoint}) for each piece. A parameter without state has none here, too."""
    saved = {}  # name of a parameter -> {path: name in the checkpoint}
    for path, name in source.under("optim", "state").items():
        saved.setdefault(path[0], {})[path[1:]] = name
    shapes = {name: found.size for name, found in source.tensors.items() if isinstance(found, TensorStorageMetadata)}
    per_element = set()  # paths of what is as large as a parameter: moments, say, and not a step counter
    for param, own in saved.items():
        shape = shapes[source.entries["model", param]]
        per_element.update(path for path, name in own.items() if shape and shapes.get(name) == shape)
    result = []
    for param, _, piece, shape, first in pieces(engine.buckets):
        own = saved.get(param, {})
        for path, name in own.items():
            blank = source.blank(name, "meta")
            if path in per_element and shapes.get(name) == shape:
                wanted[name] = Cut.of(torch.empty(piece.shape, dtype=blank.dtype), shape, first)
            elif blank is None or blank.numel() == 1:
                wanted[name] = source.blank(name)
            else:
                raise ValueError(f"{name!r} has shape {tuple(blank.shape)}, the parameter {tuple(shape)}")
        result.append((piece, own))
    return result

"""Whether a checkpoint fits an engine, and how it is put into one."""

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map, tree_map_only

from zerolab.engine.all_or_none import all_or_none, on_all
from zerolab.engine.checkpoint.reader import Folder, newest
from zerolab.engine.checkpoint.rectangles import Cut
from zerolab.engine.checkpoint.saving import refuse_parts, wait_for_last
from zerolab.engine.layout import pieces, with_plain_names
from zerolab.engine.checks import some as name_some, not_alike
from zerolab.engine.state import take_in


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
    source = on_all(lambda: Folder(path, place.rank, place.world_size), place.everyone)
    modules, values, options, state, extra = on_all(lambda: _read(engine, source), place.everyone)
    take_in(engine, modules, values)  # all ranks have read all they need: after this nothing can fail
    for group, there in zip(engine.optimizer.param_groups, options):
        group.update(there)
        on_device = group.get("capturable") or group.get("fused")
        for piece in group["params"]:
            engine.optimizer.state.pop(piece, None)
            if own := state.get(piece):
                engine.optimizer.state[piece] = _placed(own, piece.device, numbers=on_device)
    engine.shards_changed()
    return extra


def _placed(state: dict, device, numbers: bool) -> dict:
    """An optimizer's state on the device, a step counter only if the optimizer wants `numbers` there."""
    return tree_map_only(torch.Tensor, lambda value: value.to(device) if value.dim() or numbers else value, state)


def _read(engine, source: Folder) -> tuple:
    """All values of this rank, in memory of their own: (what modules take, pairs (place, value), optimizer, extra)."""
    params, buffers, extras = with_plain_names(engine)
    saved, wanted = source.model, {}  # wanted: name in the checkpoint -> what it is read into
    _require_same_model(engine, source, params | buffers, extras)
    places = [(buffer, saved[key]) for key, buffer in buffers.items()]
    for key in buffers:
        wanted[saved[key]] = source.blank(saved[key])
    saved_as = {id(param): saved[key] for key, param in params.items()}
    for _, param, piece, shape, first in pieces(engine.all_buckets):
        name = saved_as[id(param)]
        wanted[name] = Cut.of(torch.empty(piece.shape, dtype=piece.dtype), shape, first)
        places.append((piece, name))
    options = _options_of_groups(engine, source)
    state = _state_of_pieces(engine, source, wanted)
    found = source.read(wanted)
    own = source.tree.get("extra", {})
    own = own.get(str(engine.placement.rank)) or own.get("0", {})
    kept, own = source.values(({key: saved[key] for key in extras if key in saved}, own))
    return (
        [(extras[key][0], value) for key, value in kept.items()],
        [(place, found[name]) for place, name in places],
        options,
        {piece: tree_map(found.get, names) for piece, names in state.items()},
        own,
    )


def _require_same_model(engine, source: Folder, tensors: dict, extras: dict) -> None:
    """Raises ValueError for another model's checkpoint: other names, or another dtype or shape under one."""
    saved, theirs = source.model, source.model_on_meta()
    missing = [key for key in tensors if key not in theirs]
    missing += [key for key, (_, value) in extras.items() if key not in saved and value != {}]  # torch saves no {}
    unexpected = [key for key in saved if key not in tensors and key not in extras]
    if missing or unexpected:
        raise ValueError(f"{str(source.path)!r} is of another model: {not_alike(missing, unexpected)}")
    dtypes = {}  # id of a parameter -> the dtype of its shards
    for bucket in engine.all_buckets:
        dtypes.update((id(param), bucket.shard.dtype) for param in bucket.params)
    for key, value in tensors.items():
        there = f"{theirs[key].dtype} of shape {tuple(theirs[key].shape)}"
        here = f"{dtypes.get(id(value), value.dtype)} of shape {tuple(value.shape)}"
        if there != here:
            raise ValueError(f"{key!r} is {there} in {str(source.path)!r}, {here} here")


def _options_of_groups(engine, source: Folder) -> list[dict]:
    """The saved options of each group of the optimizer (learning rate, decay), by the parameters in it."""
    where = f"the optimizer's state in {str(source.path)!r}"
    groups = source.tree.get("optim", {}).get("param_groups")
    if not groups:
        raise ValueError(f"{where} is not there, or not laid out as torch's get_optimizer_state_dict does it")
    about, groups = source.values((source.tree.get("zero", {}), groups))
    kind, own = about.get("optimizer"), type(engine.optimizer).__name__
    if kind not in (None, own):
        raise ValueError(f"{where} is of {kind}, and here is {own}: build the engine with {kind}")
    trained = set().union(*engine.groups)
    options = {frozenset(trained.intersection(group.pop("params", ()))): group for group in groups}
    found = []
    for names, group in zip(engine.groups, engine.optimizer.param_groups):
        there = options.get(frozenset(names))
        if there is None:
            raise ValueError(
                f"{where} has other groups: {name_some(names)} is a group here. Pass the same param_groups as when it "
                "was saved"
            )
        lacks = engine.optimizer.defaults.keys() - there.keys()
        if kind is None and (lacks or there.get("decoupled_weight_decay") != group.get("decoupled_weight_decay")):
            # torch does not save the optimizer's name.
            raise ValueError(f"{where} is of another class than {own}: it has {', '.join(sorted(there))}")
        found.append(there)
    return found


def _state_of_pieces(engine, source: Folder, wanted: dict) -> dict:
    """{piece: names in the checkpoint}. A parameter without state has none here, too."""
    saved = source.tree["optim"].get("state", {})  # name of a parameter -> {key: name in the checkpoint}
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    per_element = set()  # paths of what is as large as a parameter: moments, say, and not a step counter
    for param, own in saved.items():
        shape = shapes[source.model[param]]
        for path, name in tree_flatten_with_path(own)[0]:
            if shape and shapes.get(name) == shape:
                per_element.add(path)
    found = {}
    for param, _, piece, shape, first in pieces(engine.buckets):
        own = saved.get(param, {})
        for path, name in tree_flatten_with_path(own)[0]:
            there = source.tensors.get(name)
            if path in per_element and shapes.get(name) == shape:
                wanted[name] = Cut.of(torch.empty(piece.shape, dtype=there.dtype), shape, first)
            elif there is None or there.numel() == 1:
                wanted[name] = source.blank(name)
            else:
                raise ValueError(f"{name!r} has shape {tuple(there.shape)}, the parameter {tuple(shape)}")
        found[piece] = own
    return found

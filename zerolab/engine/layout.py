"""What an engine has, by the names under which torch saves it, and how dictionaries of values get such names."""

from collections import OrderedDict


def plain_name(key: str) -> str:
    """A name without what torch.compile and activation checkpointing put into it: that is how torch saves it."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def name_of(path: tuple) -> str:
    """The name in a checkpoint of what has this path in the state that is saved."""
    return ".".join(map(str, path))


def in_three(engine) -> tuple[dict, dict, dict]:
    """The model's `state_dict()` in three: {name: parameter}, {name: buffer}, {name: (module, value)}.

    The last are values that modules save besides their tensors (`get_extra_state`). Nothing is copied, and a freed
    parameter is not touched.
    """
    modules, sharded = {}, set()
    for name, module in engine.model.named_modules(remove_duplicate=False):
        modules[plain_name(f"{name}.").removeprefix(".")] = module  # of a wrapper and what is in it, the latter
    for bucket in engine.all_buckets:
        sharded.update(map(id, bucket.params))
    params, buffers, extras = {}, {}, {}
    for key, value in engine.model.state_dict(keep_vars=True).items():
        owner = plain_name(key).removesuffix("_extra_state")
        if owner in modules:
            extras[key] = modules[owner], value
        elif id(value) in sharded:
            params[key] = value
        else:
            buffers[key] = value
    return params, buffers, extras


def with_plain_names(engine) -> list[dict]:
    """As `in_three`, under the names that checkpoints have."""
    return [{plain_name(key): value for key, value in part.items()} for part in in_three(engine)]


def entries(value, path=()):
    """(path, value) of what gets a name of its own: as torch does it, each value of a dictionary.

    A dictionary that would be lost by that stays whole: one that is empty, or has other keys than texts.
    """
    if type(value) in (dict, OrderedDict) and value and all(type(key) is str for key in value):
        for key, inner in value.items():
            yield from entries(inner, (*path, key))
    else:
        yield path, value


def pieces(buckets):
    """(name, parameter, piece, shape, first element) of each part of a parameter that this rank has in `buckets`."""
    for bucket in buckets:
        for index, piece in bucket.numbered(bucket.pieces):
            first = max(0, bucket.own.start - bucket.offsets[index])
            yield plain_name(bucket.names[index]), bucket.params[index], piece, bucket.shapes[index], first

"""What an engine has, by the names under which torch saves it, and how dictionaries of values get such names."""

from collections import OrderedDict

import torch
from torch import nn


def keys_of(engine) -> dict:
    """{name: tensor or value} of the model's `state_dict()`. A freed parameter is not touched."""
    state = engine.model.state_dict(keep_vars=True)
    return {plain_name(key): value for key, value in state.items()}


def plain_name(key: str) -> str:
    """A name without what torch.compile and activation checkpointing put into it: that is how torch saves it."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def extra_states(model) -> dict[str, nn.Module]:
    """{name in the `state_dict()`: module} of the modules that save what is no tensor of theirs (`get_extra_state`)."""
    named = model.named_modules(remove_duplicate=False)
    own = [(name, module) for name, module in named if type(module).get_extra_state is not nn.Module.get_extra_state]
    return {plain_name(f"{name}._extra_state".removeprefix(".")): module for name, module in own}


def entries(value, path=()):
    """(path, value) of what gets a name of its own: as torch does it, each value of a dictionary.

    A dictionary that would be lost by that stays whole: one that is empty, or has other keys than texts.
    """
    if type(value) in (dict, OrderedDict) and value and all(type(key) is str for key in value):
        for key, inner in value.items():
            yield from entries(inner, (*path, key))
    else:
        yield path, value


def nested(values: dict[tuple, object]):
    """The way back: what has those {path: value}. torch numbers the elements of a list."""
    if () in values and len(values) == 1:
        return values[()]
    inner = {}
    for path, value in values.items():
        if not path:
            raise ValueError("a value has the same name as a dictionary")
        inner.setdefault(path[0], {})[path[1:]] = value
    inner = {key: nested(rest) for key, rest in inner.items()}
    numbered = inner and all(type(key) is int for key in inner)
    return [inner[number] for number in sorted(inner)] if numbered else inner


def pieces(buckets):
    """(name, parameter, piece, shape, first element) of each part of a parameter that this rank has in `buckets`."""
    for bucket in buckets:
        for index, piece in bucket.numbered(bucket.pieces):
            first = max(0, bucket.own.start - bucket.offsets[index])
            yield plain_name(bucket.names[index]), bucket.params[index], piece, bucket.shapes[index], first


def elementwise(value, piece: torch.Tensor) -> bool:
    """Whether a value of the optimizer has a number for each element, as moments have, and a step counter has not."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == piece.shape

"""What an engine has, by the names under which torch saves it."""

import torch


def keys_of(engine) -> dict:
    """{name: tensor or value} of the model's `state_dict()`. A freed parameter is not touched."""
    state = engine.model.state_dict(keep_vars=True)
    return {plain_name(key): value for key, value in state.items()}


def plain_name(key: str) -> str:
    """A name without what torch.compile and activation checkpointing put into it: that is how torch saves it."""
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def first_element(bucket, index: int) -> int:
    """Which element of parameter `index` is the first in this rank's shard."""
    return max(0, bucket.start - bucket.offsets[index])


def pieces(engine):
    """(name, piece, shape of the parameter, first element) of what this rank's optimizer has."""
    for bucket in engine.trained:
        for index, piece in bucket.pieces:
            yield plain_name(bucket.names[index]), piece, bucket.shapes[index], first_element(bucket, index)


def elementwise(value, piece: torch.Tensor) -> bool:
    """Whether a value of the optimizer has a number for each element, as moments have, and a step counter has not."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == piece.shape

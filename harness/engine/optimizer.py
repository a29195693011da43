"""The optimizer over this rank's pieces, with the parameter groups that the user wrote over whole parameters."""

import torch

from harness.engine.waiting import name_some

_LOOK_AT_WHOLE = {"Adafactor", "Muon", "Shampoo", "LBFGS", "LARS", "LAMB", "Lamb"}  # names, for most live elsewhere


def over_pieces(optimizer_cls, buckets, param_groups=None) -> torch.optim.Optimizer:
    """`optimizer_cls` called with this rank's pieces, or with one group of pieces per entry of `param_groups`.

    `param_groups` are the dictionaries that a torch optimizer takes, over the model's own parameters; a group
    of which this rank owns nothing stays, empty, so that every rank has the same groups. A rank that owns only
    padding hands in one empty tensor. Raises TypeError when no optimizer comes back, ValueError when it holds
    tensors that are not pieces, or when a parameter is in no group or in two.
    """
    pieces = [piece for bucket in buckets for _, piece in bucket.pieces]
    if not callable(optimizer_cls):
        raise TypeError(
            f"optimizer_cls is of type {type(optimizer_cls).__name__}, which cannot be called: pass a callable that "
            "takes a list of tensors, for example functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    for param in (param for bucket in buckets for param in bucket.params):
        param.zero_engine = True  # a second engine on the same model would reduce its gradients twice
    pieces = pieces or [buckets[0].shard[:0].detach().requires_grad_()]  # optimizers refuse an empty list
    optimizer = optimizer_cls(pieces if param_groups is None else _groups_of_pieces(buckets, param_groups))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_cls returned {type(optimizer).__name__}, not a torch.optim.Optimizer: pass a callable that "
            "takes a list of tensors, for example functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    whole = {cls.__name__ for cls in type(optimizer).__mro__} & _LOOK_AT_WHOLE
    if whole:
        raise ValueError(
            f"{whole.pop()} looks at a whole matrix or model, and a rank has flat pieces: it would run, and be wrong. "
            "Take one that treats each element by itself: SGD, Adam, AdamW, RMSprop, Adagrad"
        )
    known = {id(piece) for piece in pieces}
    foreign = sum(id(param) not in known for group in optimizer.param_groups for param in group["params"])
    if foreign:
        raise ValueError(
            f"the optimizer holds {foreign} tensor(s) that are not this rank's pieces: optimizer_cls must build it "
            "over the list that it is called with, not over model.parameters()"
        )
    return optimizer


def _groups_of_pieces(buckets, param_groups) -> list[dict]:
    pieces = {id(bucket.params[index]): piece for bucket in buckets for index, piece in bucket.pieces}
    names = {id(param): name for bucket in buckets for name, param in zip(bucket.names, bucket.params)}
    groups, seen = [], set()
    for number, group in enumerate(param_groups):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(
                f"param_groups[{number}] is {type(group).__name__}, not a dictionary with 'params': pass "
                '[{"params": [...], "weight_decay": 0.0}, ...] over the model\'s own parameters'
            )
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for param in params:
            if id(param) not in names:
                raise ValueError(
                    f"param_groups[{number}] holds a tensor of shape {tuple(param.shape)} that is not a trainable "
                    "parameter of the model: take the entries from model.parameters(), the frozen ones left out"
                )
            if id(param) in seen:
                raise ValueError(f"parameter {names[id(param)]!r} is twice in param_groups; leave it in one group")
            seen.add(id(param))
        groups.append({**group, "params": [pieces[id(param)] for param in params if id(param) in pieces]})
    forgotten = [name for key, name in names.items() if key not in seen]
    if forgotten:
        raise ValueError(
            f"{name_some(forgotten)} in no group of param_groups: add a group, or freeze what is not trained"
        )
    return groups

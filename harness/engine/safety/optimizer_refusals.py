"""What is wrong with an optimizer or its groups, found out before anything is changed."""

import torch

from harness.engine.safety.waiting import name_some

_LOOK_AT_WHOLE = {"Adafactor", "Muon", "Shampoo", "LBFGS", "LARS", "LAMB", "Lamb"}  # names, for most live elsewhere


def check_optimizer(model, optimizer_cls, param_groups, on_host: bool = False) -> tuple:
    """Raises for an `optimizer_cls` or `param_groups` that cannot work, found out on a few numbers.

    What torch refuses in words it refuses here, on these numbers. Returns the optimizer's name and its numbers (lr and
    so on), which must be the same on all ranks.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if param_groups is not None:
        _check_groups(named, param_groups)
    pieces = {}
    for _, param in named:
        device = torch.device("cpu") if on_host or param.is_meta else param.device
        pieces[id(param)] = torch.zeros(1, dtype=param.dtype, device=device, requires_grad=True)
    optimizer = optimizer_cls(handed_out(torch.zeros(1), pieces, param_groups))
    whole = {cls.__name__ for cls in type(optimizer).__mro__} & _LOOK_AT_WHOLE
    if whole:
        raise ValueError(
            f"{whole.pop()} looks at a whole matrix or model, and a rank has flat pieces: it would run, and be wrong. "
            "Take one that treats each element by itself: SGD, Adam, AdamW, RMSprop, Adagrad"
        )
    known = {id(piece) for piece in pieces.values()}
    for group in optimizer.param_groups:
        if any(id(param) not in known for param in group["params"]):
            raise ValueError(
                "the optimizer holds tensors that are not this rank's pieces: optimizer_cls must build it over the "
                "list that it is called with, not over model.parameters()"
            )
    numbers = [(name, value) for name, value in optimizer.defaults.items() if isinstance(value, int | float | tuple)]
    return type(optimizer).__name__, numbers


def handed_out(like: torch.Tensor, pieces: dict, param_groups) -> list:
    """What `optimizer_cls` is called with: `pieces` {id of the parameter: piece} as a list, or in groups."""
    if param_groups is None:
        return list(pieces.values()) or [like[:0].detach().requires_grad_()]  # optimizers refuse an empty list
    return [{**g, "params": [pieces[id(p)] for p in _params_of(g) if id(p) in pieces]} for g in param_groups]


def _params_of(group: dict) -> list:
    """The group's parameters as a list. torch takes (name, parameter) pairs, too: the names are not kept."""
    params = group["params"]
    if not isinstance(params, list):
        params = [params] if isinstance(params, torch.Tensor) else list(params)  # as torch does
    group["params"] = [param[1] if isinstance(param, tuple) and len(param) == 2 else param for param in params]
    return group["params"]


def _check_groups(named, param_groups) -> None:
    """Groups that would leave out a parameter, or train one twice, and nothing else would say so."""
    names, seen = {id(param): name for name, param in named}, set()
    for number, group in enumerate(param_groups):
        if not isinstance(group, dict):
            raise TypeError(f"param_groups[{number}] is {type(group).__name__}, not a dictionary with 'params'")
        for param in _params_of(group):
            if id(param) not in names:
                what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else repr(param)
                raise ValueError(
                    f"param_groups[{number}] holds {what}, which is not a trainable "
                    "parameter of the model: take the entries from model.parameters(), the frozen ones left out"
                )
            if id(param) in seen:
                raise ValueError(f"parameter {names[id(param)]!r} is twice in param_groups; leave it in one group")
            seen.add(id(param))
    forgotten = [name for key, name in names.items() if key not in seen]
    if forgotten:
        raise ValueError(
            f"{name_some(forgotten)} in no group of param_groups: add a group, or freeze what is not trained"
        )

"""What is wrong with an optimizer or its groups, found out before anything is changed."""

import math
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from zerolab.engine import accelerator
from zerolab.engine.safety.waiting import name_some


def check_optimizer(model, optimizer_cls, param_groups, on_host: bool = False) -> tuple:
    """Raises for an `optimizer_cls` or `param_groups` that cannot work, found out on a few numbers.

    What torch refuses in words it refuses here, on these numbers. Returns the optimizer's name and its groups, with
    the names in each, which must be the same on all ranks.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if param_groups is not None:
        _check_groups(named, param_groups)
    with torch.random.fork_rng(devices=[]):  # what the user draws next does not depend on it
        make = partial(_trial, optimizer_cls, param_groups, on_host)
        optimizer, numbers = make(named, whole=True)
        known, told, kinds = dict(zip(map(id, numbers), named)), [], {}
        for at, group in enumerate(optimizer.param_groups):
            if any(id(number) not in known for number in group["params"]):
                raise ValueError(
                    "the optimizer holds tensors that are not this rank's pieces: optimizer_cls must build it over the "
                    "list that it is called with, not over model.parameters()"
                )
            told.append(([known[id(number)][0] for number in group["params"]], options_of(group)))
            kinds |= {(at, number.ndim): known[id(number)] for number in group["params"]}
        kinds = list(kinds.values())  # one parameter of each group and number of dimensions
        if not any(isinstance(param, FakeTensor) for _, param in named):  # a dry run's have no values
            steps = _steps(*make(kinds, whole=True))
            # An optimizer that draws random numbers steps otherwise each time: nobody can tell by that.
            if not _same(steps, _steps(*_of_parts(make, kinds))) and _same(steps, _steps(*make(kinds, True))):
                raise ValueError(_LOOKS.format(type(optimizer).__name__, "steps otherwise with a part of a tensor"))
    return type(optimizer).__name__, told


def options_of(group: dict) -> str:
    """The options of an optimizer's group as text, by which ranks compare theirs."""

    def told(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return value if isinstance(value, int | float | str | None) else type(value).__name__

    return repr(tree_map(told, {key: value for key, value in group.items() if key != "params"}))


_LOOKS = (
    "{} {}: it looks at a whole matrix or model, or wants a closure, and a rank has flat pieces. Take one that treats "
    "each element by itself: SGD, Adam, AdamW, RMSprop, Adagrad"
)


def _trial(optimizer_cls, param_groups, on_host: bool, named, whole: bool):
    """The optimizer over a few numbers for each parameter, in its number of dimensions, or over flat parts of these.

    A rank hands it flat parts. So whoever looks at whole tensors (a norm, rows, a matrix) steps otherwise with them.
    """
    pieces = {}  # id of a parameter -> its numbers
    for place, (_, param) in enumerate(named):
        device = accelerator.kind() if param.is_meta else param.device
        dtype = torch.complex128 if param.is_complex() else torch.float64
        shape = (2,) * (param.ndim - 1) + (3,) * (param.ndim > 0)
        values = _wave(math.prod(shape), place).to("cpu" if on_host else device, dtype) + 1.5
        values = values.view(shape) if whole else values[: len(values) // 2 + 1]
        pieces[id(param)] = values.requires_grad_()
    return optimizer_cls(handed_out(pieces, param_groups)), list(pieces.values())


def _of_parts(make, kinds):
    try:
        return make(kinds, whole=False)
    except Exception as error:
        raise ValueError(_LOOKS.format("optimizer_cls", f"raises {error!r} for a flat part of a tensor")) from error


def _wave(numel: int, phase: float) -> torch.Tensor:
    return torch.sin(torch.arange(numel, device="cpu") * 1.3 + phase)


def _steps(optimizer, numbers) -> list[torch.Tensor]:
    """How far a few steps bring the first elements of each parameter."""
    before = [number.detach().clone() for number in numbers]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0 + 0.1  # a schedule may begin with 0
    for step in range(4):
        for place, number in enumerate(numbers):
            number.grad = _wave(number.numel(), place + step + 0.5).to(number).view(number.shape)
            if step == 3:
                number.grad *= 1000  # some optimizers look at a norm only where it is large
        try:
            optimizer.step()
        except Exception as error:
            raise ValueError(_LOOKS.format(f"{type(optimizer).__name__}.step()", f"raises {error!r}")) from error
    return [(number.detach() - old).flatten() for number, old in zip(numbers, before)]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """As far as both go. A wrong one is off by much more than rounding."""
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(one, other)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-9, equal_nan=True) for a, b in pairs)


def handed_out(pieces: dict, param_groups) -> list:
    """What `optimizer_cls` is called with: `pieces` {id of the parameter: piece} as a list, or in groups."""
    if param_groups is None:
        return list(pieces.values())
    groups = []
    for group in _as_torch_has_them(param_groups):
        groups.append({**group, "params": [pieces[id(param)] for param in group["params"] if id(param) in pieces]})
        groups[-1].pop("param_names", None)
    return groups


def _as_torch_has_them(param_groups) -> list[dict]:
    """The groups with their parameters in lists. torch refuses what is no group, and a parameter in two of them."""
    return torch.optim.Optimizer(param_groups, {}).param_groups


def _check_groups(named, param_groups) -> None:
    """Groups that would leave out a parameter, or train what is not the model's, and nothing else would say so."""
    names, grouped = {id(param): name for name, param in named}, set()
    for group in _as_torch_has_them(param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"param_groups holds a tensor of shape {tuple(param.shape)}, which is not a trainable parameter of "
                    "the model: take the entries from model.parameters(), the frozen ones left out"
                )
            grouped.add(id(param))
    forgotten = [name for key, name in names.items() if key not in grouped]
    if forgotten:
        raise ValueError(
            f"{name_some(forgotten)} in no group of param_groups: add a group, or freeze what is not trained"
        )

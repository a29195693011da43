"""The optimizer over this rank's pieces, with the parameter groups that the user wrote over whole parameters."""

import weakref

import torch

from harness.engine import guard
from harness.engine.waiting import name_some

_LOOK_AT_WHOLE = {"Adafactor", "Muon", "Shampoo", "LBFGS", "LARS", "LAMB", "Lamb"}  # names, for most live elsewhere


def over_pieces(engine, optimizer_cls, param_groups=None) -> torch.optim.Optimizer:
    """`optimizer_cls` called with this rank's pieces, or with one group of pieces per entry of `param_groups`.

    `param_groups` are the dictionaries that a torch optimizer takes, over the model's own parameters; a group
    of which this rank owns nothing stays, empty, so that every rank has the same groups. A rank that owns only
    padding hands in one empty tensor. What can be wrong with it was found out before, by `problem`.
    """
    buckets = engine.trained
    pieces = {id(b.params[index]): piece for b in buckets for index, piece in b.pieces}
    optimizer = optimizer_cls(_handed_out(buckets[0].shard, pieces, param_groups))
    this = weakref.ref(engine)
    layout = _layout(engine)

    def before_step(optimizer, args, kwargs):
        if this() is not None and not vars(this()).get("updating", False):
            raise RuntimeError(
                "optimizer.step() alone would update this rank's shard with gradients that were not reduced, and leave "
                "the other ranks without it: call engine.step(). A scheduler over engine.optimizer sees that step. "
                "For float16 take harness.engine.gradients.GradScaler, with the engine in the optimizer's place"
            )

    def after_step(optimizer, args, kwargs):
        if this() is not None:
            guard.stepped([param for bucket in this().trained for param in bucket.params])

    def saved(optimizer, state):
        state["zero_layout"] = layout

    def about_to_load(optimizer, state):
        found = _state_problem(optimizer, state, layout)
        if found is not None:
            raise ValueError(found)

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(about_to_load)
    optimizer._step_supports_amp_scaling = True  # so that torch's GradScaler calls `step`, and `before_step` answers
    # The pieces' gradients alone are not all that a stage keeps of a step.
    optimizer.zero_grad = lambda set_to_none=True: this().zero_grad()
    return optimizer


def problem(model, optimizer_cls, param_groups) -> Exception | None:
    """What is wrong with `optimizer_cls` or `param_groups`, found out on a few numbers before anything is changed."""
    if not callable(optimizer_cls):
        return TypeError(
            f"optimizer_cls is of type {type(optimizer_cls).__name__}, which cannot be called: pass a callable that "
            "takes a list of tensors, for example functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    try:
        _check_groups(named, param_groups)
        devices = [torch.device("cpu") if param.is_meta else param.device for _, param in named]
        pieces = {
            id(param): torch.zeros(1, dtype=param.dtype, device=device, requires_grad=True)
            for (_, param), device in zip(named, devices)
        }
        optimizer = optimizer_cls(_handed_out(torch.zeros(1), pieces, param_groups))
    except Exception as error:  # whatever the user's code raises: the other ranks must hear of it
        return error
    if not isinstance(optimizer, torch.optim.Optimizer):
        return TypeError(
            f"optimizer_cls returned {type(optimizer).__name__}, not a torch.optim.Optimizer: pass a callable that "
            "takes a list of tensors, for example functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    whole = {cls.__name__ for cls in type(optimizer).__mro__} & _LOOK_AT_WHOLE
    if whole:
        return ValueError(
            f"{whole.pop()} looks at a whole matrix or model, and a rank has flat pieces: it would run, and be wrong. "
            "Take one that treats each element by itself: SGD, Adam, AdamW, RMSprop, Adagrad"
        )
    known = {id(piece) for piece in pieces.values()}
    foreign = sum(id(param) not in known for group in optimizer.param_groups for param in group["params"])
    if foreign:
        return ValueError(
            f"the optimizer holds {foreign} tensor(s) that are not this rank's pieces: optimizer_cls must build it "
            "over the list that it is called with, not over model.parameters()"
        )
    return None


def _handed_out(like: torch.Tensor, pieces: dict, param_groups) -> list:
    """What `optimizer_cls` is called with: `pieces` {id of the parameter: piece} as a list, or in groups."""
    if param_groups is None:
        return list(pieces.values()) or [like[:0].detach().requires_grad_()]  # optimizers refuse an empty list
    return [{**g, "params": [pieces[id(p)] for p in _params_of(g) if id(p) in pieces]} for g in param_groups]


def _params_of(group: dict) -> list:
    params = group["params"]
    if not isinstance(params, list):
        group["params"] = params = [params] if isinstance(params, torch.Tensor) else list(params)  # as torch does
    return params


def _check_groups(named, param_groups) -> None:
    if param_groups is None:
        return
    names = {id(param): name for name, param in named}
    seen = set()
    for number, group in enumerate(param_groups):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(
                f"param_groups[{number}] is {type(group).__name__}, not a dictionary with 'params': pass "
                '[{"params": [...], "weight_decay": 0.0}, ...] over the model\'s own parameters'
            )
        for param in _params_of(group):
            if id(param) not in names:
                raise ValueError(
                    f"param_groups[{number}] holds a tensor of shape {tuple(param.shape)} that is not a trainable "
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


def _layout(engine) -> dict:
    """What an optimizer's state of one rank fits: the stage, the ranks, and which elements this rank owns."""
    pieces = [(b.names[index], piece.numel()) for b in engine.trained for index, piece in b.pieces]
    return {"stage": type(engine).__name__, "world_size": engine.world_size, "rank": engine.rank, "pieces": pieces}


def _state_problem(optimizer, state, own: dict) -> str | None:
    found = state.get("zero_layout")
    here = f"{own['stage']}, rank {own['rank']} of {own['world_size']}"
    there = f"{found['stage']}, rank {found['rank']} of {found['world_size']}" if found else "no engine of this project"
    way = (
        ". One rank's state fits the same stage, number of ranks, bucket size and units only: build the engine as it "
        "was saved, or save and load by harness.engine.checkpoint, whose checkpoints fit any stage and number of ranks"
    )
    if found is not None and found != own:
        what = "other pieces of the parameters" if there == here else there
        return f"the optimizer's state is of {what}, and this is {here}{way}"
    groups = state.get("param_groups", [])
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        return f"the optimizer's state has groups of {sizes[0]} tensors, this rank of {sizes[1]}; it is of {there}{way}"
    for group, mine in zip(groups, optimizer.param_groups):
        for key, piece in zip(group["params"], mine["params"]):
            for name, value in state.get("state", {}).get(key, {}).items():
                if torch.is_tensor(value) and value.dim() and value.shape != piece.shape:
                    shapes = f"{tuple(value.shape)} and not {tuple(piece.shape)}"
                    return f"the optimizer's state {name!r} has shape {shapes}; it is of {there}, this is {here}{way}"
    return None

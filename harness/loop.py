"""What a training loop needs around the lesson, alike in all three stages.

Plain functions over a model, its buckets (see `zero1.Bucket`) and a process group: checks before
anything can hang, the optimizer over the pieces, clipping, and weights in and out.
"""

import dataclasses
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

MAX_NAMES = 5  # in an error message


def name_some(names: list[str]) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is trained, in the model's order; a tied parameter once."""
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def not_in_buckets(model: nn.Module, buckets) -> list[torch.Tensor]:
    """Parameters that no bucket holds, and buffers."""
    held = {id(param) for bucket in buckets for param in bucket.params}
    return [param.data for param in model.parameters() if id(param) not in held] + list(model.buffers())


def check(model: nn.Module, group, **options) -> tuple[int, int]:
    """(rank, world size) in `group`, after every check that can be made before anything is changed.

    Raises RuntimeError without a process group; ValueError or TypeError for a model or an option that
    cannot work. The ranks compare notes, so that what is wrong on one rank is an error on all.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group() first, "
            "or start this file by ./launch.sh or torchrun, which set one up"
        )
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only the group's own ranks may build the engine")
    problem = _problem(model, options, dist.get_backend(group))
    _agree(problem, "" if problem else _fingerprint(model, options), group, rank, world_size)
    return rank, world_size


def _problem(model: nn.Module, options: dict, backend: str) -> Exception | None:
    if not isinstance(model, nn.Module):
        return TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}: {model!r}")
    named = list(model.named_parameters())
    for name, param in named:
        if isinstance(param, nn.parameter.UninitializedParameter):
            return ValueError(f"parameter {name!r} has no shape yet: run one forward on every rank before sharding")
        if getattr(param, "zero_engine", False):
            return ValueError(f"parameter {name!r} is sharded by another engine already; build a new model")
        if param.is_meta:
            return ValueError(
                f"parameter {name!r} is still on the meta device and has no values: "
                "materialise the model first, for example model.to_empty(device=...) and initialise it"
            )
    if not any(param.requires_grad for _, param in named):
        return ValueError(
            f"{type(model).__name__} has no trainable parameter among its {len(named)}: there is nothing to shard. "
            "Set requires_grad on what is to be trained"
        )
    devices = {param.device: name for name, param in reversed(named)}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        return ValueError(f"parameters on several devices ({where}): move the whole model to one with model.to(device)")
    if backend == "nccl" and next(iter(devices)).type == "cpu":
        return ValueError(
            "the parameters are on the CPU, but the group's backend is nccl: move the model to the GPU first"
        )
    bucket_mb = options.get("bucket_mb", 0)
    if not isinstance(bucket_mb, (int, float)) or not bucket_mb >= 0:
        return ValueError(f"bucket_mb must be a number of MiB, 0 or more, got {bucket_mb!r}")
    prefetch = options.get("prefetch", 0)
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        return ValueError(f"prefetch must be a whole number of units, 0 or more, got {prefetch!r}")
    return _units_problem(model, options.get("units"))


def _units_problem(model: nn.Module, units) -> Exception | None:
    """What is wrong with ZeRO-3's `units`: entries that are no modules, not in the model, or overlapping."""
    if units is None:
        return None
    try:
        units = list(units)
    except TypeError:
        return TypeError(f"units must be a list of modules of the model, got {type(units).__name__}")
    names = {id(module): name or type(model).__name__ for name, module in model.named_modules(remove_duplicate=True)}
    for index, unit in enumerate(units):
        if not isinstance(unit, nn.Module):
            return TypeError(f"units[{index}] must be a module of the model, got {type(unit).__name__}: {unit!r}")
        if id(unit) not in names:
            return ValueError(
                f"units[{index}] ({type(unit).__name__}) is not a module of the model; "
                "take the entries from model.modules(), for example list(model.blocks)"
            )
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict)):
            return ValueError(
                f"units[{index}] is {names[id(unit)]!r}, a {type(unit).__name__}: it is never called itself, "
                "so nothing could gather it in time; pass its entries instead"
            )
    for index, unit in enumerate(units):
        inside = {id(module) for module in unit.modules()}
        for other in range(len(units)):
            if other != index and id(units[other]) in inside:
                a, b = sorted((index, other))
                return ValueError(
                    f"units[{a}] ({names[id(units[a])]!r}) and units[{b}] ({names[id(units[b])]!r}) overlap: "
                    "a parameter can be gathered with one unit only; drop one of the two"
                )
    return None


def _fingerprint(model: nn.Module, options: dict) -> str:
    """What must be the same on every rank for the collectives to match: names, shapes, dtypes and options."""
    params = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    buffers = [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    names = {id(module): name for name, module in model.named_modules()}
    units = options.get("units")
    if isinstance(units, (list, tuple)):
        options = {**options, "units": [names.get(id(unit)) for unit in units]}
    return repr((params, buffers, options))


def _agree(problem, fingerprint: str, group, rank: int, world_size: int) -> None:
    """Raise on every rank if one has a problem, or if the ranks are about to shard different models."""
    if world_size == 1 or dist.get_backend(group) == "fake":  # nobody to compare with
        if problem is not None:
            raise problem
        return
    # The collective runs where the group's backend can run one, whatever is wrong with the model.
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    digest = hashlib.sha256(fingerprint.encode()).digest()[:7]  # 7 bytes: positive as an int64
    mine = torch.tensor([-1 if problem is not None else int.from_bytes(digest, "big")], device=device)
    everyone = torch.empty(world_size, dtype=mine.dtype, device=device)
    dist.all_gather_single(everyone, mine, group=group)
    if problem is not None:
        raise problem
    everyone = everyone.tolist()
    failed = [other for other, value in enumerate(everyone) if value == -1]
    if failed:
        raise RuntimeError(f"rank {rank} cannot go on: the checks failed on rank(s) {failed}, see the error there")
    different = [other for other, value in enumerate(everyone) if value != everyone[0]]
    if different:
        raise ValueError(
            f"rank(s) {different} have another model (names, shapes, dtypes, requires_grad) or other options than "
            "rank 0: every rank must build the same engine"
        )


def make_optimizer(optimizer_cls, buckets, param_groups=None) -> torch.optim.Optimizer:
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


def clip_grad_norm_(buckets, max_norm: float, norm_type: float, group, buffers=None) -> torch.Tensor:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

    A 0-d tensor, the same on every rank: what `torch.nn.utils.clip_grad_norm_` gives for the whole model.
    Only pieces count, so padding does not, and a tied parameter counts once. One small all-gather. What is
    scaled are the pieces' gradients, or `buffers` where these are views of larger ones.
    """
    gradients = [piece.grad for bucket in buckets for _, piece in bucket.pieces if piece.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
    local = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else buckets[0].shard.new_zeros(())
    # All values and not their all-reduced maximum: a maximum may lose a NaN.
    everyone = local.new_empty(dist.get_world_size(group))
    dist.all_gather_single(everyone, local.reshape(1), group=group)
    total = torch.linalg.vector_norm(everyone, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch does; NaN stays NaN
    for gradient in gradients if buffers is None else buffers:
        gradient.mul_(factor)
    return total


def name_of(bucket, param: nn.Parameter) -> str:
    return next(name for name, other in zip(bucket.names, bucket.params) if other is param)


def check_gradient(bucket, param: nn.Parameter) -> None:
    """Refuse a gradient that would be reduced wrongly: one that is sparse, or that nobody waits for any more."""
    if param not in bucket.missing:
        raise RuntimeError(
            f"a second gradient of {name_of(bucket, param)!r} arrived before its bucket was reduced. Either a backward "
            "before this one was interrupted or left some parameter without a gradient; call engine.zero_grad() "
            "before the next forward"
        )
    if param.grad.layout != torch.strided:
        name = name_of(bucket, param)
        raise RuntimeError(f"the gradient of {name!r} is sparse; build its embedding with sparse=False")


def without_gradient(buckets) -> list[str]:
    """Names of the parameters that no backward since the last `zero_grad()`, or not the last one, has reached.

    A bucket's `missing` are the parameters that the backward under way has not finished, all of them between
    two backwards; `reduced` tells whether it has been reduced since the last `zero_grad()`.
    """
    names = []
    for bucket in buckets:
        if not bucket.reduced or len(bucket.missing) < len(bucket.params):
            names += [name for name, param in zip(bucket.names, bucket.params) if param in bucket.missing]
    return names


def require_gradients(names: list[str]) -> None:
    """Raise RuntimeError naming the parameters that the step left without a gradient, if there are any."""
    if names:
        raise RuntimeError(
            f"no gradient for {name_some(names)}: the loss does not depend on {'it' if len(names) == 1 else 'them'}, "
            "or no backward() was called since zero_grad() (outside no_sync()). Use every parameter in forward, or "
            "freeze those that are not trained with requires_grad_(False) before building the engine"
        )


def full_state_dict(model: nn.Module, buckets, group) -> dict[str, torch.Tensor]:
    """Names, shapes and values of the whole model's `state_dict()`, on CPU, on every rank. A collective.

    Parameters are gathered from the shards, bucket by bucket. Buffers (BatchNorm's running statistics,
    for example) may differ between the ranks, which have seen different data: rank 0's are returned.
    """
    values = {}  # id of the model's own tensor -> its whole value on CPU
    with torch.no_grad():
        for bucket in buckets:
            flat = bucket.shard.new_empty(bucket.numel)
            dist.all_gather_single(flat, bucket.shard, group=group)
            for param, view in zip(bucket.params, bucket.views(flat)):
                values[id(param)] = view.to("cpu", copy=True)
        state = model.state_dict(keep_vars=True)  # the tensors themselves, untouched: a freed one cannot be read
        for key, tensor in state.items():
            if id(tensor) in values:
                state[key] = values[id(tensor)]
            elif isinstance(tensor, torch.Tensor):
                whole = tensor.detach().clone()
                dist.broadcast(whole, group_src=0, group=group)
                state[key] = values[id(tensor)] = whole.cpu()
    return state


def load_full_state_dict(model: nn.Module, buckets, state: dict[str, torch.Tensor], group) -> None:
    """Copy this rank's part of every parameter into its shards, and buffers whole.

    Raises KeyError for missing or unexpected names and ValueError for another shape, before anything
    is written. Every rank passes the whole `state`.
    """
    own = model.state_dict(keep_vars=True)
    missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
    if missing or unexpected:
        raise KeyError(
            f"the state does not fit the model: missing {name_some(missing) or 'nothing'}; "
            f"unexpected {name_some(unexpected) or 'nothing'}"
        )
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape != state[key].shape:
            raise ValueError(f"{key!r} has shape {tuple(state[key].shape)} in the state, {tuple(tensor.shape)} here")
    with torch.no_grad():
        keys = {id(tensor): key for key, tensor in own.items()}
        sharded = set()
        for bucket in buckets:
            sharded.update(id(param) for param in bucket.params)
            for index, part in bucket.cut(bucket.shard):
                value = state[keys[id(bucket.params[index])]].reshape(-1)
                first = max(0, bucket.start - bucket.offsets[index])
                part.copy_(value[first : first + part.numel()])
        for key, tensor in own.items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in sharded:
                tensor.copy_(state[key])


def default_units(model: nn.Module) -> list[nn.Module]:
    """The entries of every outermost ModuleList or Sequential, each once: what ZeRO-3 gathers as one.

    An entry that is a ModuleList or ModuleDict itself is never called, so its own entries take its place.
    """
    found: dict[int, nn.Module] = {}

    def entries(container: nn.Module) -> None:
        for entry in container.children():
            if isinstance(entry, (nn.ModuleList, nn.ModuleDict)):
                entries(entry)
            else:
                found.setdefault(id(entry), entry)

    def search(module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            entries(module)
        else:
            for child in module.children():
                search(child)

    search(model)
    return list(found.values())


def tensors_in(value) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, dictionaries and dataclasses, each once."""
    found: dict[int, torch.Tensor] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                found.update((id(tensor), tensor) for tensor in tensors_in(getattr(leaf, field.name, None)))
    return list(found.values())

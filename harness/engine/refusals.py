"""What is wrong with a model or an option is said before anything is changed, and on every rank.

The ranks compare notes in one small collective, so that nobody waits for a rank that has given up.
"""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from harness.engine import accelerator, guard, safe_reader, tensor_parallel
from harness.engine.optimizer_refusals import check_optimizer
from harness.engine.waiting import name_some, not_alike


def check(model: nn.Module, optimizer_cls, param_groups, place, dtypes, find_unused, source=None, **options) -> None:
    """Every check that can be made before anything is changed, on all ranks together.

    `place` says who they are, and where shards are kept (engine/placement.py). `dtypes` are (param_dtype,
    reduce_dtype), `source` is where a model on `meta` gets its values from, (init_fn, state_dict), or None in a stage
    that takes no such model. Raises RuntimeError without a process group;
    ValueError, TypeError or KeyError for a model or an option that cannot work.
    """
    group = place.everyone
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only the group's own ranks may build the engine")
    problem = optimizer = None
    try:
        _check_model(model, options, dist.get_backend(group))
        tensor_parallel.check(model, group, dtypes)
        _check_dtypes(model, dtypes, find_unused)
        _check_source(model, source, group)
        optimizer = check_optimizer(model, optimizer_cls, param_groups, on_host=place.offload is not None)
    except Exception as error:  # a damaged file, or the user's own code, may cause any: the other ranks must hear of it
        problem = error
    options |= {"dtypes": dtypes, "find_unused": find_unused, "offload": place.offload, "replicas": place.copies}
    options["optimizer"] = optimizer
    agree(problem, "" if problem else _fingerprint(model, options), group, model)


def _check_model(model: nn.Module, options: dict, backend: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}: {repr(model)[:80]}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces gradients itself: pass its .module"
        )
    named = list(model.named_parameters())
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.sparse and module.weight.requires_grad:
            raise ValueError(f"the gradient of {name!r} would be sparse; build the embedding with sparse=False")
        if module.max_norm is not None:
            raise ValueError(
                f"{name!r} has max_norm: its forward writes into its weights, on every rank into the rows of its own "
                "batch, and the ranks' weights would part. Build the embedding without it"
            )
    for name, param in named:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run one forward on every rank before sharding")
        engine = getattr(param, "zero_engine", lambda: None)()
        if engine is not None:
            raise ValueError(
                f"parameter {name!r} is sharded by another engine already: call that engine's close(), which makes the "
                "model plain again, or build a new model"
            )
        if isinstance(param, guard.Freed):
            raise ValueError(
                f"parameter {name!r} was freed by an engine that is gone, and its values with it: call engine.close() "
                "while the engine is there, or build a new model"
            )
    for name, tensor in (*named, *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name!r} has the layout {tensor.layout}, and collectives send dense tensors: make it dense with "
                ".to_dense(), or keep it as a plain attribute of its module, which the engine leaves alone"
            )
    if not any(param.requires_grad for _, param in named):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter among its {len(named)}: there is nothing to shard. "
            "Set requires_grad on what is to be trained"
        )
    devices = {param.device: name for name, param in reversed(named) if not param.is_meta}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters on several devices ({where}): move the whole model to one with model.to(device)")
    buffers = {name: buffer.device for name, buffer in model.named_buffers() if not buffer.is_meta}
    on_cpu = [name for name, device in buffers.items() if device.type == "cpu"]
    if backend not in ("gloo", "fake") and (on_cpu or any(device.type == "cpu" for device in devices)):
        raise ValueError(
            f"{'buffers ' + name_some(on_cpu) if on_cpu else 'the parameters'} are on the CPU, but the group's backend "
            f"is {backend}: move the model to the GPU first"
        )
    bucket_mb = options.get("bucket_mb")
    if bucket_mb is not None and (not isinstance(bucket_mb, (int, float)) or not bucket_mb >= 0):
        raise ValueError(f"bucket_mb must be a number of MiB, 0 or more, or None, got {bucket_mb!r}")
    prefetch = options.get("prefetch", 0)
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(f"prefetch must be a whole number of units, 0 or more, got {prefetch!r}")
    reshard = options.get("reshard_after_forward", True)
    if not isinstance(reshard, bool):  # torch's fully_shard takes a number, too, which means something else
        raise ValueError(f"reshard_after_forward must be True or False, got {reshard!r}")
    _check_units(model, options.get("units"))


def _check_dtypes(model, dtypes, find_unused) -> None:
    for name, dtype in zip(("param_dtype", "reduce_dtype"), dtypes):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name} must be a floating point dtype such as torch.bfloat16, or None, got {dtype!r}")
    param_dtype = dtypes[0]
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms and param_dtype is not None and next(model.parameters()).device.type == "cpu":
        ones = torch.ones(1)
        try:
            nn.functional.batch_norm(ones[None].to(param_dtype), ones, ones, ones.to(param_dtype), ones.to(param_dtype))
        except RuntimeError as error:
            raise ValueError(
                f"{name_some(norms)} cannot compute in {param_dtype} on a CPU: torch wants weights in the dtype of the "
                f"running statistics there ({error}). Leave param_dtype out, or run on a GPU"
            ) from error
    if not isinstance(find_unused, bool):
        raise ValueError(f"find_unused must be True or False, got {find_unused!r}")


def _check_source(model: nn.Module, source, group) -> None:
    """What is wrong with a model on `meta`, or with where its values are to come from."""
    named = [*model.named_parameters(), *model.named_buffers()]
    meta = {name: tensor for name, tensor in named if tensor.is_meta}
    if not meta:
        if source and source != (None, None):
            raise ValueError(
                "init_fn and state_dict are for a model on the meta device, and nothing of this one is: leave them out "
                "(engine.load_full_state_dict(state) loads weights into any engine)"
            )
        return None
    if source is None:
        raise ValueError(
            f"{name_some(list(meta))} on the meta device, without values: this stage holds all parameters whole, so "
            "materialise the model first (model.to_empty(device=...), then initialise it), or shard it by "
            "ZeRO3(model, ..., init_fn=...)"
        )
    init_fn, state = source
    if init_fn is None and state is None:
        raise ValueError(
            f"{name_some(list(meta))} on the meta device, without values: pass init_fn=, called as"
            " init_fn(name, tensor), to fill each parameter and buffer in place, or state_dict=, which has their values"
        )
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init_fn must be callable as init_fn(name, tensor), got {type(init_fn).__name__}")
    if state is None:
        return None
    if safe_reader.is_folder(state):
        path = safe_reader.newest(state)
        state = safe_reader.Folder(path, dist.get_rank(group), dist.get_world_size(group)).model_on_meta()
    if not isinstance(state, Mapping):
        raise TypeError(
            "state_dict must be a dictionary of names and tensors, or a checkpoint's folder, "
            f"got {type(state).__name__}"
        )
    own = model.state_dict(keep_vars=True)
    missing = [name for name in meta if name not in state] if init_fn is None else []
    unexpected = [name for name in state if name not in own]
    if missing or unexpected:
        way = " (buffers that a state_dict leaves out, too; init_fn= may fill them)" * bool(missing)
        raise KeyError(f"the state_dict does not fit the model: {not_alike(missing, unexpected)}{way}")
    for name, tensor in meta.items():
        if name in state and state[name].shape != tensor.shape:
            raise ValueError(f"{name!r} has shape {tuple(state[name].shape)} in state_dict, {tuple(tensor.shape)} here")


def _check_units(model: nn.Module, units) -> None:
    """What is wrong with ZeRO-3's `units`: entries that are no modules, not in the model, or overlapping."""
    if units is None:
        return None
    try:
        units = list(units)
    except TypeError:
        raise TypeError(f"units must be a list of modules of the model, got {type(units).__name__}") from None
    names = {id(module): name or type(model).__name__ for name, module in model.named_modules(remove_duplicate=True)}
    for index, unit in enumerate(units):
        if not isinstance(unit, nn.Module):
            raise TypeError(f"units[{index}] must be a module of the model, got {type(unit).__name__}: {unit!r}")
        if id(unit) not in names:
            raise ValueError(
                f"units[{index}] ({type(unit).__name__}) is not a module of the model; "
                "take the entries from model.modules(), for example list(model.blocks)"
            )
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"units[{index}] is {names[id(unit)]!r}, a {type(unit).__name__}: it is never called itself, "
                "so nothing could gather it in time; pass its entries instead"
            )
    for index, unit in enumerate(units):
        inside = {id(module) for module in unit.modules()}
        for other in range(len(units)):
            if other != index and id(units[other]) in inside:
                a, b = sorted((index, other))
                raise ValueError(
                    f"units[{a}] ({names[id(units[a])]!r}) and units[{b}] ({names[id(units[b])]!r}) overlap: "
                    "a parameter can be gathered with one unit only; drop one of the two"
                )


def _fingerprint(model: nn.Module, options: dict) -> str:
    """What must be the same on every rank for the collectives to match: names, shapes, dtypes and options."""
    params = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    buffers = [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    names = {id(module): name for name, module in model.named_modules()}
    units = options.get("units")
    if isinstance(units, (list, tuple)):
        options = {**options, "units": [names.get(id(unit)) for unit in units]}
    return repr((params, buffers, options))


def digest(text: str) -> int:
    """A number that stands for `text` in a collective: 7 bytes of its SHA-256, positive as an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def agree(problem, fingerprint: str, group, model=None) -> None:
    """Raise on every rank if one has a problem, or if the ranks are about to shard different models. A collective.

    Where the group's collectives run on GPUs (NCCL), this one runs on that of the model's parameters, or on the current
    one: a rank that has not called `torch.cuda.set_device` has its parameters elsewhere than on GPU 0, as a rule.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1 or dist.get_backend(group) == "fake":  # nobody to compare with
        if problem is not None:
            raise problem
        return
    # The collective runs where the group's backend can run one, whatever is wrong with the model.
    device = accelerator.device_of(group)
    if device.type != "cpu":
        params = model.parameters() if isinstance(model, nn.Module) else ()
        device = next((param.device for param in params if param.device.type == device.type), device)
    mine = torch.tensor([-1 if problem is not None else digest(fingerprint)], device=device)
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
            f"rank(s) {different} have another model (names, shapes, dtypes, requires_grad), another optimizer (its "
            "name and numbers) or other options than rank 0: every rank must build the same engine"
        )

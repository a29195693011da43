"""What is wrong with a model or an option is said before anything is changed, and on every rank."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from harness.engine.all_or_none import all_or_none
from harness.engine.options import meta, tensor_parallel
from harness.engine.safety import guard
from harness.engine.safety.optimizer_refusals import check_optimizer
from harness.engine.safety.waiting import name_some


def check(model: nn.Module, optimizer_cls, param_groups, place, dtypes, find_unused, source=None, **options) -> None:
    """Every check that can be made before anything is changed, on all ranks together.

    `place` says who they are, and where shards are kept (engine/options/placement.py). `dtypes` are (param_dtype,
    reduce_dtype), `source` is where a model on `meta` gets its values from, (init_fn, state_dict), or None in a stage
    that takes no such model. Raises RuntimeError without a process group; ValueError, TypeError or KeyError for a model
    or an option that cannot work.
    """
    group = place.everyone
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only the group's own ranks may build the engine")
    options |= {"param_dtype": dtypes[0], "reduce_dtype": dtypes[1], "find_unused": find_unused}

    def checked() -> str:
        _check_parameters(model)
        _check_memory(model)
        _check_devices(model, dist.get_backend(group))
        _check_options(options)
        _check_units(model, options.get("units"))
        tensor_parallel.check(model, group, dtypes)
        meta.check_source(model, source, group)
        options["optimizer"] = check_optimizer(model, optimizer_cls, param_groups, on_host=place.offload is not None)
        text = _fingerprint(model, options | {"offload": place.offload, "replicas": place.copies})
        return hashlib.sha256(text.encode()).hexdigest()

    # A damaged file, or the user's own code, may cause any error: the other ranks must hear of it.
    everyone = all_or_none(checked, group, "all ranks to build the engine", model)
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        raise ValueError(
            f"rank(s) {different} have another model (names, shapes, dtypes, requires_grad), another optimizer (its "
            "name, groups and numbers) or other options than rank 0: every rank must build the same engine"
        )


def _check_parameters(model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces gradients itself: pass its .module"
        )
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{name!r} has max_norm: its forward writes into its weights, on every rank into the rows of its own "
                "batch, and the ranks' weights would part. Build the embedding without it"
            )
    named = list(model.named_parameters())
    for name, param in named:
        if getattr(param, "zero_engine", lambda: None)() is not None:
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


def _check_memory(model: nn.Module) -> None:
    """Each parameter gets a place of its own: tensors that are on its memory today would part from it."""
    in_storage = {}  # number of a storage -> what lies in it
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor, trained = tensor_parallel.local(tensor), isinstance(tensor, nn.Parameter)
        if trained and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
            raise ValueError(f"several elements of {name!r} lie in one place of memory (expand()): add .clone()")
        beside = in_storage.setdefault(tensor.untyped_storage()._cdata, [])
        for other, there, its in beside:
            if (trained or its) and _overlap(tensor, there):
                raise ValueError(
                    f"{other!r} and {name!r} share memory, and would not after the build. Tie weights by one parameter "
                    "for both (a.weight = b.weight), and give a buffer memory of its own with .clone()"
                )
        beside.append((name, tensor, trained))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in one storage have an element in common."""
    ends = [
        (t.storage_offset() + sum(step * (size - 1) for step, size in zip(t.stride(), t.shape)) + 1) * t.element_size()
        for t in (one, other)
    ]
    begins = [t.storage_offset() * t.element_size() for t in (one, other)]
    if min(one.numel(), other.numel()) == 0 or ends[0] <= begins[1] or ends[1] <= begins[0]:
        return False
    if one.element_size() != other.element_size():
        return True
    marks = torch.zeros(max(ends) // one.element_size(), dtype=torch.bool, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _check_devices(model: nn.Module, backend: str) -> None:
    devices = {param.device: name for name, param in model.named_parameters() if not param.is_meta}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters on several devices ({where}): move the whole model to one with model.to(device)")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    on_cpu = [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]
    if backend not in ("gloo", "fake") and on_cpu:
        raise ValueError(
            f"{name_some(on_cpu)} on the CPU, but the group's backend is {backend}: move the model to the GPU first"
        )


def _check_options(options: dict) -> None:
    """The ranks would go different ways, or one way in silence that nobody meant."""
    for name, value in options.items():
        if name in ("param_dtype", "reduce_dtype"):
            fits = value is None or isinstance(value, torch.dtype) and value.is_floating_point
            wanted = "a floating point dtype such as torch.bfloat16, or None"
        elif name in ("find_unused", "reshard_after_forward"):  # torch's fully_shard takes a number, too
            fits, wanted = isinstance(value, bool), "True or False"
        elif name == "bucket_mb":
            fits = value is None or isinstance(value, int | float) and value >= 0
            wanted = "a number of MiB, 0 or more, or None"
        elif name == "prefetch":
            fits = type(value) is int and value >= 0
            wanted = "a whole number of units, 0 or more"
        else:
            continue
        if not fits:
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _check_units(model: nn.Module, units) -> None:
    """What is wrong with ZeRO-3's `units`: entries that are not in the model, never called, or overlapping."""
    names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
    unit_of = {}  # id of a module -> the place of the unit that it is in
    for index, unit in enumerate(units or ()):
        if id(unit) not in names:
            raise ValueError(
                f"units[{index}], {str(unit)[:80]!r}, is not a module of the model: "
                "take the entries from model.modules(), for example list(model.blocks)"
            )
        if isinstance(unit, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"units[{index}] is {names[id(unit)]!r}, a {type(unit).__name__}: it is never called itself, "
                "so nothing could gather it in time; pass its entries instead"
            )
        for module in unit.modules():
            other = unit_of.setdefault(id(module), index)
            if other != index:
                raise ValueError(
                    f"units[{other}] ({names[id(units[other])]!r}) and units[{index}] ({names[id(unit)]!r}) overlap: "
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

"""What is wrong with a model or an option is said before anything is changed, and on every rank."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from zerolab.engine.all_or_none import all_or_none
from zerolab.engine.layout import plain_name
from zerolab.engine.options import meta, tensor_parallel
from zerolab.engine.safety.optimizer_refusals import check_optimizer


def check(
    model: nn.Module, optimizer_cls, param_groups, place, dtypes, find_unused, source=None, **options
) -> list[list[str]]:
    """Every check that can be made before anything is changed, on all ranks together.

    Returns the names of the parameters in each of the optimizer's groups, as they are in a checkpoint.
    `place` says who they are, and where shards are kept (engine/options/placement.py). `dtypes` are (param_dtype,
    reduce_dtype), `source` is where a model on `meta` gets its values from, (init_fn, state_dict), or None in a stage
    that takes no such model. Raises RuntimeError without a process group; ValueError, TypeError or KeyError for a model
    or an option that cannot work.
    """
    group = place.everyone
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only the group's own ranks may build the engine")
    options |= {"param_dtype": dtypes[0], "reduce_dtype": dtypes[1], "find_unused": find_unused}
    options |= {"offload": place.offload, "replicas": place.copies}

    def checked() -> str:
        _check_parameters(model)
        _check_memory(model)
        _check_options(options)
        options["units"] = _check_units(model, options.get("units"))
        tensor_parallel.check(model, group, dtypes)
        meta.check_source(model, source, group)
        options["optimizer"] = check_optimizer(model, optimizer_cls, param_groups, on_host=place.offload is not None)
        return hashlib.sha256(_fingerprint(model, options).encode()).hexdigest()

    # A damaged file, or the user's own code, may cause any error: the other ranks must hear of it.
    everyone = all_or_none(checked, group, "all ranks to build the engine")
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        raise ValueError(
            f"rank(s) {different} have another model (names, shapes, dtypes, requires_grad), another optimizer (its "
            "name, groups and numbers) or other options than rank 0: every rank must build the same engine"
        )
    _, groups = options["optimizer"]
    return [[plain_name(name) for name in names] for names, _ in groups]


def _check_parameters(model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces gradients itself: pass its .module"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'the model'!r} is scripted, and takes no hooks: pass it as it was")
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{name!r} has max_norm: its forward writes into its weights, on every rank into the rows of its own "
                "batch, and the ranks' weights would part. Build the embedding without it"
            )
    for name, param in model.named_parameters():
        if getattr(param, "zero_engine", lambda: None)() is not None:
            raise ValueError(
                f"parameter {name!r} is sharded by another engine already: call that engine's close(), which makes the "
                "model plain again, or build a new model"
            )


def _check_memory(model: nn.Module) -> None:
    """Each parameter gets a place of its own: tensors that are on its memory today would part from it."""
    in_storage = {}  # number of a storage -> (name, tensor) of what lies in it, parameters first
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        in_storage.setdefault(tensor_parallel.local(tensor).untyped_storage()._cdata, []).append((name, tensor))
    for together in in_storage.values():
        if len(together) > 1:
            _refuse_shared(together)


def _refuse_shared(together: list[tuple[str, torch.Tensor]]) -> None:
    """`together` lie in one storage. Raises ValueError if a parameter has a byte in common with another tensor."""
    taken = torch.zeros(tensor_parallel.local(together[0][1]).untyped_storage().nbytes(), dtype=torch.int16)
    for number, (name, tensor) in enumerate(together, 1):
        local = tensor_parallel.local(tensor)
        size = local.element_size()
        steps = [size * step for step in local.stride()]
        place = taken.as_strided((*local.shape, size), (*steps, 1), size * local.storage_offset())
        if place.any():
            other = together[int(place.max()) - 1][0]
            raise ValueError(
                f"{other!r} and {name!r} share memory, and would not after the build. Tie weights by one parameter for "
                "both (a.weight = b.weight), and give a buffer memory of its own with .clone()"
            )
        if isinstance(tensor, nn.Parameter):
            place.fill_(number)


def _check_options(options: dict) -> None:
    """What would train wrong, or in another way than was meant, without a word."""
    for name in ("param_dtype", "reduce_dtype"):
        if options[name] is not None and not options[name].is_floating_point:
            raise ValueError(f"{name} must be a floating point dtype such as torch.bfloat16, got {options[name]!r}")
    if options.get("prefetch", 0) < 0:
        raise ValueError(f"prefetch must be a number of units, 0 or more, got {options['prefetch']!r}")


def _check_units(model: nn.Module, units) -> list[str] | None:
    """The names of ZeRO-3's `units`.

    What is not in the model or overlaps is refused: nothing would be gathered with it.
    """
    if units is None:
        return None
    names = {module: name for name, module in model.named_modules()}
    unit_of = {}  # module -> the unit that it is in
    for unit in units:
        if unit not in names:
            raise ValueError(
                f"{str(unit)[:80]!r} in units is not a module of the model: take the entries from model.modules(), for "
                "example list(model.blocks)"
            )
        for module in unit.modules():
            if module in unit_of:
                raise ValueError(
                    f"the units {names[unit_of[module]]!r} and {names[unit]!r} overlap: a parameter can be gathered "
                    "with one unit only; drop one of the two"
                )
            unit_of[module] = unit
    return [names[unit] for unit in units]


def _fingerprint(model: nn.Module, options: dict) -> str:
    """What must be the same on every rank for the collectives to match: names, shapes, dtypes and options."""
    params = [(name, tuple(p.shape), p.dtype, p.requires_grad, p.device.type) for name, p in model.named_parameters()]
    buffers = [(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()]
    return repr((params, buffers, options))

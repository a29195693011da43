"""Loading: check that the checkpoint fits the engine before anything is changed.

Every rank reads the rectangles that overlap its pieces. So it does not matter how many ranks wrote the checkpoint, or
whether the writer was an engine, FSDP2 or a plain model. All values are first read into the host's memory, 12Ψ/N bytes
with float32 and AdamW. If any rank fails, all ranks raise its error, and no engine has changed. (DCP's own `load`
writes into the model's tensors while it reads.)
"""

import copy
import warnings

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from zerolab.engine import offload
from zerolab.engine.checkpoint.reader import Damaged, Folder, complete, newest
from zerolab.engine.checkpoint.saving import as_piece, refuse_tensor_parallel, wait_for_last
from zerolab.engine.checks import names_of, shorten
from zerolab.engine.state_dict import own_parts, own_state, plain_name, split_state
from zerolab.engine.together import all_succeed, on_all_ranks


def load(engine, folder):
    """Load the newest checkpoint in `folder`, or `folder` itself, into the engine. Returns `extra`. A collective.

    `extra` has the values that this rank saved. A rank that did not exist then gets rank 0's values. These errors are
    raised on every rank, before anything is changed: FileNotFoundError, `Damaged`, `Unsafe`, ValueError if the model or
    the optimizer is different, or RuntimeError inside `torch.inference_mode()`.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("loading inside torch.inference_mode() makes tensors that cannot be trained: load outside")
    refuse_tensor_parallel(engine)
    wait_for_last(engine)
    group = engine.options.all_ranks
    rank = dist.get_rank(group)
    path = on_all_ranks(lambda: newest(folder) if rank == 0 else None, group)[0]
    source = all_succeed(lambda: Folder(path, rank, dist.get_world_size(group)), group)
    tensors, extras, options, states, extra = all_succeed(lambda: read(engine, source, rank), group)
    set_extra_states(extras, group)
    write_tensors(engine, tensors)
    write_optimizer(engine, options, states)
    return extra


def load_newest(engine, folder):
    """Load the newest checkpoint in `folder` that is not damaged. Returns (its path, `extra`), or None. A collective.

    It returns None if there is no checkpoint. Rank 0 warns of each checkpoint that is skipped. Raises RuntimeError if
    all checkpoints are damaged.
    """
    wait_for_last(engine)  # before the folder is listed, because a save in the background adds a checkpoint to it
    group = engine.options.all_ranks
    first = dist.get_rank(group) == 0
    found = on_all_ranks(lambda: complete(folder) if first else None, group)[0]
    for path in reversed(found):
        try:
            return path, load(engine, path)
        except Damaged as error:
            if first:
                warnings.warn(f"not loaded: {error}", stacklevel=2)
    if found:
        raise RuntimeError(f"no checkpoint in {str(folder)!r} is good. To start over, use another folder")
    return None


def read(engine, source, rank):
    """Everything that this rank needs, on the host: (tensors, extra states, options, optimizer states, extra).

    tensors        [(the engine's own tensor, its values)]
    extra states   [(module, its value)]
    options        one dictionary per parameter group
    states         {piece: {key: value}}
    """
    params, whole, extras = split_state(engine, own_state(engine.model))
    whole = {key: tensor for key, tensor in whole.items() if tensor.layout is torch.strided}
    check_model(engine, source, params | whole, extras)
    names = source.model
    wanted = {}  # name in the checkpoint -> the memory to read it into
    tensors = []  # (the engine's own tensor, name in the checkpoint)
    for key, tensor in whole.items():
        wanted[names[key]] = source.empty(names[key])
        tensors.append((tensor, names[key]))
    keys = {id(param): key for key, param in params.items()}
    for bucket in engine.all_buckets:
        for param, piece in own_parts(bucket):
            name = names[keys[id(param)]]
            wanted[name] = as_piece(bucket, param, torch.empty(piece.shape, dtype=piece.dtype))
            tensors.append((piece, name))
    options = read_options(engine, source)
    states = plan_states(engine, source, wanted)
    found = source.read(wanted)
    of_ranks = source.tree.get("extra", {})
    (extra,) = source.values(of_ranks.get(str(rank)) or of_ranks.get("0")) if of_ranks else ({},)
    return (
        [(tensor, found[name]) for tensor, name in tensors],
        [(module, source.values(names[key])) for key, (module, _) in extras.items() if key in names],
        options,
        {piece: tree_map(found.get, state) for piece, state in states.items()},
        extra,
    )


def check_model(engine, source, tensors, extras):
    """Raise ValueError if names, shapes or dtypes in the checkpoint differ from the model's."""
    saved = source.model_on_meta()
    missing = [key for key in tensors if key not in saved]
    # DCP does not save an extra state that is an empty dictionary.
    missing += [key for key, (_, value) in extras.items() if key not in source.model and value != {}]
    unexpected = [key for key in source.model if key not in tensors and key not in extras]
    if missing or unexpected:
        parts = [("missing", missing), ("unexpected", unexpected)]
        differences = "; ".join(f"{what} {shorten(keys)}" for what, keys in parts if keys)
        raise ValueError(f"{str(source.path)!r} has a different model: {differences}")
    dtypes = {id(param): bucket.shard.dtype for bucket in engine.all_buckets for param in bucket.params}
    for key, tensor in tensors.items():
        there = f"{saved[key].dtype} of shape {tuple(saved[key].shape)}"
        here = f"{dtypes.get(id(tensor), tensor.dtype)} of shape {tuple(tensor.shape)}"
        if there != here:
            raise ValueError(f"{key!r} is {there} in {str(source.path)!r} and {here} here")


def read_options(engine, source):
    """The saved options (learning rate, weight decay) of each parameter group, which is found by its parameters."""
    where = f"the optimizer state in {str(source.path)!r}"
    groups = source.tree.get("optim", {}).get("param_groups")
    if not groups:
        raise ValueError(f"{where} is missing, or does not have the layout of get_optimizer_state_dict in torch")
    groups = source.values(groups)
    if any(isinstance(name, int) for group in groups for name in group.get("params", ())):
        raise ValueError(
            f"{where} has numbers in place of parameter names, as optimizer.state_dict() has. Save what torch's "
            "get_optimizer_state_dict(model, optimizer) returns. docs/migrating/move.py converts a file"
        )
    kind = source.values(source.tree.get("zero", {})).get("optimizer")  # None in a checkpoint that DCP has written
    if kind not in (None, names_of(engine.optimizers)):
        raise ValueError(f"{where} is from {kind}, but the optimizer here is {names_of(engine.optimizers)}")
    trained = frozenset(plain_name(name) for bucket in engine.buckets for name in bucket.names)
    saved = {trained.intersection(group.pop("params", ())): group for group in groups}
    options = []
    for index, names in enumerate(engine.group_names):
        here = trained.intersection(names)
        if here not in saved:
            closest = max(saved, key=lambda there: len(there & here))
            sides = [("only here", here - closest), ("only there", closest - here)]
            differences = "; ".join(f"{side} {shorten(sorted(differing))}" for side, differing in sides if differing)
            raise ValueError(
                f"{where} has different parameter groups. Group {index} here differs from the closest group there: "
                f"{differences}. Build the optimizer with the same groups as when it was saved"
            )
        options.append(saved[here])
    optimizers = [optimizer for optimizer in engine.optimizers for _ in optimizer.param_groups]
    for optimizer, group in zip(optimizers, options):
        if (not kind or len(engine.optimizers) > 1) and (
            set(optimizer.defaults) - set(group)
            or group.get("decoupled_weight_decay") != optimizer.defaults.get("decoupled_weight_decay")
        ):
            raise ValueError(f"{where} is not from {type(optimizer).__name__}: it has {', '.join(sorted(group))}")
    return options


def plan_states(engine, source, wanted):
    """{piece: {key: name in the checkpoint}}. Adds the memory to read these into to `wanted`.

    A parameter without a state in the checkpoint gets none, because no step has updated it.
    """
    saved = source.tree["optim"].get("state", {})  # name of a parameter -> {key: name in the checkpoint}
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    # A scalar parameter cannot show which keys have one value per element, because a step counter is also a scalar.
    per_element = set()
    for param_name, state in saved.items():
        shape = shapes.get(source.model.get(param_name))
        per_element |= {key for key, name in state.items() if shape and shapes.get(str(name)) == shape}
    states = {}
    for bucket in engine.buckets:
        keys = {param: plain_name(name) for param, name in zip(bucket.params, bucket.names)}
        for param, piece in bucket.pieces.items():
            states[piece] = saved.get(keys[param], {})
            for key, name in states[piece].items():
                tensor = source.tensors.get(str(name))
                if key in per_element and bucket.owners is None:
                    wanted[name] = as_piece(bucket, param, torch.empty(piece.shape, dtype=tensor.dtype))
                elif tensor is not None and tensor.dim() and bucket.owners is None:
                    raise ValueError(
                        f"{name!r} has shape {tuple(tensor.shape)}, which is not the parameter's: if its optimizer "
                        "looks at whole tensors, build the engine with whole=True"
                    )
                else:
                    wanted |= {each: source.empty(each) for each in tree_leaves(name)}
    return states


# The functions above change nothing. From here on the engine changes.


def set_extra_states(extras, group):
    """Have modules load their extra states, which runs their own code. After an error all states are restored."""
    if not extras:
        return
    before = [(module, copy.deepcopy(module.get_extra_state())) for module, _ in extras]
    try:
        all_succeed(lambda: [module.set_extra_state(value) for module, value in extras], group)
    except Exception:
        for module, value in before:
            module.set_extra_state(value)
        raise


@torch.no_grad()
def write_tensors(engine, tensors):
    offload.wait_for_copies(engine.all_buckets)
    for tensor, value in tensors:
        tensor.copy_(value)
    engine.shards_changed()


def write_optimizer(engine, options, states):
    """Store the state on the piece's device, as torch does. Step counters of unfused optimizers stay on the CPU."""
    places = [(optimizer, group) for optimizer in engine.optimizers for group in optimizer.param_groups]
    for (optimizer, group), saved in zip(places, options):
        group.update(saved)
        for piece in group["params"]:
            optimizer.state.pop(piece, None)
            for key, value in states[piece].items():
                if isinstance(value, torch.Tensor) and (value.dim() or group.get("fused") or group.get("capturable")):
                    value = value.to(piece.device)
                optimizer.state[piece][key] = value

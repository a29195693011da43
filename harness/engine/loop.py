"""What a training loop needs around the lesson, alike in all three stages.

Plain functions over an engine, or over a model, its buckets (see `zero1.Bucket`) and a process group: dtypes, the
optimizer over the pieces, clipping, loss scaling, gradients that are missing, errors that tell what happened,
and weights in and out.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves, tree_map

from harness.engine import refusals as checks
from harness.engine.refusals import name_some

# Before and around forward.


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is trained, in the model's order; a tied parameter once."""
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of the rest."""
    return [(name, param) for name, param in model.named_parameters() if not param.requires_grad]


def bucket_dtypes(own: torch.dtype, param_dtype=None, reduce_dtype=None) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to compute in, dtype to reduce gradients in) for parameters of dtype `own`, as FSDP2's policy has it."""
    if not own.is_floating_point:  # quantized weights, for example, which nobody trains
        return own, own
    param_dtype = param_dtype or own
    return param_dtype, reduce_dtype or param_dtype


def round_weights(bucket) -> None:
    """Mixed precision: let the model compute with a `flat` of `param_dtype`. The shard keeps the parameters' dtype,
    because bfloat16 has no digits for an update that is small beside its weight. A freed `flat` stays freed."""
    if bucket.param_dtype == bucket.flat.dtype:
        return
    freed = bucket.flat.untyped_storage().nbytes() == 0
    if freed:
        bucket.flat = torch.empty_like(bucket.flat, dtype=bucket.param_dtype)
    else:
        bucket.shard, bucket.flat = bucket.shard.clone(), bucket.flat.to(bucket.param_dtype)
    for param, view in zip(bucket.params, bucket.views(bucket.flat)):
        param.data = view
    if freed:
        bucket.flat.untyped_storage().resize_(0)


def rounded_shard(bucket) -> torch.Tensor:
    """What this rank brings to an all-gather into `bucket.flat`: its shard, in mixed precision rounded into place."""
    if bucket.param_dtype == bucket.shard.dtype:
        return bucket.shard
    return bucket.flat[bucket.start : bucket.start + bucket.shard_numel].copy_(bucket.shard)


def prepare_forward(model: nn.Module, buckets, param_dtype, units=None) -> None:
    """Have every forward cast its floating point inputs, and refuse parameters that were frozen or unfrozen since.

    With `param_dtype` the inputs of the model and of every unit are cast, as FSDP2 does at each module that it
    wraps, so that a float32 buffer in between does no harm. Buffers and outputs keep their dtype.
    """
    flags = [(bucket, [param.requires_grad for param in bucket.params]) for bucket in buckets]
    known = {id(param) for bucket in buckets for param in bucket.params}

    def look(module, args, kwargs):
        if backward_now() is not None:  # recomputed by activation checkpointing
            return
        new = [name for name, param in model.named_parameters() if id(param) not in known]
        if new:
            raise RuntimeError(
                f"{name_some(new)} came into the model after the engine was built, which does not train it: build the "
                "whole model first, then the engine"
            )
        changed = []
        for bucket, was in flags:
            for name, param, before in zip(bucket.names, bucket.params, was):
                if param.requires_grad != before:
                    changed.append(name)
        if changed:
            raise RuntimeError(
                f"requires_grad of {name_some(changed)} was changed after the engine was built, which has buckets, "
                "hooks and optimizer state for the flags as they were. Change it back, or take state = "
                "engine.full_state_dict(), build a new model, load the state into it, set the flags, and build a new "
                "engine (its optimizer starts afresh). A parameter that only rests for some steps can be left out of "
                "the loss with find_unused=True"
            )

    def cast(module, args, kwargs):
        def one(value):
            return value.to(param_dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return tree_map(one, args), tree_map(one, kwargs)

    def refuse_loading(module, *args):
        raise RuntimeError(
            "model.load_state_dict() would change the rounded weights and not the float32 ones that the optimizer "
            "updates, and be undone by the next step: call engine.load_full_state_dict(state)"
        )

    model.register_forward_pre_hook(look, with_kwargs=True)
    if param_dtype is not None:
        for module in model.modules():
            module.register_load_state_dict_pre_hook(refuse_loading)
        for module in (model, *(default_units(model) if units is None else units)):
            module.register_forward_pre_hook(cast, with_kwargs=True)


# Around autograd's backward.


def backward_now() -> int | None:
    """Autograd's number of the backward that runs on this thread; None outside."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def when_backward_ends(callback) -> int:
    """Have autograd call `callback()` when the backward that is running is over; returns that backward's number."""
    Variable._execution_engine.queue_callback(callback)
    return backward_now()


def refuse_reentrant(found: bool) -> None:
    """Raise RuntimeError if a backward inside a backward was `found`, as reentrant checkpointing makes it."""
    if found:
        raise RuntimeError(
            "the model runs inside a backward that the engine does not know: that is reentrant activation "
            "checkpointing, which hides whole modules from autograd, so that nothing tells when to gather and free. "
            "Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), then engine.zero_grad() and go on"
        )


# Collectives that may wait in vain.


@contextlib.contextmanager
def waiting_for(what: str):
    """Let an error of a collective inside say what this rank waited for."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} waited in vain for {what}: some rank has died, hangs, or went another way "
            f"(a branch or a unit that not all ranks run). {error}"
        ) from error


def wait(work, collective: str, bucket) -> None:
    """`work.wait()`; on CUDA the stream waits and not the host. An error names the collective and the bucket."""
    with waiting_for(f"the {collective} of {label(bucket)}"):
        work.wait()


def label(bucket) -> str:
    """What a message calls `bucket`: its unit, or the names of its parameters."""
    return getattr(bucket, "label", None) or f"the bucket of {name_some(bucket.names)}"


# Gradients.


def name_of(bucket, param: nn.Parameter) -> str:
    return next(name for name, other in zip(bucket.names, bucket.params) if other is param)


def check_gradient(bucket, param: nn.Parameter) -> None:
    """Refuse a gradient that would be reduced wrongly: one that is sparse, or that nobody waits for any more."""
    if param not in bucket.missing:
        raise RuntimeError(
            f"a second gradient of {name_of(bucket, param)!r} arrived before its bucket was reduced. Either a backward "
            "before this one was interrupted or left some parameter without a gradient (build the engine with "
            "find_unused=True if that is meant); call engine.zero_grad() before the next forward"
        )
    if param.grad.layout != torch.strided:
        name = name_of(bucket, param)
        raise RuntimeError(f"the gradient of {name!r} is sparse; build its embedding with sparse=False")


def keep_gradient(bucket, param: nn.Parameter) -> None:
    """Under `no_sync`: move `param.grad` to `bucket.kept`, where several backwards add up in the reduce dtype."""
    gradient, param.grad = param.grad.to(bucket.reduce_dtype), None
    if param in bucket.kept:
        bucket.kept[param].add_(gradient)
    else:
        bucket.kept[param] = gradient


def without_gradient(buckets) -> list[str]:
    """Names of the parameters that no backward since the last `zero_grad()`, or not the last one, has reached.

    A bucket's `used` are those that got one. Where buckets are reduced during backward, `missing` are those that the
    backward under way has not finished: all of them between two backwards, some when it stopped short.
    """
    names = []
    for bucket in buckets:
        missing = getattr(bucket, "missing", ())
        short = missing if len(missing) < len(bucket.params) else ()
        names += [n for n, param in zip(bucket.names, bucket.params) if param not in bucket.used or param in short]
    return names


def require_gradients(buckets, find_unused: bool) -> None:
    """Raise RuntimeError for parameters that the step left without a gradient, unless `find_unused`, and for
    gradients that were not reduced, which would otherwise be lost."""
    names = [] if find_unused else without_gradient(buckets)
    if names:
        raise RuntimeError(
            f"no gradient for {name_some(names)}: the loss does not depend on {'it' if len(names) == 1 else 'them'}, "
            "or no backward() was called since zero_grad() (outside no_sync()). Use every parameter in forward, freeze "
            "those that are not trained with requires_grad_(False) before building the engine, or build it with "
            "find_unused=True"
        )
    left = []
    for bucket in buckets:
        kept = getattr(bucket, "kept", ())
        left += [name for name, p in zip(bucket.names, bucket.params) if p.grad is not None or p in kept]
    if left:
        raise RuntimeError(
            f"gradients of {name_some(left)} were not reduced: the last backward before step() must run outside "
            "no_sync() and reach the same buckets as those before it, or the engine be built with find_unused=True"
        )


def drop_unused(buckets, group) -> None:
    """With `find_unused`: take the gradient, which is zero, from the pieces of parameters that no rank has used.

    Then the optimizer leaves them alone, as in plain PyTorch: no weight decay, no momentum, no state. One
    all-reduce of a byte per parameter; the host waits for its result.
    """
    used = [param in bucket.used for bucket in buckets for param in bucket.params]
    used = torch.tensor(used, dtype=torch.uint8, device=buckets[0].flat.device)
    with waiting_for("the all-reduce of which parameters were used (find_unused)"):
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    flags = iter(used.tolist())
    for bucket in buckets:
        flag = [next(flags) for _ in bucket.params]
        for index, piece in bucket.pieces:
            if not flag[index]:
                piece.grad = None


def common_dtype(buckets) -> torch.dtype:
    """The dtype that holds all shards' values: the same on every rank, also where one owns only a bucket's padding."""
    return functools.reduce(torch.promote_types, (bucket.shard.dtype for bucket in buckets))


def clip_grad_norm_(engine, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Between backward and `step()`: scale the gradients so that their norm is at most `max_norm`. A collective.

    Returns the norm before, a 0-d tensor that is the same on every rank: what `torch.nn.utils.clip_grad_norm_` gives
    for the whole model. Padding does not count, a tied parameter counts once, a NaN or inf on one rank is seen by all.
    """
    engine._sync_gradients()
    buckets = engine.trained
    gradients = [piece.grad for bucket in buckets for _, piece in bucket.pieces if piece.grad is not None]
    dtype = common_dtype(buckets)
    norms = [torch.linalg.vector_norm(gradient, norm_type).to(dtype) for gradient in gradients]
    none = buckets[0].shard.new_zeros((), dtype=dtype)
    local = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else none
    # All values and not their all-reduced maximum: a maximum may lose a NaN.
    everyone = local.new_empty(engine.world_size)
    with waiting_for("the all-gather of the gradients' norms"):
        dist.all_gather_single(everyone, local.reshape(1), group=engine.group)
    total = torch.linalg.vector_norm(everyone, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch does; NaN stays NaN
    # ZeRO-1's gradients are views of a whole buffer, to which a later backward adds: all of it is scaled.
    buffers = [bucket.flat_gradient for bucket in buckets if hasattr(bucket, "flat_gradient")]
    storages = {buffer.untyped_storage()._cdata for buffer in buffers}
    for gradient in gradients:
        if gradient.untyped_storage()._cdata not in storages:
            gradient.mul_(factor)
    for buffer in buffers:
        buffer.mul_(factor)
    return total


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for float16 (its documentation has the why), over an engine in place of an optimizer:

        scaler = GradScaler()          # or with the options of torch's
        scaler.scale(loss).backward()
        scaler.unscale_(engine)        # if the gradients are to be clipped
        engine.clip_grad_norm_(1.0)
        scaler.step(engine)            # all ranks, or none
        scaler.update()
        engine.zero_grad()

    After step 3 an inf lies in one rank's shard alone. torch's own scaler would skip the step there and nowhere else,
    and the ranks would part; here the verdict is that of all ranks, for one all-reduce of 4 bytes.
    """

    def __init__(self, device: str | None = None, **options):
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **options)

    def unscale_(self, engine) -> None:
        """Divide the gradients by the scale, and find out whether some rank has an inf or NaN. A collective."""
        _require_engine(engine)
        if not self.is_enabled():
            return
        engine._sync_gradients()
        super().unscale_(engine.optimizer)
        found = self._found_inf_per_device(engine.optimizer)  # nothing on a rank that owns only padding
        device = engine.trained[0].shard.device
        anywhere = torch.stack([torch.zeros((), device=device), *(flag.to(device) for flag in found.values())]).amax()
        with waiting_for("the all-reduce of whether gradients are finite"):
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=engine.group)
        found[device] = anywhere

    def step(self, engine) -> None:
        """`engine.step()`, unless a gradient on some rank is inf or NaN. Unscales first if that was not done."""
        _require_engine(engine)
        if not self.is_enabled():
            return engine.step()
        if not self._found_inf_per_device(engine.optimizer):
            self.unscale_(engine)
        if not any(flag.item() for flag in self._found_inf_per_device(engine.optimizer).values()):
            engine.step()


def _require_engine(engine) -> None:
    if not hasattr(engine, "trained"):
        raise TypeError(f"expected the engine, got {type(engine).__name__}: the ranks must decide together")


# The optimizer, and weights in and out.

_LOOK_AT_WHOLE = {"Adafactor", "Muon", "Shampoo", "LBFGS", "LARS", "LAMB", "Lamb"}  # names, for most live elsewhere


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


def full_state_dict(engine) -> dict[str, torch.Tensor]:
    """Names, shapes, dtypes and values of the whole model's `state_dict()`, on CPU, on every rank. A collective.

    Parameters are gathered from the shards, bucket by bucket. Buffers (BatchNorm's running statistics,
    for example) are every rank's own and may differ, as each has seen other data: rank 0's are returned.
    """
    model, group = engine.model, engine.group
    values = {}  # id of the model's own tensor -> its whole value on CPU
    with torch.no_grad():
        for bucket in engine.buckets:
            flat = bucket.shard.new_empty(bucket.numel)
            with waiting_for(f"the all-gather of {label(bucket)}"):
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


def load_full_state_dict(engine, state: dict[str, torch.Tensor]) -> None:
    """Load what `full_state_dict` returned, at any world size: this rank's part of every parameter. A collective.

    Every rank passes the whole `state`. Raises TypeError for something else, KeyError for missing or unexpected names
    and ValueError for another shape, on every rank, before anything is written.
    """
    checks.agree(_state_problem(engine, state), "", engine.group, engine.rank, engine.world_size)
    own = engine.model.state_dict(keep_vars=True)
    with torch.no_grad():
        keys = {id(tensor): key for key, tensor in own.items()}
        sharded = set()
        for bucket in engine.buckets:
            sharded.update(id(param) for param in bucket.params)
            for index, part in bucket.cut(bucket.shard):
                value = state[keys[id(bucket.params[index])]].reshape(-1)
                first = max(0, bucket.start - bucket.offsets[index])
                part.copy_(value[first : first + part.numel()])
        for key, tensor in own.items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in sharded:
                tensor.copy_(state[key])
    engine._sync_params(engine.buckets)


def _state_problem(engine, state) -> Exception | None:
    if not isinstance(state, Mapping):
        return TypeError(f"every rank must pass the whole state, a dictionary of tensors, got {type(state).__name__}")
    own = engine.model.state_dict(keep_vars=True)
    missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
    if missing or unexpected:
        return KeyError(
            f"the state does not fit the model: missing {name_some(missing) or 'nothing'}; "
            f"unexpected {name_some(unexpected) or 'nothing'}"
        )
    for key, tensor in own.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape != state[key].shape:
            return ValueError(f"{key!r} has shape {tuple(state[key].shape)} in the state, {tuple(tensor.shape)} here")
    return None


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
    """All tensors in nested tuples, lists, dictionaries, dataclasses and other plain objects, each once."""
    found: dict[int, torch.Tensor] = {}
    _search(value, found, set())  # no inner function: one that calls itself is a cycle, and would keep tensors alive
    return list(found.values())


def _search(value, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
        elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module)):
            seen.add(id(leaf))
            if dataclasses.is_dataclass(leaf):
                _search([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)], found, seen)
            elif hasattr(leaf, "__dict__"):
                _search(list(vars(leaf).values()), found, seen)

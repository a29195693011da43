"""Engines that are not ours, under the names that properties call: each used as its own documentation says.

What an engine documents nothing of is `NotApplicable`: there is nothing that could be right or wrong.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer

from zerolab.properties.property import STAGES, NotApplicable, Subject
from zerolab.run import engines
from zerolab.run.counterparts import ddp, fsdp2, zero_redundancy_optimizer
from zerolab.run.deepspeed_engine import build as deepspeed

# What each documents of the options that a stage has, besides groups of parameters: {who builds it in the registry:
# {the option's name here: there}}.
OPTIONS = {
    ddp: {"bucket_mb": "bucket_mb", "group": "process_group", "find_unused": "find_unused_parameters"},
    zero_redundancy_optimizer: {"group": "process_group", "find_unused": "find_unused_parameters"},
    fsdp2: {"group": "mesh", "param_dtype": "mp_policy", "reduce_dtype": "mp_policy"},
    deepspeed: {},
}
OF_TORCH = (ddp, zero_redundancy_optimizer, fsdp2)  # used with torch's own clipping


def subject(entry: engines.Engine) -> Subject:
    """The engine of that entry of the registry as a subject."""
    family = getattr(entry.build, "func", entry.build)
    like = entry.counterpart if entry.counterpart in STAGES else None
    takes = frozenset(("param_groups", *OPTIONS[family]) if family in OPTIONS else ())
    more = {"broadcasts": family in (ddp, zero_redundancy_optimizer)}
    if family is deepspeed:
        more |= {"dtype": torch.float32, "atol": 2e-5, "more": {"drops gradients": True, "to be destroyed": True}}

    def build(model, optimizer_cls, *, param_groups=None, **options):
        device, make = next(model.parameters()).device, entry.build
        options = _in_its_own_words(family, options, device)
        if family is zero_redundancy_optimizer:
            if not isinstance(optimizer_cls, partial):
                raise NotApplicable(f"{entry.name} is given an optimizer's class and options, and no function")
            # It is the optimizer over DDP's parameters.
            group = options.get("process_group")
            optimizer_cls = partial(ZeroRedundancyOptimizer, optimizer_class=optimizer_cls.func, process_group=group,
                                    **optimizer_cls.keywords)  # fmt: skip
            make = ddp
        scalars = _without_scalars(model) if family in (fsdp2, deepspeed) else []
        if family is deepspeed:
            if len({param.dtype for param in model.parameters()}) > 1:
                raise NotApplicable("DeepSpeed documents one dtype for a whole model")
            if next(model.parameters()).dtype is torch.float64:
                model.float()  # it knows no other but lower ones
        if param_groups is not None:
            optimizer_cls = _grouped(model, param_groups, optimizer_cls, family is not zero_redundancy_optimizer)
        return Foreign(entry.name, make(model, optimizer_cls, device, **options), scalars, family in OF_TORCH)

    return Subject(entry.name, build, like, takes, **more)


def _in_its_own_words(family: Callable, options: dict, device: torch.device) -> dict:
    """The options of a stage as this engine calls them."""
    group = options.get("group")
    if family is fsdp2:
        policy = {name: options[name] for name in options if name.endswith("dtype")}
        options |= dict.fromkeys(policy, MixedPrecisionPolicy(**policy))
        if isinstance(group, dist.ProcessGroup):
            options["group"] = DeviceMesh.from_group(group, device.type)
    elif isinstance(group, DeviceMesh):
        if group.ndim > 1:
            raise NotApplicable(f"{family.__name__} documents no mesh of {group.ndim} dimensions")
        options["group"] = group.get_group()
    return {OPTIONS[family][name]: value for name, value in options.items()}


def _without_scalars(model: nn.Module) -> list[str]:
    """FSDP2 and DeepSpeed want one element instead of a scalar. The names of those that are changed so, in place."""
    found = [name for name, param in model.named_parameters(remove_duplicate=False) if param.ndim == 0]
    for param in model.parameters():
        if param.ndim == 0:
            param.data = param.data.reshape(1)
    return found


def _grouped(model: nn.Module, groups, optimizer_cls, takes_names: bool):
    """`optimizer_cls` over these groups. An engine may put other parameters into the model: they go by their names."""
    names, found = {param: name for name, param in model.named_parameters()}, []
    for group in groups:
        pairs = [each if isinstance(each, tuple) else (None, each) for each in group["params"]]
        if not takes_names and any(given for given, _ in pairs):
            raise NotApplicable("ZeroRedundancyOptimizer documents no names of parameters")
        found.append((group, [(given, names[param]) for given, param in pairs]))

    def over(_):
        now = dict(model.named_parameters())
        return optimizer_cls(
            [
                {**group, "params": [(given, now[name]) if given else now[name] for given, name in pairs]}
                for group, pairs in found
            ]
        )

    return over


class Foreign:
    """`engine`, anything with `model`, `optimizer`, and a step, called `name`; perhaps one that is torch's own."""

    def __init__(self, name: str, engine, scalars: list[str], of_torch: bool):
        self._name, self._engine, self._scalars, self._of_torch = name, engine, scalars, of_torch
        self.optimizer, self.step, self.zero_grad = engine.optimizer, engine.step, engine.zero_grad
        self.training_step = engine.training_step
        self.model = getattr(engine.model, "module", engine.model)  # DDP's own is inside of it

    def __call__(self, *args, **kwargs):
        return self._engine(*args, **kwargs)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """{name: whole tensor on the CPU}. Who shards parameters in a way of its own has this method, too."""
        if hasattr(self._engine, "full_state_dict"):
            state = self._engine.full_state_dict()
        else:
            state = {
                name: whole(value).detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                for name, value in self.model.state_dict().items()
            }
        return state | {name: state[name].reshape(()) for name in self._scalars}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch's own for its own engines: their documentation says so. Others may average gradients only in `step`."""
        if hasattr(self._engine, "clip_grad_norm_"):
            return self._engine.clip_grad_norm_(max_norm, norm_type)
        if not self._of_torch:
            raise NotApplicable(f"{self._name} has no clip_grad_norm_")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return whole(norm)

    @contextlib.contextmanager
    def no_sync(self):
        """DDP's `no_sync`, FSDP2's `set_requires_gradient_sync`."""
        model = self._engine.model
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)
        elif hasattr(model, "no_sync") or hasattr(self._engine, "no_sync"):
            with (model if hasattr(model, "no_sync") else self._engine).no_sync():
                yield
        else:
            raise NotApplicable(f"{self._name} has no way to keep gradients unsent")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotApplicable(f"{self._name} documents nothing like `{name}`")


def whole(value: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole value, of which this rank has a part. A collective."""
    return getattr(value, "full_tensor", lambda: value)()

"""Other people's engines: the features that they document, and how to use each according to its documentation.

If an engine does not document a feature, the test does not apply to it. It is skipped, with the reason. An engine in a
file documents what its SUPPORTS lists, and no options.
"""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from helpers import whole_weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Documented:
    """supports     features of `zerolab.run.engine_file.FEATURES`
    options         {the name of an option here: its name there}
    broadcasts      all ranks start with rank 0's weights
    clips           "torch": torch's own clipping is documented to work
    plain           parameters must be contiguous and have a dimension
    drops           `step()` also clears the gradients
    exact           it adds in DDP's order, so results equal DDP's to the bit
    dtype           the dtype in which its values are compared, and
    tolerance       how far they may be apart
    """

    supports: tuple = ()
    options: dict = field(default_factory=dict)
    broadcasts: bool = False
    clips: str | None = None
    plain: bool = False
    drops: bool = False
    exact: bool = True
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12


_TORCH = ("groups", "dtypes", "keywords")
_FSDP2 = Documented(
    _TORCH, {"group": "mesh", "param_dtype": "mp_policy", "reduce_dtype": "mp_policy"}, clips="torch", plain=True
)
_DEEPSPEED = Documented(
    ("groups", "keywords"), plain=True, drops=True, exact=False, dtype=torch.float32, tolerance=5e-5
)
OTHERS = {
    "ddp": Documented(
        _TORCH,
        {"bucket_mb": "bucket_mb", "group": "process_group", "find_unused": "find_unused_parameters"},
        broadcasts=True,
        clips="torch",
    ),
    "zero_redundancy_optimizer": Documented(_TORCH, broadcasts=True, clips="torch"),
    "fsdp2": _FSDP2,
    "fsdp2_no_reshard": _FSDP2,
    "deepspeed1": _DEEPSPEED,
    "deepspeed2": _DEEPSPEED,
    "deepspeed3": _DEEPSPEED,
}


def adapted(subject, model, optimizer, options):
    """The engine that the subject builds, with the names that tests call."""
    documented = subject.documented
    unknown = [name for name in options if name not in documented.options]
    if unknown:
        pytest.skip(f"{subject.name} documents no option {unknown[0]}")
    if "dtypes" not in documented.supports and len({param.dtype for param in model.parameters()}) > 1:
        pytest.skip(subject.says_nothing_of("dtypes"))
    scalars = make_plain(model) if documented.plain else []
    device = next(model.parameters()).device
    built = subject.build(model, optimizer, device, **translated(subject, options, device))
    return Adapted(subject, built, scalars)


def translated(subject, options, device):
    """The options, under this engine's names."""
    documented = subject.documented
    group = options.get("group")
    if documented.options.get("group") == "mesh":
        policy = {name: options[name] for name in options if name.endswith("dtype")}
        options = {**options, **dict.fromkeys(policy, MixedPrecisionPolicy(**policy))}
        if isinstance(group, dist.ProcessGroup):
            options["group"] = DeviceMesh.from_group(group, device.type)
    elif isinstance(group, DeviceMesh):
        if group.ndim > 1:
            pytest.skip(f"{subject.name} documents no mesh of {group.ndim} dimensions")
        options = {**options, "group": group.get_group()}
    return {documented.options[name]: value for name, value in options.items()}


def make_plain(model):
    """Give scalars one dimension, and make all parameters contiguous. Returns the names of the scalars."""
    scalars = [name for name, param in model.named_parameters(remove_duplicate=False) if param.ndim == 0]
    for param in model.parameters():
        param.data = param.data.reshape(1) if param.ndim == 0 else param.data.contiguous()
    return scalars


class Adapted:
    """Another engine. It has the methods that tests of every engine call."""

    def __init__(self, subject, engine, scalars):
        self._subject = subject
        self._engine = engine
        self._scalars = scalars
        self.optimizer, self.step, self.zero_grad = engine.optimizer, engine.step, engine.zero_grad
        self.model = getattr(engine.model, "module", engine.model)  # DDP is a module around the model

    def __call__(self, *args, **kwargs):
        return self._engine(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        return self._engine.training_step(inputs, targets, loss_fn)

    def train(self, mode=True):
        """The engine's own `train`, if it has one."""
        getattr(self._engine, "train", self.model.train)(mode)
        return self

    def eval(self):
        return self.train(False)

    def full_state_dict(self):
        """{name: whole tensor on the CPU}."""
        if hasattr(self._engine, "full_state_dict"):
            state = self._engine.full_state_dict()
        elif any(hasattr(unit, "start_gather") for unit in getattr(self._engine, "units", ())):  # as in the chapter
            state = whole_weights(self._engine)
        elif any(param.numel() and param.untyped_storage().nbytes() == 0 for param in self.model.parameters()):
            pytest.skip(f"the weights of {self._subject.name} are freed, and it has no full_state_dict()")
        else:
            state = {
                name: whole(value).detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                for name, value in self.model.state_dict().items()
            }
        return state | {name: state[name].reshape(()) for name in self._scalars}

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        if hasattr(self._engine, "clip_grad_norm_"):
            return self._engine.clip_grad_norm_(max_norm, norm_type)
        if self._subject.documented.clips != "torch":
            pytest.skip(f"{self._subject.name} has no clip_grad_norm_")
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type))

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
        elif hasattr(model, "no_sync"):
            with model.no_sync():
                yield
        elif hasattr(self._engine, "no_sync"):
            with self._engine.no_sync():
                yield
        else:
            pytest.skip(f"{self._subject.name} documents no way to keep gradients on the rank")


def whole(value):
    """The whole value of a DTensor, which has one part on this rank. A collective."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value

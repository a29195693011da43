"""What properties share: optimizers, small models (harness/run/small_models.py), groups, and an impostor."""

import copy
import functools
import importlib
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.run.engines import STAGES  # noqa: F401  the cases use it as parts.STAGES
from harness.run.small_models import (  # noqa: F401  the cases use them as parts.Stack and so on
    OddBlock,
    OddModel,
    Stack,
    Twice,
    oracle,
    seeded,
    token_batch,
    vector_batch,
    whole,
)

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "maximize": partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}
MOMENTUM, ADAMW, SGD = OPTIMIZERS["momentum"], OPTIMIZERS["adamw"], OPTIMIZERS["sgd"]
DECAY = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)  # a step too many, or too few, shows


def in_float32(outputs, targets) -> torch.Tensor:
    """The loss of outputs that may be of low precision."""
    return F.cross_entropy(outputs.float(), targets)


def of_all_ranks(value: torch.Tensor) -> torch.Tensor:
    """Every rank's `value`. A collective of all ranks."""
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return torch.stack(everyone)


class DDPInDisguise:
    """Right losses and nothing sharded: plain AdamW under DDP, behind an engine's face."""

    def __init__(self, model, optimizer_cls, **options):
        self.model = model
        self.ddp = DistributedDataParallel(model)
        self.optimizer = optimizer_cls([param for param in model.parameters() if param.requires_grad])

    def __call__(self, *args, **kwargs):
        return self.ddp(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        loss = loss_fn(self(inputs), targets)
        loss.backward()
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def full_state_dict(self):
        return copy.deepcopy(self.model.state_dict())


def failure(module: str, of: str, **arguments) -> str:
    """The message with which a case fails, on every rank and between collectives, so that the ranks go on."""
    try:
        getattr(importlib.import_module(module), of)(**arguments)
    except AssertionError as error:
        return str(error)
    raise RuntimeError(f"{of} passes with {arguments}")


def pieces_of(engine) -> list[torch.Tensor]:
    """What the engine's optimizer updates on this rank."""
    return [piece for group in engine.optimizer.param_groups for piece in group["params"]]


def hooks_on(model, *others) -> int:
    """How many hooks there are on a model's modules and parameters, and on `others`."""
    owners = [*model.modules(), *others]
    count = sum(len(value or ()) for owner in owners for key, value in vars(owner).items() if "hooks" in key)
    return count + sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


@functools.cache
def silent_group():
    """A process group whose collectives move nothing and take no memory.

    Gloo works on a copy of a reduce-scatter's input and lets go of buffers from a thread of its own, a moment
    after `wait()`: for the exact bytes of what an engine itself keeps alive, it is left out.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    return dist.new_group(backend="fake", group_desc="silent")


@functools.cache
def mesh(*shape: int, names: tuple[str, ...] | None = None, device: str = "cpu"):
    """A mesh over all ranks: made once, as its groups stay (see `pool`)."""
    return init_device_mesh(device, shape, mesh_dim_names=names)


def grid(replicas: int = 2, shards: int = 2):
    """The mesh of hybrid sharding."""
    return mesh(replicas, shards, names=("replicas", "shards"))

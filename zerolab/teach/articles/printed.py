"""Claims about the code that the articles print: the point of each class or snippet, rebuilt in a few lines of ours."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from zerolab.teach.articles.claim import MULTIPLE_GPUS, WORDPRESS, Outcome, claim, depends_on, holds_if
from zerolab.teach.articles.runs import batch_for, chain, forward, running


def attempt(run, *args) -> str:
    """ "runs", or the type of the error that `run(*args)` raises."""
    try:
        with warnings.catch_warnings(action="ignore"):
            run(*args)
    except Exception as error:
        return type(error).__name__
    return "runs"


# ZeRO-1.


def update_the_last_shard(numel: int) -> None:
    """The last of 4 ranks as printed: the parameters are padded before they are cut, and the gradients are not."""
    size = -(-numel // 4)
    shard = torch.zeros(size, requires_grad=True)
    shard.grad = torch.ones(numel)[3 * size : 4 * size]
    torch.optim.Adam([shard]).step()


@claim((MULTIPLE_GPUS, "ZeRO-1: Optimizer State Partitioning"))
def printed_zero1_trains() -> Outcome:
    """The printed ZeRO-1 trains."""
    even, uneven = attempt(update_the_last_shard, 12), attempt(update_the_last_shard, 10)
    return depends_on(
        "It trains if N divides the size of every parameter. Otherwise it raises an error, because it pads "
        "the parameters but not the gradients.",
        holds_with=even == "runs",
        holds_without=uneven == "runs",
        found=f"the last of 4 ranks, 12 elements: {even}; 10 elements: {uneven}",
    )


# ZeRO-3.


class FreedByAssignment:
    """ZeRO-3 on one of 8 ranks. Hooks gather a module's parameters, and free them by pointing `.data` at the shard.

    The all-gather's result is made of this rank's shard.
    """

    def __init__(self, model: nn.Module):
        self.shards = {}  # parameter -> (shard, whole shape)
        self.gathered = []  # weak references to the storages of all gathers
        for param in model.parameters():
            self.shards[param] = torch.zeros(-(-param.numel() // 8)), param.shape
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                self.free(module)
                module.register_forward_pre_hook(self.gather)
                module.register_forward_hook(self.free)
                module.register_full_backward_pre_hook(self.gather)
                module.register_full_backward_hook(self.free)

    def gather(self, module: nn.Module, *_) -> None:
        for param in module.parameters(recurse=False):
            shard, shape = self.shards[param]
            flat = torch.cat([shard] * 8)
            param.data = flat[: shape.numel()].view(shape)
            self.gathered.append(StorageWeakRef(flat.untyped_storage()))

    def free(self, module: nn.Module, *_) -> None:
        for param in module.parameters(recurse=False):
            param.data, _ = self.shards[param]


@claim((MULTIPLE_GPUS, "ZeRO-3: Parameter Partitioning"))
def printed_zero3_frees() -> Outcome:
    """The printed ZeRO-3 frees the parameters it has gathered."""
    model = chain()
    engine = FreedByAssignment(model)
    output = model(batch_for(model)[0])  # keeps what autograd has saved
    alive = [storage for storage in engine.gathered if not storage.expired()]
    del output
    return holds_if(
        not alive,
        f"of 8 linear layers, gathered and freed, {len(alive)} weights are alive after forward",
        why="It frees by assigning `.data`, but autograd has saved a view of the gathered weight and keeps its "
        "memory. Only the first layer's weight is freed, because its input needs no gradient. zero3.py "
        "resizes the storage instead.",
    )


def backward_of_printed(model: nn.Module, inputs: torch.Tensor) -> None:
    FreedByAssignment(model)
    model(inputs).sum().backward()


@claim((MULTIPLE_GPUS, "ZeRO-3: Parameter Partitioning"))
def printed_zero3_trains() -> Outcome:
    """The printed ZeRO-3 gets through forward and backward."""
    embedding = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    with_gradient = attempt(backward_of_printed, chain(2), torch.ones(2, 64, requires_grad=True))
    plain = attempt(backward_of_printed, chain(2), torch.ones(2, 64))
    tokens = attempt(backward_of_printed, embedding, torch.zeros(2, 3, dtype=torch.int64))
    return depends_on(
        "It does if the input of every module needs a gradient. Otherwise the backward hook frees the "
        "parameter before its gradient is accumulated. For example, this happens with an embedding, and "
        "with a layer whose input is the data.",
        holds_with=with_gradient == "runs",
        holds_without=plain == tokens == "runs",
        found=f"input with a gradient: {with_gradient}; plain input: {plain}; embedding: {tokens}",
    )


# FSDP's wrappers.


def sharded_layers() -> nn.Module:
    model = chain()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train(name: str, make_model) -> None:
    with running(name, make_model) as engine:
        forward(engine).backward()


@claim((WORDPRESS, "Enter PyTorch FSDP"))
def fully_shard_works_inside_fsdp() -> Outcome:
    """Its snippet puts fully_shard on the layers and FSDP (FullyShardedDataParallel) around the model."""
    together = attempt(train, "fsdp1", sharded_layers)
    fsdp1, fsdp2 = attempt(train, "fsdp1", chain), attempt(train, "fsdp2", chain)
    return holds_if(
        together == "runs",
        f"together on 8 ranks: {together}; FSDP only: {fsdp1}; fully_shard only: {fsdp2}",
        why="fully_shard is FSDP2, and FullyShardedDataParallel is FSDP1. Each of them trains without the "
        "other, but they do not train together.",
    )

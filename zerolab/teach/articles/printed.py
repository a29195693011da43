"""Claims in the code that the articles print: the point of each class or snippet, rebuilt in a few lines of our own."""

import textwrap
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from zerolab.teach.articles.runs import batch_for, chain, forward, running


def attempt(run, *given) -> str:
    """ "runs" if `run(*given)` goes through, else the error's name and first words."""
    try:
        with warnings.catch_warnings(action="ignore"):
            run(*given)
    except Exception as error:
        return f"{type(error).__name__}: {textwrap.shorten(str(error).splitlines()[0], 90, placeholder=' ...')}"
    return "runs"


# The printed ZeRO-1 and ZeRO-3, as far as their properties go.


def shards_of(numel: int) -> list[int]:
    """Elements of each of 4 ranks if `numel` are cut into slices of ceil(numel / 4), and nothing pads the last."""
    size = -(-numel // 4)
    return [len(range(numel)[rank * size : (rank + 1) * size]) for rank in range(4)]


def last_update(numel: int) -> None:
    """The last rank's, as printed: the parameters are padded before they are cut, and the gradients are not."""
    shard = torch.zeros(-(-numel // 4), requires_grad=True)
    shard.grad = torch.ones(shards_of(numel)[-1])
    torch.optim.Adam([shard]).step()


def printed_zero1():
    return [attempt(last_update, numel) for numel in (12, 10)]


class FreedByAssignment:
    """ZeRO-3 that gathers a module's parameters in hooks, and frees them by pointing `.data` at the shard.

    Of 8 ranks; what an all-gather would write is made of this rank's shard.
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


def printed_zero3_frees():
    """How many gathered parameters are alive after a forward that has freed them all, and how many there were."""
    model = chain()
    engine = FreedByAssignment(model)
    output = model(batch_for(model)[0])  # keeps what autograd has saved
    alive = [storage for storage in engine.gathered if not storage.expired()]
    del output
    return [len(alive), len(engine.gathered)]


def backward_of_printed(model: nn.Module, inputs: torch.Tensor) -> None:
    FreedByAssignment(model)
    model(inputs).sum().backward()


def printed_zero3_trains():
    embedding = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    return [
        attempt(backward_of_printed, chain(2), torch.ones(2, 64, requires_grad=True)),
        attempt(backward_of_printed, chain(2), torch.ones(2, 64)),
        attempt(backward_of_printed, embedding, torch.zeros(2, 3, dtype=torch.int64)),
    ]


# FSDP's wrappers.


def layers_sharded() -> nn.Module:
    model = chain()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train(name: str, ranks: int, model_of=chain) -> None:
    with running(name, model_of, ranks) as engine:
        forward(engine).backward()


def both_wrappers():
    """Alone each trains, together neither does: together on 1 rank and on 8, FSDP alone, fully_shard alone."""
    together = [attempt(train, "fsdp1", ranks, layers_sharded) for ranks in (1, 8)]
    alone = [attempt(train, name, 8) for name in ("fsdp1", "fsdp2")]
    return [*together, *alone]

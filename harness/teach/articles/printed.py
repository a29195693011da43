"""Claims in the code that the articles print: the point of each class or snippet, rebuilt in a few lines of our own."""

import textwrap
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from harness.teach.articles.runs import batch_for, chain, fake_ranks, forward, running, size_of


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
    """ZeRO-3 that gathers a module's parameters in hooks, and frees them by pointing `.data` at the shard."""

    def __init__(self, model: nn.Module):
        self.model, self.shards, self.shapes = model, {}, {}
        self.gathered = []  # (weak reference to the storage, its bytes) of every gather
        for param in model.parameters():
            self.shapes[param] = param.shape
            self.shards[param] = torch.zeros(-(-param.numel() // dist.get_world_size()))
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                self.free(module)
                module.register_forward_pre_hook(self.gather)
                module.register_forward_hook(self.free)
                module.register_full_backward_pre_hook(self.gather)
                module.register_full_backward_hook(self.free)

    def gather(self, module: nn.Module, *_) -> None:
        for param in module.parameters(recurse=False):
            shard, shape = self.shards[param], self.shapes[param]
            flat = shard.new_zeros(shard.numel() * dist.get_world_size())
            dist.all_gather_single(flat, shard)
            param.data = flat[: shape.numel()].view(shape)
            self.gathered.append((StorageWeakRef(flat.untyped_storage()), flat.nbytes))

    def free(self, module: nn.Module, *_) -> None:
        for param in module.parameters(recurse=False):
            param.data = self.shards[param]


def printed_zero3_frees():
    """Gathered parameters that are alive after a forward which has freed them all; activations are not counted."""
    with fake_ranks(8):
        engine = FreedByAssignment(chain())
        output = engine.model(batch_for(engine.model)[0])  # keeps what autograd has saved
        alive = sum(nbytes for storage, nbytes in engine.gathered if not storage.expired())
        del output
    return [alive, size_of(chain)]


def backward_of_printed(model: nn.Module, inputs: torch.Tensor) -> None:
    with fake_ranks(2):
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

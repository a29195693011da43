"""Claims in the code that the articles print: the point of each class or snippet, rebuilt in a few lines of our own."""

import inspect
import textwrap
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from harness.run.counterparts import DDPStandIn
from harness.run.engines import ENGINES
from harness.teach.articles.claim import Claims, listed
from harness.teach.articles.runs import STAGES, batch_for, chain, fake_ranks, forward, running, step

claims = Claims()
TORCH = f"torch {torch.__version__.split('+')[0]}"


def attempt(run, warned: str = "ignore") -> str:
    """Nothing if `run()` goes through, else the error's name and first words. `warned`: what becomes of warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(warned)
            run()
    except Exception as error:
        return f"{type(error).__name__}: {textwrap.shorten(str(error).splitlines()[0], 90, placeholder=' ...')}"
    return ""


# The printed ZeRO-1 and ZeRO-3, as far as their properties go.


def shards_of(numel: int, ranks: int = 4) -> list[int]:
    """Elements of every rank if `numel` are cut into slices of ceil(numel / ranks), and nothing pads the last."""
    size = -(-numel // ranks)
    return [torch.zeros(numel)[rank * size : (rank + 1) * size].numel() for rank in range(ranks)]


def last_update(numel: int) -> None:
    """The last rank's, as printed: the parameters are padded before they are cut, and the gradients are not."""
    shard = torch.zeros(-(-numel // 4), requires_grad=True)
    shard.grad = torch.ones(shards_of(numel)[-1])
    torch.optim.Adam([shard]).step()


def fits(numel: int) -> bool:
    """Whether all ranks have as much: a collective needs equal shards."""
    return len(set(shards_of(numel))) == 1


def last_of(layers: int) -> float:
    """The share of a rank's elements that a loop gives back which assigns each shard to one name."""
    whole = 0
    for param in chain(layers).parameters():
        shard = param.flatten().chunk(4)[0]
        whole += shard.numel()
    return shard.numel() / whole


# fmt: off
claims.multiple_gpus("the printed ZeRO-1 trains", "its padded shards and unpadded gradient slices on 4 ranks",
                     "N divides the size of every parameter", lambda: (
    f"4 ranks, 12 elements: {attempt(partial(last_update, 12)) or 'trains'}; 10 elements: gradient slices "
    f"{shards_of(10)}, last rank: {attempt(partial(last_update, 10)) or 'trains'}",
    not attempt(partial(last_update, 12)), not attempt(partial(last_update, 10))), tolerance=None)
claims.wordpress("shards rounded up and cut off at the end, without padding, fit a collective",
                 "shard sizes on 4 ranks", "N divides every size", lambda: (
    "4 ranks: " + listed({f"{numel} elements": str(shards_of(numel)) for numel in (16, 10, 5)})
    + "; a collective needs equal shards", fits(16), fits(10) or fits(5)))
claims.wordpress("its function returns the rank's shards", "a loop that returns its last variable",
                 "the model has one parameter",
                 lambda: {"of the rank's elements, with 1 parameter": last_of(1), "with 8": last_of(8)}, says=1)


class FreedByAssignment:
    """ZeRO-3 that gathers a module's parameters in hooks, and frees them by pointing `.data` at the shard."""

    def __init__(self, model: nn.Module):
        self.model, self.shards, self.shapes = model, {}, {}
        self.gathered = []  # (weak reference to the storage, its bytes) of every gather
        for param in model.parameters():
            self.shapes[param] = param.shape
            self.shards[param] = torch.zeros(-(-param.numel() // dist.get_world_size()))
            param.data = self.shards[param]
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(lambda module, *_: self.gather(module))
                module.register_forward_hook(lambda module, *_: self.free(module))
                module.register_full_backward_pre_hook(lambda module, *_: self.gather(module))
                module.register_full_backward_hook(lambda module, *_: self.free(module))

    def gather(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            shard, shape = self.shards[param], self.shapes[param]
            flat = shard.new_zeros(shard.numel() * dist.get_world_size())
            dist.all_gather_single(flat, shard)
            param.data = flat[: shape.numel()].view(shape)
            self.gathered.append((StorageWeakRef(flat.untyped_storage()), flat.nbytes))

    def free(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.data = self.shards[param]


@claims.multiple_gpus("the printed ZeRO-3 frees what it has gathered",
                      "freeing by assigning .data, gathered bytes alive after forward")  # fmt: skip
def printed_zero3_frees():
    """Gathered parameters that are alive after a forward which has freed them all; activations are not counted."""
    with fake_ranks(8):
        engine = FreedByAssignment(chain())
        output = engine.model(batch_for(engine.model)[0])  # keeps what autograd has saved
        assigned = sum(nbytes for storage, nbytes in engine.gathered if not storage.expired())
        del output
    with running("zero3") as engine:
        loss = forward(engine)
        resized = sum(bucket.flat.untyped_storage().nbytes() for bucket in engine.buckets)
        del loss
    measured = f"alive after forward of 8 linear layers: {assigned:,} of {step('zero3').parameter_bytes:,} gathered "
    return f"{measured}bytes, by resizing storages, as zero3.py and FSDP do: {resized:,}", not assigned


@claims.multiple_gpus("the printed ZeRO-3 gets through forward and backward",
                      "freeing in backward hooks, three models",
                      "the input of every module needs a gradient; no embedding, no layer on the data itself",
                      tolerance=None)  # fmt: skip
def printed_zero3_trains():
    def passes(model: nn.Module, inputs: torch.Tensor) -> None:
        with fake_ranks(2):
            FreedByAssignment(model)
            model(inputs).sum().backward()

    embedding = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    errors = {
        "input with a gradient": attempt(lambda: passes(chain(2), torch.ones(2, 64, requires_grad=True))),
        "plain input": attempt(lambda: passes(chain(2), torch.ones(2, 64))),
        "embedding": attempt(lambda: passes(embedding, torch.zeros(2, 3, dtype=torch.int64))),
    }
    linear, data, token = (not error for error in errors.values())
    return listed({what: error or "runs" for what, error in errors.items()}, "{}: {}", "; "), linear, data or token


# FSDP's names and wrappers.

FSDP = "from torch.distributed.fsdp import"


def imports(*lines: str) -> tuple:
    """Whether each import line works in this torch."""
    failed = {line: error for line in lines if (error := attempt(partial(exec, line, {})))}
    return f"{TORCH}: {listed(failed, '{!r}: {}', '; ') or f'{len(lines)} of {len(lines)} work'}", not failed


for article, words, ran, *lines in (
    (claims.multiple_gpus, "fully_shard is imported from torch.distributed.fsdp", "the import", f"{FSDP} fully_shard"),
    (claims.multiple_gpus, "PyTorch ships two implementations, FSDP1 and FSDP2", "both imports",
     f"{FSDP} FullyShardedDataParallel", f"{FSDP} fully_shard"),
    (claims.wordpress, "fully_shard is imported from torch.distributed.fsdp.fully_shard", "the import",
     "from torch.distributed.fsdp.fully_shard import fully_shard"),
    (claims.scaling, "its names from torch.distributed.fsdp exist, enable_wrap among them", "the imports",
     "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, enable_wrap, wrap",
     "from torch.distributed.fsdp.fully_sharded_data_parallel import BackwardPrefetch, CPUOffload"),
):  # fmt: skip
    article(words, ran, tolerance=None)(partial(imports, *lines))


# fmt: off
claims.scaling("its imports are all that its snippet needs", "functools.partial without an import, and with it",
               "functools is imported as well", lambda: (
    f"as printed {attempt(partial(exec, 'functools.partial', {}))}",
    not attempt(partial(exec, "import functools; functools.partial", {})),
    not attempt(partial(exec, "functools.partial", {}))), tolerance=None)
# fmt: on


@claims.wordpress("fully_shard on the layers, FSDP around the model",
                  "a chain of layers wrapped so, one forward and backward", tolerance=None)  # fmt: skip
def both_wrappers():
    """Alone each trains, together neither does."""

    def layers_sharded() -> nn.Module:
        model = chain()
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model

    def train(name: str, ranks: int, model_of=chain) -> None:
        with running(name, model_of, ranks) as engine:
            forward(engine).backward()

    together = [attempt(partial(train, "fsdp1", ranks, layers_sharded)) for ranks in (1, 8)]
    alone = [attempt(partial(train, name, 8)) for name in ("fsdp1", "fsdp2")]
    found = dict(zip(("together on 1 rank", "on 8", "FSDP alone", "fully_shard alone"), together + alone))
    return listed({what: error or "runs" for what, error in found.items()}, "{}: {}", "; "), not any(together)


@claims.scaling("implementation complexity: DDP low, ZeRO-1 and -2 medium, ZeRO-3 high",
                "lines of this project's classes counted", tolerance=0.5)  # fmt: skip
def complexity():
    """Of what is written out in one class each; what the stages share in harness/engine is not counted."""
    classes = {"a DDP of buckets and hooks": DDPStandIn} | {name: ENGINES[name].build.args[0] for name in STAGES}
    lines = {name: len(inspect.getsource(one).splitlines()) for name, one in classes.items()}
    ddp, zero1, zero2, zero3 = lines.values()
    return "lines: " + listed(lines), ddp < min(zero1, zero2) and max(zero1, zero2) < zero3

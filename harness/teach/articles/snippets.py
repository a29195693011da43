"""Claims in the articles' code: the point of each snippet, rebuilt in a few lines of our own and run."""

import contextlib
import inspect
import os
import tempfile
import textwrap
import warnings
from concurrent.futures import Future
from functools import partial

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint_sequential

from harness.measure.traffic import TrafficLedger
from harness.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    SCALING,
    WORDPRESS,
    Claim,
    about,
    holds_when,
    verdict,
)
from harness.teach.articles.runs import (
    SGD,
    FullyShardedDataParallel,
    batch_for,
    build,
    chain,
    fake_ranks,
    fully_shard,
    loss_for,
    one_rank,
    toy,
)

TORCH = f"torch {torch.__version__.split('+')[0]}"


def attempt(run) -> str:
    """Nothing if `run()` goes through, else the error's name and first words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Exception as error:
        return f"{type(error).__name__}: {textwrap.shorten(str(error).splitlines()[0], 90, placeholder=' ...')}"
    return ""


def imports(*lines: str) -> tuple[str, str]:
    """Whether each import line works in this torch."""
    failures = {line: attempt(lambda line=line: exec(line, {})) for line in lines}
    failed = [f"{line!r}: {error}" for line, error in failures.items() if error]
    return f"{TORCH}: " + ("; ".join(failed) or f"{len(lines)} of {len(lines)} work"), verdict(not failed)


def without_functools() -> tuple[str, str]:
    """A policy bound with functools.partial, in a namespace with the snippet's imports, and with one more."""
    given = "import torch\nfrom torch.distributed.fsdp.wrap import size_based_auto_wrap_policy\n"
    use = "policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)\n"
    as_printed = attempt(lambda: exec(given + use, {}))
    completed = attempt(lambda: exec("import functools\n" + given + use, {}))
    return f"as printed {as_printed}; with it {completed or 'works'}", holds_when(
        "functools is imported as well", not completed, not as_printed
    )


def deprecated_scaler() -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there = hasattr(torch.cuda.amp, "GradScaler")
        if there:
            torch.cuda.amp.GradScaler(enabled=False)
    warned = any("deprecated" in str(warning.message) for warning in caught)
    now = hasattr(torch.amp, "GradScaler")
    measured = f"{TORCH}: there {there}, deprecated {warned}; torch.amp.GradScaler there {now}"
    return measured, holds_when("a deprecated name will do", there, there and not warned)


def both_wrappers() -> tuple[str, str]:
    """fully_shard on every layer and FullyShardedDataParallel around all: alone each trains, together neither does."""

    def together(ranks: int):
        with fake_ranks(ranks):
            model, mesh = chain(), init_device_mesh("cpu", (ranks,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            FullyShardedDataParallel(model, device_id=torch.device("cpu"))(torch.ones(2, 64)).sum().backward()

    def alone(name: str):
        with fake_ranks(8):
            model = chain()
            build(name, model, SGD)(torch.ones(2, 64)).sum().backward()

    errors = {f"together on {ranks} rank(s)": attempt(lambda ranks=ranks: together(ranks)) for ranks in (1, 8)}
    single = {name: attempt(lambda name=name: alone(name)) for name in ("fsdp1", "fsdp2")}
    measured = "; ".join(f"{what}: {error or 'runs'}" for what, error in errors.items())
    measured += "; each alone runs" if not any(single.values()) else f"; alone {single}"
    return measured, verdict(not any(errors.values()))


def root_wrapped_too() -> tuple[str, str]:
    """fully_shard by layers and around the model; around the model only; by layers only."""

    def gathers(layers: bool, root: bool) -> tuple[int, int]:
        with fake_ranks(8):
            model = toy()
            inputs, targets = batch_for(model)
            options = {"mesh": init_device_mesh("cpu", (8,))}
            for block in model.blocks if layers else ():
                fully_shard(block, **options)
            if root:
                fully_shard(model, **options)
            with TrafficLedger() as ledger:
                loss_for(model)(model(inputs), targets).backward()
            sizes = [c.whole_bytes for c in ledger.collectives if c.kind == "all-gather"]
            whole = sum(p.numel() * p.element_size() for p in model.parameters() if not hasattr(p, "_local_tensor"))
        return max(sizes), whole

    total = sum(param.numel() * 4 for param in toy().parameters())
    (both, _), (only_root, _), (_, unsharded) = (
        gathers(*which) for which in ((True, True), (False, True), (True, False))
    )
    measured = (
        f"largest all-gather {both / total:.0%} of the model; only the model wrapped {only_root / total:.0%}; "
        f"only the layers wrapped: {unsharded / total:.0%} of the parameters stay unsharded"
    )
    needed = both < only_root and unsharded > 0
    condition = "the model must never be gathered as one, and parameters outside the layers must be sharded too"
    return measured, holds_when(condition, needed, only_root == 0)


def shards_of(numel: int, ranks: int) -> list[int]:
    """Rounded-up shards without padding: each rank's elements of `numel`."""
    size = -(-numel // ranks)
    return [max(0, min((rank + 1) * size, numel) - min(rank * size, numel)) for rank in range(ranks)]


def shard_without_padding() -> tuple[str, str]:
    even, odd, tiny = (shards_of(numel, 4) for numel in (16, 10, 5))
    measured = f"4 ranks: 16 elements {even}, 10 {odd}, 5 {tiny}; a collective needs equal shards"
    return measured, holds_when("N divides every size", len(set(even)) == 1, len(set(odd)) == len(set(tiny)) == 1)


def shard_of_the_last() -> tuple[str, str]:
    """A loop over the parameters that makes a shard of each and returns the variable."""

    def shard(model: nn.Module):
        for param in model.parameters():
            local = param.detach().view(-1)[: param.numel() // 2].clone()
        return local

    def returned(layers: int) -> float:
        model = chain(layers)
        return shard(model).numel() / sum(param.numel() // 2 for param in model.parameters())

    one, eight = returned(1), returned(8)
    measured = f"share of the rank's elements returned: {eight:.3g} for 8 parameters, {one:g} for 1"
    return measured, holds_when("the model has one parameter", one == 1, eight == 1)


def accumulated(divide: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what a loop over 3 micro-batches accumulates, the mean of their gradients, their sum)."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    for batch in batches:
        loss = (batch @ weight).square().mean() / (3 if divide else 1)
        loss.backward()
    single = [torch.autograd.grad((batch @ weight).square().mean(), weight)[0] for batch in batches]
    return weight.grad, sum(single) / 3, sum(single)


def sums_not_averages() -> tuple[str, str]:
    (divided, mean, total), (plain, _, _) = accumulated(True), accumulated(False)
    as_mean, as_sum = torch.allclose(divided, mean), torch.allclose(divided, total)
    measured = f"the loop as written gives the mean: {as_mean}, the sum: {as_sum}; without its division the sum: "
    return measured + f"{torch.allclose(plain, total)}", holds_when(
        "the loss is not divided by K, as its code does", torch.allclose(plain, total), as_sum
    )


def effective_batch() -> tuple[str, str]:
    """2 ranks x 3 micro-batches of 4: the averaged gradient against that of the 24 samples at once."""
    data = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    gradients = []
    for rank in data:
        weight.grad = None
        for batch in rank:
            ((batch @ weight).square().mean() / 3).backward()
        gradients.append(weight.grad)
    mean = sum(gradients) / 2
    (at_once,) = torch.autograd.grad((data.view(24, 5) @ weight).square().mean(), weight)
    difference = (mean - at_once).abs().max().item()
    measured = f"4 x 3 x 2 = 24 samples; gradients differ by {difference:.1g}"
    return measured, verdict(difference < 1e-12)


def saved(*paths: str, with_save=save) -> tuple[object, bool, list[str]]:
    """Save a model and its optimizer to each path: (what the last call returned, was it written by then, folders)."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process, and a folder that is overwritten
        for path in paths:
            returned = with_save(state, storage_writer=FileSystemWriter(path))
        written = os.path.exists(os.path.join(paths[-1], ".metadata"))
        if isinstance(returned, Future):
            returned.result()
        return returned, written, sorted(os.listdir("."))


def file_name_without_f() -> tuple[str, str]:
    _, _, plain = saved(*["step_{step}" for step in (1000, 2000)])
    _, _, formatted = saved(*[f"step_{step}" for step in (1000, 2000)])
    measured = f"two saves leave {plain}; with the f-prefix {formatted}"
    return measured, holds_when("the string gets its f-prefix", len(formatted) == 2, len(plain) == 2)


def save_blocks() -> tuple[str, str]:
    returned, written, _ = saved("once")
    with one_rank():  # its collectives want a group
        later, _, _ = saved("once", with_save=async_save)
    measured = f"save() returned {type(returned).__name__}, all written by then: {written}; async_save() a "
    measured += type(later).__name__
    blocks = written and not isinstance(returned, Future)
    return measured, holds_when("async_save() is called, not save()", isinstance(later, Future), not blocks)


def modules_in_save() -> tuple[str, str]:
    error = attempt(lambda: saved("once"))
    return f"{TORCH}: save() given a module and an optimizer: {error or 'works'}", verdict(not error)


def size_of_the_checkpoint() -> tuple[str, str]:
    """Bytes of the model's and the optimizer's state, which the snippet saves both, over those of the model."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    state = sum(t.nbytes for one in optimizer.state_dict()["state"].values() for t in one.values())
    elements = weights / 4
    whole = 70e9 * (weights + state) / elements
    each = (weights + state) / elements
    measured = f"float32 weights and moments: {each:.3g} bytes per parameter, {whole / 64e9:.3g} GB a rank for 70B"
    return measured, holds_when("only bfloat16 weights are saved, not the optimizer of its snippet",
                                about(70e9 * 2 / 64, 2.2e9, 0.02), about(whole / 64, 2.2e9, 0.02))  # fmt: skip


def checkpoint_sequential_runs() -> tuple[str, str]:
    """The call as printed, on an input that needs a gradient and on one that does not."""

    def gradients(needs_gradient: bool, **options) -> int:
        layers = chain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that use_reentrant was not given
            inputs = torch.ones(2, 64, requires_grad=needs_gradient)
            checkpoint_sequential(layers, segments=8, input=inputs, **options).sum().backward()
        return sum(layer.weight.grad is not None for layer in layers)

    needs, needs_not = gradients(True), gradients(False)
    named = "use_reentrant" in inspect.signature(checkpoint_sequential).parameters
    new = gradients(False, use_reentrant=False)
    measured = (
        f"layers of 8 that get a gradient: {needs}; if the input needs none {needs_not}, with use_reentrant=False {new}"
    )
    condition = "the input needs a gradient, or with use_reentrant=False"
    return measured, holds_when(condition, needs == new == 8 and named, needs_not == 8)


_FSDP = "from torch.distributed.fsdp import"
_WRAP = ("size_based_auto_wrap_policy", "enable_wrap", "wrap")
_OPTIONS = ("BackwardPrefetch", "CPUOffload")
CLAIMS = [
    Claim(MULTIPLE_GPUS, "fully_shard is imported from torch.distributed.fsdp",
          "the import", partial(imports, "from torch.distributed.fsdp import fully_shard")),
    Claim(MULTIPLE_GPUS, "PyTorch ships two implementations, FSDP1 and FSDP2",
          "both imports", partial(imports, f"{_FSDP} FullyShardedDataParallel", f"{_FSDP} fully_shard")),
    Claim(MULTIPLE_GPUS, "fully_shard must go on every layer and then on the model",
          "a GPT wrapped in three ways, all-gathers counted", root_wrapped_too),
    Claim(WORDPRESS, "fully_shard is imported from torch.distributed.fsdp.fully_shard",
          "the import", partial(imports, "from torch.distributed.fsdp.fully_shard import fully_shard")),
    Claim(WORDPRESS, "fully_shard on the layers, FSDP around the model",
          "a chain of layers wrapped so, one forward and backward", both_wrappers),
    Claim(WORDPRESS, "shards rounded up and cut off at the end, without padding, fit a collective",
          "shard sizes on 4 ranks", shard_without_padding),
    Claim(WORDPRESS, "its function returns the rank's shards",
          "a loop that returns its last variable", shard_of_the_last),
    Claim(SCALING, "its names from torch.distributed.fsdp exist, enable_wrap among them",
          "the imports", partial(imports, *(f"from torch.distributed.fsdp.wrap import {name}" for name in _WRAP),
                  *(f"from torch.distributed.fsdp.fully_sharded_data_parallel import {name}" for name in _OPTIONS))),
    Claim(SCALING, "its imports are all that its snippet needs",
          "a policy bound by functools.partial", without_functools),
    Claim(FRAMEWORKS, "the loss scaler is torch.cuda.amp.GradScaler", "the name and its warnings", deprecated_scaler),
    Claim(FRAMEWORKS, "accumulation sums gradients and does not average",
          "its loop's property over 3 micro-batches", sums_not_averages),
    Claim(FRAMEWORKS, "effective batch = batch x K x world size",
          "gradients of 2 x 3 x 4 samples in parts and at once", effective_batch),
    Claim(FRAMEWORKS, "checkpoint_sequential(layers, segments=8, input=x) is all it takes",
          "the call on 8 layers", checkpoint_sequential_runs),
    Claim(FRAMEWORKS, "its sharded saves go to a folder per step",
          "two saves to its kind of path", file_name_without_f),
    Claim(FRAMEWORKS, "its snippet saves without blocking", "what save() returns, and when", save_blocks),
    Claim(FRAMEWORKS, "save() takes the model and the optimizer themselves", "a save of both", modules_in_save),
    Claim(FRAMEWORKS, "model and optimizer over 64 ranks: 2.2 GB each",
          "bytes of both states, AdamW", size_of_the_checkpoint),
]  # fmt: skip

"""Claims about what happens: rebuilt with the property that is claimed, or watched in the engines themselves."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from harness.measure.memory import storage_bytes
from harness.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    NAMES,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Claim,
    about,
    holds_when,
    verdict,
)
from harness.teach.articles.runs import (
    SGD,
    batch_for,
    build,
    chain,
    fake_ranks,
    gpt,
    loss_for,
    small_gpt,
    step,
)

long_chain = partial(chain, 16)

# The printed ZeRO-1 and ZeRO-3, as far as their properties go.


def unpadded_slices(numel: int, ranks: int) -> tuple[list[int], list[int]]:
    """Elements of every rank's (padded parameter shard, unpadded gradient slice): what the printed ZeRO-1 cuts."""
    size = -(-numel // ranks)
    parameter = torch.zeros(size * ranks)  # padded
    gradient = torch.zeros(numel)  # not padded
    cuts = [slice(rank * size, (rank + 1) * size) for rank in range(ranks)]
    return [parameter[cut].numel() for cut in cuts], [gradient[cut].numel() for cut in cuts]


def printed_zero1() -> tuple[str, str]:
    def trains(numel: int) -> str:
        """The last rank's update; "" if it goes through."""
        shards, slices = unpadded_slices(numel, 4)
        shard = torch.zeros(shards[-1], requires_grad=True)
        try:
            shard.grad = torch.ones(slices[-1])
            torch.optim.Adam([shard]).step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    divides, does_not = trains(12), trains(10)
    measured = f"4 ranks, 12 elements: {divides or 'trains'}; 10 elements: shards {unpadded_slices(10, 4)[0]}, "
    measured += f"gradient slices {unpadded_slices(10, 4)[1]}, last rank: {does_not or 'trains'}"
    return measured, holds_when("N divides the size of every parameter", not divides, not does_not)


class FreedByAssignment:
    """ZeRO-3 that gathers a module's parameters in hooks, and frees them by pointing `.data` at the shard."""

    def __init__(self, model: nn.Module):
        self.shards = {}
        ranks = dist.get_world_size()
        for param in model.parameters():
            self.shards[param] = torch.zeros(-(-param.numel() // ranks))
            self.shards[param].shape_of_whole = param.shape
            param.data = self.shards[param]
        self.gathered = []  # (weak reference to the storage, its bytes) of every gather
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(lambda module, *_: self.gather(module))
                module.register_forward_hook(lambda module, *_: self.free(module))
                module.register_full_backward_pre_hook(lambda module, *_: self.gather(module))
                module.register_full_backward_hook(lambda module, *_: self.free(module))

    def gather(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            shard = self.shards[param]
            flat = shard.new_zeros(shard.numel() * dist.get_world_size())
            dist.all_gather_single(flat, shard)
            shape = shard.shape_of_whole
            param.data = flat[: shape.numel()].view(shape)
            self.gathered.append((StorageWeakRef(flat.untyped_storage()), flat.nbytes))

    def free(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.data = self.shards[param]


def alive_if_assigned(model_of) -> tuple[int, int]:
    """(bytes alive after forward, bytes gathered in it) of parameters that were freed by assigning `.data`."""
    with fake_ranks(8):
        model = model_of()
        inputs, _ = batch_for(model)
        engine = FreedByAssignment(model)
        output = model(inputs)  # keeps what autograd has saved
        alive = sum(nbytes for storage, nbytes in engine.gathered if not storage.expired())
        del output
    return alive, sum(nbytes for _, nbytes in engine.gathered)


def alive_if_resized(model_of) -> tuple[int, int, int]:
    """The same of our ZeRO-3, and the bytes of its root."""
    with fake_ranks(8):
        engine = build("zero3", model_of(), SGD)
        inputs, _ = batch_for(engine.model)
        output = engine(inputs)
        alive = sum(bucket.flat.untyped_storage().nbytes() for bucket in engine.buckets)
        whole, root = (sum(4 * b.numel for b in buckets) for buckets in (engine.buckets, engine.root.buckets))
        del output, engine
    return alive, whole, root


def printed_zero3_frees() -> tuple[str, str]:
    """Gathered parameters that are alive after a forward which has freed them all; activations are not counted."""
    two_blocks = partial(gpt, "toy", width=64, vocab=1024, seq=128)
    (assigned, gathered), (in_chain, of_chain) = alive_if_assigned(two_blocks), alive_if_assigned(chain)
    (resized, whole, root), (chain_resized, _, _) = alive_if_resized(two_blocks), alive_if_resized(chain)
    measured = (
        f"alive after forward: {assigned:,} of {gathered:,} gathered bytes ({assigned / gathered:.0%}) of a GPT of 2 "
        f"blocks, {in_chain / of_chain:.0%} of 8 linear layers. By resizing storages, as zero3.py and FSDP do: "
        f"of the GPT {resized:,} of {whole:,} (its root of {root:,} stays gathered into backward), of the 8 layers "
        f"{chain_resized}"
    )
    return measured, verdict(assigned == 0 and in_chain == 0)


def printed_zero3_trains() -> tuple[str, str]:
    def error(model: nn.Module, inputs: torch.Tensor) -> str:
        with fake_ranks(2):
            FreedByAssignment(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, about the very hooks that fire too early
                try:
                    model(inputs).sum().backward()
                except RuntimeError as caught:
                    return str(caught).splitlines()[0].partition(" at ")[0]
        return ""

    linear = error(chain(2), torch.ones(2, 64, requires_grad=True))
    data = error(chain(2), torch.ones(2, 64))
    embedding = error(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), torch.zeros(2, 3, dtype=torch.int64))
    measured = (
        f"input with a gradient: {linear or 'runs'}; plain input: {data or 'runs'}; embedding: {embedding or 'runs'}"
    )
    condition = "the input of every module needs a gradient; no embedding, no layer on the data itself"
    return measured, holds_when(condition, not linear, not (data or embedding))


# What is gathered, and when.


def most_gathered(model_of, **options) -> tuple[float, float]:
    """(largest share of the parameters that ZeRO-3 has gathered at once in a step, share of the root)."""
    with fake_ranks(8):
        model = model_of()
        inputs, targets = batch_for(model)
        units = options.pop("units", lambda model: None)(model)
        engine = build("zero3", model, SGD, units=units, **options)
        whole, most = sum(param.numel() for param in model.parameters()), [0]

        class Look(TorchDispatchMode):  # at every operation
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                most[0] = max(most[0], sum(b.flat.untyped_storage().nbytes() // 4 for b in engine.buckets))
                return func(*args, **(kwargs or {}))

        with Look():
            for _ in range(2):
                loss_for(model)(engine(inputs), targets).backward()
                engine.step()
                engine.zero_grad()
        root = sum(bucket.numel for bucket in engine.root.buckets)
        engine = None
    return most[0] / whole, root / whole


def never_all(statement: str) -> tuple[str, str]:
    """`statement`: "never", that never all is gathered at once; "in forward", that all is in forward and backward."""
    units, root = most_gathered(small_gpt)
    kept, _ = most_gathered(small_gpt, reshard_after_forward=False)
    one, _ = most_gathered(small_gpt, units=lambda model: [model])
    measured = (
        f"at most {units:.0%} of an 8-block GPT gathered at once (root {root:.0%}, 2 blocks); {kept:.0%} with "
        f"reshard_after_forward=False, {one:.0%} as one unit"
    )
    if statement == "never":
        return measured, holds_when(
            "the model has several units, freed after forward", units < 0.9, one < 0.9 or kept < 0.9
        )
    return measured, holds_when(
        "units are kept after forward, or there is only one", kept > 0.9 and one > 0.9, units > 0.9
    )


def freed_right_away() -> tuple[str, str]:
    shares = {layers: most_gathered(partial(chain, layers))[0] for layers in (4, 8, 16)}
    measured = "most layers gathered at once: " + ", ".join(f"{share * n:.3g} of {n}" for n, share in shares.items())
    return measured + " (at work, and prefetched)", verdict(all(share * n <= 2.01 for n, share in shares.items()))


def gradients_freed() -> tuple[str, str]:
    """The step's peak over what is held, against the whole gradients."""
    runs = {size: step("zero2", long_chain, bucket_mb=size) for size in (0, 25)}
    over = {size: (run.peak - run.state) / run.parameter_bytes for size, run in runs.items()}
    measured = (
        f"peak over the held state: {4 * over[0]:.2g}Ψ bytes with a bucket per parameter, "
        f"{4 * over[25]:.2g}Ψ bytes with one bucket of all"
    )
    return measured, holds_when("the model has several buckets", over[0] < 0.5, over[25] < 0.5)


def large_buckets() -> tuple[str, str]:
    sizes = (0, 0.0625, 0.25, 25)
    runs = [step("zero2", long_chain, bucket_mb=size) for size in sizes]
    peaks = [run.peak / run.parameters for run in runs]
    measured = "peak of ZeRO-2 by bucket size: " + ", ".join(f"{s:g} MiB {p:.3g}Ψ" for s, p in zip(sizes, peaks))
    return f"{measured} bytes", verdict(peaks == sorted(peaks) and peaks[-1] > peaks[0] + 2)


def same_passes() -> tuple[str, str]:
    flops = {}
    for name in ("plain", "zero3", "fsdp2"):
        with fake_ranks(8):
            model = small_gpt()
            inputs, targets = batch_for(model)
            engine = build(name, model, SGD)
            with FlopCounterMode(display=False) as counter:
                loss_for(model)(engine(inputs), targets).backward()
            flops[name] = counter.get_total_flops()
            engine = None
    measured = "FLOPs of forward and backward: " + ", ".join(
        f"{NAMES[name]} {count:,}" for name, count in flops.items()
    )
    return measured, verdict(len(set(flops.values())) == 1)


def every_micro_batch() -> tuple[str, str]:
    """BatchNorm's statistics and dropout's masks over two micro-batches of the same data."""
    norm, dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
    data = torch.arange(32.0).view(8, 4)
    seen = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        masks = []
        for _ in range(2):
            norm(data)
            seen.append(norm.running_mean.clone())
            masks.append(dropout(torch.ones(64)) != 0)
    updates = norm.num_batches_tracked.item()
    differ = not torch.equal(*masks)
    measured = f"{updates} updates of the running statistics in 2 micro-batches; masks differ: {differ}"
    return measured, verdict(updates == 2 and differ and not torch.equal(*seen))


def per_parameter_dtensor() -> tuple[str, str]:
    from torch.distributed.tensor import DTensor

    with fake_ranks(8):
        model = chain(2)
        build("fsdp2", model, SGD)
        params = list(model.parameters())
        kinds = {type(param).__name__ for param in params}
        shards = [(tuple(param.shape), tuple(param.to_local().shape)) for param in params]
        right = all(isinstance(param, DTensor) for param in params)
        with torch._C.DisableTorchFunctionSubclass():
            local = storage_bytes(params)
        whole = sum(param.numel() * 4 for param in params)
    measured = f"{'/'.join(kinds)} parameters, {shards[0][0]} kept as {shards[0][1]}; {local / whole:g} of the bytes"
    return measured, verdict(right and about(local / whole, 1 / 8))


def flat_partition() -> tuple[str, str]:
    sizes = []
    for rank in range(8):
        with fake_ranks(8, rank):
            engine = build("zero3", gpt("toy"), SGD)
            sizes.append(sum(bucket.shard.numel() for bucket in engine.buckets))
            real = sum(param.numel() for param in engine.model.parameters())
            engine = None
    measured = f"shards of the 8 ranks: {sorted(set(sizes))} elements each, {sum(sizes) - real} of {real:,} padding"
    return measured, verdict(len(set(sizes)) == 1 and about(sum(sizes), real))


CLAIMS = [
    Claim(MULTIPLE_GPUS, "the printed ZeRO-1 trains",
          "its padded shards and unpadded gradient slices on 4 ranks", printed_zero1),
    Claim(MULTIPLE_GPUS, "the printed ZeRO-3 frees what it has gathered",
          "freeing by assigning .data, gathered bytes alive after forward", printed_zero3_frees),
    Claim(MULTIPLE_GPUS, "the printed ZeRO-3 gets through forward and backward",
          "freeing in backward hooks, three models", printed_zero3_trains),
    Claim(MULTIPLE_GPUS, "ZeRO-3 frees a layer's parameters right after use",
          "gathered bytes through a step of ZeRO-3", freed_right_away),
    Claim(MULTIPLE_GPUS, "ZeRO-2 frees gradients as backward goes", "peak of ZeRO-2 over 16 layers", gradients_freed),
    Claim(MULTIPLE_GPUS, "under ZeRO every rank runs the same forward and backward",
          "FLOPs of a rank counted", same_passes),
    Claim(SHARDING_STATE, "FSDP2 shards each parameter by itself, as a DTensor",
          "fully_shard on 8 ranks", per_parameter_dtensor),
    Claim(SHARDING_STATE, "full parameters exist only around the computation that needs them",
          "gathered bytes through a step of ZeRO-3", freed_right_away),
    Claim(SHARDING_STATE, "too-large buckets spike memory", "ZeRO-2, peak by bucket size", large_buckets),
    Claim(FRAMEWORKS, "BatchNorm's statistics and dropout's masks change per micro-batch",
          "both over two micro-batches", every_micro_batch),
    Claim(SCALING, "the parameters are cut into N chunks (N is blank in our copy), equal ones",
          "ZeRO-3's shards on each of 8 ranks", flat_partition),
    Claim(SCALING, "no GPU ever holds the entire model, but for the transient window",
          "gathered bytes through a step of ZeRO-3", partial(never_all, "never")),
    Claim(WORDPRESS, "under ZeRO-3 the model exists in full during forward and backward",
          "gathered bytes through a step of ZeRO-3", partial(never_all, "in forward")),
]  # fmt: skip

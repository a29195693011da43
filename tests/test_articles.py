"""Every claim of harness/teach/articles, with the verdict that it must get and the numbers that lead to it."""

import json
from pathlib import Path

import pytest

from harness.teach import articles
from harness.teach.articles import FRAMEWORKS, MULTIPLE_GPUS, SCALING, SHARDING_STATE, WORDPRESS, Claim
from harness.teach.articles.__main__ import COLUMNS, counts, main, markdown, row, text

# article -> claim -> (verdict, what the measured text must have in it ...)
EXPECTED = {
    MULTIPLE_GPUS: {
        "7B in fp32 under DDP: 28 + 28 + 56 = 112 GB": ("holds", "111.8 GB = 27.9 + 27.9 + 55.9"),
        "under ZeRO-1: 28 + 28 + 7 = 63 GB": ("holds", "62.88 GB = 27.9 + 27.9 + 6.99"),
        "under ZeRO-2: 28 + 3.5 + 7 = 38.5 GB": ("holds", "38.43 GB = 27.9 + 3.49 + 6.99"),
        "under ZeRO-3: 3.5 + 3.5 + 7 = 14 GB": ("holds", "13.97 GB = 3.49 + 3.49 + 6.99"),
        "ZeRO-3 on 8 GPUs: 8 times less memory": ("holds", "111.8 GB / 13.97 GB = 8"),
        "ZeRO leaves activations as they are": ("holds", "unsharded 2,2", "ZeRO-3 2,2"),
        "activations grow with batch, sequence and width": (
            "holds when attention does not keep its seq x seq scores",
            "doubled batch x2",
            "sequence x2",
            "width x1.99",
        ),
        "ZeRO-1's all-reduce sends more than its ranks can use": (
            "holds",
            "all-reduce 2Ψ",
            "the reduce-scatter that suffices 1Ψ",
        ),
        "ZeRO-2 saves bandwidth as well as memory": (
            "holds when compared with a ZeRO-1 that all-reduces, not with DDP",
            "ZeRO-1 with an all-reduce 3Ψ",
            "ZeRO-2 2Ψ",
            "DDP 2Ψ",
        ),
        "ZeRO-2 costs what ZeRO-1 does, so nobody would use ZeRO-1": (
            "holds when at most 2 micro-batches are accumulated, or under no_sync() with whole gradients",
            "K=1: 3 and 2, K=2: 3 and 3, K=3: 3 and 4, K=4: 3 and 5",
            "with no_sync() 2",
        ),
        "ZeRO pays for memory with communication": (
            "holds when the parameters are sharded too (ZeRO-3)",
            "ZeRO-2 1x traffic for 0.344x state",
            "ZeRO-3 1.5x traffic for 0.125x state of DDP's",
        ),
        "ZeRO-3 needs no all-gather at the end of the step": (
            "holds",
            "collectives after the update: ZeRO-1 1",
            "ZeRO-2 1",
            "ZeRO-3 0",
        ),
        "the gather of layer N+1 can hide behind the forward of layer N": (
            "holds when a unit or more is prefetched; without, each gather waits for the computation in front of it",
            "with prefetch GGCGCGCC|GGCCRGCCRGCCRCR",
            "without GCGCGCGC|GCCRGCCRGCCRGCR",
        ),
        "the printed ZeRO-1 trains": (
            "holds when N divides the size of every parameter",
            "4 ranks, 12 elements: trains",
            "10 elements: shards [3, 3, 3, 3]",
            "gradient slices [3, 3, 3, 1]",
        ),
        "the printed ZeRO-3 frees what it has gathered": (
            "does not hold",
            "655,360 of 957,440 gathered bytes (68%) of a GPT of 2 blocks",
            "88% of 8 linear layers",
            "of the GPT 295,424 of 695,296 (its root of 295,424 stays gathered into backward), of the 8 layers 0",
        ),
        "the printed ZeRO-3 gets through forward and backward": (
            "holds when the input of every module needs a gradient; no embedding, no layer on the data itself",
            "input with a gradient: runs",
            "plain input: The size",
            "embedding: The size",
        ),
        "ZeRO-3 frees a layer's parameters right after use": (
            "holds",
            "most layers gathered at once: 2 of 4, 2 of 8, 2 of",
        ),
        "ZeRO-2 frees gradients as backward goes": (
            "holds when the model has several buckets",
            "0.5Ψ bytes with a bucket per parameter",
            "7.5Ψ bytes with one bucket",
        ),
        "under ZeRO every rank runs the same forward and backward": (
            "holds",
            "FLOPs of forward and backward: unsharded",
            "ZeRO-3 1",
            "FSDP2 1",
        ),
        "fully_shard is imported from torch.distributed.fsdp": ("holds", "1 of 1 work"),
        "PyTorch ships two implementations, FSDP1 and FSDP2": ("holds", "2 of 2 work"),
        "fully_shard must go on every layer and then on the model": (
            "holds when the model must never be gathered as one, and parameters outside the layers must be sharded too",
            "largest all-gather 37%",
            "only the model wrapped 100%",
            "27% of the parameters stay unsharded",
        ),
    },
    SHARDING_STATE: {
        "CPU offload saves GPU memory but kills throughput": (
            "holds when a step has few tokens per GPU",
            "30.27 MB without, 23.01 MB with",
            "copies at 64 GB/s 0.16 s",
        ),
        "BF16 with Adam: about 16 bytes per parameter": (
            "holds",
            "2 weights + 2 gradients + 4 float32 weights + 8",
            "111.8 GB for the 7b preset",
        ),
        "sharding divides the sharded state by N (the divisor is blank in our copy)": (
            "holds",
            "state without sharding over ZeRO-3's: N=2 2",
            "N=4 3.999",
            "N=8 7.997",
        ),
        "real memory is above the ideal": ("holds", "peak 32", "for 13.97 GB of state", "gathered units 2.169 GB"),
        "a layer too large for a GPU needs model parallelism as well": ("holds", "in layers: N=8 3.94", "N=32 4.13"),
        "sharding does not solve activation memory": ("holds", "unsharded 2,2", "ZeRO-3 2,2"),
        "sharding trades memory for communication": (
            "holds when the parameters are sharded too (ZeRO-3)",
            "ZeRO-2 1x traffic for 0.344x state",
            "ZeRO-3 1.5x traffic for 0.125x state of DDP's",
        ),
        "ZeRO-1 and -2 communicate less than full sharding": (
            "holds when gradients are reduce-scattered",
            "ZeRO-1 with an all-reduce 3Ψ",
            "ZeRO-2 2Ψ",
            "ZeRO-3 3Ψ",
        ),
        "an all-reduce may be needed, depending on the strategy": (
            "holds",
            "all-reduces per step of 8 units: 2 copies x 4",
        ),
        "too-small buckets increase overhead": (
            "holds",
            "0 MiB: 56, 0.02 MiB: 14, 0.1 MiB: 4, 25 MiB: 2",
            "bytes the same: True",
        ),
        "bad wrapping causes excessive all-gathers": (
            "holds",
            "27 with a unit per layer",
            "5 per block",
            "2 with the model as one",
        ),
        "FSDP: gather, compute, free; in backward gather, compute, reduce-scatter": (
            "holds",
            "R reduce: ZeRO-3 GC|GCR",
            "FSDP2 GC|GCR",
        ),
        "the next layer's gather goes on beside the computation": (
            "holds when a unit or more is prefetched; without, each gather waits for the computation in front of it",
            "with prefetch GGCGCGCC|GGCCRGCCRGCCRCR",
            "without GCGCGCGC|GCCRGCCRGCCRGCR",
        ),
        "FSDP2 shards each parameter by itself, as a DTensor": (
            "holds",
            "DTensor parameters, (64, 64) kept as (8, 64)",
            "0.125 of the bytes",
        ),
        "full parameters exist only around the computation that needs them": (
            "holds",
            "most layers gathered at once: 2 of 4, 2 of 8, 2 of",
        ),
        "too-large buckets spike memory": ("holds", "0 MiB 6", "25 MiB 13Ψ bytes"),
        "the state of 70B (its size is blank in our copy) cannot be replicated on a GPU": (
            "holds",
            "69,806,587,904 = 1.12 TB",
        ),
    },
    FRAMEWORKS: {
        "CPU offload: limited in FSDP, excellent in DeepSpeed": (
            "holds when one wants to choose what goes, or a disk",
            "the choice(s) pin_memory",
            "0 MB stay on the device, 9.675 MB go",
        ),
        "mixed precision takes 14 bytes per parameter, 98 GB for 7B (its table)": (
            "holds when no float32 master weights are kept",
            "2 weights + 4 gradients + 4 float32 weights + 8",
            "without the float32 weights 14",
        ),
        "mixed precision takes 16 bytes per parameter, 112 GB for 7B (its text)": (
            "holds when gradients are bfloat16, or bfloat16 weights exist only in forward and backward",
            "bfloat16 weights made for each forward 16 bytes",
            "with gradients in bfloat16 16",
            "in float32 (its table) 18",
        ),
        "Adam's states cost 12 bytes per parameter and not 4": (
            "holds when float32 master weights are counted with Adam's two moments",
            "the moments 8.001 bytes",
            "with float32 master weights 12",
        ),
        "7B under DDP, ~112 GB, does not fit an H100": ("holds", "16 bytes per parameter: 111.8 GB", "H100 80 GB"),
        "7B under ZeRO-3 takes 16.25 GB": (
            "does not hold",
            "state 13.97 GB = 3.49 + 3.49 + 6.99",
            "peak 17",
            "1.747 GB too little",
        ),
        "7B under ZeRO-3 fits a 40 GB A100": (
            "holds when activations are recomputed",
            "peak 17",
            "47.",
        ),
        "bytes per parameter: 2 + 4 + 8/N, 2 + 12/N, 14/N under the stages (its figure 2)": (
            "holds when no float32 master weights are kept",
            "ZeRO-1 7.5 and not 7, ZeRO-2 4 and not 3.5, ZeRO-3 2 and not 1.75",
        ),
        "pipeline stages of 70B pass ~20 MB on per micro-batch": (
            "holds when a micro-batch has about 1,200 tokens",
            "33.6 MB; 20 MB are 1,221 tokens",
        ),
        "DDP keeps 4 redundant copies of the optimizer state": (
            "holds when N = 5",
            "1 of 2 ranks, 4 of 5 ranks, 7 of 8 ranks are",
        ),
        "the stages reduce memory linearly with the number of GPUs": (
            "holds when the stage is ZeRO-3",
            "state at N = 8 over N = 32: ZeRO-1 1.09",
            "ZeRO-2 1.26",
            "ZeRO-3 3.99",
        ),
        "FSDP and ZeRO-3 train models 8 to 16 times larger": (
            "holds when N is 8 to 16",
            "N=4 x4",
            "N=8 x8",
            "N=16 x16 (state",
        ),
        "activations of 7B, 4 x 2048 tokens: ~20-40 GB, checkpointed or not": (
            "holds when activations are not recomputed",
            "37.",
            "4.0",
        ),
        "activations of 7B, 4 x 2048 tokens: ~4 GB": (
            "holds when every block is recomputed",
            "4.0",
            "37.",
        ),
        "activations of 70B, 4 x 2048 tokens: ~30-50 GB": ("does not hold", "186", "15.0"),
        "activations of 70B often exceed its weights": (
            "holds when activations are not recomputed",
            "139.6 GB of weights",
            "the article's own 30-50 GB would be less",
        ),
        "activations are ~2 bytes per parameter (its figure 2)": (
            "holds when a rank has about 3,000 tokens at work",
            "2 for 3,072 tokens, 5.33 for 8,192",
        ),
        "activation checkpointing costs a third more compute": (
            "holds when every block runs again to its end; torch's checkpoint stops earlier and costs less",
            "30.",
            "% as torch does it",
        ),
        "activation checkpointing needs about 8 times less": (
            "holds when the model is deep and every layer a segment",
            "34 layers of 4096, each recomputed: 9.",
            "4 layers of 4096, each recomputed: 2.",
            "34 layers: 4.",
        ),
        "FSDP checkpoints activations by use_orig_params": (
            "does not hold",
            "with checkpoint() per block",
        ),
        "an all-reduce sends 2 (N-1)/N of the buffer": (
            "holds",
            "1.75 of the buffer per rank",
            "2 x 7/8 = 1.75",
            "sums right: True",
        ),
        "ZeRO-3's volume is about 1.5 times DDP's": (
            "holds when every parameter is freed after forward; what stays gathered is gathered once and not twice",
            "every parameter in a unit x1.5",
            "FSDP2 x1.5",
            "a GPT, whose root stays gathered into backward",
        ),
        "ZeRO-3 gathers a layer three times and reduces it once in forward, and again in backward": (
            "does not hold",
            "forward 1 all-gather, 0 reduce-scatter",
            "backward 1 and 1",
            "FSDP2 the same",
        ),
        "tensor parallelism all-reduces after every layer": (
            "holds when a layer is a column-parallel matrix and the row-parallel one behind it",
            "all-reduces in forward: column-parallel layer 0",
            "column- and row-parallel pair 1",
        ),
        "accumulating K micro-batches means K times fewer all-reduces": (
            "holds when all but the last micro-batch run under no_sync()",
            "4 all-reduces as written, 1 with no_sync(), 1 without",
        ),
        "DDP overlaps the all-reduce with backward by itself": (
            "holds when the gradients fill more than one bucket (25 MiB each)",
            "3 of 4 all-reduces issued before the last",
            "with a single bucket 0 of 1",
        ),
        "the gradient sync overlaps with the optimizer's step": ("does not hold", "ZeRO-2 0, ZeRO-3 0, FSDP2 0"),
        "BatchNorm's statistics and dropout's masks change per micro-batch": (
            "holds",
            "2 updates of the running statistics in 2",
            "masks differ: True",
        ),
        "params x 2 + params x 12 make 16 bytes per parameter": (
            "does not hold",
            "2 + 12 = 14 bytes",
            "not 16: the float32 master weights are missing",
        ),
        "its mixed-precision table gives the 112 GB that the text names": (
            "does not hold",
            "the rows add up to 14 bytes = 97.81 GB",
            "16 bytes are 111.8 GB",
        ),
        "DDP in its figure 2: 16 bytes per parameter": (
            "holds when its 2 bytes of activations are counted in",
            "without activations 14",
            "with its '~2 bytes' of them 16",
        ),
        "70B in bfloat16 is 140 GB and no H100 holds it": ("holds", "weights in bfloat16 139.6 GB", "H100 80 GB"),
        "7B needs at least two H100": (
            "holds",
            "state on one 111.8 GB, an H100 has 80 GB; on each of two DDP 111.8 GB",
            "ZeRO-1 83.84 GB",
            "ZeRO-2 69.86 GB",
        ),
        "7B is always more than one GPU can hold": (
            "holds when the GPU has less than 112 GB",
            "111.8 GB of state",
            "H100 80 GB",
            "H200 141 GB",
        ),
        "70B on 8 GPUs of 40 GB needs offloading": ("holds", "state cut into 8: 139.6 GB per GPU of 40 GB"),
        "an all-reduce of 14 GB over 8 ranks at 25 GB/s takes 9.8 s": (
            "does not hold",
            "0.98 s",
            "1.96 s with the float32 gradients of its own",
        ),
        "InfiniBand's 200 Gbps (25 GB/s) in one place are its ~200 GB/s in another": (
            "holds when 200 GB/s is a node with 8 links",
            "200 Gbit/s are 25 GB/s",
            "8 such links 200 GB/s",
        ),
        "17.5 GB over 200 Gbps take 700 ms": ("holds", "17.5 GB at 25 GB/s: 700 ms"),
        "syncing 140 GB of gradients over 8 replicas sends 140 GB / 8": (
            "does not hold",
            "reduce-scatter of 140 GB over 8: 122.5 GB per",
            "cut by 4-way TP x 8-way PP first: 3.828 GB",
        ),
        "a tensor-parallel all-reduce takes ~200 ns on NVLink": (
            "does not hold",
            "its formula for its 20 MB, 4 GPUs, 600 GB/s: 50",
        ),
        "1,000 GPUs failing at 0.01% a day: a failure every 10 hours": (
            "does not hold",
            "one every 240 hours = 10 days",
            "every 10 hours would take 0.24% a day",
        ),
        "one rank at 140 ms instead of 100 makes every step 140 ms": (
            "holds",
            "steps of 140 ms",
            "the ranks wait [40, 40, 0, 40] ms",
        ),
        "one rank at 140 ms instead of 100 loses 40% of the throughput": (
            "does not hold",
            "40% more time, 28.6% less throughput",
        ),
        "4 stages, 8 micro-batches: 37.5% of the compute wasted": (
            "does not hold",
            "12 of 44 slots idle: 27.3% of the compute",
            "idle to busy 37.5%",
        ),
        "8 stages, 16 micro-batches: a bubble of 44%": (
            "holds when idle time is set against busy time, not all time",
            "56 of 184 slots idle: 30.4% of the compute",
            "idle to busy 43.8%",
        ),
        "interleaving halves the pipeline's bubble": (
            "holds",
            "4 stages, 8 micro-batches: idle for 3 of 11",
            "interleaved in two 1.5 of 9.5",
            "2.33 times the transfers between stages",
        ),
        "the price of interleaving is twice the communication, in all-reduces": (
            "does not hold",
            "messages from stage to stage 24 and 56: times 2.33",
        ),
        "two weeks of hourly saves of 10-20 minutes waste about 5 hours": (
            "does not hold",
            "336 saves: 56 to 112 hours idle",
        ),
        "a save every 1,000 steps is one every ~4 hours": (
            "holds when a step takes about 14 s",
            "1,000 steps take 4 hours at 14.4 s a step",
            "at 0.8 s (its 100 ms + 700 ms) 13 minutes",
        ),
        "140 GB over 64 ranks are writes of 2.2 GB": ("holds", "2 bytes x 69,806,587,904 parameters / 64 ="),
        "140 GB over 256 GPUs are 0.55 GB each": ("holds", "2 bytes x 69,806,587,904 parameters / 256 ="),
        "8 DP x 4 PP x 8 TP = 256 GPUs = 32 nodes of 8": ("holds", "8 x 4 x 8 = 256"),
        "4-way TP x 8-way PP x 8-way DP = 256 GPUs": ("holds", "4 x 8 x 8 = 256"),
        "its figure 3 shows 8-way tensor parallelism": (
            "does not hold",
            "4 GPUs drawn per stage",
            "256 / (8 replicas x 4 stages) = 8",
        ),
        "bfloat16 has the range of float32": (
            "holds",
            "bfloat16 1.18e-38 to 3.39e+38",
            "float32 1.18e-38 to 3.403e+38",
            "float16 6.1e-05 to 6.55e+04",
        ),
        "bfloat16 never overflows": (
            "holds when the same run stays below 3.39e38, about where float32 ends too",
            "65,520 and 1e30 stay finite: True",
            "float32's largest number and 1e30 x 1e10 become",
        ),
        "float16 overflows easily": ("holds", "65,504 becomes 65504, 70,000 becomes inf"),
        "a loss scaler is for float16's overflow": (
            "does not hold",
            "1e-8: 0 in float16, 1e-08 through a scaled loss",
            "70,000: inf",
        ),
        "the loss scaler is torch.cuda.amp.GradScaler": (
            "holds when a deprecated name will do",
            "deprecated True",
            "torch.amp.GradScaler there True",
        ),
        "accumulation sums gradients and does not average": (
            "holds when the loss is not divided by K, as its code does",
            "the loop as written gives the mean: True",
            "the sum: False",
            "without its division the sum: True",
        ),
        "effective batch = batch x K x world size": ("holds", "4 x 3 x 2 = 24 samples"),
        "checkpoint_sequential(layers, segments=8, input=x) is all it takes": (
            "holds when the input needs a gradient, or with use_reentrant=False",
            "layers of 8 that get a gradient: 8",
            "if the input needs none 1",
            "with use_reentrant=False 8",
        ),
        "its sharded saves go to a folder per step": (
            "holds when the string gets its f-prefix",
            "with the f-prefix ['step_1000', 'step_2000']",
        ),
        "its snippet saves without blocking": (
            "holds when async_save() is called, not save()",
            "save() returned Metadata, all written by then: True",
            "async_save() a Future",
        ),
        "save() takes the model and the optimizer themselves": ("holds", "works"),
        "model and optimizer over 64 ranks: 2.2 GB each": (
            "holds when only bfloat16 weights are saved, not the optimizer of its snippet",
            "float32 weights and moments: 12 bytes per",
        ),
    },
    SCALING: {
        "FP16 with Adam: 2 + 2 + 12 bytes (blank in our copy), 112 GB for 7B": (
            "holds",
            "2 weights + 2 gradients + 4 float32 weights + 8",
            "111.8 GB for the 7b preset",
        ),
        "the optimizer state is the largest part": ("holds", "12 of 16 bytes per parameter"),
        "each of 8 GPUs stores 1/8 of the optimizer state (the share is blank in our copy)": (
            "holds",
            "0.1250 of DDP's, on each of 8 ranks",
        ),
        "no redundant optimizer state under ZeRO": (
            "holds",
            "ZeRO-1: 8 ranks hold 1.0001 copies",
            "ZeRO-3: 8 ranks hold 1.0003 copies",
        ),
        "largest model: by one GPU under DDP, more under ZeRO-1 and -2, by the cluster under ZeRO-3": (
            "holds",
            "bytes per parameter at N = 512: DDP 16",
            "ZeRO-1 8.02",
            "ZeRO-2 4.02",
        ),
        "ZeRO-1 saves memory at no more communication": (
            "holds when gradients are reduce-scattered (the ZeRO paper), not all-reduced (another article's ZeRO-1)",
            "DDP 2Ψ",
            "all-reduce + all-gather 3Ψ",
            "reduce-scatter + all-gather 2Ψ",
        ),
        "communication: DDP low, ZeRO-1 and -2 medium, ZeRO-3 high": (
            "does not hold",
            "DDP 2Ψ",
            "ZeRO-1 3Ψ (2Ψ if it reduce-scatters)",
            "ZeRO-2 2Ψ",
        ),
        "an all-gather is every rank broadcasting its shard": (
            "holds",
            "8 broadcasts 448 bytes, 1 all-gather 448",
            "a step has 0 broadcasts",
        ),
        "each rank receives only the gradients of what it owns": (
            "holds",
            "on gradients 1 reduce-scatter, 0 all-reduce",
            "a rank keeps 0.125 of them",
        ),
        "FSDP is ZeRO-3": (
            "holds",
            "sent and held: ZeRO-3 2.732Ψ and 69,404 bytes",
            "FSDP1 2.732Ψ and 69,404 bytes",
            "FSDP2 2.732Ψ and 69,488 bytes",
        ),
        "BackwardPrefetch overlaps the next gather with the present gradients": (
            "holds when it is BACKWARD_PRE, the default",
            "BACKWARD_PRE: GGCCRGCCRGCCRCR",
            "None: GCCRGCCRGCCRGCR",
        ),
        "the parameters are cut into N chunks (N is blank in our copy), equal ones": (
            "holds",
            "[4336] elements each, 0 of 34,688 padding",
        ),
        "no GPU ever holds the entire model, but for the transient window": (
            "holds when the model has several units, freed after forward",
            "at most 28%",
            "100% with reshard_after_forward=False",
            "100% as one unit",
        ),
        "its names from torch.distributed.fsdp exist, enable_wrap among them": ("holds", "5 of 5 work"),
        "its imports are all that its snippet needs": (
            "holds when functools is imported as well",
            "NameError: name 'functools'",
            "with it works",
        ),
    },
    WORDPRESS: {
        "FSDP2's CPU offloading can move optimizer states to RAM": (
            "holds",
            "optimizer state 0 MB on the device",
            "4.838 MB in RAM",
        ),
        "7B with Adam in FP32: about 112 GB on every GPU": ("holds", "111.8 GB = 27.9 + 27.9 + 55.9"),
        "an 80 GB GPU is out of memory before the first micro-batch": (
            "holds when the first step is counted, in which AdamW makes its state",
            "before the first batch 8Ψ bytes (weights, DDP's buckets) = 56 GB at 7B",
            "after the first step 16Ψ (AdamW's state is there) = 112 GB",
        ),
        "under DDP no number of GPUs lowers the memory of each": ("holds", "on each of 2", "on each of 64"),
        "ZeRO-1 still replicates parameters and gradients": (
            "holds",
            "parameters 4Ψ, gradients 4Ψ, optimizer 1Ψ bytes",
        ),
        "FSDP runs a 7B model on 14 GB": (
            "holds when N = 8 and only what is held between steps counts",
            "state 13.97 GB",
            "peak of a step 32",
            "recomputed 17",
        ),
        "ZeRO-3 sends 50% more than DDP": (
            "holds when every parameter is freed after forward; what stays gathered is gathered once and not twice",
            "every parameter in a unit x1.5",
            "FSDP2 x1.5",
            "a GPT, whose root stays gathered into backward",
        ),
        "under ZeRO-3 the model exists in full during forward and backward": (
            "holds when units are kept after forward, or there is only one",
            "at most 28%",
            "100% with reshard_after_forward=False",
            "100% as one unit",
        ),
        "fully_shard is imported from torch.distributed.fsdp.fully_shard": ("does not hold", "ModuleNotFoundError"),
        "fully_shard on the layers, FSDP around the model": (
            "does not hold",
            "1 rank(s): ",
            "8 rank(s): ",
            "each alone runs",
        ),
        "shards rounded up and cut off at the end, without padding, fit a collective": (
            "holds when N divides every size",
            "16 elements [4, 4, 4, 4], 10 [3, 3, 3, 1], 5 [2, 2, 1, 0]",
        ),
        "its function returns the rank's shards": (
            "holds when the model has one parameter",
            "0.125 for 8 parameters, 1 for 1",
        ),
    },
}


@pytest.mark.parametrize("claim", articles.CLAIMS, ids=lambda claim: claim.claim)
def test_the_verdict_of_a_claim(claim):
    expected, *pieces = EXPECTED[claim.article][claim.claim]
    measured, verdict = claim.check()
    assert verdict == expected, measured
    for piece in pieces:
        assert piece in measured


def test_every_claim_is_there_once_and_has_its_expected_verdict():
    claims = [(claim.article, claim.claim) for claim in articles.CLAIMS]
    assert len(claims) == len(set(claims))
    assert set(claims) == {(article, claim) for article, mine in EXPECTED.items() for claim in mine}
    assert {article for article, _ in claims} == set(articles.ARTICLES)


def test_a_verdict_is_one_of_three():
    for mine in EXPECTED.values():
        for verdict, *_ in mine.values():
            assert verdict in ("holds", "does not hold") or verdict.startswith("holds when ")


@pytest.mark.parametrize(
    "met, not_met, expected",
    ((True, False, "holds when N > 1"), (True, True, "holds"), (False, False, "does not hold")),
)
def test_a_condition_is_named_only_if_it_decides(met, not_met, expected):
    assert articles.claim.holds_when("N > 1", met, not_met) == expected


def test_the_command_writes_its_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["--only", "9.8 s", "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())
    assert tuple(found) == COLUMNS and found["article"] == FRAMEWORKS and found["verdict"] == "does not hold"
    printed = capsys.readouterr()
    assert "0.98 s" in printed.out and "1 claim: 1 does not hold" in printed.out
    assert printed.err.startswith("[1/1] an all-reduce of 14 GB")  # progress, apart from the table


@pytest.mark.parametrize(
    "argv, words",
    (
        (["--only", "no such claim"], "matches none of the"),
        (["--json", "/nowhere/rows.json"], "cannot write --json '/nowhere/rows.json'"),
        (["--json", "/"], "cannot write --json '/'"),
        (["--json", ""], "cannot write --json ''"),
    ),
)
def test_bad_options_are_refused_in_one_line(argv, words, capsys):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert (
        not printed.out and printed.err.startswith("error: ") and printed.err.count("\n") == 1 and words in printed.err
    )


def test_a_claim_that_raises_is_a_row_and_the_rest_still_run(monkeypatch, capsys):
    def fail():
        raise RuntimeError("no\nsuch thing")

    broken = Claim(WORDPRESS, "broken 9.8 s", "nothing", fail)
    claims = [broken, *(claim for claim in articles.CLAIMS if "9.8 s" in claim.claim)]
    monkeypatch.setattr("harness.teach.articles.__main__.CLAIMS", claims)
    assert main(["--only", "9.8 s"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such thing" in printed and "1 error" in printed and "0.98 s" in printed


def test_the_table_for_github():
    claims = [Claim(SCALING, "a|b", "c", lambda: ("d", "holds")), Claim(WORDPRESS, "e", "f", lambda: ("g", "holds"))]
    rows = [row(claim) for claim in claims]
    lines = markdown(rows).splitlines()
    assert lines[:2] == ["<details>", f"<summary><b>{SCALING}</b>: 1 claim: 1 holds</summary>"]
    assert "| a\\|b | c | d | **holds** |" in lines and "| e | f | g | **holds** |" in lines
    assert all(len(line) <= 110 for line in text(rows).splitlines())


def test_counts_are_sentences():
    rows = [{"verdict": verdict} for verdict in ["holds"] * 2 + ["holds when N = 2"] * 3 + ["does not hold"]]
    assert counts(rows) == "6 claims: 2 hold, 3 hold under a condition, 1 does not hold"
    assert counts(rows[2:3]) == "1 claim: 1 holds under a condition"


def test_the_docs_show_the_committed_run_of_these_claims():
    root = Path(__file__).parent.parent
    rows = json.loads((root / "results" / "articles.json").read_text())
    assert [(one["article"], one["claim"], one["ran"]) for one in rows] == [
        (claim.article, claim.claim, claim.ran) for claim in articles.CLAIMS
    ]
    assert all(one["verdict"] == EXPECTED[one["article"]][one["claim"]][0] for one in rows)
    shown = (root / "docs" / "articles.md").read_text()
    for article in articles.ARTICLES:
        assert markdown([one for one in rows if one["article"] == article]).strip() in shown, "./launch.sh docs"

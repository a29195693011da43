"""The verdicts on claims about time, checkpoints and stragglers, for tests/test_articles.py: as its EXPECTED.

Of what is predicted only the digits that do not depend on torch's version are here.
"""

from harness.teach.articles import FRAMEWORKS, MULTIPLE_GPUS, SCALING, SHARDING_STATE, WORDPRESS

FEW_TOKENS = "holds when a GPU has few tokens per gather"

EXPECTED = {
    MULTIPLE_GPUS: {
        "ZeRO is not worth it for small models such as BERT": (
            "holds when the GPU has more than DDP needs, here 18 GB",
            "DDP 6",
            "and 18.",
            "ZeRO-3 5",
            "and 12.",
        ),
        "FSDP1 is less optimized than FSDP2": (
            "holds when a unit has frozen parameters: FSDP1 reduces gradients for its whole flat parameter",
            "MB, sent 2.96Ψ and 2.96Ψ",
            "sent 2.91Ψ and 2.27Ψ",
        ),
    },
    SHARDING_STATE: {
        "bad setups serialize communication and compute": ("holds", "a step of 27", "without prefetch 42", "waits 4"),
        "network topology limits scaling": (FEW_TOKENS, "a step takes 3.", "1.1"),
        "under sharding activations still run out of memory": (
            "holds when activations are not recomputed",
            "need 9",
            "of which 13.97 GB state",
            "recomputed 6",
        ),
        "checkpointing becomes fragile": (
            "holds when nothing checks what was written",
            "torch's save and load: loads, with a sum per file: Damaged",
        ),
    },
    FRAMEWORKS: {
        "on NVLink overlap hides ZeRO-3's communication": (
            "holds when units are prefetched",
            "8 GPUs: 2% of the step",
            "without prefetch 4",
        ),
        "on InfiniBand at scale ZeRO-3's communication matters": (
            "holds when there are hundreds of GPUs, or few tokens on each",
            "64 GPUs 1%, 512 7",
        ),
        "tensor parallelism over InfiniBand is usually not worth it": (
            "holds",
            "0.13 to 0.82 times the computation in a node, 4.3 to 17.6 times between eight nodes",
        ),
        "a layer of 70B computes for 100 ms": (
            "holds when one GPU computes the layer, for about 8,000 tokens",
            "for 8,192 tokens",
            "4 GPUs of tensor parallelism",
        ),
        "70B and more train at production throughput with 3D parallelism only": (
            "holds when there are hundreds of GPUs",
            "1,039 tokens/s/GPU, MFU 43%",
            "MFU 7%",
        ),
        "MFU that falls from 16 to 128 GPUs is communication, not compute": (
            "holds when no pipeline stages were added, and all ranks have the same to do",
            "on 16 GPUs",
            "busy 94%, 52%",
        ),
        "a gradient sync above 15% of the step needs a better interconnect": (
            "holds when more than 15% is exposed; what backward hides costs nothing",
            "nodes of 8: all-reduces last",
            "all linked: all-reduces last 3",
        ),
        "NVLink 4.0 of an H100 has 600 GB/s in both directions": (
            "holds when the GPU is an A100",
            "(NVLink 4) 900 GB/s",
        ),
        "DDP breaks when the model exceeds the GPU's memory": (
            "holds when the model counts with its gradients, optimizer state and activations",
            "weights 13.97 GB in bfloat16, state 111.8 GB",
        ),
        "DDP for what fits on one GPU": ("holds", "+0.7% on 8 GPUs", "-1.6% on 32", "+11.1% on 128", "+16.0% on 128"),
        "FSDP or ZeRO-3 for anything larger than one GPU": (
            "holds when ZeRO-1 and -2 do not fit either",
            "does not fit for 3.57B",
            "16,341 tokens/s/GPU on 8",
            "fails for 8B",
        ),
        "activation checkpointing allows larger batches": ("holds", "8 sequences need 9", "32 need 6"),
        "a third more compute is worth the larger batch": (
            "holds when communication is exposed, and the larger batch hides it",
            "NVLink 9,",
        ),
        "accumulation is for batches that do not fit": (
            "holds when it is the activations that do not fit",
            "as 2 x 4",
            "DDP's state alone is 111.8 GB",
        ),
        "forward in bfloat16 is for speed": ("holds when the GPU has units for it", "units for bfloat16: False"),
        "GPipe's micro-batches reduce the bubble": ("holds", "idle 75.0% with the batch as one, 27.3% in 8 parts"),
        "PipeDream's schedule reduces the bubble further": (
            "holds when the pipeline is never emptied, so that weights are old; emptied, it saves activations and no "
            "time",
            "GPipe 27.3%, 1F1B 27.3%",
            "3.6% if never",
            "first stage: 8, 4, 4",
        ),
        "more micro-batches shrink the bubble": ("holds", "42.9%, 27.3%, 15.8%, 4.5% and 42.9%"),
        "step times logged per rank show the straggler, 20% or more higher": (
            "holds when a rank's own work is timed, without its waiting for the others",
            "7 engines on 2 ranks",
            "1.00 times",
            "at least 3.3 times",
        ),
        "uneven sequence lengths make stragglers": ("holds", "ranks wait 64% of the time, with equal lengths 0%"),
        "bucketing or padding evens out uneven lengths": (
            "holds when it is bucketing; padding turns waiting into work for nothing, and is no faster",
            "bucketed: 0.36 of the time, 1% of it waiting",
            "padded: 1.00 of the time, 0%",
        ),
        "gradient accumulation mitigates stragglers": (
            "holds when the slow rank is another one each time",
            "1.26, 1.13",
            "always one rank 1.40, 1.40",
        ),
        "asynchronous SGD lets fast GPUs run ahead": ("holds", "260 gradients in 7 s, 200 if they wait"),
        "stale gradients make convergence sensitive": (
            "holds when there is momentum, as in AdamW",
            "momentum 0.9 0.03, 0.94",
            "momentum 0 0.49, 0.49",
        ),
        "its accumulation loop uses every micro-batch": (
            "holds when K divides their number",
            "of 8 micro-batches 8 reach a step, of 10 8",
        ),
        "each GPU writes total / N of a distributed checkpoint": (
            "holds when the state is sharded, or is in many tensors: what all ranks have is divided by whole tensors",
            "ZeRO-3, 3 layers: 0.25, 0.25, 0.25, 0.25",
            "DDP, 3 layers: 0.33, 0.22, 0.22, 0.22",
        ),
        "140 GB by 64 ranks: 5 seconds instead of 20 minutes": (
            "holds when the storage takes 28 GB/s in all, faster than 64 of its single writers, and weights alone are "
            "saved",
            "9.4 to 18.8 s",
            "AdamW's state 30 s",
        ),
        "saving takes ~30 seconds every ~4 hours": (
            "holds when the optimizer's state is saved as well, and training waits",
            "its own save takes 5 s: 6 times less",
            "0.2%",
        ),
        "synchronous saves kill throughput": ("holds when one rank writes everything", "17% of the time", "0.14%"),
        "TorchElastic removes a failed rank and rebalances the shards": (
            "holds when all ranks may start again, and the checkpoint is one that another number of ranks can load",
            "on 2, 2, 1, 2 ranks ended well",
            "0, 0, 0 of the processes before, and 13, 12, 16 steps",
        ),
    },
    SCALING: {
        "fast interconnects like NVLink are vital for ZeRO-3": (FEW_TOKENS, "a step takes 7.", "1.0"),
        "layers from 10,000 parameters on are units of their own (min_num_params)": (
            "holds when layers are large",
            "29, with a unit per block 9",
            "width 4,096 x1.14, width 768 x2.41",
        ),
        "ZeRO-3 trains trillions of parameters if the GPUs' memory together is enough": (
            "holds when its units are small enough to be gathered beside the shards",
            "1.01e12 parameters, state 16 TB",
        ),
        "implementation complexity: DDP low, ZeRO-1 and -2 medium, ZeRO-3 high": ("holds", "statements: a DDP"),
    },
    WORDPRESS: {
        "on a slow interconnect GPUs wait more than they compute": ("holds", "at 400 GB/s", "at 50 GB/s"),
        "ZeRO-2 is the sweet spot for mid-sized models": (
            "holds when communication outweighs computation, as on many nodes with few tokens",
            "DDP fits: False",
        ),
    },
}

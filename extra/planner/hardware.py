"""The GPUs and networks of a replay: how long an operation and a collective take, and the assumptions.

The makers publish the peaks of their GPUs. README.md in this folder has the sources of the other numbers.
"""

import math
from dataclasses import dataclass

from extra.planner.events import Collective, Operation

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """Peaks by the maker: TFLOP/s of dense bfloat16 matrix products, GB of memory, and its GB/s.

    `gather` and `reduce` are NCCL's bus bandwidths inside a node for all-gathers (and reduce-scatters) and for
    all-reduces: the GB/s that leave each GPU. `efficiency` is the share of the peak at which matrix products compute,
    without the time to move their operands. It is fitted to published throughputs. `attention` is the share that flash
    attention reaches at best: forward, causal, heads of 128, long sequences.
    """

    name: str
    tflops: float
    memory_gb: float
    memory_gbps: float
    gather: float
    reduce: float
    efficiency: float
    attention: float


# The bus bandwidths were measured for 16 GiB between eight H200, whose links are those of an H100: 361 for all-gathers,
# 480 for all-reduces that are summed in the switch, and 367 for all-reduces in a ring. An A100 has 2/3 of the links'
# bandwidth, and rings. Flash attention (version 2) reaches 335 TFLOP/s on an H100, and 60% of an A100's peak.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h100", 989, 80, 3350, 361, 480, efficiency=0.651, attention=0.34),
        GPU("a100", 312, 80, 2000, 361 * 2 / 3, 367 * 2 / 3, efficiency=0.795, attention=0.6),
    )
}

# Flash attention, version 2, TFLOP/s of an H100 SXM5 by tokens of a sequence (paper of version 3, figures 5 and 6); of
# causal attention half the FLOPs are counted. The paper has no causal backward: the cost of causal forward is used.
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
FLASH = {  # (size of a head, causal forward, forward, backward)
    64: ((180, 229, 262, 284, 295, 299), (282, 306, 318, 321, 322, 324), (198, 238, 264, 279, 287, 291)),
    128: ((191, 260, 298, 319, 333, 335), (309, 350, 362, 368, 370, 370), (214, 260, 291, 310, 318, 322)),
}


def flash(size: int, tokens: int, backward: bool) -> float:
    """Flash attention's rate, as a share of its best rate, for these heads at this length."""
    rates = []
    for forward, plain, back in FLASH.values():
        causal = _between(tokens, TOKENS, forward)
        rates.append(causal * _between(tokens, TOKENS, back) / _between(tokens, TOKENS, plain) if backward else causal)
    return _between(size, tuple(FLASH), rates) / FLASH[128][0][-1]


def _between(x: float, xs, ys) -> float:
    """Linear interpolation between the two neighbours on logarithmic axes; outside, the nearest known value."""
    x = min(max(x, xs[0]), xs[-1])
    place = next(i for i in range(1, len(xs)) if x <= xs[i])
    (x0, y0), (x1, y1) = ((math.log(xs[i]), math.log(ys[i])) for i in (place - 1, place))
    return math.exp(y0 + (y1 - y0) * (math.log(x) - x0) / (x1 - x0))


@dataclass(frozen=True)
class Network:
    """The network between the nodes: `alpha` is seconds per hop, `bus` the GB/s that leave each rank of a ring.

    `crowding` is the share by which each further node slows a byte, in a ring and in a tree.
    """

    alpha: float
    bus: float
    crowding: tuple[float, float] = (0.0, 0.0)


# For nodes with 400 GB/s of network.
NETWORKS = {"infiniband": Network(16e-6, 350), "efa": Network(16e-6, 350, (0.32, 0.28))}
TREE = 0.92  # of a ring's bandwidth: NCCL's own estimate for its trees


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in nodes of `per_node`. `inter_gbps` replaces the bandwidth of the network.

    The other numbers are assumptions: seconds per hop inside a node (a small all-reduce of 8 A100 was measured, and
    makes 14 of them), the share of the memory's bandwidth that elementwise kernels reach, the seconds until a kernel is
    up to speed, those of the host per kernel and per collective, and the share by which a collective slows computation
    (arXiv 2507.03114: on average 18.9%).
    """

    gpu: GPU
    per_node: int = 8
    network: Network = NETWORKS["infiniband"]
    inter_gbps: float | None = None
    alpha_inside: float = 44e-6 / 14
    memory_efficiency: float = 0.75
    kernel: float = 2e-6
    launch: float = 6e-6
    issue: float = 30e-6
    slowdown: float = 0.19

    def seconds(self, operation: Operation) -> float:
        """The time to move the operands, and the time to compute.

        A kernel reads its first tiles before it computes anything, and writes its last tiles after it has computed all.
        So the two times add up, and large products reach a greater share of the peak than small ones.
        """
        share = self.gpu.efficiency
        if operation.attends:
            share = self.gpu.attention * flash(*operation.attends, "backward" in operation.name)
        moving = operation.nbytes / (self.gpu.memory_gbps * GB * self.memory_efficiency)
        return self.kernel + moving + operation.flops / (self.gpu.tflops * 1e12 * share)

    def collective_seconds(self, collective: Collective) -> float:
        """Seconds once it has begun: hops x latency, and bytes / bandwidth.

        In a ring of N ranks data makes N-1 hops, and in an all-reduce twice as many. All ranks send at the same time,
        so each hop takes as long as the slowest one, the hop between nodes. A tree's depth is the logarithm of the
        number of nodes. An all-reduce uses a tree if it is faster.
        """
        ranks = collective.ranks
        inside = min(ranks, self.per_node)
        nodes = ranks / inside
        reduces = collective.kind == "all-reduce"
        trips = 2 if reduces else 1
        gigabytes = trips * collective.nbytes * (ranks - 1) / ranks / GB
        links = self.gpu.reduce if reduces else self.gpu.gather
        if nodes == 1:
            return trips * (ranks - 1) * self.alpha_inside + gigabytes / links
        alpha, bus = self.network.alpha, self.inter_gbps or self.network.bus
        ring, tree = (
            gigabytes * max(1 / links, (1 + crowding * (nodes - 1)) / bus) for crowding in self.network.crowding
        )
        ring += trips * (ranks - 1) * alpha
        tree = tree / TREE + trips * (math.log2(nodes) * alpha + (inside - 1) * self.alpha_inside)
        return min(ring, tree) if reduces else ring

"""The GPUs and networks of a replay: how long an operation and a collective take, and the assumptions.

The makers publish the GPU peaks. The bus bandwidths were measured by others with NCCL's own tests: see `README.md`.
"""

import math
from dataclasses import dataclass

from extra.planner.events import Collective, Operation

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """Peaks by the maker: TFLOP/s (dense; fp32 with TF32 off), GB of memory, its GB/s, a link's GB/s per direction.

    `efficiency` is the share of the peak at which matrix products compute, without the time to move their operands.
    It is fitted for h100, h100-96gb and a100 (`./launch.sh plan --validate`). The others have the nearest one's share.
    `attention` is the share that flash attention reaches at best: forward, causal, heads of 128, long sequences.
    """

    name: str
    bf16: float | None
    fp32: float
    memory_gb: float
    memory_gbps: float
    link_gbps: float
    efficiency: float = 0.804
    attention: float = 0.6
    nvlink: bool = True

    def flops(self, dtype: str) -> float:
        """FLOP/s at the peak in "bf16" or "fp32". Raises ValueError for a GPU without bfloat16."""
        peak = self.bf16 if dtype == "bf16" else self.fp32
        if peak is None:
            raise ValueError(f"GPU {self.name} has no bfloat16: use --dtype fp32")
        return peak * 1e12


# Flash attention, version 2, TFLOP/s of an H100 SXM5 by tokens of a sequence (paper of version 3, figures 5 and 6); of
# causal attention half the FLOPs are counted. The paper has no causal backward: the cost of causal forward is used.
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
FLASH = {  # (size of a head, causal forward, forward, backward)
    64: ((180, 229, 262, 284, 295, 299), (282, 306, 318, 321, 322, 324), (198, 238, 264, 279, 287, 291)),
    128: ((191, 260, 298, 319, 333, 335), (309, 350, 362, 368, 370, 370), (214, 260, 291, 310, 318, 322)),
}


def flash(size: int, tokens: int, backward: bool) -> float:
    """Flash attention's rate, as a share of its best rate, for these heads, causal or not, at this length."""
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


# Flash attention at its best: 335 TFLOP/s on an H100, and 50 to 73% of an A100's peak (paper of version 2). The others
# have the same as the nearest one.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("b200", 2250, 80, 180, 8000, 900, 0.653, 0.34),
        GPU("h200", 989, 67, 141, 4800, 450, 0.653, 0.34),
        GPU("h100", 989, 67, 80, 3350, 450, 0.653, 0.34),
        GPU("h100-96gb", 989, 67, 96, 2400, 450, 0.453, 0.34),  # with less memory bandwidth, and capped at 500 W
        GPU("a100", 312, 19.5, 80, 2000, 300, 0.804, 0.6),
        GPU("rtx4090", 165.2, 82.6, 24, 1008, 31, nvlink=False),
        GPU("rtx3090", 71, 35.6, 24, 936, 31, nvlink=False),
        GPU("l4", 121, 30.3, 24, 300, 31, nvlink=False),
        GPU("t4", None, 8.1, 16, 320, 16, nvlink=False),
    )
}


@dataclass(frozen=True)
class Network:
    """The network between the nodes: `alpha` is seconds per hop, `bus` the GB/s that leave each rank of a ring.

    `crowding` is the share by which each further node slows a byte, in a ring and in a tree. On a network whose
    switches have room for all there is none.
    """

    alpha: float
    bus: float
    crowding: tuple[float, float] = (0.0, 0.0)


# For nodes with 400 GB/s of network. InfiniBand and EFA are fitted (`./launch.sh plan --validate` prints the rows).
# There is no measurement for RoCE. Its latency is assumed to be 1.5 times InfiniBand's.
NETWORKS = {
    "infiniband": Network(12e-6, 350),
    "roce": Network(18e-6, 350),
    "efa": Network(12e-6, 350, (0.36, 0.28)),
}
TREE = 0.92  # of a ring's bandwidth: NCCL's own estimate for its trees

# NCCL's bus bandwidth, measured by others: bytes that leave each rank per second, (N-1)/N of an all-gather's buffer,
# twice that for an all-reduce. By nodes of 8 H100 with 400 GB/s of EFA each, for 256 MB.
NODES = (1, 2, 4, 8, 16, 32, 64)
BUS = {
    "all-gather": (250, 185, 119, 69, 55, 28, 11),
    "all-reduce": (436, 362, 160, 100, 85, 65, 33),
}
BUS_BYTES = 256e6
INSIDE = {"all-gather": 361, "all-reduce": 480}  # in a node of 8 H200 (links as H100's), 16 GiB
LINK = 450  # GB/s of the links where that was measured
RING_OF_LINKS = 367 / 480  # an all-reduce without NVLink's sums in the switch, beside one with
PCIE = 12 / 31  # bus bandwidth of two RTX 4090 without peer access, beside their link's
ALPHA_INSIDE = 44e-6 / 14  # seconds per hop in a node: a small all-reduce of 8 A100, measured, makes 14 of them

# Assumptions without a measurement.
MEMORY_EFFICIENCY = 0.75  # the share of memory bandwidth that elementwise kernels reach
KERNEL = 2e-6  # seconds until a kernel is up to speed
LAUNCH = 6e-6  # seconds of the host per kernel that it launches from Python
ISSUE = 30e-6  # seconds of the host per collective
SLOWDOWN = 0.19  # computation is slower during a collective: on average 18.9% (arXiv 2507.03114)


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in nodes of `per_node`; links in GB/s per direction and GPU.

    `network` is one of `NETWORKS`, or your own. If `alpha` (seconds per hop) or `inter_gbps` (GB/s of a ring across
    nodes) is None, the network's value is used, and if `efficiency` is None, the GPU's. The other numbers are the
    assumptions above.
    """

    gpu: GPU
    per_node: int = 8
    intra_gbps: float | None = None
    inter_gbps: float | None = None
    efficiency: float | None = None
    network: str | Network = "infiniband"
    alpha: float | None = None
    alpha_inside: float = ALPHA_INSIDE
    memory_efficiency: float = MEMORY_EFFICIENCY
    kernel: float = KERNEL
    launch: float = LAUNCH
    issue: float = ISSUE
    slowdown: float = SLOWDOWN

    def __post_init__(self):
        if not isinstance(self.network, Network) and self.network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {self.network!r}")

    @property
    def between(self) -> Network:
        """The network between the nodes, with the numbers that were given in place of the network's."""
        own = self.network if isinstance(self.network, Network) else NETWORKS[self.network]
        alpha = own.alpha if self.alpha is None else self.alpha
        return Network(alpha, own.bus if self.inter_gbps is None else self.inter_gbps, own.crowding)

    def seconds(self, operation: Operation) -> float:
        """A roofline without its corner: the time to move the operands, and the time to compute.

        A kernel reads its first tiles before it computes anything, and writes its last tiles after it has computed all.
        So the two times add up, and large products reach a greater share of the peak than small ones.
        """
        moving = operation.nbytes / (self.gpu.memory_gbps * GB * self.memory_efficiency)
        if not operation.flops:
            return self.kernel + moving
        share = self.efficiency or self.gpu.efficiency
        if operation.attends:
            share = self.gpu.attention * flash(*operation.attends, "backward" in operation.name)
        return self.kernel + moving + operation.flops / (self.gpu.flops(operation.dtype) * share)

    def collective_seconds(self, collective: Collective) -> float:
        """Seconds once it has begun: hops x latency, and bytes / bandwidth.

        In a ring of N ranks data makes N-1 hops, and in an all-reduce twice as many. All ranks send at the same time,
        so each hop takes as long as the slowest one, the hop between nodes. A tree's depth is the logarithm of the
        number of nodes. An all-reduce uses a tree if it is faster.
        """
        ranks = collective.ranks
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.per_node // collective.stride))
        nodes = ranks / inside
        reduces = collective.kind == "all-reduce"
        trips = 2 if reduces else 1
        gigabytes = trips * collective.nbytes * (ranks - 1) / ranks / GB
        if nodes <= 1:
            return trips * (ranks - 1) * self.alpha_inside + gigabytes / self._links(reduces)
        network = self.between
        # The number of rings that share a node's network is the number of its GPUs in different groups.
        share = 1.0 if collective.stride == 1 else inside / self.per_node
        ring, tree = (
            gigabytes * max(1 / self._links(reduces), (1 + crowding * (nodes - 1)) / (network.bus * share))
            for crowding in network.crowding
        )
        ring += trips * (ranks - 1) * network.alpha
        tree = tree / TREE + trips * (math.log2(nodes) * network.alpha + (inside - 1) * self.alpha_inside)
        return min(ring, tree) if reduces else ring

    def _links(self, reduces: bool) -> float:
        """GB/s of a collective inside a node."""
        link = self.gpu.link_gbps if self.intra_gbps is None else self.intra_gbps
        if not self.gpu.nvlink:
            return link * PCIE
        bus = INSIDE["all-reduce" if reduces else "all-gather"] * link / LINK
        return bus * RING_OF_LINKS if reduces and self.gpu.link_gbps < LINK else bus  # switches add from the H100 on

"""GPUs and networks as a replay sees them: how long an operation and a collective take, and what is assumed.

GPU peaks are the makers'. The bus bandwidths are measured with NCCL's own tests, by others; see `docs/planner.md`.
"""

import math
from dataclasses import dataclass

from harness.plan.events import Collective, Operation

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """Peaks by the maker: TFLOP/s (dense; fp32 with TF32 off), GB of memory, its GB/s, a link's GB/s per direction.

    `efficiency` is the share of the peak at which matrix products compute, without the time to move their operands;
    fitted for h100, h100-96gb and a100 (`./launch.sh plan --validate`), for the others that of the nearest of these.
    `attention` is the share that flash attention reaches.
    """

    name: str
    bf16: float | None
    fp32: float
    memory_gb: float
    memory_gbps: float
    link_gbps: float
    efficiency: float = 0.73
    attention: float = 0.6
    nvlink: bool = True

    def flops(self, dtype: str) -> float:
        """FLOP/s at the peak in "bf16" or "fp32". Raises ValueError for a GPU without bfloat16."""
        peak = self.bf16 if dtype == "bf16" else self.fp32
        if peak is None:
            raise ValueError(f"GPU {self.name} has no bfloat16: use --precision fp32")
        return peak * 1e12


# Flash attention's share of the peak: version 2 reaches 35% of an H100 (paper of version 3) and 50 to 73% of an A100
# (paper of version 2); for the others the same as for what is nearest to them.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("b200", 2250, 80, 180, 8000, 900, 0.577, 0.35),
        GPU("h200", 989, 67, 141, 4800, 450, 0.577, 0.35),
        GPU("h100", 989, 67, 80, 3350, 450, 0.577, 0.35),
        GPU("h100-96gb", 989, 67, 96, 2400, 450, 0.427, 0.35),  # with less memory bandwidth, and capped at 500 W
        GPU("a100", 312, 19.5, 80, 2000, 300, 0.729, 0.6),
        GPU("rtx4090", 165.2, 82.6, 24, 1008, 31, nvlink=False),
        GPU("rtx3090", 71, 35.6, 24, 936, 31, nvlink=False),
        GPU("l4", 121, 30.3, 24, 300, 31, nvlink=False),
        GPU("t4", None, 8.1, 16, 320, 16, nvlink=False),
    )
}

# Bus bandwidth in GB/s: bytes that leave each rank per second, in a ring: (N-1)/N of an all-gather's buffer, twice that
# for an all-reduce. By nodes of 8 H100 with 400 GB/s of network (EFA), 256 MB.
NODES = (1, 2, 4, 8, 16, 32, 64)
BUS = {
    "all-gather": (250, 185, 119, 69, 55, 28, 11),
    "all-reduce": (436, 362, 160, 100, 85, 65, 33),
}
BUS_BYTES = 256e6
LARGE = {"all-gather": 361, "all-reduce": 480}  # in a node, 16 GiB, between H200 (links as H100's)
LARGE_BYTES = 16 * 2**30
BUS_LINK, BUS_NODE = 450, 400  # GB/s of the links and of a node's network where these were measured
RING_OF_LINKS = 367 / 480  # an all-reduce without NVLink's sums in the switch, beside one with
PCIE = 12 / 31  # bus bandwidth of two RTX 4090 without peer access, beside their link's

# Assumptions that no measurement here stands for.
LATENCY = 44e-6  # seconds of a collective of next to nothing in a node (8 A100, measured), and ...
HOP = 5e-6  # ... more for each further node in a ring, or for each doubling of them in a tree
MEMORY_EFFICIENCY = 0.85  # the share of memory bandwidth that elementwise kernels reach
KERNEL = 2e-6  # seconds until a kernel is up to speed
LAUNCH = 6e-6  # seconds of the host per kernel that it launches from Python
ISSUE = 30e-6  # seconds of the host per collective
SLOWDOWN = 0.19  # computation takes so much longer beside a collective: on average 18.9% (arXiv 2507.03114)


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in nodes of `per_node`; links in GB/s per direction, of a GPU inside and of a node outside.

    `efficiency` None: the GPU's own. The other numbers are the assumptions above.
    """

    gpu: GPU
    per_node: int = 8
    intra_gbps: float | None = None
    inter_gbps: float = BUS_NODE
    efficiency: float | None = None
    latency: float = LATENCY
    hop: float = HOP
    memory_efficiency: float = MEMORY_EFFICIENCY
    kernel: float = KERNEL
    launch: float = LAUNCH
    issue: float = ISSUE
    slowdown: float = SLOWDOWN

    def seconds(self, operation: Operation) -> float:
        """A roofline without its corner: the time to move the operands, and the time to compute.

        A kernel's first tiles are read before anything can be computed, its last are written when all is. So the two
        add up, and large products reach a greater share of the peak than small ones.
        """
        moving = operation.nbytes / (self.gpu.memory_gbps * GB * self.memory_efficiency)
        if not operation.flops:
            return self.kernel + moving
        attends = operation.name.startswith("_scaled_dot_product")
        share = self.gpu.attention if attends else (self.efficiency or self.gpu.efficiency)
        return self.kernel + moving + operation.flops / (self.gpu.flops(operation.dtype) * share)

    def collective_seconds(self, collective: Collective) -> float:
        """Seconds once it has begun. A group inside one node uses the links, any other the network as well."""
        ranks = collective.ranks
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.per_node // collective.stride))
        nodes = ranks / inside
        kind = "all-reduce" if collective.kind == "all-reduce" else "all-gather"
        sent = (2 if kind == "all-reduce" else 1) * collective.nbytes * (ranks - 1) / ranks
        # As many rings share a node's network as it has GPUs of other groups.
        share = 1.0 if collective.stride == 1 else inside / self.per_node
        return self._latency(kind, nodes) + sent / (self._bus(kind, nodes, collective.nbytes, share) * GB)

    def _latency(self, kind: str, nodes: float) -> float:
        if nodes <= 1:
            return self.latency
        return self.latency + self.hop * (2 * math.log2(nodes) if kind == "all-reduce" else nodes)

    def _bus(self, kind: str, nodes: float, nbytes: float, share: float) -> float:
        """GB/s beyond the latency: the table's, in proportion to these links, with the latency taken out of it."""
        inside = self._inside(kind, nbytes)
        if nodes <= 1:
            return inside
        nodes = min(nodes, NODES[-1])  # beyond the table nothing is known: the last value is held
        table = _between(nodes, NODES, BUS[kind])
        ranks = 8 * nodes
        sent = (2 if kind == "all-reduce" else 1) * BUS_BYTES * (ranks - 1) / ranks
        table = sent / (sent / (table * GB) - Cluster._latency(REFERENCE, kind, nodes)) / GB
        return min(inside, table * self.inter_gbps / BUS_NODE * share)

    def _inside(self, kind: str, nbytes: float) -> float:
        link = self.gpu.link_gbps if self.intra_gbps is None else self.intra_gbps
        if not self.gpu.nvlink:
            return link * PCIE
        at_256mb, large = BUS[kind][0], LARGE[kind]
        grown = math.log(max(nbytes, BUS_BYTES) / BUS_BYTES) / math.log(LARGE_BYTES / BUS_BYTES)
        bus = at_256mb + (large - at_256mb) * min(1.0, grown)
        if kind == "all-reduce" and self.gpu.link_gbps < BUS_LINK:
            bus *= RING_OF_LINKS  # switches add up from the H100 on
        return bus * link / BUS_LINK


REFERENCE = Cluster(GPUS["h100"])


def _between(x: float, xs, ys) -> float:
    """On the line between the two neighbours, both axes logarithmic."""
    place = next((i for i in range(1, len(xs) - 1) if x <= xs[i]), len(xs) - 1)
    (x0, y0), (x1, y1) = ((math.log(xs[i]), math.log(ys[i])) for i in (place - 1, place))
    return math.exp(y0 + (y1 - y0) * (math.log(x) - x0) / (x1 - x0))

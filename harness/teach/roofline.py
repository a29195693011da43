"""When does communication hide behind computation? Two formulas, and the number of tokens at which they meet.

α is the latency of one message (seconds), β the bandwidth of one rank (bytes per second). The model is Thakur et al.,
"Optimization of Collective Communication Operations in MPICH" (2005), section 3, for the ring. It overstates latency
on many ranks, where NCCL uses trees, and knows nothing of a network that is shared.
"""


def gather_seconds(nbytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """An all-gather (or reduce-scatter) of a buffer of `nbytes` in a ring: (N-1) α + (N-1)/N bytes/β."""
    return (ranks - 1) * latency + (ranks - 1) / ranks * nbytes / bandwidth


def forward_seconds(parameters: float, tokens: float, flops: float) -> float:
    """The forward of a module of `parameters` weights on a rank's `tokens`: two FLOPs per weight and token."""
    return 2 * parameters * tokens / flops


def hides_from(parameters: float, ranks: int, flops: float, latency: float, bandwidth: float, width: int = 2) -> float:
    """The tokens per rank from which a unit's gather is no longer than the forward of a unit as large beside it.

    `width` is the bytes per element that is sent: 2 for bfloat16. Without latency it is width/2 (N-1)/N flops/β: the
    size of the unit drops out.
    """
    return gather_seconds(width * parameters, ranks, latency, bandwidth) / forward_seconds(parameters, 1, flops)

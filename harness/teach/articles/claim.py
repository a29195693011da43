"""What a claim is, which articles there are, and the three verdicts."""

from collections.abc import Callable
from dataclasses import dataclass

MULTIPLE_GPUS = "AI in Multiple GPUs: ZeRO & FSDP"
SHARDING_STATE = "ZeRO and FSDP: Sharding Training State at Scale"
FRAMEWORKS = "Training Frameworks: ZeRO, FSDP, and the Memory Math That Gets You Hired"
SCALING = "Scaling LLM Training: Deep Dive into ZeRO and FSDP for Multi-GPU Systems"
WORDPRESS = "The WordPress developer's piece on ZeRO Memory Optimization"  # our copy has no title
ARTICLES = (MULTIPLE_GPUS, SHARDING_STATE, FRAMEWORKS, SCALING, WORDPRESS)

NAMES = {"plain": "unsharded", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
         "fsdp1": "FSDP1", "fsdp2": "FSDP2"}  # fmt: skip

HOLDS, DOES_NOT_HOLD = "holds", "does not hold"


@dataclass(frozen=True)
class Claim:
    """One statement of an article in our words, what is run for it, and the run: `check()` -> (measured, verdict)."""

    article: str
    claim: str
    ran: str
    check: Callable[[], tuple[str, str]]


def verdict(true: bool) -> str:
    """The verdict on a statement that has no conditions."""
    return HOLDS if true else DOES_NOT_HOLD


def holds_when(condition: str, where_met: bool, where_not: bool) -> str:
    """The verdict on a statement that was tested on both sides of `condition`: is it true where that is met, where not?

    The condition is named only if it decides; a statement that is true on both sides simply holds.
    """
    if where_met and where_not:
        return HOLDS
    return f"holds when {condition}" if where_met else DOES_NOT_HOLD


def about(measured: float, claimed: float, tolerance: float = 0.005) -> bool:
    """Whether `measured` is within `tolerance` (a fraction) of `claimed`."""
    return abs(measured - claimed) <= tolerance * abs(claimed)


def gb(nbytes: float) -> str:
    """Bytes in GB of 10^9, three or four digits."""
    return f"{nbytes / 1e9:,.4g} GB"

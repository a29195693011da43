"""132 claims of the five articles as data: who says what, what is run for it here, and the run that gives the verdict.

`./launch.sh articles` runs them all. Every claim is in words of ours, and its code is ours; no article's code is here.
Our copies of the articles lack some numbers and formulas. A claim that was completed there says what is blank.
"""

from harness.teach.articles import activations, arithmetic, behaviour, memory, offload, overlap, snippets, traffic
from harness.teach.articles.claim import (
    ARTICLES,
    DOES_NOT_HOLD,
    FRAMEWORKS,
    HOLDS,
    MULTIPLE_GPUS,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Claim,
)

_MODULES = (memory, offload, activations, traffic, overlap, behaviour, arithmetic, snippets)
# In the order of the articles, and within each by subject.
CLAIMS: list[Claim] = sorted(
    (claim for module in _MODULES for claim in module.CLAIMS), key=lambda claim: ARTICLES.index(claim.article)
)

__all__ = [
    "ARTICLES", "CLAIMS", "Claim", "DOES_NOT_HOLD", "FRAMEWORKS", "HOLDS", "MULTIPLE_GPUS", "SCALING",
    "SHARDING_STATE", "WORDPRESS",
]  # fmt: skip

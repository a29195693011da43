"""174 claims of the five articles as data: who says what, what is run for it here, and the run that gives the verdict.

`./launch.sh articles` runs them all. Every claim is in words of ours, and its code is ours; no article's code is here.
Our copies of the articles lack some numbers and formulas. A claim that was completed there says what is blank.
"""

from harness.teach.articles import on_memory, on_traffic, predicted, printed, rest
from harness.teach.articles.claim import ARTICLES, Claim

# By article, and within each by subject: first what is said of ZeRO and FSDP, of memory and traffic.
ZERO: list[Claim] = sorted(
    on_memory.claims + on_traffic.claims + predicted.claims + printed.claims,
    key=lambda claim: ARTICLES.index(claim.article),
)
OTHERS: list[Claim] = sorted(rest.claims, key=lambda claim: ARTICLES.index(claim.article))
CLAIMS = ZERO + OTHERS

__all__ = ["ARTICLES", "CLAIMS", "Claim", "OTHERS", "ZERO"]

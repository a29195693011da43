"""Claims of the five articles about ZeRO and FSDP: who says what, what is run for it here, and the run that judges it.

`./launch.sh articles` runs them all. The words are in claims.toml, the runs in the files beside it. Every claim is in
words of ours, and its code is ours; no article's code is here. Our copies of the articles lack some numbers and
formulas. A claim that was completed there says what is blank.
"""

from zerolab.teach.articles.claim import ARTICLES, Claim, claims_beside

CLAIMS: list[Claim] = claims_beside(__file__, __name__)

__all__ = ["ARTICLES", "CLAIMS", "Claim"]

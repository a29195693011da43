"""The claims of articles: their type, the outcome of their check, and the articles' titles.

@claim((SCALING, "ZeRO-2: Gradient Sharding"))
def zero2_does_something():
    "What the article claims, in a sentence of ours."
    measured = ...
    return holds_if(measured < 1, f"{measured} of ...", why="what the article left out")
"""

from collections.abc import Callable
from dataclasses import dataclass

HOLDS, DEPENDS, DOES_NOT_HOLD = "holds", "depends", "does not hold"

MULTIPLE_GPUS = "AI in Multiple GPUs: ZeRO & FSDP"
SHARDING_STATE = "ZeRO and FSDP: Sharding Training State at Scale"
FRAMEWORKS = "Training Frameworks: ZeRO, FSDP, and the Memory Math That Gets You Hired"
SCALING = "Scaling LLM Training: Deep Dive into ZeRO and FSDP for Multi-GPU Systems"
WORDPRESS = "The WordPress developer's piece on ZeRO Memory Optimization"  # our copy has no title
ARTICLES = {  # by their names in the marks of docs/articles.md
    "multiple_gpus": MULTIPLE_GPUS,
    "sharding_state": SHARDING_STATE,
    "frameworks": FRAMEWORKS,
    "scaling": SCALING,
    "wordpress": WORDPRESS,
}


@dataclass(frozen=True)
class Outcome:
    verdict: str  # HOLDS, DEPENDS or DOES_NOT_HOLD
    found: str  # what was measured, with its numbers
    why: str = ""  # why the claim does not hold, or what it depends on


@dataclass(frozen=True)
class Claim:
    """A statement of one or several articles, and the function that measures whether it is true."""

    name: str
    text: str
    sources: tuple[tuple[str, str], ...]  # (title of the article, section)
    check: Callable[[], Outcome]

    def __str__(self) -> str:
        return self.name


def claim(*sources: tuple[str, str]):
    """Decorates the check of a claim. The first paragraph of its docstring is the claim."""

    def decorate(check: Callable[[], Outcome]) -> Claim:
        text = " ".join(check.__doc__.split("\n\n")[0].split())
        return Claim(check.__name__, text, sources, check)

    return decorate


def claims_of(module) -> list[Claim]:
    """The claims that a module defines, in their order."""
    return [one for one in vars(module).values() if isinstance(one, Claim)]


def holds_if(true: bool, found: str, why: str = "") -> Outcome:
    """The outcome of a claim without a condition. `why` is needed where it does not hold."""
    if true:
        return Outcome(HOLDS, found)
    return Outcome(DOES_NOT_HOLD, found, why)


def depends_on(why: str, holds_with: bool, holds_without: bool, found: str) -> Outcome:
    """The outcome of a claim that was measured with a condition and without it. `why` describes the condition."""
    if holds_with and holds_without:
        return Outcome(HOLDS, found)
    return Outcome(DEPENDS if holds_with else DOES_NOT_HOLD, found, why)


def close(measured: float, claimed: float, within: float = 0.005) -> bool:
    """Whether a number is what the article says, up to a fraction."""
    return abs(measured - claimed) <= within * abs(claimed)

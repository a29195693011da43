"""What a claim is, which articles there are, and what gives a verdict."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from harness.run.engines import ENGINES

MULTIPLE_GPUS = "AI in Multiple GPUs: ZeRO & FSDP"
SHARDING_STATE = "ZeRO and FSDP: Sharding Training State at Scale"
FRAMEWORKS = "Training Frameworks: ZeRO, FSDP, and the Memory Math That Gets You Hired"
SCALING = "Scaling LLM Training: Deep Dive into ZeRO and FSDP for Multi-GPU Systems"
WORDPRESS = "The WordPress developer's piece on ZeRO Memory Optimization"  # our copy has no title
ARTICLES = (MULTIPLE_GPUS, SHARDING_STATE, FRAMEWORKS, SCALING, WORDPRESS)

NAMES = {name: engine.title for name, engine in ENGINES.items()} | {"single": "unsharded"}

HOLDS, DOES_NOT_HOLD = "holds", "does not hold"


@dataclass(frozen=True)
class Claim:
    """One statement of an article in our words, what is run for it, and the run.

    `run()` -> (found, is it true?). With a condition `when` it is tested on both sides: `run()` -> (found, is it
    true where the condition is met?, where it is not?). `found` is text, or names with their numbers. In another
    run its numbers may differ by the fraction `tolerance`; None: words of torch's or numbers of this machine, any.

    A claim about one number `says` which (or gives a function: is it such a number?), and `run`, or `run()`, has names
    with numbers alone. All must be that number, to the fraction `off`. With a condition, the first must be, where it is
    met, and the last would be, where it is not.
    """

    article: str
    claim: str
    ran: str
    when: str
    run: Callable[[], tuple | dict] | dict
    tolerance: float | None = 0.01
    says: float | Callable[[float], bool] | None = None
    off: float = 0.005

    def check(self) -> tuple[str, str]:
        """(found, verdict). A condition is named only if it decides: what is true on both sides simply holds."""
        found = self.run() if callable(self.run) else self.run
        if self.says is not None:
            found = listed(found, "{1} {0}"), *self._as_said([*found.values()])
        found, true, *elsewhere = found
        found = listed(found) if isinstance(found, dict) else found
        if true and all(elsewhere):
            return found, HOLDS
        return found, f"holds when {self.when}" if true else DOES_NOT_HOLD

    def _as_said(self, numbers: list[float]) -> list[bool]:
        meets = self.says if callable(self.says) else partial(about, claimed=self.says, tolerance=self.off)
        return [meets(numbers[0]), meets(numbers[-1])] if self.when else [all(map(meets, numbers))]


def above(limit: float) -> Callable[[float], bool]:
    return lambda number: number > limit


class Claims(list):
    """A subject's claims: `claims.frameworks(claim, ran, when, run)` adds one that the article of that name makes.

    Without a `run` it is a decorator of the function that is the run. `options`: a `tolerance` for all.
    """

    def __init__(self, **options):
        self.multiple_gpus, self.sharding_state, self.frameworks, self.scaling, self.wordpress = (
            partial(self.add, article, **options) for article in ARTICLES
        )

    def add(self, article: str, claim: str, ran: str, when: str = "", run=None, **options):
        if run is None:
            return partial(self.add, article, claim, ran, when, **options)
        self.append(Claim(article, claim, ran, when, run, **options))
        return run


def about(measured: float, claimed: float, tolerance: float = 0.005) -> bool:
    """Whether `measured` is within `tolerance` (a fraction) of `claimed`."""
    return abs(measured - claimed) <= tolerance * abs(claimed)


def listed(found: dict, form: str = "{} {}", between: str = ", ") -> str:
    """`form` filled with every name and its value or values. Engines go by the names that readers know."""
    rows = ((name, value if isinstance(value, tuple) else (value,)) for name, value in found.items())
    return between.join(form.format(NAMES.get(name, name), *map(shown, values)) for name, values in rows)


def shown(value) -> str:
    """A number with four digits, a count with all of them, anything else as it is."""
    return f"{value:,}" if type(value) is int else f"{value:.4g}" if isinstance(value, float) else str(value)


def gb(nbytes: float) -> str:
    """Bytes in GB of 10^9, three or four digits."""
    return f"{nbytes / 1e9:,.4g} GB"

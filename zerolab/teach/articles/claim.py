"""What a claim is, which articles there are, and what gives a verdict. The words stand in claims.toml."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pkgutil import resolve_name

from zerolab.teach import written

ARTICLES = written.beside(__file__, "claims")["articles"]  # {its key in claims.toml: its title}


@dataclass(frozen=True)
class Claim:
    """One statement of an article in our words, what is run for it, and the run.

    `run(**given)` -> the values that fill `found`. Or, for each row that is given as `of`, `run(**row)` -> a value, or
    how many times the value of a row in `over` it is; these begin again where there are fewer.

    Each value must be what the claim `says` (a number to the fraction `off`), or `between` two numbers; where there are
    more values than that, it begins again. Or, of each pair in `less`, the value at the first place must be less than
    the value at the second. Where all this is not enough, `run` returns (values, is it true?).

    `at` are the places, of values or pairs, that the claim is about: all. With a condition `when` a claim is tested on
    both sides: `at` is where the condition is met, the first place if nothing else is said, and all other places are
    where it is not; other runs return (values, true where it is met?, true where it is not?).

    In another run the numbers may differ by the fraction `tolerance`; inf: words of torch's or numbers of this machine.
    A `long` run takes seconds of a processor, for what other tests hold too.
    """

    article: str
    claim: str
    ran: str
    found: str
    run: Callable
    given: dict = field(default_factory=dict)
    when: str = ""
    says: list[float | str] = ()
    off: float = 0.005
    between: list[tuple[float, float]] = ()
    less: list[tuple[int, int]] = ()
    at: list[int] = ()
    tolerance: float = 0.01
    long: bool = False

    def check(self) -> tuple[str, str]:
        """(found, verdict). A condition is named only if it decides: what is true on both sides simply holds."""
        values = each_over(self.run, **self.given) if "of" in self.given else self.run(**self.given)
        true = []
        if isinstance(values, tuple):
            values, *true = values
        found = self.found.format(*map(shown, values))
        first, *elsewhere = true or self._as_said(values)
        if first and all(elsewhere):
            return found, "holds"
        return found, f"holds when {self.when}" if first else "does not hold"

    def _as_said(self, values: list) -> list[bool]:
        meets = [values[one] < values[other] for one, other in self.less]
        meets += [low <= value <= high for value, (low, high) in zip(values, cycle(self.between))]
        meets += [about(value, said, self.off) for value, said in zip(values, cycle(self.says))]
        at = self.at or range(1 if self.when else max(1, len(meets)))  # without any rule that is an error
        elsewhere = [met for place, met in enumerate(meets) if place not in at]
        return [all(meets[place] for place in at), *(elsewhere if self.when else ())]


def claims_beside(file: str, runs: str) -> list[Claim]:
    """Those of claims.toml, article by article; `run` is the name of a function in what is imported as `runs`."""
    rows, claims = written.beside(file, "claims"), []
    for key, title in ARTICLES.items():
        for row in rows.get(key, ()):
            run = resolve_name(f"{runs}.{row['run']}")
            claims.append(Claim(**{**row, "article": title, "run": run}))
    return claims


def each_over(run: Callable, of: list[dict], over: list[dict] = ()) -> list:
    """A value of each row, or how many times that of the rows `over`."""
    found = [run(**row) for row in of]
    if over:
        found = [value / run(**row) for value, row in zip(found, cycle(over))]
    return found


def about(measured, claimed, tolerance: float = 0.005) -> bool:
    """Whether `measured` is within `tolerance` (a fraction) of `claimed`; of words: whether they are the same."""
    if isinstance(claimed, str):
        return measured == claimed
    return abs(measured - claimed) <= tolerance * abs(claimed)


def shown(value) -> str:
    """A number with four digits, a count with all of them, anything else as it is."""
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""What a property is: something that must be true of an engine, which runs on every rank and answers with findings.

    @holds("values", sizes=(2, 3), cases=({"steps": 4},))
    def adds_up(engine, steps):
        "Two backwards before a step add up."
        trained = engine(seeded(OddModel), SGD)          # as ZeRO1(model, optimizer_cls) would be written
        ...
        same("the weights", trained.full_state_dict(), expected, atol=1e-12, step=5)

`engine` is the one under test, a `Subject`: it is called as a stage's class is. A property says with `same`, `expect`
and `refused` what must be; the first that is not so ends it and becomes its `Finding`. An `assert` does too, with less
to say. Nothing here knows pytest: tests, `check`, the museum and `conform` all ask `examine`.
"""

import importlib
import itertools
import linecache
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from harness.run import engines

GROUPS = ("values", "bytes", "traffic", "order", "life", "misuse")
STEPS = ("partition", "forward", "backward", "reduce gradients", "update the shard", "gather parameters")
STAGES = tuple(engines.STAGES)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be: on which rank, and at which step of the algorithm (0 to 5) where known.

    `read` says where that is explained, if it is known.
    """

    what: str
    expected: str
    found: str
    step: int | None
    rank: int
    read: str = ""

    def __str__(self):
        at = f", step {self.step} {STEPS[self.step]}" if self.step is not None else ""
        return f"rank {self.rank}{at}: {self.what}\n  expected  {self.expected}\n  found     {self.found}"


class Differs(AssertionError):
    """An engine is not what it must be."""

    def __init__(self, what: str, expected, found, step: int | None = None):
        super().__init__(f"{what}: expected {expected}, found {found}")
        self.what, self.expected, self.found, self.step = what, str(expected), str(found), step


class NotApplicable(Exception):
    """The engine documents nothing of the kind: there is nothing that could be right or wrong."""


# How a property says what must be.


def expect(right, what: str, expected, found, step: int | None = None) -> None:
    if not right:
        raise Differs(what, expected, found, step)


def same(what: str, found, expected, atol: float = 0.0, step: int | None = None) -> None:
    """`found` equals `expected`: a tensor to within `atol` (0: to the bit), a mapping of them name by name, or a value.

    To the bit is for what adds the same numbers in the same order on both sides; say there why it does.
    """
    if isinstance(expected, Mapping):
        expect(list(found) == list(expected), f"the names of {what}", list(expected), list(found), step)
        for name in expected:
            same(f"{what}, {name}", found[name], expected[name], atol, step)
    elif isinstance(expected, torch.Tensor):
        shapes = tuple(getattr(found, "shape", ())) if isinstance(found, torch.Tensor) else type(found).__name__
        expect(shapes == tuple(expected.shape), f"the shape of {what}", tuple(expected.shape), shapes, step)
        if there := first_difference(found, expected, atol):
            right, wrong, where = there
            off = (found.detach().to(expected) - expected.detach()).abs().max().item()
            allowed = f", to within {atol:g}" if atol else ", to the bit"
            raise Differs(what, f"{right:.17g}{allowed}", f"{wrong:.17g}{where}, by {off:.3g} at most", step)
    else:
        expect(found == expected, what, expected, found, step)


def first_difference(found: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float = 0):
    """(the right value, the wrong one, where) of the first elements that differ by more; None if there are none."""
    wrong = ~torch.isclose(found.detach().to(expected), expected.detach(), rtol=rtol, atol=atol, equal_nan=True)
    if not wrong.any():
        return None
    first = wrong.flatten().nonzero()[0].item()
    values = expected.detach().flatten()[first].item(), found.detach().flatten()[first].item()
    return *values, f" at element {first}; {int(wrong.sum())} of {wrong.numel()} differ"


def refused(call: Callable, *words: str, error=(ValueError, TypeError, RuntimeError), step: int | None = 0) -> str:
    """`call()` raises one of the `error`s, with all `words` in its message, which is returned."""
    wanted = f"an error that says {', '.join(map(repr, words)) or 'what is wrong'}"
    foreign = _asked is not None and _asked.foreign
    error = Exception if foreign else error
    try:
        call()
    except NotApplicable:
        raise
    except error as raised:
        said = str(raised)
        if foreign:  # it has errors of its own, and words
            return said
        missing = [word for word in words if word not in said]
        expect(not missing, "the error's words", wanted, f"{type(raised).__name__}: {said}", step)
        return said
    if foreign:
        raise NotApplicable(f"{_asked.name} does not say that it refuses this")
    raise Differs("what cannot work", wanted, "no error", step)


_asked = None  # the `Subject` that is being examined


# What is examined.


@dataclass(frozen=True)
class Subject:
    """An engine under test. Calling it builds one: `subject(model, optimizer_cls, **options)`.

    `like` is the stage whose bytes, traffic and methods it promises (None: it promises nothing of the kind), and
    `takes` are the options that it documents (None: all that a stage has). `dtype` and `atol` are those in which its
    values are compared, unless a property says otherwise: not every engine trains in float64.
    """

    name: str
    build: Callable
    like: str | None = None
    takes: frozenset[str] | None = None
    dtype: torch.dtype = torch.float64
    atol: float = 1e-12  # in float64, where another order of a sum makes some 1e-15
    broadcasts: bool = True  # all ranks start from rank 0's weights; else they must have the same already
    more: dict = field(default_factory=dict)  # an exhibit's own save, load, scaler; what others say of themselves

    def __call__(self, model, optimizer_cls, **options):
        if options.get("units") == "the whole model":  # an option that can be written down, and sent to ranks
            options["units"] = [model]
        if self.foreign:
            options = {key: value for key, value in options.items() if value is not None}
            if unknown := sorted(options.keys() - self.takes):
                raise NotApplicable(f"{self.name} has no option {unknown[0]}")
        return self.build(model, optimizer_cls, **options)

    def another(self) -> "Subject":
        """A stage that it is not like."""
        return subject(STAGES[STAGES.index(self.like) - 1] if self.like in STAGES else "zero1")

    @property
    def foreign(self) -> bool:
        """Whether it is none of ours: it has what it documents, under `Foreign`, and errors in words of its own."""
        return self.takes is not None


def subject(name: str) -> Subject:
    """The engine `name` of the registry as a subject."""
    if name in STAGES:
        return Subject(name, engines.STAGES[name], like=name)

    from harness.properties import foreign

    return foreign.subject(engines.ENGINES[name])


# The library.


@dataclass(frozen=True)
class Property:
    """`check(engine, **case)`, and for which engines, numbers of ranks and cases the tests ask it.

    If it `needs` them, it is for those alone that promise to be like one of `engines`; else for everybody.
    A case may say with "on" which of the engines it is for, and with "at" which of the sizes. `further` are sizes and
    cases of `--thorough`, and so are other engines than those that a case names with "first".
    """

    check: Callable
    group: str
    engines: tuple[str, ...]
    needs: bool
    sizes: tuple[int, ...]
    cases: tuple[dict, ...]
    further_sizes: tuple[int, ...]
    further_cases: tuple[dict, ...]

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def says(self) -> str:
        """What must be true, in one sentence."""
        return self.check.__doc__.split("\n")[0]

    def asked(self, thorough: bool = False) -> Iterable[tuple[int, str, dict]]:
        """(ranks, engine, case) of all that the tests ask."""
        sizes, cases = self.sizes, self.cases
        if thorough:
            sizes, cases = (*sizes, *self.further_sizes), (*cases, *self.further_cases)
        for size, engine, case in itertools.product(sizes, self.engines, cases):
            on = case.get("on", STAGES)
            if engine in (on if thorough else case.get("first", on)) and size in case.get("at", (size,)):
                yield size, engine, {key: value for key, value in case.items() if key not in ("on", "at", "first")}


def in_turn(**values: Iterable) -> tuple[dict, ...]:
    """A case for each combination. By default a stage is asked one, the next stage the next; in `--thorough` all."""
    combinations = zip(itertools.product(*values.values()), itertools.cycle(STAGES))
    return tuple({**dict(zip(values, each)), "first": (stage,)} for each, stage in combinations)


PROPERTIES: dict[str, Property] = {}


def holds(group: str, *, engines=None, sizes=(2,), cases=({},), further_sizes=(), further_cases=()):
    """Enter a property into the library. See `Property` for the arguments."""
    assert group in GROUPS, f"{group!r} is none of {', '.join(GROUPS)}"

    def enter(check):
        assert check.__name__ not in PROPERTIES, f"two properties are called {check.__name__}"
        assert check.__doc__, f"{check.__name__} does not say what must be true"
        more = sizes, cases, further_sizes, further_cases
        PROPERTIES[check.__name__] = Property(check, group, engines or STAGES, engines is not None, *more)
        return check

    return enter


def library() -> dict[str, Property]:
    """All properties, by name."""
    for module in pkgutil.iter_modules([str(HERE)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return PROPERTIES


def examine(name: str, engine: str | Subject, case: dict | None = None) -> list[Finding]:
    """Ask the property `name` of an engine, on every rank: [] if it holds there, else what was found.

    Only what a property says becomes a finding; other exceptions are raised, and so is `NotApplicable`.
    """
    global _asked
    engine = subject(engine) if isinstance(engine, str) else engine
    before, _asked = _asked, engine
    each = library()[name]
    if each.needs and engine.like not in each.engines:
        raise NotApplicable(f"{engine.name} does not promise to be {' or '.join(each.engines)}")
    try:
        each.check(engine, **(case or {}))
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if engine.foreign and Path(frames[-1].filename).parent != HERE:
            raise  # another engine's own way to refuse
        return [finding_of(error)]
    finally:
        _asked = before
    return []


def finding_of(error: AssertionError) -> Finding:
    """What an assertion says; of a plain `assert`, the line that is not true."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if isinstance(error, Differs):
        return Finding(error.what, error.expected, error.found, error.step, rank)
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == HERE]
    frame = ours[-1]
    line = linecache.getline(frame.filename, frame.lineno).strip()
    said = str(error) or "it does not hold"
    return Finding(f"{line} ({Path(frame.filename).name}, line {frame.lineno})", "that this holds", said, None, rank)

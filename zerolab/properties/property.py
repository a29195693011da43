"""What a property is: something that must be true of an engine, which runs on every rank and answers with findings.

    @holds("values", ask(ranks=(2, 3), steps=4))
    def adds_up(engine, steps):
        "Two backwards before a step add up."
        trained = engine(seeded(OddModel), SGD)          # as ZeRO1(model, optimizer_cls) would be written
        ...
        same("the weights", trained.full_state_dict(), expected, atol=1e-12)

`ask` is a case: which engines are asked, on how many ranks, with which arguments. `engine` is the one under test, a
`Subject`: it is called as a stage's class is. A property says with `same`, `expect`
and `refused` what must be; the first that is not so ends it and becomes its `Finding`. An `assert` does too, with less
to say. Nothing here knows pytest: tests, `check`, the museum and `conform` all ask `examine`.
"""

import contextlib
import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from zerolab.measure.held import buckets_of
from zerolab.run import engines

GROUPS = ("values", "bytes", "traffic", "order", "life", "misuse")
STAGES = tuple(engines.STAGES)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be, and on which rank."""

    what: str
    expected: str
    found: str
    rank: int

    def __str__(self):
        return f"rank {self.rank}: {self.what}\n  expected  {self.expected}\n  found     {self.found}"


class Differs(AssertionError):
    """An engine is not what it must be."""

    def __init__(self, what: str, expected, found):
        super().__init__(f"{what}: expected {expected}, found {found}")
        self.what, self.expected, self.found = what, str(expected), str(found)


class NotApplicable(Exception):
    """The engine documents nothing of the kind: there is nothing that could be right or wrong."""


# How a property says what must be.


def expect(right, what: str, expected, found) -> None:
    if not right:
        raise Differs(what, expected, found)


def same(what: str, found, expected, atol: float = 0.0) -> None:
    """`found` equals `expected`: a tensor to within `atol` (0: to the bit), a mapping of them name by name, or a value.

    To the bit is for what adds the same numbers in the same order on both sides; say there why it does.
    """
    if isinstance(expected, Mapping):
        expect(list(found) == list(expected), f"the names of {what}", list(expected), list(found))
        for name in expected:
            same(f"{what}, {name}", found[name], expected[name], atol)
    elif isinstance(expected, torch.Tensor):
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        expect(shape == tuple(expected.shape), f"the shape of {what}", tuple(expected.shape), shape)
        _same_elements(what, found.detach().to(expected).flatten(), expected.detach().flatten(), atol)
    else:
        expect(found == expected, what, expected, found)


def _same_elements(what: str, found: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    wrong = ~torch.isclose(found, expected, rtol=0, atol=atol, equal_nan=True)
    if wrong.any():
        first = wrong.nonzero()[0].item()
        right = f"{expected[first].item():.17g}, " + (f"to within {atol:g}" if atol else "to the bit")
        where = f"at element {first}; {int(wrong.sum())} of {wrong.numel()} differ"
        most = (found - expected).abs().max().item()
        raise Differs(what, right, f"{found[first].item():.17g} {where}, by {most:.3g} at most")


@contextlib.contextmanager
def refused(*words: str, error=RuntimeError) -> Iterator[list[str]]:
    """What stands inside raises one of the `error`s, with all `words` in its message: the one item of the list."""
    wanted = f"an error that says {', '.join(map(repr, words)) or 'what is wrong'}"
    foreign, said = _asked.foreign, []
    error = Exception if foreign else error  # others have errors of their own, and words
    try:
        yield said
    except NotApplicable:
        raise
    except error as raised:
        said.append(str(raised))
        if not foreign:
            missing = [word for word in words if word not in said[0]]
            expect(not missing, "the error's words", wanted, f"{type(raised).__name__}: {said[0]}")
        return
    if foreign:
        raise NotApplicable(f"{_asked.name} does not say that it refuses this")
    raise Differs("what cannot work", wanted, "no error")


_asked: "Subject"  # that is being examined


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
    chapter: bool = False  # it is asked what a chapter promises, and nothing else
    broadcasts: bool = True  # all ranks start from rank 0's weights; else they must have the same already
    more: dict = field(default_factory=dict)  # an exhibit's own save, load, scaler; what others say of themselves

    def __call__(self, model, optimizer_cls, **options):
        if options.get("units") == "the whole model":  # an option that can be written down, and sent to ranks
            options["units"] = [model]
        options = {key: value for key, value in options.items() if value is not None}
        if self.foreign and (unknown := sorted(options.keys() - self.takes)):
            raise NotApplicable(f"{self.name} has no option {unknown[0]}")
        return self.build(model, optimizer_cls, **options)

    def another(self) -> "Subject":
        """A stage that it is not like."""
        return subject(STAGES[STAGES.index(self.like) - 1] if self.like in STAGES else "zero1")

    @property
    def rank(self) -> int:
        """Who asks."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def foreign(self) -> bool:
        """Whether it is none of ours: it has what it documents, under `Foreign`, and errors in words of its own."""
        return self.takes is not None


def subject(name: str) -> Subject:
    """The engine `name` of the registry, or a chapter, as a subject."""
    if name in CHAPTERS:
        return Subject(name, CHAPTERS[name], like=name.removesuffix(".py"), chapter=True)
    if name in STAGES:
        return Subject(name, engines.STAGES[name], like=name)

    from zerolab.properties import foreign

    return foreign.subject(engines.ENGINES[name])


# The library.


@dataclass(frozen=True)
class PropertyCase:
    """Arguments of a property, and the engine, on so many ranks, of which the tests ask it with them."""

    ranks: int
    engine: str
    arguments: dict
    thorough: bool  # with --thorough alone


def _several(given) -> tuple:
    return given if isinstance(given, tuple) else (given,)


def ask(engines=STAGES, ranks=2, *, more_engines=STAGES, more_ranks=None, chapters=(), **arguments):
    """Cases: these engines (one, or several) are asked on so many ranks (one number, or several).

    With --thorough so are `more_engines`, and all of them on `more_ranks`: on three where it is asked on two, and the
    other way round. The classes of these `chapters` are asked as their engines are: the lesson promises it, too.
    """
    if more_ranks is None:
        more_ranks = {2: 3, 3: 2}.get(ranks, ())
    usual, sizes = [*_several(engines), *map(chapter_of, _several(chapters))], _several(ranks)
    found = []
    for size in (*sizes, *_several(more_ranks)):
        for name in dict.fromkeys([*usual, *_several(more_engines)]):
            further = name not in usual or size not in sizes
            found.append(PropertyCase(size, name, arguments, further))
    return found


only = partial(ask, more_engines=())  # these engines, and no others with --thorough


def ask_each(name: str, values: Iterable, *engines_and_ranks, asks=ask, **more) -> list[list[PropertyCase]]:
    """What `asks` returns for each value of the argument `name`."""
    return [asks(*engines_and_ranks, **more, **{name: value}) for value in values]


def ask_thorough(engines=STAGES, ranks=(2, 3), **arguments) -> list[PropertyCase]:
    """Cases that are asked with --thorough alone."""
    return ask((), (), more_engines=engines, more_ranks=ranks, **arguments)


@dataclass(frozen=True)
class Property:
    """`check(engine, **arguments)`, and the cases in which the tests ask it.

    If it is `of_stages` alone, it is for those that promise to be like one of its engines; else for everybody.
    """

    name: str
    says: str  # what must be true, in one sentence
    group: str
    check: Callable
    cases: list[PropertyCase]
    of_stages: bool

    @property
    def engines(self) -> tuple[str, ...]:
        asked = {case.engine for case in self.cases}
        return tuple(stage for stage in STAGES if stage in asked)


PROPERTIES: dict[str, Property] = {}


def holds(group: str, *cases: list[PropertyCase], of_stages: bool = False, name: str = "", says: str = ""):
    """Enter a function into the library, under its name and with the first line of its docstring, or with these.

    `stages_hold` does it for what is `of_stages` alone.
    """

    def enter(check):
        own = name or check.__name__
        assert own not in PROPERTIES, f"two properties are called {own}"
        sentence = says or check.__doc__.split("\n")[0]
        PROPERTIES[own] = Property(own, sentence, group, check, sum(cases or (ask(),), []), of_stages)
        return check

    return enter


stages_hold = partial(holds, of_stages=True)


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
    _asked = engine = subject(engine) if isinstance(engine, str) else engine
    each = library()[name]
    if each.of_stages and engine.like not in each.engines:
        raise NotApplicable(f"{engine.name} does not promise to be {' or '.join(each.engines)}")
    try:
        each.check(engine, **(case or {}))
    except AssertionError as error:
        if engine.foreign and raised_at(error)[0].parent != HERE:
            raise  # another engine's own way to refuse
        return [finding_of(error)]
    return []


def raised_at(error: Exception) -> tuple[Path, str]:
    """The file and the line that have raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename), last.line


def finding_of(error: AssertionError) -> Finding:
    """What an assertion says; of a plain `assert`, the line that is not true."""
    rank = dist.get_rank()
    if isinstance(error, Differs):
        return Finding(error.what, error.expected, error.found, rank)
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == HERE]
    frame, said = ours[-1], str(error) or "it does not hold"
    return Finding(f"{frame.line} ({Path(frame.filename).name}, line {frame.lineno})", "that this holds", said, rank)


# Chapters as subjects: with whole weights to compare, which a chapter does not give by itself.


class _WithWholeWeights:
    """What is added to a chapter's class so that a property can see its weights."""

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole weights, gathered from the shards, and this rank's buffers. A collective."""
        whole = {}
        for bucket in buckets_of(self):
            flat = bucket.shard.new_empty(bucket.numel)
            dist.all_gather_single(flat, bucket.shard.contiguous(), group=bucket.group)
            for index, param in enumerate(bucket.params):
                whole[id(param)] = bucket.place(flat, index).clone()
        state = self.model.state_dict(keep_vars=True)
        return {name: whole.get(id(tensor), tensor.detach()) for name, tensor in state.items()}


def subject_class(chapter: type) -> type:
    return type(chapter.__name__, (_WithWholeWeights, chapter), {})


def chapter_of(stage: str) -> str:
    """The name under which the class of a chapter is asked."""
    return f"{stage}.py"


CHAPTERS = {chapter_of(name): subject_class(chapter) for name, chapter in engines.CHAPTERS.items()}

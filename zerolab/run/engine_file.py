"""Adds the engine in your own file to the registry: `--engine-file FILE.py`. docs/your-engine.md shows an example.

The file has `build(model, optimizer, device)`, which puts an engine around `model`; `optimizer` is a torch optimizer
over the model's parameters. It returns anything with `model`, `optimizer`, and either
`training_step(inputs, targets, loss_fn)` or `__call__`, `step()` and `zero_grad()`. `COUNTERPART` names an engine that
it is compared with, and `SUPPORTS` lists more features for the conformance tests to check.
"""

import contextlib
import inspect
import runpy
import sys
import traceback
from functools import partial
from pathlib import Path

import torch

from zerolab.run import engines
from zerolab.run.engines import ENGINES, Engine
from zerolab.run.micro_batches import Looped

LOOP = ("__call__", "step", "zero_grad")
ARGUMENTS = ["model", "optimizer", "device"]
FEATURES = {  # what SUPPORTS may list
    "groups": "several parameter groups",
    "dtypes": "parameters of several dtypes",
    "keywords": "keyword arguments of the model's forward",
}


def chosen(options, command: str) -> list[str]:
    """The engines of `--engines`, and of every `--engine-file`, as names of the registry. Raises ValueError."""
    own = enter(options.engine_file)
    return list(dict.fromkeys([*engines.chosen(options.engines, command), *own]))


def enter(paths: list[str]) -> list[str]:
    """The names of the engines in the files `paths`, which are in the registry from here on.

    Raises ValueError for a file without an engine, and for a name that is taken.
    """
    names = []
    for given in paths:
        try:
            names.append(_enter(Path(given)))
        except ValueError as error:
            raise ValueError(f"--engine-file {given}: {error}") from error
    return names


def _enter(path: Path) -> str:
    name = path.stem
    if name in ENGINES:
        raise ValueError(f"the name {name!r} is taken, so rename the file")
    found = _load(path)
    build, counterpart = found.get("build"), found.get("COUNTERPART")
    if not callable(build):
        raise ValueError("it must have a function build(model, optimizer, device)")
    _check_signature(build, path)
    if counterpart not in [None, *ENGINES]:
        raise ValueError(f"COUNTERPART is {counterpart!r}, and must be one of {', '.join(ENGINES)}")
    supports = found.get("SUPPORTS", ())
    if not isinstance(supports, (tuple, list)) or not set(supports) <= set(FEATURES):
        raise ValueError(f"SUPPORTS is {supports!r}, and must be a tuple of names among {', '.join(FEATURES)}")
    ENGINES[name] = Engine(
        name,
        name,
        partial(_built, build),
        shards=ENGINES[counterpart].shards if counterpart else (),
        sends=ENGINES[counterpart].sends if counterpart else None,
        counterpart=counterpart,
        exact=False,  # the float64 pass of the referee decides
        file=str(path),
        supports=tuple(supports),
    )
    return name


def _check_signature(build, path: Path) -> None:
    """Raise ValueError if `build` has other arguments, as in a file that expects an optimizer's class."""
    signature = inspect.signature(build)
    required = [name for name, each in signature.parameters.items() if each.default is inspect.Parameter.empty]
    if required != ARGUMENTS:
        code = getattr(build, "__code__", None)
        line = f", line {code.co_firstlineno}" if code else ""
        raise ValueError(
            f"{path.name}{line}: build{signature} must be build(model, optimizer, device), where `optimizer` "
            "is a torch optimizer over the model's parameters"
        )


def _load(path: Path) -> dict:
    """The names that the file defines. Raises ValueError if it cannot be run."""
    sys.path.append(str(path.parent.resolve()))  # for modules in the same folder
    try:
        return runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise ValueError(f"it cannot be imported: {where(error, str(path))}") from error


class NoEngine(RuntimeError):
    """A file's `build` returned something that is not an engine."""


def _built(build, model, optimizer, device) -> "_OfAFile":
    engine = build(model, optimizer, device)
    wanted = ["model", "optimizer"]
    if not hasattr(engine, "training_step"):
        wanted += LOOP
    kind = type(engine).__name__
    for name in wanted:
        if not hasattr(engine, name):
            raise NoEngine(f"build returned a {kind}, which has no `{name}`")
    for name, needed in (("model", torch.nn.Module), ("optimizer", torch.optim.Optimizer)):
        if not isinstance(there := getattr(engine, name), needed):
            raise NoEngine(
                f"build returned a {kind} whose `{name}` is of type {type(there).__name__}. It must be a torch "
                f"{needed.__name__}, because that is where memory is counted"
            )
    return _OfAFile(engine)


class _OfAFile(Looped):
    """An engine as `build` has returned it, with a `training_step` if it has none."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def __call__(self, *inputs, **named):
        return self._engine(*inputs, **named)

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        own = getattr(self._engine, "training_step", super().training_step)
        loss = own(inputs, targets, loss_fn)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise NoEngine(f"training_step must return this rank's loss, a tensor of one element, and returned {loss}")
        return loss.detach()


def where(error: BaseException, path: str) -> str:
    """One line: the last line of the file that the error came through, and its message."""
    message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if is_in(frame, path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    at = f", line {lines[-1]}" if lines else ""
    return f"{Path(path).name}{at}: {message}"


def is_in(frame: traceback.FrameSummary, path: str) -> bool:
    return Path(frame.filename).resolve() == Path(path).resolve()


@contextlib.contextmanager
def named_in_errors():
    """Inside, an exception out of an engine's file becomes a RuntimeError with the line and the traceback there."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        for file in filter(None, (engine.file for engine in ENGINES.values())):
            inside = [is_in(frame, file) for frame in frames]
            if any(inside):
                own = traceback.format_list(frames[inside.index(True) :])  # what called the file is not the user's
                raise RuntimeError(f"{where(error, file)}\n{''.join(own)}".rstrip("\n")) from error
        raise

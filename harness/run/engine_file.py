"""An engine out of a file of yours, as an entry of the registry: `--engine-file FILE.py`. docs/your-engine.md has one.

The file has `build(model, optimizer_cls, device)`, which puts an engine around `model`; `optimizer_cls` is a torch
optimizer class with its options bound. It returns anything with `model`, `optimizer`, and either
`training_step(inputs, targets, loss_fn)` or `__call__`, `step()` and `zero_grad()`. `COUNTERPART` names an engine that
it is compared with, and `TITLE` is what figures call it.
"""

import contextlib
import gc
import importlib.util
import inspect
import os
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from harness.run import engines, process_group
from harness.run.engines import ENGINES, Engine
from harness.run.micro_batches import Looped
from harness.run.model import GPT, preset

LOOP = ("__call__", "step", "zero_grad")


def add_option(parser) -> None:
    help = "an engine of yours, see docs/your-engine.md; may be given several times"
    parser.add_argument("--engine-file", metavar="FILE.py", action="append", default=[], help=help)


def chosen(options, command: str, known: tuple[str, ...]) -> list[str]:
    """The engines of `--engines`, and of every `--engine-file`, as names of the registry. Raises ValueError."""
    own = enter(options.engine_file, command, trial="ZERO_PREFLIGHT" in os.environ)  # before ranks are started
    names = engines.chosen(options.engines, command, (*known, *own))
    return list(dict.fromkeys([*names, *own]))


def enter(paths: list[str], on: str, trial: bool = False) -> list[str]:
    """The names of the engines in the files `paths`, which are in the registry from here on, run by the command `on`.

    Raises ValueError for what is no such file, and for a name that is taken. In a `trial`, each `build` is called once
    on a small model in a group of one process: ValueError, too, if it returns no engine.
    """
    for given in paths:
        try:
            _enter(Path(given), on)
            if trial:
                _try(Path(given).stem)
        except (ValueError, NoEngine) as error:
            raise ValueError(f"--engine-file {given}: {error}") from error
    return [Path(given).stem for given in paths]


def _enter(path: Path, on: str) -> None:
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"it must be a Python file, FILE.py, and there is none at {path.resolve()}")
    if path.stem in ENGINES:
        raise ValueError(f"the name {path.stem!r} is taken, so rename the file")
    if "," in path.stem:
        raise ValueError("a name with a comma looks like two names, so rename the file")
    module = _load(path)
    build, counterpart = getattr(module, "build", None), getattr(module, "COUNTERPART", None)
    title = getattr(module, "TITLE", path.stem)
    if not callable(build) or not _takes_three(build):
        raise ValueError("it must have a function build(model, optimizer_cls, device)")
    if counterpart is not None and counterpart not in [*ENGINES]:
        raise ValueError(f"COUNTERPART is {counterpart!r}, and must be one of {', '.join(ENGINES)}")
    if not isinstance(title, str) or not title:
        raise ValueError(f"TITLE is {title!r}, and must be a string that is not empty")
    ENGINES[path.stem] = Engine(
        path.stem, title, partial(_built, build), counterpart and ENGINES[counterpart].promise, frozenset([on]),
        frozenset(), counterpart, line="--", mark="*", file=str(path),
    )  # fmt: skip


def _load(path: Path):
    """The file as a module. Raises ValueError if it cannot be imported."""
    spec = importlib.util.spec_from_file_location(f"engine_file_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent.resolve()))  # for what lies beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"it cannot be imported: {where(error, str(path))}") from error
    return module


def _takes_three(build) -> bool:
    try:
        inspect.signature(build).bind("model", "optimizer_cls", "device")
    except TypeError:
        return False
    return True


def _try(name: str) -> None:
    """Build it once. An exception in it is no reason to refuse it here: the referee will tell of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ENGINES[name].build(GPT(preset("toy")), partial(torch.optim.AdamW, lr=1e-3), torch.device("cpu"))
    except NoEngine:
        raise
    except (Exception, SystemExit):
        pass
    finally:
        process_group.leave()


class NoEngine(TypeError):
    """What `build` has returned is no engine."""


def _built(build, model, optimizer_cls, device) -> "_OfAFile":
    engine = build(model, optimizer_cls, device)
    kind = type(engine).__name__
    for name, wanted in (("model", torch.nn.Module), ("optimizer", torch.optim.Optimizer)):
        if not hasattr(engine, name):
            raise NoEngine(f"build returned a {kind}, which has no `{name}`")
        found = getattr(engine, name)
        if not isinstance(found, wanted):
            raise NoEngine(f"`{name}` of what build returned is a {type(found).__name__} and no {wanted.__name__}")
    lacks = [name for name in LOOP if not callable(getattr(engine, name, None))]
    if lacks and not callable(getattr(engine, "training_step", None)):
        raise NoEngine(f"build returned a {kind} without `training_step`, so it must have {', '.join(LOOP)}, but has "
                       f"no `{lacks[0]}`")  # fmt: skip
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
            found = f"a tensor of the shape {[*loss.shape]}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise NoEngine(f"training_step must return this rank's loss, a tensor of one element, and returned {found}")
        return loss.detach()


def where(error: BaseException, path: str) -> str:
    """One line: the last line of the file that the error came through, and what it says."""
    said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if isinstance(error, SyntaxError):
        lines = [error.lineno] if error.lineno else []
    else:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if _same(frame.filename, path)]
    at = f", line {lines[-1]}" if lines else ""
    return f"{Path(path).name}{at}: {said}"


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


@contextlib.contextmanager
def one_line():
    """Inside, an exception out of an engine's file becomes a RuntimeError that names the line there."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        for file in (engine.file for engine in ENGINES.values() if engine.file):
            if any(_same(frame.filename, file) for frame in frames):
                raise RuntimeError(where(error, file)) from error
        raise


def attempt(name: str, work, me: process_group.Rank, failed: dict[str, str]):
    """`work()`, of the engine `name`; an exception in an engine of a file does not end the others' runs. All call it.

    Then None is returned on every rank, and `failed[name]` says on which rank and at which line. The rank that fails
    leaves the process group, which ends the collectives in which others wait for it (over gloo at once, over NCCL the
    run ends). Afterwards all ranks meet in a new group. Raises RuntimeError, which ends the run, if a rank hangs.
    """
    if ENGINES[name].file is None:
        return work()
    store, result, said = process_group.store(), None, ""
    try:
        result = work()
    except (Exception, SystemExit) as error:
        said = f"rank {me.rank}: {where(error, ENGINES[name].file)}"
    if said:
        gc.collect()  # what is left of the engine keeps the group alive
        process_group.leave()
    everyone = process_group.tell(f"{name} has ended", said, me, store)
    if not any(everyone):
        return result
    process_group.leave()
    process_group.start_again(me, store)
    # Who has waited for the rank that failed says so; the first to fail says why.
    failed[name] = next((each for each in everyone if each and not process_group.lost(each)), max(everyone))
    return None

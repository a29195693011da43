"""An engine out of a file of yours, as an entry of the registry: `--engine-file FILE.py`. docs/your-engine.md has one.

The file has `build(model, optimizer_cls, device)`, which puts an engine around `model`; `optimizer_cls` is a torch
optimizer class with its options bound. It returns anything with `model`, `optimizer`, and either
`training_step(inputs, targets, loss_fn)` or `__call__`, `step()` and `zero_grad()`. `COUNTERPART` names an engine that
it is compared with, and `TITLE` is what figures call it.
"""

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
from torch.profiler import record_function

from harness.run import engines, process_group
from harness.run.engines import ENGINES, Engine
from harness.run.model import GPT, preset

LOOP = ("__call__", "step", "zero_grad")


def add_option(parser) -> None:
    parser.add_argument(
        "--engine-file", metavar="FILE.py", action="append", default=[],
        help="an engine of yours, see docs/your-engine.md; may be given several times",
    )  # fmt: skip


def chosen(options, command: str, known: tuple[str, ...]) -> list[str]:
    """The engines of `--engines`, and of every `--engine-file`, as names of the registry. Raises ValueError."""
    own = enter(options.engine_file, command)
    names = engines.chosen(options.engines, command, (*known, *own))
    return list(dict.fromkeys([*names, *own]))


def enter(paths: list[str], on: str) -> list[str]:
    """The names of the engines in the files `paths`, which are in the registry from here on, run by the command `on`.

    Raises ValueError for what is no such file, and for a name that is taken. Before ranks are started, each `build` is
    tried on a small model in a group of one process: ValueError, too, if it returns no engine.
    """
    names = []
    for given in paths:
        path = Path(given)
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(f"--engine-file must be a Python file, FILE.py, got {given!r}")
        if path.stem in ENGINES:
            raise ValueError(f"--engine-file {given}: the name {path.stem!r} is taken, so rename the file")
        module = _load(path)
        build, counterpart = getattr(module, "build", None), getattr(module, "COUNTERPART", None)
        if not callable(build) or not _takes_three(build):
            raise ValueError(f"--engine-file {given} must have a function build(model, optimizer_cls, device)")
        if counterpart is not None and counterpart not in ENGINES:
            raise ValueError(f"--engine-file {given}: no engine {counterpart!r} for COUNTERPART; there are: "
                             f"{', '.join(ENGINES)}")  # fmt: skip
        ENGINES[path.stem] = Engine(
            path.stem, getattr(module, "TITLE", path.stem), partial(_built, build, str(path)), frozenset([on]),
            frozenset(), counterpart, line="--", mark="*", file=str(path),
        )  # fmt: skip
        names.append(path.stem)
        if "ZERO_PREFLIGHT" in os.environ:
            _try(path.stem)
    return names


def _load(path: Path):
    """The file as a module. Raises ValueError if it cannot be imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # for what lies beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--engine-file {path} cannot be imported: {where(error, str(path))}") from error
    sys.modules[path.stem] = module
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
        adamw = partial(torch.optim.AdamW, lr=1e-3)
        ENGINES[name].build(GPT(preset("toy")), adamw, torch.device("cpu"))
    except NoEngine as error:
        raise ValueError(f"--engine-file {ENGINES[name].file}: {error}") from error
    except Exception:
        pass
    finally:
        dist.destroy_process_group()


class NoEngine(TypeError):
    """What `build` has returned is no engine."""


def _built(build, path: str, model, optimizer_cls, device):
    engine = build(model, optimizer_cls, device)
    lacks = [name for name in ("model", "optimizer") if not hasattr(engine, name)]
    if lacks:
        raise NoEngine(f"build returned a {type(engine).__name__}, which has no `{lacks[0]}`")
    if not isinstance(engine.model, torch.nn.Module):
        raise NoEngine(f"`model` of what build returned is a {type(engine.model).__name__} and no torch.nn.Module")
    if not hasattr(engine.optimizer, "register_step_pre_hook"):
        kind = type(engine.optimizer).__name__
        raise NoEngine(f"`optimizer` of what build returned is a {kind} and no torch.optim.Optimizer")
    if callable(getattr(engine, "training_step", None)):
        return engine
    lacks = [name for name in LOOP if not callable(getattr(engine, name, None))]
    if lacks:
        raise NoEngine(f"build returned a {type(engine).__name__} without `training_step`, so it must have "
                       f"{', '.join(LOOP)}, but has no `{lacks[0]}`")  # fmt: skip
    return _Looped(engine)


class _Looped:
    """An engine that is used in a loop, with a `training_step`; everything else is the engine's own."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def __call__(self, *inputs, **named):
        return self._engine(*inputs, **named)

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        with record_function("step 1 forward"):
            loss = loss_fn(self._engine(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()
        self._engine.step()
        self._engine.zero_grad()
        return loss.detach()


def where(error: BaseException, path: str) -> str:
    """One line: the last line of the file that the error came through, and what it says."""
    said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if isinstance(error, SyntaxError):
        return f"{Path(path).name}, line {error.lineno}: {said}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == Path(path).resolve()
    ]
    return f"{Path(path).name}, line {frames[-1].lineno}: {said}" if frames else f"{Path(path).name}: {said}"


def attempt(name: str, work, me: process_group.Rank, failed: dict[str, str]):
    """`work()`, of the engine `name`; an exception in an engine of a file does not end the others' runs. All call it.

    Then None is returned on every rank, and `failed[name]` says on which rank and at which line. The rank that fails
    leaves the process group, which ends the collectives in which others wait for it (over gloo at once, over NCCL the
    run ends). Afterwards all ranks meet in a new group.
    """
    if ENGINES[name].file is None:
        return work()
    result, said = None, ""
    try:
        result = work()
    except Exception as error:
        said = f"rank {me.rank}: {where(error, ENGINES[name].file)}"
    if said:
        gc.collect()  # what is left of the engine keeps the group alive
        store = process_group.leave()
    everyone = process_group.tell(f"{name} has run", said, me, store if said else None)
    if not any(everyone):
        return result
    process_group.start_again(me, store if said else process_group.leave())
    # Who has waited for the rank that failed says so; the first to fail says why.
    failed[name] = next((each for each in everyone if each and not process_group.lost(each)), max(everyone))
    return None

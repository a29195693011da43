"""The registry: every engine is an entry in engines.toml, with its name, order, builder and look in every command.

To add an engine, write its entry. `./launch.sh compare --engines NAME` then knows it; with the command's word in `on`
it runs there without being asked for.
"""

import importlib.util
import pkgutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3
from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine
from zerolab.run import counterparts
from zerolab.run.command_line import did_you_mean

CHAPTERS = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}
STAGES = {"zero1": ZeRO1Engine, "zero2": ZeRO2Engine, "zero3": ZeRO3Engine}  # the engines, subclasses of the chapters
DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # to compute and gather in; gradients are reduced in float32


def a_chapter_does(dtype=None, mesh=None, **options) -> bool:
    """Whether these options are those of a chapter. All others are the engines' alone."""
    return dtype is None and not isinstance(mesh, DeviceMesh) and options.keys() <= {"bucket_mb", "prefetch", "units"}


def who_trained(names, **options) -> str:
    """A line under a table: whether the stages among `names`, built with `options`, were chapters or engines."""
    stages = ", ".join(name for name in names if name in CHAPTERS)
    if not stages:
        return "No chapter is among them."
    if a_chapter_does(**options):
        return f"{stages}: the chapters themselves, zero1.py to zero3.py."
    return f"{stages}: the engines of zerolab/engine, for an option that the chapters lack."


def stage_or_chapter(model, optimizer_cls, device, stage, dtype=None, mesh=None, engine=False, **options):
    """The chapter `stage`. Its engine where an option asks for what only engines have, or where `engine` is True."""
    if not engine and a_chapter_does(dtype, mesh, **options):
        return CHAPTERS[stage](model, optimizer_cls, group=mesh, **options)
    return stage_engine(model, optimizer_cls, device, STAGES[stage], dtype, mesh, **options)


def stage_engine(model, optimizer_cls, device, cls=counterparts.ZeRO1By2Psi, dtype=None, mesh=None, **options):
    """A subclass of a chapter, of zerolab.engine or of `counterparts`."""
    reduce_dtype = None if dtype is None else torch.float32
    return cls(model, optimizer_cls, group=mesh, param_dtype=dtype, reduce_dtype=reduce_dtype, **options)


@dataclass(frozen=True)
class Engine:
    """One engine.

    `build(model, optimizer_cls, device, **options)` puts it around `model`; `optimizer_cls` is a torch optimizer
    class with its options bound, and of `options` those in `takes` are known: "dtype" to compute in, "mesh"
    (replicas, shards), "offload_policy", "bucket_mb" (MiB), "prefetch" (units), "engine" (True: no chapter).
    `counterpart` is the name of torch's own engine that does the same. `promise`: (what its ranks share out between
    steps, the Ψ (N-1)/N elements that a rank sends in a step); None: nothing is known of it. `on` are the commands
    that run it unasked. `rows`: its ranks are rows that are copies of each other, which only the planner lays out.
    `casts` says that it computes in a low precision with plain casts of its weights (`MixedModule`). `exact`: in
    two ranks it adds the same two numbers as DDP, and hands the same values to the same operations of the
    optimizer, so its losses must equal DDP's to the bit. `needs` is a package that `pip install .[peers]` brings,
    and `file` a file of the user's (engine_file.py). `shade`, `line` and `mark` draw it: an engine is no part and
    no activity, so it has a tone of grey, a line and a mark, and its name beside it.
    """

    name: str
    title: str
    build: Callable
    on: list[str]
    takes: list[str]
    promise: tuple[list[str], int] | None = None
    counterpart: str | None = None
    rows: bool = False
    casts: bool = False
    exact: bool = True
    needs: str | None = None
    file: str | None = None
    shade: str = "#717680"
    line: str = "-"
    mark: str = "o"


ENGINES: dict[str, Engine] = {}
for _name, _said in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
    _build = partial(pkgutil.resolve_name(_said.pop("build")), **_said.pop("options", {}))
    ENGINES[_name] = Engine(_name, build=_build, **_said)

PAIRS = tuple((engine.name, engine.counterpart) for engine in ENGINES.values() if engine.counterpart)


def named(command: str) -> tuple[str, ...]:
    """The engines that `command` runs when none are named, in the order of its tables."""
    return tuple(engine.name for engine in ENGINES.values() if command in engine.on)


def installed(name: str) -> bool:
    """Whether the package that the engine `name` needs is there."""
    return ENGINES[name].needs is None or importlib.util.find_spec(ENGINES[name].needs) is not None


def chosen(given: str | None, command: str, known: tuple[str, ...] | None = None) -> list[str]:
    """The engines of an option `--engines a,b` (None: the command's own), each once.

    `known` are those that the command can run (default: all). Raises ValueError for another name, and for none.
    """
    known = tuple(ENGINES) if known is None else known
    given = ",".join(name for name in named(command) if name in known) if given is None else given
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise ValueError(f"no engine {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}")
        if not installed(name):
            package = ENGINES[name].needs
            raise ValueError(f"{name} needs {package}, which is not installed: pip install '.[peers]' brings it")
    if not names:
        raise ValueError(f"--engines is empty; there are: {', '.join(known)}")
    return names


def build(name: str, model: nn.Module, optimizer_cls, device: torch.device, **options):
    """The engine `name` around `model`. Options that are None are left to the engine.

    Raises ValueError for an option that it does not take.
    """
    engine, options = ENGINES[name], {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(options.keys() - engine.takes):
        raise ValueError(f"{name} takes no {unknown[0]}; it takes: {', '.join(sorted(engine.takes))}")
    return engine.build(model, optimizer_cls, device, **options)

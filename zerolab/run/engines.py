"""The registry: every engine is an `Engine` in the list below, with its name, order and builder in every command.

To add an engine, write a function that builds it, add an entry, and add its name to `ENGINES` in names.py, which also
has what it shards and the commands that run it by default. CONTRIBUTING.md has all steps.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3
from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine
from zerolab.run import counterparts, deepspeed_engine, names
from zerolab.run.shared_options import split

CHAPTERS = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}
STAGES = {"zero1": ZeRO1Engine, "zero2": ZeRO2Engine, "zero3": ZeRO3Engine}  # the engines, subclasses of the chapters
DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # to compute and gather in; gradients are reduced in float32


def chapter_supports(dtype=None, mesh=None, **options) -> bool:
    """Whether a chapter has these options. Only engines have the others."""
    return dtype is None and not isinstance(mesh, DeviceMesh) and options.keys() <= {"bucket_mb", "prefetch", "units"}


def who_trained(engines, **options) -> str:
    """A line under a table: whether the stages among `engines`, built with `options`, were chapters or engines."""
    stages = ", ".join(name for name in engines if name in CHAPTERS)
    if not stages:
        return "No chapter is among them."
    if chapter_supports(**options):
        return f"{stages}: the chapters themselves, zero1.py to zero3.py."
    return f"{stages}: the engines of zerolab/engine, for an option that the chapters lack."


# Functions that build an engine: `build(model, optimizer, device, **options)`.


def stage(chapter, engine_class, model, optimizer, device, dtype=None, mesh=None, engine=False, **options):
    """The chapter. The engine where an option asks for what only engines have, or where `engine` is True."""
    if not engine and chapter_supports(dtype, mesh, **options):
        return chapter(model, optimizer, group=mesh, **options)
    reduce_dtype = None if dtype is None else torch.float32
    return engine_class(model, optimizer, group=mesh, param_dtype=dtype, reduce_dtype=reduce_dtype, **options)


@dataclass(frozen=True)
class Engine:
    """One engine.

    name         what commands call it
    title        what tables and figures call it
    build        `build(model, optimizer, device, **options)`, where `optimizer` is a torch optimizer over the model's
                 parameters. It may change the optimizer, or make another one of the same class and options
    shards       what its ranks divide between steps: from names.py
    takes        the options that `build` supports: "dtype" to compute in, "mesh" (replicas, shards), "offload_policy",
                 "bucket_mb" (MiB), "prefetch" (units), "engine" (True: no chapter), "whole" (parameters not to cut)
    sends        how many times Ψ (N-1)/N elements a rank sends in a step. None if nothing is known of it
    counterpart  the name of torch's own engine that does the same
    casts        it computes in a low precision with plain casts of its weights (`MixedModule`)
    exact        on two ranks it adds the same two numbers as DDP and passes the same values to the same operations of
                 the optimizer, so its losses must equal DDP's to the bit
    float64      it can train in float64
    needs        a package that `pip install .[peers]` installs
    file         a file of the user's (engine_file.py)
    supports     the features that this file lists in SUPPORTS
    """

    name: str
    title: str
    build: Callable
    takes: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    sends: int | None = None
    counterpart: str | None = None
    casts: bool = False
    exact: bool = True
    float64: bool = True
    needs: str | None = None
    file: str | None = None
    supports: tuple[str, ...] = ()

    @property
    def promise(self) -> tuple[tuple[str, ...], int] | None:
        """(shards, sends), or None if nothing is known of the engine."""
        return None if self.sends is None else (self.shards, self.sends)


_ENTRIES = [
    Engine(
        "single",
        "one process",
        counterparts.single,
        takes=("dtype",),
        sends=0,
        casts=True,
    ),
    Engine(
        "ddp",
        "DDP",
        counterparts.ddp,
        takes=("dtype", "bucket_mb"),
        sends=2,
        casts=True,
    ),
    Engine(
        "zero1",
        "ZeRO-1",
        partial(stage, ZeRO1, ZeRO1Engine),
        takes=("dtype", "mesh", "offload_policy", "bucket_mb", "engine", "whole"),
        sends=3,
        counterpart="zero_redundancy_optimizer",
    ),
    Engine(
        "zero1_2psi",
        "ZeRO-1 (the paper's, 2Ψ)",
        partial(stage, counterparts.ZeRO1By2Psi, counterparts.ZeRO1EngineBy2Psi),
        takes=("dtype", "mesh", "offload_policy", "bucket_mb"),
        sends=2,
    ),
    Engine(
        "zero_redundancy_optimizer",
        "ZeroRedundancyOptimizer",
        counterparts.zero_redundancy_optimizer,
        takes=("dtype",),
        sends=3,
        casts=True,
    ),
    Engine(
        "zero2",
        "ZeRO-2",
        partial(stage, ZeRO2, ZeRO2Engine),
        takes=("dtype", "mesh", "offload_policy", "bucket_mb", "engine", "whole"),
        sends=2,
        counterpart="fsdp2_no_reshard",
    ),
    Engine(
        "fsdp2_no_reshard",
        "FSDP2 without resharding",
        counterparts.fsdp2_no_reshard,
        takes=("dtype", "mesh", "offload_policy"),
        sends=2,
    ),
    Engine(
        "zero3",
        "ZeRO-3",
        partial(stage, ZeRO3, ZeRO3Engine),
        takes=("dtype", "mesh", "offload_policy", "prefetch", "engine", "whole"),
        sends=3,
        counterpart="fsdp2",
    ),
    Engine(
        "zero3-prefetch0",
        "ZeRO-3, prefetch 0",
        partial(stage, ZeRO3, ZeRO3Engine, prefetch=0),
        takes=("dtype", "mesh", "offload_policy"),
        sends=3,
    ),
    Engine(
        "fsdp2",
        "FSDP2",
        counterparts.fsdp2,
        takes=("dtype", "mesh", "offload_policy"),
        sends=3,
    ),
    Engine(
        "fsdp1",
        "FSDP1",
        counterparts.fsdp1,
        takes=("dtype",),
        sends=3,
    ),
    Engine(
        "fsdp1_article",
        "FSDP1, wrapped by size",
        counterparts.fsdp1_article,
        takes=("dtype",),
        sends=3,
    ),
    # By its documentation DeepSpeed's first stage all-reduces by default (`use_multi_rank_bucket_allreduce`).
    Engine(
        "deepspeed1",
        "DeepSpeed, stage 1",
        partial(deepspeed_engine.build, stage=1),
        takes=("dtype",),
        sends=3,
        exact=False,
        float64=False,
        needs="deepspeed",
    ),
    Engine(
        "deepspeed2",
        "DeepSpeed, stage 2",
        partial(deepspeed_engine.build, stage=2),
        takes=("dtype",),
        sends=3,
        exact=False,
        float64=False,
        needs="deepspeed",
    ),
    Engine(
        "deepspeed3",
        "DeepSpeed, stage 3",
        partial(deepspeed_engine.build, stage=3),
        takes=("dtype",),
        sends=3,
        exact=False,
        float64=False,
        needs="deepspeed",
    ),
]

if [engine.name for engine in _ENTRIES] != list(names.ENGINES):
    raise ValueError("zerolab/run/names.py must list the engines of engines.py, in the same order")
ENGINES: dict[str, Engine] = {}
for engine in _ENTRIES:
    ENGINES[engine.name] = replace(engine, shards=names.ENGINES[engine.name].shards)
PAIRS = tuple((engine.name, engine.counterpart) for engine in _ENTRIES if engine.counterpart)


def installed(name: str) -> bool:
    """Whether the package that the engine `name` needs is installed."""
    return ENGINES[name].needs is None or importlib.util.find_spec(ENGINES[name].needs) is not None


def chosen(given: str | None, command: str) -> list[str]:
    """The engines of an option `--engines a,b` (None: the command's default), each once.

    The command's options have checked the names. Raises ValueError if a package is not installed.
    """
    found = list(dict.fromkeys(names.engines_of(command) if given is None else split(given)))
    for name in found:
        if not installed(name):
            package = ENGINES[name].needs
            raise ValueError(f"{name} needs {package}, which is not installed: pip install '.[peers]' installs it")
    return found


def build(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options):
    """The engine `name` around `model`. Options that are None are left to the engine.

    Raises ValueError for an option that it does not support.
    """
    engine = ENGINES[name]
    options = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(options.keys() - set(engine.takes)):
        raise ValueError(
            f"{name} does not support the option {unknown[0]}; it supports: {', '.join(sorted(engine.takes))}"
        )
    return engine.build(model, optimizer, device, **options)

"""The registry: every engine is one entry here, and every command takes names, order, builders and styles from it.

To add an engine, write its entry. `./launch.sh compare --engines NAME` then knows it; with the command's word in `on`
it runs there without being asked for.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine
from harness.run import counterparts, deepspeed_engine
from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

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
    return f"{stages}: the engines of harness/engine, for an option that the chapters lack."


def _stage(name, model, optimizer_cls, device, dtype=None, mesh=None, engine=False, **options):
    """The chapter `name`. Its engine where an option asks for what only engines have, or where `engine` is True."""
    if not engine and a_chapter_does(dtype, mesh, **options):
        return CHAPTERS[name](model, optimizer_cls, group=mesh, **options)
    reduce_dtype = None if dtype is None else torch.float32
    return STAGES[name](model, optimizer_cls, group=mesh, param_dtype=dtype, reduce_dtype=reduce_dtype, **options)


def _two_psi(model, optimizer_cls, device, dtype=None, mesh=None, **options):
    reduce_dtype = None if dtype is None else torch.float32
    cls = counterparts.ZeRO1By2Psi
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
    promise: tuple[tuple[str, ...], int] | None
    on: frozenset[str]
    takes: frozenset[str]
    counterpart: str | None = None
    rows: bool = False
    casts: bool = False
    exact: bool = True
    needs: str | None = None
    file: str | None = None
    shade: str = "#717680"
    line: str = "-"
    mark: str = "o"


def _entry(name: str, title: str, build, promise, on: str, takes: str, **more) -> tuple[str, Engine]:
    return name, Engine(name, title, build, promise, frozenset(on.split()), frozenset(takes.split()), **more)


ALL = "compare memory bench plan watch conform"
BUCKETS, UNITS = "dtype mesh offload_policy bucket_mb engine", "dtype mesh offload_policy prefetch engine"
DARK, MIDDLE, LIGHT = "#60656c", "#717680", "#888c92"

NOTHING, STATE, GRADIENTS = (), ("optimizer",), ("gradients", "optimizer")
ALL_PARTS = ("parameters", *GRADIENTS)

ENGINES: dict[str, Engine] = dict([
    _entry("single", "one process", counterparts.single, (NOTHING, 0), "compare", "dtype", casts=True,
           shade=LIGHT, line=":", mark="x"),
    _entry("ddp", "DDP", counterparts.ddp, (NOTHING, 2), ALL, "dtype bucket_mb", casts=True, shade=DARK),
    _entry("zero1", "ZeRO-1", partial(_stage, "zero1"), (STATE, 3), f"{ALL} sweeps", BUCKETS,
           counterpart="zero_redundancy_optimizer", shade=LIGHT, mark="s"),
    _entry("zero1_2psi", "ZeRO-1 (the paper's, 2Ψ)", _two_psi, (STATE, 2),
           "plan scale", BUCKETS, line="-.", mark="v"),
    _entry("zero_redundancy_optimizer", "ZeroRedundancyOptimizer", counterparts.zero_redundancy_optimizer, (STATE, 3),
           "compare bench conform", "dtype", casts=True, shade=LIGHT, line="--", mark="s"),
    _entry("zero2", "ZeRO-2", partial(_stage, "zero2"), (GRADIENTS, 2), f"{ALL} sweeps scale", BUCKETS,
           counterpart="fsdp2_no_reshard", mark="^"),
    _entry("fsdp2_no_reshard", "FSDP2 without resharding", partial(counterparts.fsdp2, reshard_after_forward=False),
           (ALL_PARTS, 2), "compare memory bench plan conform", "dtype mesh offload_policy",
           line="--", mark="^"),
    _entry("hybrid", "hybrid sharding (ZeRO-3 in each node)", partial(_stage, "zero3"), None, "plan", UNITS, rows=True,
           line="-.", mark="P"),
    _entry("zero3", "ZeRO-3", partial(_stage, "zero3"), (ALL_PARTS, 3), f"{ALL} scale", UNITS, counterpart="fsdp2",
           shade=DARK, mark="D"),
    _entry("zero3-prefetch0", "ZeRO-3, prefetch 0", partial(_stage, "zero3", prefetch=0), (ALL_PARTS, 3), "watch",
           "dtype mesh offload_policy", shade=DARK, line=":", mark="d"),
    _entry("fsdp2", "FSDP2", counterparts.fsdp2, (ALL_PARTS, 3), ALL, "dtype mesh offload_policy",
           shade=DARK, line="--", mark="D"),
    _entry("fsdp1", "FSDP1", partial(counterparts.fsdp1, counterparts.by_blocks), (ALL_PARTS, 3),
           "", "dtype", line=":", mark="<"),
    _entry("fsdp1_article", "FSDP1, wrapped by size", partial(counterparts.fsdp1, counterparts.by_size),
           (ALL_PARTS, 3), "", "dtype", line=":", mark=">"),
    # DeepSpeed's default for its first stage, `use_multi_rank_bucket_allreduce`, is said to all-reduce.
    *(_entry(f"deepspeed{stage}", f"DeepSpeed, stage {stage}", partial(deepspeed_engine.build, stage), (parts, 3),
             "conform", "dtype", line="-.", mark=mark, needs="deepspeed", exact=False)
      for stage, parts, mark in zip((1, 2, 3), (STATE, GRADIENTS, ALL_PARTS), "s^D")),
])  # fmt: skip

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
            raise ValueError(f"no engine {name!r}; there are: {', '.join(known)}")
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

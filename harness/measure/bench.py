"""`./launch.sh bench`: step times of all engines in one run, on a model of your size, and the host's time per step.

    ./launch.sh bench 2                     step times, interleaved: a GPT of 5.3 million parameters by default
    ./launch.sh bench 2 --layers 12 --width 768 --heads 12
    ./launch.sh bench 1 --host              the host's time on many small parameters, rank 0 of 8 without the others

Interleaved means: all engines are alive, and each makes one step in turn. So what disturbs the machine disturbs them
all. What is printed was measured in this run, and a ratio compares two engines of it.
"""

import argparse
import cProfile
import gc
import importlib
import json
import os
import pstats
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.dry_run import all_reduce_bucket
from harness.run import engines, process_group
from harness.run.data import Batches, load_text
from harness.run.model import GPT, GPTConfig, next_token_loss

ROOT = Path(__file__).resolve().parents[2]
ENGINES = engines.named("bench")
COUNTERPARTS = dict(engines.PAIRS)


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step (default 4)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of every engine (default 15)")
    parser.add_argument("--engines", help=f"any of {', '.join(ENGINES)}")
    parser.add_argument("--bucket-mb", type=float, help="of zero1 and zero2 (default: their own)")
    parser.add_argument("--host", action="store_true", help="the host's time per step, on many small parameters")
    parser.add_argument("--profile", metavar="ENGINE", help="with --host: where that engine's host time goes")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--backend", default="auto", help="auto, gloo or nccl")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(argv)
    for name in ("layers", "width", "heads", "vocab", "seq", "batch", "rounds"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be 1 or more, got {getattr(options, name)}")
    if options.width % options.heads:
        raise ValueError(f"--width must be a multiple of --heads, got {options.width} and {options.heads}")
    options.engines = engines.chosen(options.engines, "bench", ENGINES)
    if options.profile:
        engines.chosen(options.profile, "bench", (*ENGINES, "plain"))
    if options.host and options.profile and options.profile not in ("plain", *options.engines):
        raise ValueError(f"--profile {options.profile}, but --engines has {', '.join(options.engines)}")
    if options.host and options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no GPU here: use --device cpu")
    process_group.check_writable("--json", options.json)
    return options


class Untied(GPT):
    """The project's GPT with a head of its own weight, as many models have it."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


def step_times(options: argparse.Namespace, me: process_group.Rank) -> dict[str, list[float]]:
    """{engine: milliseconds of each timed step, of the slowest rank}. A collective."""
    config = GPTConfig(options.layers, options.width, options.heads, options.vocab, options.seq)
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=me.device.type == "cuda")
    batch = Batches(load_text(None, config.seq), options.batch, config.seq, 0, me.device)(0, me.rank)
    built = {}
    for name in options.engines:
        model = Untied(config).to(me.device)
        more = {"bucket_mb": options.bucket_mb} if name in ("zero1", "zero2") else {}
        built[name] = engines.build(name, model, adamw, me.device, **more)
    numel = sum(param.numel() for param in Untied(config).parameters())
    me.print(f"a GPT of {numel:,} parameters, {me.world_size} ranks over {me.backend}; {options.rounds} rounds")
    times = {name: [] for name in built}
    gc.collect()
    gc.disable()  # it would come in one engine's step, and not in another's
    try:
        for turn in range(-2, options.rounds):  # two rounds to warm up
            for name, engine in built.items():
                _synchronize(me)
                started = time.perf_counter()
                engine.training_step(*batch, next_token_loss)
                if me.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn >= 0:
                    times[name].append((time.perf_counter() - started) * 1e3)
    finally:
        gc.enable()
    slowest = process_group.largest([value for values in times.values() for value in values], me)
    return {name: slowest[i * options.rounds :][: options.rounds] for i, name in enumerate(times)}


def _synchronize(me: process_group.Rank) -> None:
    if me.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


class Small(nn.Module):
    """Many small parameters: 34 units of 6 linear layers, 408 tensors, whose kernels take no time."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))) for _ in range(34))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# Those that run on a group that moves nothing.
HOST_ENGINES = [name for name in ENGINES if "memory" in engines.ENGINES[name].on]


def host_times(options: argparse.Namespace) -> tuple[dict[str, list[float]], list[dict]]:
    """({engine: milliseconds of the host per step}, the profile) of rank 0 of 8, whose collectives move nothing.

    On a GPU (`--device cuda`) a step ends when its last kernel is launched, not when it has run; the host waits for the
    GPU before the next one. The profile has the ten functions that cost `options.profile` most; it is empty without.
    """
    fake_pg = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=8)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    adamw = partial(torch.optim.AdamW, lr=1e-3, foreach=True)

    def build(name):
        engine = engines.build("single" if name == "plain" else name, Small().to(device), adamw, device)
        if name == "ddp":
            engine.model.register_comm_hook(None, all_reduce_bucket)  # the fake group's futures bring no result
        return engine

    built = {name: build(name) for name in ["plain", *(name for name in HOST_ENGINES if name in options.engines)]}
    x, y = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    times = {name: [] for name in built}
    gc.collect()
    gc.disable()
    for turn in range(-3, options.rounds):
        for name, engine in built.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            engine.training_step(x, y, F.mse_loss)
            if turn >= 0:
                times[name].append((time.perf_counter() - started) * 1e3)
    gc.enable()
    costs = []
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(10):
            built[options.profile].training_step(x, y, F.mse_loss)
        profile.disable()
        print(f"\n{options.profile}, 10 steps under Python's profiler, the costliest functions:")
        stats = pstats.Stats(profile).sort_stats("tottime")
        stats.print_stats(15)
        for key in stats.fcn_list[:10]:
            _, calls, own, _, _ = stats.stats[key]
            costs.append({"function": _name(*key), "calls_per_step": calls / 10, "ms_per_step": round(own * 100, 4)})
    built.clear()
    gc.collect()  # DDP's reducer, before its group
    dist.destroy_process_group()
    return times, costs


def _name(file: str, line: int, function: str) -> str:
    """A function as the profile's table shows it, with its file in this repository, or the end of its path."""
    if file == "~":
        return function
    path = Path(file)
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:])
    return f"{inside}:{line} {function}"


def table(times: dict[str, list[float]], reference: str) -> str:
    """Medians, ranges and ratios, one line per engine."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    lines = [f"{'engine':<28}{'ms':>8}{'lowest':>9}{'highest':>9}{'x ' + reference:>9}  beside torch's own"]
    for name, values in times.items():
        other = COUNTERPARTS.get(name)
        beside = f"{medians[name] / medians[other]:.2f} x {other}" if other in medians else ""
        ratio = f"{medians[name] / medians[reference]:>9.2f}" if reference in medians else " " * 9
        lines.append(f"{name:<28}{medians[name]:>8.1f}{min(values):>9.1f}{max(values):>9.1f}{ratio}  {beside}".rstrip())
    return "\n".join(lines)


def main(argv=None) -> None:
    options = arguments(argv)
    if options.host and "ZERO_PREFLIGHT" not in os.environ:
        times, costs = host_times(options)
        reference, about = "plain", {"what": "host time per step", "ranks": 8, "device": options.device}
        about |= {"profiled": options.profile, "profile": costs}
        print("host time per step, rank 0 of 8 on the fake group, 408 parameters in 34 units:\n")
    else:
        me = process_group.start(options.backend, options.device)
        times, reference = step_times(options, me), "ddp"
        about = {"what": "step time", "ranks": me.world_size, "hardware": process_group.hardware(me.device)}
        if me.rank:
            return process_group.stop()
    print(table(times, reference))
    if options.json:
        about |= {"torch": torch.__version__, "command": " ".join(["./launch.sh bench", *sys.argv[1:]]), "ms": times}
        with open(options.json, "w") as file:
            json.dump(about, file, indent=1)
            file.write("\n")
    if not options.host:
        process_group.stop()


if __name__ == "__main__":
    process_group.run(main)

"""`./launch.sh bench`: step times of all engines in one run, on a model of your size, and the host's time per step.

    ./launch.sh bench 2                     step times, interleaved: a GPT of 5.3 million parameters by default
    ./launch.sh bench 2 --layers 12 --width 768 --heads 12
    ./launch.sh bench 1 --host              the host's time on many small parameters, rank 0 of 8 without the others

Interleaved means: all engines are alive, and each makes one step in turn. What is printed was measured in this run, and
a ratio compares two engines of it.
"""

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import time
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from harness.engine import accelerator
from harness.measure import tables
from harness.measure.fake_ranks import build, fake_ranks
from harness.measure.turns import take_turns
from harness.run import engine_file, engines, process_group
from harness.run import options as common
from harness.run.data import Batches, load_text
from harness.run.model import GPT, GPTConfig, next_token_loss, number_of_parameters

ENGINES = engines.named("bench")
BUCKETED = tuple(name for name in ENGINES if "bucket_mb" in engines.ENGINES[name].takes)
COUNTERPARTS = dict(engines.PAIRS)


def arguments(argv=None) -> argparse.Namespace:
    parser = common.Parser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024, help="256 or more, as the text is bytes (default 1024)")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step (default 4)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of every engine (default 15)")
    parser.add_argument("--engines", help=f"any of {', '.join(ENGINES)}")
    engine_file.add_option(parser)
    parser.add_argument("--bucket-mb", type=float, help=f"of {', '.join(BUCKETED)} (default: their own)")
    parser.add_argument("--host", action="store_true", help="the host's time per step, on many small parameters")
    parser.add_argument("--profile", metavar="ENGINE", help="with --host: where that engine's host time goes")
    common.add(parser, "json", "backend", "device")
    options = parser.parse_args(argv)
    common.settle(options, layers=1, width=1, heads=1, vocab=256, seq=1, batch=1, rounds=1)
    if options.width % options.heads:
        raise ValueError(f"--width must be a multiple of --heads, got {options.width} and {options.heads}")
    options.engines = engine_file.chosen(options, "bench", ENGINES)
    if options.profile:
        engines.chosen(options.profile, "bench", (*ENGINES, "plain"))
    if options.host and options.profile and options.profile not in ("plain", *options.engines):
        raise ValueError(f"--profile {options.profile}, but --engines has {', '.join(options.engines)}")
    if options.host and options.engine_file:
        raise ValueError("--host is of our engines and torch's, without other ranks: leave out --engine-file")
    if options.host and options.device not in ("auto", "cpu") and not accelerator.count():
        raise ValueError(f"--device {options.device}, but torch sees no GPU here: use --device cpu")
    return options


@engine_file.one_line()
def step_times(options: argparse.Namespace, me: process_group.Rank) -> dict[str, list[float]]:
    """{engine: milliseconds of each timed step, of the slowest rank}. A collective."""
    config = GPTConfig(options.layers, options.width, options.heads, options.vocab, options.seq, tied=False)
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=me.device.type != "cpu")
    batch = Batches(load_text(None, config.seq), options.batch, config.seq, 0, me.device)(0, me.rank)
    built = {}
    for name in options.engines:
        model = GPT(config).to(me.device)
        more = {"bucket_mb": options.bucket_mb} if "bucket_mb" in engines.ENGINES[name].takes else {}
        built[name] = engines.build(name, model, adamw, me.device, **more)
    numel = number_of_parameters(config)
    me.print(f"a GPT of {numel:,} parameters, {me.world_size} ranks over {me.backend}; {options.rounds} rounds")
    steps = {name: partial(engine.training_step, *batch, next_token_loss) for name, engine in built.items()}
    times = take_turns(steps, options.rounds, me)
    return {name: [seconds * 1e3 for seconds in values] for name, values in times.items()}


class Small(nn.Module):
    """Many small parameters: 34 units of 6 linear layers, 408 tensors, whose kernels take no time."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))) for _ in range(34))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def host_times(options: argparse.Namespace) -> dict[str, list[float]]:
    """{engine: milliseconds of the host per step} of rank 0 of 8, whose collectives move nothing.

    On a GPU (`--device cuda`) a step ends when its last kernel is launched, not when it has run; the host waits for the
    GPU before the next one.
    """
    adamw = partial(torch.optim.AdamW, lr=1e-3, foreach=True)
    device = torch.device("cpu") if options.device in ("auto", "cpu") else torch.device(options.device, 0)

    def build_small(name):
        return build("single" if name == "plain" else name, Small().to(device), adamw, device)

    chosen = [name for name in ENGINES if name in options.engines and "memory" in engines.ENGINES[name].on]
    with fake_ranks(8):  # a group that moves nothing
        built = {name: build_small(name) for name in ["plain", *chosen]}
        x, y = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
        times = {name: [] for name in built}
        for turn in range(-3, options.rounds):
            for name, engine in built.items():
                if device.type != "cpu":
                    torch.accelerator.synchronize()
                started = time.perf_counter()
                engine.training_step(x, y, F.mse_loss)
                if turn >= 0:
                    times[name].append((time.perf_counter() - started) * 1e3)
        if options.profile:
            profile(options.profile, partial(built[options.profile].training_step, x, y, F.mse_loss))
        built.clear()
        gc.collect()  # DDP's reducer, before its group
    return times


def profile(name: str, step) -> None:
    """Print the ten functions that cost the host most in ten steps of the engine `name`."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        step()
    profiler.disable()
    print(f"\n{name}, 10 steps under Python's profiler, the costliest functions:")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(10)


def table(times: dict[str, list[float]], reference: str) -> str:
    """Medians, ranges and ratios, one line per engine."""
    medians = {name: statistics.median(values) for name, values in times.items()}

    def over(name: str, other: str | None, words: str = "") -> str:
        return f"{medians[name] / medians[other]:.2f}{words}" if other in medians else ""

    columns = {
        "engine": lambda name, values: name,
        "ms": lambda name, values: f"{medians[name]:.1f}",
        "lowest": lambda name, values: f"{min(values):.1f}",
        "highest": lambda name, values: f"{max(values):.1f}",
        f"x {reference}": lambda name, values: over(name, reference),
        "beside torch's own": lambda name, values: over(name, COUNTERPARTS.get(name), f" x {COUNTERPARTS.get(name)}"),
    }
    return "\n".join(tables.text(tables.rows_of(columns, times), left=(0, 5), rule=False))


def main(argv=None) -> None:
    options = arguments(argv)
    gc.collect()
    gc.disable()  # it would come in one engine's step, and not in another's
    if options.host and "ZERO_PREFLIGHT" not in os.environ:
        times = host_times(options)
        reference, about = "plain", {"what": "host time per step", "ranks": 8, "device": options.device}
        print("host time per step, rank 0 of 8 on the fake group, 408 parameters in 34 units:\n")
    else:
        me = process_group.start(options.backend, options.device)
        times, reference = step_times(options, me), "ddp"
        about = {"what": "step time", "ranks": me.world_size, "hardware": process_group.hardware(me.device)}
        if me.rank:
            return process_group.stop()
    print(table(times, reference))
    about |= {"torch": torch.__version__, "command": common.command("bench"), "ms": times}
    common.write_json(options.json, about)
    if not options.host:
        process_group.stop()


if __name__ == "__main__":
    process_group.run(main)

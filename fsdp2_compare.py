"""The referee: one GPT, one text, the same steps under every engine; who agrees, who holds, sends and takes what.

    single                      one process on the batches of all ranks together: what the others must equal
    ddp                         DistributedDataParallel(gradient_as_bucket_view=True)
    zero1                       beside zero_redundancy_optimizer, torch's ZeroRedundancyOptimizer over DDP
    zero2                       beside fsdp2_no_reshard, fully_shard(reshard_after_forward=False)
    zero3                       beside fsdp2, fully_shard
    fsdp1                       FullyShardedDataParallel around every block and the model, as fsdp2
    fsdp1_article               the same with the wrap policy of the article "Scaling LLM Training"

The last two run only when asked for. zerolab/run/counterparts.py has how torch's own are built.

Three passes. The first trains each engine alone, from the same weights on the same batches, and takes losses,
bytes held, peak and traffic; nothing is timed. The second has all engines alive and gives each one step in
turn, so that whatever disturbs the machine disturbs all of them. The third watches a few steps of each on a timeline
(zerolab/measure/step_time.py): what they are spent on, and which rank makes the others wait.

Run it: ./launch.sh compare 2 --preset tiny
"""

import argparse
import functools
import gc
import os
import statistics
import sys
import time
from functools import partial

import torch

from zerolab.measure import step_report, step_time, tables
from zerolab.measure.dry_run import copied_to
from zerolab.measure.gpus import mfu
from zerolab.measure.interleaved import take_turns
from zerolab.measure.ledger import let_go
from zerolab.measure.memory_parts import HELD, PartsLedger
from zerolab.measure.out_of_memory import explained
from zerolab.measure.watched_step import Seen, allocator_of, watched_step
from zerolab.run import commands, engine_file, json_file, micro_batches, process_group
from zerolab.run.data import Batches, load_text
from zerolab.run.endings import SAID
from zerolab.run.engines import DTYPES, ENGINES, build
from zerolab.run.model import GPT, next_token_loss, number_of_parameters, preset
from zerolab.run.process_group import Rank
from zerolab.run.progress import told
from zerolab.run.recompute import checkpoint_blocks

# In float32 at N = 2 every engine adds the same two numbers and halves them: equal to the bit. With more ranks,
# or the whole batch in one process, the same sums are taken in another order. Each sum is off by some 1e-7 of
# its size, and AdamW, which divides a gradient by its own size, passes that on at full strength where a
# gradient is nearly zero. Seen with `tiny`, N = 3, 40 steps: rounding up to 1.8e-5 nats, gradients summed and not
# averaged 1.4e-2. The tolerance lies between. It is no proof by itself: AdamW
# hides most of a wrong scale, in the smallest presets all of it; the tests use SGD and float64 as well.
TOLERANCE = 1e-3
# In bfloat16 the same holds with sums off by some 4e-3 of their size. Seen with `tiny`, 40 steps: 1.5e-2 nats for the
# whole batch in one process at N = 2, 4.8e-2 at N = 3. That is too coarse to prove anything; equality to the bit at
# N = 2 does, with DDP over plain PyTorch's casts among the engines.
TOLERANCE_BF16 = 1e-1

COMPARED = tuple(name for name, engine in ENGINES.items() if not engine.rows)  # a grid of ranks is no matter of ours


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    options = commands.compare(argv)
    world_size = process_group.planned_world_size(options.backend, options.device)
    if options.slow_rank and world_size is not None and options.slow_rank[0] >= world_size:
        raise ValueError(f"--slow-rank {options.slow_rank[0]}: the ranks are 0 to {world_size - 1}")
    options.engines = engine_file.chosen(options, "compare", COMPARED)
    return options


WATCHED = 3  # steps of each engine that the ledgers see: in the third all states exist
WATCHED_STEPS = 5  # of each engine on the timeline, or as many as are timed


class Referee:
    """One comparison: what the engines share, and the passes."""

    def __init__(self, options: argparse.Namespace, text: torch.Tensor, me: Rank):
        self.options, self.me = options, me
        self.dtype = DTYPES[options.dtype]
        self.tolerance = TOLERANCE if self.dtype is None else TOLERANCE_BF16
        self.batches = Batches(text, options.batch, options.seq, options.seed, me.device)
        # For models on a GPU: drawing a billion numbers on the host takes longer than copying them. Drawn here, where
        # no ledger counts them.
        self.weights = None if me.device.type == "cpu" else self.model()

    def model(self) -> GPT:
        return GPT(preset(self.options.preset), self.options.seed)

    @functools.cached_property
    def offset(self) -> tuple[float, float]:
        """How far this rank's clock is ahead of rank 0's, and how far off that may be. A collective, once."""
        return step_time.clock_offset()

    def build(self, name: str):
        """The engine `name` around a model with the same weights as every other's."""
        on_cpu = self.me.device.type == "cpu"
        model = self.model() if on_cpu else copied_to(self.me.device, self.weights)
        if self.options.checkpoint_activations:
            checkpoint_blocks(model, casts=self.dtype is not None and ENGINES[name].casts)
        # fused: the CUDA default allocates intermediates as large as the parameters, which no engine causes.
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.options.lr, fused=not on_cpu)
        return build(name, model, optimizer, self.me.device, dtype=self.dtype)

    def step(self, engine, batch) -> torch.Tensor:
        """One training step of `engine` on (inputs, targets); returns its loss."""
        return micro_batches.training_step(engine, *batch, next_token_loss, self.options.accumulate)

    def timed_step(self, engine, batch) -> None:
        """The same, after the delay of `--slow-rank`."""
        slow, seconds = self.options.slow_rank or (None, 0)
        if self.me.rank == slow:
            time.sleep(seconds)
        with explained("a timed step, beside the other engines", engine):
            self.step(engine, batch)

    def batch(self, name: str, step: int):
        if name == "single":
            return self.batches.whole(step, self.me.world_size)
        return self.batches(step, self.me.rank)

    def mine(self, name: str) -> bool:
        """Whether this rank takes part: `single` runs on rank 0 alone, the others wait."""
        return name != "single" or self.me.rank == 0

    def train(self, name: str) -> dict:
        """First pass, one engine: losses, bytes held, peak and traffic, each the maximum over the ranks.

        `held_bytes` are those right before the optimizer's step, when all gradients are there, as the articles'
        tables count; peak and traffic those of one whole step, the third, when all states exist.
        """
        let_go(self.me.device)
        losses, seen = self._watched_training(name) if self.mine(name) else ([], Seen())
        gc.collect()
        self.meet(name)
        held = [seen.held.get(part, 0) for part in HELD]
        seen_here = [*held, seen.peak, seen.sent_bytes, seen.ledger_peak, seen.reserved]
        *held, peak, sent, ledger_peak, reserved = map(int, process_group.largest(seen_here, self.me))
        result = {
            "losses": [round(loss.item(), 10) for loss in losses],
            "held_bytes": dict(zip(HELD, held)),
            "peak_bytes": peak,
            "sent_bytes": sent,
            "step_ms": None,  # until it is timed
            "tokens_per_s": None,
        }
        if self.me.device.type != "cpu":
            result |= {"ledger_peak_bytes": ledger_peak, "reserved_bytes": reserved}
        return result

    def _watched_training(self, name: str) -> tuple[list[torch.Tensor], Seen]:
        """(loss of every step, what was seen of the last watched one) of the engine `name` on this rank."""
        batches = [self.batch(name, step) for step in range(self.options.steps)]
        allocator, losses = allocator_of(self.me.device), []
        with PartsLedger() as memory:
            with explained(f"the construction of {name}", None, memory):
                engine = self.build(name)
            for step, batch in enumerate(batches[:WATCHED], 1):
                words = explained(f"training step {step} of {name}", engine, memory)
                with watched_step(engine, memory, allocator) as seen, words:
                    # A copy, made inside of the ledger, which lives for its step: of a batch that was made outside the
                    # ledger counts what an engine happens to take a view of, which is no engine's doing.
                    losses.append(self.step(engine, [part.clone() for part in batch]))
        for step in told(range(WATCHED, self.options.steps), f"steps of {name}", self.me.rank == 0):
            with explained(f"training step {step + 1} of {name}", engine):
                losses.append(self.step(engine, batches[step]))
        return losses, seen

    def meet(self, name: str) -> None:
        """After the work of `name`: where rank 0 did it alone, the others wait for it here, and in no collective."""
        if name == "single":
            process_group.wait_for_rank_0(self.me)

    def compare(self, runs: dict[str, dict]) -> tuple[str, bool]:
        """Fill in `difference` (largest, over steps and ranks) and `match`; returns (reference, all match)."""
        reference = "ddp" if "ddp" in runs else next(iter(runs))
        mine = {name: run["losses"] or [0.0] * self.options.steps for name, run in runs.items()}
        everyone = process_group.gathered(mine)
        losses, means = {}, {}  # (rank, step); and over the ranks: the loss of the whole batch
        for name in runs:
            losses[name] = torch.tensor([of_rank[name] for of_rank in everyone], dtype=torch.float64)
            means[name] = losses[name][0] if name == "single" else losses[name].mean(0)
        for name, run in runs.items():
            compared = means if "single" in (name, reference) else losses
            # Micro-batches: some engines average over the ranks before they add up, others after.
            exact = compared is losses and self.me.world_size <= 2 and self.options.accumulate == 1
            run["tolerance"] = 0.0 if exact and ENGINES[name].exact else self.tolerance
            run["difference"] = (compared[name] - compared[reference]).abs().max().item()
            # NaN compares false with everything: a run that diverged does not match
            run["match"] = run["difference"] <= run["tolerance"]
            run["losses"] = means[name].tolist()
        return reference, all(run["match"] for run in runs.values())

    def time(self, runs: dict[str, dict]) -> None:
        """Second pass: the engines take turns; fills in `step_ms` (median of the slowest rank), `tokens_per_s` and what
        follows from it; and the third: `step_time`, what a step's time is spent on (zerolab/measure/step_time.py).
        """
        rounds = self.options.timed_steps
        self.me.print(tables.wrapped(f"timing {rounds} rounds of {', '.join(runs)}, interleaved"))
        engines = {name: self.build(name) for name in runs if self.mine(name)}
        steps = dict.fromkeys(runs)
        for name in engines:
            steps[name] = partial(self.timed_step, engines[name], self.batch(name, 0))
        times = take_turns(steps, rounds, self.me, self.meet)
        for name in told(runs, "what a step is spent on", self.me.rank == 0):
            seconds = statistics.median(times[name])
            tokens_per_s = round(self.options.batch * self.options.seq * self.me.world_size / seconds, 1)
            runs[name] |= {"step_ms": round(seconds * 1000, 3), "tokens_per_s": tokens_per_s}
            if self.me.device.type != "cpu":
                runs[name]["mfu"] = self.mfu(name, tokens_per_s)
            runs[name]["step_time"] = self.watch(name, engines.get(name), steps[name])

    def mfu(self, name: str, tokens_per_s: float) -> float | None:
        """What follows from the tokens per second on a GPU: see `gpus.mfu`."""
        config, ranks = preset(self.options.preset), 1 if name == "single" else self.me.world_size
        return mfu(tokens_per_s, config, self.options.seq, self.options.dtype, ranks, self.me.device)

    def watch(self, name: str, engine, train) -> dict:
        """Third pass, one engine: some steps on a timeline, one after the other as in training. A collective."""
        steps = min(WATCHED_STEPS, self.options.timed_steps)
        meet = partial(self.meet, name)
        found = step_time.summary(step_time.watch(train, steps, engine, self.me.device, self.offset[0], meet))
        [unsure] = process_group.largest([1e3 * self.offset[1]], self.me)
        return {"clocks_unsure_by_ms": round(unsure, 4), **found}


def verdict(runs: dict[str, dict], reference: str, world_size: int, dtype: str) -> str:
    """One plain sentence or two on whether the losses match, and why they may differ where they do."""
    exact = [name for name, run in runs.items() if run["difference"] == 0 and name != reference]
    loose = [name for name, run in runs.items() if run["difference"] and run["match"]]
    lines = []
    for name, run in runs.items():
        if not run["match"]:
            off, allowed = run["difference"], run["tolerance"]
            lines.append(f"DOES NOT MATCH: {name} is off by {off:.3g} from {reference}, allowed {allowed:g}.")
    if not lines and len(runs) == 1:
        return f"Only {reference} came to its end: nothing was compared."
    lines = lines or ["MATCH: all engines have the same losses."]
    if exact:
        lines.append(f"Equal to {reference} to the bit at every step: {', '.join(exact)}.")
    if loose:
        lines.append(
            f"Within {runs[loose[0]]['tolerance']:g} nats: {', '.join(loose)}. These add the same numbers in another "
            f"order ({world_size} ranks, or the whole batch at once), and {dtype} sums depend on the order."
        )
    return "\n".join(lines)


CONDITIONS = ("preset", "batch", "accumulate", "checkpoint_activations", "slow_rank", "seq", "steps", "timed_steps",
              "seed", "dtype")  # fmt: skip


def conditions(options: argparse.Namespace, me: Rank) -> dict:
    """What was compared, and where, for the JSON."""
    return {
        "device": me.device.type,
        "backend": me.backend,
        "world_size": me.world_size,
        "parameters": number_of_parameters(preset(options.preset)),
        "tf32": process_group.tf32() if me.device.type == "cuda" else None,
        **json_file.about(me.device, "compare", os.environ["LOCAL_WORLD_SIZE"]),
    } | {name: getattr(options, name) for name in CONDITIONS}


def headline(about: dict, options: argparse.Namespace, me: Rank) -> str:
    """What is compared, and where, in words."""
    recomputed = ", activations recomputed" if options.checkpoint_activations else ""
    precision = "float32" if options.dtype == "fp32" else "bfloat16 with float32 reduction and master weights"
    tf32 = "" if about["tf32"] is None else f", TF32 {'on' if about['tf32'] else 'off'}"
    return (
        f"{me.world_size} rank(s), {me.backend}, {me.device.type}: {me.why}\n"
        f"GPT {options.preset}: {about['parameters']:,} parameters; {options.batch} x {options.seq} tokens per rank "
        f"and step{micro_batches.words(options)}{recomputed}, {options.steps} steps, AdamW lr {options.lr:g}, "
        f"{precision}{tf32}"
    )


def first_pass(referee: Referee) -> dict[str, dict]:
    """{engine: its run} of every engine, one after the other."""
    runs, me = {}, referee.me
    torch.use_deterministic_algorithms(me.device.type != "cpu")  # CUDA adds atomically in some backwards, in any order
    for name in told(referee.options.engines, "losses, memory and traffic", me.rank == 0):
        runs[name] = referee.train(name)
    torch.use_deterministic_algorithms(False)
    return runs


@engine_file.named_in_errors()
def main() -> None:
    options = arguments()
    text = load_text(options.data, options.seq)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    me = process_group.start(options.backend, options.device, options)
    referee, about = Referee(options, text, me), conditions(options, me)
    me.print(tables.wrapped(headline(about, options, me)))
    runs = first_pass(referee)
    reference, match = referee.compare(runs)
    result = about | {"runs": runs, "match": match}
    file = options.json or json_file.default_name("compare") if me.rank == 0 else None
    json_file.write(file, result, whole=False)  # for whoever has no time for the second pass
    if options.timed_steps:
        referee.time(runs)
    said = step_report.results(result, reference)
    said += "\n" + verdict(runs, reference, me.world_size, options.dtype)
    me.print("\n" + tables.wrapped(said))
    process_group.stop()
    json_file.write(file, result)
    if not match:
        sys.exit(SAID)


if __name__ == "__main__":
    process_group.run(main)

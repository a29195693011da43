"""The referee: trains one GPT on one text under every engine, and compares losses, memory, traffic and step times.

An engine is anything that trains a model, usually on several ranks. These eight run by default:

    single                      plain PyTorch in one process, on the batches of all ranks together
    ddp                         DistributedDataParallel(gradient_as_bucket_view=True)
    zero1                       zero1.py
    zero_redundancy_optimizer   torch's ZeroRedundancyOptimizer over DDP, which shards the same tensors as zero1
    zero2                       zero2.py
    fsdp2_no_reshard            fully_shard(reshard_after_forward=False), to compare with zero2
    zero3                       zero3.py
    fsdp2                       fully_shard, which shards the same tensors as zero3

These run only if `--engines` names them, and so do zero1_2psi, zero3-prefetch0 and DeepSpeed's stages:

    fsdp1                       FullyShardedDataParallel around every block and the model, like fsdp2
    fsdp1_article               the same with the wrap policy of the article "Scaling LLM Training"

zerolab/run/counterparts.py builds torch's own engines as users build them.

The engines go through three passes:

1. `prove`: a small GPT in float64, compared with one process on the whole batch (zerolab/measure/proof.py). This pass
   decides whether an engine is correct.
2. `train`: each engine trains by itself, from the same weights on the same batches. This pass records losses, bytes
   held, peak and traffic; nothing is timed.
3. `time`: all engines are alive and take turns, one step each, so that anything that disturbs the machine disturbs all
   of them.

Run it: ./launch.sh compare 2 --preset tiny
"""

import argparse
import gc
import os
import statistics
import sys
import time
from functools import partial

import torch

from zerolab.measure import proof, referee_options, referee_report, step_time, tables
from zerolab.measure.interleaved import take_turns
from zerolab.measure.ledger import HELD, PartsLedger, release_sent
from zerolab.measure.watched_step import Seen, allocator_of, watched_step
from zerolab.run import engine_file, json_file, micro_batches, process_group
from zerolab.run.data import Batches, load_text
from zerolab.run.engines import DTYPES, ENGINES, build
from zerolab.run.model import GPT, next_token_loss, preset
from zerolab.run.process_group import World
from zerolab.run.progress import with_progress
from zerolab.run.recompute import checkpoint_blocks

# In float32 on two ranks every engine adds the same two numbers and halves them, so the losses are equal to the bit.
# With more ranks, or with the whole batch in one process, the same numbers are added in a different order. Each sum is
# then off by about 1e-7 of its size. AdamW divides a gradient by the size of earlier gradients, so where a gradient is
# nearly zero, the update is off by as much as the rounding. With `tiny` on three ranks, losses differed by 1.8e-5 nats
# after 40 steps. The tolerance is far above that, because losses differ more in a longer run. Errors of an engine are
# found by the pass in float64.
TOLERANCE = 1e-3
# In bfloat16 each sum is off by about 4e-3 of its size. With `tiny`, after 40 steps, losses differed by 1.5e-2 nats
# between two ranks and one process on the whole batch, and by 4.8e-2 with three ranks.
TOLERANCE_BF16 = 1e-1

WATCHED = 3  # the number of steps that the ledgers see. In the third one all optimizer states exist


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    options = referee_options.arguments(argv)
    options.engines = engine_file.chosen(options, "compare")
    return options


class Referee:
    """One comparison: the three passes, and the model and data that all engines share."""

    def __init__(self, options: argparse.Namespace, text: torch.Tensor, world: World):
        self.options, self.text, self.world = options, text, world
        self.dtype = DTYPES[options.dtype]
        self.batches = Batches(text, options.batch, options.seq, 0, world.device)

    def compare(self) -> dict[str, dict]:
        """The first and the second pass. Returns {engine: its run}."""
        torch.use_deterministic_algorithms(self.world.device.type != "cpu")  # CUDA adds atomically in some backwards
        differences = self.prove()
        runs = {}
        for name in with_progress(self.options.engines, "training pass", self.world.rank == 0):
            runs[name] = {"float64_difference": differences[name], **self.train(name)}
        torch.use_deterministic_algorithms(False)
        self.judge(runs)
        return runs

    # Shared by the passes.

    def build(self, name: str):
        """The engine `name` around a model. The weights are the same for every engine."""
        model = GPT(preset(self.options.preset)).to(self.world.device)
        if self.options.checkpoint_activations:
            checkpoint_blocks(model, casts=self.dtype is not None and ENGINES[name].casts)
        # `fused`, because AdamW's default on CUDA allocates temporary tensors as large as the parameters.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=self.world.device.type != "cpu")
        return build(name, model, optimizer, self.world.device, dtype=self.dtype)

    def step(self, engine, batch) -> torch.Tensor:
        """One training step of `engine` on (inputs, targets); returns its loss."""
        return micro_batches.training_step(engine, *batch, next_token_loss, self.options.accumulate)

    def batch(self, name: str, step: int):
        if name == "single":
            return self.batches.whole(step, self.world.world_size)
        return self.batches(step, self.world.rank)

    def takes_part(self, name: str) -> bool:
        """Whether this rank runs the engine `name`. `single` runs on rank 0 only, and the other ranks wait."""
        return name != "single" or self.world.rank == 0

    def wait_after(self, name: str) -> None:
        """Called after the engine `name` has run. If only rank 0 ran it, the other ranks wait here for rank 0. They do
        not wait in a collective, because it would time out."""
        if name == "single":
            process_group.wait_for_rank_0(self.world)

    # First pass.

    def prove(self) -> dict[str, float | None]:
        """{engine: the largest difference between its float64 losses and one process's, or None if not tested}."""
        options = self.options
        config, recomputed = preset(options.preset), options.checkpoint_activations
        small = proof.Proof(config, self.text, options.accumulate, recomputed, self.world)
        differences = {}
        for name in with_progress(options.engines, "float64 pass", self.world.rank == 0):
            asked = name != "single" and ENGINES[name].float64  # the others are compared with `single`
            # With --dtype bf16 the stages are the engines of zerolab/engine, so these are tested and not the chapters.
            differences[name] = small.difference(name, as_engine=self.dtype is not None) if asked else None
        return differences

    # Second pass.

    def train(self, name: str) -> dict:
        """Train one engine. Returns losses, bytes held, peak and traffic, each the maximum over the ranks.

        `held_bytes` is counted right before the optimizer's step, when all gradients exist. The articles' tables do
        the same. Peak and traffic are counted over the whole third step, when all optimizer states exist.
        """
        release_sent(self.world.device)
        losses, seen = self._watched_training(name) if self.takes_part(name) else ([], Seen())
        gc.collect()
        self.wait_after(name)
        held = [seen.held.get(part, 0) for part in HELD]
        seen_here = [*held, seen.peak, seen.sent_bytes, seen.ledger_peak, seen.reserved]
        *held, peak, sent, ledger_peak, reserved = map(int, process_group.largest(seen_here, self.world))
        result = {
            "losses": [round(loss.item(), 10) for loss in losses],
            "held_bytes": dict(zip(HELD, held)),
            "peak_bytes": peak,
            "sent_bytes": sent,
            "step_ms": None,  # until it is timed
            "tokens_per_s": None,
        }
        if self.world.device.type != "cpu":
            result |= {"ledger_peak_bytes": ledger_peak, "reserved_bytes": reserved}
        return result

    def _watched_training(self, name: str) -> tuple[list[torch.Tensor], Seen]:
        """(the loss of every step, what was measured in the last watched step) of the engine `name` on this rank."""
        batches = [self.batch(name, step) for step in range(self.options.steps)]
        allocator, losses = allocator_of(self.world.device), []
        with PartsLedger() as memory:
            engine = self.build(name)
            for batch in batches[:WATCHED]:
                with watched_step(engine, memory, allocator) as seen:
                    # The ledger counts only storages that are made, or viewed, while it is open. The batch is copied
                    # here, so that it counts once for every engine, whether or not the engine uses views of it.
                    losses.append(self.step(engine, [part.clone() for part in batch]))
        for step in range(WATCHED, self.options.steps):
            losses.append(self.step(engine, batches[step]))
        return losses, seen

    def judge(self, runs: dict[str, dict]) -> None:
        """Set `difference` (the largest over all steps and ranks), `tolerance` and `match`. A collective."""
        base = reference(runs)
        mine = {name: run["losses"] or [0.0] * self.options.steps for name, run in runs.items()}
        of_all_ranks = process_group.gathered(mine)
        losses, means = {}, {}  # of shape (rank, step); their means over the ranks, the losses of the whole batch
        for name in runs:
            losses[name] = torch.tensor([of_rank[name] for of_rank in of_all_ranks], dtype=torch.float64)
            means[name] = losses[name][0] if name == "single" else losses[name].mean(0)
        for name, run in runs.items():
            compared = means if "single" in (name, base) else losses
            # With micro-batches some engines average over the ranks before they add up gradients, and others after.
            exact = compared is losses and self.world.world_size <= 2 and self.options.accumulate == 1
            rounding = TOLERANCE if self.dtype is None else TOLERANCE_BF16
            run["tolerance"] = 0.0 if exact and ENGINES[name].exact else rounding
            run["difference"] = (compared[name] - compared[base]).abs().max().item()
            proved = run["float64_difference"] is None or run["float64_difference"] <= proof.TOLERANCE
            # Every comparison with NaN is false, so a run that diverged does not match.
            run["match"] = proved and run["difference"] <= run["tolerance"]
            run["losses"] = means[name].tolist()

    # Third pass.

    def time(self, runs: dict[str, dict]) -> None:
        """Set `step_ms`, the median of the slowest rank's times, and the numbers that are computed from it."""
        engines = {name: self.build(name) for name in runs if self.takes_part(name)}
        steps = dict.fromkeys(runs)
        for name in engines:
            steps[name] = partial(self.timed_step, engines[name], self.batch(name, 0))
        times = take_turns(steps, self.options.timed_steps, self.world, self.wait_after)
        for name, run in runs.items():
            seconds = statistics.median(times[name])
            tokens_per_s = round(self.options.batch * self.options.seq * self.world.world_size / seconds, 1)
            run |= {"step_ms": round(seconds * 1000, 3), "tokens_per_s": tokens_per_s}
        if self.options.breakdown or self.options.slow_rank:
            step_time.break_down(runs, engines, steps, self.options.timed_steps, self.world, self.wait_after)

    def timed_step(self, engine, batch) -> None:
        """One step, which begins after the delay of `--slow-rank`."""
        slow, seconds = self.options.slow_rank or (None, 0)
        if self.world.rank == slow:
            time.sleep(seconds)
        self.step(engine, batch)


def reference(runs: dict[str, dict]) -> str:
    """The engine whose losses the others are compared with."""
    return "ddp" if "ddp" in runs else next(iter(runs))


@engine_file.named_in_errors()
def main() -> None:
    options = arguments()
    text = load_text(None, options.seq)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    world = process_group.start(options.backend, options.device)
    about = referee_report.conditions(options, world)
    world.print(tables.wrapped(referee_report.headline(about, options, world)))
    referee = Referee(options, text, world)
    runs = referee.compare()
    result = about | {"runs": runs, "match": all(run["match"] for run in runs.values())}
    file = options.json if world.rank == 0 else None
    json_file.write(file, result, whole=False)  # now, so that the results are kept if the third pass is stopped
    if options.timed_steps:
        referee.time(runs)
    world.print("\n" + tables.wrapped(referee_report.results(result, reference(runs))))
    process_group.stop()
    json_file.write(file, result)
    if not result["match"]:
        sys.exit(1)


if __name__ == "__main__":
    process_group.run(main)

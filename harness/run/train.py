"""A training run that comes back: `./launch.sh train zero3 2 --folder runs/first`.

The same line again goes on where the run has stopped, in another stage or on another number of ranks as well. Copy this
file and put your own model and data into it: `python -m harness.run.restarts --standalone --nproc-per-node 2 FILE`.
"""

import argparse
import contextlib
import math
import os
import socket
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from harness.engine import checkpoint
from harness.engine.safe_reader import Folder
from harness.engine.together import together
from harness.run import process_group
from harness.run.data import Sequences, hold_out, load_text
from harness.run.journal import Journal, note_lost
from harness.run.leaving import Leaving
from harness.run.model import GPT, PRESETS, next_token_loss, preset
from harness.run.watchdog import Watchdog

STAGES = {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}
DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # to compute and gather in; shards and gradients' sums are float32
HELD_OUT_BATCHES = 4  # of an evaluation


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train", description=__doc__.splitlines()[0])
    parser.add_argument("stage", help=", ".join(STAGES))
    parser.add_argument("--preset", default="tiny", help=f"model shape: {', '.join(PRESETS)} (default tiny)")
    parser.add_argument("--data", help="a file to train on (default: the Python standard library's sources)")
    parser.add_argument("--steps", type=int, default=200, help="of the whole run, with what is done (default 200)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, of all ranks together (default 8)")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards per step, each on a part (default 1)")
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="to compute in (default fp32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's, after the warm-up (default 1e-3)")
    parser.add_argument("--warmup", type=int, default=10, help="steps in which it grows to that (default 10)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients; 0: any (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument("--folder", help="checkpoints and losses.jsonl (default runs/STAGE-PRESET)")
    parser.add_argument("--save-every", type=int, default=50, help="steps from checkpoint to checkpoint (default 50)")
    parser.add_argument("--keep", type=int, default=3, help="so many checkpoints, the newest (default 3)")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps; on held-out text (default 50)")
    parser.add_argument("--print-every", type=int, default=10, help="steps (default 10)")
    parser.add_argument("--backend", default="auto", help="auto, gloo or nccl")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(argv)
    preset(options.preset)
    if options.stage not in STAGES:
        raise ValueError(f"no stage {options.stage!r}; there are: {', '.join(STAGES)}")
    for name in ("steps", "batch", "accumulate", "save_every", "keep", "evaluate_every", "print_every"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(options, name)}")
    for name in ("lr", "warmup", "clip"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"--{name} must be 0 or more, got {getattr(options, name)}")
    options.folder = Path(options.folder or f"runs/{options.stage}-{options.preset}")
    if "ZERO_PREFLIGHT" in os.environ:
        here = process_group.ranks_here(os.environ["ZERO_PREFLIGHT"], options.backend, options.device)
        _check_batch(options, here * process_group.machines())
        _check_folder(options)
    return options


def _check_batch(options: argparse.Namespace, ranks: int) -> None:
    least = ranks * options.accumulate
    if options.batch < least:
        raise ValueError(
            f"--batch {options.batch} is too small: {ranks} rank(s) with --accumulate {options.accumulate} need "
            f"{least} or more sequences per step, one for each backward"
        )


def _check_folder(options: argparse.Namespace) -> None:
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "losses.jsonl").touch()
    except OSError as error:
        raise ValueError(f"cannot write --folder {str(options.folder)!r}: {error.strerror}") from error
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in GPT(preset(options.preset)).state_dict().items()}
    for path in checkpoint.complete(options.folder)[-1:]:
        with contextlib.suppress(checkpoint.Damaged):  # the ranks will take the one before it
            there = {name: value.shape for name, value in Folder(path, check=False).model_on_meta().items()}
            if there != wanted:
                raise ValueError(f"--folder {str(options.folder)!r} has a run of another model than {options.preset!r}")


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Of the step after `step` others: it grows evenly to `--lr`, then falls as a cosine does, to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


class Training:
    """One rank's part of the run."""

    def __init__(self, options: argparse.Namespace, me: process_group.Rank, text, held_out):
        config = preset(options.preset)
        self.options, self.me, self.step, self.next = options, me, 0, 0  # next: number of the next sequence
        self.text = Sequences(text, config.seq, options.seed, me.device)
        self.held_out = Sequences(held_out, config.seq, options.seed, me.device)
        torch.manual_seed(hash((options.seed, me.rank)))  # dropout, if a model has it: another one on every rank
        adamw = partial(torch.optim.AdamW, lr=options.lr, weight_decay=0.1, fused=me.device.type == "cuda")
        low = DTYPES[options.dtype]
        dtypes = {} if low is None else {"param_dtype": low, "reduce_dtype": torch.float32}
        stage = getattr(import_module(options.stage), STAGES[options.stage])
        self.engine = stage(GPT(config, options.seed).to(me.device), adamw, **dtypes)
        self.saving = None
        self.watchdog = Watchdog(me.rank, process_group.timeout(), self.lost)

    def lost(self, why: str) -> None:
        with contextlib.suppress(OSError):
            note_lost(self.options.folder, self.me.rank, self.step, why)

    def parts(self, first: int) -> list[tuple[range, float]]:
        """This rank's sequences of each backward, and their share of the batch, which begins with number `first`.

        All ranks together have the whole batch, whatever their number. So on fewer ranks it is still the same run.
        """
        batch, each = self.options.batch, self.options.accumulate
        cuts = [first + batch * cut // (self.me.world_size * each) for cut in range(self.me.world_size * each + 1)]
        mine = range(self.me.rank * each, (self.me.rank + 1) * each)
        return [(range(cuts[part], cuts[part + 1]), (cuts[part + 1] - cuts[part]) / batch) for part in mine]

    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: this rank's part of the batch's mean loss, and the norm of all gradients."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.options)
        loss, parts = 0.0, self.parts(self.next)
        for number, (sequences, share) in enumerate(parts, 1):
            self.watchdog.progress(f"step {self.step + 1}, backward {number} of {len(parts)}")
            inputs, targets = self.text(sequences)
            with contextlib.nullcontext() if number == len(parts) else self.engine.no_sync():
                part = next_token_loss(self.engine(inputs), targets) * share
                (part * self.me.world_size).backward()  # as the engine divides the ranks' sum by their number
            loss += part.detach()
        norm = self.engine.clip_grad_norm_(self.options.clip or math.inf)
        self.engine.step()
        self.engine.zero_grad()
        self.step, self.next = self.step + 1, self.next + self.options.batch
        return loss, norm

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss on held-out text, always on the same sequences. A collective."""
        self.engine.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.me.device)
        for number in range(HELD_OUT_BATCHES):
            for sequences, share in self.parts(number * self.options.batch):
                self.watchdog.progress(f"the evaluation after step {self.step}")
                inputs, targets = self.held_out(sequences)
                loss += next_token_loss(self.engine(inputs), targets) * share
        self.engine.train()
        dist.all_reduce(loss)
        return loss.item() / HELD_OUT_BATCHES

    def save(self) -> None:
        """Training goes on as soon as this rank's part is copied."""
        if self.journal:
            self.journal.to_disk()
        self.watchdog.progress("saving", watched=False)  # it waits for the save before it
        about = {"step": self.step, "next": self.next, "rank": self.me.rank, "ranks": self.me.world_size}
        about["random"] = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
        self.saving = checkpoint.async_save(self.engine, self.options.folder, keep=self.options.keep, **about)
        self.saving.add_done_callback(lambda save: save.exception() or print(save.result(), flush=True))

    def load(self) -> None:
        """From the newest checkpoint that is good. Without any the run is at its beginning."""
        folder, rank = self.options.folder, self.me.rank
        found = together(lambda: checkpoint.complete(folder) if rank == 0 else None, None)[0]
        for path in reversed(found):
            try:
                about = checkpoint.load(self.engine, path)
            except checkpoint.Damaged as error:
                self.me.print(f"not taken: {error}")
                continue
            self.step, self.next = about["step"], about["next"]
            if (about["rank"], about["ranks"]) == (rank, self.me.world_size):
                torch.set_rng_state(about["random"][0])
                if torch.cuda.is_available() and len(about["random"]) > 1:
                    torch.cuda.set_rng_state(about["random"][1])
            self.me.print(f"going on after step {self.step}, from {path}")
            return
        if found:
            raise RuntimeError(f"no checkpoint in {str(folder)!r} is good. To begin anew take another --folder")

    def steps(self, leaving: Leaving, joined: float, loaded: float) -> str:
        """Train until the end, or until somebody asks a rank to leave. Returns which of both it was."""
        options, me, back = self.options, self.me, None
        while self.step < options.steps:
            began, lr = time.perf_counter(), learning_rate(self.step, options)
            loss, norm = self.train()
            # A signal reaches some ranks only, and each in another moment. The sum tells all of them after which step
            # to leave. The host waits for the GPU here, once per step.
            told = torch.stack([loss.double(), torch.tensor(leaving.asked(), dtype=torch.float64, device=me.device)])
            dist.all_reduce(told)
            loss, asked = told.tolist()
            rate = options.batch * self.text.seq / (time.perf_counter() - began)
            line = {"step": self.step, "loss": loss, "norm": norm.item(), "lr": lr, "tokens_per_s": round(rate)}
            last = asked or self.step == options.steps
            if self.step == options.steps or self.step % options.evaluate_every == 0:
                line["held_out"] = self.evaluate()
            if self.journal:
                self.journal.write(**line, ranks=me.world_size, next=self.next)
                if back is None and (back := self.journal.back(joined, loaded) or {}):
                    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in back.items())
                    print(f"back {sum(back.values()):.1f} s after the last step: {phases}", flush=True)
            if last or self.step % options.print_every == 0:
                held_out = f", held-out {line['held_out']:.4f}" if "held_out" in line else ""
                me.print(
                    f"step {self.step}/{options.steps}: loss {loss:.4f}{held_out}, lr {lr:.1e}, {rate:,.0f} tokens/s"
                )
            if last or self.step % options.save_every == 0:
                self.save()
            if asked:
                return "left because it was asked to"
        return "done"


def main(argv=None) -> None:
    leaving = Leaving()
    options = arguments(argv)
    config = preset(options.preset)
    text, held_out = hold_out(load_text(options.data, config.seq), config.seq)
    me = process_group.start(options.backend, options.device)
    _check_batch(options, me.world_size)
    joined = time.time()
    me.print(f"{STAGES[options.stage]}, GPT {options.preset}, {me.world_size} rank(s) over {me.backend}: {me.why}")
    training = Training(options, me, text, held_out)
    training.watchdog.progress("loading", watched=False)
    training.load()
    loaded = time.time()
    processes = together(lambda: f"{socket.gethostname()}:{os.getpid()}", None)
    training.journal = Journal(options.folder, training.step) if me.rank == 0 else None
    if training.journal:
        training.journal.write(event="start", step=training.step, ranks=me.world_size, processes=processes)
    try:
        why = training.steps(leaving, joined, loaded)
        if training.saving:
            training.watchdog.progress("saving", watched=False)
            training.saving.result()
    except Exception as error:
        training.lost(str(error))
        raise
    if training.journal:
        training.journal.write(event="left", step=training.step, why=why)
    me.print(f"{why}, after step {training.step} of {options.steps}. The same line goes on from here")
    process_group.stop()


if __name__ == "__main__":
    process_group.run(main)

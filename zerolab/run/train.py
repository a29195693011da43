"""A training run that comes back: `./launch.sh train zero3 2 --folder runs/first`.

The same line again goes on where the run has stopped, in another stage or on another number of ranks as well. Copy this
file and put your own model and data into it; docs/checkpoints.md says how torchrun starts it.
"""

import argparse
import faulthandler
import math
import os
import signal
import time

import torch
import torch.distributed as dist

from zerolab.engine import checkpoint
from zerolab.engine.together import on_all_ranks
from zerolab.run import commands, engines, journal, process_group
from zerolab.run.data import Batches, load_text
from zerolab.run.model import GPT, next_token_loss, preset

WARMUP = 10  # steps in which the learning rate grows
LARGEST_NORM = 1.0  # of the gradients: larger ones are clipped to it
PRINT_EVERY = 10  # steps
EARLY = 0.8  # of the collectives' timeout: their error would end a rank before it could tell where it hangs
LEAVING = 5.0  # seconds for a run that is about to leave, when another one is typed


def arguments(argv=None) -> argparse.Namespace:
    options = commands.train(argv)
    ranks = process_group.planned_world_size(options.backend, options.device) or 1
    if options.global_batch < ranks:
        raise ValueError(f"--global-batch {options.global_batch}: {ranks} rank(s) need {ranks} or more sequences")
    for line in journal.read(options.folder)[-1:]:
        if (other := line.get("preset", options.preset)) != options.preset:
            raise ValueError(f"--folder {str(options.folder)!r} has a run of --preset {other}: take another")
    if "ZERO_PREFLIGHT" in os.environ and process_group.machines() == 1:  # of several, others may have begun this run
        journal.lock(options.folder, LEAVING).release()
    return options


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Of the step after `step` others: it grows evenly to `--lr`, then falls as a cosine does, to a tenth."""
    if step < WARMUP:
        return options.lr * (step + 1) / WARMUP
    done = (step - WARMUP) / max(options.steps - WARMUP, 1)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def listen():
    """What says from now on whether somebody wants this rank to stop: SIGTERM, Ctrl-C or SIGUSR1."""
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: heard.append(number))
    return lambda: bool(heard)


class Training:
    """One rank's part of the run."""

    def __init__(self, options: argparse.Namespace, me: process_group.Rank, text: torch.Tensor):
        config = preset(options.preset)
        self.options, self.me, self.step = options, me, 0
        self.batches = Batches(text, options.global_batch, config.seq, options.seed, me.device)
        model = GPT(config, options.seed).to(me.device)
        on_gpu = me.device.type != "cpu"
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, fused=on_gpu)
        more = {"dtype": engines.DTYPES[options.dtype], "engine": True}  # and no chapter, which cannot clip
        self.engine = engines.build(options.stage, model, optimizer, me.device, **more)
        self.saving = self.journal = None

    def progress(self) -> None:
        """If the next call of this comes too late, this rank prints where each of its threads is, and ends."""
        faulthandler.dump_traceback_later(EARLY * process_group.timeout(), exit=True)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the step's batch, as (inputs, targets).

        All ranks together have the whole batch, whatever their number. So on fewer ranks it is still the same run.
        """
        inputs, targets = self.batches(self.step, 0)
        begin, end = (len(inputs) * rank // self.me.world_size for rank in (self.me.rank, self.me.rank + 1))
        return inputs[begin:end], targets[begin:end]

    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: this rank's part of the batch's mean loss, and the norm of all gradients."""
        torch.manual_seed(hash((self.options.seed, self.step, self.me.rank)))  # dropout, if a model has it
        inputs, targets = self.batch()
        loss = next_token_loss(self.engine(inputs), targets) * len(inputs) / self.options.global_batch
        (loss * self.me.world_size).backward()  # as the engine divides the ranks' sum by their number
        norm = self.engine.clip_grad_norm_(LARGEST_NORM)
        self.engine.step()
        self.engine.zero_grad()
        self.step += 1
        return loss.detach(), norm

    def save(self) -> None:
        """Training goes on as soon as this rank's part is copied."""
        self.finish_save()
        self.saving = checkpoint.async_save(self.engine, self.options.folder, step=self.step)

    def finish_save(self) -> None:
        """Raises what has made the last save fail."""
        if self.saving:
            self.progress()
            self.me.print("saved by", self.saving.result())
            self.saving = None

    def load(self) -> None:
        """From the newest checkpoint that is good. Without any the run is at its beginning."""
        folder = self.options.folder
        found = on_all_ranks(lambda: checkpoint.complete(folder) if self.me.rank == 0 else None, None)[0]
        for path in reversed(found):
            try:
                self.step = checkpoint.load(self.engine, path)["step"]
            except checkpoint.Damaged as error:
                self.me.print(f"not taken: {error}")
                continue
            self.me.print(f"going on after step {self.step}, from {path}")
            return
        if found:
            raise RuntimeError(f"no checkpoint in {str(folder)!r} is good. To begin anew take another --folder")

    def run(self, asked) -> None:
        """Go on where the run has stopped, until its end or until `asked()` says on any rank that it should leave."""
        self.load()
        if self.me.rank == 0:
            self.journal = journal.Journal(self.options.folder, self.step)
        leave = False
        while self.step < self.options.steps and not leave:
            leave = self.one_step(asked)
        self.finish_save()
        faulthandler.cancel_dump_traceback_later()
        why, line = ("left because it was asked to", "The same line") if leave else ("done", "A larger --steps")
        self.me.print(f"{why}, after step {self.step} of {self.options.steps}. {line} goes on from here")

    def one_step(self, asked) -> bool:
        """Train, write it down, and save if it is time to. Returns whether all ranks leave after it."""
        self.progress()
        lr, began = learning_rate(self.step, self.options), time.perf_counter()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        loss, norm = self.train()
        # A signal reaches some ranks only, and each in another moment. The sum tells all of them after which step
        # to leave. The host waits for the GPU here, once per step.
        told = torch.stack([loss.double(), torch.tensor(asked(), dtype=torch.float64, device=self.me.device)])
        dist.all_reduce(told)
        loss, leave = told.tolist()
        tokens = self.options.global_batch * self.batches.seq / (time.perf_counter() - began)
        line = {"loss": loss, "norm": norm.item(), "lr": lr, "tokens_per_s": tokens}
        if self.journal:
            self.journal.write(step=self.step, **line, ranks=self.me.world_size, preset=self.options.preset)
        last = leave or self.step == self.options.steps
        if last or self.step % PRINT_EVERY == 0:
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in line.items())
            self.me.print(f"step {self.step}/{self.options.steps}: {numbers}")
        if last or self.step % self.options.save_every == 0:
            self.save()
        return bool(leave)


def main() -> None:
    options = arguments()
    text = load_text(options.data, preset(options.preset).seq)
    me = process_group.start(options.backend, options.device, options)
    seconds = EARLY * process_group.timeout()  # a network's file system may keep a dead machine's lock
    held = []  # rank 0's lock, until the end

    def lock():
        if me.rank == 0:
            held.append(journal.lock(options.folder, seconds))

    on_all_ranks(lock, None)
    me.print(f"{options.stage}, GPT {options.preset}, {me.world_size} rank(s) over {me.backend}: {me.why}")
    Training(options, me, text).run(listen())
    process_group.stop()


if __name__ == "__main__":
    process_group.run(main)

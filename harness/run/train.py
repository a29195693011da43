"""A training run that comes back: `./launch.sh train zero3 2 --folder runs/first`.

The same line again goes on where the run has stopped, in another stage or on another number of ranks as well. Copy this
file and put your own model and data into it; docs/checkpoints.md says how torchrun starts it.
"""

import argparse
import contextlib
import faulthandler
import math
import os
import signal
import socket
import time
from concurrent.futures import wait
from functools import partial

import torch
import torch.distributed as dist

from harness.engine import checkpoint
from harness.engine.all_or_none import all_or_none, on_all
from harness.run import engines, journal, process_group
from harness.run.data import Sequences, hold_out, load_text
from harness.run.folder import lock, unfinished
from harness.run.model import GPT, next_token_loss, preset
from harness.run.train_options import arguments, changed, check_batch, kept, learning_rate

HELD_OUT_BATCHES = 4  # of an evaluation
EARLY = 0.9  # of the collectives' timeout: their error would end a rank that hangs before it could tell where
PATIENCE = 0.8  # of it, for the folder: a network's file system may keep a dead machine's lock for some 90 seconds


def listen():
    """What says from now on whether somebody wants this rank to stop: SIGTERM, Ctrl-C or SIGUSR1.

    A second signal ends it at once. Signals within a second are one: torchrun passes on what Slurm and systemd send to
    all processes.
    """
    heard = []

    def hear(number: int, frame) -> None:
        heard.append(time.monotonic())
        if heard[-1] > heard[0] + 1:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, hear)
    return lambda: bool(heard)


class Training:
    """One rank's part of the run."""

    def __init__(self, options: argparse.Namespace, me: process_group.Rank, text, held_out):
        config = preset(options.preset)
        self.options, self.me, self.step, self.next = options, me, 0, 0  # next: number of the next sequence
        self.on_gpu = me.device.type != "cpu"  # asking a GPU that is not used would take memory on it
        self.gpu = torch.get_device_module(me.device)
        self.text = Sequences(text, config.seq, options.seed, me.device)
        self.held_out = Sequences(held_out, config.seq, options.seed, me.device)
        torch.manual_seed(hash((options.seed, me.rank)))  # dropout, if a model has it: another one on every rank
        adamw = partial(torch.optim.AdamW, lr=options.lr, weight_decay=0.1, fused=self.on_gpu)
        model, dtype = GPT(config, options.seed).to(me.device), engines.DTYPES[options.dtype]
        mixed = {"param_dtype": dtype, "reduce_dtype": dtype and torch.float32}
        self.engine = engines.STAGES[options.stage](model, adamw, **mixed)  # a chapter has no `no_sync`, nor clipping
        self.saving = self.journal = None

    def progress(self) -> None:
        """If the next call of this comes too late, this rank prints where each of its threads is, and ends."""
        faulthandler.dump_traceback_later(EARLY * process_group.timeout(), exit=True)

    def parts(self, first: int) -> list[tuple[range, float]]:
        """This rank's sequences of each backward, and their share of the batch, which begins with number `first`.

        All ranks together have the whole batch, whatever their number. So on fewer ranks it is still the same run.
        """
        batch, each = self.options.global_batch, self.options.accumulate
        cuts = [first + batch * cut // (self.me.world_size * each) for cut in range(self.me.world_size * each + 1)]
        mine = range(self.me.rank * each, (self.me.rank + 1) * each)
        return [(range(cuts[part], cuts[part + 1]), (cuts[part + 1] - cuts[part]) / batch) for part in mine]

    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: this rank's part of the batch's mean loss, and the norm of all gradients."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.options)
        loss, parts = 0.0, self.parts(self.next)
        for number, (sequences, share) in enumerate(parts, 1):
            self.progress()
            inputs, targets = self.text(sequences)
            with contextlib.nullcontext() if number == len(parts) else self.engine.no_sync():
                part = next_token_loss(self.engine(inputs), targets) * share
                (part * self.me.world_size).backward()  # as the engine divides the ranks' sum by their number
            loss += part.detach()
        norm = self.engine.clip_grad_norm_(self.options.clip or math.inf)
        self.engine.step()
        self.engine.zero_grad()
        self.step, self.next = self.step + 1, self.next + self.options.global_batch
        return loss, norm

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss on held-out text, always on the same sequences. A collective."""
        self.engine.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.me.device)
        for number in range(HELD_OUT_BATCHES):
            for sequences, share in self.parts(number * self.options.global_batch):
                self.progress()
                inputs, targets = self.held_out(sequences)
                loss += next_token_loss(self.engine(inputs), targets) * share
        self.engine.train()
        dist.all_reduce(loss)
        return loss.item() / HELD_OUT_BATCHES

    def save(self) -> None:
        """Training goes on as soon as this rank's part is copied."""
        if self.journal:
            self.journal.to_disk()
        self.finish_save()
        about = {"step": self.step, "next": self.next, "rank": self.me.rank, "ranks": self.me.world_size}
        about["options"] = kept(self.options)
        about["random"] = [torch.get_rng_state(), *([self.gpu.get_rng_state()] if self.on_gpu else [])]
        self.saving = checkpoint.async_save(self.engine, self.options.folder, keep=self.options.keep, **about)

    def finish_save(self) -> None:
        """A save may take its time, as long as the files of all ranks grow. Raises what has made it fail."""
        written = None
        while self.saving and not self.saving.done():
            nbytes = unfinished(self.options.folder)
            if nbytes != written:
                self.progress()
            written = nbytes
            wait([self.saving], timeout=0.2)
        if self.saving:
            self.me.print("saved by", self.saving.result())
            self.saving = None

    def load(self) -> None:
        """From the newest checkpoint that is good. Without any the run is at its beginning."""
        folder, rank = self.options.folder, self.me.rank
        found = all_or_none(lambda: checkpoint.complete(folder) if rank == 0 else None, None)[0]
        for path in reversed(found):
            try:
                about = checkpoint.load(self.engine, path)
            except checkpoint.Damaged as error:
                self.me.print(f"not taken: {error}")
                continue
            self.step, self.next = about["step"], about["next"]
            if (about["rank"], about["ranks"]) == (rank, self.me.world_size):  # else they begin anew
                torch.set_rng_state(about["random"][0])
                if self.on_gpu and len(about["random"]) > 1:
                    self.gpu.set_rng_state(about["random"][1])
            self.me.print(f"going on after step {self.step}, from {path}")
            if news := changed(about["options"], self.options):
                self.me.print(f"changed since step {self.step}: {', '.join(news)}")
            return
        if found:
            raise RuntimeError(f"no checkpoint in {str(folder)!r} is good. To begin anew take another --folder")

    def run(self, asked) -> None:
        """Go on where the run has stopped, until its end or until `asked()` says on any rank that it should leave."""
        self.load()
        first, folder = self.step, self.options.folder
        processes = all_or_none(lambda: f"{socket.gethostname()}:{os.getpid()}", None)
        before = None
        if self.me.rank == 0:
            before = journal.of(journal.read(folder / journal.NAME), None)[-1:]
            self.journal = journal.Journal(folder, first)
        about = {"stage": self.options.stage, "preset": self.options.preset, "ranks": self.me.world_size}
        self.log(event="start", step=first, **about, processes=processes)
        try:
            why, onwards = self.steps(asked, before)
            self.finish_save()
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.log(event="left", step=self.step, why=why)
        self.me.print(f"{why}, after step {self.step} of {self.options.steps}. {onwards}")

    def steps(self, asked, before) -> tuple[str, str]:
        """Step by step, until one is the last. `before` is the last step of an earlier start.

        Returns why it is the last, and how to go on.
        """
        while self.step < self.options.steps:
            began, line = time.perf_counter(), {"lr": learning_rate(self.step, self.options)}
            loss, norm = self.train()
            # A signal reaches some ranks only, and each in another moment. The sum tells all of them after which step
            # to leave. The host waits for the GPU here, once per step.
            told = torch.stack([loss.double(), torch.tensor(asked(), dtype=torch.float64, device=self.me.device)])
            dist.all_reduce(told)
            line["loss"], leave = told.tolist()
            tokens = self.options.global_batch * self.text.seq
            line |= {"norm": norm.item(), "tokens_per_s": round(tokens / (time.perf_counter() - began))}
            last = leave or self.step == self.options.steps
            if self.step == self.options.steps or self.step % self.options.evaluate_every == 0:
                line["held_out"] = self.evaluate()
            self.log(step=self.step, **line, ranks=self.me.world_size, next=self.next)
            if before:
                self.log_restart(before.pop())
            if last or self.step % self.options.print_every == 0:
                numbers = ", ".join(f"{name} {line[name]:.4g}" for name in line)
                self.me.print(f"step {self.step}/{self.options.steps}: {numbers}")
            if last or self.step % self.options.save_every == 0:
                self.save()
            if leave:
                return "left because it was asked to", "The same line goes on from here"
        return "done", "A larger --steps goes on from here"

    def log_restart(self, last: dict) -> None:
        """The step before this one was `last`'s, of another start: how long is that ago, and what was made again?"""
        repeated = last["step"] - self.step + 1
        self.log(event="restart", step=self.step - 1, repeated=repeated, seconds=round(time.time() - last["time"], 2))

    def log(self, **line) -> None:
        if self.journal:
            self.journal.write(**line)


def main(argv=None) -> None:
    options = arguments(argv)
    seq = preset(options.preset).seq
    text, held_out = hold_out(load_text(options.data, seq), seq)
    me = process_group.start(options.backend, options.device, options)
    check_batch(options, me.world_size)
    seconds = PATIENCE * process_group.timeout()
    held = on_all(lambda: me.rank == 0 and lock(options.folder, seconds), None)  # noqa: F841  until this process ends
    title = engines.ENGINES[options.stage].title
    me.print(f"{title}, GPT {options.preset}, {me.world_size} rank(s) over {me.backend}: {me.why}")
    Training(options, me, text, held_out).run(listen())
    process_group.stop()


if __name__ == "__main__":
    process_group.run(main)

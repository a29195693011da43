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
from concurrent.futures import wait
from functools import partial

import torch
import torch.distributed as dist

from harness.engine import checkpoint
from harness.engine.together import together
from harness.run import engines, process_group
from harness.run.data import Sequences, hold_out, load_text
from harness.run.ending import NotAgain
from harness.run.folder import hold, unfinished
from harness.run.journal import Journal, last_step, note_lost
from harness.run.leaving import Leaving
from harness.run.model import GPT, next_token_loss, preset
from harness.run.train_options import arguments, changed, check_batch, kept, learning_rate
from harness.run.watchdog import Watchdog

HELD_OUT_BATCHES = 4  # of an evaluation


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
        self.engine = engines.build(options.stage, model, adamw, me.device, dtype=dtype)
        self.saving = None
        self.watchdog = Watchdog(me.rank, process_group.timeout(), self.lost)

    def lost(self, why: str) -> None:
        with contextlib.suppress(OSError):
            note_lost(self.options.folder, self.me.rank, self.step, why)

    def log(self, **line) -> None:
        if self.journal:
            self.journal.write(**line)

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
        self.wait_for_save()
        self.watchdog.progress("saving")
        about = {"step": self.step, "next": self.next, "rank": self.me.rank, "ranks": self.me.world_size}
        about["options"] = kept(self.options)
        about["random"] = [torch.get_rng_state(), *([self.gpu.get_rng_state()] if self.on_gpu else [])]
        self.saving = checkpoint.async_save(self.engine, self.options.folder, keep=self.options.keep, **about)
        self.saving.step = self.step

    def say_saved(self) -> None:
        """Of a save that is over, once. If it has failed, the next one or the run's end raises its error."""
        if self.saving and self.saving.done() and not self.saving.exception():
            step, one, self.saving = self.saving.step, self.saving.result(), None
            if self.me.rank == 0:  # what all ranks have written is there by now
                nbytes = sum(file.stat().st_size for file in one.path.iterdir())
                took = f"{nbytes:,} bytes in {one.seconds:.1f} s; training stood still for {one.stood_still:.2f} s"
                print(f"saved step {step} to {one.path}: {took}", flush=True)

    def wait_for_save(self) -> None:
        """A save may take its time, as long as the files of all ranks grow."""
        before = None
        while self.saving and not self.saving.done():
            if (nbytes := unfinished(self.options.folder)) != before:
                self.watchdog.progress(f"the save after step {self.step}")
            before = nbytes
            wait([self.saving], timeout=0.2)
        self.say_saved()

    def load(self) -> None:
        """From the newest checkpoint that is good. Without any the run is at its beginning."""
        folder, rank = self.options.folder, self.me.rank
        made = last_step(folder) if rank == 0 else 0
        found = together(lambda: checkpoint.complete(folder) if rank == 0 else None, None)[0]
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
            again = f": {made - self.step} steps are made again" if self.step < min(made, self.options.steps) else ""
            self.me.print(f"going on after step {self.step}, from {path}{again}")
            if news := changed(about.get("options", {}), self.options):
                self.me.print(f"changed since step {self.step}: {', '.join(news)}")
            return
        if found:
            raise NotAgain(
                f"no checkpoint in {str(folder)!r} is good; losses.jsonl has steps up to {last_step(folder)}. To begin "
                "anew take another --folder"
            )
        if made:
            self.me.print(f"no checkpoint was saved yet: all {made} steps are made again")

    def run(self, leaving: Leaving, joined: float) -> None:
        """Go on where the run has stopped, until its end or until somebody asks a rank to leave."""
        self.watchdog.progress("loading", watched=False)
        self.load()
        times = {"joined": joined, "loaded": time.time()}
        launched = float(os.environ.get("ZERO_LAUNCHED", 0))
        processes = together(lambda: (f"{socket.gethostname()}:{os.getpid()}", launched), None)
        processes, times["launched"] = [name for name, _ in processes], min(began for _, began in processes)
        self.journal = Journal(self.options.folder, self.step) if self.me.rank == 0 else None
        about = {"stage": self.options.stage, "preset": self.options.preset, "ranks": self.me.world_size}
        first = self.step
        self.log(event="start", step=first, **about, processes=processes)
        try:
            why = self.steps(leaving, times)
            self.wait_for_save()
            if self.saving:
                self.saving.result()  # it has failed
            self.watchdog.progress("the end", watched=False)
        except Exception as error:
            self.lost(str(error))
            raise
        self.log(event="left", step=self.step, why=why)
        if why != "done":
            self.me.print(f"{why}, after step {self.step} of {self.options.steps}. The same line goes on from here")
            return
        nothing = f"already at step {first}, --steps is {self.options.steps}: nothing to do"
        done = f"done: {self.step} steps" if first < self.step else nothing
        self.me.print(f"{done}. A larger --steps goes on from here")

    def steps(self, leaving: Leaving, times: dict) -> str:
        """Step by step, until one is the last. Returns why it is."""
        options, me, first = self.options, self.me, True
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
            at_end = self.step == options.steps
            if at_end or self.step % options.evaluate_every == 0:
                line["held_out"] = self.evaluate()
            self.log(**line, ranks=me.world_size, next=self.next)
            self.say_saved()
            if first and self.journal and (phases := self.journal.back(**times)):
                told = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items())
                print(f"back {sum(phases.values()):.1f} s after the last step: {told}", flush=True)
            first = False
            if asked or at_end or self.step % options.print_every == 0:
                held_out = f", held-out {line['held_out']:.4f}" if "held_out" in line else ""
                numbers = f"loss {loss:.4f}{held_out}, lr {lr:.1e}, {rate:,.0f} tokens/s"
                me.print(f"step {self.step}/{options.steps}: {numbers}")
            if asked or at_end or self.step % options.save_every == 0:
                self.save()
            if asked:
                return "left because it was asked to"
        return "done"


def main(argv=None) -> None:
    options = arguments(argv)
    seq = preset(options.preset).seq
    text, held_out = hold_out(load_text(options.data, seq), seq)
    leaving = Leaving()
    me = process_group.start(options.backend, options.device)
    joined = time.time()
    check_batch(options, me.world_size)
    held = hold(options.folder, me)  # noqa: F841  until this process ends
    title = engines.ENGINES[options.stage].title
    me.print(f"{title}, GPT {options.preset}, {me.world_size} rank(s) over {me.backend}: {me.why}")
    Training(options, me, text, held_out).run(leaving, joined)
    process_group.stop()


if __name__ == "__main__":
    process_group.run(main)

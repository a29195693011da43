"""A training run that survives crashes: `./launch.sh train zero3 2 --folder runs/first`.

If you run the same command again, it continues where the run stopped. You may change the stage and the number of ranks.
For your own model, copy this file and put your model and data into it. docs/train.md shows the torchrun command that
starts the copy.
"""

import argparse
import faulthandler
import math
import signal
import time
from functools import partial

import torch
import torch.distributed as dist

from zerolab.engine import checkpoint
from zerolab.engine.together import all_succeed
from zerolab.run import engines, evaluation, folder_lock, journal, process_group, train_options
from zerolab.run.data import Batches, load_text, split
from zerolab.run.model import GPT, next_token_loss, preset
from zerolab.run.shared_options import check_world_size, timeout

WARMUP = 10  # steps in which the learning rate grows
LARGEST_NORM = 1.0  # of the gradients: larger ones are clipped to it
PRINT_EVERY = 10  # steps
EARLY = 0.8  # of the collectives' timeout, whose own error would end a rank before it could show where it hangs


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """It grows evenly to `--lr` in the first steps, then falls along a cosine to a tenth of it."""
    if step < WARMUP:
        return options.lr * (step + 1) / WARMUP
    done = (step - WARMUP) / max(options.steps - WARMUP, 1)
    return options.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def make_optimizers(model: GPT, options: argparse.Namespace, device: torch.device) -> tuple[list, list]:
    """The optimizers, and the parameters that must not be cut between ranks, because Muon works on whole matrices."""
    hyper = {"lr": options.lr, "weight_decay": 0.1}
    matrices = []
    if options.optimizer == "muon":
        matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    optimizers = [torch.optim.AdamW(others, fused=device.type != "cpu", **hyper)]
    if matrices:
        # With this adjustment a rate that suits AdamW suits Muon, so both follow the same schedule.
        optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **hyper))
    return optimizers, matrices


class Training:
    """One rank's part of the run."""

    def __init__(self, options: argparse.Namespace, world: process_group.World, text: torch.Tensor):
        self.config = preset(options.preset)
        self.options, self.world, self.step = options, world, 0
        text, end = split(text, self.config.seq)
        self.batches = Batches(text, options.global_batch, self.config.seq, options.seed, world.device)
        self.unseen = Batches(end, options.global_batch, self.config.seq, options.seed, world.device)
        model = GPT(self.config, options.seed).to(world.device)
        self.engine = self.build_engine(model)
        self.saving = self.journal = None

    def build_engine(self, model):
        optimizers, whole = make_optimizers(model, self.options, self.world.device)
        more = {"dtype": engines.DTYPES[self.options.dtype], "engine": True, "whole": whole}  # the chapters cannot clip
        return engines.build(self.options.stage, model, optimizers, self.world.device, **more)

    def run(self, asked) -> None:
        """Continue where the run stopped, until its end or until `asked()` is true on any rank."""
        self.load()
        if self.world.rank == 0:
            self.journal = journal.Journal(self.options.folder, self.step, self.options.tensorboard)
        leave = False
        while self.step < self.options.steps and not leave:
            leave = self.one_step(asked)
        self.finish_save()
        where = f"after step {self.step} of {self.options.steps}"
        if leave:
            self.world.print(f"Stopped on request {where}. Run the same command to continue.")
        else:
            self.world.print(evaluation.continue_text(self.engine.model, self.forward, self.config, self.unseen))
            self.world.print(f"Done {where}. To train longer, run it with a larger --steps.")
        faulthandler.cancel_dump_traceback_later()

    def one_step(self, asked) -> bool:
        """Train, write it down, and save if it is time to. Returns whether all ranks leave after it."""
        lr, began = learning_rate(self.step, self.options), time.perf_counter()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        loss, norm = self.train()
        # A signal may reach only some ranks, and at different moments. The sum makes all of them leave after the same
        # step. The host waits for the GPU here, once per step.
        summed = torch.stack([loss.double(), torch.tensor(asked(), dtype=torch.float64, device=self.world.device)])
        dist.all_reduce(summed)
        loss, leave = summed.tolist()
        tokens = self.options.global_batch * self.config.seq / (time.perf_counter() - began)
        numbers = {"loss": loss, "norm": norm.item(), "lr": lr, "tokens_per_s": tokens}
        due = self.step % self.options.save_every == 0 or self.step == self.options.steps
        if due:
            loss_of = partial(self.loss, self.unseen)
            numbers["evaluation_loss"] = evaluation.mean_loss(self.engine.model, loss_of)
        if self.journal:
            self.journal.write(self.step, numbers, ranks=self.world.world_size, preset=self.options.preset)
        if leave or due or self.step % PRINT_EVERY == 0:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            self.world.print(f"step {self.step}/{self.options.steps}: {shown}")
        if leave or due:
            self.save()
        return bool(leave)

    def train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: this rank's part of the batch's mean loss, and the norm of all gradients."""
        torch.manual_seed(hash((self.options.seed, self.step, self.world.rank)))  # for dropout
        loss = self.loss(self.batches, self.step)
        (loss * self.world.world_size).backward()  # the engine divides the ranks' sum by their number
        norm = self.engine.clip_grad_norm_(LARGEST_NORM)
        self.engine.step()
        self.engine.zero_grad()
        self.step += 1
        return loss.detach(), norm

    def loss(self, batches: Batches, step: int) -> torch.Tensor:
        """This rank's part of the mean loss of a batch, which is the same on any number of ranks."""
        inputs, targets = batches.part(step, self.world.rank, self.world.world_size)
        return next_token_loss(self.forward(inputs), targets) * len(inputs) / self.options.global_batch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.makes_progress()
        return self.engine(inputs)

    def makes_progress(self) -> None:
        """If the next call of this comes too late, this rank prints where each of its threads is, and exits."""
        faulthandler.dump_traceback_later(EARLY * timeout(), exit=True)

    def save(self) -> None:
        """Training continues as soon as this rank's part is copied."""
        self.finish_save()
        self.saving = checkpoint.async_save(self.engine, self.options.folder, step=self.step)

    def finish_save(self) -> None:
        """Wait for the last save. Raises RuntimeError if it failed."""
        if self.saving:
            self.makes_progress()
            self.world.print("saved by", self.saving.result())
        self.saving = None

    def load(self) -> None:
        """From the newest good checkpoint. Without any the run begins."""
        loaded = checkpoint.load_newest(self.engine, self.options.folder)
        if loaded:
            path, extra = loaded
            self.step = extra["step"]
            self.world.print(f"continuing after step {self.step}, from {path}")


def main() -> None:
    options = train_options.arguments()
    text = load_text(options.data, preset(options.preset).seq)
    world = process_group.start(options.backend, options.device)
    check_world_size(options, world.world_size)
    patience = EARLY * timeout()  # a network file system may keep a dead machine's lock for some time
    held = all_succeed(lambda: folder_lock.lock(options.folder, patience) if world.rank == 0 else None, None)  # noqa: F841
    world.print(f"{options.stage}, GPT {options.preset}, {world.world_size} rank(s) over {world.backend}: {world.why}")
    signals = []  # that ask this rank to stop
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: signals.append(number))
    Training(options, world, text).run(lambda: bool(signals))
    process_group.stop()


if __name__ == "__main__":
    process_group.run(main)

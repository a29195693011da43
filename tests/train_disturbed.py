"""zerolab/run/train.py with dropout, so that random numbers count, and with trouble, once each.

$TROUBLE is a folder. The file of a trouble there has the step after which it comes: rank 0 is killed ("kill"), rank 1
hangs ("hang"), somebody stops the run ("stop"), rank 1 hangs while it writes a checkpoint ("hang_in_save").
"""

import os
import signal
import time
from pathlib import Path

from torch.nn import functional as F

from zerolab.engine.checkpoint import folders
from zerolab.run import process_group, train

write = folders.write


def comes(trouble: str, step: int) -> bool:
    file = Path(os.environ["TROUBLE"], trouble)
    if not file.exists() or step < int(file.read_text()):
        return False
    file.unlink()
    return True


def hang() -> None:
    time.sleep(10**6)


class Dropping(train.GPT):
    def forward(self, tokens):
        return F.dropout(super().forward(tokens), 0.1, self.training)


class Disturbed(train.Training):
    def train(self):
        if self.world.rank == 0 and comes("kill", self.step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.world.rank == 1 and comes("hang", self.step):
            time.sleep(1)  # so the other rank is the first to say where it waits
            self.makes_progress()
            hang()
        if self.world.rank == 1 and comes("stop", self.step):
            os.kill(os.getpid(), signal.SIGTERM)  # as systemd does, and Slurm's scancel: all processes
            os.kill(os.getppid(), signal.SIGTERM)  # torchrun
        return super().train()


def hang_and_write(state, *args):
    (about,) = state["extra"].get("1", (None,))  # only rank 1 writes this
    if about and comes("hang_in_save", about["step"]):
        hang()
    return write(state, *args)


if __name__ == "__main__":
    train.GPT, train.Training, folders.write = Dropping, Disturbed, hang_and_write
    process_group.run(train.main)

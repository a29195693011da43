"""harness/run/train.py with dropout, so that random numbers count; and rank 1 hangs when the file $HANG is there, once.

Run it by `python -m harness.run.restarts ... train_disturbed.py zero3 ...`.
"""

import os
import time
from pathlib import Path

from torch.nn import functional as F

from harness.run import process_group, train


class Dropping(train.GPT):
    def forward(self, tokens):
        file = Path(os.environ.get("HANG", "none"))
        if os.environ.get("RANK") == "1" and file.exists():
            file.unlink()
            hang()
        return F.dropout(super().forward(tokens), 0.1, self.training)


def hang() -> None:
    time.sleep(10**6)


def put_in() -> None:
    train.GPT = Dropping


if __name__ == "__main__":
    put_in()
    process_group.run(train.main)

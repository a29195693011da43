"""harness/run/train.py with dropout, so that random numbers count; and rank 1 hangs when the file $HANG is there, once.

So it does in its last save if there is a file $HANG.save.

Run it by `python -m harness.run.restarts ... train_disturbed.py zero3 ...`.
"""

import contextlib
import os
import time
from pathlib import Path
from unittest import mock

from torch.nn import functional as F

from harness.engine import checkpoint_write
from harness.run import process_group, train

written = checkpoint_write.write


class Dropping(train.GPT):
    def forward(self, tokens):
        if os.environ.get("RANK") == "1":
            hang("")
        return F.dropout(super().forward(tokens), 0.1, self.training)


def write(state, *args):
    about = state.get(("extra", "1"))  # what rank 1 writes, and it alone
    if about and about["step"] == about["options"]["steps"]:
        hang(".save")
    return written(state, *args)


def hang(suffix: str) -> None:
    """If the file is there."""
    file = Path(os.environ.get("HANG", "none") + suffix)
    if file.exists():
        file.unlink()
        time.sleep(10**6)


@contextlib.contextmanager
def put_in():
    with mock.patch.object(train, "GPT", Dropping), mock.patch.object(checkpoint_write, "write", write):
        yield


if __name__ == "__main__":
    with put_in():
        process_group.run(train.main)

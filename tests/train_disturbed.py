"""harness/run/train.py with dropout, so that random numbers count. And rank 1 hangs, once, where a file says so: in a
step if there is $HANG, in its last save if there is $HANG.save.
"""

import os
import time
from pathlib import Path

from torch.nn import functional as F

from harness.engine.checkpoint import files
from harness.run import process_group, train

write = files.write


def hang(suffix: str = "") -> None:
    file = Path(os.environ.get("HANG", "none") + suffix)
    if file.exists():
        file.unlink()
        time.sleep(10**6)


class Dropping(train.GPT):
    def forward(self, tokens):
        if os.environ.get("RANK") == "1":
            hang()
        return F.dropout(super().forward(tokens), 0.1, self.training)


def hang_and_write(state, *args):
    about = state.get(("extra", "1"))  # what rank 1 writes, and it alone
    if about and about["step"] == about["options"]["steps"]:
        hang(".save")
    return write(state, *args)


if __name__ == "__main__":
    train.GPT, files.write = Dropping, hang_and_write
    process_group.run(train.main)

"""Count the bytes that ranks on one machine really send, by the loopback interface's counter (Linux)."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


def sent(call: Callable[[], object]) -> int | None:
    """Bytes that all ranks together send while every rank runs `call`: the least of five runs. None without a counter.

    A collective. Other programs on the machine use the interface too, so the least is closest to the truth. It includes
    TCP headers and the barriers, a few thousand bytes, so `call` should send megabytes.
    """
    found = []
    for _ in range(5 if COUNTER.exists() else 0):
        dist.barrier()
        before = int(COUNTER.read_text())
        dist.barrier()  # nobody sends before all have read
        call()
        dist.barrier()
        found.append(int(COUNTER.read_text()) - before)
        dist.barrier()  # nobody goes on before all have read
    return min(found, default=None)

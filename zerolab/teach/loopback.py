"""The bytes that ranks on one machine really send, from the counter of the loopback interface (Linux)."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


def sent(call: Callable[[], object]) -> int | None:
    """Bytes that all ranks send while each runs `call`: the minimum of five runs. None without a counter.

    A collective. Other programs on the machine may use the interface too, hence the minimum. It includes TCP headers
    and the barriers, a few thousand bytes, so `call` should send megabytes.
    """
    found = []
    for _ in range(5 if COUNTER.exists() else 0):
        dist.barrier()
        before = int(COUNTER.read_text())
        dist.barrier()  # no rank sends before all ranks have read
        call()
        dist.barrier()
        found.append(int(COUNTER.read_text()) - before)
        dist.barrier()  # no rank continues before all ranks have read
    return min(found, default=None)

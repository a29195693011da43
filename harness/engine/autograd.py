"""Two questions to autograd: is a backward running, and when is it over?"""

import torch
from torch.autograd import Variable


def backward_now() -> int | None:
    """Autograd's number of the backward that runs on this thread; None outside."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def when_backward_ends(callback) -> int:
    """Have autograd call `callback()` when the backward that is running is over; returns that backward's number."""
    Variable._execution_engine.queue_callback(callback)
    return backward_now()

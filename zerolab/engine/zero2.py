"""ZeRO-2 with options."""

import torch
from torch.autograd import Variable

from zero2 import ZeRO2, weak_hook
from zerolab.engine import accumulation
from zerolab.engine.bucket import EngineReduction
from zerolab.engine.common import BucketEngine
from zerolab.engine.life import Gradients


class ZeRO2Engine(BucketEngine, ZeRO2):
    """ZeRO-2 with the options of `Engine` and the chapter's `bucket_mb`."""

    def __init__(self, model, optimizer, *, bucket_mb=None, **options):
        self.backward_id = None  # with `find_unused`: the backward whose end autograd will report
        super().__init__(model, optimizer, bucket_mb=bucket_mb, **options)

    def make_reduction(self, bucket):
        return EngineReduction(bucket)

    def on_gradient(self, param):
        bucket = self.bucket_of[param]
        self.backward_began()
        bucket.used.add(param)
        if not self.sync:
            accumulation.keep(bucket, param)
            return
        if self.options.find_unused:
            self.notice_backward()
        super().on_gradient(param)

    def notice_backward(self):
        """On the first call in a backward, have autograd call `flush` when the backward is over."""
        number = torch._C._current_graph_task_id()
        if self.backward_id != number:
            self.backward_id = number
            self.expect_gradients()
            Variable._execution_engine.queue_callback(weak_hook(self.flush))

    def flush(self):
        """With `find_unused`: send the buckets that are still incomplete, with zeros for the missing gradients."""
        for bucket in self.buckets[self.turn :]:
            bucket.missing.clear()
        self.send_complete()

    def finish_reduction(self):
        if self.options.find_unused and self.gradients is Gradients.CLEARED:
            self.flush()  # on this rank, no parameter got a gradient in backward
        self.receive()

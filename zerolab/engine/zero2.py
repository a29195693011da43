"""ZeRO-2 with options."""

import torch
from torch.autograd import Variable

from zero1 import gather_parameters
from zero2 import ZeRO2, weak_hook
from zero3 import default_units
from zerolab.engine import accumulation, checks
from zerolab.engine.bucket import EngineBucket, EngineReduction
from zerolab.engine.common import Engine, broadcast_frozen
from zerolab.engine.life import Gradients


class ZeRO2Engine(Engine, ZeRO2):
    """ZeRO-2 with the options of `Engine` and the chapter's `bucket_mb`."""

    def __init__(self, model, optimizer, *, bucket_mb=None, **options):
        self.backward_id = None  # with `find_unused`: the backward whose end autograd will report
        super().__init__(model, optimizer, bucket_mb=bucket_mb, **options)

    def check(self):
        super().check()
        checks.check_has_values(self.model, self.options)

    def partition(self, bucket_mb):
        frozen = broadcast_frozen(self)
        buckets = super().partition(bucket_mb)
        self.all_buckets = buckets + [self.make_bucket(name, [(name, param)]) for name, param in frozen]
        return buckets

    def make_runs(self, bucket_mb):
        whole = self.options.whole
        runs = super().make_runs(whole.bucket_mb(self) if bucket_mb is None else bucket_mb)
        return [kind for run in runs for kind in whole.kinds(run)]

    def make_bucket(self, name, named_params):
        return EngineBucket(name=name, named_params=named_params, group=self.group, options=self.options)

    def modules_that_cast(self):
        return [self.model, *default_units(self.model)]

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
        """Send what is still incomplete, with zeros for the gradients that did not come (`find_unused`)."""
        for bucket in self.buckets[self.turn :]:
            bucket.missing.clear()
        self.send_complete()

    def finish_reduction(self):
        if self.options.find_unused and self.gradients is Gradients.CLEARED:
            self.flush()  # backward has brought no gradient at all on this rank
        self.receive()

    def shards_changed(self):
        """Called after something other than the optimizer has written to the shards."""
        gather_parameters(self.all_buckets)

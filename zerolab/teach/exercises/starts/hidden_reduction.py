"""ZeRO-1 that hides its reduction: it is sent while backward computes.

The chapter starts its all-reduces when backward is over. A bucket that has all its gradients could travel earlier.
Three things to think of. All ranks must issue the same collectives in the same order, also if their gradients come in
different orders. Nobody may write to a buffer that is in flight, and every param.grad is a view of such a buffer. And a
step may have several backwards. torch calls a hook when it has finished a gradient:
param.register_post_accumulate_grad_hook(hook). Check it: ./launch.sh check hidden_reduction
"""

from zero1 import ZeRO1


class Engine(ZeRO1):
    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        super().__init__(model, optimizer, bucket_mb=bucket_mb, group=group)
        raise NotImplementedError("Step 0: have torch call a hook for each gradient")

    def reduce_gradients(self):
        raise NotImplementedError("Step 3: receive what was sent in backward")

"""A third of the traffic saved

Symptom: The losses differ, and less is sent.

Clue: Each rank puts one part of its gradients into a sum over the ranks. Whose elements are added up?

Hint: `ZeRO1.start_reduce` in zero1.py, in step 3.

Answer: Every rank all-reduces its own shard of its local gradients. So rank 0's shard 0 is added to rank 1's shard 1.
The sum of one shard over all ranks is a different collective, the reduce-scatter, which gets the whole buffer.

Unnoticed: All shards have the same size, so no collective raises an error. The loss falls, because half of each sum is
this rank's correct local gradient.

Read: zero1.py, `reduce_gradients`; zero2.py, `Reduction`.
"""

import torch.distributed as dist

from zero1 import ZeRO1

STAGE = "zero1"
DIFFERS = {"losses", "sent"}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"


class ReduceOwnShard(ZeRO1):
    def start_reduce(self, bucket):
        # This rank updates only its own shard: why send the rest?
        return dist.all_reduce(bucket.gradient[bucket.own], group=self.group, async_op=True)


def build(model, optimizer, device):
    return ReduceOwnShard(model, optimizer)

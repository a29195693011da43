"""One seed per rank

Symptom: The losses differ. On rank 0 the first one is correct, and on rank 1 not even that.

Clue: What must be equal on all ranks before the first step?

Hint: `Bucket.flatten` in zero1.py, in step 0.

Answer: Nobody broadcasts rank 0's weights at the start. After the first all-gather all ranks agree on a patchwork: each
shard comes from its owner's initial weights.

Unnoticed: The ranks agree from the second step on, and a patchwork of two random initializations is random too. With
the same seed on all ranks, as in most examples, there is no difference at all.

Read: zero1.py, `flatten`: `broadcast_whole`.
"""

from zero1 import Bucket, ZeRO1

STAGE = "zero1"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_values.py::test_all_ranks_start_with_rank_0s_weights"


class LocalBucket(Bucket):
    def flatten(self):
        flat = self.lay_out(self.params, self.params[0].dtype)
        for index, param in enumerate(self.params):
            param.data = self.place(flat, index)
        return flat


class WithoutBroadcast(ZeRO1):
    def make_bucket(self, name, named_params):
        return LocalBucket(name, named_params, self.group)


def build(model, optimizer, device):
    return WithoutBroadcast(model, optimizer)

"""ZeRO-1 for optimizers that look at whole matrices: every parameter belongs entirely to one rank.

The chapter cuts a bucket into N equal shards, and a cut may fall inside a parameter. AdamW does not notice, because it
treats each element by itself. Muon orthogonalizes a matrix, and for a part of a matrix it computes a different update,
without an error. So choose an owner for each parameter, and lay the parameters of rank r into shard r. A shard is then
as large as the fullest rank needs. Everything else stays: each bucket has one all-reduce and one all-gather.

Four things to think of. Which rank should own the next parameter, so that no rank owns much more than the others, even
if every bucket has one parameter? `Bucket.lay_out` assumes that `offsets` ascend. The optimizer needs tensors in the
parameters' shapes, whose gradients are the mean: which tensors of the model are that already? And a rank may own
nothing. Check it: ./launch.sh check whole_matrices
"""

from zero1 import Bucket, ZeRO1, check_model, check_parameters


class WholeBucket(Bucket):
    def assign_places(self):
        """Step 0: as in the chapter, but rank r's parameters lie in shard r, and no shard ends inside a parameter."""
        raise NotImplementedError("Step 0: choose an owner for each parameter")


class Engine(ZeRO1):
    def check(self):
        """As in the chapter, whose `check_optimizer` would refuse Muon because the chapter's shards are flat."""
        check_model(self.model, self.group)
        check_parameters(self.model, self.optimizer)

    def make_bucket(self, name, named_params):
        return WholeBucket(name, named_params, self.group)

    def take_over_optimizer(self):
        """Step 0: the optimizer gets the parameters that this rank owns, and keeps its options."""
        raise NotImplementedError("Step 0: hand whole parameters to the optimizer")

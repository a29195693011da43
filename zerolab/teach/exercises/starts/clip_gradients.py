"""ZeRO-2 with clipping: gradients are scaled so that their norm over all ranks is at most `max_norm`.

What is the norm of a vector that is cut into parts, if you know the norm of each part? A number per rank is enough. A
rank may own nothing but padding, and must take part. A maximum over ranks may lose a NaN. After reduce_gradients() the
gradients of this rank are in the shards: `bucket.shard.grad`. Check it: ./launch.sh check clip_gradients
"""

from zero2 import ZeRO2


class Engine(ZeRO2):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Between backward and `step()`: scale the gradients by min(1, max_norm / (norm + 1e-6)). A collective.

        Returns the norm before, a 0-d tensor in the dtype of the weights that is the same on every rank. It is what
        `torch.nn.utils.clip_grad_norm_` returns for the whole model.
        """
        raise NotImplementedError("Step 3: clip the gradients by their norm over all shards")

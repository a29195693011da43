"""The life of a gradient. One value says where the gradients of a step are, for all parameters: `engine.gradients`.

    value       where the gradients are                                     what sets it
    CLEARED     nowhere                                                     the build, `zero_grad()`
    LOCAL       of this rank, or on their way: the mean is not complete     a backward (`backward_began`)
    KEPT        the same, and the last backward ran under `no_sync`         a backward (`backward_began`)
    REDUCED     in the optimizer's pieces: the mean over the ranks          `reduce_gradients()`, the end of `step()`
    UPDATING    the same, and the optimizer may update now                  `step()`

A backward may follow REDUCED, before or after `step()`. Then the gradients of the pieces, which your loop may have
changed, go back into the shard's gradient, and the new ones are added (`take_back` in bucket.py).

What differs from bucket to bucket is data of the bucket: `missing` (gradients that this backward has still to bring),
`used` (parameters that got one since `zero_grad()`), `kept` (whole gradients under `no_sync`) and `pieces`.
"""

from enum import Enum


class Gradients(Enum):
    CLEARED = "cleared"
    LOCAL = "local"
    KEPT = "kept"
    REDUCED = "reduced"
    UPDATING = "updating"

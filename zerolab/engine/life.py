"""The life of a gradient: `engine.gradients` is one value for all parameters, and shows where their gradients are.

    value       the gradients                                               set by
    CLEARED     do not exist                                                the build, `zero_grad()`
    LOCAL       are local or being sent; the mean is not complete           a backward (`backward_began`)
    KEPT        as LOCAL, and the last backward ran under `no_sync`         a backward (`backward_began`)
    REDUCED     are the mean over the ranks, in the optimizer's pieces      `reduce_gradients()`, the end of `step()`
    UPDATING    as REDUCED, and the optimizer may update now                `step()`

A backward may follow REDUCED, before or after `step()`. Then the gradients of the pieces, which your loop may have
changed, go back into the shard's gradient, and the new ones are added (`take_back` in bucket.py).

Data that differ from bucket to bucket are attributes of the bucket: `missing` (parameters whose gradient this backward
has not finished yet), `used` (parameters that got a gradient since `zero_grad()`), `kept` (whole gradients under
`no_sync`) and `pieces`.
"""

from enum import Enum


class Gradients(Enum):
    CLEARED = "cleared"
    LOCAL = "local"
    KEPT = "kept"
    REDUCED = "reduced"
    UPDATING = "updating"

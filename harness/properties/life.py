"""An engine's life: what it gives out and takes in."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.properties import parts
from harness.properties.property import holds, refused, same


@holds("life", sizes=(3,), further_sizes=(1, 2))
def the_state_of_one_engine_is_taken_in_by_another(engine):
    """What one engine gives out another takes in, whole and in use at once; a state with wrong names is refused."""
    rank = dist.get_rank()
    trained = engine(parts.seeded(parts.OddModel), parts.ADAMW)
    trained.training_step(*parts.token_batch(0, rank), F.cross_entropy)
    state = trained.full_state_dict()
    other = engine(parts.seeded(parts.OddModel, seed=5), parts.ADAMW)
    other.load_full_state_dict(state)
    same("the state that was loaded", other.full_state_dict(), state, step=0)
    for name, value in state.items():  # no view of a bucket, all of which torch.save would write for each entry
        same(f"bytes of the storage under {name}", value.untyped_storage().nbytes(), value.nbytes)
    tokens, _ = parts.token_batch(3, rank)
    with torch.no_grad():  # the weights in use, not only those on file
        same("what both engines compute", other(tokens), trained(tokens), step=1)
    parts.seeded(parts.OddModel).load_state_dict(state)
    for broken, name in (
        ({k: v for k, v in state.items() if k != "head.bias"}, "head.bias"),
        ({**state, "nobody": torch.ones(1)}, "nobody"),
        ({**state, "head.bias": torch.ones(4)}, "head.bias"),
    ):
        refused(lambda broken=broken: other.load_full_state_dict(broken), name, error=(KeyError, ValueError))
    same("the state after what was refused", other.full_state_dict(), state, step=0)

"""torch 2.13 renamed two collectives and warns about the old names, which most articles still use:

    all_gather_into_tensor   is now   all_gather_single
    reduce_scatter_tensor    is now   reduce_scatter_single

The project calls them by their new names. Where torch has only the old ones (2.11, 2.12), this file adds the new.
"""

import torch.distributed as dist

for _new, _old in (
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
):
    if not hasattr(dist, _new):
        setattr(dist, _new, getattr(dist, _old))

"""Everything around the lesson: model, data, process group, loop helpers and instruments.

No file here knows a stage, but for those that run them all (dry_run, sweeps, articles, museum) or read their text
(changes, exercise).
"""

import torch.distributed as dist

# torch 2.13 renamed two collectives and warns about the old names, which most articles still use:
# all_gather_into_tensor is now all_gather_single, reduce_scatter_tensor is reduce_scatter_single.
# The project calls them by their new names; an older torch (2.11, 2.12) gets these as aliases.
for _new, _old in (
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
):
    if not hasattr(dist, _new):
        setattr(dist, _new, getattr(dist, _old))

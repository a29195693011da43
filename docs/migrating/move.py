"""Move a run from ddp.py to zero.py: `python move.py ddp.pt run`. One process does it, without torchrun.

ddp.pt is what DDP scripts usually save: the `state_dict()` of the model and of the optimizer. An optimizer's
`state_dict()` has numbers in place of parameter names, so a model and an optimizer like the ones that were saved are
needed to find the names.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from ddp import make_model, make_optimizer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict


def move(file, folder):
    saved = torch.load(file, map_location="cpu")
    model = make_model()
    optimizer = make_optimizer(model)
    model.load_state_dict(saved.pop("model"))
    optimizer.load_state_dict(saved.pop("optim"))
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "extra": {"0": (saved,)},  # all other values: checkpoint.load() returns them, on every rank
    }
    dcp.save(state, checkpoint_id=Path(folder) / "000001", no_dist=True)


if __name__ == "__main__":
    move(sys.argv[1], sys.argv[2])

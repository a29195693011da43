"""The ranks compare notes in one small collective, so that nobody waits for a rank that has given up."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from harness.engine import accelerator
from harness.engine.safety.waiting import waiting_for


def digest(text: str) -> int:
    """A number that stands for `text` in a collective: 7 bytes of its SHA-256, positive as an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def agree(problem, fingerprint: str, group, model=None, what: str = "all ranks to come as far") -> None:
    """Raise on every rank if one has a problem, or if the ranks are about to shard different models. A collective.

    Where the group's collectives run on GPUs (NCCL), this one runs on that of the model's parameters, or on the current
    one: a rank that has not called `torch.cuda.set_device` has its parameters elsewhere than on GPU 0, as a rule.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1 or dist.get_backend(group) == "fake":  # nobody to compare with
        if problem is not None:
            raise problem
        return
    # The collective runs where the group's backend can run one, whatever is wrong with the model.
    device = accelerator.device_of(group)
    if device.type != "cpu":
        params = model.parameters() if isinstance(model, nn.Module) else ()
        device = next((param.device for param in params if param.device.type == device.type), device)
    mine = torch.tensor([-1 if problem is not None else digest(fingerprint)], device=device)
    everyone = torch.empty(world_size, dtype=mine.dtype, device=device)
    with waiting_for(what, group):
        dist.all_gather_single(everyone, mine, group=group)
        everyone = everyone.tolist()
    if problem is not None:
        raise problem
    failed = [other for other, value in enumerate(everyone) if value == -1]
    if failed:
        raise RuntimeError(f"rank {rank} cannot go on: the checks failed on rank(s) {failed}, see the error there")
    different = [other for other, value in enumerate(everyone) if value != everyone[0]]
    if different:
        raise ValueError(
            f"rank(s) {different} have another model (names, shapes, dtypes, requires_grad), another optimizer (its "
            "name, groups and numbers) or other options than rank 0: every rank must build the same engine"
        )

"""Run on every rank: flags, modules and weights that change after the engine was built."""

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch.nn import functional as F


def changed_flags(stage: str) -> list[str]:
    rank = dist.get_rank()
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, parts.DECAY)
    batch = parts.token_batch(0, rank)
    engine.training_step(*batch, F.cross_entropy)
    model.head.bias.requires_grad_(False)
    found = [message(lambda: engine.training_step(*batch, F.cross_entropy), RuntimeError)]
    model.head.bias.requires_grad_(True)
    engine.training_step(*batch, F.cross_entropy)
    model.frozen.requires_grad_(True)
    found.append(message(lambda: engine.training_step(*batch, F.cross_entropy), RuntimeError))
    # the way out, as the message has it
    state = engine.full_state_dict()
    fresh = parts.seeded(parts.OddModel, seed=1)
    fresh.load_state_dict(state)
    fresh.frozen.requires_grad_(True)
    fresh.head.bias.requires_grad_(False)
    engine = parts.STAGES[stage](fresh, parts.DECAY)
    for step in range(3):
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    after = engine.full_state_dict()
    assert not torch.equal(after["frozen"], state["frozen"]) and torch.equal(after["head.bias"], state["head.bias"])
    return found


def behind_the_engines_back(stage: str) -> list[str]:
    """What would be lost silently: a module added later, weights loaded past the shards, a state on one rank only."""
    rank = dist.get_rank()
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, parts.DECAY)
    batch = parts.token_batch(0, rank)
    engine.training_step(*batch, F.cross_entropy)
    model.blocks.append(parts.seeded(lambda: parts.OddBlock(5, 7)))
    found = [message(lambda: engine.training_step(*batch, F.cross_entropy), RuntimeError)]
    del model.blocks[-1]
    engine.training_step(*batch, F.cross_entropy)
    low = parts.seeded(parts.OddModel, dtype=torch.float32)
    parts.STAGES[stage](low, parts.DECAY, param_dtype=torch.bfloat16)
    found.append(message(lambda: low.load_state_dict(parts.OddModel().state_dict()), RuntimeError))
    found.append(message(lambda: low.head.load_state_dict(parts.OddModel().head.state_dict()), RuntimeError))
    state = engine.full_state_dict()
    found.append(message(lambda: engine.load_full_state_dict(state if rank == 0 else None)))
    engine.load_full_state_dict(state)
    engine.training_step(*batch, F.cross_entropy)
    return found

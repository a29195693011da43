"""Activation checkpointing: of each block of a GPT only its input is kept, and backward runs the block again."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from zerolab.run.model import GPT


def checkpoint_blocks(model: GPT, casts: bool) -> None:
    """Keep of each block only its input, and run it again in backward. `casts`: weights are cast before the forward."""

    def again(block, plain, x):
        # `MixedModule` lends the model its cast weights only for the forward, and the second run needs the same ones.
        params = dict(block.named_parameters()) if casts else {}

        def run(x):
            block.forward, patched = plain, block.forward
            try:
                return torch.func.functional_call(block, params, x)
            finally:
                block.forward = patched

        return checkpoint(run if casts else plain, x, use_reentrant=False)

    for block in model.blocks:
        block.forward = partial(again, block, block.forward)

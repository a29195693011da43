"""Gradient accumulation: one reduction for the sum of several backwards.

    with engine.no_sync():
        for micro_batch in micro_batches[:-1]:
            loss_of(micro_batch).backward()    # whole gradients add up on this rank; nothing is sent
    loss_of(micro_batches[-1]).backward()      # the sum of all backwards is sent
    engine.step()

The cost: each rank holds whole gradients, 4Ψ bytes in float32, where ZeRO-2 and -3 otherwise hold 4Ψ/N. The gain for k
backwards per step: ZeRO-2 sends 2Ψ elements instead of (k+1)Ψ. ZeRO-3 sends (2k+1)Ψ instead of 3kΨ. ZeRO-1 sends
nothing before `step()`, so `no_sync` changes nothing there, except that the last backward must run outside, as in all
stages.

DDP's `no_sync()` and FSDP2's `set_requires_gradient_sync(False)` do the same. Sums are kept in `reduce_dtype`, because
adding up many gradients in bfloat16 would lose digits.
"""

import contextlib


@contextlib.contextmanager
def no_sync(engine):
    """Inside this context, gradients are kept on this rank. The last backward before `step()` must run outside."""
    before, engine.sync = engine.sync, False
    try:
        yield
    finally:
        engine.sync = before


def keep(bucket, param):
    """Move `param.grad` to `bucket.kept`, where the gradients of several backwards add up."""
    gradient = bucket.take_gradient(param).to(bucket.gradient_dtype)
    if param in bucket.kept:
        bucket.kept[param] += gradient
    else:
        bucket.kept[param] = gradient

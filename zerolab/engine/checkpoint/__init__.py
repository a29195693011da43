"""Sharded checkpoints: save a run, and resume it in any stage, at any number of ranks, or in torch's own classes.

    checkpoint.save(engine, "run", step=100)     # a new folder run/000001; `step` is your own value
    extra = checkpoint.load(engine, "run")       # the newest one; {"step": 100}

Every rank writes its pieces of each parameter and of the optimizer state into its own file: 12Ψ/N bytes with float32
and AdamW. Nothing is gathered, and nothing but the list of contents is sent. (`full_state_dict` sends Ψ elements, holds
4Ψ bytes on every rank, and has no optimizer state.)

The format is torch.distributed.checkpoint's (DCP), with the names and shapes of `get_model_state_dict` and
`get_optimizer_state_dict`. So FSDP2, DDP and a plain model load these checkpoints, and theirs can be loaded here. What
DCP does not have: checksums, a folder that is either complete or not a checkpoint, and reading without running code.

| file | the idea |
|---|---|
| `rectangles.py` | a piece is a run of elements, and DCP stores rectangles |
| `saving.py` | what is saved, and in the background while training goes on |
| `folders.py` | a crash in the middle of a save leaves the earlier checkpoints and no half of a new one |
| `loading.py` | does it fit this engine? Only then is anything changed |
| `reader.py` | files that are damaged, or written by a stranger |
| `metadata.py` | reading DCP's list of contents, a pickle, without running code |
"""

from zerolab.engine.checkpoint.loading import load
from zerolab.engine.checkpoint.reader import Damaged, Unsafe, complete, newest
from zerolab.engine.checkpoint.saving import Saved, async_save, save

__all__ = ["Damaged", "Saved", "Unsafe", "async_save", "complete", "load", "newest", "save"]

"""Sharded checkpoints: save a run, and resume it in any stage, on any number of ranks, or in torch's own classes.

    checkpoint.save(engine, "run", step=100)     # a new folder run/000001; `step` is your own value
    extra = checkpoint.load(engine, "run")       # loads the newest checkpoint, and returns {"step": 100}

Every rank writes its pieces of each parameter and of the optimizer state into its own file: 12Ψ/N bytes with float32
and AdamW. Nothing is gathered, and only the list of contents is sent. (`full_state_dict` sends Ψ elements, holds 4Ψ
bytes on every rank, and has no optimizer state.)

The format is torch.distributed.checkpoint's (DCP), with the names and shapes of `get_model_state_dict` and
`get_optimizer_state_dict`. So FSDP2, DDP and a plain model can load these checkpoints, and an engine can load theirs.
DCP itself has no checksums, does not protect a folder from a crash in the middle of a save, and may run code from the
files when it reads them.

| file | the idea |
|---|---|
| `rectangles.py` | a piece is a run of elements, but DCP stores rectangles |
| `saving.py` | the layout of the saved state, and saving in the background while training continues |
| `folders.py` | a crash in the middle of a save keeps the earlier checkpoints and leaves no incomplete one |
| `loading.py` | checking that a checkpoint fits the engine, before anything is changed |
| `reader.py` | reading files that may be damaged, or written by somebody you do not trust |
| `metadata.py` | reading DCP's list of contents, a pickle, without running code |
"""

from zerolab.engine.checkpoint.loading import load, load_newest
from zerolab.engine.checkpoint.reader import Damaged, Unsafe, complete, newest
from zerolab.engine.checkpoint.saving import Saved, async_save, save

__all__ = ["Damaged", "Saved", "Unsafe", "async_save", "complete", "load", "load_newest", "newest", "save"]

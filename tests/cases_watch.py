"""Recording steps, on the ranks of a pool."""

import contextlib
import dataclasses
import gc
import zlib
from argparse import Namespace

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook

from harness.run.model import GPT
from harness.run.process_group import Rank
from harness.teach.museum import visit
from harness.teach.museum.exhibits import EXHIBITS
from harness.teach.museum.loop import Loop
from harness.teach.watch.engines import of_engine, of_exhibit
from harness.teach.watch.record import record


def this_rank() -> Rank:
    return Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")


def recorded(names: list[str]) -> list[dict]:
    """What this rank saw of one step of each engine."""
    options = Namespace(preset="toy", seq=32, batch=2, bucket_mb=None)
    return [record(of_engine(name, options), this_rank()) for name in names]


@contextlib.contextmanager
def forwards_of_models():
    """A list of (the model's class, a checksum of what it returned), of every GPT's forward inside."""
    found = []

    def note(module, _, outputs) -> None:
        if isinstance(module, GPT):
            found.append((type(module).__name__, zlib.crc32(outputs.detach().numpy().tobytes())))

    handle = register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


_right: dict[str, dict] = {}  # what of the right engines was found: several exhibits have the same


def exhibit_twice(number: int) -> dict:
    """{"right", "wrong"}: of each engine what a visit shows and a recorded step, and the forwards in both.

    As many steps in both, and no more than it takes: two, or up to the step that the exhibit is about.
    """
    runs, me = dict(zip(("right", "wrong"), of_exhibit(number))), this_rank()
    warm_up = min(runs["wrong"].warm_up, EXHIBITS[number].training.get("overflow_at", 1))
    training = {**EXHIBITS[number].training, "steps": warm_up + 1}
    exhibit = dataclasses.replace(EXHIBITS[number], training=training)
    key = repr((exhibit.stage, exhibit.options, training))
    found, known = {}, _right.get(key)
    for name in ("right", "wrong") if known is None else ("wrong",):
        loop = Loop(exhibit, getattr(exhibit, name), me.rank)
        with forwards_of_models() as in_visit:
            shown = visit.nothing_yet()
            try:
                visit.train(loop, shown)
            except Exception as error:
                shown["error"] = str(error)
        gc.collect()
        with forwards_of_models() as in_recording:
            seen = record(dataclasses.replace(runs[name], warm_up=warm_up), me)
        found[name] = {"seen": seen, "recorded": in_recording, "shown": shown, "visited": in_visit}
    _right.setdefault(key, found.get("right"))
    return {"right": _right[key], **found}

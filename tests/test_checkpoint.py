"""The reader of checkpoints under attack, the rectangles that are written, and what a kill leaves on disk."""

import contextlib
import itertools
import math
import os
import pickle
import sys
import warnings
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.nn import functional as F

from zerolab.engine import checkpoint
from zerolab.engine.all_or_none import all_or_none
from zerolab.engine.checkpoint import contents
from zerolab.engine.checkpoint.reader import Folder
from zerolab.engine.checkpoint.rectangles import rectangles
from zerolab.properties import fixtures
from zerolab.properties.checkpoints import state_of
from zerolab.properties.property import same
from zerolab.properties.shared_folder import shared_folder


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 1, 3), (1, 6), (3, 2, 2, 5), (2, 0, 3)])
def test_rectangles_are_the_run_in_order(shape):
    """For every run of elements: its rectangles hold these elements, in order, and are as few as promised."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for first, end in itertools.combinations(range(numbers.numel() + 1), 2):
        found = rectangles(shape, first, end)
        boxes = [numbers[tuple(slice(o, o + n) for o, n in zip(*box))].reshape(-1) for box in found]
        assert torch.cat(boxes).tolist() == list(range(first, end))
        assert len(found) <= max(1, 2 * (len(shape) - 1) + 1)
    assert rectangles(shape, 1, 1) == []


ACTS = {"open", "write", "flush", "fsync", "close", "__exit__", "mkdir", "rename", "replace", "unlink", "rmdir"}


@contextlib.contextmanager
def all_that_was_on_disk(folder: Path):
    """A list of what `folder` has, {path: content, None for a folder}, after each of this thread's acts on files.

    A process that is killed by kill -9 at that moment leaves just this.
    """
    found = []

    def look(frame, event, function):
        if event != "c_return" or function.__name__ not in ACTS:
            return
        with contextlib.suppress(FileNotFoundError):  # the other rank has just renamed it, and looks itself
            paths = sorted(folder.rglob("*"))
            state = {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in paths}
            if not found or state != found[-1]:
                found.append(state)

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


def left_by_a_kill(stage: str) -> list[int]:
    """Which step is in the newest checkpoint after each of this rank's acts on files while step 2 is saved."""
    rank, build = dist.get_rank(), partial(fixtures.Stack, layers=1, width=8)
    engine = fixtures.STAGES[stage](fixtures.seeded(build), fixtures.ADAMW)

    def train_and_save(step: int, folder: Path) -> None:
        engine.training_step(*fixtures.vector_batch(step, rank, 8, torch.float64), F.mse_loss)
        checkpoint.save(engine, folder, keep=2, step=step, state=state_of(engine))

    with shared_folder() as place:
        train_and_save(0, place / "run")
        train_and_save(1, place / "run")
        with all_that_was_on_disk(place / "run") as mine:
            train_and_save(2, place / "run")
        steps = ([], [])
        for who, states in enumerate(all_or_none(lambda: mine, None)):
            for number, state in enumerate(states):
                folder = place / f"{who} {number}"
                if rank == 0:
                    folder.mkdir()
                    for name, content in state.items():
                        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
                dist.barrier()
                found = checkpoint.load(engine, folder)
                same(f"the state after act {number} of rank {who}", state_of(engine), found["state"])
                steps[who].append(found["step"])
                train_and_save(3, folder)
                left = sorted(path.name for path in folder.iterdir())
                assert len(left) == 2 and all(name.isdigit() for name in left), left
    return steps[rank]


THOROUGH = [pytest.param(stage, marks=pytest.mark.thorough) for stage in ("zero1", "zero3")]


@pytest.mark.parametrize("stage", ["zero2", *THOROUGH])  # they save by the same lines
def test_killed_at_any_moment(ranks, stage):
    """Whenever a save ends, the last checkpoint remains whole, or the new one is; and the next save cleans up."""
    first, second = ranks(2).run(left_by_a_kill, stage=stage)
    assert len(first) >= 15 and len(second) >= 3, (first, second)
    assert first == sorted(first) and set(first) == {1, 2} and set(second) <= {1, 2}, (first, second)


# Lists of contents by a stranger. Each is a pickle, written as its steps.


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def name(module: str, of: str) -> bytes:
    return text(module) + text(of) + pickle.STACK_GLOBAL


METADATA = name("torch.distributed.checkpoint.metadata", "Metadata")
FIELDS = b"}" + text("write_text") + b"K\x01s"  # {"write_text": 1}
NAMED = {
    "a class": METADATA,
    "a path's class": name("pathlib", "PurePosixPath"),
    "a shape's class": name("torch", "Size"),
    "a dtype": name("torch", "float32"),
}
STRANGERS = {
    **{f"fields of {what}": named + FIELDS + b"b." for what, named in NAMED.items()},
    **{f"slots of {what}": named + b"}" + FIELDS + b"\x86b." for what, named in NAMED.items()},
    "a function": name("os", "system") + text("touch ran") + b"\x85R.",
    "slots of an object": METADATA + b")\x81" + b"N" + FIELDS + b"\x86b.",
    "an item of a class": METADATA + text("a") + b"K\x01s.",
    "an old object": b"c__builtin__\neval\n(S'1'\no.",
    "an instance": b"(S'1'\ni__builtin__\neval\n.",
    "a persistent name": b"Pa\n.",
    "a name with dots": name("torch", "Size.__init__") + b".",
    "a name with dots of a path": name("pathlib", "os.system.Path") + text("touch ran") + b"\x85R.",
    "a reconstructor's class": name("copyreg", "_reconstructor") + name("builtins", "eval") + b"NN\x87R.",
    "a method of what is there": name("builtins", "getattr") + METADATA + text("x") + b"\x86R.",
}


def theirs(folder: Path) -> metadata.Metadata:
    """A good checkpoint, and its list."""
    with warnings.catch_warnings(action="ignore"):  # torch asks whether one process was meant
        dcp.save({"model": {"a": torch.ones(2, 3)}}, checkpoint_id=folder, no_dist=True)
    Folder(folder)
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_strangers_list_touches_nothing(tmp_path, stranger, monkeypatch):
    """No code of its choice runs, and no class of this process is another one afterwards."""
    theirs(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(STRANGERS[stranger])
    kinds = [Path, PurePosixPath, torch.Size, torch.dtype, _StorageInfo, *vars(metadata).values()]
    kinds += [*vars(contents).values()]
    before = {kind: dict(vars(kind)) for kind in kinds if isinstance(kind, type)}
    with pytest.raises((checkpoint.Unsafe, checkpoint.Damaged)):
        Folder(tmp_path)
    assert {kind: dict(vars(kind)) for kind in before} == before
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "..", "", ("a",)])
def test_a_list_that_points_out_of_its_folder_is_refused(tmp_path, path):
    (tmp_path / "outside").write_bytes(b"\0" * 100_000)
    folder = tmp_path / "theirs"
    whole = theirs(folder)
    for place in whole.storage_data.values():
        place.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    with pytest.raises((checkpoint.Unsafe, checkpoint.Damaged)):
        Folder(folder)


@pytest.mark.parametrize("file", [".metadata", "SHA256SUMS", "__0_0.distcp"])
@pytest.mark.parametrize("how", ["link", "pipe"])
def test_a_file_that_is_elsewhere_or_a_pipe_is_not_opened(tmp_path, file, how):
    folder = tmp_path / "theirs"
    theirs(folder)
    (folder / "SHA256SUMS").touch()
    moved = (folder / file).rename(tmp_path / "outside")
    (folder / file).symlink_to(moved) if how == "link" else os.mkfifo(folder / file)
    with pytest.raises(checkpoint.Unsafe):
        Folder(folder)

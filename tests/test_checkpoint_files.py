"""The files of a checkpoint: after a crash, with malicious content, and the rectangles in them."""

import contextlib
import itertools
import math
import os
import pickle
import sys
import warnings
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import on_every_rank, own_batch, same, seeded
from torch import nn
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from zerolab.engine import ZeRO2Engine, checkpoint
from zerolab.engine.checkpoint import metadata
from zerolab.engine.checkpoint.reader import Folder
from zerolab.engine.checkpoint.rectangles import Piece, cut_into_rectangles

# Rectangles.


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 1, 3), (1, 6), (3, 2, 2, 5), (2, 0, 3)])
def test_rectangles_are_the_run_in_order(shape):
    """The rectangles of every run have exactly its elements, in order, and are as few as documented."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for first, end in itertools.combinations(range(whole.numel() + 1), 2):
        found = cut_into_rectangles(shape, first, end)
        parts = [
            whole[tuple(slice(offset, offset + size) for offset, size in zip(*each))].reshape(-1) for each in found
        ]
        assert torch.cat(parts).tolist() == list(range(first, end))
        assert len(found) <= max(1, 2 * (len(shape) - 1) + 1)
    assert cut_into_rectangles(shape, 1, 1) == []


def test_a_piece_is_not_copied():
    """Each rectangle is a view, and the `Piece` has the memory of one element."""
    elements = torch.arange(19.0)
    piece = Piece.of(elements, (6, 6), 8)
    assert piece.shape == (6, 6) and piece.untyped_storage().nbytes() == 4
    assert {view.untyped_storage().data_ptr() for view in piece.rectangles.values()} == {elements.data_ptr()}


# A crash.

ACTS = {"open", "write", "flush", "fsync", "close", "__exit__", "mkdir", "rename", "replace", "unlink", "rmdir"}


@contextlib.contextmanager
def everything_that_was_on_disk(folder):
    """A list of the contents of `folder`, {path: content, None for a folder}, after each file operation of this thread.

    A process that is killed at such a moment leaves exactly this.
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


def weights(engine):
    return torch.cat([value.reshape(-1) for value in engine.full_state_dict().values()])


@pytest.mark.parametrize("ranks", [2])
@on_every_rank
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(ranks, tmp_path):
    """If a rank dies at any moment of a save, the last or the new checkpoint loads, and the next save cleans up."""
    rank = dist.get_rank()
    model = seeded(lambda: nn.Sequential(nn.Embedding(11, 3), nn.Flatten(), nn.Linear(18, 3)))
    engine = ZeRO2Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    run = tmp_path / "run"
    of_step = {}
    for step in (0, 1):
        engine.training_step(*own_batch(step), nn.functional.mse_loss)
        of_step[step] = weights(engine)
        checkpoint.save(engine, run, keep=2, step=step)
    engine.training_step(*own_batch(2), nn.functional.mse_loss)
    of_step[2] = weights(engine)
    with everything_that_was_on_disk(run) as mine:
        checkpoint.save(engine, run, keep=2, step=2)
    of_ranks = [None] * 2
    dist.all_gather_object(of_ranks, mine)
    steps = [[], []]
    for of, moments in enumerate(of_ranks):
        for index, state in enumerate(moments):
            folder = tmp_path / f"{of} {index}"
            if rank == 0:
                folder.mkdir()
                for name, content in state.items():
                    if content is None:
                        (folder / name).mkdir()
                    else:
                        (folder / name).write_bytes(content)
            dist.barrier()
            step = checkpoint.load(engine, folder)["step"]
            same(weights(engine), of_step[step], what=f"after act {index} of rank {of}")
            steps[of].append(step)
            if index in (0, len(moments) // 2, len(moments) - 1):
                checkpoint.save(engine, folder, keep=2, step=3)
                left = sorted(path.name for path in folder.iterdir())
                assert len(left) == 2 and all(name.isdecimal() for name in left), left
    first, second = steps
    assert len(first) >= 15 and len(second) >= 3, steps
    assert first == sorted(first) and set(first) == {1, 2} and set(second) <= {1, 2}, steps


# Malicious lists of contents: each is a pickle, written as its operations.


def text(value):
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def name(module, of):
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


def make_good(folder):
    """Make a good checkpoint with DCP. Returns its list of contents."""
    with warnings.catch_warnings(action="ignore"):  # torch asks whether one process was meant
        dcp.save({"model": {"a": torch.ones(2, 3)}}, checkpoint_id=folder, no_dist=True)
    Folder(folder)
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_strangers_list_touches_nothing(tmp_path, stranger, monkeypatch):
    """None of its code runs, and no class of this process is different afterwards."""
    make_good(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(STRANGERS[stranger])
    kinds = [Path, PurePosixPath, torch.Size, torch.dtype, _StorageInfo, *vars(torch_metadata).values()]
    kinds += [*vars(metadata).values()]
    before = {kind: dict(vars(kind)) for kind in kinds if isinstance(kind, type)}
    with pytest.raises((checkpoint.Unsafe, checkpoint.Damaged)):
        Folder(tmp_path)
    assert {kind: dict(vars(kind)) for kind in before} == before
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "..", "", ("a",)])
def test_a_list_that_points_out_of_its_folder_is_refused(tmp_path, path):
    """No file outside of the checkpoint's folder is read."""
    (tmp_path / "outside").write_bytes(b"\0" * 100_000)
    folder = tmp_path / "theirs"
    whole = make_good(folder)
    for place in whole.storage_data.values():
        place.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    with pytest.raises((checkpoint.Unsafe, checkpoint.Damaged)):
        Folder(folder)


@pytest.mark.parametrize("file", [".metadata", "SHA256SUMS", "__0_0.distcp"])
@pytest.mark.parametrize("how", ["link", "pipe"])
def test_a_file_that_is_elsewhere_or_a_pipe_is_not_opened(tmp_path, file, how):
    """A link could lead to a file of the user, and opening a pipe would wait forever."""
    folder = tmp_path / "theirs"
    make_good(folder)
    (folder / "SHA256SUMS").touch()
    moved = (folder / file).rename(tmp_path / "outside")
    if how == "link":
        (folder / file).symlink_to(moved)
    else:
        os.mkfifo(folder / file)
    with pytest.raises(checkpoint.Unsafe):
        Folder(folder)


def test_missing_elements_are_noticed(tmp_path):
    """A list without some rectangles of a tensor. DCP would leave these elements unchanged."""
    whole = make_good(tmp_path)
    whole.state_dict_metadata["model.a"].chunks.clear()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(whole))
    folder = Folder(tmp_path)
    with pytest.raises(checkpoint.Damaged, match="elements of 'model.a' are missing"):
        folder.values("model.a")

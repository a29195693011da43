"""Checkpoints: the same run goes on, in any stage at any number of ranks, and a damaged one changes nothing."""

import itertools
import math
import os
import pickle
import re
import subprocess
import warnings
from pathlib import Path, PurePosixPath

import cases_checkpoint as cases
import parts
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.engine.rectangles import rectangles
from harness.engine.safe_reader import Folder


@pytest.mark.parametrize("in_background", (False, True))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_loaded_run_is_the_uninterrupted_one(ranks, tmp_path, stage, in_background):
    ranks(2).run(
        cases.goes_on_to_the_bit, stage=stage, optimizer="adamw", folder=str(tmp_path), in_background=in_background
    )


@pytest.mark.parametrize("stage", parts.STAGES)
def test_what_is_loaded_is_what_was_saved(ranks, tmp_path, stage):
    ranks(2).run(cases.comes_back, stage=stage, folder=str(tmp_path))


@pytest.mark.parametrize("optimizer", sorted(cases.OPTIMIZERS))
def test_every_elementwise_optimizer(ranks, tmp_path, optimizer):
    ranks(3).run(cases.goes_on_to_the_bit, stage="zero3", optimizer=optimizer, folder=str(tmp_path))


def test_mixed_precision_keeps_float32(ranks, tmp_path):
    options = {"dtype": torch.float32, "param_dtype": torch.bfloat16}
    ranks(2).run(cases.mixed_precision, folder=str(tmp_path), options=options)


JOURNEYS = [
    "zero1@3 zero3@2 zero2@4 zero1@1",
    "zero1@3 fsdp2@2 zero2@3 fsdp2@3",
    "zero3@2 plain@1 zero1@2 plain@1",
]


def as_one_file(folder) -> dict:
    """The whole checkpoint by torch's own conversion, flattened; without what says who has written it."""
    file = folder.parent / (folder.name + ".pt")
    dcp_to_torch_save(checkpoint.newest(folder), file)
    state = torch.load(file, weights_only=True)
    groups = {
        (name, "group"): {**group, "params": None}
        for group in state["optim"]["param_groups"]
        for name in group["params"]
    }
    moments = {(name, key): value for name, own in state["optim"]["state"].items() for key, value in own.items()}
    return {**state["model"], **moments, **groups}


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_through_stages_and_numbers_of_ranks(ranks, tmp_path, journey):
    """Loading and saving again changes no bit, whoever does it; and training comes out where one process does."""
    before = None
    stations = [station.split("@") for station in journey.split()]
    for number, (kind, world_size) in enumerate(stations):
        source, copied, folder = before, tmp_path / f"{number} again", tmp_path / f"{number}"
        ranks(int(world_size)).run(
            cases.leg, kind=kind, source=source and str(source), copied=str(copied), folder=str(folder),
            steps=[2 * number, 2 * number + 1], odd="fsdp2" not in journey,
        )  # fmt: skip
        if source is not None and kind in parts.STAGES:
            same(as_one_file(source), as_one_file(copied))
        before = folder
    model = parts.seeded(lambda: cases.Zoo("fsdp2" not in journey))
    optimizer = torch.optim.AdamW(cases.groups_of(model), lr=0.01)
    for step in range(2 * len(stations)):
        inputs, targets = cases.same_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).double(), targets).backward()
        optimizer.step()
    final = as_one_file(before)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(final[key], value, rtol=0, atol=1e-12)
    for name, param in model.named_parameters():
        if param.numel() == 0:
            continue
        for key, value in optimizer.state[param].items():
            torch.testing.assert_close(final[name, key], value, rtol=0, atol=1e-12)


def same(one: dict, other: dict) -> None:
    """To the bit. torch keeps a state for an empty parameter, and an engine has no piece of it."""
    assert {key for key in one.keys() ^ other.keys() if key[0] != "empty"} == set()
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict):
            assert one[key] == other[key], key
        else:
            assert torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype, key


def test_a_file_of_torch_becomes_a_checkpoint(ranks, tmp_path):
    """There and back: dcp_to_torch_save makes one file, torch_save_to_dcp makes a folder of it that an engine loads."""
    start = {"kind": "zero1", "source": None, "copied": "", "folder": str(tmp_path / "a"), "steps": [0], "odd": True}
    ranks(2).run(cases.leg, **start)
    as_one_file(tmp_path / "a")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "b")
    on = {"kind": "zero3", "source": str(tmp_path / "b"), "copied": str(tmp_path / "c"), "folder": str(tmp_path / "d")}
    ranks(3).run(cases.leg, **on, steps=[1], odd=True)
    same(as_one_file(tmp_path / "a"), as_one_file(tmp_path / "c"))


def test_groups_of_ranks(ranks, tmp_path):
    ranks(4).run(cases.half_of_the_ranks, folder=str(tmp_path))


SAID = {  # what loading says to each
    "a flipped byte": "Damaged: .*__1_0.distcp' is not what was written",
    "a flipped byte in the list": "Damaged: .*.metadata' is damaged",
    "a truncated file": "Damaged: .*__0_0.distcp' was cut off",
    "a missing file": "Damaged: .*__1_0.distcp' cannot be read: .*No such file",
    "no sums": "Damaged: .*SHA256SUMS' is missing",
    "a list that runs": "Unsafe: .*it asks for (builtins|io|_io).open",
    "an item that runs": "Unsafe: .*tensors and plain values",
    "never finished": "FileNotFoundError: no complete checkpoint",
    "nothing there": "FileNotFoundError: no complete checkpoint",
    "torch's, truncated": "Damaged: .*cut off",
    "torch's SGD": "ValueError: .*another class than AdamW",
    "weights alone": "ValueError: .*another model: missing",
    "Adam and not AdamW": "ValueError: .*is of Adam, and here is AdamW",
    "another dtype": "ValueError: .*torch.float32",
    "another shape": r"ValueError: .*'mix' is torch.float64 of shape \(5, 3, 5\)",
    "fewer names": "ValueError: .*missing 'empty', 'scale'",
    "other groups": "ValueError: .*other groups",
    "what cannot be saved": "ValueError: 'what': a checkpoint takes tensors",
    "keep": "ValueError: .*keep must be a number",
    "inside": "ValueError: .*is a checkpoint itself",
}


def test_what_is_damaged_or_of_another_run_changes_nothing(ranks, tmp_path):
    everyone = ranks(2).run(cases.refusals, folder=str(tmp_path))
    for said in everyone:
        assert said.keys() == SAID.keys()
        for name, expected in SAID.items():
            assert re.match(f"(?s){expected}|{expected.replace(': ', ': rank .: ', 1)}", said[name]), (name, said[name])
    assert ranks(1).run(cases.torchs_own_reader_runs_them, folder=str(tmp_path)) == [["item ran", "list ran"]]


def test_a_full_disk(ranks, tmp_path):
    for said in ranks(2).run(cases.a_full_disk, folder=str(tmp_path)):
        assert len(said) == 3 and all("rank 1: OSError" in text or "rank 1: " in text for text in said), said
        assert "File too large" in said[0] and "earlier ones are as they were" in said[0]


def test_options_and_state_that_are_no_numbers(ranks, tmp_path):
    ranks(2).run(cases.any_option, folder=str(tmp_path))


def test_what_cannot_be_loaded_is_not_saved(ranks, tmp_path):
    """The same error on both ranks, though the first alone has the option; it names what it is about."""
    one, other = ranks(2).run(cases.what_no_checkpoint_takes, folder=str(tmp_path / "new"))
    for kind, text in one.items():
        name = {"extra": "what", "state": "kept", "deep": "param_groups.0.note.a"}
        name = name.get(kind.partition(":")[0], "param_groups.0.note")
        assert text.startswith("ValueError: ") and (name in text or kind == "state: numbered"), (kind, text)
        assert other[kind] == text


def test_all_ranks_say_the_same(ranks, tmp_path):
    one, other = ranks(2).run(cases.one_error_on_all, folder=str(tmp_path))
    assert one == other and all(text.startswith("RuntimeError: rank 0: ") for text in one[:3]), (one, other)
    assert "No space left" in one[2] and one[3].startswith("Damaged: "), one


def test_groups_of_some_ranks_and_then_of_all(ranks, tmp_path):
    ranks(3).run(cases.some_ranks_then_all, folder=str(tmp_path))


def test_old_checkpoints_go(ranks, tmp_path):
    ranks(2).run(cases.keeps_the_newest, folder=str(tmp_path))


def test_each_rank_writes_its_part(ranks, tmp_path):
    """1/N of parameters and moments, and torch's header of less than 2 kB for each rectangle and each option."""
    for world_size in (2, 3):
        for written, own, items in ranks(world_size).run(cases.bytes_of_each, folder=str(tmp_path / str(world_size))):
            assert own < written < own + 2_000 * (items + 40), (written, own, items)


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


def test_killed_at_any_moment(tmp_path, quick_python):
    """kill -9 of each rank at each of its acts on files: the last checkpoint remains whole, or the new one is."""
    script = Path(cases.__file__).with_name("killed_while_saving.py")
    result = subprocess.run([quick_python, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    kills = dict(re.findall(r"rank (\d): (\d+) kills", result.stdout))
    assert int(kills["0"]) >= 15 and int(kills["1"]) >= 3, result.stdout


def test_a_model_on_meta(ranks, tmp_path):
    for memory in ranks(2).run(cases.onto_meta, folder=str(tmp_path)):
        assert memory["peak"] < memory["held"] + 3 * memory["unit"] < memory["whole"], memory


# Lists of contents by a stranger. Each is a pickle, written as its steps.


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def name(module: str, of: str) -> bytes:
    return text(module) + text(of) + pickle.STACK_GLOBAL


LISTS = "torch.distributed.checkpoint.metadata"
METADATA = name(LISTS, "Metadata")
PLACE = name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
STATE = b"}" + text("write_text") + b"K\x01s"  # {"write_text": 1}
DOUBLED = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))  # "h<" is then a tuple of 2**60 parts
STRANGERS = {
    "fields of a class": METADATA + STATE + b"b.",
    "fields of a path's class": name("pathlib", "PurePosixPath") + STATE + b"b.",
    "slots of a class": METADATA + b"}" + STATE + b"\x86b.",
    "slots of a path's class": name("pathlib", "PurePosixPath") + b"}" + STATE + b"\x86b.",
    "slots of an object": METADATA + b")\x81" + b"N" + STATE + b"\x86b.",
    "fields of a dtype": name("torch", "float32") + STATE + b"b.",
    "fields of a shape": name("torch", "Size") + b")\x81" + STATE + b"b.",
    "fields set twice": METADATA + b")\x81" + STATE + b"b" + STATE + b"b.",
    "an item of a class": METADATA + text("a") + b"K\x01s.",
    "an object with keywords": METADATA + b")}\x92.",
    "an old object": b"c__builtin__\neval\n(S'1'\no.",
    "an instance": b"(S'1'\ni__builtin__\neval\n.",
    "an extension": b"\x82\x01.",
    "a persistent name": b"Pa\n.",
    "a name with dots": name("torch", "Size.__init__") + b".",
    "a name with dots of a path": name("pathlib", "os.system.Path") + text("touch ran") + b"\x85R.",
    "a reconstructor's class": name("copyreg", "_reconstructor") + name("builtins", "eval") + b"NN\x87R.",
    "a method of what is there": name("builtins", "getattr") + METADATA + text("x") + b"\x86R.",
    "a call of what is there": b"}" + b")R.",
    "a memo that is not there": b"h\x05.",
    "nothing": b".",
    "two values": b"NN.",
    "cut off": METADATA + b")",
    "a large number": b"\x8b\xff\xff\xff\x7f.",
    "a large frame": b"\x80\x04\x95" + b"\xff" * 8 + b".",
    "a deep tuple": b")" + b"\x85" * 300_000 + b".",
    "a deep tuple as a key": b"})" + b"\x85" * 300_000 + b"Ns.",
    "a key of 2**60 parts": DOUBLED + b"}h<Ns.",
    "a shape of 2**60 parts": DOUBLED + name("torch", "Size") + b"h<\x85R.",
    "a list that has itself": b"]\x94h\x00a.",
    "a longer list than there are values": b"]" * 10_000_000 + b".",
}


def theirs(folder: Path) -> metadata.Metadata:
    """A good checkpoint, and its list."""
    values = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.ones(2, dtype=torch.bfloat16)}}, "x": 3}
    with warnings.catch_warnings(action="ignore"):  # torch asks whether one process was meant
        dcp.save(values, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_strangers_list_touches_nothing(tmp_path, stranger, monkeypatch):
    theirs(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(STRANGERS[stranger])
    with open(tmp_path / "large", "wb") as stream:
        stream.truncate(1_000_000)
    kinds = [Path, PurePosixPath, torch.Size, type(torch.float32), *vars(metadata).values(), _StorageInfo]
    before = {kind: dict(vars(kind)) for kind in kinds if isinstance(kind, type)}
    try:
        with pytest.raises((checkpoint.Unsafe, checkpoint.Damaged)):
            Folder(tmp_path)
        assert {kind: dict(vars(kind)) for kind in before} == before
    finally:
        for kind, values in before.items():
            for key in vars(kind).keys() - values.keys():
                delattr(kind, key)
    assert not (tmp_path / "ran").exists()


def altered(change):
    def write(folder: Path) -> None:
        change(whole := theirs(folder), folder)
        (folder / ".metadata").write_bytes(pickle.dumps(whole))

    return write


def set_places(**fields):
    return lambda whole, _: [vars(place).update(fields) for place in whole.storage_data.values()]


def set_first(of, **fields):
    return lambda whole, _: vars(of(whole)).update(fields)


def link(whole, folder: Path) -> None:
    """The file is a link to one outside of the folder."""
    (file,) = folder.glob("*.distcp")
    file.rename(folder.parent / "outside")
    file.symlink_to(folder.parent / "outside")


def pipe(whole, folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.unlink()
    os.mkfifo(file)


def tensor(whole) -> metadata.TensorStorageMetadata:
    return whole.state_dict_metadata["model.a"]


WRONG = {
    "a path upwards": set_places(relative_path="../outside"),
    "a path from the root": set_places(relative_path="/etc/passwd"),
    "a folder": set_places(relative_path=".."),
    "no name": set_places(relative_path=""),
    "no text": set_places(relative_path=("a",)),
    "a link": link,
    "a pipe": pipe,
    "bytes twice": set_places(offset=0, length=2000),
    "before the beginning": set_places(offset=-1),
    "compressed": set_places(transform_descriptors=["zstd"]),
    "4e14 bytes": set_first(tensor, size=torch.Size([10**7, 10**7])),
    "a shape of a thousand": set_first(tensor, size=torch.Size([1] * 1000)),
    "a shape that is none": set_first(tensor, size=(2, 3)),
    "a dtype that is none": set_first(lambda whole: tensor(whole).properties, dtype="float32"),
    "chunks that are none": set_first(tensor, chunks=[3]),
    "a name of a thousand parts": lambda whole, _: whole.planner_data.update({"model.a": ("a",) * 1000}),
    "a name that is a tensor's shape": lambda whole, _: whole.planner_data.update({"model.a": torch.Size([1])}),
    "modules that are none": set_first(lambda whole: whole.storage_meta, modules="SHA256SUMS"),
    "True for a number": set_places(offset=True),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_list_that_lies_is_refused(tmp_path, what):
    (tmp_path / "outside").write_bytes(b"\0" * 100_000)
    folder = tmp_path / "theirs"
    altered(WRONG[what])(folder)
    with pytest.raises((checkpoint.Unsafe, checkpoint.Damaged)):
        Folder(folder)


def test_lists_of_all_protocols_are_read(tmp_path):
    """As torch reads them. What is no part of a checkpoint, such as a path, is left out."""
    expected = theirs(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(expected, protocol))
        found = Folder(tmp_path)
        for part in ("state_dict_metadata", "planner_data", "storage_data"):
            assert getattr(found.metadata, part) == getattr(expected, part), (protocol, part)
        assert found.read({"model.b.c": torch.zeros(2, dtype=torch.bfloat16)})["model.b.c"].tolist() == [1, 1]

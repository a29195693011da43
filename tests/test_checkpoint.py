"""Checkpoints: the same run goes on, in any stage at any number of ranks, and a damaged one changes nothing."""

import itertools
import math
import re
import subprocess
from pathlib import Path

import cases_checkpoint as cases
import parts
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.engine.rectangles import rectangles


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

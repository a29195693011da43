"""`train`: a run resumes after ranks were killed or hung, after a request to stop, and after a file was damaged."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import train_disturbed

from zerolab.run import folder_lock, journal, ranks, train, train_options
from zerolab.run.data import Batches, load_text, split
from zerolab.run.model import GPT, GPTConfig, next_token_loss, sample
from zerolab.run.pool import run_on_ranks
from zerolab.run.process_group import World

STEPS = 40
OPTIONS = f"zero3 --preset toy --steps {STEPS} --save-every 5 --global-batch 6".split()


def disturbed(folder: Path, **trouble: int) -> subprocess.CompletedProcess:
    """A launcher's run to its end, with `trouble` after so many steps (tests/train_disturbed.py)."""
    for name, step in trouble.items():
        (folder / name).write_text(str(step))
    launcher = "-m zerolab.run.torchrun --standalone --nproc-per-node 2 --max-restarts 9 --signals-to-handle SIGTERM"
    own = {"TROUBLE": str(folder), "ZERO_TIMEOUT": "6", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ended = subprocess.run(
        [sys.executable, *launcher.split(), train_disturbed.__file__, *OPTIONS, "--folder", str(folder / "run")],
        env=ranks.environment(**own),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not [name for name in trouble if (folder / name).exists()], ended.stdout + ended.stderr
    return ended


def story(folder: Path) -> tuple:
    """A start that is asked to leave, a changed byte in its newest checkpoint, and the start that goes on."""
    first = disturbed(folder, kill=random.randint(1, 9), hang=random.randint(10, 14), stop=random.randint(15, 24))
    newest = max(path for path in (folder / "run").iterdir() if path.name.isdigit())
    file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return folder / "run", first, newest, disturbed(folder, hang_in_save=STEPS)


def in_the_pool(options: list[str], folder: Path, leave_at: int = 0, model: type = train.GPT) -> list[dict]:
    """On ranks of the pool, of which no torchrun knows: the journal's lines. The run is asked to leave at a step."""
    options = train_options.arguments([*options, "--folder", str(folder)])
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
    with mock.patch.object(train, "GPT", model):
        training = train.Training(options, world, load_text(None, 32))
    folder.mkdir(exist_ok=True)
    training.run(lambda: world.rank == 1 and training.step == leave_at)  # one rank hears of it, and all leave
    return journal.read(folder)


@pytest.mark.long
def test_kills_hangs_a_stop_and_a_damaged_checkpoint_change_nothing(tmp_path):
    folder, first, damaged, second = story(tmp_path)
    expected = run_on_ranks(2, in_the_pool, options=OPTIONS, folder=tmp_path / "quiet", model=train_disturbed.Dropping)[
        0
    ]
    steps = journal.read(folder)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))  # none twice, none lost
    for line, other in zip(steps, expected, strict=True):
        assert line | {"time": 0, "tokens_per_s": 0} == other | {"time": 0, "tokens_per_s": 0}
    assert (first.returncode, second.returncode) == (128 + signal.SIGTERM, 0), first.stderr + second.stderr
    assert "torchrun: failed (exitcode: -9) local_rank: 0" in first.stderr, first.stderr
    assert "Traceback" not in first.stderr + second.stderr, first.stderr + second.stderr
    assert "Stopped on request after step" in first.stdout and "Run the same command to continue" in first.stdout
    # The stacks of the rank that hangs, and of the rank that waits for it.
    assert "Timeout" in first.stderr and "in hang" in first.stderr and "in wait" in first.stderr, first.stderr
    assert "not loaded: rank" in second.stderr and str(damaged) in second.stderr, second.stderr
    assert "continuing after step" in second.stdout and "in hang_and_write" in second.stderr, second.stderr
    assert f"Done after step {STEPS} of {STEPS}" in second.stdout and "the model writes" in second.stdout


def test_a_run_with_muon_continues_in_another_stage_on_another_number_of_ranks(tmp_path):
    options = ["--preset", "toy", "--steps", "6", "--global-batch", "6", "--save-every", "3", "--optimizer", "muon"]
    quiet = run_on_ranks(2, in_the_pool, options=["zero3", *options], folder=tmp_path / "quiet")[0]
    run_on_ranks(2, in_the_pool, options=["zero3", *options], folder=tmp_path / "moved", leave_at=4)
    moved = run_on_ranks(3, in_the_pool, options=["zero1", *options], folder=tmp_path / "moved")[0]
    assert [line["ranks"] for line in moved] == [2] * 4 + [3] * 2
    for line, other in zip(moved, quiet, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-3)  # Muon computes in bfloat16


def test_muon_has_the_matrices_of_the_blocks():
    model, options = GPT(GPTConfig(2, 32, 2)), train_options.arguments(["zero2", "--optimizer", "muon"])
    (adamw, muon), whole = train.make_optimizers(model, options, torch.device("cpu"))
    name_of = {param: name for name, param in model.named_parameters()}
    by_muon = [name_of[param] for param in muon.param_groups[0]["params"]]
    matrices = ["qkv.weight", "proj.weight", "up.weight", "down.weight"]
    assert by_muon == [name_of[param] for param in whole] == [f"blocks.{n}.{each}" for n in (0, 1) for each in matrices]
    assert len(adamw.param_groups[0]["params"]) + len(whole) == len(name_of)


def test_a_folder_in_use_a_full_one_and_one_of_another_model_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "LEAVING", 0.1)
    folder = tmp_path / "one"
    held = folder_lock.lock(folder, seconds=0)
    with pytest.raises(ValueError, match="one' is in use by a run: stop it first"):
        folder_lock.check_folder(folder, "toy")
    held.close()
    folder_lock.check_folder(folder, "toy")
    full = mock.patch("shutil.disk_usage", lambda folder: SimpleNamespace(free=300_000))
    with full, pytest.raises(ValueError, match="one': a checkpoint needs 0.4 MB, and 0.3 MB are free. Free space"):
        folder_lock.check_folder(folder, "toy")
    journal.Journal(folder, 0).write(1, {}, preset="tiny")
    with pytest.raises(
        ValueError, match="one' contains a run of --preset tiny: use that preset, or a different folder"
    ):
        folder_lock.check_folder(folder, "toy")


def test_the_journal_has_every_step_once(tmp_path):
    first = journal.Journal(tmp_path, 0)
    for step in (1, 2, 3):
        first.write(step, {"loss": float(step)})
    with open(tmp_path / journal.NAME, "a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    journal.Journal(tmp_path, 2).write(3, {"loss": 3.5})
    assert [(line["step"], line["loss"]) for line in journal.read(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.5)]


@pytest.mark.parametrize("size", (2, 5))
def test_all_ranks_together_have_the_whole_batch(size):
    batches = Batches(load_text(None, 32), 16, 32, 0)
    parts = [batches.part(3, rank, size) for rank in range(size)]
    inputs, targets = map(torch.cat, zip(*parts))
    assert min(len(part) for part, _ in parts) > 0 and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, batches(3, 0)[0]) and len(inputs) == 16


def test_the_evaluated_text_is_not_trained_on():
    text = torch.arange(300) % 256
    trained, evaluated = split(text, 20)
    assert torch.equal(torch.cat([trained, evaluated]), text) and len(evaluated) == 30
    assert [len(part) for part in split(text[:42], 20)] == [21, 21]
    with pytest.raises(ValueError, match="41 bytes, and a training run needs 42 bytes"):
        split(text[:41], 20)


def test_a_sample_continues_what_the_model_has_learnt():
    config = GPTConfig(layers=1, width=32, heads=2, seq=8)
    model, batches = GPT(config), Batches(torch.tensor(list(b"abcd" * 20)), 8, 8, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(150):
        inputs, targets = batches(step, 0)
        next_token_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sample(model, b"abcdabcdab", 10, config, 0, torch.device("cpu")) == b"cdabcdabcd"


def test_numbers_go_to_tensorboard_without_the_steps_that_are_repeated(tmp_path):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, last in ((1, 4), (3, 5)):  # a crash after step 4, and a restart from the checkpoint of step 2
        written = journal.Journal(tmp_path, first - 1, tmp_path / "board")
        for step in range(first, last + 1):
            written.write(step, {"loss": step / first}, preset="toy")
    board = loading.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(each.step, each.value) for each in board.Scalars("loss")] == [
        (1, 1), (2, 2), (3, 1), (4, pytest.approx(4 / 3)), (5, pytest.approx(5 / 3))
    ]  # fmt: skip


def test_tensorboard_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train_options.arguments(["zero1", "--tensorboard", "board"])
    assert "pip install tensorboard" in capsys.readouterr().err


def test_the_learning_rate_warms_up_and_falls():
    options = train_options.arguments(["zero1", "--steps", "110", "--lr", "0.5"])
    rates = [train.learning_rate(step, options) for step in range(111)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)]) and max(rates) == rates[10] == 0.5
    assert rates[60] == pytest.approx(0.5 * 0.55) and sorted(rates[10:], reverse=True) == rates[10:]
    assert rates[110] == pytest.approx(0.05)

"""A run that comes back: ranks are killed and hang, somebody asks it to leave, a file is damaged, a machine goes.

Two stories run beside the other tests, as they wait most of the time. The tests look at what they have left.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
import torch.distributed as dist
import train_disturbed

from harness.run import journal, ranks, train, train_options
from harness.run.data import Sequences, hold_out, load_text
from harness.run.folder import lock, refuse_others
from harness.run.process_group import Rank

STEPS = 80
OPTIONS = (
    f"zero3 --preset toy --steps {STEPS} --save-every 7 --evaluate-every 20 --accumulate 2 --global-batch 6".split()
)
ENDLESS = 100_000
A_HANG = 600  # seconds: a limit for what should come, and comes late on a busy machine
pytestmark = pytest.mark.usefixtures("begun")


class Run:
    """One launcher, its folder, and what it prints."""

    def __init__(self, folder: Path, *command: str, **environment: str):
        self.folder, self.output = folder, Path(f"{folder}.{time.monotonic_ns()}.out")
        own = {"ZERO_TIMEOUT": "20", "HANG": f"{folder}.hang", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [*command, "--folder", str(folder)],
                env=ranks.environment(PYTHON=forked.python(), **own | environment),
                cwd=ranks.ROOT,
                stdout=output,
                stderr=output,
            )

    def lines(self, event: str | None) -> list[dict]:
        """The journal's lines of an event, or of steps (None)."""
        return journal.of(journal.read(self.folder / journal.NAME), event)

    def ranks(self) -> list[int]:
        """The process ids of the last start's ranks."""
        starts = self.lines("start")
        return [int(name.rpartition(":")[2]) for name in starts[-1]["processes"]] if starts else []

    def wait_for_ranks(self, number: int, old: list[int], more: int) -> list[int]:
        """The process ids of so many ranks that are not the `old` ones, as soon as they have made `more` steps."""
        until = time.monotonic() + A_HANG
        while len(found := self.ranks()) != number or found == old or not self.has_made(more):
            assert self.process.poll() is None and time.monotonic() < until, self.output.read_text()
            time.sleep(0.03)
        return found

    def has_made(self, more: int) -> bool:
        """Whether the last start has made so many steps."""
        made = self.lines(None)
        return bool(made) and made[-1]["step"] >= self.lines("start")[-1]["step"] + more

    def end(self) -> int:
        try:
            return self.process.wait(A_HANG)
        finally:
            self.process.kill()


def disturbed(folder: Path) -> list[Run]:
    """Rank 0 is killed, rank 1 hangs, all are asked to leave, a checkpoint is damaged, rank 1 is killed, and hangs."""
    chance, hang = random.Random(), Path(f"{folder}.hang")
    launcher = "-m harness.run.torchrun --standalone --nproc-per-node 2 --max-restarts 3 --signals-to-handle SIGTERM"
    command = [forked.python(), *launcher.split(), train_disturbed.__file__, *OPTIONS]
    run = Run(folder, *command)
    first = run.wait_for_ranks(2, [], chance.randint(1, 12))
    os.kill(first[0], signal.SIGKILL)
    second = run.wait_for_ranks(2, first, chance.randint(1, 8))
    hang.touch()
    third = run.wait_for_ranks(2, second, 15)  # two checkpoints are there: one of them will be damaged
    for process in (*third, run.process.pid):  # as systemd does, and Slurm's scancel
        os.kill(process, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.output.read_text()

    run.left = run.lines(None)[-1]["step"]
    run.damaged = max(path for path in folder.iterdir() if path.name.isdigit())
    file = max(run.damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = Run(folder, *command)
    fourth = again.wait_for_ranks(2, third, chance.randint(1, 8))
    hang.with_suffix(".hang.save").touch()
    os.kill(fourth[1], signal.SIGKILL)
    assert again.end() == 0, again.output.read_text()
    return [run, again]


def machines(folder: Path) -> list[Run]:
    """Two launchers with a rank each. The second is killed, and comes back. Then one rank is asked to leave."""
    environment = {"NNODES": "1:2", "RDZV_ENDPOINT": f"localhost:{forked.free_port()}"}
    options = f"--preset toy --steps {ENDLESS} --save-every 40 --global-batch 3 --evaluate-every {ENDLESS}".split()
    command = [str(ranks.ROOT / "launch.sh"), "train", "zero2", "1", *options]
    run = Run(folder, *command, **environment)
    alone = run.wait_for_ranks(1, [], 1)
    second = Run(folder, *command, **environment)
    both = run.wait_for_ranks(2, alone, 50)
    second.process.kill()
    second.end()
    left = run.wait_for_ranks(1, both, 50)
    second = Run(folder, *command, **environment)
    both = run.wait_for_ranks(2, left, 5)
    os.kill(both[1], signal.SIGUSR1)
    assert (run.end(), second.end()) == (0, 0), run.output.read_text() + second.output.read_text()
    return [run, second]


@pytest.fixture(scope="session")
def begun(tmp_path_factory):
    """{name of a story: a future of its launchers}"""
    place = tmp_path_factory.mktemp("runs")
    forked.python()
    with ThreadPoolExecutor(2) as pool:
        yield {story.__name__: pool.submit(story, place / story.__name__) for story in (disturbed, machines)}


@pytest.fixture(scope="session")
def stories(begun):
    return {name: future.result() for name, future in begun.items()}


def in_the_pool(options: list[str], folder: Path, leave_at: int = 0, model: type = train.GPT) -> list[dict]:
    """On ranks of the pool, of which no torchrun knows: the lines of steps. The run is asked to leave at a step."""
    options = train_options.arguments([*options, "--folder", str(folder)])
    me = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
    with mock.patch.object(train, "GPT", model):
        training = train.Training(options, me, *hold_out(load_text(None, 32), 32))
    try:
        training.run(lambda: training.step == leave_at)
    finally:
        training.engine.close()
    return journal.of(journal.read(folder / journal.NAME), None)


def test_kills_hangs_a_stop_and_a_damaged_checkpoint_change_nothing(stories, ranks, tmp_path):
    run, again = stories["disturbed"]
    expected = ranks(2).run(in_the_pool, options=OPTIONS, folder=tmp_path / "quiet", model=train_disturbed.Dropping)[0]
    steps = again.lines(None)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))  # none twice, none lost
    for line, other in zip(steps, expected, strict=True):
        assert line | {"time": 0, "tokens_per_s": 0} == other | {"time": 0, "tokens_per_s": 0}
    assert [line["step"] for line in steps if "held_out" in line] == [20, 40, 60, 80]
    assert again.lines("left")[-1]["why"] == "done" and len(again.lines("restart")) >= 4
    printed = run.output.read_text()
    left = f"left because it was asked to, after step {run.left} of {STEPS}. The same line goes on from here"
    assert printed.endswith(f"{left}\n\nstopped by SIGTERM\n"), printed
    # Where each thread of a rank that hangs stands, and of one that waits for it.
    assert "Timeout" in printed and "in hang" in printed and "in wait" in printed, printed
    printed = again.output.read_text()
    assert "not taken: rank" in printed and str(run.damaged) in printed and "going on after step" in printed
    assert "in hang_and_write" in printed and not Path(f"{again.folder}.hang.save").exists(), printed


def test_a_machine_goes_and_comes_back(stories):
    run, _ = stories["machines"]
    steps = run.lines(None)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["ranks"] for line in run.lines("start")][-3:] == [2, 1, 2]
    assert run.lines("left")[-1]["why"] == "left because it was asked to"


def test_another_stage_on_another_number_of_ranks_goes_on_with_the_same_losses(ranks, tmp_path):
    options = ["--preset", "toy", "--steps", "12", "--global-batch", "7", "--save-every", "4"]
    whole = ranks(2).run(in_the_pool, options=["zero2", *options], folder=tmp_path / "whole")[0]
    ranks(2).run(in_the_pool, options=["zero3", *options], folder=tmp_path / "parts", leave_at=7)
    shutil.rmtree(tmp_path / "parts" / "000002")
    parts = ranks(3).run(in_the_pool, options=["zero1", *options], folder=tmp_path / "parts")[0]
    assert [line["ranks"] for line in parts] == [2] * 4 + [3] * 8
    for line, other in zip(parts, whole, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)
    losses = [line["loss"] for line in whole]
    assert losses[-1] < losses[0] and len({round(loss, 3) for loss in losses}) > 6
    for file in (tmp_path / "parts").glob("[0-9]*/*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(AssertionError, match="no checkpoint in .* is good"):
        ranks(3).run(in_the_pool, options=["zero1", *options], folder=tmp_path / "parts")


def test_a_folder_in_use_or_of_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO_PREFLIGHT", "2")
    monkeypatch.setattr(train_options, "PATIENCE", 0.1)
    line = ["zero3", "--preset", "toy", "--folder", str(tmp_path / "one")]
    held = lock(tmp_path / "one", seconds=0)
    with pytest.raises(ValueError, match="one' is in use by a run: stop it first"):
        train_options.arguments(line)
    held.release()
    assert train_options.arguments(line).steps == 200
    monkeypatch.setattr(train_options.checkpoint, "complete", lambda folder: [folder / "000001"])
    journal.Journal(tmp_path / "one", 0).write(event="start", step=0, preset="tiny")
    with pytest.raises(ValueError, match="another model than 'toy': take --preset tiny"):
        train_options.arguments(line)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "notes.md").touch()
    with pytest.raises(ValueError, match=r"holds other things \(notes.md\) and no run"):
        refuse_others(tmp_path / "two")
    (tmp_path / "two" / "000002").mkdir()
    refuse_others(tmp_path / "two")


def test_the_journal_has_every_step_once(tmp_path):
    first = journal.Journal(tmp_path, 0)
    for step in (1, 2, 3):
        first.write(step=step, loss=float(step))
    with open(tmp_path / journal.NAME, "a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    journal.Journal(tmp_path, 2).write(step=3, loss=3.5)
    lines = journal.read(tmp_path / journal.NAME)
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.5)]


def test_no_byte_that_is_evaluated_on_is_trained_on():
    own, held_out = hold_out(torch.arange(250, dtype=torch.uint8), seq=7)  # every byte once
    train_on, _ = Sequences(own, 7)(range(100))
    evaluated, targets = Sequences(held_out, 7)(range(9))
    seen = {*evaluated.flatten().tolist(), *targets.flatten().tolist()}
    assert not seen & {*train_on.flatten().tolist()} and len(own) + len(held_out) == 250


def test_an_epoch_has_every_sequence_once_and_another_order():
    sequences = Sequences(torch.arange(64, dtype=torch.uint8), seq=7, seed=3)
    inputs, targets = sequences(range(18))
    firsts = inputs[:, 0].tolist()
    assert sorted(firsts[:9]) == sorted(firsts[9:]) == list(range(0, 63, 7))
    assert firsts[:9] != firsts[9:] != sorted(firsts[9:]) and torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("size", (1, 2, 5))
def test_all_ranks_together_have_the_whole_batch(size):
    numbers = []
    for rank in range(size):
        training = object.__new__(train.Training)
        training.options = train_options.arguments(["zero1", "--global-batch", "16", "--accumulate", "3"])
        training.me = Rank(rank, size, torch.device("cpu"), "gloo", "")
        for sequences, share in training.parts(32):
            assert share == len(sequences) / 16 > 0
            numbers += sequences
    assert numbers == list(range(32, 48))


def test_what_is_new_of_the_options_is_named():
    before = train_options.kept(train_options.arguments(["zero1"]))
    now = train_options.arguments(["zero3", "--global-batch", "16", "--seed", "0", "--print-every", "1"])
    assert train_options.changed(before, now) == ["--global-batch 8 -> 16"]


def test_the_learning_rate_warms_up_and_falls():
    options = train_options.arguments(["zero1", "--steps", "110", "--warmup", "10", "--lr", "0.5"])
    rates = [train_options.learning_rate(step, options) for step in range(111)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)]) and max(rates) == rates[10] == 0.5
    assert rates[60] == pytest.approx(0.5 * 0.55) and sorted(rates[10:], reverse=True) == rates[10:]
    assert rates[110] == pytest.approx(0.05)

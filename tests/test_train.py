"""A run that comes back: ranks are killed and hang, machines go and come, somebody asks it to leave, a file is damaged.

Two stories run beside the other tests, as they wait most of the time: `disturbed`, and `machines` with two launchers.
The tests look at what they have left, and compare the first with the same steps on ranks that nobody disturbs.
"""

import contextlib
import io
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
import torch.distributed as dist
import train_disturbed

from harness.run import folder as folders
from harness.run import train, train_options
from harness.run.data import Sequences, hold_out, load_text
from harness.run.ending import NotAgain
from harness.run.journal import Journal, note_lost, read
from harness.run.process_group import Rank
from harness.run.ranks import environment as environment_of

ROOT = Path(__file__).resolve().parent.parent
STEPS = 80
OPTIONS = f"zero3 --preset toy --steps {STEPS} --save-every 7 --evaluate-every 20 --accumulate 2 --batch 6".split()
ENDLESS = 100_000
pytestmark = pytest.mark.usefixtures("begun")
A_HANG = 600  # seconds: a limit for what should come, and comes late on a busy machine


def launcher(python: str, *options: str) -> list[str]:
    """The beginning of a line that starts ranks; without options one rank on this machine."""
    return [python, "-m", "harness.run.restarts", *(options or ("--standalone", "--nproc-per-node", "1"))]


def undisturbed(options: list[str], folder: str) -> None:
    """On ranks of the pool: all steps without a break. A GPU is there, but to touch it would take memory on it."""
    options = train_options.arguments([*options, "--folder", folder])
    me = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
    touched = mock.patch.object(torch.cuda, "_lazy_init", side_effect=AssertionError("a context on GPU 0"))
    with train_disturbed.put_in(), mock.patch.object(torch.cuda, "is_available", lambda: True), touched:
        training = train.Training(options, me, *hold_out(load_text(None, 32), 32))
        try:
            training.run(types.SimpleNamespace(asked=lambda: False), joined=0.0)
        finally:
            training.engine.close()


def steps_of(folder: Path) -> list[dict]:
    return [line for line in read(folder / "losses.jsonl") if "event" not in line]


class Run:
    """One launcher, its folder, and what it prints."""

    def __init__(self, command: list[str], folder: Path, **environment: str):
        clean = environment_of(ZERO_TIMEOUT="20", HANG=f"{folder}.hang")
        self.folder, self.output = folder, open(f"{folder}.{time.monotonic_ns()}.out", "w+")  # noqa: SIM115
        self.process = subprocess.Popen([*command, "--folder", str(folder)], env=clean | environment, cwd=ROOT,
                                        stdout=self.output, stderr=self.output)  # fmt: skip

    @classmethod
    def on_two_ranks(cls, folder: Path, python: str):
        command = [*launcher(python, "--standalone", "--nproc-per-node", "2"), train_disturbed.__file__]
        return cls([*command, *OPTIONS], folder)

    def lines(self) -> list[dict]:
        return read(self.folder / "losses.jsonl") if (self.folder / "losses.jsonl").exists() else []

    def steps(self) -> list[dict]:
        return steps_of(self.folder) if self.lines() else []

    def events(self, event: str) -> list[dict]:
        return [line for line in self.lines() if line.get("event") == event]

    def ranks(self) -> list[int]:
        """The process ids of the last start's ranks."""
        return [int(name.rpartition(":")[2]) for start in self.events("start")[-1:] for name in start["processes"]]

    def wait_for(self, what) -> None:
        """Until `what()` is true. The run must still go on then."""
        until = time.monotonic() + A_HANG
        while not what():
            assert self.process.poll() is None and time.monotonic() < until, self.printed()
            time.sleep(0.03)

    def wait_for_new_ranks(self, old: list[int], more: int) -> None:
        """Until ranks other than `old` have made `more` steps."""

        def there() -> bool:
            lines = self.lines()
            starts = [place for place, line in enumerate(lines) if line.get("event") == "start"]
            made = [line for line in lines[starts[-1] :] if "event" not in line] if starts else []
            return self.ranks() != old and len(made) >= more

        self.wait_for(there)

    def end(self) -> int:
        try:
            return self.process.wait(A_HANG)
        finally:
            self.process.kill()

    def printed(self) -> str:
        return Path(self.output.name).read_text()


def disturbed(folder: Path, python: str) -> list[Run]:
    """Rank 0 is killed, rank 1 hangs, all are asked to leave, a checkpoint is damaged, rank 1 is killed, and hangs."""
    chance = random.Random()
    run = Run.on_two_ranks(folder, python)
    run.wait_for_new_ranks([], chance.randint(1, 12))
    first = run.ranks()
    os.kill(first[0], signal.SIGKILL)
    run.wait_for_new_ranks(first, chance.randint(1, 8))
    second = run.ranks()
    Path(f"{folder}.hang").touch()
    run.wait_for_new_ranks(second, chance.randint(1, 5))
    run.wait_for(lambda: run.steps()[-1]["step"] > 14)  # two checkpoints are there: one of them will be damaged
    for process in (*run.ranks(), run.process.pid):  # as systemd does, and Slurm's scancel
        os.kill(process, signal.SIGTERM)
    assert run.end() == 0, run.printed()
    left = run.steps()[-1]["step"]

    newest = max(path for path in folder.iterdir() if path.name.isdigit())
    file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = Run.on_two_ranks(folder, python)
    again.left, again.damaged = left, newest
    again.wait_for_new_ranks(run.ranks(), chance.randint(1, 8))
    Path(f"{folder}.hang.save").touch()
    os.kill(again.ranks()[1], signal.SIGKILL)
    assert again.end() == 0, again.printed()
    return [run, again]


def machines(folder: Path, python: str) -> list[Run]:
    """Two launchers with a rank each. One is killed, and comes back. Then one rank is asked to leave.

    `seen` of the first launcher: {(ranks, step): loss}, also of the steps that were repeated.
    """
    endpoint = f"localhost:{forked.free_port()}"
    options = f"--preset toy --steps {ENDLESS} --save-every 40 --batch 3 --evaluate-every {ENDLESS}".split()
    environment = {"NNODES": "1:2", "RDZV_ENDPOINT": endpoint, "PYTHON": python}
    meeting = f"--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id train --nproc-per-node 1".split()
    other = [*launcher(python, *meeting), "-m", "harness.run.train", "zero2", *options]
    run = Run([str(ROOT / "launch.sh"), "train", "zero2", "1", *options], folder, **environment)
    run.wait_for(lambda: _answers(endpoint))  # it comes first: who keeps the rendezvous must live on
    second = Run(other, folder)
    run.seen = {}

    def steps_on(ranks: int, after: int, more: int) -> bool:
        """Whether `more` steps were made on `ranks` ranks, of those that began behind step `after`."""
        made = run.steps()
        run.seen |= {(line["ranks"], line["step"]): line["loss"] for line in made}
        return bool(made) and made[-1]["ranks"] == ranks and made[-1]["step"] >= after + more

    run.wait_for(lambda: steps_on(2, 40, 5))
    ours = [rank for rank in run.ranks() if os.readlink(f"/proc/{rank}/fd/1") == second.output.name]
    assert len(ours) == 1
    os.kill(second.process.pid, signal.SIGKILL)
    os.kill(ours[0], signal.SIGKILL)
    second.end()
    run.wait_for(lambda: steps_on(2, 0, 0) or steps_on(1, 40, 5))
    run.wait_for(lambda: steps_on(1, 80, 5))
    second = Run(other, folder)
    run.wait_for(lambda: steps_on(1, 0, 0) or steps_on(2, 80, 5))
    run.wait_for(lambda: steps_on(2, 80, 5))
    os.kill(run.ranks()[1], signal.SIGUSR1)  # one rank alone
    assert (run.end(), second.end()) == (0, 0), run.printed() + second.printed()
    return [run, second]


def _answers(endpoint: str) -> bool:
    with socket.socket() as probe:
        host, _, port = endpoint.partition(":")
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="session")
def begun(request, tmp_path_factory, quick_python):
    """{name of a story: a future of its launchers}. With --thorough `machines` imports all anew in every process."""
    place = tmp_path_factory.mktemp("runs")
    pythons = {disturbed: quick_python, machines: quick_python}
    if request.config.getoption("--thorough"):
        pythons[machines] = sys.executable
    with ThreadPoolExecutor(2) as pool:
        yield {tell.__name__: pool.submit(tell, place / tell.__name__, python) for tell, python in pythons.items()}


@pytest.fixture(scope="session")
def stories(begun):
    return {name: future.result() for name, future in begun.items()}


@pytest.fixture(scope="session")
def quiet(tmp_path_factory, ranks) -> Path:
    """The folder of a run without a break."""
    folder = tmp_path_factory.mktemp("quiet")
    ranks(2).run(undisturbed, options=OPTIONS, folder=str(folder))
    return folder


def test_kills_a_hang_a_stop_and_a_damaged_checkpoint_change_nothing(stories, quiet):
    _, last = stories["disturbed"]
    steps, expected = last.steps(), steps_of(quiet)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))  # none twice, none lost
    for line, other in zip(steps, expected, strict=True):
        assert line | {"time": 0, "tokens_per_s": 0} == other | {"time": 0, "tokens_per_s": 0}
    assert [line["step"] for line in steps if "held_out" in line] == [20, 40, 60, 80]
    losses = [line["loss"] for line in expected]
    assert losses[-1] < losses[0] and len(set(losses)) == STEPS
    restarts = last.events("restart")
    assert len(restarts) >= 3, last.lines()  # the stop is none
    for line in restarts:
        assert {"restarted", "joined", "loaded", "first step"} <= line["seconds"].keys()
        assert min(line["seconds"].values()) >= 0 and line["repeated"] >= 0
    assert last.lines()[-1]["event"] == "left" and last.lines()[-1]["why"] == "done"


def test_where_every_rank_stands_is_printed_when_one_hangs(stories):
    run, _ = stories["disturbed"]
    printed = run.printed()
    told = {rank: printed.partition(f"[rank {rank}] no progress")[2] for rank in (0, 1)}
    assert "hang" in told[1].splitlines()[1] and "hang" not in told[0].splitlines()[1], printed
    number = {}
    for rank in (0, 1):
        (line,) = [line for line in told[rank].splitlines()[:8] if "of all ranks" in line][:1]
        number[rank] = int(line.split()[1])
        assert ("begun and not over" in line) == (rank == 0), printed
    assert number[0] > number[1], printed


def test_a_rank_that_hangs_in_the_last_save_is_noticed(stories):
    _, again = stories["disturbed"]
    for rank in (0, 1):
        assert re.search(rf"\[rank {rank}\] no progress for 18 s in the save after step {STEPS}", again.printed())
    assert not Path(f"{again.folder}.hang.save").exists()
    assert len(again.events("left")) == 1


def test_who_asks_it_to_leave_gets_a_checkpoint_and_a_line(stories):
    run, again = stories["disturbed"]
    printed = run.printed()
    last = printed.rpartition("SIGTERM: the ranks save after this step and leave")[2]
    assert f"left because it was asked to, after step {again.left} of {STEPS}" in last, printed
    assert "Traceback" not in last and "rror" not in last, printed
    # The next start meets the checkpoint of that very step, which is damaged by then, and takes the one before it.
    assert re.search(f"not taken: rank .: '{again.damaged}", again.printed())
    assert "going on after step" in again.printed()
    for one in (*stories["disturbed"], *stories["machines"]):
        assert "FutureWarning" not in one.printed() and "DeprecationWarning" not in one.printed(), one.printed()


def test_a_machine_goes_and_comes_back(stories):
    run, second = stories["machines"]
    steps = Counter(line["step"] for line in run.steps())
    assert set(steps.values()) == {1} and sorted(steps) == list(range(1, len(steps) + 1))
    ranks = [line["ranks"] for line in run.events("start")]
    assert [number for place, number in enumerate(ranks) if [number] != ranks[place - 1 : place]][-3:] == [2, 1, 2]
    # (On a busy machine the first begins alone.)
    # Steps that were made on two ranks, and again on one: the same batch from the same state.
    twice = [step for number, step in run.seen if number == 1 and (2, step) in run.seen]
    assert twice, run.seen
    for step in twice:
        assert run.seen[1, step] == pytest.approx(run.seen[2, step], abs=1e-4)
        others = [loss for (_, other), loss in run.seen.items() if other != step]
        assert all(abs(run.seen[1, step] - loss) > 1e-9 for loss in others)
    assert run.lines()[-1]["why"] == "left because it was asked to"
    restarts = run.events("restart")
    assert len(restarts) >= 2 and any("noticed" in each["seconds"] for each in restarts)
    assert all(math.isfinite(line["loss"]) and line["tokens_per_s"] > 0 for line in run.steps())
    assert run.lines()[0]["event"] == "start"


def test_who_failed_is_said_in_plain_words(stories):
    run, again = stories["disturbed"]
    # On a busy machine a rank may also count as hanging without being told to: then the numbers are higher.
    killed = r"was killed by SIGKILL \(out of memory\? kill -9\?\)\. Starting all ranks again, [123] of 3"
    assert re.search(f"rank 0 {killed}", run.printed()) and re.search(f"rank 1 {killed}", again.printed())
    hang = r"rank [01] was the first to fail, with exit status 1: .* above\. Starting all ranks again, [23] of 3"
    assert re.search(hang, run.printed())
    assert f"done: {STEPS} steps. A larger --steps goes on from here" in again.printed()


def test_the_first_signal_is_enough_while_no_rank_runs(tmp_path, quick_python):
    meeting = (
        f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:{forked.free_port()} --nproc-per-node 1".split()
    )
    run = Run([*launcher(quick_python, *meeting), "none.py"], tmp_path)
    run.wait_for(lambda: "waiting for the other machine(s) at localhost:" in run.printed())
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.printed()
    last = run.printed().splitlines()[-1]
    assert last == "SIGTERM: no rank runs now. What was saved before, if anything, remains"


def test_a_second_signal_leaves_at_once(tmp_path, quick_python):
    script = tmp_path / "stuck.py"  # it never looks whether it was asked
    script.write_text(
        "import os, sys, time\nfrom harness.run.leaving import Leaving\nfrom pathlib import Path\nleaving = Leaving()\n"
        f"file = Path({str(tmp_path / 'pid')!r})\nfile.with_suffix('.new').write_text(str(os.getpid()))\n"
        "file.with_suffix('.new').rename(file)\ntime.sleep(6000)\n"
    )
    run = Run([*launcher(quick_python), str(script)], tmp_path / "none")
    run.wait_for((tmp_path / "pid").exists)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "SIGINT: the ranks save" in run.printed())
    time.sleep(1.1)  # nearer to each other they are one
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT and "Traceback" not in run.printed(), run.printed()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# What needs no ranks.


def test_the_journal_has_every_step_once(tmp_path):
    journal = Journal(tmp_path, 0)
    journal.write(event="start", step=0)
    for step in (1, 2, 3, 4):
        journal.write(step=step, loss=float(step))
    note_lost(tmp_path, 1, 4, "gone\nand more")
    with open(tmp_path / "losses.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # killed while it wrote
    again = Journal(tmp_path, 2)
    again.write(step=3, loss=3.5)
    now = time.time()
    seconds = again.back(joined=now, loaded=now)
    assert [(line["step"], line["loss"]) for line in steps_of(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.5)]
    lines = read(tmp_path / "losses.jsonl")
    assert [line["event"] for line in lines if "event" in line] == ["start", "restart"]
    assert lines[-1]["repeated"] == 2 and "noticed" in seconds
    assert again.back(now, now, launched=again._before[-1]["time"] - 1) is not None
    assert again.back(now, now, launched=now + 1) is None  # typed again by hand
    again.write(event="left", step=3)
    assert Journal(tmp_path, 3).back(now, now) is None  # that run had come to its end
    assert Journal(tmp_path / "new", 0).back(now, now) is None


def test_no_byte_that_is_evaluated_on_is_trained_on():
    text = torch.arange(250, dtype=torch.uint8)  # every byte once
    own, held_out = hold_out(text, seq=7)
    train_on = torch.cat([torch.cat(Sequences(own, 7)(range(n, n + 1)), 1).flatten() for n in range(100)])
    evaluated = torch.cat([torch.cat(Sequences(held_out, 7)(range(n, n + 1)), 1).flatten() for n in range(9)])
    assert not set(train_on.tolist()) & set(evaluated.tolist())
    assert len(own) + len(held_out) == 250 and len(held_out) == 12
    with pytest.raises(ValueError, match="too short"):
        hold_out(text[:16], seq=8)


def test_an_epoch_has_every_sequence_once_and_another_order():
    sequences = Sequences(torch.arange(64, dtype=torch.uint8), seq=7, seed=3)
    firsts = [sequences(range(n, n + 1))[0][0, 0].item() for n in range(18)]
    assert sorted(firsts[:9]) == sorted(firsts[9:]) == list(range(0, 63, 7))
    assert firsts[:9] != firsts[9:] != sorted(firsts[9:])
    inputs, targets = Sequences(torch.arange(64, dtype=torch.uint8), 7, seed=3)(range(7, 11))  # over its end
    assert inputs[:, 0].tolist() == firsts[7:11] and torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("ranks", (1, 2, 3, 5))
def test_all_ranks_together_have_the_whole_batch(ranks):
    numbers, shares = [], 0.0
    for rank in range(ranks):
        training = object.__new__(train.Training)
        training.options = train_options.arguments(["zero1", "--batch", "16", "--accumulate", "3"])
        training.me = Rank(rank, ranks, torch.device("cpu"), "gloo", "")
        parts = training.parts(32)
        assert len(parts) == 3 and all(len(sequences) for sequences, _ in parts)
        numbers += [number for sequences, _ in parts for number in sequences]
        shares += sum(share for _, share in parts)
    assert numbers == list(range(32, 48)) and shares == pytest.approx(1)


def test_what_is_new_of_the_options_is_named():
    before = train_options.kept(train_options.arguments(["zero1"]))
    now = train_options.arguments(["zero3", "--batch", "16", "--seed", "0", "--lr", "0.002", "--print-every", "1"])
    assert train_options.changed(before, now) == ["--batch 8 -> 16", "--lr 0.001 -> 0.002"]
    assert train_options.changed({}, now) == [] == train_options.changed(train_options.kept(now), now)


def ended(folder: str, options: list[str]) -> tuple[str, str]:
    """On ranks of the pool: what a start in `folder` prints, and the error that it ends with."""
    printed, mistake = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            undisturbed(options, folder)
        except RuntimeError as error:
            mistake = f"{type(error).__name__}: {error}"
    return printed.getvalue(), mistake


def test_how_a_run_goes_on_and_ends_is_said(ranks, quiet, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(quiet, folder)
    options = ["zero1", "--preset", "toy", "--batch", "7", "--steps"]
    (printed, _), (other, _) = ranks(2).run(ended, folder=str(folder), options=[*options, "30"])
    assert f"already at step {STEPS}, --steps is 30: nothing to do" in printed and other == ""
    assert f"changed since step {STEPS}: --steps {STEPS} -> 30, --batch 6 -> 7, --accumulate 2 -> 1" in printed
    assert "made again" not in printed

    newest, *older = sorted((path for path in folder.iterdir() if path.name.isdigit()), reverse=True)
    shutil.rmtree(newest)
    (printed, _), _ = ranks(2).run(ended, folder=str(folder), options=[*options, str(STEPS)])
    step = STEPS - STEPS % 7  # it saves every 7 steps
    assert f"going on after step {step}, from {older[0]}: {STEPS - step} steps are made again\n" in printed
    saved, last = printed.splitlines()[-2:]
    assert saved.startswith(f"saved step {STEPS} to")
    assert last == f"done: {STEPS} steps. A larger --steps goes on from here"

    for path in folder.glob("[0-9]*/*.distcp"):
        path.write_bytes(b"")
    both = ranks(2).run(ended, folder=str(folder), options=[*options, str(STEPS)])
    for _, mistake in both:  # every rank, so that every launcher learns of it
        assert mistake.startswith("NotAgain: no checkpoint in") and f"steps up to {STEPS}." in mistake, both
    assert [line["step"] for line in steps_of(folder)] == list(range(1, STEPS + 1))


def test_the_learning_rate_warms_up_and_falls():
    options = train_options.arguments(["zero1", "--steps", "110", "--warmup", "10", "--lr", "0.5"])
    rates = [train_options.learning_rate(step, options) for step in range(110)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)]) and max(rates) == rates[10] == 0.5
    assert rates[60] == pytest.approx(0.5 * 0.55) and sorted(rates[10:], reverse=True) == rates[10:]
    assert train_options.learning_rate(110, options) == pytest.approx(0.05)


def test_mistakes_in_the_options(monkeypatch, tmp_path, quiet):
    monkeypatch.setenv("ZERO_PREFLIGHT", "2")
    monkeypatch.chdir(tmp_path)
    mistakes = {
        "zero4": ["'zero4'", "zero1, zero2, zero3"],
        f"zero1 --preset tiny --folder {quiet}": ["another model than 'tiny' (preset toy): take --preset toy or"],
    }
    for argv, words in mistakes.items():
        with pytest.raises(ValueError) as raised:
            train_options.arguments(argv.split())
        assert all(word in str(raised.value) for word in words), raised.value
    assert train_options.arguments(["zero1", "--preset", "toy", "--folder", str(quiet)]).steps == 200
    assert train_options.arguments(["zero1", "--preset", "toy"]).folder == Path("runs/zero1-toy")


def test_a_folder_in_use_is_refused_until_its_rank_0_is_gone(tmp_path, quick_python, monkeypatch):
    monkeypatch.setenv("ZERO_PREFLIGHT", "2")
    monkeypatch.setattr(train_options, "LEAVING", 0.0)
    line = ["zero3", "--preset", "toy", "--steps", "1", "--folder", str(tmp_path / "one")]
    stop = rf"stop it first \(kill -INT {os.getppid()} on .*\)"
    said = f"--folder .*one' is in use by a run: {stop}, or take another --folder"
    with folders.lock(tmp_path / "one", seconds=0):  # the kernel takes it from a process that ends, too
        with pytest.raises(NotAgain, match=said):
            train_options.arguments(line)
        # Without that check of the options: both ranks hear of what no restart mends, and it ends the run at once.
        run = Run([*launcher(quick_python, "--standalone", "--nproc-per-node", "2"), "-m", "harness.run.train", *line],
                  tmp_path / "one", ZERO_TIMEOUT="10")  # fmt: skip
        assert run.end() == 3, run.printed()
        assert re.fullmatch(f"restarts do not mend this: {said}", run.printed().splitlines()[-1]), run.printed()
        assert "Another rank" not in run.printed() and "Starting all ranks again" not in run.printed(), run.printed()
        assert not (tmp_path / "one" / "losses.jsonl").read_text()
    held = folders.lock(tmp_path / "one", seconds=0)
    monkeypatch.setattr(time, "sleep", lambda seconds: held.close())  # which leaves while the next one waits for that
    folders.lock(tmp_path / "one", seconds=60).close()


def test_a_folder_that_holds_other_things_is_refused(tmp_path):
    folders.refuse_others(tmp_path / "new")
    (tmp_path / folders.LOCK).touch()
    folders.refuse_others(tmp_path)
    for name in ("notes.md", "more.md"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"holds other things \(more.md, \.\.\.\) and no run"):
        folders.refuse_others(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folders.LOCK, "more.md", "notes.md"]
    for of_a_run in ("losses.jsonl", "000002"):
        (tmp_path / of_a_run).mkdir()
        folders.refuse_others(tmp_path)
        (tmp_path / of_a_run).rmdir()

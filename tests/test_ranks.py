"""zerolab/run/ranks.py and pool.py: verdicts of ranks arrive, it is reported how ranks end, and all of them end."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from zerolab.run import pool, ranks

# The script of a rank: it reports a verdict on "first", then does what its case does.
HEAD = """\
import os, signal, sys, time
from zerolab.run import ranks
folder = sys.argv[-1]
rank = ranks.start_rank(folder)
ranks.report(folder, "first", rank, {"of": rank, "pid": os.getpid()})
ranks.wait_for_reports(folder, "first", 2, 60)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):

    def of(body: str, seconds: float = 100, **options) -> ranks.Ranks:
        (tmp_path / "ranks.py").write_text(HEAD + textwrap.dedent(body))
        return ranks.Ranks([str(tmp_path / "ranks.py")], 2, seconds, file=str(tmp_path / "ranks.py"), **options)

    return of


def all_end(pids: list[int]) -> bool:
    """A killed process is gone a moment later. It stays listed until its parent asks for it."""
    until = time.monotonic() + 60
    while there := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return not there


def test_verdicts_arrive_item_by_item_and_a_killed_rank_fails_its_item(start):
    with start(
        """
        ranks.report(folder, "second", rank, {"of": 10 + rank, "n": os.environ["WORLD_SIZE"], "v": os.environ["V"]})
        print("hello", flush=True)
        open(f"{folder}/now.{rank}", "w").write("barrier")
        ranks.wait_for_reports(folder, "second", 2, 60)
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.report(folder, "third", rank, {"status": "passed"})
        """,
        V="7",
        quiet=True,
    ) as there:
        found = dict(there.verdicts(["first", "second", "third", "fourth"]))
    assert [verdict["of"] for verdict in found["first"]] == [0, 1]
    assert found["second"] == [{"of": 10 + rank, "n": "2", "v": "7"} for rank in (0, 1)]
    error = "was killed by SIGKILL (out of memory? kill -9?); the last collective it was in: barrier"
    assert found["third"] == [{"status": "passed"}, {"status": "died", "error": error}]
    assert there.text.count("hello") == 2 and not there.folder.exists()


@pytest.mark.long
def test_ranks_that_hang_are_ended_when_their_time_is_over(start, monkeypatch):
    """Also ranks that ignore torchrun's signal. They are killed, because torchrun would wait for a long time."""
    monkeypatch.setattr(ranks, "ENDING", 1)
    found = {}
    with start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)", seconds=300) as there:
        for item, verdicts in there.verdicts(["first", "second"]):
            found[item] = verdicts
            there.until = time.monotonic()  # both have begun: their time is over
    pids = [verdict["pid"] for verdict in found["first"]]
    error = "had not come to its end after 300 s, and was ended"
    assert [verdict["error"] for verdict in found["second"]] == [error] * 2, found
    assert all_end(pids)


def test_ranks_that_never_begin_report_nothing_and_their_output_is_kept(start, tmp_path):
    there = start("")
    (tmp_path / "ranks.py").write_text("nonsense\n")
    with there:
        assert list(there.verdicts(["first"])) == []
    assert "NameError: name 'nonsense' is not defined" in there.text


STARTS_RANKS = """
import sys
from zerolab.run import ranks
with ranks.Ranks([{file!r}], 2, 100) as there:
    for _, verdicts in there.verdicts(["first", "second"]):
        print(*[verdict["pid"] for verdict in verdicts], there.process.pid, flush=True)
"""


@pytest.mark.long
def test_they_end_with_the_process_that_has_started_them(tmp_path):
    """Even though they are in their own sessions: after kill -9, which no process can handle."""
    (tmp_path / "ranks.py").write_text(HEAD + "time.sleep(600)\n")
    program = STARTS_RANKS.format(file=str(tmp_path / "ranks.py"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) >= 2 and all(psutil.pid_exists(pid) for pid in pids)
        process.kill()
        process.wait(100)
        assert all_end(pids)


def test_how_ranks_have_ended(tmp_path):
    """Of four ranks the first ended by os._exit(), the others by a signal, a crash, and an exit status."""
    for rank, crash in enumerate(("", "", 'Fatal Python error: Segmentation fault\nFile "a.py", line 7 in step', "")):
        (tmp_path / f"crash.{rank}").write_text(crash)
    Path(tmp_path, "now.0").write_text("barrier")
    there = ranks.Ranks([], 5, 1, file="a.py")
    there.folder = tmp_path
    Path(tmp_path, "failures").write_text('{"1": -9, "2": -11, "3": 5}')
    assert [there.death(rank) for rank in range(5)] == [
        "ended without an error: os._exit(), or it was stopped when another rank had ended; the last collective it "
        "was in: barrier",
        "was killed by SIGKILL (out of memory? kill -9?)",
        "died: Segmentation fault in line 7 (is it a tensor whose memory was freed?)",
        "ended with exit status 5",
        None,  # it never began
    ]


def test_a_rank_of_a_pool_ends_quietly_if_nobody_waits_for_its_result():
    """For example because a check was interrupted. A rank needs seconds to start, so the pipe is closed before."""
    one = pool.Pool(1, timeout=60)
    one.pipes[0].send((int, (), {}))
    one.pipes[0].close()
    one.processes[0].join(60)
    assert one.processes[0].exitcode == 0  # and not 1, of a BrokenPipeError whose traceback is printed
    one.kill()

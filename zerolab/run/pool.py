"""Ranks on this machine that stay ready, for functions that run on all of them at the same time.

Starting a process takes seconds, so each pool of ranks is started once, and then runs one function after the other.
The tests use this, and `./launch.sh check`.
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = 60  # seconds, for a collective and for a whole test
# Imported once, and not by each rank. multiprocessing skips a package that is not installed, such as pytest.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "pytest"]
pools = {}  # number of ranks -> its Pool


class RankFailed(AssertionError):
    """A rank failed, died or hung. The message has its traceback.

    failures   {rank: the text of its traceback, or the argument of `Reported`}
    died       {rank: exit code}
    silent     ranks that gave no answer
    places     {rank: where its threads were}, of ranks that crashed or gave no answer
    """

    def __init__(self, failures, died, silent, places):
        lines = [str(failure) for failure in failures.values()]
        lines += [f"rank {rank} died, exit code {code}" for rank, code in died.items()]
        lines += [f"no answer from the ranks {silent}"] if silent else []
        super().__init__("\n".join(lines))
        self.failures, self.died, self.silent, self.places = failures, died, silent, places


class Reported(Exception):
    """Raised on a rank, with a failure that can be sent."""


def run_on_ranks(ranks, function, *args, **kwargs):
    """Call a module-level `function` on `ranks` ranks over gloo. Returns their results in the order of the ranks.

    Raises RankFailed with the traceback of each rank that failed. The next call then gets new ranks.
    """
    if ranks not in pools:
        pools[ranks] = Pool(ranks, TIMEOUT)
    try:
        return pools[ranks].run(function, args, kwargs)
    except BaseException:
        pools.pop(ranks).kill()  # the others may wait in a collective
        raise


def serve_over_gloo(rank, ranks, timeout, folder, pipe):
    """The program of a rank."""
    faulthandler.enable(open(crash_file(folder, rank), "w"))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the process that started the ranks ends them
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun does: DeepSpeed reads it
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    gc.freeze()  # so that gc.collect(), which tests call often, does not go through all that was imported
    answer(pipe, rank, ranks)


def answer(pipe, rank, ranks):
    """Call the functions that arrive in the pipe, and send back what they return, until the pipe closes."""
    with contextlib.suppress(ConnectionError):  # the pool's process has ended, and nobody reads the result
        while True:
            try:
                function, args, kwargs = pipe.recv()
            except EOFError:
                return
            torch.manual_seed(1000 + rank)  # different on each rank, so that a stage has to make weights equal
            try:
                pipe.send((function(*args, **kwargs), None))
            except Reported as error:
                pipe.send((None, error.args[0]))
            except BaseException:
                pipe.send((None, f"rank {rank} of {ranks}: {traceback.format_exc()}"))


class Pool:
    def __init__(self, ranks, timeout, serve=serve_over_gloo, start="forkserver"):
        # Ranks are forked from a server that has imported torch and started no thread. They cannot be forked from this
        # process, because torch's threads would be missing and gloo would hang.
        context = multiprocessing.get_context(start)
        context.set_forkserver_preload(PRELOADED)
        self.timeout = timeout
        self.folder = tempfile.TemporaryDirectory()  # has the file in which the ranks meet
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, ranks, timeout, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies closes the pipe
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, function, args, kwargs):
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        results, failures, died = {}, {}, {}
        waiting = dict(zip(self.pipes, range(len(self.pipes))))
        deadline = time.monotonic() + 2 * self.timeout
        while waiting and (ready := wait(waiting, max(0, deadline - time.monotonic()))):
            for pipe in [each for each in waiting if each in ready]:
                rank = waiting.pop(pipe)
                try:
                    results[rank], failure = pipe.recv()
                except EOFError:
                    self.processes[rank].join(10)
                    died[rank] = self.processes[rank].exitcode
                else:
                    if failure is not None:
                        failures[rank] = failure
            if failures or died:
                deadline = min(deadline, time.monotonic() + 5)  # the others may wait for these
        if failures or died or waiting:
            places = {rank: self.place(rank) for rank in (*died, *waiting.values())}
            raise RankFailed(failures, died, sorted(waiting.values()), places)
        return [results[rank] for rank in sorted(results)]

    def place(self, rank):
        """Where the threads of a rank are, or were when it crashed. Ends the rank."""
        process = self.processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)  # Python's fault handler writes a traceback of each thread
            process.join(5)
        file = crash_file(self.folder.name, rank)
        return file.read_text() if file.exists() else ""

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
        with contextlib.suppress(OSError):  # a rank that has just been killed may still hold a file
            self.folder.cleanup()


def crash_file(folder, rank):
    return Path(folder, f"crash.{rank}")


@atexit.register
def kill_all():
    for pool in pools.values():
        pool.kill()
    pools.clear()

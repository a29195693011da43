"""A `python` of which every call is a fork of a process that has imported torch: none of the seconds of `import torch`.

`python()` is the path of an executable. PYTHON=that goes the whole way of a user: launch.sh, the check of the options,
torchrun and its ranks. The executable itself sends its arguments, folder, environment and open files to this process,
which lets one be forked; then it passes signals on, and ends as the fork has ended. `alone` and `on_ranks` start
programs by it without launch.sh and torchrun.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from pool import forking

from zerolab.run import ranks
from zerolab.run.starter import end_with_starter

ROOT = Path(__file__).resolve().parent.parent

CLIENT = """\
import os, pickle, signal, socket, struct, sys
here = socket.socket(socket.AF_UNIX)
here.connect({address!r})
order = pickle.dumps((sys.argv[1:], os.getcwd(), dict(os.environ)))
socket.send_fds(here, [struct.pack("q", len(order))], [0, 1, 2])
here.sendall(order)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: here.sendall(bytes([number])))
status = struct.unpack("q", here.recv(8, socket.MSG_WAITALL))[0]
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


A_HANG = 900  # seconds: far more than anything here takes, on a busy machine too


def alone(program: list[str], **environment) -> subprocess.CompletedProcess:
    """Run `program`, a script or `-m module` and its arguments, in one process outside of any torchrun."""
    return _run([python(), *program], environment)


def on_ranks(program: list[str], ranks: int, **environment) -> list[subprocess.CompletedProcess]:
    """Run `program` on ranks that nobody ends, and return what became of each (returncode -9: a signal ended it)."""
    import torch.distributed as dist

    # The place where the ranks meet is in this process, as it is in torchrun: it stays when a rank dies.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "ZERO_TIMEOUT": 300, **environment}
    line = [python(), *program]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: _run(line, given | {"RANK": rank, "LOCAL_RANK": rank}), range(ranks)))


def launch(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run ./launch.sh as a user does who stands in that folder, by that executable."""
    return _run([str(ROOT / "launch.sh"), *arguments], {"PYTHON": python(), "ZERO_TIMEOUT": 300, **environment}, folder)


def _run(line: list[str], environment: dict, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """To its end, with no variable of a torchrun around us."""
    clean = ranks.environment(**{name: str(value) for name, value in environment.items()})
    return subprocess.run(line, cwd=folder, env=clean, capture_output=True, text=True, timeout=A_HANG)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@functools.cache
def python() -> str:
    """The path of the executable. What serves it ends with this process."""
    forking()  # it keeps sys.executable, which a test may replace by this one
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    executable, address = Path(folder.name, "python"), f"{folder.name}/socket"
    executable.write_text(f"#!{sys.executable} -IS\n" + CLIENT.format(address=address))
    executable.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(100)

    def serve() -> None:
        while True:
            client, _ = listening.accept()
            threading.Thread(target=_serve_one, args=(client, str(executable)), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return str(executable)


def _serve_one(client: socket.socket, executable: str) -> None:
    """Fork for one call; then pass on signals there, and how it ended back. Whoever loses the caller is killed."""
    length, files, _, _ = socket.recv_fds(client, 8, 3)
    order = pickle.loads(client.recv(int.from_bytes(length, sys.byteorder), socket.MSG_WAITALL))
    streams = [Connection(file) for file in files]  # these can be sent to a fork
    process = forking().Process(target=_as_python, args=(executable, *order, *streams), daemon=True)
    process.start()
    for stream in streams:
        stream.close()
    while True:
        ready, _, _ = select.select([client, process.sentinel], [], [])
        if process.sentinel in ready:
            break
        signals = client.recv(16)
        for number in signals or [signal.SIGKILL]:
            os.kill(process.pid, number)
        if not signals:
            break
    process.join()
    with contextlib.suppress(OSError):  # the caller may have been killed
        client.sendall(process.exitcode.to_bytes(8, sys.byteorder, signed=True))
    client.close()


def _as_python(executable: str, arguments: list[str], folder: str, environment: dict[str, str], *streams) -> None:
    """In the fork: all as if `executable` had been started there with `arguments`."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    gc.freeze()  # what was imported is no garbage: a collection need not look at it
    sys.stdin = open(0)  # noqa: SIM115  multiprocessing has closed it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    end_with_starter()
    sys.executable = executable  # what this one starts goes the same way
    prefixes = (sys.prefix, sys.base_prefix, *filter(lambda path: path.endswith("-packages"), sys.path))  # a .pth's
    of_the_installation = [path for path in sys.path if path.startswith(prefixes)]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *of_the_installation]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while arguments[0] == "-u" or arguments[0].startswith("-X"):  # Python's own options, which change nothing here
        del arguments[0]
    put_first = (lambda path: None) if "PYTHONSAFEPATH" in environment else functools.partial(sys.path.insert, 0)
    multiprocessing.current_process()._config["daemon"] = False  # it may have children of multiprocessing's
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            put_first(folder)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            put_first(os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing's own end leaves them out

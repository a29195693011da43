"""A `python` for the commands that a test starts, of which every call is a fork of a process that has imported torch.

`with ForkedPython() as python:` gives the path of an executable. PYTHON=that goes the whole way of a user, launch.sh,
the check of the options, torchrun and its ranks, and takes none of the seconds that `import torch` takes each of them.
The executable itself does nothing: it sends its arguments, folder, environment and open files to this process, which
lets one be forked; then it passes signals on, and ends as the fork has ended.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from forked import as_python
from pool import forking

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


class ForkedPython:
    def __enter__(self) -> str:
        forking()  # it keeps sys.executable, which a test may replace by this one
        self._folder = tempfile.TemporaryDirectory()
        self.executable = Path(self._folder.name, "python")
        address = f"{self._folder.name}/socket"
        self.executable.write_text(f"#!{sys.executable} -IS\n" + CLIENT.format(address=address))
        self.executable.chmod(0o755)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(100)
        threading.Thread(target=self._serve, daemon=True).start()
        return str(self.executable)

    def __exit__(self, *_) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._folder.cleanup()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        """Fork for one call; then pass on signals there, and how it ended back. Whoever loses the caller is killed."""
        length, files, _, _ = socket.recv_fds(client, 8, 3)
        order = pickle.loads(client.recv(int.from_bytes(length, sys.byteorder), socket.MSG_WAITALL))
        streams = [Connection(file) for file in files]  # these can be sent to a fork
        process = forking().Process(target=as_python, args=(str(self.executable), *order, *streams))
        process.daemon = True
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

"""A rank's side of stopping politely: was this run asked to save and leave?

Somebody asks the launcher (harness/run/restarts.py), which makes a file; or sends SIGUSR1 or SIGINT to this process.
SIGTERM is another matter. torchrun sends it to stop the ranks before it starts them again. Then a rank must go at once,
as the others are gone or stuck. But systemd, or Slurm's `scancel`, send it to all processes of a job, the launcher
among them. So a rank that gets SIGTERM looks whether the launcher was asked, too.
"""

import os
import signal
import threading
import time

ASKING = (signal.SIGUSR1, signal.SIGINT)


def hear(numbers, heard) -> None:
    """Call `heard(number)` in a thread of its own, as soon as one of these signals comes. For the main thread.

    Python runs a handler when the main thread comes back from C++, where it may wait for others in vain. But it writes
    each signal's number into a pipe at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def listen() -> None:
        while True:
            if (number := os.read(reading, 1)[0]) in numbers:
                heard(number)

    threading.Thread(target=listen, daemon=True).start()


class Leaving:
    """Make one in the main thread, early. `asked()` costs microseconds: ask after every step."""

    def __init__(self):
        self._file, self._asked = os.environ.get("ZERO_STOP_FILE", ""), False
        hear((signal.SIGTERM, *ASKING), self._heard)
        for number in (signal.SIGTERM, *ASKING):
            signal.signal(number, lambda *_: None)  # the thread does it all

    def asked(self) -> bool:
        return self._asked or os.path.exists(self._file)

    def _heard(self, number: int) -> None:
        if number in ASKING:
            self._asked = True
            return
        time.sleep(0.3)  # if the launcher got it in the same moment, its file is there now
        if not self.asked():
            os._exit(128 + signal.SIGTERM)

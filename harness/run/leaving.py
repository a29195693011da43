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


class Leaving:
    """Make one in the main thread, early. `asked()` costs microseconds: ask after every step."""

    def __init__(self):
        self._file, self._asked = os.environ.get("ZERO_STOP_FILE", ""), False
        # Python runs a handler when the main thread comes back from C++, where a rank may wait for others in vain. So a
        # thread reads the signals' numbers from a pipe, and the handlers do nothing.
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in (signal.SIGTERM, *ASKING):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writing)
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def asked(self) -> bool:
        return self._asked or os.path.exists(self._file)

    def _listen(self, pipe: int) -> None:
        while True:
            number = os.read(pipe, 1)[0]
            if number in ASKING:
                self._asked = True
            elif number == signal.SIGTERM:
                time.sleep(0.3)  # if the launcher got it in the same moment, its file is there now
                if not self.asked():
                    os._exit(128 + signal.SIGTERM)

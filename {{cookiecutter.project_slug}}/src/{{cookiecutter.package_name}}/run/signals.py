"""Signals only leave a wish here; training looks at it between two steps."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from .output import SteadyOutput

# What schedulers and people send to stop a job. SLURM: --signal=USR1@90, or SIGTERM at the end.
_STOP = ("SIGTERM", "SIGUSR1", "SIGINT")


class Signals:
    """Handlers for the time of one training; use as a context manager.

    Attributes:
        wish: the name of the first signal that asked to stop; None so far.
        soft: whether Ctrl-C waits for the next step. Before training there is nothing to save, so
            it stops at once; a second one always does.
    """

    def __init__(self, output: SteadyOutput, speaks: bool) -> None:
        self.output, self.speaks = output, speaks
        self.wish: str | None = None
        self.soft = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self.install()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Put the handlers in place; once more after Lightning has put its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in (*_STOP, "SIGHUP"):
            number = getattr(signal, name, None)  # Windows lacks some
            if number is None:
                continue
            before = self.before.setdefault(number, signal.getsignal(number))
            if before is not signal.SIG_IGN:  # nohup, or a job in the background
                signal.signal(number, self._hang_up if name == "SIGHUP" else self._ask_to_stop)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        again = self.wish is not None
        if number == signal.SIGINT and (again or not self.soft):
            raise KeyboardInterrupt
        if again:
            return
        self.wish = signal.Signals(number).name
        if self.speaks:
            more = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
            line = f"\n{self.wish}: a checkpoint at the next step, then the end{more}\n"
            os.write(2, line.encode())  # print is not safe in a handler

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """The terminal is gone: train on, and write into the run folder what it would have shown."""
        self.output.move()

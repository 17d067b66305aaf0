"""What is printed goes on into the run folder when the terminal is gone."""

import os
import sys
from pathlib import Path
from typing import Any, TextIO

LOG = "output.log"


class SteadyOutput:
    """Stands in for stdout and stderr: when nobody reads any more, writes into a file instead.

    A dropped SSH connection closes the terminal or the pipe under a running process; each `print`
    would then raise, in the middle of training.
    """

    def __init__(self) -> None:
        self.log = Path(os.devnull)

    def __enter__(self) -> "SteadyOutput":
        self.before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Stream(sys.stdout, self), _Stream(sys.stderr, self)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        sys.stdout, sys.stderr = self.before

    def move(self) -> None:
        """Send file descriptors 1 and 2 into the log, for this process and what it starts."""
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


class _Stream:
    def __init__(self, stream: TextIO, owner: SteadyOutput) -> None:
        self._stream, self._owner = stream, owner

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._owner.move()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._owner.move()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""One process owns a run folder. The system takes the lock back when it dies, however it dies."""

import errno
import json
import os
import socket
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

_TAKEN = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """An exclusive record lock on `<folder>/.lock`.

    A record lock (not flock): loader processes do not inherit it, so a run whose main process was
    killed is free at once, while its workers still end. On a file system without locks it holds
    nothing, and two runs in one folder are not noticed.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self.file: IO[str] | None = None

    def take(self) -> str | None:
        """Take the lock; returns None when it is ours, else who holds it."""
        if fcntl is None or self.file is not None:
            return None
        while True:
            file = self.path.open("a+", encoding="utf-8")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = self._owner(file)
                file.close()
                return owner if error.errno in _TAKEN else None
            if self._is_current(file):
                break
            file.close()  # its last owner has just removed it
        file.truncate(0)
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        file.flush()
        self.file = file
        return None

    def release(self) -> None:
        if self.file is not None:
            self.path.unlink(missing_ok=True)
            self.file.close()
            self.file = None

    def _is_current(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    @staticmethod
    def _owner(file: IO[str]) -> str:
        file.seek(0)
        try:
            owner = json.load(file)
        except ValueError:
            return "another process"
        return f"process {owner['pid']} on {owner['host']}"

"""The background upload of a run folder. Training never waits for it and never fails by it."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..environment.folders import typed, url_of
from .folder import RunFolder
from .store import BEAT, OWNER, Store, first_line
from .weights import INDEX

CHECK = 5.0  # seconds between two looks at the folder
LONGEST_WAIT = 60.0  # seconds between two attempts when the store does not answer
LARGE = 16 * 2**20  # bytes; files above this that are no checkpoints are sent once, at the end
TIME_TO_STOP, TIME_TO_FINISH = 60.0, 300.0  # seconds for what is left at the end


class Mirror:
    """Sends what has changed in a run folder to its store, from a thread of its own.

    An index goes up after the checkpoints that it names and after the metrics up to them; what
    it no longer names is removed after that. So at any moment the store holds a run that can go on.

    Args:
        store: the run's remote folder.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.folder = store, store.local
        self.sent: dict[Path, tuple[int, int]] = {}  # file: its time and size when it was sent
        self.index = b""  # as it is in the store
        self.arrived: set[str] = set()  # checkpoints that are in the store
        self.looked = False
        self.small_at = 0.0
        self.fault: str | None = None
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self.thread.start()

    def close(self, stopped: bool) -> None:
        """Send what is left, for a bounded time, and say what did not arrive."""
        self.closing.set()
        limit = TIME_TO_STOP if stopped else TIME_TO_FINISH
        with contextlib.suppress(KeyboardInterrupt):  # its result is here and complete
            self.thread.join(2)
            if self.thread.is_alive():
                text = f"what is left to {self.store.url}, for at most {limit:.0f} s (Ctrl-C leaves it)"
                print(f"{'uploading:':<15} {text}", flush=True)
                self.thread.join(limit)
        if self.thread.is_alive():
            left = [path for path in self._files() if self._changed(path)]
            size = sum(path.stat().st_size for path in left) / 2**20
            print(
                f"{'warning:':<15} {len(left)} files ({size:,.1f} MiB) did not arrive at {self.store.url} "
                f"({self.fault or 'too slow'}); they are in {typed(self.folder)}, and the same command "
                f"with run_dir={self.store.url} sends them",
                flush=True,
            )

    def _work(self) -> None:
        failures = 0
        while True:
            last = self.closing.is_set()
            try:
                self._round(last)
            except Exception as error:  # whatever the store meets, training goes on
                failures += 1
                self._say_fault(error)
                wait = min(2.0 ** (failures - 1), LONGEST_WAIT)
                time.sleep(min(wait, 5)) if last else self.closing.wait(wait)
                continue
            if self.fault:
                print(f"{'upload:':<15} {self.store.url} has caught up", flush=True)
            failures, self.fault = 0, None
            if last:
                return
            self.closing.wait(CHECK)

    def _say_fault(self, error: Exception) -> None:
        if self.fault is None:
            text = f"{self.store.url}: {first_line(error)}; training goes on, and the upload is tried again"
            print(f"{'warning:':<15} {text}", flush=True)
        self.fault = first_line(error)

    def _round(self, last: bool) -> None:
        if not self.looked:
            self._look()
        index = self._read_index()
        new = index != self.index
        names = _names(index)
        if new and not self._send_checkpoints(names, index):
            return  # training has moved on meanwhile: the next round takes the newer index
        if new or last or time.monotonic() - self.small_at > BEAT:
            for path in self._files(checkpoints=False):
                if last or path.stat().st_size <= LARGE:
                    self._send(path)
            self.store.beat()
            self.small_at = time.monotonic()
        if new:
            self.store.fs.pipe_file(f"{self.store.path}/checkpoints/{INDEX}", index)
            self.index = index
            self._remove_all_but(names)
        if last:
            self.store.fs.rm_file(f"{self.store.path}/{OWNER}")

    def _look(self) -> None:
        """What an earlier attempt has sent. A checkpoint that the index there does not name may be a
        half-sent or an older one."""
        with contextlib.suppress(FileNotFoundError):
            index = self.store.fs.cat_file(f"{self.store.path}/checkpoints/{INDEX}")
            self.arrived = set(_names(index))
            self.index = index
        self.looked = True

    def _read_index(self) -> bytes:
        try:
            return (self.folder / "checkpoints" / INDEX).read_bytes()
        except FileNotFoundError:
            return self.index

    def _send_checkpoints(self, names: list[str], index: bytes) -> bool:
        """Send those that are not there, the newest first: it lives longest. False when one has been
        removed here before it was sent."""
        for name in reversed(names):
            place = self.folder / "checkpoints" / name
            if name in self.arrived:
                continue
            if not place.exists() and self._read_index() != index:
                return False
            for path in _below(place):
                self._send(path)
            self.arrived.add(name)
        return True

    def _remove_all_but(self, names: list[str]) -> None:
        self.arrived.intersection_update(names)
        fs, place = self.store.fs, f"{self.store.path}/checkpoints"
        fs.invalidate_cache()
        for entry in fs.ls(place, detail=True):
            if entry["name"].rstrip("/").rpartition("/")[2] not in (INDEX, *names):
                fs.rm(entry["name"], recursive=entry["type"] == "directory")

    def _send(self, path: Path) -> None:
        try:
            state = _state(path)
            if self.sent.get(path) != state:
                self.store.send(path)
                self.sent[path] = state
        except FileNotFoundError:
            if path.exists():
                raise  # it is the store that misses something

    def _changed(self, path: Path) -> bool:
        inside = path.relative_to(self.folder).parts
        if inside[0] == "checkpoints" and inside[1] in self.arrived:
            return False
        return self.sent.get(path) != _state(path) and path.name != INDEX

    def _files(self, checkpoints: bool = True) -> Iterator[Path]:
        for path in sorted(self.folder.iterdir()):
            if path.name != "checkpoints" or checkpoints:
                yield from _below(path)


def _below(path: Path) -> Iterator[Path]:
    """The files of a folder, or the file itself; hidden ones are not finished or belong to this machine."""
    if path.name.startswith(".") or path.is_symlink() or path.suffix == ".tmp":
        return
    if path.is_file():
        yield path
    elif path.is_dir():
        for name in sorted(os.listdir(path)):
            # The table of a sharded checkpoint is hidden, and needed.
            yield from [path / name] if name == ".metadata" else _below(path / name)


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _names(index: bytes) -> list[str]:
    """The checkpoints that an index names, by step."""
    try:
        entries = json.loads(index)["checkpoints"]
    except ValueError:
        return []
    return [entry["file"] for entry in sorted(entries, key=lambda entry: entry["step"])]


def start_mirror(folder: RunFolder) -> Mirror | None:
    """The upload of a run that lies elsewhere, on rank 0; None for any other."""
    url = url_of(folder.path) if folder.writes else None
    return None if url is None else Mirror(Store(url))

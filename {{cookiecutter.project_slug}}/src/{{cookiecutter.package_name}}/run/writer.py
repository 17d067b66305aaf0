"""Checkpoint files: whole or not there, and in the background when they are large."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils._pytree import tree_map

from .convert import read_whole


class CheckpointWriter(TorchCheckpointIO):
    """Writes a plain checkpoint beside its place and renames it, so that a kill never leaves half a file.

    With `background` the tensors are copied to host memory (never on the GPU), training goes on, and
    a thread writes. One file is under way at a time: the next save waits for it.

    Attributes:
        error: what the last write met; None: nothing. A full disk must not take training with it, so
            writing does not raise.
    """

    def __init__(self, background: bool = False) -> None:
        super().__init__()
        self.background = background
        self.error: OSError | None = None
        self.thread: threading.Thread | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self.wait()
        self.error = None
        if not self.background:
            self._write(checkpoint, Path(path))
            return
        copy = to_host(checkpoint)
        self.thread = threading.Thread(target=self._write, args=(copy, Path(path)))
        self.thread.start()

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """A folder is a sharded checkpoint; FSDP reads it by itself, any other strategy the whole."""
        if Path(path).is_dir():
            return read_whole(Path(path))
        content: dict[str, Any] = super().load_checkpoint(path, *args, **options)
        return content

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        try:
            write_whole(path, lambda place: torch.save(checkpoint, place))
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch's writer raises RuntimeError on a full disk
            self.error = error if isinstance(error, OSError) else OSError(str(error))

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> None:
        """Until the file under way is written."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a name beside `path`, bring the bytes to the disk, rename."""
    place = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(place)
        with place.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(place, path)
    finally:
        place.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring a rename to the disk, where the system can do that for a folder."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    except OSError:
        pass
    finally:
        os.close(number)


def to_host(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A copy in host memory that training cannot change; all transfers overlap."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "cpu":
            return value.detach().clone()
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return target.copy_(value.detach(), non_blocking=True)

    result: dict[str, Any] = tree_map(copy, checkpoint)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result

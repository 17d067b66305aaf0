"""A full disk is said before it happens: at the start by an estimate, then by each checkpoint's size."""

import shutil
from pathlib import Path

from torch import nn

from ..environment.folders import shown
from ..errors import Refused


def checkpoint_bytes(module: nn.Module, moments: int) -> float:
    """Estimated size of a checkpoint: weights, buffers, and the optimizer's moments in fp32."""
    tensors = [*module.parameters(), *module.buffers()]
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return sum(t.numel() * t.element_size() for t in tensors) + 4.0 * moments * trained


def check_room(run: Path, size: float, at_once: int) -> str | None:
    """A warning when the disk cannot take all the checkpoints that the run will hold; None: it can.

    Quotas are not seen here, nor is what others write meanwhile.

    Args:
        size: bytes of one checkpoint.
        at_once: how many lie there at the same time, with the one being written.

    Raises:
        Refused: when not even the first one fits.
    """
    free, held = free_bytes(run), folder_bytes(run / "checkpoints")
    have = f"{amount(free)} are free where {shown(run)} lies, and a checkpoint takes about {amount(size)}"
    if free < size:
        raise Refused(f"the disk is full: {have}; make room, or choose another run_dir")
    need = size * at_once - held
    if free >= need:
        return None
    return (
        f"{have}: the {at_once} that this run holds at once need {amount(need)}; make room, lower "
        "keep_last or keep_best, raise keep_every_steps, or choose another run_dir"
    )


def free_bytes(place: Path) -> int:
    """Of the file system that a path lies on or will lie on."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def folder_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 when it is not there."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def amount(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

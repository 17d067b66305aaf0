"""Data folders: made once and whole, and split by a hash of each file's name."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SPLITS = ("train", "val", "test")


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Fill `folder` by `build(temporary folder)` unless it is there already.

    The work happens beside `folder`, which appears by one rename: a kill leaves no half data set,
    and of two processes the slower one throws its copy away.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)  # mkdtemp made it private
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def place_of(path: Path, folder: Path) -> float:
    """A number in [0, 1) from a file's path below `folder`: it stays when other files come or go."""
    name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big") / 2**48


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many items, evenly spread from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def sampled_blocks(path: Path, most: int = 64, size: int = 4096) -> bytes:
    """Blocks of a file, evenly spread, the first and the last always among them."""
    with path.open("rb") as file:
        blocks = range(max(1, -(-path.stat().st_size // size)))
        found = []
        for number in spread(blocks, most):
            file.seek(number * size)
            found.append(file.read(size))
    return b"".join(found)

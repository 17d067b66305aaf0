"""From a folder of text to memory-mapped byte tokens."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import Refused
from .folders import SPLITS, place_of

SUFFIXES = {".txt", ".md", ".rst", ".py"}
END_OF_DOCUMENT = 0  # the NUL byte, which text does not hold


def write_tokens(folder: Path, source: str, fractions: dict[str, float]) -> None:
    """Write `train|val|test.bin` (uint16, one token per byte) and `meta.json` into `folder`.

    Files are shared out whole, by a hash of each path. Where that leaves a split empty (one long
    file, say), all text is cut by position instead: first train, then val, then test.

    Args:
        source: `stdlib` for the running Python's own library, else a folder of text files.
        fractions: share of the files, or of the text, for `val` and `test`.

    Raises:
        Refused: when there is no text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source)
    paths = list(_documents(root, stdlib=source == "stdlib"))
    shared = {
        split: [p for p in paths if _split_of(p, root, fractions) == split] for split in SPLITS
    }
    by = "file" if all(shared.values()) else "position"
    if by == "file":
        parts = {split: _tokens(files) for split, files in shared.items()}
    else:
        text = _tokens(paths)
        end = len(text) - int(len(text) * fractions["test"])
        middle = end - int(len(text) * fractions["val"])
        parts = {"train": text[:middle], "val": text[middle:end], "test": text[end:]}
    if not all(len(part) > 1 for part in parts.values()):
        kinds = ", ".join(sorted(SUFFIXES))
        raise Refused(f"data.source={source}: no text, or too little, in files of {kinds} below it")
    for split, part in parts.items():
        part.tofile(folder / f"{split}.bin")
    counts = {split: len(part) for split, part in parts.items()}
    meta = {
        "vocab_size": 256,
        "dtype": "uint16",
        "source": source,
        "fractions": fractions,
        "split_by": by,
        "files": len(paths),
        "tokens": counts,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _tokens(paths: list[Path]) -> "np.ndarray[Any, np.dtype[np.uint16]]":
    text = b"".join(path.read_bytes() + bytes([END_OF_DOCUMENT]) for path in paths)
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def _documents(root: Path, stdlib: bool) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        # Tests are half of the library and hold odd bytes; site-packages is not Python's own.
        if stdlib and {"test", "tests", "site-packages", "dist-packages"} & set(inside):
            continue
        hidden = any(part.startswith(".") for part in inside)
        if path.suffix.lower() in SUFFIXES and not hidden and path.is_file():
            yield path


def _split_of(path: Path, root: Path, fractions: dict[str, float]) -> str:
    place = place_of(path, root)
    if place < fractions["val"]:
        return "val"
    return "test" if place < fractions["val"] + fractions["test"] else "train"

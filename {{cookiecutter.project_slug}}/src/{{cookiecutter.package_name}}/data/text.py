"""From a folder of text to memory-mapped byte tokens, split by file."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import Refused
from .folders import place_of

SUFFIXES = {".txt", ".md", ".rst", ".py"}
SPLITS = ("train", "val", "test")
END_OF_DOCUMENT = 0  # the NUL byte, which text does not hold


def write_tokens(folder: Path, source: str, fractions: dict[str, float]) -> None:
    """Write `train|val|test.bin` (uint16, one token per byte) and `meta.json` into `folder`.

    Args:
        source: `stdlib` for the running Python's own library, else a folder of text files.
        fractions: share of the files that go to `val` and `test`, chosen by a hash of each path.

    Raises:
        Refused: when there is no text, or so little that a split stays empty.
    """
    root = (
        Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source).expanduser()
    )
    counts = dict.fromkeys(SPLITS, 0)
    outputs = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
    try:
        for path in _documents(root, stdlib=source == "stdlib"):
            split = _split_of(place_of(path, root), fractions)
            document = np.frombuffer(path.read_bytes() + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
            outputs[split].write(document.astype(np.uint16).tobytes())
            counts[split] += len(document)
    finally:
        for output in outputs.values():
            output.close()
    for split, count in counts.items():
        if count < 2:
            raise Refused(f"data.source={source}: no text for the {split} split below {root}")
    meta = {"vocab_size": 256, "dtype": "uint16", "source": source, "tokens": counts}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _documents(root: Path, stdlib: bool) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        # Tests are half of the library and hold odd bytes; site-packages is not Python's own.
        if stdlib and {"test", "tests", "site-packages", "dist-packages"} & set(inside):
            continue
        hidden = any(part.startswith(".") for part in inside)
        if path.suffix.lower() in SUFFIXES and not hidden and path.is_file():
            yield path


def _split_of(place: float, fractions: dict[str, float]) -> str:
    if place < fractions["val"]:
        return "val"
    return "test" if place < fractions["val"] + fractions["test"] else "train"

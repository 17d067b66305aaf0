"""Which image files there are, with class and split: from a folder per class, or from a table."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Refused
from .folders import SPLITS, place_of

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


class Labelled(NamedTuple):
    """An image file and the name of its class."""

    path: Path
    label: str


Index = dict[str, list[Labelled]]


def index_folder(folder: Path, fractions: dict[str, float]) -> Index:
    """`train/<class>/<image files>`, and `val/` and `test/` alike where they exist; sorted.

    Raises:
        Refused: when there is no train/, a class of it is empty, or a split has no image.
    """
    if not (folder / "train").is_dir():
        raise Refused(f"data.folder={folder}: it must hold train/<class>/<image files>")
    found = {split: _files(folder / split) for split in SPLITS if (folder / split).is_dir()}
    filled = {item.label for item in found["train"]}
    classes = {path.name for path in (folder / "train").iterdir() if path.is_dir()}
    if empty := sorted(classes - filled):
        raise Refused(
            f"data.folder={folder}: no image of the classes {', '.join(empty)} in train/ "
            "(a broken download?); fill or remove the folder"
        )
    return _complete(found, folder, fractions, f"data.folder={folder}")


def index_table(
    table: Path, folder: Path, columns: dict[str, str | None], fractions: dict[str, float]
) -> Index:
    """A CSV or Parquet file with a row per image, in its order.

    Args:
        folder: what relative paths in the table are relative to.
        columns: names of the columns `path`, `label` and `split`. Without the split's (or with an
            empty cell) an image belongs to train, and val and test are cut from that.

    Raises:
        Refused: naming the row, for what cannot be meant: no path or label, another split's name, an
            image that is named twice.
    """
    name = f"data.table={table}"
    found: Index = {}
    seen: dict[Path, int] = {}
    for number, row in enumerate(_rows(table, columns, name), 2):  # row 1 is the header
        path, label = row["path"], row["label"]
        split = row["split"] or "train"
        if not path or not label:
            raise Refused(f"{name}: row {number} has no {'label' if path else 'path'}")
        if split not in SPLITS:
            raise Refused(f"{name}: row {number} has the split {split!r}: train, val or test")
        place = folder / path
        if place in seen:
            raise Refused(f"{name}: {path} is named in row {seen[place]} and in row {number}")
        seen[place] = number
        found.setdefault(split, []).append(Labelled(place, label))
    if not found.get("train"):
        raise Refused(f"{name}: no image for the train split")
    return _complete(found, folder, fractions, name)


def class_names(found: Index, by_number: bool) -> list[str]:
    """The classes of the train split, in the order of the numbers that the model knows them by.

    Args:
        by_number: names that are all numbers go by value, so that 0 to 9 or 0 to 99 keep theirs.
            Otherwise by letter, as torchvision's ImageFolder does.

    Raises:
        Refused: when another split holds a class that train has not.
    """
    names = {item.label for item in found["train"]}
    for split, items in found.items():
        if strange := {item.label for item in items} - names:
            raise Refused(f"{split} holds the class {min(strange)!r}, which train has not")
    numbers = by_number and all(name.isascii() and name.isdigit() for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))


def _complete(found: Index, folder: Path, fractions: dict[str, float], name: str) -> Index:
    """Cut the splits that are missing from train, by a hash of each path below `folder`."""
    low = 0.0
    for split in SPLITS[1:]:
        if split not in found:
            high, places = (
                low + fractions[split],
                [place_of(i.path, folder) for i in found["train"]],
            )
            pairs = list(zip(found["train"], places, strict=True))
            found[split] = [item for item, place in pairs if low <= place < high]
            found["train"] = [item for item, place in pairs if not low <= place < high]
            low = high
    for split in SPLITS:
        if not found[split]:
            raise Refused(f"{name}: no image for the {split} split")
    return found


def _files(folder: Path) -> list[Labelled]:
    paths = (p for p in folder.glob("*/*") if p.suffix.lower() in SUFFIXES and p.is_file())
    return [Labelled(path, path.parent.name) for path in sorted(paths)]


def _rows(table: Path, columns: dict[str, str | None], name: str) -> Iterator[dict[str, str]]:
    """Each row's path, label and split as text; "" for an empty cell."""
    try:
        header, rows = _parquet(table) if table.suffix == ".parquet" else _csv(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{name}: cannot read it ({error})") from error
    wanted = {key: column for key, column in columns.items() if column is not None}
    # A split's column may be missing under its default name; one that was asked for may not.
    if wanted.get("split") == "split" and "split" not in header:
        del wanted["split"]
    for key in ("path", "label", "split"):
        if key in wanted and wanted[key] not in header:
            raise Refused(
                f"{name} has no column {wanted[key]!r} but {', '.join(header)}: say which it is by "
                f"data.columns.{key}=..."
            )
    for row in _readable(rows, name):
        cells = {key: row[column] for key, column in wanted.items()}
        yield {
            k: "" if cells.get(k) is None else str(cells[k]).strip()
            for k in ("path", "label", "split")
        }


def _readable(rows: Iterator[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except (UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{name}: cannot read it ({error})") from error


def _csv(table: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    file = table.open(encoding="utf-8-sig", newline="")  # -sig: what Excel puts first
    reader = csv.DictReader(file)
    return list(reader.fieldnames or []), iter(reader)


def _parquet(table: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise Refused(
            f"data.table={table}: Parquet needs pyarrow: pip install pyarrow, or a CSV file"
        ) from error
    try:
        content = parquet.read_table(table)
    except ArrowException as error:
        raise OSError(str(error)) from error
    return content.column_names, iter(content.to_pylist())

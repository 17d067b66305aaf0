"""A person's own images: listed in a table, and not all of them whole."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Door
from PIL import Image

from {{ cookiecutter.package_name }}.data.base import LoaderOptions
from {{ cookiecutter.package_name }}.data.images import ImageData
from {{ cookiecutter.package_name }}.data.index import class_names, index_folder
from {{ cookiecutter.package_name }}.data.order import IGNORE
from {{ cookiecutter.package_name }}.errors import Refused

COLUMNS = {"path": "path", "label": "label", "split": "split"}
Rows = list[dict[str, Any]]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """60 images without folders by class, of the classes 0, 2 and 10, with 4 of each broken below."""
    random = np.random.default_rng(0)
    found = []
    for number in range(60):
        label = (0, 2, 10)[number % 3]
        name = f"Bilder/ä {number}.png"
        (tmp_path / "Bilder").mkdir(exist_ok=True)
        pixels = random.integers(label * 8, label * 8 + 90, (12, 9), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
        split = "val" if number % 10 == 8 else "test" if number % 10 == 9 else "train"
        found.append({"path": name, "label": label, "split": split})
    return found


def write(rows: Rows, place: Path, encoding: str = "utf-8") -> Path:
    with place.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return place


def images(table: Path, **changes: Any) -> ImageData:
    values: dict[str, Any] = {
        "folder": str(table.parent), "table": str(table), "columns": COLUMNS, "num_classes": 3,
        "image_size": 8, "channels": 1, "mean": [0.5], "std": [0.5], "augment": "none",
        "val_fraction": 0.2, "test_fraction": 0.2,
        "options": LoaderOptions(batch_size=4, micro_batch=4),
    }  # fmt: skip
    data = ImageData(**{**values, **changes})
    data.setup()
    return data


def spoil(folder: Path) -> list[str]:
    """Break four files in four ways; returns their paths, the first two of train, then val, test."""
    bad = [folder / f"Bilder/ä {number}.png" for number in (0, 1, 8, 9)]
    whole = bad[0].read_bytes()
    bad[0].write_bytes(whole[: len(whole) // 2])
    bad[1].write_bytes(b"")
    bad[2].write_text("<html>404</html>")
    bad[3].unlink()
    return [str(path) for path in bad]


@pytest.mark.parametrize("kind", ["csv", "parquet", "excel"])
def test_a_table_gives_paths_labels_and_splits(kind: str, rows: Rows, tmp_path: Path) -> None:
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        from pyarrow import parquet

        table = tmp_path / "index.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    else:
        table = write(rows, tmp_path / "index.csv", "utf-8" if kind == "csv" else "utf-8-sig")
    data = images(table)
    assert {split: len(part) for split, part in data.splits.items()} == {
        "train": 48, "val": 6, "test": 6
    }  # fmt: skip
    train = data.splits["train"]
    assert train.counts() == {"samples": 48, "class 0": 16, "class 10": 16, "class 2": 16}
    pixels, labels = train[[(0, 0), (0, 1), (0, 2)]]
    assert pixels.shape == (3, 1, 8, 8)
    assert labels.tolist() == [0, 1, 2], "numbers keep their order: 10 comes after 2"


def test_splits_that_the_table_does_not_name_are_cut_once(rows: Rows, tmp_path: Path) -> None:
    bare = [{"file": row["path"], "kind": row["label"]} for row in rows]
    columns = {"path": "file", "label": "kind", "split": "split"}
    table = write(bare, tmp_path / "index.csv")
    parts = images(table, columns=columns).splits
    paths = {split: set(part.paths.tolist()) for split, part in parts.items()}  # type: ignore[attr-defined]
    assert sum(map(len, paths.values())) == len(set().union(*paths.values())) == 60
    reordered = images(write(bare[::-1], tmp_path / "index.csv"), columns=columns).splits
    assert set(reordered["val"].paths.tolist()) == paths["val"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"path": ""}, "row 3 has no path"),
        ({"label": " "}, "row 3 has no label"),
        ({"split": "dev"}, "row 3 has the split 'dev'"),
        ({"path": "Bilder/ä 0.png", "split": "test"}, "is named in row 2 and in row 3"),
        ({"path": "nowhere.png"}, "nowhere.png is not there"),
        ({"label": "7", "split": "val"}, "val holds the class '7', which train has not"),
    ],
)
def test_a_row_that_cannot_be_meant_is_named(
    change: dict[str, str], told: str, rows: Rows, tmp_path: Path
) -> None:
    rows[1] |= change
    with pytest.raises(Refused, match=told):
        images(write(rows, tmp_path / "index.csv"))


def test_wrong_tables_are_refused(rows: Rows, tmp_path: Path) -> None:
    table = write(rows, tmp_path / "index.csv")
    with pytest.raises(
        Refused, match="no column 'file' but path, label, split: .*data.columns.path"
    ):
        images(table, columns={**COLUMNS, "path": "file"})
    with pytest.raises(Refused, match="no column 'fold'"):
        images(table, columns={**COLUMNS, "split": "fold"})
    with pytest.raises(Refused, match="set data.num_classes=3"):
        images(table, num_classes=4)
    with pytest.raises(Refused, match="on_error=ignore"):
        images(table, on_error="ignore")
    with pytest.raises(Refused, match="cannot read it"):
        images(tmp_path / "none.csv")
    table.write_bytes(b"path,label\n\xff\xfe,1\n")
    with pytest.raises(Refused, match="cannot read it"):
        images(table)
    table.write_bytes(b"")
    with pytest.raises(Refused, match="no column 'path'"):
        images(table)


def test_folders_named_by_numbers_keep_torchvisions_order(tmp_path: Path) -> None:
    for name in ("2", "10"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "train" / name / f"{number}.png").touch()
    found = index_folder(tmp_path, {"val": 0.3, "test": 0.3})
    assert class_names(found, by_number=False) == ["10", "2"]


def test_a_skipped_image_is_replaced_in_training_and_left_out_elsewhere(
    rows: Rows, tmp_path: Path
) -> None:
    spoil(tmp_path)
    data = images(write(rows, tmp_path / "index.csv"), on_error="skip")
    keys = [(0, 0), (0, 1), (0, 2)]
    pixels, labels = data.splits["train"][keys]
    assert labels.tolist() == [2, 2, 2] and torch.equal(pixels[0], pixels[2])
    pixels, labels = data.splits["val"][keys]
    assert labels.tolist() == [IGNORE, 0, 1] and not pixels[0].any()
    pixels, labels = data.splits["test"][[(0, 0)]]
    assert labels.tolist() == [IGNORE] and pixels.shape == (1, 1, 8, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_counts_and_names_what_it_skipped(
    workers: int, rows: Rows, door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = spoil(tmp_path)
    table = write(rows, tmp_path / "index.csv")
    words = [
        *(
            "experiment=vision",
            "data=image_folder",
            f"data.folder={tmp_path}",
            f"data.table={table}",
        ),
        *("data.num_classes=3", "data.image_size=32", "data.channels=1", "data.mean=[0.5]"),
        *("data.std=[0.5]", "model.backbone=test_resnet", "accelerator=cpu", "batch_size=16"),
        *("max_epochs=2", f"num_workers={workers}", f"run_dir={tmp_path}/run", "max_steps=null"),
        *("data.mixup=0.2", "data.cutmix=1.0"),
    ]
    assert door("train", *words) == 2
    assert "is not there" in capfd.readouterr().err and not (tmp_path / "run").exists()
    assert door("train", *words, "data.on_error=skip") == 0
    printed = capfd.readouterr().out
    assert "skipped:        4 samples that cannot be read" in printed
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["skipped_samples"] == 4
    lines = (tmp_path / "run/skipped.txt").read_text().splitlines()
    assert {line.split("\t")[0] for line in lines} == set(bad)
    assert all(line.split("\t")[1] for line in lines), "each with its reason"


def test_mixing_follows_from_seed_and_epoch_and_leaves_evaluation_alone(
    rows: Rows, tmp_path: Path
) -> None:
    table = write(rows, tmp_path / "index.csv")
    plain, mixed = images(table), images(table, mixup=0.8, cutmix=1.0)
    keys = [[(epoch, index) for index in range(3)] for epoch in range(8)]
    train = mixed.splits["train"]
    found = [train[batch] for batch in keys]
    assert all(torch.equal(a, b) for a, b in zip(found[3], train[keys[3]], strict=True)), (
        "a function"
    )
    shares = {labels[0].max().item() for _, labels in found}
    assert len(shares) > 4, "another share in each epoch"
    for pixels, labels in found:
        assert labels.shape == (3, 3) and torch.allclose(labels.sum(1), torch.ones(3))
        assert not torch.equal(pixels, plain.splits["train"][keys[0]][0])
    assert mixed.splits["val"][keys[0]][1].dtype == torch.int64
    with pytest.raises(Refused, match="data.mixup"):
        images(table, mixup=-1.0)


def test_a_folder_of_rubbish_ends_the_run(rows: Rows, tmp_path: Path) -> None:
    for row in rows:
        (tmp_path / row["path"]).write_text("no image")
    data = images(write(rows, tmp_path / "index.csv"), on_error="skip")
    with pytest.raises(Refused, match="images in a row cannot be read"):
        data.splits["train"][[(0, 0)]]

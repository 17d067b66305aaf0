"""The two experiments as shipped: they really learn. Minutes on a CPU, so `slow`."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Door

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_vision_reaches_97_percent(door: Door, tmp_path: Path) -> None:
    assert door("train", "experiment=vision", f"run_dir={tmp_path}/run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["test_accuracy"] >= 0.97


def bigram_loss(folder: Path) -> float:
    """Validation loss (nats per byte) of counting which byte follows which in the training text."""
    train, val = (np.fromfile(folder / f"{split}.bin", np.uint16) for split in ("train", "val"))
    counts = np.full((256, 256), 0.01)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(chances[val[:-1], val[1:]]).mean())


def test_language_beats_counting_bigrams(door: Door, data_dir: Path, tmp_path: Path) -> None:
    # As shipped, but for the length: 400 steps only widen the distance.
    words = ["max_steps=250", "validate_every_steps=250", f"run_dir={tmp_path}/run"]
    assert door("train", "experiment=language", *words) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    bound = bigram_loss(data_dir / "python_source")
    assert summary["metrics"]["val_loss"] < 0.85 * bound
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")

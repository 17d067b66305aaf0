"""Waiting for data is measured, and said once it limits training."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHORT, Door

from {{ cookiecutter.package_name }}.data.images import ImageDataset
from {{ cookiecutter.package_name }}.data.wait import WaitClock
from {{ cookiecutter.package_name }}.training import data_wait

SOME = [
    "max_steps=8",
    "log_every_steps=2",
    "validate_every_steps=8",
    "accelerator=cpu",
    "test=false",
]
WORDS = [*SHORT["vision"], *SOME]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes half a second to load."""
    quick = ImageDataset.__getitem__

    def load(self: ImageDataset, keys: Any) -> Any:
        time.sleep(0.5)
        return quick(self, keys)

    monkeypatch.setattr(ImageDataset, "__getitem__", load)
    monkeypatch.setattr(data_wait, "SURE", 0.2)


@pytest.mark.parametrize(("workers", "warned"), [(1, 1), (0, 0)])
def test_a_slow_loader_is_seen(
    workers: int, warned: int, slow: None, door: Door, tmp_path: Path, capfd: Any
) -> None:
    assert door("train", *WORDS, f"num_workers={workers}", f"run_dir={tmp_path}/run") == 0
    share = json.loads((tmp_path / "run/summary.json").read_text())["throughput"]["data_wait"]
    assert 0.4 < share <= 1
    printed = capfd.readouterr().out
    assert printed.count("warning:        training waits for data") == warned
    assert not warned or "with num_workers=1" in printed


def test_a_quick_loader_is_not(door: Door, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(data_wait, "SURE", 0.0)
    words = [*SHORT["language"], *SOME]
    assert door("train", *words, f"run_dir={tmp_path}/run") == 0
    share = json.loads((tmp_path / "run/summary.json").read_text())["throughput"]["data_wait"]
    assert 0 <= share < 0.1
    assert "waits for data" not in capfd.readouterr().out


def test_every_wait_is_counted_once() -> None:
    def batches() -> Any:
        for number in range(3):
            time.sleep(0.05)
            yield torch.tensor(number)

    clock = WaitClock()
    got = []
    for batch in clock.watch(batches()):
        time.sleep(0.1)  # the step's own time
        got.append(int(batch))
    assert got == [0, 1, 2]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the events of the last wait have passed
    assert clock.take() == pytest.approx(0.15, abs=0.05)
    assert clock.take() == 0

"""A full disk is said before it happens, and a write that fails does not end the training at once."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SHORT, Door

MIB = 2**20
WORDS = [*SHORT["vision"], "accelerator=cpu", "test=false"]  # checkpoints of about 4.5 MiB


def set_free(monkeypatch: pytest.MonkeyPatch, mib: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(mib * MIB)))


def test_no_room_for_the_first_checkpoint_is_refused(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_free(monkeypatch, 3)
    words = [*WORDS, f"run_dir={tmp_path}/run", f"data_dir={tmp_path}/data"]
    assert door("train", *words) == 2
    printed = capfd.readouterr().err
    assert (
        "the disk is full: 3.0 MiB are free" in printed and "a checkpoint takes about 4." in printed
    )
    assert not list(tmp_path.iterdir()), "refused only after something had been touched"


@pytest.mark.parametrize(
    ("free", "words", "needed", "nearly"),
    [
        (8, [], "the 3 that this run holds at once need", True),
        (40, ["keep_last=9"], "the 11 that this run holds at once need", False),
        (20, ["keep_every_steps=1"], "the 7 that this run holds at once need", False),
        (20, [], "", False),
    ],
)
def test_too_little_room_is_a_warning(
    free: float,
    words: list[str],
    needed: str,
    nearly: bool,
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    set_free(monkeypatch, free)
    assert door("train", *WORDS, *words, f"run_dir={tmp_path}/run") == 0
    printed = capfd.readouterr().out
    assert needed in printed
    assert printed.count("warning:") == bool(needed) + nearly, printed
    assert printed.count("the disk is nearly full: 8.0 MiB are left") == nearly, "once"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    try:
        done = subprocess.run(line, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no small file system here: {error}")
    if done.returncode:
        pytest.skip(f"no small file system here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def outlive(door: Door, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Train where one checkpoint of 4.5 MiB fits and two do not."""
    assert door("train", *WORDS, f"run_dir={run}") == 1
    printed = capfd.readouterr()
    assert "the disk is nearly full" in printed.out
    assert "step-00000004.ckpt could not be written: the disk is full (" in printed.out
    assert "step 4/4" in printed.out, "training went on to its end"
    assert "the checkpoint of step 4 could not be written; that of step 2 is kept" in printed.err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed" and "could not be written" in summary["reason"]
    index = json.loads((run / "checkpoints/index.json").read_text())
    assert [entry["step"] for entry in index["checkpoints"]] == [2], "the good one is kept"


def test_training_outlives_a_disk_that_is_full(
    door: Door, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outlive(door, small_disk / "run", capfd)


def test_training_outlives_a_write_that_does_not_fit(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same without a right to mount: the system's own error at the second checkpoint."""
    save, places = torch.save, []

    def fail(content: object, place: Path) -> None:
        places.append(place)
        if len(places) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, place)

    set_free(monkeypatch, 8)
    monkeypatch.setattr(torch, "save", fail)
    outlive(door, tmp_path / "run", capfd)
    assert len(places) == 2

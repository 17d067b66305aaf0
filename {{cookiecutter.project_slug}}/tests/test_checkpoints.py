"""Which checkpoints a run keeps, when it makes them, and what it leaves behind."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from conftest import SHORT, Door
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from {{ cookiecutter.package_name }}.run.checkpoints import Retention

TRAIN = [*SHORT["vision"], "accelerator=cpu", "test=false"]


def entry(step: int, loss: float | None) -> dict[str, Any]:
    return {"step": step, "metrics": {} if loss is None else {"val_loss": loss}}


@pytest.mark.parametrize(
    ("retention", "steps"),
    [
        (Retention("val_loss"), [4, 7]),
        (Retention("val_loss", mode="max"), [1, 7]),
        (Retention("val_loss", last=3), [4, 5, 6, 7]),
        (Retention("val_loss", best=2), [2, 4, 7]),
        (Retention("val_loss", milestones=3), [3, 4, 6, 7]),
    ],
)
def test_the_last_the_best_and_the_milestones_stay(retention: Retention, steps: list[int]) -> None:
    losses = [0.9, 0.5, 0.7, 0.5, None, None, None]
    saved = [entry(step, loss) for step, loss in enumerate(losses, start=1)]
    assert [e["step"] for e in retention.kept(saved)] == steps


def test_the_folder_holds_what_the_index_names(door: Door, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["max_steps=8", "validate_every_steps=3", "checkpoint_every_steps=1", "keep_last=2"]
    assert door("train", *TRAIN, *words, "keep_every_steps=4", f"run_dir={run}") == 0
    index = json.loads((run / "checkpoints/index.json").read_text())
    named = {e["file"] for e in index["checkpoints"]}
    assert named | {"index.json"} == {path.name for path in (run / "checkpoints").iterdir()}
    steps = {e["step"] for e in index["checkpoints"]}
    assert {4, 7, 8} <= steps <= {3, 4, 6, 7, 8}, "milestones, the last two, the best"
    assert index["last"] == "step-00000008.ckpt" and index["best"] in named
    assert not (run / ".lock").exists()


def test_checkpoints_by_the_clock(door: Door, tmp_path: Path) -> None:
    words = ["max_steps=4", "validate_every_steps=4", "every_minutes=1e-9", "keep_last=9"]
    assert door("train", *TRAIN, *words, f"run_dir={tmp_path}/run") == 0
    index = json.loads((tmp_path / "run/checkpoints/index.json").read_text())
    assert [e["step"] for e in index["checkpoints"]] == [1, 2, 3, 4]


def test_written_in_the_background_is_the_same(door: Door, tmp_path: Path) -> None:
    saved = []
    for word in ("true", "false"):
        run = tmp_path / word
        assert door("train", *TRAIN, f"checkpoint_async={word}", f"run_dir={run}") == 0
        saved.append(torch.load(run / "checkpoints/step-00000004.ckpt", weights_only=True))
    first, second = ((s["state_dict"], s["optimizer_states"][0]["state"]) for s in saved)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_run_that_goes_on_is_one_wandb_run_without_a_gap(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What W&B is given: one id, each step once, the losses of metrics.csv."""
    sent: list[tuple[str, int, float]] = []
    log = wandb.Run.log

    def listen(self: wandb.Run, data: dict[str, Any], step: int) -> None:
        if "train_loss" in data:
            sent.append((self.id, step, data["train_loss"]))
        log(self, data, step=step)

    monkeypatch.setattr(wandb.Run, "log", listen)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    words = [*TRAIN, "logger=wandb", "log_every_steps=1", "max_steps=5", f"run_dir={run}"]
    assert door("train", *words, "stop_at=2") == 75
    assert door("train", *words) == 0
    identity = json.loads((run / "summary.json").read_text())["wandb"]["id"]
    assert len(list(run.glob(f"wandb/offline-run-*-{identity}"))) == 2
    with (run / "metrics.csv").open() as file:
        rows = [(int(row["step"]), row["train_loss"]) for row in csv.DictReader(file)]
    losses = [(step, float(loss)) for step, loss in rows if loss]
    assert [(run_id, step) for run_id, step, _ in sent] == [(identity, n) for n in range(1, 6)]
    assert [(step, loss) for _, step, loss in sent] == losses


def test_lightning_still_has_what_stopping_switches_off() -> None:
    """Under another name it would ask all ranks for a GPU tensor at every step again."""
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)

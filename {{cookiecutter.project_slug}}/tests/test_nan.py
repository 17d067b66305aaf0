"""NaN and Inf: the step, its samples and the gradients are named; nothing broken is saved; skipping."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHORT, Command, Door

from {{ cookiecutter.package_name }}.data.images import ImageDataset
from {{ cookiecutter.package_name }}.data.order import Keys

WORDS = [
    *SHORT["vision"],
    "model._target_=failing.Failing",
    "accelerator=cpu",
    "precision=fp32",
    "max_steps=6",
    "log_every_steps=100",
    "checkpoint_every_steps=1",
    "keep_last=9",
]


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def state(run: Path, step: int) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(
        run / f"checkpoints/step-{step:08d}.ckpt", weights_only=True
    )
    return content


def steps_saved(run: Path) -> list[int]:
    index = json.loads((run / "checkpoints/index.json").read_text())
    return [entry["step"] for entry in index["checkpoints"]]


@pytest.mark.parametrize(
    ("what", "words", "message"),
    [
        ("batch", [], "the training loss was not finite at step 3"),
        ("gradient", ["optimizer.grad_clip=null"], "the gradient (the loss was still finite)"),
    ],
)
def test_stop_names_step_samples_and_layers_and_saves_nothing_broken(
    what: str,
    words: list[str],
    message: str,
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAIL", f"{what} -1 3")
    loaded: list[Keys] = []
    load = ImageDataset.__getitem__

    def noted(self: ImageDataset, keys: Keys) -> Any:
        loaded.append(keys)
        return load(self, keys)

    monkeypatch.setattr(ImageDataset, "__getitem__", noted)
    run = tmp_path / "run"
    words = [*WORDS, *words, "micro_batch=8", "validate_every_steps=null", f"run_dir={run}"]
    assert door("train", *words) == 1
    printed = capfd.readouterr().err
    assert message in printed and "step 3 (epoch 0" in printed and "Traceback" not in printed
    found = json.loads((run / "nan.json").read_text())
    asked = [index for keys in loaded[8:12] for _, index in keys]  # 4 micro batches a step
    assert found["batch"]["samples"] == asked
    assert found["step"] == 3 and found["norms_step"] == 2 and len(found["batch"]["digest"]) == 16
    assert "net.fc.weight" in found["bad_gradients"]
    norms = list(found["norms"].values())
    assert len(norms) == found["parameters"] and norms == sorted(norms, reverse=True)
    assert norms[0] > 0 and f"{next(iter(found['norms']))} {norms[0]:.3g}" in printed
    assert summary(run)["status"] == "failed" and "step 3" in summary(run)["reason"]
    assert steps_saved(run) == [1, 2], "no step behind the bad one may be kept"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("batch", ["optimizer.grad_clip=null"]),
        ("loss", ["optimizer=sgd", "micro_batch=16"]),
    ],
)
def test_a_skipped_step_changes_nothing(
    what: str,
    words: list[str],
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAIL", f"{what} -1 3")
    run = tmp_path / "run"
    words = [*WORDS, *words, "on_nan=skip", "log_every_steps=3", f"run_dir={run}"]
    assert door("train", *words) == 0
    before, after, later = (state(run, step) for step in (2, 3, 4))
    for key in before["state_dict"]:  # batch norm's statistics too
        assert torch.equal(before["state_dict"][key], after["state_dict"][key]), key
    for old, new in zip(*(c["optimizer_states"][0]["state"].values() for c in (before, after))):
        assert all(torch.equal(torch.as_tensor(old[k]), torch.as_tensor(new[k])) for k in old)
    weight = "net.fc.weight"
    assert not torch.equal(after["state_dict"][weight], later["state_dict"][weight])
    assert summary(run)["skipped_steps"] == 1 and summary(run)["status"] == "finished"
    assert summary(run)["metrics"]["train_loss"] < 10, "the mean leaves it out"
    assert "step 3 skipped" in capfd.readouterr().out


def test_too_many_skipped_in_a_row_stop(
    door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["on_nan=skip", "optimizer.lr=1e30", "optimizer.grad_clip=null", "max_steps=50"]
    words += ["optimizer.warmup_steps=0", "validate_every_steps=null", f"run_dir={tmp_path}/run"]
    assert door("train", *SHORT["language"], *words) == 1
    assert "11 steps in a row were skipped at step" in capfd.readouterr().err
    assert summary(tmp_path / "run")["skipped_steps"] >= 10


def test_on_nan_takes_two_words(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    assert door("train", *SHORT["vision"], "on_nan=ignore") == 2
    assert "on_nan=ignore: choose one of stop, skip" in capfd.readouterr().err


def test_ranks_skip_alike(
    command: Command, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 1 has the bad loss; the gradients are finite everywhere."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("FAIL", "loss 1 2")
    words = [*WORDS, "on_nan=skip", "devices=2", "max_steps=3", f"data_dir={data_dir}"]
    result = command("train", *words, f"run_dir={tmp_path}/run")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step 2 skipped") == 1
    first, second = (state(tmp_path / "run", step)["state_dict"] for step in (1, 2))
    weights = [key for key in first if key.endswith("weight")]
    assert all(torch.equal(first[key], second[key]) for key in weights)

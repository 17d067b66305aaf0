"""What a run leaves behind, and what evaluate makes of it."""

import json
from pathlib import Path

import pytest
import torch
from conftest import SHORT, Door

FILES = {"config.yaml", "manifest.json", "metrics.csv", "summary.json", "checkpoints"}
TASKS = list(SHORT)


@pytest.mark.parametrize("task", TASKS)
def test_run_folder_explains_itself(task: str, runs: dict[str, Path]) -> None:
    folder = runs[task]
    assert {path.name for path in folder.iterdir()} - {"sample.txt"} == FILES
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 4
    assert summary["throughput"]["samples_per_s"] > 0 and summary["peak_memory_gib"] > 0
    for name in ("precision", "strategy", "loader", "device", "mfu"):
        assert set(summary[name]) == {"value", "reason"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["packages"]["torch"] and manifest["seed"] == 1
    assert "commit" in manifest["git"]


@pytest.mark.parametrize("task", TASKS)
def test_checkpoints_load_in_safe_mode_with_plain_keys(task: str, runs: dict[str, Path]) -> None:
    index = json.loads((runs[task] / "checkpoints" / "index.json").read_text())
    content = torch.load(runs[task] / "checkpoints" / index["last"], weights_only=True)
    assert content["global_step"] == 4
    assert all(key.startswith("net.") and "_orig_mod" not in key for key in content["state_dict"])
    named = {entry["file"] for entry in index["checkpoints"]}
    assert named == {path.name for path in (runs[task] / "checkpoints").glob("*.ckpt")}


@pytest.mark.parametrize("task", TASKS)
def test_evaluate_repeats_the_test_metrics(task: str, runs: dict[str, Path], door: Door) -> None:
    # The smoke run tested two batches only; here the whole split counts, so evaluate twice instead.
    results = []
    for batch_size in (32, 7):
        assert door("evaluate", f"run={runs[task]}", f"batch_size={batch_size}") == 0
        written = json.loads((runs[task] / "evaluation-test.json").read_text())
        results.append(written["metrics"])
    (runs[task] / "evaluation-test.json").unlink()
    assert results[0] == pytest.approx(results[1], rel=1e-4), "the last, short batch must count too"


def test_evaluate_refuses_what_is_not_there(
    runs: dict[str, Path], door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wishes = {
        f"run={tmp_path}": "no run folder",
        f"run={runs['vision']} checkpoint=gone.ckpt": "gone.ckpt",
        f"run={runs['vision']} split=exam": "test, val",
    }
    for wish, message in wishes.items():
        assert door("evaluate", *wish.split()) == 2
        assert message in capfd.readouterr().err
    assert door("evaluate") == 2
    assert "run=..." in capfd.readouterr().err


def test_two_runs_of_one_seed_are_equal(runs: dict[str, Path], door: Door, tmp_path: Path) -> None:
    """Also with loader workers: order and augmentation follow from seed, epoch and index alone."""
    assert door("train", *SHORT["vision"], "num_workers=2", f"run_dir={tmp_path}/again") == 0
    first, second = (
        torch.load(folder / "checkpoints" / "step-00000004.ckpt", weights_only=True)["state_dict"]
        for folder in (runs["vision"], tmp_path / "again")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_init_from_starts_with_the_weights(
    runs: dict[str, Path], door: Door, tmp_path: Path
) -> None:
    source = runs["vision"] / "checkpoints" / "step-00000004.ckpt"
    words = [
        *SHORT["vision"],
        f"run_dir={tmp_path}/next",
        f"init_from={source}",
        "optimizer.lr=0.0",
    ]
    assert door("train", *words) == 0
    first = torch.load(source, weights_only=True)["state_dict"]
    last = torch.load(tmp_path / "next/checkpoints/step-00000004.ckpt", weights_only=True)[
        "state_dict"
    ]
    trained = [key for key in first if key.endswith("weight") and first[key].ndim == 4]
    assert trained and all(torch.equal(first[key], last[key]) for key in trained)


def test_a_loss_that_is_not_finite_stops_with_the_step(
    door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        *SHORT["language"],
        f"run_dir={tmp_path}/nan",
        "optimizer.lr=1e30",
        "optimizer.grad_clip=null",
    ]
    words += ["optimizer.warmup_steps=0", "max_steps=50", "validate_every_steps=null"]
    assert door("train", *words) == 1
    assert "not finite at step" in capfd.readouterr().err
    summary = json.loads((tmp_path / "nan" / "summary.json").read_text())
    assert summary["status"] == "failed"


@pytest.mark.parametrize("logger", ["wandb", "tensorboard"])
def test_loggers_need_no_key_and_no_network(
    logger: str,
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    run = tmp_path / "run"
    assert door("train", *SHORT["vision"], f"run_dir={run}", f"logger={logger}") == 0
    assert (run / "metrics.csv").is_file()
    if logger == "wandb":
        assert json.loads((run / "summary.json").read_text())["wandb"]["mode"] == "offline"
        assert len(list(run.glob("wandb/offline-run-*/run-*.wandb"))) == 1
        assert "wandb sync" in capfd.readouterr().out
    else:
        assert list(run.glob("tensorboard/events.*"))


def test_a_key_without_a_network_trains_to_the_end(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B tries for a while, then goes on offline."""
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = tmp_path / "run"
    assert door("train", *SHORT["vision"], f"run_dir={run}", "logger=wandb") == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["wandb"]["mode"] == "offline"
    assert list(run.glob("wandb/offline-run-*/run-*.wandb"))


def test_init_from_takes_a_run_folder_too(
    runs: dict[str, Path], door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORT["vision"], f"run_dir={tmp_path}/next"]
    assert door("train", *words, f"init_from={runs['language']}") == 2
    assert "does not fit this model" in capfd.readouterr().err
    assert door("train", *words, f"init_from={runs['vision']}") == 0

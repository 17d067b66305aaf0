"""Checkpoints between layouts: sharded by two processes, plain by one, and back; `export` as one file."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, Door

STOP, STEPS = 3, 6
TRAIN = [
    "experiment=language",
    "debug=smoke",
    f"max_steps={STEPS}",
    f"validate_every_steps={STEPS}",
    "batch_size=8",
    "model.layers=2",
    "model.width=64",
    "precision=fp32",
    "accelerator=cpu",
    "num_workers=0",
    "sample_prompt=null",
]
FSDP = ["devices=2", "strategy=fsdp"]
SHARDED = [*FSDP, "strategy.sharded_checkpoint=true"]


@pytest.fixture(scope="module")
def whole(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, never stopped; it keeps the checkpoint of the step where the others stop."""
    run = tmp_path_factory.mktemp("whole") / "run"
    words = [f"checkpoint_every_steps={STOP}", "keep_last=2"]
    assert door("train", *TRAIN, *words, f"run_dir={run}") == 0
    return run


@pytest.fixture(scope="module")
def sharded(command: Command, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes, stopped half-way, each having written its part."""
    run = tmp_path_factory.mktemp("sharded") / "run"
    places = [f"data_dir={data_dir}", f"run_dir={run}", f"stop_at={STOP}"]
    result = command("train", *TRAIN, *places, *SHARDED)
    assert result.returncode == 75, result.stdout + result.stderr
    assert (run / f"checkpoints/step-{STOP:08d}.ckpt").is_dir()
    return run


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def saved(run: Path, step: int) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(
        run / f"checkpoints/step-{step:08d}.ckpt", weights_only=True
    )
    return content


def assert_alike(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Weights and the optimizer's moments, by the names of the parameters."""
    assert first["state_dict"].keys() == second["state_dict"].keys()
    for key, value in first["state_dict"].items():
        torch.testing.assert_close(second["state_dict"][key], value, rtol=1e-4, atol=1e-5)
    one, other = first["optimizer_states"][0], second["optimizer_states"][0]
    assert [g["params"] for g in one["param_groups"]] == [
        g["params"] for g in other["param_groups"]
    ]
    assert "net.norm.weight" in one["state"] and one["state"].keys() == other["state"].keys()
    for name, moments in one["state"].items():
        for key, value in moments.items():
            torch.testing.assert_close(other["state"][name][key], value, rtol=1e-3, atol=1e-6)


def test_one_process_goes_on_from_shards(
    sharded: Path, whole: Path, door: Door, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(sharded, run)
    assert door("train", *TRAIN, "devices=1", f"run_dir={run}") == 0
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert_alike(saved(whole, STEPS), saved(run, STEPS))


def test_two_processes_go_on_from_one_file(
    whole: Path, command: Command, door: Door, data_dir: Path, tmp_path: Path
) -> None:
    """Under FSDP, where numbers in an optimizer's state mean other parameters than on one device."""
    run = tmp_path / "run"
    assert door("train", *TRAIN, "devices=1", f"run_dir={run}", f"stop_at={STOP}") == 75
    result = command("train", *TRAIN, *FSDP, f"data_dir={data_dir}", f"run_dir={run}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    assert_alike(saved(whole, STEPS), saved(run, STEPS))


def test_exported_shards_are_the_file_of_one_process(
    sharded: Path, whole: Path, door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in (sharded / "checkpoints").rglob("*"))
    assert door("export", f"run={sharded}", "checkpoint=last") == 0
    file = sharded / f"export/step-{STOP:08d}.ckpt"
    printed = capfd.readouterr().out
    assert str(file) in printed and "MiB" in printed and f"step {STOP}" in printed
    content = torch.load(file, weights_only=True)
    assert content.keys() == saved(whole, STOP).keys() and content["global_step"] == STOP
    assert_alike(saved(whole, STOP), content)
    assert [path.name for path in file.parent.iterdir()] == [file.name], "nothing half-written"
    assert before == sorted(path for path in (sharded / "checkpoints").rglob("*"))

    run = tmp_path / "run"
    assert door("train", *TRAIN, f"run_dir={run}", f"resume={file}") == 0
    assert losses(run) == pytest.approx(losses(whole)[STOP:], rel=1e-5)


def test_an_export_of_the_weights_is_evaluated_and_starts_a_run(
    sharded: Path, whole: Path, door: Door, tmp_path: Path
) -> None:
    file = tmp_path / "to/weights.ckpt"
    words = ["checkpoint=last", "weights_only=true", f"output={file}"]
    assert door("export", f"run={sharded}", *words) == 0
    content = torch.load(file, weights_only=True)
    assert "optimizer_states" not in content and "loops" not in content
    assert content["hyper_parameters"]["width"] == 64
    assert door("evaluate", f"run={whole}", f"checkpoint={file}") == 0
    evaluation = json.loads((whole / "evaluation-test.json").read_text())
    assert evaluation["step"] == STOP and 4 < evaluation["metrics"]["test_loss"] < 6
    words = [f"run_dir={tmp_path}/run", f"init_from={file}", "optimizer.lr=0.0"]
    assert door("train", *TRAIN, *words) == 0
    after = saved(tmp_path / "run", STEPS)["state_dict"]
    assert all(torch.equal(after[key], value) for key, value in content["state_dict"].items())


def test_export_refuses_what_cannot_be(
    whole: Path, door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(saved_bytes(whole)[:1000])
    foreign = tmp_path / "foreign.ckpt"
    torch.save({"weights": torch.zeros(1)}, foreign)
    file = whole / f"checkpoints/step-{STEPS:08d}.ckpt"
    wishes = {
        "format=floppy": "choose one of checkpoint",
        f"output={tmp_path}": "name a file",
        f"output={file}": "the checkpoint itself",
        "output=/proc/none/file.ckpt": "choose another output",
        f"checkpoint={broken}": "is damaged",
        f"checkpoint={tmp_path}": "is damaged",
        f"checkpoint={foreign}": "no checkpoint of a LightningModule",
        "checkpoint=gone.ckpt": "no such file",
    }
    before = saved_bytes(whole)
    for wish, message in wishes.items():
        assert door("export", f"run={whole}", wish) == 2
        assert message in capfd.readouterr().err, wish
    assert door("export", f"run={tmp_path}") == 2
    assert "no run folder" in capfd.readouterr().err
    assert door("export") == 2
    assert "run=..." in capfd.readouterr().err
    assert saved_bytes(whole) == before and not (whole / "export").exists()


def saved_bytes(run: Path) -> bytes:
    return (run / f"checkpoints/step-{STEPS:08d}.ckpt").read_bytes()

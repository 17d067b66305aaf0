"""Which run a command goes on with: by name, by folder, by what it asks for, and never the wrong one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PACKAGE, SHORT, Command, Door

from {{ cookiecutter.package_name }}.run.identity import code_fingerprint
from {{ cookiecutter.package_name }}.run.lock import RunLock

TRAIN = [*SHORT["vision"], "sample_prompt=null", "accelerator=cpu"]


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def stopped(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after 2 of 4 steps; copy it before use."""
    run = tmp_path_factory.mktemp("stopped") / "vision" / "run"
    assert door("train", *TRAIN, f"run_dir={run}", "stop_at=2") == 75
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "vision" / "run"))


def test_the_same_command_goes_on_with_the_newest_unfinished_run(
    run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    place = f"runs_dir={run.parent.parent}"
    older = shutil.copytree(run, run.with_name("older"))
    old = {**summary(older), "started": "2001-01-01T00:00:00+0000"}
    (older / "summary.json").write_text(json.dumps(old))
    assert door("train", *TRAIN, place) == 0
    assert "preempted at step 2" in capfd.readouterr().out
    assert summary(run)["status"] == "finished" and summary(run)["steps"] == 4
    assert summary(older)["status"] == "preempted"
    # Now that one is finished, the other is the newest that can go on; a longer training is the same.
    assert door("train", *TRAIN, place, "max_steps=5", "num_workers=1") == 0
    assert summary(older)["steps"] == 5
    assert door("train", *TRAIN, place) == 0
    assert len(list(run.parent.iterdir())) == 3, "both are finished: a new one"


@pytest.mark.parametrize(
    "word", ["seed=2", "optimizer.lr=0.1", "resume=never", "data.augment=none"]
)
def test_another_wish_is_another_run(word: str, run: Path, door: Door) -> None:
    assert door("train", *TRAIN, f"runs_dir={run.parent.parent}", word, "stop_at=1") == 75
    assert summary(run)["steps"] == 2 and len(list(run.parent.iterdir())) == 2


def test_changed_code_goes_on_by_name_only(
    run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    assert summary(run)["code"] == code_fingerprint()
    (run / "summary.json").write_text(json.dumps({**summary(run), "code": "0123"}))
    place = f"runs_dir={run.parent.parent}"
    assert door("train", *TRAIN, place, "stop_at=1") == 75
    assert "the code has changed since" in capfd.readouterr().out
    assert summary(run)["steps"] == 2
    assert door("train", *TRAIN, place, "name=run") == 0
    assert "the code has changed since" in capfd.readouterr().out
    assert summary(run)["steps"] == 4


def test_a_name_with_other_settings_is_refused_with_the_difference(
    run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    place = [f"runs_dir={run.parent.parent}", "name=run"]
    before = (run / "summary.json").read_bytes()
    assert door("train", *TRAIN, *place, "optimizer.lr=0.5", "seed=3") == 2
    message = capfd.readouterr().err
    assert "optimizer.lr=0.002 there, 0.5 here" in message and "seed=1 there, 3 here" in message
    assert (run / "summary.json").read_bytes() == before
    assert door("train", *TRAIN, *place, "optimizer.lr=0.5", "resume=never", "max_steps=1") == 0
    assert summary(run)["steps"] == 1, "afresh"
    assert summary(run.with_name("run.1"))["steps"] == 2, "the earlier one is kept"


def test_a_finished_run_is_left_alone_or_goes_further(
    run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*TRAIN, f"run_dir={run}"]
    assert door("train", *words) == 0
    before = (run / "summary.json").read_bytes()
    assert door("train", *words) == 0
    assert "finished at step 4 already" in capfd.readouterr().out
    assert (run / "summary.json").read_bytes() == before
    assert door("train", *words, "max_steps=6") == 0
    assert summary(run)["steps"] == 6


def test_resume_takes_a_run_folder_or_a_checkpoint(run: Path, door: Door, tmp_path: Path) -> None:
    file = run / "checkpoints" / "step-00000002.ckpt"
    assert door("train", *TRAIN, f"resume={file}", f"run_dir={tmp_path}/branch", "stop_at=3") == 75
    assert summary(tmp_path / "branch")["resumed_from"] == str(file)
    assert door("train", *TRAIN, f"resume={file}", f"run_dir={tmp_path}/branch") == 0
    assert door("train", *TRAIN, f"resume={run}") == 0
    assert summary(run)["steps"] == 4
    ends = [
        torch.load(folder / "checkpoints" / "step-00000004.ckpt", weights_only=True)["state_dict"]
        for folder in (run, tmp_path / "branch")
    ]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_branch_may_differ_and_uses_its_own_rate(run: Path, door: Door, tmp_path: Path) -> None:
    file = run / "checkpoints" / "step-00000002.ckpt"
    words = [*TRAIN, f"resume={file}", f"run_dir={tmp_path}/branch", "optimizer.lr=0.0"]
    assert door("train", *words) == 0
    before = torch.load(file, weights_only=True)
    after = torch.load(tmp_path / "branch/checkpoints/step-00000004.ckpt", weights_only=True)
    weights = [k for k, v in before["state_dict"].items() if k.endswith("weight") and v.ndim == 4]
    assert all(torch.equal(before["state_dict"][k], after["state_dict"][k]) for k in weights)
    moments = next(iter(after["optimizer_states"][0]["state"].values()))
    assert moments["step"] == 4, "the moments came along"


@pytest.mark.parametrize("word", ["gone", "manifest.json"])
def test_resume_from_nothing_is_refused(
    word: str, run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    assert door("train", *TRAIN, f"resume={run}/{word}") == 2
    assert "no such" in (message := capfd.readouterr().err) or "no checkpoint" in message


def test_a_damaged_checkpoint_is_passed_over(run: Path, door: Door) -> None:
    """Of two the newer is cut short, as by a full disk: the one before it is taken."""
    words = [*TRAIN, f"run_dir={run}", "keep_last=2"]
    assert door("train", *words, "stop_at=3") == 75
    newer = run / "checkpoints" / "step-00000003.ckpt"
    newer.write_bytes(newer.read_bytes()[:1000])
    assert door("train", *words) == 0
    assert summary(run)["resume"]["value"] == "step 2" and summary(run)["steps"] == 4


def test_a_live_run_is_not_entered(
    run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    holder = "import sys, time; from pathlib import Path\n"
    holder += f"from {PACKAGE}.run.lock import RunLock\n"
    holder += (
        "lock = RunLock(Path(sys.argv[1])); lock.take(); print('taken', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(run)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        assert door("train", *TRAIN, f"run_dir={run}") == 2
        assert f"in use by process {process.pid}" in capfd.readouterr().err
        assert door("train", *TRAIN, f"runs_dir={run.parent.parent}", "stop_at=1") == 75
        assert "with the same settings is running" in capfd.readouterr().out
        assert len(list(run.parent.iterdir())) == 2
    finally:
        process.kill()
        process.wait()
    lock = RunLock(run)
    assert lock.take() is None, "a killed process holds nothing"
    lock.release()


def test_a_sweep_goes_on_trial_by_trial(command: Command, data_dir: Path, tmp_path: Path) -> None:
    words = ["-m", *TRAIN, f"data_dir={data_dir}", f"runs_dir={tmp_path}", "devices=2"]
    assert command("train", *words, "seed=1,2", "stop_at=2", cwd=tmp_path).returncode == 75
    assert command("train", *words, "seed=2", cwd=tmp_path).returncode == 0
    runs = (tmp_path / "vision").iterdir()
    found = {json.loads((run / "manifest.json").read_text())["seed"]: summary(run) for run in runs}
    assert {seed: run["steps"] for seed, run in found.items()} == {1: 2, 2: 4}
    assert found[2]["status"] == "finished"

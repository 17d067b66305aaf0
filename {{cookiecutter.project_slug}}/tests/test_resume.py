"""Stopped and gone on with equals not stopped, bit for bit: weights, optimizer, metrics, order."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, Door

from {{ cookiecutter.package_name }}.models.classifier import ImageClassifier

STEPS = 12  # of 7 in an epoch
TRAIN = [
    "experiment=vision",
    "model.backbone=test_resnet",
    "+model.backbone_options.drop_rate=0.2",
    "data.augment=light",
    f"max_steps={STEPS}",
    "validate_every_steps=5",
    "log_every_steps=3",
    "batch_size=32",
    "overfit_batches=7",
    "limit_eval_batches=2",
    "optimizer.warmup_steps=3",
    "accelerator=cpu",
    "precision=fp32",
    "keep_last=9",
]
TIMES = {"samples_per_s", "tokens_per_s"}


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def state(run: Path, step: int = STEPS) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(
        run / f"checkpoints/step-{step:08d}.ckpt", weights_only=True
    )
    return {key: content[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def assert_equal_runs(first: Path, second: Path, step: int = STEPS) -> None:
    assert rows(first) == rows(second)
    assert same(state(first, step), state(second, step))
    assert summary(second)["status"] == "finished"
    before, after = (summary(run)["metrics"] for run in (first, second))
    assert all(before[name] == after[name] for name in before.keys() - TIMES)


@pytest.fixture(scope="module")
def whole(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert door("train", *TRAIN, f"run_dir={run}") == 0
    return run


@pytest.mark.parametrize(
    ("stops", "words"),
    [
        pytest.param([4], [], id="in mid-epoch"),
        pytest.param([5], [], id="where validation is due"),
        pytest.param([7], [], id="at an epoch's end"),
        pytest.param([1, 8, 11, 12], ["num_workers=2"], id="often, with workers"),
        pytest.param([6], ["batch_size=32", "micro_batch=8", "num_workers=2"], id="accumulated"),
    ],
)
def test_stopped_and_gone_on_equals_not_stopped(
    stops: list[int], words: list[str], whole: Path, door: Door, tmp_path: Path
) -> None:
    if "micro_batch=8" in words:
        whole = tmp_path / "whole"
        assert door("train", *TRAIN, *words, f"run_dir={whole}") == 0
    run = tmp_path / "run"
    for step in stops:
        assert door("train", *TRAIN, *words, f"run_dir={run}", f"stop_at={step}") == 75
        assert summary(run)["status"] == "preempted" and summary(run)["steps"] == step
    assert door("train", *TRAIN, *words, f"run_dir={run}") == 0
    assert_equal_runs(whole, run)


def test_text_too(door: Door, tmp_path: Path) -> None:
    """Dropout's masks and the windows into the text follow from seed and step as well."""
    words = ["experiment=language", "model.layers=2", "model.width=64", "model.dropout=0.1"]
    words += [*TRAIN[TRAIN.index(f"max_steps={STEPS}") :], "batch_size=4", "sample_prompt=null"]
    for name, stops in {"whole": [], "run": [4, 5]}.items():
        for step in stops:
            assert door("train", *words, f"run_dir={tmp_path}/{name}", f"stop_at={step}") == 75
        assert door("train", *words, f"run_dir={tmp_path}/{name}") == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def signal_in(monkeypatch: pytest.MonkeyPatch, method: str, call: int, number: int) -> None:
    """Send this process a signal, twice, in the given call of a method of the model."""
    before: Callable[..., Any] = getattr(ImageClassifier, method)
    calls = []

    def replaced(self: ImageClassifier, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
            if number != signal.SIGINT:
                os.kill(os.getpid(), number)
        return before(self, *args)

    monkeypatch.setattr(ImageClassifier, method, replaced)


@pytest.mark.parametrize(
    ("number", "method", "call", "step"),
    [
        pytest.param(signal.SIGTERM, "training_step", 4, 4, id="SIGTERM"),
        pytest.param(signal.SIGUSR1, "training_step", 5, 5, id="SIGUSR1"),
        pytest.param(signal.SIGINT, "training_step", 8, 8, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, "validation_step", 3, 10, id="in validation"),
        pytest.param(signal.SIGTERM, "validation_step", 5, 12, id="in the last validation"),
        pytest.param(signal.SIGTERM, "test_step", 1, 12, id="in the test"),
    ],
)
def test_a_signal_stops_at_the_next_step_and_nothing_is_lost(
    number: int,
    method: str,
    call: int,
    step: int,
    whole: Path,
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        signal_in(patch, method, call, number)
        assert door("train", *TRAIN, f"run_dir={run}", "num_workers=1") == 75
    assert signal.getsignal(number) is before
    found = summary(run)
    assert (found["status"], found["steps"]) == ("preempted", step)
    assert signal.Signals(number).name in found["reason"]
    assert door("train", *TRAIN, f"run_dir={run}") == 0
    assert_equal_runs(whole, run)


@pytest.mark.slow
def test_two_processes_go_on_under_another_launcher(
    command: Command, data_dir: Path, tmp_path: Path
) -> None:
    """Stopped in mid-epoch under torchrun, gone on under Lightning's launcher, with other workers."""
    words = [*TRAIN, "devices=2", f"data_dir={data_dir}"]
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node=2")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert command("train", *words, f"run_dir={whole}", cwd=tmp_path).returncode == 0
    stop = [*words, f"run_dir={run}", "stop_at=4", "num_workers=1"]
    assert command("train", *stop, launcher=torchrun, cwd=tmp_path).returncode == 1, "torchrun's"
    assert summary(run)["status"] == "preempted" and summary(run)["world_size"] == 2
    assert command("train", *words, f"run_dir={run}", cwd=tmp_path).returncode == 0
    assert_equal_runs(whole, run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_and_again_equals_not_killed(tmp_path: Path) -> None:
    """A short drill; `python tests/kill_drill.py` is the long one."""
    drill = [sys.executable, str(Path(__file__).with_name("kill_drill.py")), "--times", "6"]
    result = subprocess.run([*drill, "--keep", tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr

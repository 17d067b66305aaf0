"""deterministic=true: set in time, the user's own value kept, the operation without such a form named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PACKAGE, SHORT, Door
from torch import Tensor, nn

from {{ cookiecutter.package_name }}.training.deterministic import (
    without_deterministic_form,
)

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FAILING = [*SHORT["vision"], "model._target_=failing.Failing", "accelerator=cpu"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, "")
    del os.environ[WORKSPACE]  # monkeypatch takes away what the door sets


@pytest.mark.parametrize("task", SHORT)
def test_two_fresh_runs_are_equal(
    task: str, door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    states = []
    for name in ("one", "two"):
        words = [
            *SHORT[task],
            "deterministic=true",
            "accelerator=cpu",
            f"run_dir={tmp_path}/{name}",
        ]
        assert door("train", *words) == 0
        file = tmp_path / name / "checkpoints/step-00000004.ckpt"
        states.append(torch.load(file, weights_only=True)["state_dict"])
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert "deterministic:  True (costs speed" in capfd.readouterr().out
    assert os.environ[WORKSPACE] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled(), "the next run may want it fast"


def test_the_workspace_is_set_before_torch_and_the_users_own_value_wins() -> None:
    code = f"""
import os, sys
from {PACKAGE} import __main__ as door
class Torch:
    def find_spec(name, *_):
        if name == "torch":
            sys.exit("workspace " + os.environ["{WORKSPACE}"])
sys.meta_path.insert(0, Torch)
sys.exit(door.main())
"""
    line = [sys.executable, "-c", code, "train", "deterministic=true"]
    for own, expected in ((None, ":4096:8"), (":16:8", ":16:8")):
        environment = {**os.environ, **({WORKSPACE: own} if own else {})}
        result = subprocess.run(line, env=environment, capture_output=True, text=True)
        assert f"workspace {expected}" in result.stderr, result.stderr


def test_a_workspace_that_is_not_deterministic_is_refused(
    door: Door, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WORKSPACE, ":0:0")
    assert door("train", "deterministic=true") == 2
    assert f"{WORKSPACE}=:0:0: cuBLAS is deterministic with :4096:8" in capfd.readouterr().err


def test_an_operation_without_a_deterministic_form_is_named(
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAIL", "op -1 2")
    assert door("train", *FAILING, "deterministic=true", f"run_dir={tmp_path}/run") == 1
    printed = capfd.readouterr().err
    assert "put_ has no deterministic form (failing.py:" in printed and "Traceback" not in printed
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed" and "put_" in summary["reason"]


class Puts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))


def test_its_layer_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Puts()))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            net(torch.zeros(2, 2, requires_grad=False).detach())
    finally:
        torch.use_deterministic_algorithms(False)
    assert "put_ has no deterministic form (in layer 1.0)" in str(
        without_deterministic_form(raised.value, net)
    )

"""What ends a training is said in one line with what to do, and nothing is left behind."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SHORT, Command, Door
from failing import OUT_OF_MEMORY

from {{ cookiecutter.package_name }}.environment.memory import (
    host_memory_left,
    killed_for_memory,
)
from {{ cookiecutter.package_name }}.training.failures import worker_died
from {{ cookiecutter.package_name }}.training.out_of_memory import (
    Shares,
    advice,
    read_shares,
)

GIB = 2.0**30
FAILING = [*SHORT["vision"], "model._target_=failing.Failing", "accelerator=cpu", "test=false"]


def test_shares_are_those_of_torchs_message() -> None:
    shares = read_shares(OUT_OF_MEMORY, weights=2 * GIB, gradients=2 * GIB, optimizer=4 * GIB)
    assert shares is not None
    assert shares.gib() == {
        "total": 80.0,
        "asked": 20.0,
        "weights": 2.0,
        "gradients": 2.0,
        "optimizer": 4.0,
        "activations": 56.0 + 20.0,
        "fragments": 6.0,
        "others": 1.0,
    }
    assert shares.text().startswith("activations 84%, fragments 7%, optimizer 4%")
    assert (
        read_shares("CUDA out of memory. Tried to allocate more than 1EB memory.", 0, 0, 0) is None
    )


SHARES = Shares(80 * GIB, 1 * GIB, 5 * GIB, 5 * GIB, 10 * GIB, 50 * GIB, 5 * GIB, 1 * GIB)
STATE = replace(SHARES, weights=20 * GIB, optimizer=40 * GIB, activations=10 * GIB)


@pytest.mark.parametrize(
    ("shares", "micro_batch", "checkpointing", "sharded", "ranks", "expected"),
    [
        (SHARES, 12, "none", False, 1, "micro_batch=6 (batch_size stays"),
        (SHARES, 15, "none", False, 1, "micro_batch=5 "),
        (SHARES, 12, "none", False, 1, "then strategy.activation_checkpointing=selective"),
        (SHARES, 1, "none", False, 1, "strategy.activation_checkpointing=selective"),
        (SHARES, 1, "selective", False, 1, "strategy.activation_checkpointing=full"),
        (SHARES, 1, "full", False, 1, "a smaller input"),
        (STATE, 12, "none", False, 4, "strategy=fsdp: 4 devices"),
        (STATE, 12, "none", False, 1, "strategy=fsdp with more devices"),
        (STATE, 12, "none", True, 4, "more devices: each holds less"),
        (replace(SHARES, fragments=20 * GIB), 12, "none", False, 1, "expandable_segments:True"),
        (replace(SHARES, others=30 * GIB), 12, "none", False, 1, "other processes hold 30.0 GiB"),
    ],
)
def test_the_largest_share_decides_what_to_change_first(
    shares: Shares, micro_batch: int, checkpointing: str, sharded: bool, ranks: int, expected: str
) -> None:
    assert expected in advice(shares, micro_batch, checkpointing, sharded, ranks)


def test_out_of_memory_is_one_line(
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAIL", "memory -1 2")
    assert door("train", *FAILING, f"run_dir={tmp_path}/run") == 1
    printed = capfd.readouterr().err
    assert (
        printed.count("\n") == 1 and "out of GPU memory at step 2, asking for 20.00 GiB" in printed
    )
    assert "Change first: micro_batch=16" in printed
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed" and "out of GPU memory" in summary["reason"]
    assert summary["memory_gib"]["activations"] == 84.0


@pytest.mark.slow
def test_a_killed_loader_process_is_one_line(
    command: Command, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("FAIL", "worker -1 2")
    words = [*FAILING, "num_workers=2", f"data_dir={data_dir}", f"run_dir={tmp_path}/run"]
    result = command("train", *words)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "ended: is killed by signal: Killed" in result.stderr
    assert "num_workers=1 takes less" in result.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed" and "a loader process" in summary["reason"]


def test_a_full_shared_memory_is_named() -> None:
    words = "is killed by signal: Bus error. It is possible that dataloader's workers are out of"
    line = worker_died("123", words, 8)
    assert "(123) ended: is killed by signal: Bus error;" in line
    assert "--ipc=host, or --shm-size=16g; num_workers=4 takes less" in line


def test_a_container_limits_host_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("1048576")
    (tmp_path / "memory.max").write_text("3145728")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert host_memory_left(tmp_path) == 2**21
    assert killed_for_memory(tmp_path) == 2
    (tmp_path / "memory.max").write_text("max")
    assert (host_memory_left(tmp_path) or 0) > 2**21
    assert killed_for_memory(tmp_path / "none") == 0

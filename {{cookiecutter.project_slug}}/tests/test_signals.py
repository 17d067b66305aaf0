"""A scheduler's signal, a requeued job, a lost terminal: training stops in order, goes on, or stays."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, SHORT, Command

TRAIN = [*SHORT["vision"], "sample_prompt=null", "accelerator=cpu"]
LONG = ["devices=2", "num_workers=1", "max_steps=500", "validate_every_steps=null"]


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def processes(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_for_steps(run: Path) -> None:
    """Until the run in that folder has logged its first step."""
    end = time.monotonic() + 120
    while not (run / "metrics.csv").exists() and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.parametrize("whom", ["rank 1", "all"])
def test_a_signal_to_any_rank_stops_all(whom: str, data_dir: Path, tmp_path: Path) -> None:
    """Two ranks that Lightning starts, with loader workers; the second signal harms nothing."""
    run = tmp_path / "run"
    words = [*TRAIN, *LONG]
    process = subprocess.Popen(
        [sys.executable, "-m", PACKAGE, "train", *words, f"data_dir={data_dir}", f"run_dir={run}"],
        start_new_session=True,
    )
    wait_for_steps(run)
    others = [p for p in processes(str(run)) if os.getsid(p) == process.pid and p != process.pid]
    ranks = [p for p in others if "LOCAL_RANK=1" in Path(f"/proc/{p}/environ").read_text()]
    for _ in range(2):
        if whom == "all":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(min(ranks), signal.SIGTERM)
    assert process.wait(timeout=120) == 75
    assert summary(run)["status"] == "preempted"
    assert not processes(str(run))
    index = json.loads((run / "checkpoints/index.json").read_text())
    assert index["checkpoints"][-1]["step"] == summary(run)["steps"]


def tasks(words: list[str], restarts: int) -> list["subprocess.Popen[bytes]"]:
    """Two tasks on one node, with the variables that srun gives them."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    job |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SLURM_RESTART_COUNT": str(restarts), "MASTER_ADDR": "127.0.0.1"}
    started = []
    for rank in ("0", "1"):
        variables = {**os.environ, **job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        line = [sys.executable, "-m", PACKAGE, "train", *words]
        started.append(subprocess.Popen(line, env=variables))
    return started


def test_a_requeued_job_goes_on(data_dir: Path, tmp_path: Path) -> None:
    """SLURM's warning (--signal=USR1@...) to both tasks; then the same job script once more."""
    run = tmp_path / "vision" / "run"
    words = [*TRAIN, *LONG, f"data_dir={data_dir}", f"runs_dir={tmp_path}", "name=run"]
    first = tasks(words, restarts=0)
    wait_for_steps(run)
    for task in first:
        task.send_signal(signal.SIGUSR1)
    assert [task.wait(timeout=120) for task in first] == [75, 75]
    stopped = summary(run)
    assert stopped["status"] == "preempted" and "SIGUSR1" in stopped["reason"]
    more = tasks([*words, f"max_steps={stopped['steps'] + 2}"], restarts=1)
    assert [task.wait(timeout=120) for task in more] == [0, 0]
    found = summary(run)
    assert found["status"] == "finished" and found["steps"] == stopped["steps"] + 2
    assert found["resume"]["value"] == f"step {stopped['steps']}"


def test_detached_training_outlives_its_terminal(
    command: Command, data_dir: Path, tmp_path: Path
) -> None:
    words = [*TRAIN, f"data_dir={data_dir}", f"run_dir={tmp_path}/run", "detach=true"]
    started = command("train", *words, cwd=tmp_path)
    assert started.returncode == 0 and "tail -f run/output.log" in started.stdout
    end = time.monotonic() + 120
    while processes(f"{tmp_path}/run") and time.monotonic() < end:
        time.sleep(0.1)
    assert summary(tmp_path / "run")["status"] == "finished"
    assert "test_loss" in (tmp_path / "run" / "output.log").read_text()
    assert command("train", *words, "no_such_key=1", cwd=tmp_path).returncode == 2


def test_a_lost_terminal_does_not_end_training(data_dir: Path, tmp_path: Path) -> None:
    """SIGHUP, and a pipe that nobody reads any more: what would have been printed is in the folder."""
    words = [*TRAIN, "max_steps=15", f"data_dir={data_dir}", f"run_dir={tmp_path}/run"]
    process = subprocess.Popen(
        [sys.executable, "-m", PACKAGE, "train", *words],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert any(b"step  2/15" in line for line in process.stdout)
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
    assert summary(tmp_path / "run")["status"] == "finished"
    assert "test_loss" in (tmp_path / "run" / "output.log").read_text()

"""A rank that dies takes all others with it: non-zero, in bounded time, in one line, and no orphan."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PACKAGE, SHORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]
WORDS = [*SHORT["vision"], "model._target_=failing.Failing", "accelerator=cpu", "test=false"]
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"],
}
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, data_dir: Path) -> Iterator[Start]:
    """`start(launcher, fail)` begins a training of two ranks; what it leaves is killed at the end."""

    def call(launcher: str, fail: str) -> "subprocess.Popen[str]":
        words = [*WORDS, "devices=2", f"data_dir={data_dir}", f"run_dir={tmp_path}/run"]
        line = [*LAUNCHERS[launcher], "-m", PACKAGE, "train", *words]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FAIL": fail}
        return subprocess.Popen(
            line,
            env={**os.environ, **environment, "MARK": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield call
    for process in alive(tmp_path):
        os.kill(process, signal.SIGKILL)


def alive(mark: Path) -> dict[int, str | None]:
    """Processes of this test that run, with their LOCAL_RANK."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"MARK={mark}" in words:
            ranks = [word.split("=")[1] for word in words if word.startswith("LOCAL_RANK=")]
            found[int(place.name)] = ranks[0] if ranks else None
    return found


def rank(mark: Path, number: int) -> int:
    return next(process for process, rank in alive(mark).items() if rank == str(number))


def summary(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "run/summary.json").read_text())
    return content


def until(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.2)
    return False


def in_step_3(folder: Path) -> None:
    """Until step 2 is recorded, and a moment more."""
    place = folder / "run/summary.json"
    assert until(lambda: place.exists() and summary(folder)["steps"] == 2, 120)
    time.sleep(2)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_all_with_a_line(launcher: str, start: Start, tmp_path: Path) -> None:
    process = start(launcher, "die 1 3")
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert until(lambda: not alive(tmp_path), 10), alive(tmp_path)
    assert "[rank0]" not in printed and "gloo" not in printed, printed
    reason = str(summary(tmp_path)["reason"])
    assert summary(tmp_path)["status"] == "failed" and reason in printed
    if launcher == "lightning":
        assert "rank 1 was killed by SIGKILL" in reason and "Traceback" not in printed
    else:
        assert "another rank has died" in reason and "Signal 9" in printed  # torchrun's table


def test_a_rank_that_waits_for_a_dead_one_is_ended(start: Start, tmp_path: Path) -> None:
    """As under NCCL, where a collective does not return when another rank is gone."""
    process = start("lightning", "hang 0 3")
    in_step_3(tmp_path)
    os.kill(rank(tmp_path, 1), signal.SIGTERM)  # a wish only: it goes on
    os.kill(rank(tmp_path, 1), signal.SIGKILL)
    printed = process.communicate(timeout=30)[1]
    assert process.returncode == 1 and "rank 1 was killed by SIGKILL" in printed
    assert until(lambda: not alive(tmp_path), 10), alive(tmp_path)
    assert summary(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_end_with_what_started_them(launcher: str, start: Start, tmp_path: Path) -> None:
    """Rank 0 under Lightning's launcher, torchrun itself otherwise."""
    process = start(launcher, "hang 1 3")
    in_step_3(tmp_path)
    process.kill()
    printed = process.communicate(timeout=60)[1]  # the pipe is closed when the last of them is gone
    assert until(lambda: not alive(tmp_path), 10), alive(tmp_path)
    assert f"process {process.pid}, which started the ranks, is gone" in printed
    if launcher == "lightning":
        assert summary(tmp_path)["status"] == "running", "killed without a word"
        again = start(launcher, "nothing 0 0")
        assert again.wait(120) == 0
        assert summary(tmp_path)["status"] == "finished" and summary(tmp_path)["steps"] == 4

"""Run folders on S3, against a server on loopback. Needs moto[server] and s3fs; without them skipped."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, Door
from test_resume import TRAIN, assert_equal_runs

from {{ cookiecutter.package_name }}.environment.folders import here
from {{ cookiecutter.package_name }}.run import mirror

moto = pytest.importorskip("moto.server", reason="needs moto[server]")
s3fs = pytest.importorskip("s3fs", reason="needs s3fs: the extra `s3`")
pytestmark = pytest.mark.slow
RUN = "s3://bucket/runs/vision/run"
# The command as ever, but looking for something to upload more often.
EAGER = f"""
import sys
from {PACKAGE}.__main__ import main
from {PACKAGE}.run import mirror
mirror.CHECK = 0.1
sys.exit(main())
"""


class Server:
    """An S3 server whose content outlives a stop."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = moto.ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self.server.start()

    def stop(self) -> None:
        self.server.stop()

    def allow(self, requests: int) -> None:
        """So many requests are still free; after them a key needs permissions, and ours has none."""
        place, kind = f"{self.url}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(place, str(requests).encode(), kind))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server.start()
        yield server
        server.stop()


@pytest.fixture
def store(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty bucket, as fsspec sees it, and an empty place for the local copies."""
    monkeypatch.setenv("REMOTE_RUNS_DIR", str(tmp_path / "copies"))
    monkeypatch.setattr(mirror, "CHECK", 0.1)
    fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    fs.mkdir("bucket")
    yield fs
    fs.rm("bucket", recursive=True)


def names(store: Any, run: str = RUN) -> set[str]:
    return {name.removeprefix(run[5:] + "/") for name in store.find(run)}


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_killed_and_gone_on_on_an_empty_machine(
    store: Any, door: Door, data_dir: Path, tmp_path: Path
) -> None:
    words = [*TRAIN, "max_steps=60", "checkpoint_every_steps=2", "keep_last=1"]
    words += ["validate_every_steps=50", "num_workers=2"]
    whole, log = tmp_path / "whole", (tmp_path / "log").open("w")
    assert door("train", *words, f"run_dir={whole}") == 0
    line = [sys.executable, "-c", EAGER, "train", *words, f"data_dir={data_dir}"]
    line += ["runs_dir=s3://bucket/runs", "name=run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, env=environment, stdout=log, stderr=log)
    wait_for(lambda: store.exists(f"{RUN}/checkpoints/index.json") or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert store.exists(f"{RUN}/.owner.json")
    shutil.rmtree(tmp_path / "copies")
    store.pipe("bucket/runs/vision/no-run/note.txt", b"no run")
    assert door("train", *words, "runs_dir=s3://bucket/runs") == 0, "found without its name"
    assert "killed at step" in json.dumps(json.loads(store.cat(f"{RUN}/summary.json"))["resume"])
    assert_equal_runs(whole, here(RUN), 60)
    index = json.loads(store.cat(f"{RUN}/checkpoints/index.json"))
    files = {f"checkpoints/{entry['file']}" for entry in index["checkpoints"]}
    plain = {"config.yaml", "manifest.json", "metrics.csv", "summary.json"}
    assert names(store) == files | plain | {"checkpoints/index.json"}


def test_a_bucket_that_is_not_there_or_closed_is_said_at_the_start(
    store: Any, server: Server, door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert door("train", *TRAIN, "run_dir=s3://gone/run") == 2
    assert "s3://gone/run: FileNotFoundError" in capfd.readouterr().err
    server.allow(0)
    try:
        assert door("train", *TRAIN, f"run_dir={RUN}") == 2
    finally:
        server.allow(10**9)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and RUN in lines[0] and "PermissionError" in lines[0]
    assert not (tmp_path / "copies").exists() and not store.find("bucket")


def test_a_server_that_goes_away_and_comes_back(
    store: Any,
    server: Server,
    door: Door,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Training does not notice; what was missing arrives."""
    seen = threading.Event()
    before = mirror.Mirror._say_fault

    def say(self: mirror.Mirror, error: Exception) -> None:
        before(self, error)
        seen.set()

    def outage() -> None:
        with contextlib.suppress(AssertionError):
            wait_for(lambda: bool(store.exists(f"{RUN}/checkpoints/index.json")))
        server.stop()
        seen.wait(60)
        server.start()

    monkeypatch.setattr(mirror.Mirror, "_say_fault", say)
    thread = threading.Thread(target=outage)
    thread.start()
    words = [*TRAIN, "max_steps=60", "checkpoint_every_steps=2"]
    try:
        assert door("train", *words, f"run_dir={RUN}") == 0
    finally:
        thread.join()
    printed = capfd.readouterr().out
    assert "training goes on" in printed and "has caught up" in printed
    assert "did not arrive" not in printed
    assert json.loads(store.cat(f"{RUN}/summary.json"))["status"] == "finished"
    assert "checkpoints/step-00000060.ckpt" in names(store)


def test_a_server_that_stays_away(
    store: Any,
    server: Server,
    door: Door,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The run ends as it would have; a line says what is only here. Its place is evaluated later."""
    monkeypatch.setattr(mirror, "TIME_TO_STOP", 1.0)

    def outage() -> None:
        with contextlib.suppress(AssertionError):
            wait_for(lambda: bool(store.exists(f"{RUN}/checkpoints/index.json")))
        server.stop()

    thread = threading.Thread(target=outage)
    thread.start()
    words = [*TRAIN, "max_steps=60", "checkpoint_every_steps=2"]
    try:
        assert door("train", *words, f"run_dir={RUN}", "stop_at=59") == 75
    finally:
        thread.join()
        server.start()
    printed = capfd.readouterr().out
    assert f"did not arrive at {RUN}" in printed and "copies" in printed
    assert door("train", *words, f"run_dir={RUN}") == 0
    assert "preempted at step 59" in capfd.readouterr().out
    shutil.rmtree(tmp_path / "copies")
    assert door("evaluate", f"run={RUN}") == 0
    assert "evaluation-test.json" in names(store)

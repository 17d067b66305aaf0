"""Shared ways in: the door inside this process (fast) and as a command of its own (real)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from {{ cookiecutter.package_name }}.__main__ import main

# One thread a process: tests that run side by side, and two ranks of a run, stall each other on a
# small machine otherwise. Before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PACKAGE = "{{ cookiecutter.package_name }}"
Door = Callable[..., int]
Command = Callable[..., "subprocess.CompletedProcess[str]"]

# A few steps of each task, in seconds.
SHORT = {
    "vision": ["experiment=vision", "debug=smoke", "batch_size=32", "model.backbone=test_resnet"],
    "language": [
        "experiment=language",
        "debug=smoke",
        "batch_size=4",
        "model.layers=2",
        "model.width=64",
    ],
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write tests/regression.json anew")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded data, written once for all tests."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def door(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Door:
    """`door(verb, override, ...)` runs the command in this process and returns its exit code."""
    runs = tmp_path_factory.mktemp("runs")

    def call(verb: str, *overrides: str) -> int:
        places = [f"data_dir={data_dir}", f"runs_dir={runs}"] if verb == "train" else []
        before = sys.argv
        sys.argv = [PACKAGE, verb, *places, *overrides]
        try:
            return main()
        finally:
            sys.argv = before

    return call


@pytest.fixture(scope="session")
def command() -> Command:
    """`command(word, ...)` runs `python -m <package> ...` as a process of its own."""

    def call(
        *words: str, launcher: tuple[str, ...] = (sys.executable,), cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        line = [*launcher, "-m", PACKAGE, *words]
        return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=600)

    return call


@pytest.fixture(scope="session")
def runs(door: Door, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One short finished run of each task."""
    folders = {}
    for task, overrides in SHORT.items():
        folders[task] = tmp_path_factory.mktemp("short") / task
        assert door("train", *overrides, f"run_dir={folders[task]}") == 0
    return folders

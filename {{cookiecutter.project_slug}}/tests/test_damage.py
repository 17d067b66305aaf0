"""Damaged files, words that are not meant so, signals that come early: a line each, and nothing lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE, SHORT, Door

WORDS = [*SHORT["vision"], "accelerator=cpu", "test=false"]


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a finished run, to be damaged."""
    return Path(shutil.copytree(runs["vision"], tmp_path / "run"))


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*.ckpt"))


@pytest.mark.parametrize("content", ["", "{}", "[]", "{'no': json}"])
def test_a_damaged_index_is_refused_with_the_way_on(
    content: str, run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints/index.json").write_text(content)
    for words in (["evaluate", f"run={run}"], ["train", *WORDS, f"run_dir={run}"]):
        assert door(*words) == 2
        printed = capfd.readouterr().err
        assert "index.json is damaged" in printed and newest(run).name in printed
    assert newest(run).exists()


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew(
    run: Path, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (run / "checkpoints").glob("step-*.ckpt"):
        path.write_bytes(path.read_bytes()[:1000])
    words = [*SHORT["vision"], f"run_dir={run}", "max_steps=9"]
    assert door("train", *words) == 2
    assert "has no whole checkpoint left; resume=never" in capfd.readouterr().err


def test_damaged_checkpoints_and_configs_are_named(
    run: Path, door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = newest(run)
    content = bytearray(path.read_bytes())
    content[-3000:] = os.urandom(3000)  # of the same size: only reading it tells
    path.write_bytes(content)
    for words in (
        ["evaluate", f"run={run}", "checkpoint=last"],
        ["train", *WORDS, f"init_from={path}", f"run_dir={tmp_path}/new"],
    ):
        assert door(*words) == 2
        assert f"{path.name} is damaged" in capfd.readouterr().err
    assert door("train", *SHORT["vision"], f"run_dir={run}", "max_steps=9") == 1
    assert f"{path.name} is damaged: remove it" in capfd.readouterr().err
    (run / "config.yaml").write_text("model: [")
    for words in (["evaluate", f"run={run}"], ["train", *WORDS, f"run_dir={run}"]):
        assert door(*words) == 2
        assert "config.yaml cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("runs_dir=s3:/bucket/runs", "do you mean s3://bucket/runs?"),
        ("run_dir=gs:/bucket/run", "do you mean gs://bucket/run?"),
        ("runs_dir=memory://runs", "nothing there outlives the process"),
        ("every_minutes=nan", "every_minutes=nan: it takes a number above 0"),
    ],
)
def test_words_that_cannot_be_meant(
    word: str, told: str, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    assert door("train", *WORDS, word) == 2
    assert told in capfd.readouterr().err


def test_a_branch_is_known_by_its_place_not_by_how_it_was_typed(
    runs: dict[str, Path], door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = newest(runs["vision"])
    words = [*WORDS, "seed=5", f"run_dir={tmp_path}/branch"]
    monkeypatch.chdir(file.parent)
    assert door("train", *words, f"resume={file.name}", "max_steps=6", "stop_at=5") == 75
    assert door("train", *words, f"resume={file}", "max_steps=6") == 0
    summary = json.loads((tmp_path / "branch/summary.json").read_text())
    assert summary["status"] == "finished" and summary["resumed_from"] == str(file)


EARLY = f"""
import os, signal, sys
from {PACKAGE} import __main__ as door
class Torch:
    def find_spec(name, *_):
        if name == "torch":
            sys.meta_path.remove(Torch)
            os.kill(os.getpid(), signal.Signals[os.environ["EARLY"]])
sys.meta_path.insert(0, Torch)
sys.exit(door.main())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_while_libraries_load_ends_in_a_line(name: str, code: int, tmp_path: Path) -> None:
    line = [sys.executable, "-c", EARLY, "train", *WORDS, f"run_dir={tmp_path}/run"]
    environment = {**os.environ, "EARLY": name}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert ("interrupted" if name == "SIGINT" else name) in done.stderr
    assert not (tmp_path / "run").exists()

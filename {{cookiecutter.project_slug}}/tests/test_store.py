"""Run folders elsewhere: an object store in memory that fails on request. A real one: test_s3.py."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import SHORT, Command, Door
from flaky import RUN, RUNS, Flaky, stored, stored_json
from test_resume import TRAIN, assert_equal_runs

from {{ cookiecutter.package_name }}.environment.folders import here, shown, url_of
from {{ cookiecutter.package_name }}.models.classifier import ImageClassifier
from {{ cookiecutter.package_name }}.run import elsewhere, mirror

QUICK = [*TRAIN[:-1], "max_steps=4", "validate_every_steps=2", "keep_last=1"]


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and an empty place for the local copies."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.pseudo_dirs[:] = [""]
    monkeypatch.setattr(Flaky, "fault", None)
    monkeypatch.setattr(mirror, "CHECK", 0.05)
    monkeypatch.setenv("REMOTE_RUNS_DIR", str(tmp_path / "copies"))
    return tmp_path / "copies"


def in_step(monkeypatch: pytest.MonkeyPatch, steps: dict[int, Any]) -> None:
    """Call functions while training is in these steps, counted from 1."""
    before, calls = ImageClassifier.training_step, []

    def replaced(self: ImageClassifier, *words: Any) -> Any:
        calls.append(1)
        steps.get(len(calls), lambda: None)()
        return before(self, *words)

    monkeypatch.setattr(ImageClassifier, "training_step", replaced)


def test_a_copy_tells_its_url(copies: Path) -> None:
    for url in ("s3://bucket/runs/vision/a", "file:///mnt/runs/a", "gs://b/c"):
        assert here(url).is_relative_to(copies) and url_of(here(url)) == url == shown(here(url))
    assert url_of(copies.parent) is None and shown(copies.parent) == str(copies.parent)


@pytest.mark.slow
def test_an_empty_machine_goes_on_to_the_same_result(
    door: Door, copies: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    assert door("train", *TRAIN, f"run_dir={whole}") == 0
    for step in (5, 7):
        assert door("train", *TRAIN, f"runs_dir={RUNS}", "name=run", f"stop_at={step}") == 75
        assert stored_json("summary.json")["status"] == "preempted"
        shutil.rmtree(copies)
    # Without a name: the newest unfinished run of these settings, from the store's checkpoints.
    assert door("train", *TRAIN, f"runs_dir={RUNS}") == 0
    printed = capfd.readouterr().out
    assert f"run:            {RUN} (local copy" in printed and "preempted at step 7" in printed
    assert_equal_runs(whole, here(RUN))
    index = stored_json("checkpoints/index.json")
    files = {f"checkpoints/{entry['file']}" for entry in index["checkpoints"]}
    assert files == {name for name in stored() if name.endswith(".ckpt")}
    plain = {"config.yaml", "manifest.json", "metrics.csv", "summary.json"}
    assert stored() == files | plain | {"checkpoints/index.json"}
    # Finished: the next one is a new run.
    assert door("train", *TRAIN, f"runs_dir={RUNS}", "max_steps=1") == 0
    assert len({name.split("/")[4] for name in Flaky.store}) == 2


def test_the_index_there_names_only_what_is_there(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment, so that a machine may go away in any of them; and nothing else stays."""
    missing: list[set[str]] = []
    before = Flaky.pipe_file

    def checked(self: Flaky, path: str, value: bytes) -> None:
        if path.endswith("index.json"):
            entries = json.loads(value)["checkpoints"]
            needed = {f"checkpoints/{entry['file']}" for entry in entries} | {"config.yaml"}
            missing.append(needed - stored())
            if validated := [entry["step"] for entry in entries if entry["validated"]]:
                rows = Flaky.store[f"{RUN.removeprefix('flaky:/')}/metrics.csv"].getvalue()
                missing.append({f"{n}" for n in validated if f"\n{n}," not in rows.decode()})
        before(self, path, value)

    monkeypatch.setattr(Flaky, "pipe_file", checked)
    in_step(monkeypatch, {step: lambda: time.sleep(0.3) for step in (3, 4)})
    assert door("train", *QUICK, f"run_dir={RUN}", "checkpoint_every_steps=1") == 0
    assert len(missing) > 4 and not any(missing)
    index = stored_json("checkpoints/index.json")
    named = {f"checkpoints/{entry['file']}" for entry in index["checkpoints"]}
    assert named == {name for name in stored() if name.endswith(".ckpt")}


@pytest.mark.parametrize(
    ("fault", "says"),
    [(PermissionError("Access Denied"), "Access Denied"), (OSError("no route"), "no route")],
)
def test_what_is_not_allowed_is_said_before_anything(
    fault: Exception,
    says: str,
    door: Door,
    copies: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Flaky, "fault", fault)
    assert door("train", *QUICK, f"run_dir={RUN}") == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and RUN in lines[0] and says in lines[0]
    assert not copies.exists() and not Flaky.store


def test_a_store_that_does_not_answer_is_said_in_time(
    door: Door, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Flaky, "put_file", lambda *words: time.sleep(5))
    monkeypatch.setattr("{{ cookiecutter.package_name }}.run.store.ANSWER", 0.2)
    assert door("train", *QUICK, f"run_dir={RUN}") == 2
    assert "no answer within" in capfd.readouterr().err


def test_unknown_protocols_are_refused(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    assert door("train", *QUICK, "run_dir=nowhere://bucket/run") == 2
    assert "nowhere" in capfd.readouterr().err
    assert door("train", *QUICK, "run_dir=flaky://bucket/../run") == 2
    assert "'..'" in capfd.readouterr().err


def test_a_fault_in_mid_run_is_made_up_for(
    door: Door, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def down() -> None:
        Flaky.fault = ConnectionError("connection reset")

    def up() -> None:
        time.sleep(0.5)  # until the checkpoint of step 2 has met the fault
        Flaky.fault = None

    with monkeypatch.context() as patch:
        in_step(patch, {2: down, 4: up})
        assert door("train", *QUICK, f"run_dir={RUN}") == 0
    printed = capfd.readouterr().out
    assert printed.count("ConnectionError: connection reset; training goes on") == 1
    assert "has caught up" in printed and "did not arrive" not in printed
    assert stored_json("summary.json")["status"] == "finished"


@pytest.mark.slow
def test_what_did_not_arrive_is_said_and_sent_by_the_next_command(
    door: Door,
    copies: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def down() -> None:
        Flaky.fault = ConnectionError("connection reset")

    monkeypatch.setattr(mirror, "TIME_TO_FINISH", 0.1)
    with monkeypatch.context() as patch:
        in_step(patch, {2: down})
        assert door("train", *QUICK, f"run_dir={RUN}") == 0
    printed = capfd.readouterr().out
    assert f"did not arrive at {RUN} (ConnectionError" in printed and str(here(RUN)) in printed
    deadline = time.monotonic() + 20
    Flaky.fault = None
    while any(thread.name == "mirror" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # in a process of its own it would have ended with the command
    Flaky.store.clear()
    assert door("train", *QUICK, f"run_dir={RUN}") == 0
    assert "finished at step 4 already" in capfd.readouterr().out
    assert stored_json("summary.json")["status"] == "finished"
    assert "checkpoints/step-00000004.ckpt" in stored()


def test_resume_never_keeps_the_earlier_run(door: Door, copies: Path) -> None:
    words = [*QUICK, f"runs_dir={RUNS}", "name=run"]
    assert door("train", *words, "stop_at=1") == 75
    shutil.rmtree(copies)
    assert door("train", *words, "resume=never") == 0
    assert stored_json("summary.json", f"{RUN}.1")["status"] == "preempted"
    assert stored_json("summary.json")["status"] == "finished"
    assert door("train", *words, "resume=never", "stop_at=1") == 75
    assert stored_json("summary.json", f"{RUN}.2")["status"] == "finished"
    assert (here(RUN).with_name("run.2") / "summary.json").is_file()


def test_a_run_that_another_machine_is_writing_is_left_alone(
    door: Door, copies: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*QUICK, f"runs_dir={RUNS}", "name=run"]
    assert door("train", *words, "stop_at=1") == 75
    monkeypatch.setattr(elsewhere, "POLL", 0.05)
    monkeypatch.setattr(elsewhere, "PATIENCE", 1.0)
    alive, fs = threading.Event(), Flaky()

    def beat(seconds: float) -> None:
        life = {"host": "other", "pid": 7, "time": time.time() + seconds}
        fs.pipe_file(f"{RUN}/.owner.json", json.dumps(life).encode())

    def keep_beating() -> None:
        while not alive.wait(0.1):
            beat(0.0)

    thread = threading.Thread(target=keep_beating)
    thread.start()
    time.sleep(0.3)
    try:
        assert door("train", *words) == 2
    finally:
        alive.set()
        thread.join()
    assert "in use by process 7 on other" in capfd.readouterr().err
    shutil.rmtree(copies)
    assert door("train", *words) == 0, "it shows no sign of life any more"
    assert ".owner.json" not in stored()


@pytest.mark.slow
def test_evaluate_export_and_init_from_take_a_url(
    door: Door, copies: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert door("train", *QUICK, f"run_dir={RUN}", "keep_last=9") == 0
    shutil.rmtree(copies)
    assert door("evaluate", f"run={RUN}") == 0
    assert f"written:        {RUN}/evaluation-test.json" in capfd.readouterr().out
    assert stored_json("evaluation-test.json")["step"] in (2, 4)
    assert door("export", f"run={RUN}", "checkpoint=step-00000002.ckpt") == 0
    assert "export/step-00000002.ckpt" in stored()
    assert door("evaluate", "run=flaky://bucket/none") == 2
    assert "flaky://bucket/none" in capfd.readouterr().err
    shutil.rmtree(copies)
    file = f"{RUN}/checkpoints/step-00000002.ckpt"
    for source in (RUN, file):
        assert (
            door("train", *QUICK, f"run_dir={tmp_path}/{len(source)}", f"init_from={source}") == 0
        )
    shutil.rmtree(copies)
    assert door("train", *QUICK, f"run_dir={tmp_path}/branch", f"resume={file}") == 0
    assert f"branches off from {file} at step 2" in capfd.readouterr().out


@pytest.mark.slow
def test_two_ranks_and_their_sharded_checkpoints(
    command: Command, data_dir: Path, tmp_path: Path
) -> None:
    """Every part arrives; the rank that uploads is waited for, and an empty machine goes on."""
    words = ["train", *SHORT["language"], "accelerator=cpu", "sample_prompt=null", "strategy=fsdp"]
    words += ["strategy.sharded_checkpoint=true", f"data_dir={data_dir}"]
    words += [f"run_dir=file://{tmp_path}/bucket/run"]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    stopped = command(*words, "stop_at=2", launcher=torchrun)
    assert "stopped:        stop_at=2" in stopped.stdout, stopped.stderr
    parts = tmp_path / "bucket/run/checkpoints/step-00000002.ckpt"
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= {path.name for path in parts.iterdir()}
    shutil.rmtree(tmp_path / "copies")
    finished = command(*words, launcher=torchrun)
    assert finished.returncode == 0, finished.stderr
    assert "preempted at step 2" in finished.stdout
    assert "in step (sharded" in finished.stdout
    assert (tmp_path / "bucket/run/checkpoints/step-00000004.ckpt/.metadata").is_file()
    assert not parts.exists()

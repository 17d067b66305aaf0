"""The one door: exit codes, precedence, and the same run however it is started."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SHORT, Command, Door

REFUSALS = {
    "mex_steps=3": "do you mean max_steps?",
    "+mex_steps=3": "mex_steps",
    "max_steps=many": "max_steps",
    "max_steps=0": "max_steps=0",
    "+data.sise=3": "sise",
    "model.backbone=resnet1812": "resnet1812",
    "model=gpt-tinny": "gpt-tinny",
    "loader=floppy": "loader/floppy",
    "precision=tf32": "precision=tf32 needs an NVIDIA GPU",
    "micro_batch=7": "micro_batch=4 does",
    "monitor_mode=most": "min, max",
    "optimizer.name=adam": "adamw, sgd",
    "optimizer.lr=fast": "optimizer.lr=fast",
    "optimizer.lr=-1": "optimizer.lr=-1",
    "seed=-1": "seed=-1",
    "monitor=val_beauty": "val_loss, val_accuracy",
    "logger.mode=online logger=wandb": "WANDB_API_KEY",
    "model=gpt-tiny": "model=timm goes with images",
    "data=image_folder data.num_classes=2": "data.folder has no value",
    "experiment=language model=timm": "gpt-... with text",
    "data=image_folder data.num_classes=2 data.folder=/nowhere": "train/<class>",
    "sample_prompt=hello": "only language models",
    "experiment=language model.vocab_size=300": "set sample_prompt=null",
    "batch_size=100000": "choose a smaller batch_size",
    "name=a/b": "name=a/b",
    "name='a b'": "name=a b",
    "devices=0": "devices=0",
    "strategy=single devices=2": "strategy=single",
    "init_from=/nowhere.ckpt": "/nowhere.ckpt",
}


@pytest.mark.parametrize("wish", REFUSALS)
def test_refuses_with_exit_2_and_names_the_key(
    wish: str,
    door: Door,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    words = ["experiment=vision", "accelerator=cpu", "batch_size=4", f"runs_dir={tmp_path}/runs"]
    overrides = [wish] if "'" in wish else wish.split()
    assert door("train", *words, f"data_dir={tmp_path}/data", *overrides) == 2
    assert REFUSALS[wish] in capfd.readouterr().err
    if "100000" not in wish:  # how many samples there are is known only with the data
        assert not (tmp_path / "data").exists(), "refused only after the data had been touched"
    assert not (tmp_path / "runs").exists(), "a refusal left a run folder"


def test_command_line_beats_debug_beats_experiment(runs: dict[str, Path]) -> None:
    config = (runs["vision"] / "config.yaml").read_text()
    assert re.search(r"^batch_size: 32$", config, re.M), "command line over experiment (64)"
    assert re.search(r"^max_steps: 4$", config, re.M), "debug over defaults"
    assert re.search(r"^max_epochs: null$", config, re.M), "debug over experiment (12)"
    assert re.search(r"^monitor: val_accuracy$", config, re.M), "experiment over defaults"


def test_verbs_are_listed_without_importing_torch(command: Command) -> None:
    result = command("--help")
    assert result.returncode == 0 and "evaluate" in result.stdout
    assert command("dance").returncode == 2
    code = (
        "import sys; sys.argv[1:] = ['-h']; "
        "from {{ cookiecutter.package_name }}.__main__ import main; main(); "
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def test_one_and_two_processes_by_both_launchers_are_one_training(
    command: Command, door: Door, data_dir: Path, tmp_path: Path
) -> None:
    """Run from a foreign directory: same folder shape, same losses, one folder a run."""
    words = [
        "train",
        *SHORT["language"],
        f"data_dir={data_dir}",
        "accelerator=cpu",
        "precision=fp32",
        "sample_prompt=null",
    ]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2")
    results = {
        "one": command(*words, f"run_dir={tmp_path}/one", cwd=tmp_path),
        "lightning": command(*words, f"run_dir={tmp_path}/lightning", "devices=2", cwd=tmp_path),
        "torchrun": command(
            *words, f"run_dir={tmp_path}/torchrun", launcher=torchrun, cwd=tmp_path
        ),
    }
    for name, result in results.items():
        assert result.returncode == 0, f"{name}: {result.stdout}\n{result.stderr}"
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["status"] == "finished" and summary["world_size"] == (
            1 if name == "one" else 2
        )
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        one = json.loads((tmp_path / "one" / "summary.json").read_text())["metrics"]
        assert summary["metrics"]["test_loss"] == pytest.approx(one["test_loss"], rel=1e-5)
    assert {entry.name for entry in tmp_path.iterdir()} == set(results), "a stray folder was made"


def test_a_sweep_runs_each_trial_in_its_own_folder(
    command: Command, data_dir: Path, tmp_path: Path
) -> None:
    words = [*SHORT["vision"], f"data_dir={data_dir}", f"runs_dir={tmp_path}", "accelerator=cpu"]
    result = command("train", "-m", *words, "micro_batch=32,5,16", cwd=tmp_path)
    assert result.returncode == 2, "a refused trial is the sweep's exit code"
    found = [
        json.loads(path.read_text())["status"] for path in tmp_path.glob("vision/*/summary.json")
    ]
    assert found == ["finished", "finished"], f"the good trials must go on: {result.stderr}"


def test_paths_are_typed_as_they_are_and_kept_absolute(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accents, blanks, `=` and parentheses; a relative data_dir is the same from everywhere."""
    monkeypatch.chdir(tmp_path)
    run = Path("Café (1) a=b") / "é"
    assert door("train", *SHORT["vision"], f"run_dir={run}", "data_dir=dáta") == 0
    assert (tmp_path / run / "summary.json").is_file()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert door("evaluate", f"run={tmp_path / run}") == 0
    assert not list((tmp_path / "elsewhere").iterdir()), "it made the data again where it stood"


def test_a_second_ctrl_c_stops_at_once(command: Command, data_dir: Path, tmp_path: Path) -> None:
    code = (
        # A job that a shell started in the background ignores Ctrl-C until told otherwise.
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from {{ cookiecutter.package_name }}.training.monitor import Monitor; "
        "read = Monitor._read; stop = lambda: os.kill(os.getpid(), signal.SIGINT); "
        "Monitor._read = lambda *a: (read(*a), stop(), stop()); "
        "from {{ cookiecutter.package_name }}.__main__ import main; sys.exit(main())"
    )
    words = [
        *SHORT["vision"],
        "log_every_steps=2",
        f"data_dir={data_dir}",
        f"run_dir={tmp_path}/run",
    ]
    line = [sys.executable, "-c", code, "train", *words]
    result = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert result.returncode == 130, result.stderr
    assert "interrupted near step 2" in result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "Ctrl-C" in summary["reason"]


def test_a_sweep_does_not_write_two_trials_into_one_folder(
    command: Command, data_dir: Path, tmp_path: Path
) -> None:
    words = [*SHORT["vision"], f"data_dir={data_dir}", f"runs_dir={tmp_path}", "accelerator=cpu"]
    result = command("train", "-m", *words, "seed=1,2", "name=same", cwd=tmp_path)
    assert result.returncode == 2 and "an earlier trial of this sweep has it" in result.stderr
    assert len(list(tmp_path.glob("vision/same/summary.json"))) == 1

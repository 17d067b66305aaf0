"""Generated projects, for real: their own tests, training on one and two processes, evaluation."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from cases import HARD
from conftest import make
from tools import ROOT, run

pytestmark = [pytest.mark.project, pytest.mark.timeout(1800)]
SUMMARY_KEYS = {
    *("status", "steps", "epochs", "metrics", "throughput", "mfu", "peak_memory_gib"),
    *("precision", "strategy", "loader", "device", "world_size"),
}


def command(project: Path, env: Path, *arguments: str, cwd: Path) -> str:
    """The project's own console command, from a foreign working directory."""
    return run(env / "bin" / project.name, *arguments, cwd=cwd, timeout=900)


@pytest.fixture(scope="session", params=[1, 2], ids=["one process", "two processes"])
def trained(
    request: pytest.FixtureRequest,
    project: Path,
    project_env: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A short real training, in a run folder of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run_dir = folder / "run"
    overrides = (f"run_dir={run_dir}", f"devices={request.param}", "max_steps=20")
    command(project, project_env, "train", *overrides, cwd=folder)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == request.param
    return run_dir


def test_run_folder_explains_itself(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished"
    assert summary["steps"] == 20
    assert summary.keys() >= SUMMARY_KEYS
    for choice in ("precision", "strategy", "loader"):
        assert summary[choice]["reason"], choice
    config = yaml.safe_load((trained / "config.yaml").read_text(encoding="utf-8"))
    assert config["max_steps"] == 20
    manifest = json.loads((trained / "manifest.json").read_text(encoding="utf-8"))
    assert {"command", "packages", "seed"} <= manifest.keys()
    assert list((trained / "checkpoints").iterdir())
    with (trained / "metrics.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file))


def test_evaluate(project: Path, project_env: Path, trained: Path, tmp_path: Path) -> None:
    """The saved checkpoint gives, on one process, what training reported at its end."""
    before = (trained / "metrics.csv").read_bytes()
    overrides = (f"run={trained}", "devices=1")
    printed = command(project, project_env, "evaluate", *overrides, cwd=tmp_path)
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    (loss,) = re.findall(r"test_loss\W+([\d.]+)", printed)
    assert float(loss) == pytest.approx(summary["metrics"]["test_loss"], rel=0.02)
    assert (trained / "metrics.csv").read_bytes() == before


def test_task_picks_the_experiment(project: Path, trained: Path) -> None:
    task = HARD["task"] if project.name == HARD["project_slug"] else "vision"
    config = yaml.safe_load((trained / "config.yaml").read_text(encoding="utf-8"))
    assert config["experiment"] == task


def test_unknown_key_is_named(project: Path, project_env: Path, tmp_path: Path) -> None:
    printed = run(
        project_env / "bin" / project.name, "train", "no_such_key=1", cwd=tmp_path, code=2
    )
    assert "no_such_key" in printed


def test_own_tests(project: Path, project_env: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them once; with hard names again those that meet names: commands, files, locks."""
    hard = project.name == HARD["project_slug"]
    quick = ["ARGS=tests/test_door.py tests/test_runs.py tests/test_lock.py"] if hard else []
    printed = make(project, "test", project_env, *quick, timeout=1700)
    counted = [line for line in printed.splitlines() if " passed" in line]
    assert counted
    # What was skipped there, and why, is said here too.
    with capsys.disabled():
        print(f"\nOwn tests of {project.name}: {counted[-1]}")
        print(*(line for line in printed.splitlines() if line.startswith("SKIPPED")), sep="\n")


@pytest.mark.network
def test_own_tests_that_need_more(
    project: Path, project_env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An S3 server, Parquet: what no project has to install."""
    python = project_env / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    lock = ("--require-hashes", "-r", ROOT / "tests" / "extras.lock")
    run(*pip, *lock, "--target", tmp_path / "site", timeout=600)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    printed = make(project, "test", project_env, "ARGS=tests/test_s3.py tests/test_own_images.py")
    assert " passed" in printed
    assert "SKIPPED" not in printed


def test_own_lint(project: Path, project_env: Path) -> None:
    make(project, "lint", project_env)


def test_pre_commit(twin: Path, project_env: Path) -> None:
    """Green on a fresh project, as after the first `git add`; its hooks need no download."""
    run("git", "init", "--quiet", cwd=twin)
    run("git", "add", "--all", cwd=twin)
    python = project_env / "bin" / "python"
    # The hooks are commands of the environment, found as in an activated one.
    path = {"PATH": f"{python.parent}:/usr/bin:/bin", "VIRTUAL_ENV": str(project_env)}
    run(python, "-m", "pre_commit", "run", "--all-files", cwd=twin, env=path, timeout=900)
    assert run("git", "diff", "--stat", cwd=twin) == ""


def test_installed_wheel(project: Path, project_env: Path, tmp_path: Path) -> None:
    """As a wheel it holds its configs, and runs and data go to the working directory."""
    python = project_env / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, project)
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel)
    work = tmp_path / "work"
    work.mkdir()
    # Before the editable installation on the path, which would be the source tree again.
    (package,) = (door.parent.name for door in project.glob("src/*/__main__.py"))
    words = ("train", "debug=smoke", "name=first", "sample_prompt=null")
    run(python, "-m", package, *words, cwd=work, env={"PYTHONPATH": str(tmp_path / "site")})
    assert list(work.glob("runs/*/first/summary.json"))
    assert (work / "data").is_dir()


def test_demo(project_env: Path, template_copy: Path) -> None:
    """The first command of the README, cut short: it ends with the metrics and where the run is."""
    # The tools of this test run stand in for the .venv that a fresh clone would make.
    fixed = ("--old-file=setup", f"VENV={sys.prefix}", f"PROJECT_VENV={project_env}")
    printed = run("make", "demo", *fixed, "ARGS=max_steps=5", cwd=template_copy, timeout=900)
    result = printed[printed.index("\nStatus: finished after 5 steps") :]
    assert "test_accuracy" in result
    (line,) = [line for line in result.splitlines() if line.startswith("Run folder: ")]
    assert (template_copy / line.removeprefix("Run folder: ") / "summary.json").is_file()

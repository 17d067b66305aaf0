"""`reproduce`: the recorded code comes back, and the first step that differs is found."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, SHORT, Command, Door

from {{ cookiecutter.package_name }}.delivery.code_tree import code_tree
from {{ cookiecutter.package_name }}.delivery.compare import compare
from {{ cookiecutter.package_name }}.delivery.differences import (
    attempt_differences,
    machine_differences,
)
from {{ cookiecutter.package_name }}.environment.git import git_state
from {{ cookiecutter.package_name }}.errors import Refused

ROOT = Path(__file__).parents[1]
SOURCE = f"src/{PACKAGE}"

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=Me", "-c", "user.email=me@example.org", "-c", "core.autocrlf=false")
    line = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of this project in a subfolder of a repository of its own, committed."""
    place = tmp_path / "repository" / "my project"
    keep_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", place / "src", ignore=keep_out)
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, place / name)
    (place / "table.dat").write_bytes(bytes(range(256)))
    (place / "windows.txt").write_bytes(b"one\r\ntwo\r\n")
    (place / "old.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    git(tmp_path, "init", "-q", "repository")
    git(place, "add", "-A")
    git(place, "commit", "-q", "-m", "all")
    return place


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@needs_git
def test_the_code_comes_back_byte_for_byte_and_the_tree_goes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "table.dat").write_bytes(bytes(reversed(range(256))))
    (project / "windows.txt").write_bytes(b"one\r\n2\r\n")
    (project / "old.txt").write_bytes("th\u00e9\n".encode("latin-1"))
    (project / "pyproject.toml").unlink()
    (project / "nötig").mkdir()
    (project / "nötig" / "new.py").write_text("a = 'é'\n")
    (project / ".env").write_text("WANDB_API_KEY=hush\n")
    for setting in ("diff.noprefix", "diff.mnemonicPrefix", "diff.relative"):
        git(project, "config", setting, "true")
    state = json.loads(json.dumps(git_state(project)))
    assert "hush" not in json.dumps(state), ".env is ignored, so it is not kept"
    (project / ".env").unlink()
    before = contents(project)
    git(project, "stash", "--include-untracked")
    with code_tree(state, project, keep=False) as tree:
        assert contents(tree) == before
    with pytest.raises(KeyboardInterrupt), code_tree(state, project, keep=False) as tree:
        raise KeyboardInterrupt
    assert not tree.exists() and len(git(project, "worktree", "list").splitlines()) == 1


@needs_git
def test_what_git_cannot_say_is_said(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(Refused, match="git fetch.*--here"),
        code_tree({**git_state(project), "commit": "0" * 40}, project, keep=False),
    ):
        pass
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        patch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
        reason = git_state(project)["reason"]
        assert "ownership" in reason and "git config --global --add safe.directory" in reason
    assert "not a git repository" in git_state(tmp_path)["reason"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(project) == {"commit": None, "reason": "git is not installed"}


@needs_git
@pytest.mark.slow
def test_a_run_of_changed_code_is_identical_after_the_code_has_moved_on(
    project: Path, command: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncommitted change and untracked file included, from another directory."""
    monkeypatch.setenv("PYTHONPATH", str(project / "src"))
    run = project / "runs" / "first"
    model = project / SOURCE / "models" / "classifier.py"
    original = model.read_text()
    helper = project / SOURCE / "models" / "scale.py"
    helper.write_text("SCALE = 0.5\n")
    at = original.index("class ")
    model.write_text(f"{original[:at]}from .scale import SCALE\n\n\n{original[at:]}")
    model.write_text(model.read_text() + "\n\n_plain = ImageClassifier.loss\n")
    with model.open("a") as file:
        file.write("ImageClassifier.loss = lambda s, b: SCALE * _plain(s, b)  # type: ignore\n")
    words = [*SHORT["vision"], f"run_dir={run}", "test=false"]
    trained = command("train", *words, f"data_dir={data_dir}", "accelerator=cpu", cwd=project)
    assert trained.returncode == 0, trained.stderr
    helper.unlink()
    model.write_text(original)
    assert git(project, "status", "--short") == ""

    result = command("reproduce", str(run), "--json", cwd=project.parent)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["verdict"]["word"] == "identical" and report["verdict"]["steps"] == 4
    assert [d for d in report["differences"] if d["weight"] == "heavy"] == []
    assert report["reproduced"] == str(run / "reproduced")
    assert len(git(project, "worktree", "list").splitlines()) == 1

    result = command("reproduce", str(run), "--here", "--steps", "2", cwd=project)
    assert result.returncode == 1
    assert "differs from step 1 on (train_loss" in result.stdout
    assert "heavy:          code: " in result.stdout


@pytest.mark.slow
def test_a_value_that_differs_is_found_at_its_step(
    runs: dict[str, Path], door: Door, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["vision"], run)
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    row = next(row for row in rows if row["step"] == "3" and row["train_loss"])
    row["train_loss"] = str(float(row["train_loss"]) * 1.01)
    with (run / "metrics.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["git"] = git_state(tmp_path)
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert door("reproduce", str(run)) == 2
    assert "--here runs today's code" in capfd.readouterr().err
    assert door("reproduce", str(run), "--steps", "0") == 2
    assert not (run / "reproduced").exists()
    capfd.readouterr()
    assert door("reproduce", str(run), "--here", "--json") == 1
    verdict = json.loads(capfd.readouterr().out)["verdict"]
    assert (verdict["word"], verdict["step"], verdict["column"]) == ("differs", 3, "train_loss")
    assert verdict["relative"] == pytest.approx(0.01, rel=0.02)


def test_the_verdict_names_the_step_and_the_size() -> None:
    there = {(1, "a"): "1.0", (2, "a"): "nan", (3, "a"): "2.0", (3, "b"): "5"}
    assert compare(there, dict(there), 0.0, None).word == "identical"
    near = compare(there, {**there, (1, "a"): "1.0001", (3, "a"): "2.001"}, 1e-3, None)
    assert (near.word, near.step) == ("within tolerance", 3)
    far = compare(there, {**there, (1, "a"): "1.01", (3, "a"): "9"}, 1e-3, None)
    assert (far.word, far.step, far.there, far.here) == ("differs", 1, "1.0", "1.01")
    short = {key: value for key, value in there.items() if key != (3, "b")}
    assert compare(there, short, 1e-3, last_step=3).word == "identical"
    assert compare(there, short, 1e-3, None).here == "nothing"
    assert compare(there, {**there, (2, "a"): "1"}, 1e-3, None).step == 2


def test_differences_come_by_weight(runs: dict[str, Path]) -> None:
    there: dict[str, Any] = json.loads((runs["vision"] / "manifest.json").read_text())
    here = json.loads(json.dumps(there))
    here["host"], here["device"]["name"] = "elsewhere", "H100"
    here["packages"] |= {"torch": "9.9", "rich": "0.1"}
    found = machine_differences(there, here)
    assert [d.what for d in found] == ["device name", "torch", "1 other package", "host"]
    assert str(found[0]).startswith("heavy:") and "-> H100 (" in str(found[0])
    assert machine_differences(there, there) == [] and attempt_differences(there) == []
    there["attempts"] = [{"code": "0123", "from_step": 0}]
    assert "the last attempt's is taken" in str(attempt_differences(there)[0])


def test_help_answers_without_torch() -> None:
    code = (
        f"import sys; sys.argv[1:] = ['reproduce', '--help']; import {PACKAGE}.__main__ as door\n"
        "try:\n    door.main()\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

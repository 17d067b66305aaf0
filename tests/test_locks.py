"""The lock files say what pyproject.toml and requirements.in ask for, no more and no less."""

import shutil
import sys
from pathlib import Path

import pytest

from conftest import make
from tools import FOLDER, ROOT, run

STALE = "is stale: run `make lock` and commit the result"
pytestmark = [pytest.mark.network, pytest.mark.timeout(1200)]


@pytest.mark.project
def test_project_locks_are_fresh(project: Path, twin: Path, project_env: Path) -> None:
    """The project's own `make lock` onto a copy, without an upgrade, changes nothing."""
    lock(twin, project_env)
    for name in ("requirements.lock", "requirements.image.lock"):
        before = (project / name).read_text(encoding="utf-8")
        assert before == (twin / name).read_text(encoding="utf-8"), f"{name} {STALE}"


@pytest.mark.project
def test_stale_lock_is_noticed(project: Path, twin: Path, project_env: Path) -> None:
    """A dependency that is in no lock yet."""
    pyproject = twin / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    assert "\ndependencies = [" in text
    changed = text.replace("\ndependencies = [", '\ndependencies = ["markdownify",', 1)
    pyproject.write_text(changed, encoding="utf-8")
    lock(twin, project_env)
    assert "\nmarkdownify==" not in (project / "requirements.lock").read_text(encoding="utf-8")
    assert "\nmarkdownify==" in (twin / "requirements.lock").read_text(encoding="utf-8")


def lock(project: Path, env: Path) -> None:
    # Without its setup, which would install this copy in place of the project.
    make(project, "lock", env, "--old-file=setup")


def test_template_locks_are_fresh(tmp_path: Path) -> None:
    locks = ("requirements.lock", "tests/extras.lock")
    sources = ("Makefile", "requirements.in", "tests/extras.in", f"{FOLDER}/requirements.lock")
    for name in (*sources, *locks):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    run("make", "lock", f"VENV={sys.prefix}", "--old-file=setup", cwd=tmp_path, timeout=900)
    for name in locks:
        before = (ROOT / name).read_text(encoding="utf-8")
        assert before == (tmp_path / name).read_text(encoding="utf-8"), f"{name} {STALE}"

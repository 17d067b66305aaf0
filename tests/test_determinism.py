"""The output depends on the answers alone (L4, L5), and comes quickly."""

import os
import statistics
import sys
from pathlib import Path

import pytest

from cases import HARD
from tools import COOKIECUTTER, answer_options, assert_same, run

OPTIONS = ("--no-input", "--output-dir")
ELSEWHERE = {
    "again": {},
    "without git": {"PATH": "/nowhere"},
    "locale C": {"LC_ALL": "C", "LANG": "C", "LANGUAGE": "C"},
    "other time zone": {"TZ": "Asia/Tokyo"},
    "other hash seed": {"PYTHONHASHSEED": "7"},
    "git without identity": {"HOME": "/nowhere", "GIT_AUTHOR_NAME": "", "GIT_AUTHOR_EMAIL": ""},
    "narrow terminal": {"COLUMNS": "20", "TERM": "dumb"},
}


@pytest.fixture(scope="module")
def usual(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("usual")
    run(*COOKIECUTTER, template, *OPTIONS, output, *answer_options(HARD))
    return output / HARD["project_slug"]


@pytest.mark.parametrize("env", ELSEWHERE.values(), ids=ELSEWHERE)
def test_environment(template: Path, tmp_path: Path, usual: Path, env: dict[str, str]) -> None:
    run(*COOKIECUTTER, template, *OPTIONS, tmp_path / "out", *answer_options(HARD), env=env)
    assert_same(usual, tmp_path / "out" / HARD["project_slug"])


def test_inside_another_repository(template: Path, tmp_path: Path, usual: Path) -> None:
    """From that folder, without --output-dir: as a person does it. The repository is let alone."""
    run("git", "init", "--quiet", cwd=tmp_path)
    run(*COOKIECUTTER, template, "--no-input", *answer_options(HARD), cwd=tmp_path)
    assert_same(usual, tmp_path / HARD["project_slug"])
    assert not (tmp_path / HARD["project_slug"] / ".git").exists()
    status = run("git", "status", "--porcelain", cwd=tmp_path)
    assert status.splitlines() == [f"?? {HARD['project_slug']}/"]


def test_replayed(template: Path, tmp_path: Path, usual: Path) -> None:
    """Answers kept by cookiecutter, in a process that does not ask."""
    run(*COOKIECUTTER, template, *OPTIONS, tmp_path / "first", *answer_options(HARD))
    run(*COOKIECUTTER, template, "--replay", "--output-dir", tmp_path / "second")
    assert_same(usual, tmp_path / "second" / HARD["project_slug"])


def test_template_is_not_changed(template: Path, usual: Path) -> None:
    assert usual.is_dir()
    assert run("git", "status", "--porcelain", cwd=template) == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count children's time")
def test_defaults_take_less_than_a_second(template: Path, tmp_path: Path) -> None:
    """The whole command, Python's start and the hooks included, in processor time: it runs one
    thing after the other, so that is what a person waits for when nothing else runs."""
    seconds = []
    for attempt in range(5):
        before = os.times()
        run(*COOKIECUTTER, template, *OPTIONS, tmp_path / str(attempt))
        after = os.times()
        user = after.children_user - before.children_user
        seconds.append(user + after.children_system - before.children_system)
    assert statistics.median(seconds) < 1, seconds

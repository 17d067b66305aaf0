"""Small helpers of the tests: commands, and folders as dictionaries."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = "{{cookiecutter.project_slug}}"
COOKIECUTTER = (sys.executable, "-m", "cookiecutter")
CRUFT = (sys.executable, "-m", "cruft")
# Commits of the tests, on machines with and without an identity.
GIT = ("git", "-c", "user.name=Test", "-c", "user.email=test@example.org")


def run(
    *command: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    code: int | None = 0,
    timeout: int = 300,
) -> str:
    """Runs a command and returns what it printed. Another exit code than `code` fails the test."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=timeout,
    )
    if code is not None:
        shown = " ".join(map(str, command))
        assert done.returncode == code, f"{shown}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout


def answer_options(answers: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in answers.items()]


def tracked_files(folder: Path) -> list[Path]:
    """What git has or would add, relative to the folder."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=folder)
    return sorted(Path(name) for name in set(listed.split("\0")) if (folder / name).is_file())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def assert_same(left: Path, right: Path) -> None:
    """Content and executable bits, as git sees them."""
    run("git", "diff", "--no-index", "--no-renames", left, right)

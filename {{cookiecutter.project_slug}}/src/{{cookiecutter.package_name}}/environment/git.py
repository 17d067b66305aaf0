"""The code's state as git sees it: asked, never assumed. Without an answer there are words."""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

# Untracked files are no part of a diff; small texts among them are kept whole.
_TEXT_BYTES = 256 * 1024
_FILES = 200


def git(
    folder: Path, *words: str, data: bytes | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run git in `folder`; 127 with words in stderr where there is no git or no answer.

    Bytes, not text: a diff's line ends and odd letters must survive.
    """
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, input=data, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 127, b"", b"git did not answer in time")
    except OSError:
        return subprocess.CompletedProcess(command, 127, b"", b"git is not installed")


def complaint(answer: "subprocess.CompletedProcess[bytes]") -> str:
    """The first line of what git had to say, and the command that it advises."""
    lines = [line.strip() for line in answer.stderr.decode(errors="replace").splitlines()]
    advice = [line for line in lines if line.startswith("git config")]  # a folder of another owner
    return "; ".join([*lines[:1], *advice[:1]]) or f"git ended with {answer.returncode}"


def git_state(folder: Path) -> dict[str, Any]:
    """What brings the files below `folder` back: commit, diff, untracked files.

    `commit` is None with a `reason` when there is no git, no repository, no commit, or the folder
    belongs to another user and git declines it. `subfolder` is where the project lies in its
    repository; `diff` goes into `git apply` at the repository's root. What .gitignore names is left out.
    """
    commit = git(folder, "rev-parse", "HEAD")
    if commit.returncode != 0:
        return {"commit": None, "reason": complaint(commit)}
    # The user's own settings (colours, prefixes, an external diff) would make it unfit for apply.
    plain = ["--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames"]
    prefixes = ["--src-prefix=a/", "--dst-prefix=b/"]
    diff = git(folder, "-c", "diff.relative=false", "diff", *plain, *prefixes, "HEAD", "--", ".")
    others = git(folder, "ls-files", "-z", "--others", "--exclude-standard")
    for answer in (diff, others):
        if answer.returncode != 0:
            return {"commit": None, "reason": complaint(answer)}
    names = [os.fsdecode(name) for name in others.stdout.split(b"\0") if name]
    return {
        "commit": commit.stdout.decode().strip(),
        "subfolder": os.fsdecode(git(folder, "rev-parse", "--show-prefix").stdout[:-1]),
        "diff": diff.stdout.decode(errors="surrogateescape"),
        "untracked": {name: _kept(folder / name) for name in names[:_FILES]},
        "untracked_not_listed": max(0, len(names) - _FILES),
    }


def _kept(path: Path) -> dict[str, Any]:
    """Size, and hash and text where it is a small text file."""
    try:
        size = path.lstat().st_size
        if path.is_symlink() or not path.is_file() or size > _TEXT_BYTES:
            return {"bytes": size, "text": None}
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
    except OSError as error:
        return {"bytes": None, "text": None, "reason": error.strerror}
    try:
        text = None if b"\0" in content else content.decode()
    except UnicodeDecodeError:
        text = None
    return {"bytes": size, "sha256": digest, "text": text}

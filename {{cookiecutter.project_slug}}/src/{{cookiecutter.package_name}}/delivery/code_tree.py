"""A run's code as it was, in a git work tree of its own; the project's own files are not touched."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..environment.folders import shown
from ..environment.git import complaint, git
from ..errors import Refused

# A hook of the repository has no business in a tree that is made for one run.
_QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")


@contextmanager
def code_tree(state: dict[str, Any], project: Path, keep: bool) -> Iterator[Path]:
    """The project's folder with commit, changes and untracked files of `state` (git_state), for as
    long as the block runs.

    Args:
        project: this project here, in a repository that holds the commit.
        keep: leave the tree where it is.

    Raises:
        Refused: when the state is unknown or the commit is not here; `--here` is the way out.
    """
    _check(state, project)
    place = Path(tempfile.mkdtemp(prefix=f"{__name__.split('.')[0]}-"))
    root = place / "tree"
    try:
        added = git(project, *_QUIET, "worktree", "add", "--detach", str(root), state["commit"])
        if added.returncode != 0:
            raise Refused(f"git cannot make a work tree ({complaint(added)}); --here does without")
        _change(state, root)
        yield root / state["subfolder"]
    finally:
        if keep:
            print(f"{'kept:':<15} {root} (remove: git worktree remove --force {root})", flush=True)
        else:
            shutil.rmtree(place, ignore_errors=True)
            git(project, "worktree", "prune")


def _check(state: dict[str, Any], project: Path) -> None:
    commit = state.get("commit")
    if commit is None:
        why = state.get("reason", "it was not recorded")
        raise Refused(
            f"the run's code is not known to git ({why}); --here runs today's code instead"
        )
    found = git(project, "cat-file", "-e", commit + "^{commit}")
    if found.returncode == 0:
        return
    if git(project, "rev-parse", "HEAD").returncode != 0:
        why = complaint(git(project, "rev-parse", "HEAD"))
        raise Refused(
            f"{shown(project)} has no commit of the run ({why}); --here runs today's code"
        )
    raise Refused(
        f"commit {commit[:12]} is not in this repository: git fetch --all may bring it, --here runs "
        "today's code instead"
    )


def _change(state: dict[str, Any], root: Path) -> None:
    """Put the uncommitted changes and the untracked files into the tree."""
    diff = state["diff"].encode(errors="surrogateescape")
    if diff:
        applied = git(root, "apply", "--binary", "--whitespace=nowarn", "-", data=diff)
        if applied.returncode != 0:
            raise Refused(
                f"the run's changes do not apply ({complaint(applied)}); --here does without"
            )
    for name, file in state["untracked"].items():
        if file["text"] is not None:
            path = root / state["subfolder"] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file["text"].encode())


def lost_files(state: dict[str, Any]) -> list[str]:
    """Untracked files that the manifest knows by name only: large, or no text."""
    names = [name for name, file in state.get("untracked", {}).items() if file["text"] is None]
    more = state.get("untracked_not_listed", 0)
    return [*names, *([f"{more} more"] if more else [])]


def words_for(state: dict[str, Any]) -> str:
    """A git state in a few words, such as "1a2b3c4d5e6f, 12 changed lines, 1 untracked file"."""
    if state.get("commit") is None:
        return "unknown"
    lines = state["diff"].splitlines()
    changed = sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in lines if line)
    others = len(state["untracked"])
    parts = [state["commit"][:12]]
    parts += [f"{changed} changed lines"] * bool(lines) + [f"{others} untracked files"] * bool(
        others
    )
    return ", ".join(parts)


def child_environment(tree: Path) -> dict[str, str]:
    """Variables under which `python -m <package>` takes the package from the tree, and only from there."""
    paths = [str(tree / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # Safe path: a working directory with a package of this name must not come first.
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
    }

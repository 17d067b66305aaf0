"""Versions, git state and the driver: what a run needs to be understood later."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

# Environment variables that change results or placement. Anything else may hold a secret.
_TELLING = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NVIDIA_PYTORCH_VERSION",
    "SLURM_JOB_ID",
    "WANDB_MODE",
)


def packages() -> dict[str, str]:
    """Every installed distribution with its version, by name."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name))


def telling_variables() -> dict[str, str]:
    """The environment variables that matter for results, as they are set."""
    return {name: os.environ[name] for name in _TELLING if name in os.environ}


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the repository around `folder`.

    `commit` is None with a `reason` when there is no git, no repository, no commit, or the folder
    belongs to another user and git declines it.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit.returncode != 0:
        lines = commit.stderr.strip().splitlines() or ["git is not installed"]
        return {"commit": None, "reason": lines[0]}
    return {
        "commit": commit.stdout.strip(),
        "diff": _git(folder, "diff", "HEAD", "--", ".").stdout,
        "untracked": _git(folder, "ls-files", "--others", "--exclude-standard").stdout.splitlines(),
    }


def _git(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(command, 127, "", "")


def driver_version() -> str | None:
    """NVIDIA's kernel driver, e.g. "580.95.05"; None where there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def platform_facts() -> dict[str, str]:
    """Python, operating system and host."""
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "host": platform.node(),
    }

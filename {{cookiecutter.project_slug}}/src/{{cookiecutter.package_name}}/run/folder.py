"""A run is a folder that explains itself: config, manifest, metrics, checkpoints, summary."""

import contextlib
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from ..environment.cpus import granted_cpus
from ..environment.device import Device, cpu_name
from ..environment.folders import project_root, shown, writable_folder
from ..environment.software import (
    driver_version,
    git_state,
    packages,
    platform_facts,
    telling_variables,
)
from ..errors import Refused
from .lock import RunLock


class RunFolder:
    """Rank 0 writes here; on other ranks the same object knows the paths and writes nothing.

    Args:
        lock: what keeps a second run out; None for a folder that is only read.
    """

    def __init__(self, path: Path, writes: bool, lock: RunLock | None = None) -> None:
        self.path, self.writes, self.lock = path, writes, lock
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.csv"
        self.summary: dict[str, Any] = {}
        if not writes:
            return
        writable_folder(path, "run_dir")
        if lock is not None and (owner := lock.take()) is not None:
            raise Refused(f"{shown(path)} is in use by {owner}: choose another name")
        self.checkpoints.mkdir(exist_ok=True)
        with contextlib.suppress(OSError, ValueError):  # none: a new run
            self.summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))

    def write_config(self, config: DictConfig) -> None:
        """The resolved config, so that nothing has to be composed again."""
        if self.writes:
            write_text(self.path / "config.yaml", OmegaConf.to_yaml(config, resolve=True))

    def write_manifest(self, config: DictConfig, device: Device, choices: dict[str, Any]) -> None:
        """What made this run: command, code, software, hardware, seed, choices."""
        if not self.writes:
            return
        manifest = {
            "command": shlex.join(sys.argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **platform_facts(),
            "git": git_state(project_root()),
            "device": {"kind": device.kind, "name": device.name, "count": device.count},
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cpu": {
                "name": cpu_name(),
                "granted": granted_cpus(),
                "threads": torch.get_num_threads(),
            },
            "image": os.environ.get("NVIDIA_PYTORCH_VERSION"),
            "seed": config.seed,
            "environment": telling_variables(),
            "choices": choices,
            "packages": packages(),
        }
        write_json(self.path / "manifest.json", manifest)

    def update_summary(self, **values: Any) -> None:
        """Change keys of summary.json and write it, so that a killed run can be read."""
        self.summary.update(values)
        if self.writes:
            write_json(self.path / "summary.json", self.summary)


def write_json(path: Path, value: Any) -> None:
    """Write JSON by write-then-rename: a reader or a kill never meets half a file."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

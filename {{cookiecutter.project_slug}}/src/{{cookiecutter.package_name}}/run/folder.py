"""A run is a folder that explains itself: config, manifest, metrics, checkpoints, summary."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..environment.folders import shown, writable_folder
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

    def update_summary(self, **values: Any) -> None:
        """Change keys of summary.json and write it, so that a killed run can be read."""
        self.summary.update(values)
        if self.writes:
            write_json(self.path / "summary.json", self.summary)


def read_config(run: Path) -> DictConfig:
    """The config that a run was trained with.

    Raises:
        Refused: when there is none that can be read.
    """
    try:
        config = OmegaConf.load(run / "config.yaml")
        if not isinstance(config, DictConfig) or "model" not in config:
            raise ValueError("it is no training config")
    except FileNotFoundError as error:
        raise Refused(f"{shown(run)} is no run folder: it holds no config.yaml") from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        why = " ".join(str(error).split())[:120]
        raise Refused(f"{shown(run / 'config.yaml')} cannot be read ({why}): mend it") from error
    return config


def write_json(path: Path, value: Any) -> None:
    """Write JSON by write-then-rename: a reader or a kill never meets half a file."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are no text, in a diff or a file name
        text = json.dumps(value, indent=2)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)

"""What makes two runs the same: the settings that decide the result, and the code."""

import hashlib
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Top-level keys and groups that may change between two parts of one run: how long, on what, where,
# and what is shown. Everything else decides the result.
_FREE = {
    *("name", "run_dir", "runs_dir", "data_dir", "resume", "detach"),
    *("max_steps", "max_epochs", "stop_at", "test", "on_nan"),
    *("accelerator", "devices", "num_nodes", "num_workers", "micro_batch", "strategy", "loader"),
    *("compile", "profile", "progress", "log_every_steps", "logger", "sample_prompt"),
    *("checkpoint_every_steps", "every_minutes", "checkpoint_async"),
    *("keep_last", "keep_best", "keep_every_steps"),
}


def telling_settings(config: DictConfig) -> dict[str, Any]:
    """The settings that decide the result, by dotted key. Paths below data_dir are written relative
    to it, so that a run means the same on another machine."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    kept = {key: value for key, value in plain.items() if key not in _FREE}
    kept["data"] = {key: value for key, value in kept["data"].items() if key != "on_error"}
    return {
        key: value.replace(str(plain["data_dir"]), "<data_dir>")
        if isinstance(value, str)
        else value
        for key, value in _flat(kept)
    }


def _flat(node: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [pair for key in node for pair in _flat(node[key], f"{path}.{key}".lstrip("."))]
    return [(path, node)]


def fingerprint(settings: dict[str, Any]) -> str:
    """A short hash that is equal for equal settings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One entry for each setting that differs, readable."""
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key}={_word(before, key)} there, {_word(now, key)} here" for key in keys]


def _word(settings: dict[str, Any], key: str) -> str:
    value = settings.get(key)
    return "absent" if key not in settings else "null" if value is None else str(value)


def code_fingerprint(package: Path | None = None) -> str:
    """A short hash of this package's Python files, or of those in another folder. (What the config
    files say is in the settings.)"""
    package = package or Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()

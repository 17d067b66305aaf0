"""manifest.json: what made this run, and each of its attempts."""

import contextlib
import hashlib
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ..environment.cpus import granted_cpus
from ..environment.device import Device, cpu_name
from ..environment.folders import project_root, shown
from ..environment.git import git_state
from ..environment.software import (
    driver_version,
    image,
    packages,
    platform_facts,
    telling_variables,
)
from ..errors import Refused
from .folder import RunFolder, write_json
from .identity import code_fingerprint, fingerprint, telling_settings

MANIFEST = "manifest.json"
_ALWAYS = ("command", "started", "host", "from_step")  # what each attempt says for itself


def machine_facts(device: Device) -> dict[str, Any]:
    """Software and hardware of this process; `reproduce` holds them against a manifest."""
    return {
        **platform_facts(),
        "device": {
            "kind": device.kind,
            "name": device.name,
            "count": device.count,
            "names": [torch.cuda.get_device_name(i) for i in range(device.count)]
            if device.kind == "cuda"
            else [],
        },
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "cpu": {
            "name": cpu_name(),
            "granted": granted_cpus(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "image": image(),
        "environment": telling_variables(),
        "packages": packages(),
    }


def write_manifest(
    folder: RunFolder,
    config: DictConfig,
    device: Device,
    choices: dict[str, Any],
    data: dict[str, Any],
    from_step: int,
) -> None:
    """Write what made this attempt; what earlier attempts had otherwise stays under `attempts`.

    Args:
        data: `fingerprint`, and `splits`: what is in them (DataModule.contents).
        from_step: the optimizer step that this attempt goes on from.
    """
    if not folder.writes:
        return
    text = OmegaConf.to_yaml(config, resolve=True)
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    manifest = {
        "command": shlex.join(sys.argv),
        "overrides": list(overrides),
        "working_directory": os.getcwd(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": from_step,
        "config": {
            "fingerprint": fingerprint(telling_settings(config)),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
        "code": code_fingerprint(),
        "seed": config.seed,
        "git": git_state(project_root()),
        "data": data,
        "world_size": folder.summary.get("world_size", 1),
        "choices": choices,
        **machine_facts(device),
    }
    sizes = {split: part["counts"]["samples"] for split, part in data["splits"].items()}
    folder.update_summary(data={"fingerprint": data["fingerprint"], **sizes})
    before = read_manifest(folder.path)
    write_json(folder.path / MANIFEST, {**manifest, "attempts": _attempts(before, manifest)})


def read_manifest(run: Path) -> dict[str, Any]:
    """A run's manifest; empty when there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads((run / MANIFEST).read_text(encoding="utf-8"))
        return content
    return {}


def whole_attempts(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Every attempt with all it had, oldest first; the last one is the manifest itself."""
    latest = {key: value for key, value in manifest.items() if key != "attempts"}
    return [*({**latest, **attempt} for attempt in manifest.get("attempts", [])), latest]


def _attempts(before: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier attempts, oldest first, each without what is the same now."""
    return [
        {k: v for k, v in attempt.items() if k in _ALWAYS or now.get(k) != v}
        for attempt in (whole_attempts(before) if before else [])
    ]


def check_data(run: Path, contents: dict[str, Any], now: str) -> None:
    """Hold the data that is here against what the run in this folder saw.

    Args:
        contents, now: the data by split, and its fingerprint (DataModule.contents, .fingerprint).

    Raises:
        Refused: naming what came or went.
    """
    before = read_manifest(run).get("data")
    if before is None or before["fingerprint"] == now:
        return
    changes = "; ".join(data_changes(before["splits"], contents))
    raise Refused(
        f"{shown(run)} saw other data ({changes}): bring that back, or start anew on this with "
        "another name or resume=never"
    )


def data_changes(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What differs between two data sets, readable: counts first, else the split by name."""
    changes = []
    for split in sorted(there.keys() | here.keys()):
        old, new = there.get(split, {}), here.get(split, {})
        counts = [part.get("counts", {}) for part in (old, new)]
        keys = sorted(
            key for key in counts[0] | counts[1] if counts[0].get(key) != counts[1].get(key)
        )
        changes += [f"{split}: {k} {counts[0].get(k, 0)} -> {counts[1].get(k, 0)}" for k in keys]
        if not keys and old != new:
            changes.append(f"{split}: as many, but other content")
    return [*changes[:4], f"{len(changes) - 4} more"] if len(changes) > 5 else changes

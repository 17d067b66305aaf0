"""Which run this command is: a new one, or one that goes on, and from where."""

import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..environment.folders import here, is_remote, shown
from ..errors import Refused
from .folder import read_config
from .identity import code_fingerprint, differences, fingerprint, telling_settings
from .lock import RunLock
from .store import brought
from .weights import INDEX, find_checkpoint, read_index, step_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
WORDS = ("auto", "never")


@dataclass(frozen=True)
class Start:
    """Where a run is and where it goes on.

    Attributes:
        run_dir: the run's folder.
        reason: printed and kept; how this was chosen.
        checkpoint: what to go on from; None starts at step 0.
        step: optimizer steps done in that checkpoint.
        validated: whether the validation due at that step has been recorded.
        source: the path given as `resume=<path>` when this run branches off from another.
        was_finished: the run in this folder had ended.
    """

    run_dir: str
    reason: str
    checkpoint: str | None = None
    step: int = 0
    validated: bool = False
    source: str | None = None
    was_finished: bool = False


def choose_start(config: DictConfig) -> tuple[Start, RunLock]:
    """Decide by `resume`, `run_dir` and `name`, and lock the run if it exists already.

    Raises:
        Refused: for a name that could not be pasted back as an override, a run that is alive or was
            trained with other settings, or nothing to go on from.
    """
    folder = folder_of(config)
    source = None if config.resume in WORDS else _source(config.resume)
    if source is not None and source.run is not None:
        its_own = folder == source.run if is_named(config) else source.whole_run
        if its_own:
            return _go_on(source.run, config, source.checkpoint)
    if is_named(config) and _used(folder):
        if config.resume == "never":
            move_aside(folder)
        else:
            before = _summary(folder).get("resumed_from")
            if source is not None and before != branch_of(config):
                began = f"from {before}" if before else "without resume="
                raise Refused(
                    f"{shown(folder)} holds another run already, which began {began}: choose another name"
                )
            return _go_on(folder, config)
    elif not is_named(config) and config.resume != "never":
        found, passed_over = _unfinished(config)
        if found is not None:
            return found
        if source is None:
            return Start(str(folder), passed_over), RunLock(folder)
    if source is not None:
        reason = f"branches off from {shown(source.checkpoint)} at step {source.step}"
        start = Start(
            str(folder), reason, str(source.checkpoint), source.step, source=branch_of(config)
        )
        return start, RunLock(folder)
    return Start(str(folder), "a new run"), RunLock(folder)


def branch_of(config: DictConfig) -> str | None:
    """What `resume=<path>` names, the same from any directory; None without a path."""
    word = config.resume
    return None if word in WORDS else word if is_remote(word) else str(here(word))


def is_named(config: DictConfig) -> bool:
    """Whether the command says which run it means."""
    return bool(config.run_dir or config.name)


def folder_of(config: DictConfig) -> Path:
    """The run's folder on this machine; without a name a fresh one at each call.

    Raises:
        Refused: for a name that could not be pasted back as an override.
    """
    name = config.name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if not NAME.fullmatch(name):
        raise Refused(
            f"name={name}: use letters, digits, '.', '_' and '-' only, such as name=first-try"
        )
    return here(config.run_dir) if config.run_dir else _siblings(config) / name


def _siblings(config: DictConfig) -> Path:
    return here(config.runs_dir) / config.experiment


def _used(folder: Path) -> bool:
    return (folder / "summary.json").exists()


def _summary(folder: Path) -> dict[str, Any]:
    """A run's summary.json; empty when it cannot be read."""
    try:
        content: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


@dataclass(frozen=True)
class _Source:
    """What `resume=<path>` points to: a run's newest checkpoint (`whole_run`), or one checkpoint."""

    checkpoint: Path
    step: int
    run: Path | None
    whole_run: bool


def _source(word: str) -> _Source:
    path = brought(word, "last")
    if (path / "checkpoints" / INDEX).is_file():
        file = find_checkpoint(path, "last")
        return _Source(file, step_of(file), path, whole_run=True)
    if not path.exists():
        raise Refused(
            f"resume={word}: there is no such run folder or checkpoint; auto and never work too"
        )
    run = path.parent.parent
    return _Source(path, step_of(path), run if _used(run) else None, whole_run=False)


def newest_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The index entry with the highest step whose file is there and whole; None: none was saved yet.

    Raises:
        Refused: when there were some, and none is whole.
    """
    index = read_index(folder)
    if index is None:
        return None
    for entry in sorted(index["checkpoints"], key=lambda e: -e["step"]):
        path = folder / "checkpoints" / entry["file"]
        if path.is_dir() or (path.is_file() and path.stat().st_size == entry.get("bytes")):
            return dict(entry)
        print(f"{'warning:':<15} {shown(path)} is missing or cut short: passed over", flush=True)
    raise Refused(f"{shown(folder)} has no whole checkpoint left; resume=never starts afresh")


def _go_on(folder: Path, config: DictConfig, wanted: Path | None = None) -> tuple[Start, RunLock]:
    lock = RunLock(folder)
    owner = lock.take()
    if owner is not None:
        raise Refused(f"{shown(folder)} is in use by {owner}: wait for it, or choose another name")
    try:
        return _from_newest(folder, config, wanted), lock
    except Refused:
        lock.release()
        raise


def _from_newest(folder: Path, config: DictConfig, wanted: Path | None) -> Start:
    before = telling_settings(read_config(folder))
    different = differences(before, telling_settings(config))
    if different:
        raise Refused(
            f"{shown(folder)} was trained with other settings ({'; '.join(different)}): another name or "
            f"resume=never starts afresh, resume={shown(folder)} with a new name goes on with these"
        )
    summary, entry = _summary(folder), newest_checkpoint(folder)
    status = summary.get("status", "running")
    if status == "running":
        status = "killed"  # we have the lock, so nobody is running it
    finished = status == "finished"
    if entry is None:
        return Start(str(folder), f"{status} before its first checkpoint: from the beginning")
    file = folder / "checkpoints" / entry["file"]
    if wanted is not None and wanted != file:
        raise Refused(
            f"resume={shown(wanted)}: {shown(folder)} has gone on to step {entry['step']} since; "
            "give a new name to branch off from there"
        )
    changed = ", but the code has changed since" if _code_changed(summary) else ""
    reason = f"{status} at step {entry['step']}{changed}; resume=never starts afresh"
    validated = bool(entry.get("validated"))
    return Start(str(folder), reason, str(file), entry["step"], validated, was_finished=finished)


def _code_changed(summary: dict[str, Any]) -> bool:
    return summary.get("code") not in (None, code_fingerprint())


def _unfinished(config: DictConfig) -> tuple[tuple[Start, RunLock] | None, str]:
    """The newest run of the same settings and code that can go on and that nobody is running.

    Returns it, or None with the reason for a new run.
    """
    same, why = fingerprint(telling_settings(config)), "a new run"
    branch = branch_of(config)
    found = [(folder, _summary(folder)) for folder in _siblings(config).glob("*") if _used(folder)]
    for folder, summary in sorted(found, key=lambda f: f[1].get("started", ""), reverse=True):
        alike = summary.get("fingerprint") == same and summary.get("resumed_from") == branch
        if not alike or summary.get("status") == "finished":
            continue
        try:
            if newest_checkpoint(folder) is None:
                continue
        except Refused as damage:
            why = f"a new run: {damage}"
            continue
        if _code_changed(summary):
            why = f"a new run: the code has changed since {shown(folder)} stopped; name={folder.name} goes on"
            continue
        lock = RunLock(folder)
        if lock.take() is None:
            return (_from_newest(folder, config, None), lock), ""
        why = f"a new run: {shown(folder)} with the same settings is running"
    return None, why


def move_aside(folder: Path, aside: Path | None = None) -> None:
    """Rename a run's folder: to `aside`, or to its name with the next free number.

    Raises:
        Refused: when it is in use.
    """
    lock = RunLock(folder)
    owner = lock.take()
    if owner is not None:
        raise Refused(f"{shown(folder)} is in use by {owner}: wait for it, or choose another name")
    lock.release()
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    aside = aside or next(name for name in names if not name.exists())
    os.rename(folder, aside)
    print(f"{'moved:':<15} the earlier run to {shown(aside)}", flush=True)

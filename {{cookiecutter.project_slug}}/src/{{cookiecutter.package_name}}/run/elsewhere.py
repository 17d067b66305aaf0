"""Runs that lie on a store: what is needed to choose where to go on is brought here first."""

import socket
import time
from itertools import count

from omegaconf import DictConfig

from ..environment.folders import is_remote, url_of
from ..errors import Refused
from .identity import code_fingerprint, fingerprint, telling_settings
from .start import branch_of, folder_of, is_named, move_aside
from .store import BEAT, OWNER, Store, local_json

PATIENCE = 3.5 * BEAT  # seconds without a sign of life after which an owner counts as dead
POLL = 3.0
OLD = 3600.0  # seconds; so much older, a sign of life needs no waiting, whatever the clocks say


def bring(config: DictConfig) -> None:
    """Hold the local copies against the store, so that `choose_start` finds what it would find there.

    Raises:
        Refused: when the store cannot be used, or the run that is asked for is running elsewhere.
    """
    if not is_remote(config.run_dir or config.runs_dir):
        return
    if is_named(config):
        store = Store(str(url_of(folder_of(config))))
        store.check_access()
        _bring_named(store, config)
    else:
        runs = Store(f"{config.runs_dir}/{config.experiment}")
        runs.check_access()
        if config.resume != "never":
            _bring_unfinished(runs, config)


def _bring_named(store: Store, config: DictConfig) -> None:
    summary = store.read("summary.json")
    if not summary:
        return
    if owner := busy(store):
        raise Refused(f"{store.url} is in use by {owner}: wait for it, or choose another name")
    before = local_json(store.local / "summary.json")
    if config.resume == "never":
        _move_aside(store)
        return
    if before and before.get("started") != summary.get("started"):
        move_aside(store.local)  # a run of that name which is no longer the one there
    store.refresh()


def _bring_unfinished(runs: Store, config: DictConfig) -> None:
    """Bring the newest run of the same settings and code that can go on, and what is newer there of
    those that are here already."""
    same = fingerprint(telling_settings(config)), code_fingerprint()
    branch = branch_of(config)
    found = runs.summaries().items()
    for url, summary in sorted(found, key=lambda f: f[1].get("started", ""), reverse=True):
        if summary.get("fingerprint") != same[0] or summary.get("resumed_from") != branch:
            continue
        store = Store(url)
        goes_on = summary.get("status") != "finished" and summary.get("code") == same[1]
        owner = busy(store) if goes_on else None
        if owner and store.local.exists():
            raise Refused(
                f"{store.url} with the same settings is running: {owner}; name=... starts another"
            )
        if (goes_on and not owner) or store.local.exists():
            store.refresh()
        if goes_on and not owner:
            return


def busy(store: Store) -> str | None:
    """Who else is writing there; None: nobody, or a process that shows no sign of life any more.

    A store has no locks. Two machines that start in the same second are not noticed, nor is one that
    has been cut off from the store for longer than `PATIENCE`. On the same machine the lock decides.
    """
    first = store.read(OWNER)
    if not first or first["host"] == socket.gethostname() or time.time() - first["time"] > OLD:
        return None
    owner = f"process {first['pid']} on {first['host']}"
    text = f"{store.url} was left by {owner}, or is in use; up to {PATIENCE:.0f} s show which"
    print(f"{'waiting:':<15} {text}", flush=True)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(POLL)
        now = store.read(OWNER)
        if not now:
            return None
        if now["time"] != first["time"]:
            return owner
    return None


def _move_aside(store: Store) -> None:
    """Rename the run, here and there alike. Without renaming, a store copies and then deletes."""
    names = (f"{store.url}.{number}" for number in count(1))
    aside = next(s for s in map(Store, names) if not s.local.exists() and not s.fs.exists(s.path))
    if store.local.exists():
        move_aside(store.local, aside.local)
    store.again(lambda: store.fs.mv(store.path, aside.path, recursive=True))
    print(f"{'moved:':<15} the earlier run to {aside.url}", flush=True)

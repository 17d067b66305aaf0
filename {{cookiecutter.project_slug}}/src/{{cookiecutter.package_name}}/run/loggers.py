"""Weights & Biases or TensorBoard beside metrics.csv. Neither ever asks, and neither can stop training."""

import netrc
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from ..environment.folders import typed
from ..errors import PAUSED, Refused
from .folder import RunFolder

LOGGERS = ("none", "wandb", "tensorboard")


class _Wandb(WandbLogger):
    """Says the optimizer step to W&B itself, so that a run that goes on continues its history: what it
    repeats after a kill is dropped there, and nothing is counted anew from 0."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log({**metrics, "trainer/global_step": step}, step=step)


def build_logger(config: DictConfig, folder: RunFolder, from_step: int = 0) -> Logger | None:
    """The logger that `logger` names, writing below the run folder; None for `none`."""
    options = config.logger
    if not folder.writes:
        return None
    if options.name == "tensorboard":
        return TensorBoardLogger(
            folder.path, name="tensorboard", version="", purge_step=from_step + 1
        )
    if options.name == "wandb":
        return _wandb(config, options, folder)
    return None


def check_logger(options: DictConfig) -> str:
    """The mode that W&B will run in ("" for other loggers).

    Raises:
        Refused: for an unknown logger, or `online` without a key.
    """
    if options.name not in LOGGERS:
        raise Refused(f"logger.name={options.name}: choose one of {', '.join(LOGGERS)}")
    if options.name != "wandb":
        return ""
    mode = os.environ.get("WANDB_MODE") or options.mode
    if mode == "auto":
        mode = "online" if _has_key() else "offline"
    if mode == "online" and not _has_key():
        raise Refused(
            "logger.mode=online needs WANDB_API_KEY (or a netrc entry); logger.mode=offline does not"
        )
    return str(mode)


def _wandb(config: DictConfig, options: DictConfig, folder: RunFolder) -> Logger | None:
    # One W&B run per run folder; the random part keeps equal names of other clones apart.
    fresh = f"{config.experiment}-{folder.path.name}"[:50] + f"-{secrets.token_hex(4)}"
    identity = folder.summary.get("wandb", {}).get("id", fresh)
    settings: dict[str, Any] = {
        "project": options.project,
        "entity": options.entity,
        "tags": list(options.tags),
        "id": identity,
        "resume": "allow",
        "name": folder.path.name,
        "group": config.experiment,
        "dir": str(folder.path),
        "config": OmegaConf.to_container(config, resolve=True),
    }
    run, mode = _start_wandb(settings, check_logger(options))
    folder.update_summary(wandb={"id": identity, "mode": mode})
    print(f"{'wandb:':<15} {mode}{_sync_hint(folder) if mode == 'offline' else ''}", flush=True)
    return _Wandb(experiment=run, log_model=False) if run is not None else None


def _start_wandb(settings: dict[str, Any], mode: str) -> tuple[Any, str]:
    """Open the run; without an answer from the server go on offline, and without W&B if need be.

    Returns the run (None: without) and the mode that holds.
    """
    import wandb

    patience = float(os.environ.get("WANDB_INIT_TIMEOUT") or 30)
    quiet = wandb.Settings(silent=True, init_timeout=patience)
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            wandb.init(**settings, mode=attempt, settings=quiet)  # type: ignore[arg-type]
            return wandb.run, attempt
        except Exception as error:  # whatever tracking meets, training goes on
            print(f"wandb: {str(error).splitlines()[0]}", flush=True)
            wandb.teardown()  # its service still holds the id
    return None, "off: metrics.csv has everything"


def finish_loggers(code: int) -> None:
    """Close the W&B run, if one is open, so that a sweep's next trial gets its own."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        if code == PAUSED:
            wandb.run.mark_preempting()
        wandb.finish(exit_code=code)


def _sync_hint(folder: RunFolder) -> str:
    return f" (later: `wandb sync {typed(folder.path)}/wandb/offline-run-*`)"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False

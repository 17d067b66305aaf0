"""Weights & Biases or TensorBoard beside metrics.csv. Neither ever asks, and neither can stop training."""

import netrc
import os
import sys
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from ..environment.folders import shown
from ..errors import Refused
from .run_folder import RunFolder

LOGGERS = ("none", "wandb", "tensorboard")


def build_logger(config: DictConfig, folder: RunFolder) -> Logger | None:
    """The logger that `logger` names, writing below the run folder; None for `none`.

    Raises:
        Refused: for another name.
    """
    options = config.logger
    if options.name not in LOGGERS:
        raise Refused(f"logger.name={options.name}: choose one of {', '.join(LOGGERS)}")
    if not folder.writes:
        return None
    if options.name == "tensorboard":
        return TensorBoardLogger(folder.path, name="tensorboard", version="")
    if options.name == "wandb":
        return _wandb(config, options, folder)
    return None


def _wandb(config: DictConfig, options: DictConfig, folder: RunFolder) -> Logger:
    mode = os.environ.get("WANDB_MODE") or options.mode
    if mode == "auto":
        mode = "online" if _has_key() else "offline"
    if mode == "online" and not _has_key():
        raise Refused(
            "logger.mode=online needs WANDB_API_KEY (or a netrc entry); logger.mode=offline does not"
        )
    # One run per folder: the folder's name is the id, so that a run that goes on keeps its page.
    settings: dict[str, Any] = {
        "project": options.project,
        "entity": options.entity,
        "tags": list(options.tags),
        "id": f"{config.experiment}-{folder.path.name}"[:64],
        "name": folder.path.name,
        "group": config.experiment,
        "dir": str(folder.path),
    }
    settings["config"] = OmegaConf.to_container(config, resolve=True)
    run, mode = _start_wandb(settings, mode)
    print(f"{'wandb:':<15} {mode}{_sync_hint(folder) if mode == 'offline' else ''}", flush=True)
    return WandbLogger(experiment=run, log_model=False)


def _start_wandb(settings: dict[str, Any], mode: str) -> tuple[Any, str]:
    """Open the run; without an answer from the server go on offline. Returns it and the mode that holds."""
    import wandb

    quiet = wandb.Settings(silent=True, init_timeout=30)
    try:
        wandb.init(**settings, mode=mode, resume="allow", settings=quiet)  # type: ignore[arg-type]
    except wandb.errors.Error as error:
        print(f"wandb: {str(error).splitlines()[0]}; going on offline", flush=True)
        mode = "offline"
        wandb.init(**settings, mode="offline", settings=quiet)
    return wandb.run, mode


def finish_loggers(failed: bool) -> None:
    """Close the W&B run, if one is open, so that a sweep's next trial gets its own."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=int(failed))


def _sync_hint(folder: RunFolder) -> str:
    return f" (no key: later, `wandb sync {shown(folder.path)}/wandb/offline-run-*`)"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False

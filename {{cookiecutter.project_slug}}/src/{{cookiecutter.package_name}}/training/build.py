"""From config nodes to objects: the data module, the model, Lightning's Trainer."""

import logging
import warnings
from typing import Any

import hydra
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf

from ..environment.device import Device
from ..errors import Refused
from ..run.folder import RunFolder
from .ranks import Ranks


def plain(node: DictConfig) -> Any:
    """A config node as plain Python values: nothing of Hydra may end up in a checkpoint."""
    return OmegaConf.to_container(node, resolve=True)


def build(node: DictConfig, group: str, **more: Any) -> Any:
    """Instantiate a config node's `_target_` with plain Python values.

    Raises:
        Refused: naming the group, for keys that the target does not take or values it declines.
    """
    # _partial_: Hydra would turn a dataclass among the arguments into a plain dictionary.
    make = hydra.utils.instantiate(node, _convert_="all", _partial_=True)
    try:
        return make(**more)
    except TypeError as error:
        if "__init__() " not in str(error):
            raise
        raise Refused(f"{group}: {str(error).split('__init__() ')[-1]}") from error


def build_trainer(
    config: DictConfig,
    *,
    device: Device,
    ranks: Ranks,
    strategy: Strategy | str,
    precision: str,
    folder: RunFolder,
    loggers: list[Logger],
    callbacks: list[Callback],
    max_steps: int,
    accumulate: int = 1,
    writer: CheckpointIO | None = None,
) -> Trainer:
    """Lightning's Trainer with everything that we do ourselves turned off."""
    _quiet()
    every = config.get("validate_every_steps")
    profiler = None
    if config.get("profile"):
        profiler = PyTorchProfiler(folder.path, "profile", export_to_chrome=True)
    plugins: list[Any] = [writer] if writer is not None else []
    if strategy != "auto":
        plugins.append(ranks.environment)
    return Trainer(
        accelerator=device.kind,
        devices=ranks.devices,
        num_nodes=config.get("num_nodes", 1),
        strategy=strategy,
        plugins=plugins,
        precision=precision,  # type: ignore[arg-type]
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        val_check_interval=every * accumulate if every else 1.0,
        check_val_every_n_epoch=None if every else 1,
        limit_val_batches=config.get("limit_eval_batches") or 1.0,
        limit_test_batches=config.get("limit_eval_batches") or 1.0,
        num_sanity_val_steps=0,
        # FP8 tensors cannot be reshaped under inference_mode, and compiled graphs would be made twice.
        inference_mode=False,
        # None: Lightning leaves alone what deterministic.py has set.
        benchmark=None if config.get("deterministic") else True,
        logger=loggers or False,
        callbacks=callbacks,
        enable_checkpointing=any("Checkpoint" in type(c).__name__ for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # data/order.py shares the samples out
        log_every_n_steps=config.get("log_every_steps", 10),
        default_root_dir=folder.path,
        profiler=profiler,
    )


class SyncBuffers(Callback):
    """Give every rank rank 0's buffers before an evaluation, so that all judge one model."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            for buffer in pl_module.buffers():
                torch.distributed.broadcast(buffer, src=0)

    on_test_start = on_validation_start


def _quiet() -> None:
    """Silence advice that this project has answered: we print our own choices."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    answered = (
        "does not have many workers",
        "number of training batches",
        "sync_dist=True",
        "treespec",
        "is an experimental feature",
        "dataloader is not resumable",  # its sampler is, see data/order.py
        "returned a view tensor",  # FSDP2; nothing here changes an output in place
    )
    for words in answered:
        warnings.filterwarnings("ignore", f".*{words}.*")

"""After the last step: validate the end, test the best checkpoint, write down and tell."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from ..data.base import DataModule
from ..environment.folders import place, typed
from ..models.base import TrainableModule
from ..run.checkpoints import Checkpoints
from ..run.folder import RunFolder
from ..run.records import MetricsFile
from ..run.weights import load_weights
from .build import build, plain
from .monitor import Monitor, evaluated


def finish(
    config: DictConfig,
    folder: RunFolder,
    module: TrainableModule,
    data: DataModule,
    trainer: Trainer,
    checkpoints: Checkpoints,
    monitor: Monitor,
    metrics: MetricsFile,
) -> None:
    """Bring a run whose last step is done to its end; can be stopped and done again."""
    steps = trainer.global_step
    pace = monitor.pace(module, trainer)
    checkpoints.share(trainer)
    if not checkpoints.saved[-1]["validated"]:
        trainer.validate(module, datamodule=data, verbose=False)
    results = {**metrics.latest, **checkpoints.saved[-1]["metrics"]}
    best = folder.checkpoints / checkpoints.best["file"]
    best_step = load_weights(module, best)
    if config.test:
        trainer.test(module, datamodule=data, verbose=False)
        results |= evaluated("test", trainer)
    results = {name: value for name, value in results.items() if name not in ("step", "epoch")}
    if folder.writes:
        if config.sample_prompt is not None:
            _sample(config, folder, best, module.device)
        _tell(folder, results, best_step)
        _tell_skipped(folder, data)
    folder.update_summary(
        status="finished", steps=steps, metrics=results, best_step=best_step, **pace
    )


def _sample(config: DictConfig, folder: RunFolder, best: Path, device: torch.device) -> None:
    """Print and keep a text that the best checkpoint writes.

    By a model of its own: the trained one may lie in parts on several ranks, or be compiled for one
    length, and a text grows by a token at a time.
    """
    twin: Any = build(config.model, "model", optimizer=plain(config.optimizer))
    load_weights(twin, best)
    text = twin.to(device).sample(config.sample_prompt)
    (folder.path / "sample.txt").write_text(text, encoding="utf-8")
    print(f"\nsample (sample.txt):\n{text}\n", flush=True)


def _tell_skipped(folder: RunFolder, data: DataModule) -> None:
    if count := len(data.skipped.named()):
        folder.update_summary(skipped_samples=count)
        where = typed(folder.path / "skipped.txt")
        print(f"{'skipped:':<15} {count} samples that cannot be read ({where})", flush=True)


def _tell(folder: RunFolder, results: dict[str, float], best_step: int) -> None:
    """The last lines: what came out, and where it is."""
    print(f"{'finished:':<15} best checkpoint at step {best_step}", flush=True)
    for name, value in results.items():
        if name.startswith(("train_", "val_", "test_")):
            print(f"{name + ':':<15} {value:.4f}", flush=True)
    print(f"{'run:':<15} {place(folder.path)}", flush=True)

"""Checkpoints and their index: "last" and "best" by recorded step and metric, never by file name."""

import math
import shutil
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from .folder import RunFolder, write_json
from .weights import INDEX


class Checkpoints(Checkpoint):
    """Saves after each validation, every `every_steps` and at the end; keeps the last and the best.

    Args:
        monitor, mode: the validation metric that decides, and whether more ("max") or less is better.
            A value that is not finite is never best.
        keep_last, keep_best: how many of each stay on disk.
    """

    def __init__(
        self,
        folder: RunFolder,
        monitor: str,
        mode: str,
        keep_last: int,
        keep_best: int,
        every_steps: int | None,
    ) -> None:
        self.folder, self.monitor, self.sign = folder, monitor, 1 if mode == "min" else -1
        self.keep_last, self.keep_best, self.every_steps = keep_last, keep_best, every_steps
        self.saved: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        if self.every_steps and step and step % self.every_steps == 0:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, module: lightning.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            self.save(trainer)
        # Validated again after training: the weights are those of the newest file.
        self.record(trainer.callback_metrics)

    def on_train_end(self, trainer: Trainer, module: lightning.LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save this step once; every rank must call it."""
        step = trainer.global_step
        if self.saved and self.saved[-1]["step"] == step:
            return
        file = f"step-{step:08d}.ckpt"
        trainer.save_checkpoint(self.folder.checkpoints / file, weights_only=False)
        self.saved.append(
            {"file": file, "step": step, "epoch": trainer.current_epoch, "metrics": {}}
        )
        self._write()

    def record(self, metrics: dict[str, Any]) -> None:
        """Note the newest file's validation metrics."""
        if self.saved:
            values = {k: float(v) for k, v in metrics.items() if k.startswith("val_")}
            self.saved[-1]["metrics"] = {
                k: v if math.isfinite(v) else None for k, v in values.items()
            }
            self._write()

    @property
    def best(self) -> dict[str, Any]:
        """The best entry, the same on every rank; the last one when nothing was validated."""
        return (self._ranked() or self.saved[-1:])[0]

    def _ranked(self) -> list[dict[str, Any]]:
        judged = [entry for entry in self.saved if entry["metrics"].get(self.monitor) is not None]
        # Of equals the later one: it has seen more.
        return sorted(judged, key=lambda e: (self.sign * e["metrics"][self.monitor], -e["step"]))

    def _write(self) -> None:
        """Write the index, then remove the files that it no longer names (in this order: a kill
        between the two leaves a file too many, never a name without its file)."""
        ranked = self._ranked()
        keep = {e["file"] for e in (*ranked[: self.keep_best], *self.saved[-self.keep_last :])}
        gone = [entry for entry in self.saved if entry["file"] not in keep]
        self.saved = [entry for entry in self.saved if entry["file"] in keep]
        if not self.folder.writes:
            return
        index = {
            "monitor": self.monitor,
            "last": self.saved[-1]["file"],
            "best": ranked[0]["file"] if ranked else None,
            "checkpoints": self.saved,
        }
        write_json(self.folder.checkpoints / INDEX, index)
        for entry in gone:
            path = self.folder.checkpoints / entry["file"]
            if path.is_dir():  # a sharded checkpoint
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

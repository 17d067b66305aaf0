"""Checkpoints and their index: "last" and "best" by recorded step and metric, never by file name."""

import errno
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from ..environment.folders import typed
from ..errors import TrainingFailed
from .disk import amount, folder_bytes, free_bytes
from .folder import RunFolder, write_json
from .weights import INDEX, read_index
from .writer import CheckpointWriter


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, and when one is made besides those at each validation.

    Args:
        monitor, mode: the validation metric that decides, and whether more ("max") or less is better.
            A value that is not finite is never best.
        last, best: how many of each stay on disk.
        every_steps: one more every so many steps.
        milestones: those at multiples of this step stay for good.
    """

    monitor: str
    mode: str = "min"
    last: int = 1
    best: int = 1
    every_steps: int | None = None
    milestones: int | None = None

    def ranked(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The validated ones, best first; of equals the later one: it has seen more."""
        sign = 1 if self.mode == "min" else -1
        judged = [entry for entry in saved if entry["metrics"].get(self.monitor) is not None]
        return sorted(judged, key=lambda e: (sign * e["metrics"][self.monitor], -e["step"]))

    def kept(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of `saved` that stay, in their order."""
        steps = {e["step"] for e in (*self.ranked(saved)[: self.best], *saved[-self.last :])}
        many = self.milestones
        return [e for e in saved if e["step"] in steps or (many and e["step"] % many == 0)]

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step, validation or not."""
        return any(many and step % many == 0 for many in (self.every_steps, self.milestones))


class Checkpoints(Checkpoint):
    """Saves before each validation, when `retention` says so and at the end.

    Before, so that a stop in a long validation loses no step; what the validation found is added to
    the index after it.

    Args:
        saved_step: the step of the checkpoint in this folder that the run goes on from; what the
            index holds up to there is kept. None: the folder is new.
        guard: called before each save; raises, on all ranks, when the state must not be kept.
    """

    def __init__(
        self,
        folder: RunFolder,
        writer: CheckpointWriter,
        retention: Retention,
        saved_step: int | None,
        guard: Callable[[Trainer], None] | None = None,
    ) -> None:
        self.guard = guard
        self.folder, self.writer, self.retention = folder, writer, retention
        self.saved = [] if saved_step is None else self._found(saved_step)
        self.under_way: dict[str, Any] | None = None  # its file is still being written
        self.saved_step, self.last_step = saved_step, saved_step or 0
        self.disk_warned = False

    def _found(self, step: int) -> list[dict[str, Any]]:
        index = read_index(self.folder.path)
        if index is None:
            return []
        saved = [entry for entry in index["checkpoints"] if entry["step"] <= step]
        if self.folder.writes:  # what a kill left between two renames
            known = {INDEX, *(entry["file"] for entry in saved)}
            for path in self.folder.checkpoints.iterdir():
                if path.name not in known:
                    _remove(path)
        return saved

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step == self.last_step:
            return  # in the middle of an accumulation
        self.last_step = step
        if self.retention.due(step):
            self.save(trainer)
        elif self.under_way is not None and not self.writer.busy:
            self._commit()

    def on_validation_start(self, trainer: Trainer, module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, module: lightning.LightningModule) -> None:
        # Validated again after training: the weights are those of the newest file.
        self.record(trainer.callback_metrics)

    def on_train_end(self, trainer: Trainer, module: lightning.LightningModule) -> None:
        self.save(trainer, last=True)

    def save(self, trainer: Trainer, last: bool = False) -> None:
        """Save this step once; every rank must call it.

        Args:
            last: nothing follows, so wait until it is on the disk.

        Raises:
            TrainingFailed: on every rank, when the last one cannot be written.
        """
        step = trainer.global_step
        if step != self.saved_step:
            if self.guard is not None:
                self.guard(trainer)
            self._commit()
            self.saved_step, file = step, f"step-{step:08d}.ckpt"
            trainer.save_checkpoint(self.folder.checkpoints / file, weights_only=False)
            epoch = trainer.current_epoch
            entry = {"file": file, "step": step, "epoch": epoch, "validated": False, "metrics": {}}
            self.under_way = entry
            if not self.writer.background:
                self._commit()
        if last:
            self.share(trainer)
            if not any(entry["step"] == step for entry in self.saved):
                kept = (
                    f"that of step {self.saved[-1]['step']} is kept"
                    if self.saved
                    else "none is kept"
                )
                raise TrainingFailed(
                    f"the checkpoint of step {step} could not be written; {kept}: once the cause is "
                    "gone, the same command goes on from there"
                )

    def share(self, trainer: Trainer) -> None:
        """Wait for the file under way; after it every rank knows what rank 0 has."""
        self._commit()
        self.saved = trainer.strategy.broadcast(self.saved)

    def _all(self) -> list[dict[str, Any]]:
        return [*self.saved, *([self.under_way] if self.under_way else [])]

    def _commit(self) -> None:
        """The file under way is whole: name it in the index."""
        entry, self.under_way = self.under_way, None
        if entry is None:
            return
        self.writer.wait()
        if self.writer.error is not None:
            place = typed(self.folder.checkpoints / entry["file"])
            why = self._why(self.writer.error)
            print(f"{'warning:':<15} {place} could not be written: {why}", flush=True)
            return
        path = self.folder.checkpoints / entry["file"]
        if self.folder.writes and path.is_file():
            entry["bytes"] = path.stat().st_size
        self.saved.append(entry)
        self._write()
        self._look_ahead(path)

    def _why(self, error: OSError) -> str:
        """In words: torch's own error for a full disk does not speak of the disk."""
        free = free_bytes(self.folder.checkpoints)
        size = max((entry.get("bytes", 0) for entry in self.saved), default=0)
        if free < size or error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk is full ({amount(free)} are left, a checkpoint takes {amount(size)})"
        return str(error)

    def _look_ahead(self, path: Path) -> None:
        """Warn once when two more checkpoints like this one would not fit."""
        if not self.folder.writes or self.disk_warned:
            return
        size, free = folder_bytes(path), free_bytes(path.parent)
        if free < 2 * size:
            self.disk_warned = True
            have = (
                f"{amount(free)} are left for {typed(path.parent)}, {path.name} took {amount(size)}"
            )
            print(f"{'warning:':<15} the disk is nearly full: {have}; make room", flush=True)

    def record(self, metrics: dict[str, Any]) -> None:
        """Note the newest checkpoint's validation metrics."""
        if not self._all():
            return
        values = {k: float(v) for k, v in metrics.items() if k.startswith("val_")}
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._all()[-1].update(validated=True, metrics=finite)
        if self.under_way is None:
            self._write()

    @property
    def best(self) -> dict[str, Any]:
        """The best entry, the same on every rank; the last one when nothing was validated."""
        return (self.retention.ranked(self.saved) or self.saved[-1:])[0]

    def _write(self) -> None:
        """Write the index, then remove the files that it no longer names (in this order: a kill
        between the two leaves a file too many, never a name without its file)."""
        kept = self.retention.kept(self.saved)
        gone = [entry for entry in self.saved if entry not in kept]
        self.saved = kept
        if not self.folder.writes:
            return
        ranked = self.retention.ranked(kept)
        index = {
            "monitor": self.retention.monitor,
            "last": kept[-1]["file"],
            "best": ranked[0]["file"] if ranked else None,
            "checkpoints": kept,
        }
        write_json(self.folder.checkpoints / INDEX, index)
        for entry in gone:
            _remove(self.folder.checkpoints / entry["file"])


def _remove(path: Path) -> None:
    if path.is_dir():  # a sharded checkpoint
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

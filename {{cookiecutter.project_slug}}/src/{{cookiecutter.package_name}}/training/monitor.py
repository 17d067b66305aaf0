"""The loss, the pace and the progress line, without a device read outside the logging steps."""

import resource
import shutil
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ..environment.device import Device
from ..models.base import TrainableModule
from ..run.folder import RunFolder
from .choices import Choice
from .data_wait import DataWait
from .nan_guard import NanGuard
from .sharding import plain_tensor


class Monitor(Callback):
    """Collects on the device at every step; reads, logs and prints every `every` steps.

    Args:
        every: optimizer steps between two readings.
        guard: asked at each reading; knows which steps were skipped.
        progress: bar, lines or none.
        wait: how long the device had no data.
    """

    def __init__(
        self,
        folder: RunFolder,
        device: Device,
        every: int,
        progress: str,
        guard: NanGuard,
        wait: DataWait,
    ) -> None:
        self.folder, self.device, self.every, self.progress = folder, device, every, progress
        self.guard, self.wait = guard, wait
        self.step_loss: Tensor | None = None  # of the micro batches of this step
        self.loss_sum: Tensor | None = None  # over the steps since the last reading
        self.losses = 0  # how many those are, without skipped ones
        self.samples = self.steps = self.last_step = 0  # since the last reading
        self.seconds = 0.0
        self.started = 0.0
        # seconds, samples, steps of each reading, and the seconds in which the device had no data
        self.window: list[tuple[float, int, int, float]] = []
        self.flops = 0.0  # of one training sample
        self.epoch = 0  # of the last training batch; Lightning's own moves on when training ends
        self.found: dict[str, Any] = {}  # the open reading of the run that goes on

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """The loss since the last reading, of each rank: the next reading must be the same after a stop."""
        if not self.steps:
            return
        zero = torch.zeros((), device=module.device)
        own = (zero if self.loss_sum is None else self.loss_sum.detach()).reshape(1)
        sums = [torch.empty_like(own) for _ in range(trainer.world_size)]
        if trainer.world_size > 1:
            torch.distributed.all_gather(sums, own)
        else:
            sums = [own]
        checkpoint["reading"] = {
            "loss_sums": torch.cat(sums).cpu(),
            "losses": self.losses,
            "samples": self.samples,
            "steps": self.steps,
            "seconds": self.seconds + time.perf_counter() - self.started,
        }

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint.get("reading", {})

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.last_step = trainer.global_step
        self.started = time.perf_counter()
        if self.found:
            sums = self.found["loss_sums"].to(module.device)
            alike = len(sums) == trainer.world_size
            self.loss_sum = sums[trainer.global_rank] if alike else sums.mean()
            self.losses = self.found.get("losses", self.found["steps"])
            self.samples, self.steps = self.found["samples"], self.found["steps"]
            self.seconds, self.found = self.found["seconds"], {}

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        if not self.flops and self.device.peak_bf16_tflops:
            self.flops = module.flops_per_sample(batch)

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.epoch = trainer.current_epoch
        loss = outputs["loss"]  # Lightning has divided it by the accumulation already
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss
        self.samples += module.samples_in(batch) * trainer.world_size
        if trainer.global_step == self.last_step:
            return  # in the middle of an accumulation
        self.last_step = trainer.global_step
        self.steps += 1
        if not self.guard.last_skipped:
            self.losses += 1
            self.loss_sum = (
                self.step_loss if self.loss_sum is None else self.loss_sum + self.step_loss
            )
        self.step_loss = None
        if self.last_step % self.every == 0 or self.last_step == trainer.max_steps:
            self._read(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        """Validation and checkpoints are not training time."""
        if trainer.state.fn == "fit" and self.started:  # else one due before the first step
            self._stop_clock()

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn == "fit":
            self.started = time.perf_counter()
        values = evaluated("val", trainer)
        self._log(trainer, values)
        self._show(trainer, values, final=True)

    def on_test_end(self, trainer: Trainer, module: Any) -> None:
        self._log(trainer, evaluated("test", trainer))

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        """Leave the rewritten line, so that the message gets one of its own."""
        if self.progress == "bar" and trainer.is_global_zero:
            print(flush=True)

    def _stop_clock(self) -> None:
        if self.device.kind == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self.started

    def _read(self, trainer: Trainer, module: TrainableModule) -> None:
        """The one place that waits for the device."""
        self.guard.check(trainer)
        values: dict[str, float] = {}
        if self.loss_sum is not None and self.losses:  # not all were skipped
            mean = trainer.strategy.reduce(self.loss_sum / self.losses, reduce_op="mean")
            values["train_loss"] = float(mean)
        self._stop_clock()
        waited = self.wait.read(trainer, module.device, self.seconds)
        self.window.append((self.seconds, self.samples, self.steps, waited))
        values["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        if module.grad_norm is not None:
            values["grad_norm"] = float(plain_tensor(module.grad_norm))
        values["samples_per_s"] = self.samples / self.seconds
        self._log(trainer, values)
        self._show(trainer, values)
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        self.folder.update_summary(
            steps=trainer.global_step,
            epochs=round(trainer.global_step / per_epoch, 3),
            **self.pace(module, trainer),
        )
        self.loss_sum = None
        self.samples = self.steps = self.losses = 0
        self.seconds = 0.0
        self.started = time.perf_counter()

    def check_finite(self, trainer: Trainer) -> None:
        """Before a checkpoint: raise TrainingFailed on all ranks if NaN or Inf has been met."""
        self.guard.check_state(trainer)

    def pace(self, module: TrainableModule, trainer: Trainer) -> dict[str, Any]:
        """Throughput, MFU and peak memory so far; the first reading (warm-up) counts only alone."""
        rows = self.window[1:] or self.window
        if not rows:
            return {}
        seconds, samples, steps, waited = (sum(column) for column in zip(*rows, strict=True))
        rate = samples / seconds
        throughput = {"samples_per_s": round(rate, 2), "step_ms": round(1e3 * seconds / steps, 3)}
        throughput["tokens_per_s"] = (
            round(rate * getattr(module, "tokens_per_sample", 0), 1) or None
        )
        throughput["data_wait"] = round(waited / seconds, 4)
        return {
            "throughput": throughput,
            "mfu": self._mfu(rate, trainer.world_size).plain(),
            "peak_memory_gib": round(self._peak_memory(), 3),
        }

    def _mfu(self, samples_per_s: float, ranks: int) -> Choice:
        peak = self.device.peak_bf16_tflops
        if peak is None:
            return Choice(None, f"no datasheet peak is known for {self.device.name}")
        used = samples_per_s * self.flops / ranks
        reason = f"model FLOPs over {peak:g} TFLOP/s, the dense bf16 peak of {self.device.name}"
        return Choice(round(used / (peak * 1e12), 4), reason)

    def _peak_memory(self) -> float:
        if self.device.kind == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def _log(self, trainer: Trainer, values: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
            logger.save()

    def _show(self, trainer: Trainer, values: dict[str, float], final: bool = False) -> None:
        if self.progress == "none" or not trainer.is_global_zero:
            return
        total = trainer.max_steps
        parts = [f"step {trainer.global_step:>{len(str(total))}}/{total}", f"epoch {self.epoch}"]
        parts += [
            f"{name} {value:.4g}" for name, value in values.items() if name != "samples_per_s"
        ]
        if not final:
            rate = values["samples_per_s"]
            left = round((total - trainer.global_step) * self.samples / self.steps / rate)
            parts += [f"{rate:,.0f} samples/s", f"{left // 60}:{left % 60:02} left"]
        line = "  ".join(parts)
        if self.progress == "bar":
            # A line that wraps could not be taken back.
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{line}", end="\n" if final else "", flush=True)
        else:
            print(line, flush=True)


def evaluated(split: str, trainer: Trainer) -> dict[str, float]:
    """The metrics of the evaluation that has just ended."""
    found = trainer.callback_metrics.items()
    return {name: float(value) for name, value in found if name.startswith(f"{split}_")}

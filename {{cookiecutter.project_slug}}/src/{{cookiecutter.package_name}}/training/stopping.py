"""Stopping between two steps: all ranks agree, a complete checkpoint, then the end."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import distributed

from ..errors import Stopped
from ..run.checkpoints import Checkpoints
from ..run.signals import Signals


class Agreement:
    """Wishes of any rank, known to all ranks at the same step.

    The answer is that of the question before: it travelled while the step ran, so nobody waits. It
    goes over gloo between the CPUs, and the GPUs' queues are left alone.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.group: Any = distributed.new_group(backend="gloo", timeout=timeout)
        self.sent: tuple[Any, torch.Tensor] | None = None

    def ask(self, wishes: list[bool]) -> list[bool]:
        """Which of the wishes any rank has had; the same on every rank."""
        before = self.sent
        box = torch.tensor(wishes, dtype=torch.uint8)
        work = distributed.all_reduce(box, distributed.ReduceOp.MAX, self.group, async_op=True)
        self.sent = (work, box)
        if before is None:
            return [False] * len(wishes)
        before[0].wait()
        return [bool(wish) for wish in before[1]]


class Stopping(Callback):
    """Ends training on a signal or at `stop_at`, and saves every so many minutes.

    Args:
        stop_at: the step to pause at; None: none.
        minutes: between two checkpoints by the clock; None: none.
        timeout: how long the ranks wait for one another.
    """

    def __init__(
        self,
        signals: Signals,
        checkpoints: Checkpoints,
        stop_at: int | None,
        minutes: float | None,
        timeout: timedelta,
    ) -> None:
        self.signals, self.checkpoints, self.stop_at = signals, checkpoints, stop_at
        self.seconds = minutes * 60 if minutes else None
        self.timeout = timeout
        self.agreement: Agreement | None = None
        self.last_step = 0
        self.saved_at = time.monotonic()

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if trainer.world_size > 1 and self.agreement is None:
            self.agreement = Agreement(self.timeout)

    def _take_over(self, trainer: Trainer) -> None:
        # Lightning's handler broadcasts from within a signal, and it asks all ranks for a GPU tensor
        # at every step; both would be in the way.
        self.signals.install()
        self.signals.soft = True
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._take_over(trainer)
        self.last_step = trainer.global_step
        self._pause(trainer)

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self._take_over(trainer)

    def on_test_start(self, trainer: Trainer, module: Any) -> None:
        self._take_over(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step == self.last_step:
            return  # in the middle of an accumulation
        self.last_step = step
        stop, save = self._ask()
        self._pause(trainer)
        if stop:
            self._stop(trainer, self.signals.wish or "a signal on another rank")
        if save:
            self.checkpoints.save(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._ask()[0]:
            self._stop(trainer, self.signals.wish or "a signal on another rank")

    on_test_batch_end: Callable[..., None] = on_validation_batch_end

    def _pause(self, trainer: Trainer) -> None:
        if self.stop_at is not None and trainer.global_step >= self.stop_at:
            self._stop(trainer, f"stop_at={self.stop_at}")

    def _ask(self) -> list[bool]:
        late = bool(self.seconds) and time.monotonic() - self.saved_at > (self.seconds or 0)
        wishes = [self.signals.wish is not None, late]
        answer = self.agreement.ask(wishes) if self.agreement else wishes
        if answer[1]:
            self.saved_at = time.monotonic()
        return answer

    def _stop(self, trainer: Trainer, why: str) -> None:
        self.checkpoints.save(trainer, last=True)
        raise Stopped(why, trainer.global_step)

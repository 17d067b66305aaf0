"""Where a resumed run goes on: Lightning's counters and the random numbers, from the step alone."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from ..data.order import seed_of
from ..models.base import TrainableModule


class Position(Callback):
    """Puts a resumed run between the step it had finished and the next.

    What Lightning saves of its loops depends on the hook that a checkpoint was written in, on the
    number of ranks and on the accumulation. It is not used: the counters follow from the step, and
    what is random in a step (dropout) from (seed, step, micro batch, rank). So nothing that happened
    before the step matters, and a run goes on with another number of devices too.

    Args:
        seed: of the run.
        rank: of this process.
        steps_per_epoch: optimizer steps.
        accumulate: micro batches in a step.
        validate_every: steps between two validations; None: after each epoch.
        validated: whether the validation due at the step that is resumed was done.
    """

    def __init__(
        self,
        seed: int,
        rank: int,
        steps_per_epoch: int,
        accumulate: int,
        validate_every: int | None,
        validated: bool,
    ) -> None:
        self.seed, self.rank = seed, rank
        self.steps_per_epoch, self.accumulate = steps_per_epoch, accumulate
        self.validate_every, self.validated = validate_every, validated
        self.resumed = False

    def validation_is_due(self, step: int) -> bool:
        """Whether training validates after this step."""
        return step > 0 and step % (self.validate_every or self.steps_per_epoch) == 0

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.resumed = True
        loops = trainer.fit_loop.state_dict()  # as they are before the first step
        loops.update(self._counters(checkpoint["global_step"]))
        checkpoint["loops"] = {"fit_loop": loops}

    def _counters(self, step: int) -> dict[str, Any]:
        epoch, steps = divmod(step, self.steps_per_epoch)
        begun = epoch + (steps > 0)
        epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
        total, current = step * self.accumulate, steps * self.accumulate
        return {
            "epoch_progress": {"total": epochs, "current": dict(epochs)},
            "epoch_loop.batch_progress": {
                "total": _all(total),
                "current": _all(current),
                "is_last_batch": False,
            },
            "epoch_loop.scheduler_progress": {
                "total": {"ready": step, "completed": step},
                "current": {"ready": steps, "completed": steps},
            },
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": {
                        "total": {"ready": step, "completed": step},
                        "current": {"ready": steps, "completed": steps},
                    },
                    "zero_grad": {
                        "total": {"ready": step, "started": step, "completed": step},
                        "current": {"ready": steps, "started": steps, "completed": steps},
                    },
                }
            },
        }

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if not self.resumed:
            return
        self._settings_of_now(trainer, module)
        if self.validation_is_due(trainer.global_step) and not self.validated:
            # As Lightning's training loop does it after a step.
            loop = trainer.fit_loop.epoch_loop
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = None

    def _settings_of_now(self, trainer: Trainer, module: TrainableModule) -> None:
        """Moments come from the checkpoint, rates from the config: they can differ when a run
        branches off from another."""
        groups = trainer.optimizers[0].param_groups
        scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
        for group, settings in zip(groups, module.group_settings, strict=True):
            group.update(settings)
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        seed = seed_of(self.seed, "step", trainer.global_step, index % self.accumulate, self.rank)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (libraries that draw from it)


def _all(count: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)

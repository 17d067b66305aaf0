"""How much of the training time goes by without data, and a word when it is too much."""

import torch
from lightning.pytorch import Trainer

from ..data.wait import WaitClock
from ..environment.cpus import granted_cpus

TOO_MUCH = 0.05  # of the time
SURE = 5.0  # seconds of training before anything is said


class DataWait:
    """Args: clock: the training loader's."""

    def __init__(self, clock: WaitClock) -> None:
        self.clock, self.warned = clock, False

    def seconds(self, trainer: Trainer, device: torch.device) -> float:
        """Without data since the last call, on the rank that waited longest: the others waited for it."""
        seconds = torch.tensor(self.clock.take(), device=device)
        if trainer.world_size > 1:
            torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
        return float(seconds)

    def warn(self, trainer: Trainer, seconds: float, waited: float) -> None:
        """Say once that the loader is what limits training."""
        if self.warned or seconds < SURE or waited < TOO_MUCH * seconds:
            return
        self.warned = True
        workers = getattr(trainer.train_dataloader, "num_workers", 0)
        # Without any, loading is this process's own work: on a CPU somebody has to do it.
        if trainer.is_global_zero and workers:
            print(
                f"{'warning:':<15} training waits for data {waited / seconds:.0%} of the time with "
                f"num_workers={workers} ({granted_cpus()} CPUs are granted): more workers, smaller "
                "files, a faster disk, or less augmentation",
                flush=True,
            )

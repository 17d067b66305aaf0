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
        self.clock = clock
        self.warm = self.warned = False
        self.seconds = self.waited = 0.0  # since the first reading, which is warm-up

    def read(self, trainer: Trainer, device: torch.device, seconds: float) -> float:
        """Seconds without data of the `seconds` since the last reading, on the rank that waited longest:
        the others waited for it. Says once when the loader is what limits training."""
        waited = self.clock.take()
        if trainer.world_size > 1:
            longest = torch.tensor(waited, device=device)
            torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX)
            waited = float(longest)
        if self.warm:
            self.seconds, self.waited = self.seconds + seconds, self.waited + waited
            self._warn(trainer)
        self.warm = True
        return waited

    def _warn(self, trainer: Trainer) -> None:
        if self.warned or self.seconds < SURE or self.waited < TOO_MUCH * self.seconds:
            return
        self.warned = True
        workers = getattr(trainer.train_dataloader, "num_workers", 0)
        # Without any, loading is this process's own work: on a CPU somebody has to do it.
        if trainer.is_global_zero and workers:
            print(
                f"{'warning:':<15} training waits for data {self.waited / self.seconds:.0%} of the time with "
                f"num_workers={workers} ({granted_cpus()} CPUs are granted): more workers, smaller "
                "files, a faster disk, or less augmentation",
                flush=True,
            )

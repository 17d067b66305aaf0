"""The data module that all tasks share: three splits behind one kind of loader."""

import hashlib
import json
import signal
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import Refused
from .order import EvalOrder, Keys, TrainOrder
from .skipped import Skipped
from .wait import WaitClock, WatchedLoader


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made; the same for every task.

    Args:
        batch_size: samples per optimizer step over all ranks.
        micro_batch: samples per rank and forward pass.
        rank, ranks: this process among all.
        seed: of order and augmentation.
        num_workers: loader processes of this rank; 0 loads in the training process.
        prefetch_factor: batches that each worker holds ready.
        pin_memory: page-locked host memory, for copies that overlap with the GPU's work.
        overfit_batches: train on these first optimizer steps' worth of samples only.
    """

    batch_size: int
    micro_batch: int
    rank: int = 0
    ranks: int = 1
    seed: int = 1
    num_workers: int = 0
    prefetch_factor: int = 4
    pin_memory: bool = False
    overfit_batches: int | None = None


class BatchDataset(Dataset[Any]):
    """A dataset that is asked for whole batches: `dataset[[(epoch, index), ...]]`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, keys: Keys) -> Any: ...

    def counts(self) -> dict[str, int]:
        """How much there is; `samples` must be among it. Tells what came or went."""
        return {"samples": len(self)}

    def digest(self) -> str:
        """A cheap hash of what the samples are made of; "" when only the counts are known."""
        return ""


class DataModule(lightning.LightningDataModule):
    """Subclasses fill `splits` in `setup`; `prepare_data` may run many times and at the same time.

    Args:
        on_error: what becomes of a sample that cannot be read: `raise` or `skip`.
    """

    def __init__(self, options: LoaderOptions, on_error: str = "raise") -> None:
        super().__init__()
        self.options, self.skipped, self.wait = options, Skipped(on_error), WaitClock()
        self.splits: dict[str, BatchDataset] = {}
        self.first_step = 0  # optimizer steps that this run took before it was stopped

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch (known after `setup`)."""
        return self._train_length() // self.options.batch_size

    @cached_property
    def contents(self) -> dict[str, dict[str, Any]]:
        """What each split holds (known after `setup`): counts and a digest."""
        found = self.splits.items()
        return {split: {"counts": part.counts(), "digest": part.digest()} for split, part in found}

    def fingerprint(self) -> str:
        """A short hash that is equal for equal data, wherever it lies. What it covers is what the
        datasets' `digest` says: names and sizes, and samples of the bytes; not every byte."""
        text = json.dumps(self.contents, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def train_dataloader(self) -> DataLoader[Any]:
        options = self.options
        order = TrainOrder(
            self._train_length(),
            options.batch_size,
            options.micro_batch,
            options.rank,
            options.ranks,
            options.seed,
            self.first_step,
        )
        if len(order) == 0:
            raise Refused(
                f"batch_size={options.batch_size}, but there are only {len(self.splits['train'])} "
                "training samples: choose a smaller batch_size"
            )
        loader = self._loader(self.splits["train"], order)
        loader.clock = self.wait
        return loader

    def val_dataloader(self) -> DataLoader[Any]:
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._eval_loader("test")

    def _train_length(self) -> int:
        length = len(self.splits["train"])
        if self.options.overfit_batches:
            length = min(length, self.options.overfit_batches * self.options.batch_size)
        return length

    def _eval_loader(self, split: str) -> DataLoader[Any]:
        dataset, options = self.splits[split], self.options
        order = EvalOrder(len(dataset), options.micro_batch, options.rank, options.ranks)
        return self._loader(dataset, order)

    def _loader(self, dataset: BatchDataset, order: Sampler[Keys]) -> WatchedLoader:
        workers = self.options.num_workers
        # batch_size=None: a sampler's item is a whole batch of keys, and so is what comes back.
        return WatchedLoader(
            dataset,
            batch_size=None,
            sampler=order,
            num_workers=workers,
            pin_memory=self.options.pin_memory,
            persistent_workers=workers > 0,
            prefetch_factor=self.options.prefetch_factor if workers > 0 else None,
            worker_init_fn=_leave_stopping_to_the_trainer,
        )


def _leave_stopping_to_the_trainer(worker: int) -> None:
    """A signal to the whole process group must not take the workers away from under a trainer that
    still has a checkpoint to write; it ends them itself."""
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)

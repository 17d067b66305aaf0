"""Order and randomness as pure functions of (seed, epoch, index).

Nothing here depends on workers, on the number of ranks or on what ran before: one device and eight
see the same global batches, and a run that was stopped knows where it was from the step alone.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

# A batch's samples as (epoch, index). The index PAD stands for no sample: it only fills the last
# evaluation batch, so that every rank runs equally many batches of one shape.
Keys = list[tuple[int, int]]
PAD = -1
IGNORE = -100  # the label of a padded sample; losses and metrics leave it out


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that differs when any part differs."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def same_chance(seed: int, step: int, probability: float) -> bool:
    """A throw that falls alike on every rank: for branches that all ranks must take together."""
    return seed_of(seed, "chance", step) / 2**63 < probability


class TrainOrder(Sampler[Keys]):
    """Batches of one rank: each epoch a new permutation, cut into global batches of `batch_size`.

    The global batch of step s is the same for any number of ranks; the ranks share it out in micro
    batches. What does not fill a global batch waits for another epoch, so every epoch has equally
    many steps on every rank.

    Args:
        length: number of samples.
        batch_size: samples per optimizer step over all ranks.
        micro_batch: samples per rank and forward pass; batch_size / (micro_batch * ranks) of them
            make a step.
        rank, ranks: this process among all.
        seed: of the permutation.
        step: optimizer steps that were taken before; the order goes on after them, in mid-epoch too.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        seed: int,
        step: int = 0,
    ) -> None:
        self.length, self.batch_size, self.micro_batch = length, batch_size, micro_batch
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.epoch, steps = divmod(step, max(1, length // batch_size))
        self.first = steps * (
            batch_size // (micro_batch * ranks)
        )  # batch of this epoch to start at

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of each epoch, and when it goes on in the middle of one."""
        if epoch != self.epoch:
            self.epoch, self.first = epoch, 0

    def __len__(self) -> int:
        steps = self.length // self.batch_size
        return steps * (self.batch_size // (self.micro_batch * self.ranks))

    def __iter__(self) -> Iterator[Keys]:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", self.epoch))
        order = torch.randperm(self.length, generator=generator)
        share = self.micro_batch * self.ranks
        for number in range(self.first, len(self)):
            start = number * share + self.rank * self.micro_batch
            yield [(self.epoch, i) for i in order[start : start + self.micro_batch].tolist()]


class EvalOrder(Sampler[Keys]):
    """Each sample exactly once over all ranks, in equally many full batches; PAD fills the rest."""

    def __init__(self, length: int, micro_batch: int, rank: int, ranks: int) -> None:
        self.length, self.micro_batch, self.rank, self.ranks = length, micro_batch, rank, ranks

    def __len__(self) -> int:
        return -(-self.length // (self.micro_batch * self.ranks))

    def __iter__(self) -> Iterator[Keys]:
        for number in range(len(self)):
            start = (number * self.ranks + self.rank) * self.micro_batch
            indices = range(start, start + self.micro_batch)
            yield [(0, i if i < self.length else PAD) for i in indices]

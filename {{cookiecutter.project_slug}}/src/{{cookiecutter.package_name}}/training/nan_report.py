"""What a training that met NaN or Inf says: the step, its samples, the gradients. Read only at failure."""

import hashlib
import math
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from ..data.base import DataModule
from ..data.order import Keys, TrainOrder

SHOWN = 5  # layers and samples in the message; nan.json has all
ADVICE = (
    "lower optimizer.lr, warm up longer, clip (optimizer.grad_clip=1.0), or look at those samples; "
    "on_nan=skip leaves such steps out"
)


@dataclass(frozen=True)
class Batch:
    """The global batch of one optimizer step.

    Args:
        samples: indices into the training split, over all ranks and micro batches.
        digest: blake2b of the content that this rank saw, augmentation included.
    """

    epoch: int
    samples: list[int]
    digest: str


def batch_of(data: DataModule, step: int) -> Batch:
    """The batch of optimizer step `step` (from 1 on), made again: it follows from seed and step alone."""
    options = data.options
    whole = _keys(data, step, options.batch_size, 0, 1, 1)[0]
    parts = options.batch_size // (options.micro_batch * options.ranks)
    mine = _keys(data, step, options.micro_batch, options.rank, options.ranks, parts)
    digest = hashlib.blake2b(digest_size=8)
    try:
        for keys in mine:
            for part in data.splits["train"][keys]:
                digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        content = digest.hexdigest()
    except Exception as error:  # the report must not hide what it reports
        content = f"unknown ({type(error).__name__}: {error})"
    return Batch(whole[0][0], [index for _, index in whole], content)


def _keys(
    data: DataModule, step: int, micro_batch: int, rank: int, ranks: int, count: int
) -> list[Keys]:
    """The first `count` batches of one rank from the beginning of optimizer step `step`."""
    options = data.options
    order = TrainOrder(
        data._train_length(), options.batch_size, micro_batch, rank, ranks, options.seed, step - 1
    )
    return list(islice(order, count))


@dataclass(frozen=True)
class NanReport:
    """Why training stopped, for nan.json and as text.

    Args:
        what: what happened, in words; they go on with `at step ...`.
        step: the first optimizer step with it, from 1 on.
        rank: whose content `batch.digest` is of.
        lr: learning rate of that step's reading.
        bad_gradients: parameters whose gradient was not finite at that step.
        parameters: how many there are.
        norms_step: the last step with a finite loss and finite gradients.
        norms: its gradient norm per parameter, None where it lies in parts on several devices.
        skipped: how many steps were left out before (on_nan=skip).
    """

    what: str
    step: int
    rank: int
    lr: float
    batch: Batch
    bad_gradients: list[str]
    parameters: int
    norms_step: int
    norms: dict[str, float] | None
    skipped: int = 0

    def plain(self) -> dict[str, Any]:
        """For JSON: the layers by falling norm, and words for numbers that JSON has not."""
        content = asdict(self)
        if self.norms is not None:
            content["norms"] = {
                name: norm if math.isfinite(norm) else str(norm) for name, norm in self._falling()
            }
        return content

    def text(self) -> str:
        """Several lines, the first a sentence of its own."""
        batch = self.batch
        first = ", ".join(map(str, batch.samples[:SHOWN]))
        lines = [
            f"{self.what} at step {self.step} (epoch {batch.epoch}, lr {self.lr:.3g})",
            f"batch:     samples {first}{' ...' * (len(batch.samples) > SHOWN)} of the training split "
            f"({len(batch.samples)}), content {batch.digest} on rank {self.rank}",
            f"gradients: {self._bad()}",
            f"largest:   {self._largest()}",
            f"all of it: nan.json in the run folder; to do: {ADVICE}",
        ]
        return "\n  ".join(lines)

    def _falling(self) -> list[tuple[str, float]]:
        norms = (self.norms or {}).items()
        return sorted(norms, key=lambda n: -n[1] if math.isfinite(n[1]) else -math.inf)

    def _bad(self) -> str:
        if not self.bad_gradients:
            return "all finite"
        names = ", ".join(self.bad_gradients[:SHOWN]) + " ..." * (len(self.bad_gradients) > SHOWN)
        return f"not finite in {len(self.bad_gradients)} of {self.parameters} parameters: {names}"

    def _largest(self) -> str:
        if self.norms is None:
            return "not known by layer, since the parameters lie in parts on several devices"
        if self.norms_step < 1:
            return "no step was finite"
        layers = ", ".join(f"{name} {norm:.3g}" for name, norm in self._falling()[:SHOWN])
        return f"{layers} (norms at step {self.norms_step}, the last that was finite)"

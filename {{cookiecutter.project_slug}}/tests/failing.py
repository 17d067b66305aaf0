"""Models that fail on request: what, where and when stand in the environment variable FAIL."""

import os
from typing import Any

import torch
from torch import Tensor

from {{ cookiecutter.package_name }}.models.base import Batch
from {{ cookiecutter.package_name }}.models.classifier import ImageClassifier


class Failing(ImageClassifier):
    """FAIL="<what> <rank> <step>": rank -1 means every rank; steps count from 1.

    loss: Inf is added, so that the gradient stays finite. gradient: NaN reaches every weight. batch:
    NaN goes through the network, batch norm included. die: SIGKILL. op: one that has no deterministic
    form.
    """

    def loss(self, batch: Batch) -> Tensor:
        what, rank, step = os.environ.get("FAIL", "nothing 0 0").split()
        here = int(rank) in (-1, self.global_rank) and self.global_step + 1 == int(step)
        if not here:
            return super().loss(batch)
        return getattr(self, f"fail_{what}")(*batch)

    def fail_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss((images, labels)) + torch.inf

    def fail_gradient(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = super().loss((images, labels))
        return loss + (loss * 0).sqrt()  # 0 forward, 0 / 0 backward

    def fail_batch(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss((images * torch.nan, labels))

    def fail_die(self, *_: Any) -> Tensor:
        os.kill(os.getpid(), 9)
        raise AssertionError

    def fail_op(self, images: Tensor, labels: Tensor) -> Tensor:
        images.put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))
        return super().loss((images, labels))

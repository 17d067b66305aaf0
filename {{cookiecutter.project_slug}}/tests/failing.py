"""Models that fail on request: what, where and when stand in the environment variable FAIL."""

import multiprocessing
import os
import time
from typing import Any

import torch
from torch import Tensor

from {{ cookiecutter.package_name }}.models.base import Batch
from {{ cookiecutter.package_name }}.models.classifier import ImageClassifier

# As torch puts it.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which "
    "9.00 GiB is free. Including non-PyTorch memory, this process has 71.00 GiB memory in use. Of the "
    "allocated memory 64.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


class Failing(ImageClassifier):
    """FAIL="<what> <rank> <step>": rank -1 means every rank; steps count from 1.

    loss: Inf is added, so that the gradient stays finite. gradient: NaN reaches every weight. batch:
    NaN goes through the network, batch norm included. die: SIGKILL. op: one that has no deterministic
    form. memory: the GPU's memory does not suffice. worker: SIGKILL to the loader processes.
    hang: as in a collective that never ends.
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

    def fail_memory(self, *_: Any) -> Tensor:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    def fail_worker(self, images: Tensor, labels: Tensor) -> Tensor:
        for process in multiprocessing.active_children():
            os.kill(process.pid or 0, 9)
        time.sleep(5)  # torch raises from a signal handler, wherever that is
        return super().loss((images, labels))

    def fail_hang(self, *_: Any) -> Tensor:
        time.sleep(600)
        raise AssertionError

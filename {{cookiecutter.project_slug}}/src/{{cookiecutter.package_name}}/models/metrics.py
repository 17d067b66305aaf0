"""The mean over real samples, padding left out."""

import torch
from torch import Tensor
from torchmetrics import Metric


class MaskedMean(Metric):
    """Mean of `values` where `mask` is true, over batches and ranks.

    torchmetrics' MeanMetric will not do: with its checks on it makes the CPU wait for the GPU at
    every update and drops NaN, which must be seen; with them off (1.9) it forgets the weights.
    """

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64: a float32 sum over millions of tokens loses digits.
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor, mask: Tensor) -> None:
        """Both of one shape, on one device."""
        self.total += torch.where(mask, values, 0).sum(dtype=torch.float64)
        self.count += mask.sum()

    def compute(self) -> Tensor:
        """The mean; NaN when nothing was counted."""
        return (self.total / self.count).float()

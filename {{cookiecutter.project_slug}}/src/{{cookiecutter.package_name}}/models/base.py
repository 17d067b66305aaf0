"""What every LightningModule here shares: optimizer, clipping, validation totals. No task in it."""

from abc import abstractmethod
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from .optimizer import build_optimizer, build_schedule, check_options, clip_by_norm

Batch = tuple[Tensor, Tensor]


class TrainableModule(lightning.LightningModule):
    """A network, a loss and its metrics. Subclasses give `net`, `loss` and `metrics_of`.

    `self.log` is never called per training step: each call costs up to a quarter of a millisecond,
    and one with `prog_bar=True` makes the CPU wait for the GPU. The training loss is collected on
    the device by training/monitor.py.

    Attributes:
        net: the network alone; this is what gets compiled.
        total_steps: optimizer steps of the whole training, set before `fit` (the schedule needs it).
        grad_norm: norm of the last step's gradient before clipping, on the device; None: not clipped.
    """

    net: nn.Module

    def __init__(self, optimizer: dict[str, Any]) -> None:
        super().__init__()
        check_options(optimizer)
        self.optimizer_options = optimizer
        self.total_steps = 0
        self.grad_norm: Tensor | None = None
        self.eval_metrics: dict[str, MetricCollection] = {}

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Mean training loss of a batch, a scalar."""

    @abstractmethod
    def metrics_of(self) -> dict[str, Metric]:
        """Fresh metrics of an evaluation, by name."""

    @abstractmethod
    def update(self, metrics: MetricCollection, batch: Batch) -> None:
        """Count a batch, whose padded samples are labelled order.IGNORE, into the metrics."""

    def samples_in(self, batch: Batch) -> int:
        """Samples in a batch, from its shape alone."""
        return len(batch[0])

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.net(inputs)
        return output

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        return self.loss(batch)

    def _start(self, split: str) -> None:
        if split not in self.eval_metrics:
            self.eval_metrics[split] = MetricCollection(
                dict(self.metrics_of()), prefix=f"{split}_", compute_groups=False
            )
        self.eval_metrics[split].to(self.device).reset()

    def _finish(self, split: str) -> None:
        # compute() adds up over all ranks: every sample has counted exactly once.
        self.log_dict(self.eval_metrics[split].compute())

    def on_validation_epoch_start(self) -> None:
        self._start("val")

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.update(self.eval_metrics["val"], batch)

    def on_validation_epoch_end(self) -> None:
        self._finish("val")

    def on_test_epoch_start(self) -> None:
        self._start("test")

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self.update(self.eval_metrics["test"], batch)

    def on_test_epoch_end(self) -> None:
        self._finish("test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # A fused optimizer unscales fp16 gradients inside its step, after clipping has looked at them.
        scaled = str(self.trainer.precision).startswith("16")
        fused = self.device.type == "cuda" and not scaled
        optimizer = build_optimizer(self, self.optimizer_options, fused)
        schedule = build_schedule(optimizer, self.optimizer_options, self.total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # Lightning 2.6 refuses its own clipping beside a fused optimizer under bf16 autocast, where
        # nothing needs unscaling; so the clipping is ours, from optimizer.grad_clip.
        self.grad_norm = clip_by_norm(self.parameters(), self.optimizer_options["grad_clip"])

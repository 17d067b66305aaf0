"""What every LightningModule here shares: optimizer, clipping, validation totals. No task in it."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric, MetricCollection

from ..errors import Refused
from .optimizer import build_optimizer, build_schedule, check_options, clip_by_norm, name_state

Batch = tuple[Tensor, Tensor]


class TrainableModule(lightning.LightningModule):
    """A network, a loss and its metrics. Subclasses give `net`, `loss` and `metrics_of`.

    `self.log` is never called per training step: each call costs up to a quarter of a millisecond,
    and one with `prog_bar=True` makes the CPU wait for the GPU. The training loss is collected on
    the device by training/monitor.py.

    Attributes:
        net: the network alone; this is what gets compiled.
        total_steps: optimizer steps of the whole training, set before `fit` (the schedule needs it).
        shard: set by training/ for FSDP and tensor parallelism; splits the network over the devices.
        group_settings: each optimizer group's settings as the config gives them, set with the optimizer.
        grad_norm: norm of the last step's gradient before clipping, on the device; None: not known.
        watch_gradients: set by training/; called with the norm of each trained parameter's gradient,
            shape (parameters,), after backward and clipping and before the optimizer's step.
    """

    net: nn.Module

    def __init__(self, optimizer: dict[str, Any]) -> None:
        super().__init__()
        check_options(optimizer)
        self.optimizer_options = optimizer
        self.total_steps = 0
        self.grad_norm: Tensor | None = None
        self.group_settings: list[dict[str, Any]] = []
        self.watch_gradients: Callable[[Tensor], None] | None = None
        self.eval_metrics: dict[str, MetricCollection] = {}
        self.shard: Callable[[TrainableModule, DeviceMesh], None] | None = None

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Mean training loss of a batch, a scalar."""

    @abstractmethod
    def metrics_of(self) -> dict[str, Metric]:
        """Fresh metrics of an evaluation, by name."""

    @abstractmethod
    def update(self, metrics: MetricCollection, batch: Batch) -> None:
        """Count a batch, whose padded samples are labelled order.IGNORE, into the metrics."""

    def blocks(self) -> list[nn.Module]:
        """The repeated parts of the network, in order: the unit of sharding, checkpointing, compiling."""
        for name in ("blocks", "layers", "stages"):
            parts = getattr(self.net, name, None)
            if isinstance(parts, nn.ModuleList | nn.Sequential):
                return list(parts)
        return []

    def compile_blocks(self) -> None:
        """Compile block by block: all share one graph, so that it takes as long as for one."""
        for block in self.blocks():
            block.compile(fullgraph=True, dynamic=False)

    def width(self) -> int:
        """Inner size of the matrix products: the median over the weights of all Linear layers."""
        layers = [m for m in self.net.modules() if isinstance(m, nn.Linear)]
        sizes = sorted((m.in_features, m.weight.numel()) for m in layers)
        half = sum(count for _, count in sizes) / 2
        for size, count in sizes:
            half -= count
            if half <= 0:
                return size
        return 0

    def kept_layers(self) -> list[nn.Module]:
        """Layers that stay in high precision under FP8: the head."""
        return []

    def activation_bytes(self) -> float:
        """Bytes that the forward pass of one sample leaves for backward in bf16; 0: no estimate."""
        return 0.0

    def check_tensor_parallel(self, split: int) -> None:
        """Refuse to split each layer over `split` devices where that cannot be.

        Raises:
            Refused: here, since there is no plan; a subclass with a plan checks its sizes.
        """
        raise Refused(
            f"strategy=fsdp-tp: {type(self).__name__} has no tensor-parallel plan; strategy=fsdp"
        )

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """How each layer is split, by name; must reach every parameter."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Lightning calls this when the device mesh is there, for every fit and evaluation."""
        if self.shard is not None and self.device_mesh is not None:
            self.shard(self, self.device_mesh)

    def flops_per_sample(self, batch: Batch) -> float:
        """Floating-point operations of one training sample: three times the forward pass, as counted."""
        was_training = self.net.training
        self.net.eval()  # batch norm must neither refuse a single sample nor learn from it
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                # Past `__call__`, so that a compiled network is not compiled once more for this.
                self.net.forward(batch[0][:1])
        finally:
            self.net.train(was_training)
        return 3.0 * counter.get_total_flops()

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
        # compute() adds up over all ranks: every sample has counted exactly once. Lightning would log
        # it one step early; training/monitor.py does.
        self.log_dict(self.eval_metrics[split].compute(), logger=False)

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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The same keys under every precision and strategy: without what Transformer Engine adds,
        and with the optimizer's state by name."""
        weights = checkpoint["state_dict"]
        for key in [key for key in weights if key.endswith("_extra_state")]:
            del weights[key]
        if "optimizer_states" in checkpoint:
            states = zip(checkpoint["optimizer_states"], self.trainer.optimizers, strict=True)
            checkpoint["optimizer_states"] = [name_state(state, o, self) for state, o in states]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        # A fused optimizer unscales fp16 gradients inside its step, after clipping has looked at them.
        scaled = str(self.trainer.precision).startswith("16")
        fused = self.device.type == "cuda" and not scaled
        optimizer = build_optimizer(self, self.optimizer_options, fused)
        schedule = build_schedule(optimizer, self.optimizer_options, self.total_steps)
        self.group_settings = [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in optimizer.param_groups
        ]
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
        limit = self.optimizer_options["grad_clip"]
        self.grad_norm, norms = clip_by_norm(self.parameters(), limit)
        if self.watch_gradients is not None:
            self.watch_gradients(norms)

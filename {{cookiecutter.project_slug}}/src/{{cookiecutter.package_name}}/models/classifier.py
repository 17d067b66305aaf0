"""Image classification with any network of the timm library."""

from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from ..data.order import IGNORE
from ..errors import Refused
from .base import Batch, TrainableModule
from .metrics import MaskedMean


class ImageClassifier(TrainableModule):
    """Args: see configs/model/timm.yaml. `forward` maps (batch, channels, h, w) to (batch, classes)."""

    def __init__(
        self,
        backbone: str,
        num_classes: int,
        channels: int,
        pretrained: bool,
        label_smoothing: float,
        backbone_options: dict[str, Any],
        optimizer: dict[str, Any],
    ) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters()
        if not timm.is_model(backbone):
            near = timm.list_models(f"*{backbone[:6]}*")[:3] or timm.list_models("resnet*")[:3]
            raise Refused(
                f"model.backbone={backbone}: timm has no such model; near: {', '.join(near)}"
            )
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.net = timm.create_model(
            backbone,
            pretrained=pretrained,
            num_classes=num_classes,
            in_chans=channels,
            **backbone_options,
        )

    def loss(self, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images).float(), labels, label_smoothing=self.label_smoothing)

    def kept_layers(self) -> list[nn.Module]:
        head = self.net.get_classifier()  # type: ignore[operator]
        return [layer for layer in head.modules() if isinstance(layer, nn.Linear)]

    def metrics_of(self) -> dict[str, Metric]:
        # Without the library's value checks: each would make the CPU wait for the GPU.
        accuracy = MulticlassAccuracy(
            self.num_classes, average="micro", ignore_index=IGNORE, validate_args=False
        )
        return {"loss": MaskedMean(), "accuracy": accuracy}

    def update(self, metrics: MetricCollection, batch: Batch) -> None:
        images, labels = batch
        logits = self(images).float()
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        metrics["loss"].update(losses, labels != IGNORE)
        metrics["accuracy"].update(logits, labels)

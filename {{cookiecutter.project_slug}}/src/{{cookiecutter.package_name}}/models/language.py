"""Language modelling: next-token loss over a GPT."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torchmetrics import Metric, MetricCollection

from ..data.order import IGNORE
from ..errors import Refused
from .base import Batch, TrainableModule
from .gpt import GPT, GPTShape
from .metrics import MaskedMean
from .tensor_parallel import tensor_parallel_plan


class LanguageModel(TrainableModule):
    """Args: see configs/model/gpt-tiny.yaml and gpt.GPTShape."""

    net: GPT

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        layers: int,
        heads: int,
        width: int,
        mlp: str,
        tie_embeddings: bool,
        dropout: float,
        optimizer: dict[str, Any],
    ) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters()
        self.net = GPT(
            GPTShape(vocab_size, context_length, layers, heads, width, mlp, tie_embeddings, dropout)
        )

    def loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        loss: Tensor = self.net(tokens, targets)
        return loss

    def kept_layers(self) -> list[nn.Module]:
        return [self.net.head]

    def compile_blocks(self) -> None:
        super().compile_blocks()
        self.net.head_loss = torch.compile(self.net.head_loss, dynamic=False)  # type: ignore[method-assign]

    def activation_bytes(self) -> float:
        """34 bytes per token, layer and width (Korthikanti et al. 2022, with attention recomputed), and
        the logits in bf16, in fp32 and their gradient."""
        shape = self.net.shape
        per_token = 34 * shape.layers * shape.width + 10 * shape.padded_vocab
        return float(shape.context_length * per_token)

    def check_tensor_parallel(self, split: int) -> None:
        shape = self.net.shape
        sizes = {
            "model.heads": shape.heads,
            "model.context_length": shape.context_length,
            "the MLP's width": shape.hidden,
        }
        for key, size in sizes.items():
            if size % split:
                raise Refused(
                    f"strategy.tensor_parallel={split} does not divide {key}={size}: choose another"
                )

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        return tensor_parallel_plan(self.net)

    def metrics_of(self) -> dict[str, Metric]:
        return {"loss": MaskedMean()}

    def update(self, metrics: MetricCollection, batch: Batch) -> None:
        tokens, targets = batch
        logits = self(tokens).flatten(0, 1).float()
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
        metrics["loss"].update(losses, targets.flatten() != IGNORE)

    @property
    def tokens_per_sample(self) -> int:
        return self.net.shape.context_length

    def flops_per_sample(self, batch: Batch) -> float:
        """Floating-point operations of one training sample, forward and backward, nothing recomputed.

        6 per token and weight that multiplies, plus 12 * layers * width * length per token for
        attention counted in full (PaLM, Chowdhery et al. 2022, appendix B).
        """
        shape = self.net.shape
        weights = sum(p.numel() for p in self.net.blocks.parameters() if p.ndim >= 2)
        weights += self.net.head.weight.numel()
        attention = 12 * shape.layers * shape.width * shape.context_length
        return float(shape.context_length * (6 * weights + attention))

    def check_sample(self) -> None:
        """Refuse to sample where tokens are not bytes.

        Raises:
            Refused: naming the key that turns it off.
        """
        if self.net.shape.vocab_size != 256:
            raise Refused(
                "sample_prompt: this model's tokens are not bytes; set sample_prompt=null"
            )

    def sample(self, prompt: str, count: int = 256) -> str:
        """Continue a text by `count` bytes."""
        self.check_sample()
        tokens = torch.tensor([list(prompt.encode() or b"\n")], device=self.device)
        self.net.eval()
        text = bytes(self.net.generate(tokens, count)[0].tolist())
        return text.decode("utf-8", "replace")

"""A decoder-only transformer: RMSNorm, rotary positions, fused QKV, SDPA, GELU or SwiGLU.

Sources: GPT-2 (Radford et al., 2019) for the whole and its initialisation; RMSNorm (Zhang and
Sennrich, 2019); rotary positions (Su et al., 2021); SwiGLU (Shazeer, 2020).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import Refused

MLPS = ("swiglu", "gelu")
VOCABULARY_MULTIPLE = 64  # tensor cores work on whole tiles: GPT-2's 50,257 becomes 50,304


@dataclass(frozen=True)
class GPTShape:
    """Sizes of the network. `width` is split over `heads`; rotary positions need an even head size."""

    vocab_size: int
    context_length: int
    layers: int
    heads: int
    width: int
    mlp: str = "swiglu"
    tie_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 2:
            raise Refused(
                f"model.width={self.width} over model.heads={self.heads}: "
                "the head size must be a whole, even number"
            )
        if self.mlp not in MLPS:
            raise Refused(f"model.mlp={self.mlp}: choose one of {', '.join(MLPS)}")

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def hidden(self) -> int:
        """Width inside the MLP: 4 x width; 8/3 x for SwiGLU, whose third matrix makes up for it."""
        if self.mlp == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * 64)) * 64


class GPT(nn.Module):
    """`net(tokens)`: int64 (batch, length <= context_length) to logits (batch, length, padded_vocab).

    `net(tokens, targets)`: their mean cross-entropy, a scalar.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.padded_vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.padded_vocab, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(shape.context_length, shape.width // shape.heads)
        # Not saved: they follow from the shape.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's: normal with deviation 0.02, smaller where a block adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            into_residual = name.endswith(("attention.out.weight", "mlp.out.weight"))
            scale = 1 / math.sqrt(2 * self.shape.layers) if into_residual else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(x.device.type):
            # The residual stream in bf16 too: half the bytes between the blocks.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        if targets is None:
            logits: Tensor = self.head(self.norm(x))
            return logits
        return self.head_loss(x, targets)

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Norm, head and loss in one: compiled, the fp32 logits are never written to memory."""
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, temperature: float = 0.8, seed: int = 0
    ) -> Tensor:
        """Continue `tokens` (batch, length) by `count` sampled tokens; returns all of them."""
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
        for _ in range(count):
            logits = self(tokens[:, -self.shape.context_length :])[:, -1, : self.shape.vocab_size]
            chances = (logits.float() / temperature).softmax(-1)
            chosen = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.width)
        self.mlp = SwiGLU(shape) if shape.mlp == "swiglu" else GELU(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class RMSNorm(nn.RMSNorm):
    """With the weight in the input's type, which the fused kernels ask for, and an epsilon of its own:
    torch's default for bf16 inputs, 0.008, is larger than the mean square of a fresh embedding."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention; query, key and value come from one matrix.

    Its rows lie head by head (query, key, value of the first head, then the second ...), so that a
    part of the rows is a part of the heads.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.head_size = shape.width // shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, 3, self.head_size)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (batch, heads, length, head size)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class GELU(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.into = nn.Linear(shape.width, shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(F.gelu(self.into(x), approximate="tanh"))
        return result


class SwiGLU(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.into = nn.Linear(shape.width, shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(F.silu(self.gate(x)) * self.into(x))
        return result


def rotary_tables(length: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (length, head_size / 2), base 10,000."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_size, 2).float() / head_size)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)

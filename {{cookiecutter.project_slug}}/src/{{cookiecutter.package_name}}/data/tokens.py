"""Next-token prediction from memory-mapped tokens: each batch is one gather, in the training process."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import Refused
from .base import BatchDataset, DataModule, LoaderOptions
from .folders import SPLITS, build_once, sampled_blocks
from .order import IGNORE, PAD, Keys, seed_of
from .text import write_tokens


class TokenDataset(BatchDataset):
    """Windows of `context_length` tokens and the same windows one token on.

    `dataset[keys]` gives (inputs, targets), int64 of shape (batch, context_length); targets are
    IGNORE where a key is padding. With `shift` the windows start elsewhere in each epoch, so that
    the model does not meet the same cuts again.
    """

    def __init__(self, path: Path, context_length: int, shift: bool, seed: int) -> None:
        self.path = path
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.length, self.shift, self.seed = context_length, shift, seed
        # One window less than would fit leaves room for the shift; the last target needs a token too.
        self.windows = (len(self.tokens) - 1) // context_length - (1 if shift else 0)

    def __len__(self) -> int:
        return max(self.windows, 0)

    def counts(self) -> dict[str, int]:
        """Windows and tokens."""
        return {"samples": len(self), "tokens": len(self.tokens)}

    def digest(self) -> str:
        """Of the file's size and 64 blocks of 4 KiB, evenly spread."""
        content = sampled_blocks(self.path) + str(len(self.tokens)).encode()
        return hashlib.blake2b(content, digest_size=8).hexdigest()

    def __getitem__(self, keys: Keys) -> tuple[Tensor, Tensor]:
        epoch = keys[0][0]
        offset = seed_of(self.seed, "shift", epoch) % self.length if self.shift else 0
        indices = np.array([index for _, index in keys])
        starts = np.maximum(indices, 0) * self.length + offset
        window = self.tokens[starts[:, None] + np.arange(self.length + 1)]
        batch = torch.from_numpy(window.astype(np.int64))
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        targets[torch.from_numpy(indices == PAD)] = IGNORE
        return inputs, targets


class TokenData(DataModule):
    """Args: see configs/data/text_folder.yaml."""

    def __init__(
        self,
        folder: str,
        source: str,
        vocab_size: int,
        context_length: int,
        val_fraction: float,
        test_fraction: float,
        options: LoaderOptions,
    ) -> None:
        super().__init__(options)
        self.folder, self.source = Path(folder).expanduser(), source
        self.vocab_size, self.context_length = vocab_size, context_length
        self.fractions = {"val": float(val_fraction), "test": float(test_fraction)}

    def prepare_data(self) -> None:
        build_once(self.folder, lambda place: write_tokens(place, self.source, self.fractions))

    def setup(self, stage: str | None = None) -> None:
        if self.splits:
            return
        meta = json.loads((self.folder / "meta.json").read_text())
        if meta["vocab_size"] > self.vocab_size:
            raise Refused(
                f"data.vocab_size={self.vocab_size}, but {self.folder} was made with "
                f"{meta['vocab_size']} tokens: set data.vocab_size={meta['vocab_size']}"
            )
        made, wanted = (meta["source"], meta["fractions"]), (self.source, self.fractions)
        if made != wanted:
            raise Refused(
                f"data.folder={self.folder} was made from {made[0]} with {made[1]}, and now it is "
                f"{wanted[0]} with {wanted[1]}: remove it, or choose another data.folder"
            )
        for split in SPLITS:
            dataset = TokenDataset(
                self.folder / f"{split}.bin",
                self.context_length,
                shift=split == "train",
                seed=self.options.seed,
            )
            if len(dataset) == 0:
                raise Refused(
                    f"the {split} split has fewer than {self.context_length} tokens: "
                    "give more text or a shorter model.context_length"
                )
            self.splits[split] = dataset

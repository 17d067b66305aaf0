"""A model with a branch taken by chance, for test_branches.py: some steps leave the last block out."""

import torch.nn.functional as F
from torch import Tensor

from {{ cookiecutter.package_name }}.data.order import same_chance
from {{ cookiecutter.package_name }}.models.base import Batch
from {{ cookiecutter.package_name }}.models.language import LanguageModel


class Branching(LanguageModel):
    """Stochastic depth, all ranks alike."""

    def loss(self, batch: Batch) -> Tensor:
        tokens, targets = batch
        net = self.net
        skip = same_chance(0, self.global_step, 0.5)
        x = net.embedding(tokens)
        cos, sin = net.cos[: tokens.shape[1]], net.sin[: tokens.shape[1]]
        for block in list(net.blocks)[: -1 if skip else None]:
            x = block(x, cos, sin)
        return F.cross_entropy(net.head(net.norm(x)).flatten(0, 1).float(), targets.flatten())

"""Make the network ready for the machine: memory format, FP8, checkpointing, compiling, sharding."""

import torch
from omegaconf import DictConfig

from ..models.base import TrainableModule
from .choices import Choice
from .fp8 import Converted, convert_to_fp8
from .machine import Machine
from .precision import RECIPES
from .sharding import Sharder, checkpoint_activations, compile_net
from .strategy import SHARDED


def prepare_network(
    config: DictConfig, machine: Machine, module: TrainableModule
) -> Converted | None:
    """Change `module.net` in place, in the one order that works; returns what FP8 took, if asked for.

    FP8 comes before sharding (a layer that lies in parts cannot be exchanged) and before compiling.
    """
    choices = machine.choices
    word, strategy = choices["precision"].value, choices["strategy"].value
    if choices["memory_format"].value == "channels_last":
        module.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    converted = None
    if word in RECIPES:
        converted = convert_to_fp8(module.net, config.precision, module.kept_layers())
        if not choices["compile"].value and word == "fp8":
            choices["compile"] = Choice(False, "without it FP8 is slower than bf16: compile=true")
    if strategy in SHARDED:
        low = word in ("bf16", "fp8")
        module.shard = Sharder(config.strategy, low, choices["compile"].value)
        return converted
    checkpoint_activations(module.blocks(), config.strategy.activation_checkpointing)
    if choices["compile"].value:
        how = compile_net(module)
        choices["compile"] = Choice(True, f"{choices['compile'].reason}; {how}")
    return converted


def lightning_precision(word: str, plugin: str, strategy: str) -> str:
    """FSDP2's own policy takes the place of autocast: bf16 products, fp32 weights."""
    return "32-true" if strategy in SHARDED and word in ("bf16", "fp8") else plugin

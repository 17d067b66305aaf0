"""What this run runs on and how it uses it: every choice that follows from machine, config and model."""

from dataclasses import dataclass, field

from omegaconf import DictConfig
from torch import nn

from ..environment.device import Device, find_device
from ..models.base import TrainableModule
from .choices import BatchPlan, Choice, choose_workers, plan_batch
from .deterministic import deterministic_choice
from .precision import choose_precision, propose_fp8
from .ranks import Ranks, find_ranks
from .strategy import check_pairs, choose_strategy


@dataclass
class Machine:
    """Device, ranks, and the choices made for them.

    `data_ranks` counts the ranks with different data; the `layer_ranks` of a tensor-parallel group
    share each layer and see the same data.
    """

    device: Device
    ranks: Ranks
    choices: dict[str, Choice] = field(default_factory=dict)
    layer_ranks: int = 1

    @property
    def data_ranks(self) -> int:
        return self.ranks.size // self.layer_ranks

    @property
    def data_rank(self) -> int:
        return self.ranks.rank // self.layer_ranks


def look_around(config: DictConfig) -> Machine:
    """What depends on the machine and the config alone; refusals come before a model is built."""
    device = find_device(config.accelerator)
    ranks = find_ranks(config.devices, config.num_nodes, device)
    several = f"{ranks.size} process{'es' * (ranks.size > 1)}"
    choices = {
        "device": Choice(device.kind, f"{device.name}, {several}"),
        "precision": choose_precision(config.precision, device),
    }
    if config.deterministic:
        choices["deterministic"] = deterministic_choice(device)
    return Machine(device, ranks, choices)


def fit_to_model(config: DictConfig, machine: Machine, module: TrainableModule) -> BatchPlan:
    """Complete the choices by those that depend on the model; returns how a batch is shared out."""
    device, ranks, choices = machine.device, machine.ranks, machine.choices
    choices["precision"] = propose_fp8(choices["precision"], device, module.width())
    share = config.micro_batch or max(1, config.batch_size // ranks.size)
    strategy = choose_strategy(config.strategy, ranks, device, module, share)
    choices["strategy"] = strategy
    precision = choices["precision"].value
    machine.layer_ranks = check_pairs(strategy.value, config, precision, ranks, module)
    choices["loader"] = Choice("torch", "the one loader there is")
    in_process = "context_length" in config.data
    choices["workers"] = choose_workers(config.num_workers, device, ranks.here, in_process)
    batch = plan_batch(config.batch_size, config.micro_batch, machine.data_ranks)
    how = f"{batch.micro_batch} x {machine.data_ranks} devices x {batch.accumulate} accumulated"
    choices["batch"] = Choice(batch.batch_size, how)
    choices["memory_format"] = _memory_format(config, device, module.net)
    return batch


def _memory_format(config: DictConfig, device: Device, net: nn.Module) -> Choice:
    if not any(isinstance(layer, nn.Conv2d) for layer in net.modules()):
        return Choice("contiguous", "no convolutions")
    if device.kind == "cpu":
        return Choice("contiguous", "a CPU gains little from channels_last")
    if config.deterministic:
        return Choice("contiguous", "deterministic=true")
    return Choice("channels_last", "convolutions on tensor cores are faster with it")

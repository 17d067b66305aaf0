"""How several devices share one training: by what fits, and with every bad pair refused by name."""

import inspect
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from ..environment.device import Device
from ..errors import Refused
from ..models.base import TrainableModule
from .choices import Choice
from .ranks import Ranks
from .sharding import CHECKPOINTING

STRATEGIES = ("auto", "single", "ddp", "fsdp", "fsdp-tp")
SHARDED = ("fsdp", "fsdp-tp")
DDP_BELOW = 1e9  # parameters; beyond, sharding costs little and leaves room
PIPELINE_FROM = 1e11
ROOM = 0.8  # share of the memory that the estimate may fill


@dataclass(frozen=True)
class Memory:
    """Bytes per device without sharding: weights, gradients and optimizer, and activations."""

    state: float
    activations: float

    @property
    def gib(self) -> float:
        return (self.state + self.activations) / 2**30


def estimate_memory(module: TrainableModule, micro_batch: int) -> Memory:
    """fp32 weights and gradients, the optimizer's two moments (AdamW) or one (SGD), activations in bf16."""
    parameters = sum(p.numel() for p in module.parameters())
    state = parameters * 4.0 * (2 + moments_of(module))
    return Memory(state, micro_batch * module.activation_bytes())


def moments_of(module: TrainableModule) -> int:
    """How many numbers the optimizer keeps for each weight."""
    return 2 if module.optimizer_options["name"] == "adamw" else 1


def choose_strategy(
    options: DictConfig, ranks: Ranks, device: Device, module: TrainableModule, micro_batch: int
) -> Choice:
    """The strategy that `options` (config group `strategy`) mean for this model on these devices.

    Raises:
        Refused: for an unknown word, `single` with several devices, or a model beyond what data and
            tensor parallelism are for.
    """
    wish = options.name
    if wish not in STRATEGIES:
        raise Refused(f"strategy.name={wish}: choose one of {', '.join(STRATEGIES)}")
    if options.activation_checkpointing not in CHECKPOINTING:
        raise Refused(
            f"strategy.activation_checkpointing={options.activation_checkpointing}: "
            f"choose one of {', '.join(CHECKPOINTING)}"
        )
    if wish == "single" and ranks.size > 1:
        raise Refused(f"strategy=single with {ranks.size} devices: strategy=ddp, or devices=1")
    if wish != "auto":
        return Choice(wish, "as asked")
    parameters = sum(p.numel() for p in module.parameters())
    memory = estimate_memory(module, micro_batch)
    need = f"{parameters / 1e6:,.1f} M parameters, about {memory.gib:.1f} GiB a device without sharding"
    if ranks.size == 1:
        return Choice("single", f"1 device; {need}")
    if device.kind == "cpu":
        return Choice("ddp", f"{ranks.size} processes on a CPU")
    if parameters >= PIPELINE_FROM:
        raise Refused(
            f"{parameters / 1e9:.0f} billion parameters need pipeline parallelism, which this project has "
            "not: Megatron-LM, NeMo and torchtitan have it; strategy=fsdp-tp tries without"
        )
    return _by_memory(memory, need, parameters, ranks, device, module)


def _by_memory(
    memory: Memory,
    need: str,
    parameters: int,
    ranks: Ranks,
    device: Device,
    module: TrainableModule,
) -> Choice:
    room = ROOM * device.memory_gib
    have = f"{need}, of {device.memory_gib:.0f} GiB"
    if memory.gib <= room and parameters < DDP_BELOW:
        return Choice("ddp", have)
    # Sharding leaves activations and, while it computes, one whole block with its gradients.
    block = max(
        (sum(p.numel() for p in b.parameters()) for b in module.blocks()), default=parameters
    )
    left = (memory.state / ranks.size + memory.activations + 8.0 * block) / 2**30
    if left <= room:
        return Choice("fsdp", f"{have}; sharded {left:.1f} GiB")
    return Choice(
        "fsdp-tp", f"{have}; sharded {left:.1f} GiB would not fit either, so layers are split too"
    )


def check_pairs(
    word: str, config: DictConfig, precision: str, ranks: Ranks, module: TrainableModule
) -> int:
    """Refuse pairs that cannot work together; returns how many devices share each layer.

    Raises:
        Refused: naming both keys.
    """
    split = config.strategy.tensor_parallel if word == "fsdp-tp" else 1
    if word in SHARDED and precision == "fp16":
        raise Refused(
            "precision=fp16 with strategy="
            + word
            + ": its loss scaling does not reach shards; precision=bf16"
        )
    if word in SHARDED and precision == "fp8-te":
        raise Refused(
            f"precision=fp8-te with strategy={word} is not supported: precision=fp8 or strategy=ddp"
        )
    if precision == "fp8" and word == "fsdp-tp":
        raise Refused(
            "precision=fp8 with strategy=fsdp-tp is not supported: precision=bf16 or strategy=fsdp"
        )
    if precision == "fp8-te" and config.compile is True:
        raise Refused(
            "precision=fp8-te with compile=true: TE's layers break the graph; compile=false"
        )
    if word != "fsdp-tp":
        return 1
    if split < 2 or ranks.size % split:
        raise Refused(
            f"strategy.tensor_parallel={split} with {ranks.size} devices: it takes a divisor of the number "
            "of devices, from 2 on"
        )
    module.check_tensor_parallel(split)
    return int(split)


def build_strategy(word: str, options: DictConfig, device: Device, ranks: Ranks) -> Strategy | str:
    """Lightning's strategy object; sharding itself happens in sharding.Sharder."""
    if word == "single":
        return "auto"
    backend = "nccl" if device.kind == "cuda" else "gloo"
    timeout = timedelta(minutes=options.timeout_minutes)
    if word == "ddp":
        # Batch-norm statistics meet before each validation, not at every step. torch 2.14 gave the
        # switch a new name.
        known = inspect.signature(DistributedDataParallel).parameters
        switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        more: dict[str, Any] = {switch: False}
        return DDPStrategy(
            process_group_backend=backend,
            timeout=timeout,
            gradient_as_bucket_view=True,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            bucket_cap_mb=options.bucket_cap_mb,
            **more,
        )
    split = options.tensor_parallel if word == "fsdp-tp" else 1
    # Lightning's own defaults would split layers over a whole node.
    return ModelParallelStrategy(
        data_parallel_size=ranks.size // split,
        tensor_parallel_size=split,
        save_distributed_checkpoint=options.sharded_checkpoint,
        process_group_backend=backend,
        timeout=timeout,
    )

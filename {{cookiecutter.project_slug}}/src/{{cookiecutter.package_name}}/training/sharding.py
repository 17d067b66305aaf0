"""Block by block: tensor parallelism, activation checkpointing, compiling, FSDP2. In that order."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..models.base import TrainableModule

CHECKPOINTING = ("none", "selective", "full")
# What `selective` keeps: results that cost more to compute again than to store.
_KEEP = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def checkpoint_activations(blocks: list[nn.Module], mode: str) -> None:
    """Recompute inside each block in backward instead of storing: everything, or all but products."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        # On the instance, not around it: the names of the parameters stay as they are.
        block.forward = _checkpointed(block.forward, options)  # type: ignore[method-assign]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operation in _KEEP
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def again(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, **options)

    return again


def compile_net(module: TrainableModule, per_block_from: int = 24) -> str:
    """Compile in place (the keys keep their names), deep nets block by block, and say how."""
    if len(module.blocks()) >= per_block_from:
        module.compile_blocks()
        return f"each of {len(module.blocks())} blocks"
    module.net.compile(dynamic=False)
    return "the whole network"


class Sharder:
    """Called by the module's `configure_model` once Lightning has made the device mesh.

    Args:
        options: config group `strategy`.
        low_precision: bf16 for the products, with weights, gradients and optimizer in fp32.
        compile_blocks: compile between checkpointing and sharding.
    """

    def __init__(self, options: DictConfig, low_precision: bool, compiled: bool) -> None:
        self.options, self.low_precision, self.compiled = options, low_precision, compiled
        self.done = False

    def __call__(self, module: TrainableModule, mesh: DeviceMesh) -> None:
        if self.done:  # Lightning asks again before each evaluation
            return
        self.done = True
        net, blocks = module.net, module.blocks()
        if mesh["tensor_parallel"].size() > 1:
            _split_layers(module, mesh["tensor_parallel"])
        checkpoint_activations(blocks, self.options.activation_checkpointing)
        if self.compiled:
            compile_net(module, per_block_from=1)  # FSDP's gathering lies between the blocks
        policy = MixedPrecisionPolicy()
        if self.low_precision:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        kept = {
            "mesh": mesh["data_parallel"],
            "mp_policy": policy,
            "reshard_after_forward": self.options.reshard_after_forward,
        }
        for block in blocks:
            fully_shard(block, **kept)
        fully_shard(net, **kept)


def _split_layers(module: TrainableModule, mesh: DeviceMesh) -> None:
    """Share each layer out over `mesh` by the model's own plan, which names every parameter."""
    tied = [
        (name, other)
        for name, weight in module.net.named_parameters(remove_duplicate=False)
        for other, twin in module.net.named_parameters()
        if weight is twin and name != other
    ]
    parallelize_module(module.net, mesh, module.tensor_parallel_plan())
    for name, other in tied:  # splitting made two of what was one
        owner, _, key = name.rpartition(".")
        setattr(module.net.get_submodule(owner), key, module.net.get_parameter(other))


def plain_tensor(value: Tensor) -> Tensor:
    """The whole of a tensor that may lie in parts on several ranks (every rank must call this)."""
    full = getattr(value, "full_tensor", None)
    return full() if full is not None else value

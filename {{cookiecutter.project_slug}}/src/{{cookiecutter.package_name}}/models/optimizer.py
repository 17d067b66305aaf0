"""Optimizer and learning-rate schedule from plain options."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..errors import Refused

SCHEDULES = ("cosine", "linear", "constant")
OPTIMIZERS = {
    "adamw": (AdamW, {"lr", "weight_decay", "betas", "eps"}),
    "sgd": (SGD, {"lr", "weight_decay", "momentum", "nesterov"}),
}
OURS = {"name", "grad_clip", "schedule", "warmup_steps", "min_lr_ratio"}


def check_options(options: dict[str, Any]) -> None:
    """Refuse names that this optimizer does not take.

    Raises:
        Refused: naming the key and what is known.
    """
    if options["name"] not in OPTIMIZERS:
        raise Refused(f"optimizer.name={options['name']}: choose one of {', '.join(OPTIMIZERS)}")
    if options["schedule"] not in SCHEDULES:
        raise Refused(
            f"optimizer.schedule={options['schedule']}: choose one of {', '.join(SCHEDULES)}"
        )
    for key in (
        "lr",
        "weight_decay",
        "eps",
        "momentum",
        "warmup_steps",
        "min_lr_ratio",
        "grad_clip",
    ):
        value = options.get(key)
        if value is not None and (not isinstance(value, int | float) or not value >= 0):
            raise Refused(f"optimizer.{key}={value}: it takes a number from 0 on")
    unknown = set(options) - OPTIMIZERS[options["name"]][1] - OURS
    if unknown:
        raise Refused(f"optimizer={options['name']} does not take optimizer.{min(unknown)}")


def build_optimizer(module: nn.Module, options: dict[str, Any], fused: bool) -> Optimizer:
    """The optimizer over two groups: matrices with weight decay, vectors and scalars without.

    Args:
        fused: one kernel for all parameters; only for parameters on a GPU.
    """
    kind, known = OPTIMIZERS[options["name"]]
    trained = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    chosen = {key: value for key, value in options.items() if key in known}
    optimizer: Optimizer = kind([g for g in groups if g["params"]], fused=fused or None, **chosen)
    return optimizer


def name_state(state: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's saved state with the parameters' names in place of their numbers.

    Numbers mean the order in the optimizer on one device, and the order in the model under FSDP: a
    file with numbers goes on under the wrong parameters. Names load everywhere, torch's own
    optimizers included.

    Args:
        state: what `optimizer` saved, in any of these forms; empty on ranks that save nothing.
    """
    if not state:
        return state
    names = {parameter: name for name, parameter in module.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    saved = [key for group in state["param_groups"] for key in group["params"]]
    name_of = dict(zip(saved, order, strict=True))
    return {
        "state": {name_of[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[key] for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def build_schedule(optimizer: Optimizer, options: dict[str, Any], total_steps: int) -> LambdaLR:
    """Linear warm-up, then the decay to `min_lr_ratio` that ends with the last step."""
    warmup, floor = options["warmup_steps"], options["min_lr_ratio"]

    def factor(step: int) -> float:
        if step < warmup:
            return float((step + 1) / (warmup + 1))
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if options["schedule"] == "constant":
            return 1.0
        if options["schedule"] == "linear":
            return float(1 - (1 - floor) * progress)
        return float(floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    return LambdaLR(optimizer, factor)


def gradient_norms(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of each parameter's gradient, 0 where it has none; shape (len(parameters),).

    Left on the device: reading it would make the CPU wait. Of a sharded gradient only the part that
    lies on this rank counts.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    # One kernel for many; clip_grad_norm_ uses it too.
    found = iter(torch._foreach_norm(parts) if parts else ())
    nothing = torch.zeros((), device=parameters[0].device)
    return torch.stack([nothing if p.grad is None else next(found).float() for p in parameters])


def clip_by_norm(
    parameters: Iterable[nn.Parameter], limit: float | None
) -> tuple[Tensor | None, Tensor]:
    """Scale all gradients so that their joint norm is at most `limit` (None: leave them).

    Returns the norm before clipping (None where nothing clips and shards would have to meet for it)
    and the norms of `gradient_norms`, both left on the device.
    """
    trained = [p for p in parameters if p.requires_grad]
    norms = gradient_norms(trained)
    if any(isinstance(p, DTensor) for p in trained):
        norm = None if limit is None else torch.nn.utils.clip_grad_norm_(trained, limit)
        return norm, norms
    norm = torch.linalg.vector_norm(norms)
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(trained, limit, norm)
    return norm, norms

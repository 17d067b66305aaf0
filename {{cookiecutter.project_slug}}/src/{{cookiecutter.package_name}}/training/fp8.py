"""FP8 matrix products: which layers, and by which library. Weights stay fp32 in both."""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from ..errors import Refused

MULTIPLE = 16  # the hardware's FP8 products take sizes in steps of 16


@dataclass
class Converted:
    """Layers by name: those in FP8, and those that stay in bf16 with the reason."""

    fp8: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For summary.json."""
        return {"fp8": self.fp8, "bf16": self.kept}

    def __str__(self) -> str:
        kept = "; ".join(f"{name} ({why})" for name, why in self.kept.items()) or "none"
        return f"{len(self.fp8)} layers in FP8; in bf16: {kept}"


def convert_to_fp8(net: nn.Module, options: DictConfig, keep: list[nn.Module]) -> Converted:
    """Make the Linear layers of `net` multiply in FP8, in place.

    Args:
        options: config group `precision`: name, recipe, layers.
        keep: layers that stay in high precision whatever their size (the head).

    Raises:
        Refused: when no layer can be converted, or the library is not installed.
    """
    result = Converted()
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear):
            why = "the head" if any(layer is k for k in keep) else _obstacle(layer, options)
            if why:
                result.kept[name] = why
            else:
                result.fp8.append(name)
    if not result.fp8:
        raise Refused(
            f"precision={options.name}: no layer of this model would gain ({result}); "
            "precision=bf16, or precision.layers=all to convert every layer that fits"
        )
    if options.name == "fp8":
        _by_torchao(net, options.recipe, set(result.fp8))
    else:
        _by_transformer_engine(net, options.recipe, result.fp8)
    return result


def _obstacle(layer: nn.Linear, options: DictConfig) -> str | None:
    k, n = layer.in_features, layer.out_features
    if k % MULTIPLE or n % MULTIPLE:
        return f"{k} x {n} is no multiple of {MULTIPLE}"
    if options.layers == "all":
        return None
    # Sizes at which FP8 was slower than bf16 on an H100 (torchao's float8 tables, reported by its
    # _auto_filter_for_recipe).
    if options.recipe == "rowwise":
        small = n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    else:
        small = k <= 4096 and n <= 1024
    return f"{k} x {n} is too small to gain" if small else None


def _by_torchao(net: nn.Module, recipe: str, names: set[str]) -> None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise Refused(f"precision=fp8 needs torchao ({error}): make setup installs it") from error
    config = Float8LinearConfig.from_recipe_name(recipe)
    # An odd number of samples must not fail: the inner size of the weight gradient is their count.
    object.__setattr__(config, "pad_inner_dim", True)
    convert_to_float8_training(
        net, config=config, module_filter_fn=lambda _layer, name: name in names
    )


def _by_transformer_engine(net: nn.Module, recipe: str, names: list[str]) -> None:
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes
    except (ImportError, OSError) as error:
        line = str(error).splitlines()[0]
        raise Refused(
            f"precision=fp8-te needs Transformer Engine ({line}): install the extra `te`, or use an "
            "NVIDIA image, which has it; precision=fp8 needs neither"
        ) from error
    for name in names:
        parent = net.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], _te_linear(te, net.get_submodule(name)))
    kind = recipes.DelayedScaling if recipe == "delayed" else recipes.Float8CurrentScaling
    _run_under(net, te, kind())


def _te_linear(te: Any, layer: nn.Module) -> nn.Module:
    """TE's layer around the same fp32 parameters (Lightning's own plugin would make them bf16)."""
    assert isinstance(layer, nn.Linear)
    bias = layer.bias is not None
    twin: nn.Module = te.Linear(
        layer.in_features,
        layer.out_features,
        bias=bias,
        params_dtype=torch.float32,
        device=layer.weight.device,
    )
    twin.weight = layer.weight
    if bias:
        twin.bias = layer.bias
    return twin


def _run_under(net: nn.Module, te: Any, recipe: Any) -> None:
    """Run every forward of `net` under TE's FP8 context; its name and argument changed with 2.9."""
    forward = net.forward
    if hasattr(te, "autocast"):
        context = functools.partial(te.autocast, enabled=True, recipe=recipe)
    else:
        context = functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=recipe)

    @functools.wraps(forward)
    def under(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    net.forward = under  # type: ignore[method-assign]

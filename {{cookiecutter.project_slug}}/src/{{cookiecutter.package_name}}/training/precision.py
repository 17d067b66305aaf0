"""Precision by one word. The only place that sets TF32."""

import torch
from omegaconf import DictConfig

from ..environment.device import Device
from ..errors import Refused
from .choices import Choice

# Lightning's name and torch's float32 matmul precision for each word. Weights and optimizer stay in
# fp32 under all of them.
_PLUGINS = {
    "fp32": ("32-true", "highest"),
    "tf32": ("32-true", "high"),
    "bf16": ("bf16-mixed", "high"),
    "fp16": ("16-mixed", "high"),
    "fp8": ("bf16-mixed", "high"),
    "fp8-te": ("bf16-mixed", "high"),
}
PRECISIONS = ("auto", *_PLUGINS)
# The least compute capability with tensor cores for it: Ampere for TF32 and bf16, Ada for FP8.
# torch.cuda.is_bf16_supported() counts emulation, so it is no test.
_NEEDS = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (5, 3), "fp8": (8, 9), "fp8-te": (8, 9)}
RECIPES = {"fp8": ("tensorwise", "rowwise"), "fp8-te": ("delayed", "current")}
LAYERS = ("fast", "all")
FP8_PAYS_FROM = 1536  # width of the model; measured on an H200 and published for H100s alike


def choose_precision(options: DictConfig, device: Device) -> Choice:
    """The precision that `options` (config group `precision`) mean on this device.

    Raises:
        Refused: for a precision that the device has no hardware for, with the best one that it has,
            unless `fallback` asks for that one.
    """
    wish = options.name
    if wish not in PRECISIONS:
        raise Refused(f"precision.name={wish}: choose one of {', '.join(PRECISIONS)}")
    if wish in RECIPES:
        _check_fp8_options(options)
    best, why = _best(device)
    if wish == "auto":
        return Choice(best, why)
    lack = _lack(wish, device)
    if lack is None:
        return Choice(wish, "as asked")
    if options.fallback:
        return Choice(best, f"precision={wish} {lack}; precision.fallback=true takes {best}")
    raise Refused(f"precision={wish} {lack}: precision={best} works, or precision.fallback=true")


def _check_fp8_options(options: DictConfig) -> None:
    known = RECIPES[options.name]
    if options.recipe not in known:
        raise Refused(f"precision.recipe={options.recipe}: {options.name} takes {', '.join(known)}")
    if options.layers not in LAYERS:
        raise Refused(f"precision.layers={options.layers}: choose one of {', '.join(LAYERS)}")


def _lack(wish: str, device: Device) -> str | None:
    """What the device lacks for `wish`, in words; None when it has it."""
    if device.kind == "cpu":
        return "needs an NVIDIA GPU, and this is a CPU" if wish not in ("fp32", "bf16") else None
    need = _NEEDS.get(wish, (0, 0))
    if device.capability >= need:
        return None
    have = f"{device.name} has {device.capability[0]}.{device.capability[1]}"
    return f"needs compute capability {need[0]}.{need[1]}, and {have}"


def _best(device: Device) -> tuple[str, str]:
    if device.kind == "cpu" and device.cpu_bf16:
        return "bf16", f"{device.name} has bf16 instructions"
    if device.kind == "cpu":
        return "fp32", f"{device.name} has no bf16 instructions"
    label = f"{device.name}, compute capability {device.capability[0]}.{device.capability[1]}"
    if device.capability >= _NEEDS["bf16"]:
        return "bf16", f"{label}; TF32 for what stays in fp32"
    if device.capability >= (7, 0):
        return "fp16", f"{label}, which has no bf16 tensor cores"
    return "fp32", f"{label}, which has no tensor cores"


def propose_fp8(choice: Choice, device: Device, width: int) -> Choice:
    """Add to an automatic bf16 that FP8 would probably be faster, where it would."""
    able = device.kind == "cuda" and device.capability >= _NEEDS["fp8"]
    if choice.value != "bf16" or not able or width < FP8_PAYS_FROM:
        return choice
    hint = f"width {width}: precision=fp8 is probably faster at some cost in quality, measure it"
    return Choice(choice.value, f"{choice.reason}; {hint}")


def apply_precision(word: str) -> str:
    """Set torch's float32 matmul precision and return Lightning's name for `word`.

    NVIDIA's images start torch with TF32 on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE); this call wins, so
    that `fp32` means fp32 there too. Only this API is used: torch's newer `fp32_precision`
    attributes make Lightning's read of the older one raise.
    """
    plugin, matmul = _PLUGINS[word]
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = matmul == "high"
    return plugin

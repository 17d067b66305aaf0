"""Precision by one word. The only place that sets TF32."""

import torch

from ..environment.device import Device
from ..errors import Refused
from .choices import Choice

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
# Lightning's name and torch's float32 matmul precision for each word.
_PLUGINS = {
    "fp32": ("32-true", "highest"),
    "tf32": ("32-true", "high"),
    "bf16": ("bf16-mixed", "high"),
    "fp16": ("16-mixed", "high"),
}
TENSOR_CORE_BF16 = (
    8,
    0,
)  # Ampere; torch.cuda.is_bf16_supported() counts emulation, so it is no test


def choose_precision(wish: str, device: Device) -> Choice:
    """The precision that `wish` means on this device.

    Raises:
        Refused: for a precision that the device has no hardware for, with the best one that it has.
    """
    if wish not in PRECISIONS:
        raise Refused(f"precision.name={wish}: choose one of {', '.join(PRECISIONS)}")
    best, why = _best(device)
    if wish == "auto":
        return Choice(best, why)
    if wish in ("tf32", "fp16") and device.kind == "cpu":
        raise Refused(
            f"precision={wish} needs an NVIDIA GPU and this is a CPU: precision={best} works"
        )
    if wish in ("tf32", "bf16") and device.kind == "cuda" and device.capability < TENSOR_CORE_BF16:
        raise Refused(
            f"precision={wish} needs compute capability 8.0 and {device.name} has "
            f"{device.capability[0]}.{device.capability[1]}: precision={best} works"
        )
    return Choice(wish, "as asked")


def _best(device: Device) -> tuple[str, str]:
    if device.kind == "cpu" and device.cpu_bf16:
        return "bf16", f"{device.name} has bf16 instructions"
    if device.kind == "cpu":
        return "fp32", f"{device.name} has no bf16 instructions"
    label = f"{device.name}, compute capability {device.capability[0]}.{device.capability[1]}"
    if device.capability >= TENSOR_CORE_BF16:
        return "bf16", f"{label}; TF32 for what stays in fp32"
    if device.capability >= (7, 0):
        return "fp16", f"{label}, which has no bf16 tensor cores"
    return "fp32", f"{label}, which has no tensor cores"


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

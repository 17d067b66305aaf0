"""The accelerator: what torch can use here, and what the hardware is called."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import Refused

# Dense peak rate of bf16 matrix products in TFLOP/s, from NVIDIA's datasheets (no sparsity). Names
# as torch.cuda.get_device_name gives them; the first match counts, so the special ones come first.
_BF16_PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
)


@dataclass(frozen=True)
class Device:
    """One kind of device. `capability` is (0, 0) and `memory_gib` 0 for a CPU."""

    kind: str  # "cuda" or "cpu"
    name: str
    count: int
    capability: tuple[int, int] = (0, 0)
    memory_gib: float = 0.0
    cpu_bf16: bool = False  # a CPU with bf16 instructions

    @property
    def peak_bf16_tflops(self) -> float | None:
        """Dense bf16 peak of one device, or None where no datasheet figure is known to us."""
        return next((peak for name, peak in _BF16_PEAKS if name in self.name), None)


def find_device(accelerator: str) -> Device:
    """The device that `accelerator` (auto, cuda, cpu) means on this machine.

    Raises:
        Refused: for an unknown word, for `cuda` without a usable GPU, and for `auto` when a GPU is
            present but torch cannot use it: nothing falls back to the CPU in silence.
    """
    if accelerator not in ("auto", "cuda", "cpu"):
        raise Refused(f"accelerator={accelerator}: choose one of auto, cuda, cpu")
    if accelerator != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device(
            "cuda",
            properties.name,
            torch.cuda.device_count(),
            (properties.major, properties.minor),
            properties.total_memory / 2**30,
        )
    if accelerator == "cuda":
        raise Refused(
            f"accelerator=cuda, but {_why_no_cuda()}; accelerator=cpu trains without a GPU"
        )
    if accelerator == "auto" and _gpu_is_present():
        raise Refused(f"a GPU is here, but {_why_no_cuda()}; accelerator=cpu trains without it")
    return Device("cpu", cpu_name(), 1, cpu_bf16=_cpu_has_bf16())


def _cpu_has_bf16() -> bool:
    """AMX or AVX512-BF16. torch has no public question for it; without an answer it is no."""
    tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, test, bool)() for test in tests)


def _gpu_is_present() -> bool:
    """Whether the NVIDIA driver shows a GPU that nobody has hidden on purpose."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return not hidden and any(Path("/proc/driver/nvidia/gpus").glob("*"))


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:
        return f"torch {torch.__version__} cannot use one ({str(error).splitlines()[0]})"
    return f"torch {torch.__version__} sees none (CUDA_VISIBLE_DEVICES hides them?)"


def cpu_name() -> str:
    """The CPU's marketing name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

"""Versions, variables and the driver: what a run needs to be understood later."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

# Environment variables that change results, speed or placement. Anything else may hold a secret.
_TELLING = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NCCL|OMP|MKL|OPENBLAS|TORCH|TORCHINDUCTOR|PYTORCH|NVIDIA|NVTE)_\w+"
    r"|KMP_(AFFINITY|BLOCKTIME)|PYTHONHASHSEED|LD_PRELOAD|SLURM_JOB_ID|WANDB_MODE|IMAGE_(REF|DIGEST)"
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
# Those of them that change numbers; `reproduce` sets them as they were.
NUMERIC = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTHONHASHSEED",
)


def packages() -> dict[str, str]:
    """Every installed distribution with its version, by name."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name))


def telling_variables() -> dict[str, str]:
    """The environment variables that matter for results, as they are set; never a secret."""
    names = [n for n in sorted(os.environ) if _TELLING.fullmatch(n) and not _SECRET.search(n)]
    return {name: os.environ[name] for name in names}


def image() -> dict[str, str | None]:
    """The container image, as far as its own variables tell: built from here, or NVIDIA's."""
    return {
        "reference": os.environ.get("IMAGE_REF"),
        "digest": os.environ.get("IMAGE_DIGEST"),
        "nvidia_pytorch": os.environ.get("NVIDIA_PYTORCH_VERSION"),
        "nvidia_build": os.environ.get("NVIDIA_BUILD_ID"),
    }


def driver_version() -> str | None:
    """NVIDIA's kernel driver, e.g. "580.95.05"; None where there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def platform_facts() -> dict[str, str]:
    """Python, operating system and host."""
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "host": platform.node(),
    }

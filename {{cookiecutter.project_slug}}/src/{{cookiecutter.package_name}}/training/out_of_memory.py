"""CUDA out of memory: what filled the GPU, by measured share, and what to change first."""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ..environment.folders import shown
from ..run.folder import RunFolder
from .prepare import Job
from .strategy import SHARDED

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# What torch's message says of the moment itself; afterwards much has been freed already.
_MESSAGE = re.compile(
    rf"Tried to allocate {_SIZE}.*capac.ty of {_SIZE} of which {_SIZE} is free.*"
    rf"memory {_SIZE} is allocated by PyTorch.*and {_SIZE} is reserved",
    re.DOTALL,
)


@dataclass(frozen=True)
class Shares:
    """Bytes on one GPU when an allocation failed; `activations` includes `asked` and all the rest."""

    total: float
    asked: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    fragments: float  # held by torch between tensors
    others: float  # other processes, and CUDA itself

    def gib(self) -> dict[str, float]:
        """For summary.json."""
        return {name: round(value / 2**30, 3) for name, value in asdict(self).items()}

    def text(self) -> str:
        """All shares of what would have been needed, in percent, by falling size."""
        parts = {k: v for k, v in asdict(self).items() if k not in ("total", "asked")}
        need = sum(parts.values())
        falling = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {value / need:.0%}" for name, value in falling)


def read_shares(message: str, weights: float, gradients: float, optimizer: float) -> Shares | None:
    """From torch's message and the measured bytes of the training state; None: unknown words."""
    found = _MESSAGE.search(message)
    if found is None:
        return None
    words = found.groups()
    sizes = [float(n) * _UNITS[unit] for n, unit in zip(words[::2], words[1::2], strict=True)]
    asked, total, free, allocated, fragments = sizes
    rest = max(0.0, allocated - weights - gradients - optimizer)
    others = max(0.0, total - free - allocated - fragments)
    return Shares(total, asked, weights, gradients, optimizer, rest + asked, fragments, others)


def advice(shares: Shares, micro_batch: int, checkpointing: str, sharded: bool, ranks: int) -> str:
    """What to change first, as overrides.

    Args:
        checkpointing: `strategy.activation_checkpointing`, or `full` for a model without blocks.
    """
    state = shares.weights + shares.gradients + shares.optimizer
    if shares.others > max(0.2 * shares.total, shares.asked):
        return (
            f"other processes hold {shares.others / 2**30:.1f} GiB of this GPU (nvidia-smi names them): "
            "end them, or choose another with devices=[...]"
        )
    if shares.fragments > max(0.1 * shares.total, shares.asked):
        return (
            "what was asked for is there, but in pieces: set the variable "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if shares.activations >= state:
        return _less_activations(micro_batch, checkpointing)
    if sharded:
        return "more devices: each holds less of weights, gradients and optimizer"
    if ranks > 1:
        return f"strategy=fsdp: {ranks} devices share weights, gradients and optimizer"
    return "strategy=fsdp with more devices; on this one optimizer=sgd, or a smaller model"


def _less_activations(micro_batch: int, checkpointing: str) -> str:
    recompute = (
        f"strategy.activation_checkpointing={'full' if checkpointing != 'none' else 'selective'}"
    )
    if micro_batch > 1:
        smaller = max(n for n in range(1, micro_batch) if micro_batch % n == 0)
        more = f", then {recompute}" if checkpointing != "full" else ""
        return f"micro_batch={smaller} (batch_size stays: more is accumulated){more}"
    if checkpointing != "full":
        return f"{recompute} (more is computed again in backward)"
    return "a smaller input (model.context_length, data.image_size), or a smaller model"


class MemoryReport(Callback):
    """On a CUDA out-of-memory error writes a snapshot and notes our line on the error.

    The snapshot holds every block by size. Which line of code allocated it costs time at every
    allocation, so that is recorded with `profile=true` (debug=profile) alone.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.records = job.machine.device.kind == "cuda" and bool(job.config.profile)

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if self.records:
            torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError):
            exception.add_note(self._report(trainer, module, str(exception)))
        if self.records:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _report(self, trainer: Trainer, module: Any, message: str) -> str:
        """Before Lightning takes the model off the GPU."""
        job, folder = self.job, self.job.folder
        states = [s.values() for o in trainer.optimizers for s in o.state.values()]
        shares = read_shares(
            message,
            weights=_bytes([*module.parameters(), *module.buffers()]),
            gradients=_bytes(p.grad for p in module.parameters()),
            optimizer=_bytes(value for state in states for value in state),
        )
        where = f"out of GPU memory at step {trainer.global_step + 1}"
        if shares is None:
            return f"{where}: {message.splitlines()[0]}"
        folder.update_summary(memory_gib=shares.gib())
        checkpointing = job.config.strategy.activation_checkpointing
        first = advice(
            shares,
            job.batch.micro_batch,
            checkpointing if job.module.blocks() else "full",
            job.machine.choices["strategy"].value in SHARDED,
            job.machine.ranks.size,
        )
        asked = f"{shares.asked / 2**30:.2f} GiB more of {shares.total / 2**30:.1f}"
        return f"{where}, asking for {asked}: {shares.text()}. Change first: {first}{_snapshot(folder, job)}"


def _snapshot(folder: RunFolder, job: Job) -> str:
    rank = job.machine.ranks.rank
    file = folder.path / ("memory.pickle" if rank == 0 else f"memory-rank{rank}.pickle")
    with contextlib.suppress(Exception):  # it must not hide what it is about
        torch.cuda.memory._dump_snapshot(str(file))
        return f". All blocks: {shown(file)}, to be dropped on pytorch.org/memory_viz"
    return ""


def _bytes(values: Iterable[Any]) -> float:
    """Of tensors on a GPU; of one that lies in parts, the part here."""
    here = [getattr(v, "_local_tensor", v) for v in values if isinstance(v, Tensor)]
    return float(sum(v.numel() * v.element_size() for v in here if v.is_cuda))

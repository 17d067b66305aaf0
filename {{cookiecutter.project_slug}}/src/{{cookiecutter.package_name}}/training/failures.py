"""What went wrong, in one line that says what to do, where the library's own words do not."""

import re

import torch

from ..environment.folders import shown
from ..environment.memory import host_memory_left, killed_for_memory, shared_memory
from ..errors import TrainingFailed
from .deterministic import without_deterministic_form
from .prepare import Job
from .watch import lost_a_rank

_UNUSED = (
    "some parameters took no part in a step (a branch left them out), and DDP waits for their "
    "gradients: strategy.find_unused_parameters=true allows it; every rank must take the same branch "
    "(data.order.same_chance)"
)
_WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (.+?)\.? *(\n|$)")


def explained(error: RuntimeError, job: Job) -> TrainingFailed | None:
    """The failure in our words; None: the error speaks for itself, with its traceback."""
    words = str(error)
    if "find_unused_parameters" in words:
        return TrainingFailed(_UNUSED)
    if line := without_deterministic_form(error, job.module):
        return TrainingFailed(line)
    if isinstance(error, torch.OutOfMemoryError):
        notes = getattr(error, "__notes__", None) or [f"out of GPU memory: {words.splitlines()[0]}"]
        return TrainingFailed(notes[-1], rank=_rank(job))
    if "can't allocate memory" in words:
        line = f"out of host memory: {_host_memory()}; a smaller micro_batch, or fewer devices here"
        return TrainingFailed(line, rank=_rank(job))
    if found := _WORKER.search(f"{error.__cause__}\n{words}"):  # the cause knows the signal
        workers = job.machine.choices["workers"].value
        return TrainingFailed(worker_died(found[1], found[2], workers), rank=_rank(job))
    if "PytorchStreamReader" in words and job.start.checkpoint is not None:
        return TrainingFailed(
            f"{shown(job.start.checkpoint)} is damaged: remove it, and the same command goes on from the "
            "one before it, if there is one; resume=never starts afresh"
        )
    if lost_a_rank(error):
        return TrainingFailed(
            "another rank has died or does not answer (its own lines, or torchrun's table, say which): "
            "all ranks end; the same command goes on"
        )
    return None


def _rank(job: Job) -> int | None:
    """This rank alone has met it; None with one process."""
    return job.machine.ranks.rank if job.machine.ranks.size > 1 else None


def worker_died(process: str, how: str, workers: int) -> str:
    """A line about a loader process that ended by itself.

    Args:
        how: torch's words, such as `is killed by signal: Bus error`.
        workers: how many there are per device.
    """
    line = f"a loader process ({process}) ended: {how.split('. ')[0]}; {_host_memory()}"
    if "Bus error" in how:
        line += "; /dev/shm was full: start the container with --ipc=host, or --shm-size=16g"
    return f"{line}; num_workers={workers // 2} takes less"


def _host_memory() -> str:
    """What can be seen from here, so that nobody has to guess."""
    parts = []
    if (left := host_memory_left()) is not None:
        parts.append(f"{left / 2**30:.1f} GiB of host memory are left now")
    if (shm := shared_memory()) is not None:
        parts.append(f"/dev/shm has {shm[0] / 2**30:.1f} of {shm[1] / 2**30:.1f} GiB free")
    if killed := killed_for_memory():
        parts.append(f"the kernel has killed {killed} processes here for want of memory")
    return ", ".join(parts) or "host memory is not known here"

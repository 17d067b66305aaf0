"""What is chosen automatically, each with its reason: printed, stored in the run, and settable."""

import os
import shutil
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..environment.cpus import granted_cpus
from ..environment.device import Device
from ..errors import Refused


@dataclass(frozen=True)
class Choice:
    """A value and why it was chosen."""

    value: Any
    reason: str

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"value": self.value, "reason": self.reason}


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is shared out: `batch_size = micro_batch * ranks * accumulate`."""

    batch_size: int
    micro_batch: int
    accumulate: int


def plan_batch(batch_size: int, micro_batch: int | None, ranks: int) -> BatchPlan:
    """Share a global batch out over ranks and forward passes.

    Raises:
        Refused: when it does not come out even, naming sizes that do.
    """
    if batch_size % ranks:
        fitting = max(ranks, batch_size // ranks * ranks)
        raise Refused(
            f"batch_size={batch_size} cannot be shared evenly by {ranks} devices: "
            f"batch_size={fitting} or {fitting + ranks} can"
        )
    share = batch_size // ranks
    micro = micro_batch or share
    if share % micro:
        fitting = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
        raise Refused(
            f"micro_batch={micro} does not divide the {share} samples that each device takes of "
            f"batch_size={batch_size}: micro_batch={fitting} does"
        )
    return BatchPlan(batch_size, micro, share // micro)


def choose_workers(wish: Any, device: Device, devices_here: int, in_process: bool) -> Choice:
    """Loader processes per device.

    Args:
        wish: `auto` or a count.
        devices_here: ranks that share this machine's CPUs.
        in_process: the data is cheaper to gather than to send between processes.
    """
    if wish != "auto":
        if not isinstance(wish, int) or wish < 0:
            raise Refused(f"num_workers={wish}: it takes a whole number from 0 on, or auto")
        return Choice(wish, "as asked")
    if in_process:
        return Choice(0, "tokens are gathered faster than they could be sent between processes")
    if device.kind == "cpu":
        return Choice(0, "the CPU trains; workers would take its cores")
    cpus = granted_cpus()
    share = max(1, min(16, cpus // devices_here - 1))
    return Choice(share, f"{cpus} CPUs granted, {devices_here} devices here, one left for each")


def choose_compile(
    wish: Any, device: Device, total_steps: int, precision: str, pays_from: int = 500
) -> Choice:
    """Whether to compile the network.

    Raises:
        Refused: when it is asked for on a CPU without a compiler.
    """
    if wish != "auto":
        if wish and device.kind == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise Refused(
                "compile=true needs a C++ compiler on a CPU and finds none: compile=false"
            )
        return Choice(bool(wish), "as asked")
    if precision == "fp8-te":
        return Choice(False, "Transformer Engine's layers break the graph")
    if device.kind == "cpu":
        return Choice(False, "on a CPU compiling takes longer than it saves")
    if total_steps < pays_from:
        return Choice(
            False, f"{total_steps} steps are too few to pay for compiling (from {pays_from} on)"
        )
    return Choice(True, f"{total_steps} steps on a GPU pay for compiling")


def choose_writing(
    wish: Any, device: Device, module: nn.Module, sharded: bool, pays_from: float = 2.0**30
) -> Choice:
    """Whether training waits for a checkpoint to be written.

    Raises:
        Refused: when sharded checkpoints are to be written in the background.
    """
    if sharded and wish is True:
        raise Refused(
            "checkpoint_async=true: a sharded checkpoint is written in step, by every rank its part; "
            "checkpoint_async=auto, or strategy.sharded_checkpoint=false for one plain file"
        )
    if sharded:
        return Choice("in step", "sharded: every rank writes its part at the same time")
    size = 12.0 * sum(p.numel() for p in module.parameters())  # fp32 weights and two moments
    if wish != "auto":
        return Choice("background" if wish else "in step", "as asked")
    if device.kind == "cpu" or size < pays_from:
        return Choice("in step", f"about {size / 2**20:.0f} MiB each, written in an instant")
    return Choice("background", f"about {size / 2**30:.1f} GiB each, by way of host memory")


def choose_progress(wish: str) -> str:
    """`bar` on a terminal, else `lines`."""
    if wish != "auto":
        return wish
    return "bar" if os.isatty(1) else "lines"


def show(choices: dict[str, Choice]) -> None:
    """Print `name: value (reason)`, one line each."""
    for name, choice in choices.items():
        print(f"{name + ':':<15} {choice.value} ({choice.reason})", flush=True)

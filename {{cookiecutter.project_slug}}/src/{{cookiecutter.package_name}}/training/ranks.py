"""Who launched this process, how many there are, and agreement before Lightning connects them."""

import atexit
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch import distributed

from ..environment.device import Device
from ..errors import Refused

_SHARED = f"{__name__.split('.')[0].upper()}_RUN"


@dataclass(frozen=True)
class Ranks:
    """This process among all of the run.

    `devices` is what Lightning's Trainer takes: a count, or a list of GPU numbers.
    """

    rank: int
    size: int
    here: int  # ranks on this machine
    devices: int | list[int]
    environment: ClusterEnvironment

    @property
    def launched_outside(self) -> bool:
        """Whether torchrun or srun started the ranks (else Lightning does)."""
        return not isinstance(self.environment, LightningEnvironment)


def find_ranks(devices: Any, num_nodes: int, device: Device) -> Ranks:
    """Read the launcher's variables and hold `devices` and `num_nodes` against them.

    Raises:
        Refused: for more devices than there are, or a launcher that started another number.
    """
    environment = _environment()
    count, chosen = _devices(devices, device, environment)
    if isinstance(environment, LightningEnvironment):
        rank = environment.node_rank() * count + environment.local_rank()
        return Ranks(rank, count * num_nodes, count, chosen, environment)
    size, here = environment.world_size(), _ranks_here(environment, num_nodes)
    if count != here or here * num_nodes != size:
        raise Refused(
            f"devices={count} and num_nodes={num_nodes} make {count * num_nodes} ranks, but the launcher "
            f"started {size} ({here} here): ask for devices={here} num_nodes={max(1, size // here)}"
        )
    return Ranks(environment.global_rank(), size, here, chosen, environment)


def _environment() -> ClusterEnvironment:
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    # Only a task that srun started: a shell inside an allocation trains as on any machine.
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS") or 1) > 1:
        return SLURMEnvironment(auto_requeue=False)
    return LightningEnvironment()


def _ranks_here(environment: ClusterEnvironment, num_nodes: int) -> int:
    if isinstance(environment, TorchElasticEnvironment):
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return environment.world_size() // num_nodes


def _devices(
    wish: Any, device: Device, environment: ClusterEnvironment
) -> tuple[int, int | list[int]]:
    if wish == "auto":
        started = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
        outside = not isinstance(environment, LightningEnvironment)
        count = int(started) if outside and started else device.count
        return count, count
    if isinstance(wish, int) and wish >= 1:
        if device.kind == "cuda" and wish > device.count:
            mig = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
            why = "; a process can use one MIG device, so devices=1" if mig else ""
            raise Refused(f"devices={wish}, but torch sees {device.count} ({device.name}){why}")
        return wish, wish
    if isinstance(wish, str | int) or not hasattr(wish, "__iter__") or device.kind != "cuda":
        raise Refused(
            f"devices={wish}: it takes a count from 1 on, or on GPUs a list such as [0,1]"
        )
    chosen = [int(number) for number in wish]
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(device.count)):
        raise Refused(f"devices={chosen}: name different GPUs from 0 to {device.count - 1}")
    return len(chosen), chosen


def agree(value: Any, ranks: Ranks, device: Device) -> Any:
    """Rank 0's value, on every rank; also a meeting point.

    Ranks that Lightning starts later read it from the environment (see `shared_with_children`);
    ranks that torchrun or srun started meet in the process group that training then uses.
    """
    if ranks.size == 1:
        return value
    if not ranks.launched_outside:
        return json.loads(os.environ[_SHARED]) if _SHARED in os.environ else value
    if not distributed.is_initialized():
        _connect(ranks, device)
    box = [value]
    distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def decide(question: Callable[[], Any], ranks: Ranks, device: Device) -> Any:
    """Ask on rank 0 and share the answer, plain values only.

    Raises:
        Refused: on every rank, when it is refused on rank 0; nobody is left waiting.
    """
    answer: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            answer = {"answer": question()}
        except Refused as refusal:
            answer = {"refused": str(refusal)}
    if ranks.size > 1:
        shared = agree(answer, ranks, device)
        answer = shared if ranks.launched_outside or ranks.rank == 0 else {"answer": shared}
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer["answer"]


def _connect(ranks: Ranks, device: Device) -> None:
    os.environ["MASTER_ADDR"] = ranks.environment.main_address
    os.environ["MASTER_PORT"] = str(ranks.environment.main_port)
    if device.kind == "cuda":
        local = ranks.environment.local_rank()
        torch.cuda.set_device(ranks.devices[local] if isinstance(ranks.devices, list) else local)
    backend = "cpu:gloo,cuda:nccl" if device.kind == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=ranks.rank, world_size=ranks.size)
    atexit.register(_disconnect)


def _disconnect() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def leave_group(ranks: Ranks, code: int) -> None:
    """After the last collective: join the threads of all process groups, and end every rank but the
    first here. A thread that meets an interpreter which is half gone would abort the process, and so
    the run, with its work done."""
    _disconnect()
    if ranks.size > 1 and ranks.rank > 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def shared_with_children(value: Any, ranks: Ranks) -> Iterator[None]:
    """Let the ranks that Lightning starts know rank 0's value; leave the environment as it was."""
    before = dict(os.environ)
    if ranks.size > 1 and not ranks.launched_outside:
        os.environ[_SHARED] = json.dumps(value)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

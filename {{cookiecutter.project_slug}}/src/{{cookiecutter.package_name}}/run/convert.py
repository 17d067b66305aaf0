"""A sharded checkpoint as the plain one that a single process would have written."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .weights import SHARDED_META


def read_whole(path: Path) -> dict[str, Any]:
    """The content of a checkpoint in Lightning's plain form, on the CPU, by one process alone.

    Args:
        path: a plain file, or the folder of a sharded checkpoint from any number of ranks.

    Returns:
        `state_dict`, `optimizer_states` (keyed by the parameters' names), `lr_schedulers`,
        `global_step` and what else was saved.

    Raises:
        OSError, RuntimeError, pickle.UnpicklingError, CheckpointException: when it cannot be read.
    """
    if not path.is_dir():
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return content
    meta: dict[str, Any] = torch.load(path / SHARDED_META, map_location="cpu", weights_only=True)
    parts = _join_shards(path)
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in parts if key != "state_dict")
    optimizers = [parts[f"optimizer_{number}"] for number in numbers]
    return {**meta, "state_dict": parts["state_dict"], "optimizer_states": optimizers}


def _join_shards(path: Path) -> dict[str, Any]:
    """Everything in torch's distributed format, by what its own index says is there."""
    index = dcp.FileSystemReader(path).read_metadata()
    flat: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in index.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*load in a single process.*")
        dcp.load(flat, checkpoint_id=path, no_dist=True)
    return unflatten_state_dict(flat, index.planner_data)

"""Finding and loading weights: plain files and sharded folders alike, always in torch's safe mode."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from ..environment.folders import here, shown
from ..errors import Refused

INDEX = "index.json"
SHARDED_META = "meta.pt"  # Lightning's name for what is no tensor in a sharded checkpoint


def find_checkpoint(run: Path, which: str) -> Path:
    """The file that `which` (best, last, or a path) means for a run folder.

    A run that was never validated has no best; its last is taken, and a line says so.

    Raises:
        Refused: when there is none.
    """
    if which not in ("best", "last"):
        path = Path(which).expanduser()
        path = path if path.exists() else run / "checkpoints" / which
        if not path.exists():
            raise Refused(f"checkpoint={which}: there is no such file; best and last work too")
        return path
    index = read_index(run)
    if index is None:
        raise Refused(f"{shown(run)} holds no checkpoint yet")
    if which == "best" and index["best"] is None:
        print(
            "checkpoint:     last (no validation has been recorded, so there is no best)",
            flush=True,
        )
        which = "last"
    return run / "checkpoints" / str(index[which])


def read_index(run: Path) -> dict[str, Any] | None:
    """Which checkpoints a run holds; None: none yet. (A kill right after the first file was written
    leaves that file without an index: it does not count.)

    Raises:
        Refused: when it cannot be read; it is never half written.
    """
    path = run / "checkpoints" / INDEX
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return index if index["checkpoints"] and "last" in index and "best" in index else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        files = sorted(file.name for file in path.parent.glob("step-*.ckpt"))
        beside = f"resume=<path of {files[-1]}> with a new name, or " if files else ""
        raise Refused(f"{shown(path)} is damaged; {beside}resume=never starts afresh") from error


def starting_weights(place: str) -> Path:
    """The checkpoint that `init_from` means: a file, a sharded folder, or a run folder's best.

    Of a URL, its local copy (see `store.brought`)."""
    path = here(place)
    return find_checkpoint(path, "best") if (path / "checkpoints" / INDEX).is_file() else path


def step_of(path: Path) -> int:
    """The optimizer step that a checkpoint was saved at.

    Raises:
        Refused: when it cannot be read.
    """
    try:
        file = path / SHARDED_META if path.is_dir() else path
        return int(
            torch.load(file, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        )
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise Refused(f"{shown(path)} is no checkpoint, or a damaged one") from error


def load_weights(module: nn.Module, path: Path) -> int:
    """Load a checkpoint's weights and return the step it was saved at.

    Args:
        module: whole, or lying in parts on several ranks (then every rank must call this).
        path: a plain file, or the folder of a sharded checkpoint from any number of ranks.

    Raises:
        Refused: when it cannot be read or its weights are another model's.
    """
    try:
        weights, step = _read_shards(module, path) if path.is_dir() else _read_file(path)
    except FileNotFoundError as error:
        raise Refused(f"{shown(path)}: there is no such checkpoint") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise Refused(
            f"{shown(path)} is damaged, or holds more than weights and plain values"
        ) from error
    except KeyError as error:
        raise Refused(
            f"{shown(path)} is no checkpoint of a LightningModule (no {error})"
        ) from error
    _check_fit(module, weights, path)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(module, dict[str, Any](weights), options=whole)
    else:
        module.load_state_dict(weights, strict=False)
    return step


def _read_file(path: Path) -> tuple[dict[str, Tensor], int]:
    content = torch.load(path, map_location="cpu", weights_only=True)
    return content["state_dict"], int(content["global_step"])


def _read_shards(module: nn.Module, path: Path) -> tuple[dict[str, Tensor], int]:
    wanted: dict[str, Any] = {
        name: torch.empty(value.shape, dtype=value.dtype)
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    try:
        with warnings.catch_warnings():
            # Each rank reads for itself on purpose.
            warnings.filterwarnings("ignore", ".*load in a single process.*")
            dcp.load({"state_dict": wanted}, checkpoint_id=path, no_dist=True)
    except dcp.CheckpointException as error:
        raise Refused(f"{shown(path)} does not fit this model: {str(error)[:300]}") from error
    meta = torch.load(path / SHARDED_META, map_location="cpu", weights_only=True)
    return wanted, int(meta["global_step"])


def _check_fit(module: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Names and shapes must agree; Transformer Engine's own state may come and go."""
    own = {k: v.shape for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    own = {k: v for k, v in own.items() if not k.endswith("_extra_state")}
    given = {k: v.shape for k, v in weights.items() if not k.endswith("_extra_state")}
    different = sorted(k for k in own.keys() | given.keys() if own.get(k) != given.get(k))
    if different:
        key = different[0]
        sizes = [tuple(where[key]) if key in where else "nothing" for where in (given, own)]
        raise Refused(
            f"{shown(path)} does not fit this model: {len(different)} weights differ, the first is "
            f"{key}: {sizes[0]} in the file, {sizes[1]} in the model"
        )

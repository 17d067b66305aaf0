"""`export run=<folder>`: what a run has learned as one file that can be handed on."""

import pickle
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed.checkpoint import CheckpointException

from ..environment.folders import shown, writable_folder
from ..errors import Refused
from ..run.convert import read_whole
from ..run.store import brought, send_result
from ..run.weights import find_checkpoint
from ..run.writer import write_whole
from ..training.settings import ExportSettings, check_keys

FORMATS = ("checkpoint",)
# What `weights_only` leaves: enough to build the model and to load it.
_OF_THE_MODEL = ("state_dict", "hyper_parameters", "hparams_name")
_OF_THE_FILE = ("epoch", "global_step", "pytorch-lightning_version")


def export(config: DictConfig) -> int:
    """Write one plain checkpoint, whatever the run's own looks like, and say where it is."""
    check_keys(config, ExportSettings)
    if config.format not in FORMATS:
        raise Refused(f"format={config.format}: choose one of {', '.join(FORMATS)}")
    run = brought(config.run, config.checkpoint)
    if not (run / "config.yaml").is_file():
        raise Refused(f"run={config.run}: no run folder is there (it would hold config.yaml)")
    source = find_checkpoint(run, config.checkpoint)
    content = _read(source)
    if config.weights_only:
        content = {key: content[key] for key in (*_OF_THE_MODEL, *_OF_THE_FILE) if key in content}
    target = _target(config.output, run, source, content["global_step"])
    write_whole(target, lambda place: torch.save(content, place))
    send_result(target)
    print(f"{'checkpoint:':<15} {shown(source)} (step {content['global_step']})")
    print(f"{'size:':<15} {target.stat().st_size / 2**20:,.1f} MiB")
    print(f"{'written:':<15} {shown(target)}", flush=True)
    return 0


def _read(source: Path) -> dict[str, Any]:
    broken = (OSError, RuntimeError, pickle.UnpicklingError, EOFError, CheckpointException)
    try:
        content = read_whole(source)
    except broken as error:
        raise Refused(
            f"checkpoint={shown(source)} is damaged, or holds more than weights and plain values"
        ) from error
    if not {"state_dict", "global_step"} <= content.keys():
        raise Refused(f"checkpoint={shown(source)} is no checkpoint of a LightningModule")
    return content


def _target(output: str | None, run: Path, source: Path, step: int) -> Path:
    """Where the file goes; its folder is made."""
    target = run / "export" / f"step-{step:08d}.ckpt"
    if output is not None:
        target = Path(output).expanduser().absolute()
    if target.is_dir():
        raise Refused(
            f"output={output}: a folder is there; name a file, such as {output}/model.ckpt"
        )
    if target.exists() and target.samefile(source):
        raise Refused(f"output={output} is the checkpoint itself: name another file")
    writable_folder(target.parent, "output")
    return target

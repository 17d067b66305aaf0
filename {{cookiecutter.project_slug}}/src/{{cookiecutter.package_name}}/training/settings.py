"""The keys of the command line with their types and defaults, and what they must satisfy.

Hydra checks names and types against these classes, so a misspelled key or a word in place of a
number is refused by name. Kept free of torch: the door imports it before anything else.
"""

import difflib
import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from ..environment.folders import is_remote, project_root
from ..errors import Refused

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
PROGRESS = ("auto", "bar", "lines", "none")
SWITCH = ("auto", True, False)
MODES = ("min", "max")
ON_NAN = ("stop", "skip")
COUNTS = (
    "max_steps",
    "max_epochs",
    "validate_every_steps",
    "checkpoint_every_steps",
    "keep_last",
    "keep_best",
    "keep_every_steps",
    "stop_at",
    "batch_size",
    "micro_batch",
    "num_nodes",
    "log_every_steps",
    "limit_eval_batches",
    "overfit_batches",
)


@dataclass
class TrainSettings:
    """Every key of `train` outside the groups."""

    # the run
    experiment: str = "${hydra:runtime.choices.experiment}"
    name: str | None = None  # folder name below runs/<experiment>/; null: a fresh id
    # Both may be a URL of fsspec's, such as s3://bucket/runs: written here, uploaded in the background.
    run_dir: str | None = None  # the run's folder itself; wins over name
    runs_dir: str = "${project_root:}/runs"
    data_dir: str = "${project_root:}/data"
    seed: int = 1
    resume: str = "auto"  # auto, never, or a path: a run folder, or a checkpoint to branch off from
    init_from: str | None = None  # a checkpoint whose weights are the start, and nothing else of it
    detach: bool = False  # train in a session of its own, which a lost connection does not end

    # how long
    max_steps: int | None = None  # optimizer steps; also the end of the learning-rate schedule
    max_epochs: int | None = None
    stop_at: int | None = None  # pause at this step: the schedule stays, the same command goes on
    validate_every_steps: int | None = None  # null: after each epoch
    checkpoint_every_steps: int | None = None  # besides the one after each validation
    every_minutes: float | None = None  # besides, by the clock
    checkpoint_async: Any = "auto"  # write in the background; auto: from 1 GiB on a GPU
    keep_last: int = 1
    keep_best: int = 1
    keep_every_steps: int | None = None  # those at multiples of this step stay for good
    monitor: str = MISSING  # the validation metric that decides which checkpoint is best
    monitor_mode: str = "min"
    # A loss or gradient that is not finite: stop, and say where it came from; or skip that step, at
    # the price of a device read at every step (more than 10 skipped in a row stop too).
    on_nan: str = "stop"
    test: bool = True  # evaluate the best checkpoint on the test split at the end

    # how much at once
    batch_size: int = 64  # samples per optimizer step, over all devices
    micro_batch: int | None = (
        None  # samples per device and forward pass; null: batch_size / devices
    )
    num_workers: Any = "auto"  # loader processes per device

    # on what
    accelerator: str = "auto"  # auto, cuda or cpu
    devices: Any = "auto"  # a count, or a list such as [0,1]
    num_nodes: int = 1
    compile: Any = "auto"  # torch.compile of the network: auto, true or false
    deterministic: bool = False  # equal bits in every run, where each operation has such a form

    # what is shown
    progress: str = "auto"  # bar (one line, rewritten), lines, none; auto: bar on a terminal
    log_every_steps: int = 10
    sample_prompt: str | None = None  # language: text is continued from here at the end

    # short runs (see configs/debug)
    limit_eval_batches: int | None = None
    overfit_batches: int | None = None
    profile: bool = False

    # groups, filled by their files
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvaluateSettings:
    """Every key of `evaluate`; null means: as in the run."""

    run: str = MISSING  # the run folder
    checkpoint: str = "best"  # best, last, or a file
    split: str = "test"  # test or val
    batch_size: int | None = None
    num_workers: Any = None
    accelerator: str = "auto"
    devices: Any = 1
    precision: dict[str, Any] = field(default_factory=dict)  # the group
    data_folder: str | None = None  # where the data lies here, if elsewhere than in training


@dataclass
class ExportSettings:
    """Every key of `export`."""

    run: str = MISSING  # the run folder
    checkpoint: str = "best"  # best, last, or a file
    format: str = "checkpoint"  # checkpoint: one plain file, which loads without this project
    output: str | None = None  # the file to write; null: <run>/export/step-<step>.ckpt
    weights_only: bool = False  # leave out the optimizer and where training was


SETTINGS: dict[str, type] = {
    "train": TrainSettings,
    "evaluate": EvaluateSettings,
    "export": ExportSettings,
}


def set_workspace(config: DictConfig) -> None:
    """Make cuBLAS deterministic if asked for; each rank and trial comes here, before torch is imported.

    Raises:
        Refused: when the user's own value is not one that torch takes for deterministic.
    """
    if not config.get("deterministic"):
        return
    value = os.environ.setdefault(WORKSPACE, ":4096:8")
    if value not in (":4096:8", ":16:8"):
        raise Refused(
            f"deterministic=true with {WORKSPACE}={value}: cuBLAS is deterministic with :4096:8 or "
            ":16:8 (smaller, slower); set one of them, or unset it"
        )


def near(verb: str, word: str) -> str | None:
    """The key or group of a verb that a misspelled top-level key probably means."""
    known = [entry.name for entry in fields(SETTINGS[verb])] + ["debug"] * (verb == "train")
    key = word.lstrip("+~").split("=")[0]
    if "." in key or key in known:
        return None
    return next(iter(difflib.get_close_matches(key, known, n=1)), None)


def register() -> None:
    """Make the classes and the `${project_root:}` resolver known to Hydra."""
    OmegaConf.register_new_resolver("project_root", lambda: str(project_root()), replace=True)
    store = ConfigStore.instance()
    store.store(name="settings", node=TrainSettings, package="_global_")
    store.store(name="evaluate_settings", node=EvaluateSettings, package="_global_")
    store.store(name="export_settings", node=ExportSettings, package="_global_")


def check_keys(config: DictConfig, known: type) -> None:
    """Refuse keys that nothing reads (`+key=...` adds them) and keys that still have no value.

    Raises:
        Refused: naming the key.
    """
    names = {entry.name for entry in fields(known)}
    for key in map(str, config):
        if key not in names:
            raise Refused(f"{key} is no key of this command; see --help")
    for key in _missing(OmegaConf.to_container(config, resolve=False)):
        raise Refused(f"{key} has no value: give it as {key}=...")
    try:
        OmegaConf.resolve(config)
    except InterpolationKeyError as error:
        raise Refused(
            f"model and data do not go together ({str(error).splitlines()[0]}): "
            "model=timm goes with images, model=gpt-... with text"
        ) from error


def _missing(node: Any, path: str = "") -> list[str]:
    """Keys whose value is still `???`, before anything is interpolated."""
    if isinstance(node, dict):
        return [key for name in node for key in _missing(node[name], f"{path}.{name}".lstrip("."))]
    return [path] if node == MISSING else []


def _check_place(key: str, value: str) -> None:
    """Refuse what only looks like a URL, and a store that ends with the process."""
    if found := re.match(r"([a-z0-9]{2,}):/(?!/)", value):
        raise Refused(f"{key}={value}: do you mean {found[1]}://{value[found.end() :]}?")
    if value.startswith("memory://"):
        raise Refused(f"{key}={value}: nothing there outlives the process; take a folder or s3://")


def _anchor_paths(config: DictConfig) -> None:
    """Make the paths absolute, so that config.yaml means the same from any directory."""
    for node, key in ((config, "data_dir"), (config, "runs_dir"), (config.data, "folder")):
        if not (key == "runs_dir" and is_remote(node[key])):
            node[key] = os.path.abspath(os.path.expanduser(node[key]))
    if config.data.get("table"):
        config.data.table = os.path.abspath(os.path.expanduser(config.data.table))
    if config.data.get("source") not in (None, "stdlib", "digits"):
        config.data.source = os.path.abspath(os.path.expanduser(config.data.source))


def check(config: DictConfig) -> None:
    """Refuse values that the types allow but training cannot use.

    Raises:
        Refused: naming the key, its value and what it takes.
    """
    check_keys(config, TrainSettings)
    if config.max_steps is None and config.max_epochs is None:
        raise Refused("max_steps and max_epochs are both null: set one, or training has no end")
    if not 0 <= config.seed < 2**32:
        raise Refused(f"seed={config.seed}: it takes a whole number from 0 to 4294967295")
    for key in ("run_dir", "runs_dir"):
        _check_place(key, str(config[key]))
    _anchor_paths(config)
    for key in COUNTS:
        if config[key] is not None and config[key] < 1:
            raise Refused(f"{key}={config[key]}: it takes a whole number from 1 on")
    words = {"progress": PROGRESS, "compile": SWITCH, "monitor_mode": MODES, "on_nan": ON_NAN}
    for key, allowed in {**words, "checkpoint_async": SWITCH}.items():
        if config[key] not in allowed:
            choices = ", ".join(str(word).lower() for word in allowed)
            raise Refused(f"{key}={config[key]}: choose one of {choices}")
    if config.every_minutes is not None and not config.every_minutes > 0:  # NaN neither
        raise Refused(f"every_minutes={config.every_minutes}: it takes a number above 0")
    if config.overfit_batches and config.max_epochs and not config.max_steps:
        raise Refused("overfit_batches with max_epochs alone ends at once: set max_steps")

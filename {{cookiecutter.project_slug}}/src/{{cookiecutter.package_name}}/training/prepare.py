"""What comes before training: everything that can be refused, then the run folder."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
from omegaconf import DictConfig
from torch.nn.modules.batchnorm import _BatchNorm

from ..data.base import DataModule, LoaderOptions
from ..environment.folders import is_remote, place, shown, typed, url_of, writable_folder
from ..errors import Refused
from ..models.base import TrainableModule
from ..run.disk import check_room, checkpoint_bytes
from ..run.elsewhere import bring
from ..run.folder import RunFolder
from ..run.identity import code_fingerprint, fingerprint, telling_settings
from ..run.lock import RunLock
from ..run.loggers import check_logger
from ..run.manifest import check_data, write_manifest
from ..run.mirror import Mirror
from ..run.output import LOG, SteadyOutput
from ..run.start import Start, choose_start
from ..run.store import Store, brought
from ..run.weights import load_weights, starting_weights
from .build import build, plain
from .choices import BatchPlan, Choice, choose_compile, choose_writing, show
from .detach import tell_run
from .machine import Machine, fit_to_model
from .network import prepare_network
from .ranks import agree, decide
from .strategy import SHARDED, moments_of


@dataclass
class Job:
    """All that one training is made of, once nothing can be refused any more."""

    config: DictConfig
    machine: Machine
    batch: BatchPlan
    module: TrainableModule
    data: DataModule
    start: Start
    folder: RunFolder
    total_steps: int


def prepare(
    config: DictConfig, machine: Machine, locks: list[RunLock], output: SteadyOutput
) -> Job | None:
    """Everything that can be refused, then the run folder; None when the run is finished already."""
    ranks, choices = machine.ranks, machine.choices
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    module: Any = build(config.model, "model", optimizer=plain(config.optimizer))
    if config.sample_prompt is not None:
        if not hasattr(module, "sample"):
            raise Refused("sample_prompt: only language models continue text; sample_prompt=null")
        module.check_sample()
    batch = fit_to_model(config, machine, module)
    data: DataModule = build(config.data, "data", options=_loader_options(config, machine, batch))
    if config.init_from:
        _fetch(config.init_from, machine)
        load_weights(module, starting_weights(config.init_from))
    check_logger(config.logger)
    _check_monitor(config, module)

    def choose() -> dict[str, Any]:
        bring(config)
        start, lock = choose_start(config)
        locks.append(lock)
        return dataclasses.asdict(start)

    start = Start(**decide(choose, ranks, machine.device))
    if not start.was_finished:
        decide(lambda: _check_disk(config, Path(start.run_dir), module), ranks, machine.device)
    _check_shared(start, config, machine)
    total_steps, why = _prepare_data(config, data, machine)
    if start.was_finished and start.step >= total_steps:
        if ranks.rank == 0:
            print(f"{shown(start.run_dir)} finished at step {start.step} already: another name or ")
            print("resume=never trains again, a larger max_steps goes on", flush=True)
            if url := url_of(start.run_dir):
                Mirror(Store(url)).close(stopped=False)  # what an earlier attempt could not send
        return None
    contents = _check_data(data, start, machine)
    choices["resume"] = Choice(f"step {start.step}", start.reason)
    choices["length"] = Choice(total_steps, why)
    word = choices["precision"].value
    sharded = choices["strategy"].value in SHARDED and config.strategy.sharded_checkpoint
    choices["compile"] = choose_compile(config.compile, machine.device, total_steps, word)
    choices["checkpoints"] = choose_writing(
        config.checkpoint_async, machine.device, module, sharded
    )
    converted = prepare_network(config, machine, module)
    # All that can be refused has been: a run folder exists only from here on.
    folder = RunFolder(Path(start.run_dir), ranks.rank == 0, locks[0] if locks else None)
    output.log = folder.path / LOG
    if tell_run(folder.path):
        output.move()
    _start(config, folder, machine, start)
    if folder.writes:
        show(choices)
        if converted:
            print(f"{'fp8:':<15} {converted}", flush=True)
    if start.checkpoint is not None:
        _tell_of_batch_norm(folder, module, batch.micro_batch)
    plain_choices = {name: choice.plain() for name, choice in choices.items()}
    write_manifest(folder, config, machine.device, plain_choices, contents, start.step)
    folder.update_summary(**plain_choices, micro_batch=batch.micro_batch)
    if converted:
        folder.update_summary(fp8_layers=converted.plain())
    return Job(config, machine, batch, module, data, start, folder, total_steps)


def _check_data(data: DataModule, start: Start, machine: Machine) -> dict[str, Any]:
    """What the data holds; refused, on every rank, when a run that goes on began with other data."""

    def look() -> dict[str, Any]:
        if start.checkpoint is not None and start.source is None:
            check_data(Path(start.run_dir), data.contents, data.fingerprint())
        return {"fingerprint": data.fingerprint(), "splits": data.contents}

    return dict(decide(look, machine.ranks, machine.device))


def _fetch(word: str, machine: Machine) -> None:
    """Bring a remote checkpoint to every machine, by one rank of each."""
    if is_remote(word):
        if machine.ranks.environment.local_rank() == 0:
            brought(word)
        agree("fetched", machine.ranks, machine.device)


def _tell_of_batch_norm(folder: RunFolder, module: TrainableModule, micro_batch: int) -> None:
    """Its statistics are those of one device's micro batch: with another size it trains otherwise."""
    before = folder.summary.get("micro_batch", micro_batch)
    has_one = any(isinstance(layer, _BatchNorm) for layer in module.modules())
    if folder.writes and has_one and before != micro_batch:
        print(
            f"{'warning:':<15} batch norm now sees {micro_batch} samples at a time, {before} before: "
            f"this is not the same training; micro_batch={before} keeps it",
            flush=True,
        )


def _check_shared(start: Start, config: DictConfig, machine: Machine) -> None:
    """Several machines need one disk for the local copy of a remote run, as for any other run folder."""
    folder = Path(start.run_dir)
    if config.num_nodes == 1 or url_of(folder) is None:
        return
    if machine.ranks.rank == 0:
        writable_folder(folder, "REMOTE_RUNS_DIR")
    agree("made", machine.ranks, machine.device)
    if not folder.is_dir():
        raise Refused(
            f"num_nodes={config.num_nodes}: {typed(folder)} is not on a disk that all machines share; "
            "set REMOTE_RUNS_DIR to a folder that is"
        )


def _check_monitor(config: DictConfig, module: TrainableModule) -> None:
    known = [f"val_{name}" for name in module.metrics_of()]
    if config.monitor not in known:
        raise Refused(f"monitor={config.monitor}: validation gives {', '.join(known)}")


def _check_disk(config: DictConfig, run: Path, module: TrainableModule) -> None:
    size = checkpoint_bytes(module, moments_of(module))
    at_once = config.keep_last + config.keep_best + 1  # and the one that is being written
    if config.keep_every_steps and config.max_steps:
        at_once += config.max_steps // config.keep_every_steps
    if warning := check_room(run, size, at_once):
        print(f"{'warning:':<15} {warning}", flush=True)


def _loader_options(config: DictConfig, machine: Machine, batch: BatchPlan) -> LoaderOptions:
    return LoaderOptions(
        batch_size=batch.batch_size,
        micro_batch=batch.micro_batch,
        rank=machine.data_rank,
        ranks=machine.data_ranks,
        seed=config.seed,
        num_workers=machine.choices["workers"].value,
        prefetch_factor=config.loader.prefetch_factor,
        pin_memory=machine.device.kind == "cuda",
        overfit_batches=config.overfit_batches,
    )


def _start(config: DictConfig, folder: RunFolder, machine: Machine, start: Start) -> None:
    """Write what is known, so that whatever happens next can be read."""
    if folder.writes:
        print(f"{'run:':<15} {place(folder.path)}", flush=True)
    folder.write_config(config)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    fresh = {
        "started": now,
        "epochs": 0,
        "metrics": {},
        "throughput": {
            "samples_per_s": None,
            "tokens_per_s": None,
            "step_ms": None,
            "data_wait": None,
        },
        "mfu": Choice(None, "nothing measured yet").plain(),
        "peak_memory_gib": None,
    }
    folder.summary = {**fresh, **folder.summary}
    folder.summary.pop("reason", None)
    folder.update_summary(
        status="running",
        attempt_started=now,
        steps=start.step,
        fingerprint=fingerprint(telling_settings(config)),
        code=code_fingerprint(),
        resumed_from=start.source or folder.summary.get("resumed_from"),
        world_size=machine.ranks.size,
    )


def _prepare_data(config: DictConfig, data: DataModule, machine: Machine) -> tuple[int, str]:
    """Make the data ready on every rank; returns the number of optimizer steps and where it comes from."""
    if machine.ranks.environment.local_rank() == 0:
        data.prepare_data()
    agree("prepared", machine.ranks, machine.device)
    data.setup("fit")
    per_epoch = data.steps_per_epoch
    if per_epoch == 0:
        data.train_dataloader()  # says which batch_size would do
    by_epochs = config.max_epochs * per_epoch if config.max_epochs else None
    if by_epochs is None or (config.max_steps and config.max_steps <= by_epochs):
        return config.max_steps, f"max_steps; {per_epoch} steps an epoch"
    return by_epochs, f"max_epochs={config.max_epochs} of {per_epoch} steps"

"""`train`: choose, build, fit, evaluate, write down. A run that was stopped goes on where it was."""

import dataclasses
import multiprocessing
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from ..data.base import DataModule, LoaderOptions
from ..environment.folders import shown
from ..errors import INTERRUPTED, OK, PAUSED, Refused, Stopped, TrainingFailed
from ..models.base import TrainableModule
from ..run.checkpoints import Checkpoints, Retention
from ..run.folder import RunFolder
from ..run.identity import code_fingerprint, fingerprint, telling_settings
from ..run.lock import RunLock
from ..run.loggers import build_logger, check_logger, finish_loggers
from ..run.output import LOG, SteadyOutput
from ..run.records import MetricsFile
from ..run.signals import Signals
from ..run.start import Start, choose_start
from ..run.weights import load_weights, starting_weights
from ..run.writer import CheckpointWriter
from . import settings
from .build import SyncBuffers, build, build_trainer, plain
from .choices import BatchPlan, Choice, choose_compile, choose_progress, choose_writing, show
from .compile_watch import CompileWatch
from .detach import detach, tell_run
from .finish import finish
from .machine import Machine, fit_to_model, look_around
from .monitor import Monitor
from .nan_guard import NanGuard
from .network import lightning_precision, prepare_network
from .position import Position
from .precision import apply_precision
from .ranks import agree, decide, shared_with_children
from .stopping import Stopping
from .strategy import build_strategy


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


def train(config: DictConfig) -> int:
    """Train as `config` says and return the exit code. Refusals come before data is touched."""
    settings.check(config)
    machine = look_around(config)
    if config.detach:
        return detach(machine.ranks.launched_outside)
    locks: list[RunLock] = []
    with SteadyOutput() as output, Signals(output, machine.ranks.rank == 0) as signals:
        try:
            job = _prepare(config, machine, locks, output)
            return OK if job is None else _train(job, signals)
        except KeyboardInterrupt:
            print("interrupted before training", flush=True)
            return INTERRUPTED
        finally:
            for lock in locks:
                lock.release()
            for worker in multiprocessing.active_children():
                worker.kill()  # loader processes leave signals to us


def _prepare(
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
        load_weights(module, starting_weights(config.init_from))
    check_logger(config.logger)
    _check_monitor(config, module)

    def choose() -> dict[str, Any]:
        start, lock = choose_start(config)
        locks.append(lock)
        return dataclasses.asdict(start)

    start = Start(**decide(choose, ranks, machine.device))
    total_steps, why = _prepare_data(config, data, machine)
    if start.was_finished and start.step >= total_steps:
        if ranks.rank == 0:
            print(f"{shown(start.run_dir)} finished at step {start.step} already: another name or ")
            print("resume=never trains again, a larger max_steps goes on", flush=True)
        return None
    choices["resume"] = Choice(f"step {start.step}", start.reason)
    choices["length"] = Choice(total_steps, why)
    word = choices["precision"].value
    choices["compile"] = choose_compile(config.compile, machine.device, total_steps, word)
    choices["checkpoints"] = choose_writing(config.checkpoint_async, machine.device, module)
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
    plain_choices = {name: choice.plain() for name, choice in choices.items()}
    folder.write_manifest(config, machine.device, plain_choices)
    folder.update_summary(**plain_choices)
    if converted:
        folder.update_summary(fp8_layers=converted.plain())
    return Job(config, machine, batch, module, data, start, folder, total_steps)


def _train(job: Job, signals: Signals) -> int:
    """Fit and finish; turns every end into the summary's words and an exit code."""
    folder, ranks = job.folder, job.machine.ranks
    try:
        with shared_with_children(dataclasses.asdict(job.start), ranks):
            _fit(job, signals)
    except Stopped as stop:
        folder.update_summary(status="preempted", reason=str(stop), steps=stop.step)
        finish_loggers(PAUSED)
        if ranks.rank == 0:
            where = f"step {stop.step} of {job.total_steps}; the same command goes on"
            print(
                f"{'stopped:':<15} {stop}, {where}\n{'run:':<15} {shown(folder.path)}", flush=True
            )
        # Lightning kills rank 0 when one of its children ends with another code than 0.
        return PAUSED if ranks.rank == 0 or ranks.launched_outside else OK
    except RuntimeError as error:
        _fail(folder, error)
        if "find_unused_parameters" in str(error):
            raise TrainingFailed(
                "some parameters took no part in a step (a branch left them out), and DDP waits for their "
                "gradients: strategy.find_unused_parameters=true allows it; every rank must take the "
                "same branch (data.order.same_chance)"
            ) from error
        raise
    except (SystemExit, KeyboardInterrupt) as error:  # what Lightning makes of a second Ctrl-C
        _fail(folder, KeyboardInterrupt("Ctrl-C"))
        if ranks.rank == 0:
            step = folder.summary.get("steps", 0)
            print(
                f"interrupted near step {step}; {shown(folder.path)} keeps what was saved",
                flush=True,
            )
        code = getattr(error, "code", 1)
        return INTERRUPTED if ranks.rank == 0 else int(bool(code))
    except BaseException as error:
        _fail(folder, error)
        raise
    finish_loggers(OK)
    return OK


def _fail(folder: RunFolder, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]  # the rest is printed
    folder.update_summary(status="failed", reason=reason)
    finish_loggers(1)


def _check_monitor(config: DictConfig, module: TrainableModule) -> None:
    known = [f"val_{name}" for name in module.metrics_of()]
    if config.monitor not in known:
        raise Refused(f"monitor={config.monitor}: validation gives {', '.join(known)}")


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
        print(f"{'run:':<15} {shown(folder.path)}", flush=True)
    folder.write_config(config)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    fresh = {
        "started": now,
        "epochs": 0,
        "metrics": {},
        "throughput": {"samples_per_s": None, "tokens_per_s": None, "step_ms": None},
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


def _fit(job: Job, signals: Signals) -> None:
    """Fit, validate the end, test the best, write the summary."""
    config, machine, start, folder = job.config, job.machine, job.start, job.folder
    word, strategy = machine.choices["precision"].value, machine.choices["strategy"].value
    in_place = start.checkpoint is not None and start.source is None
    from_step = start.step if in_place else 0
    metrics = MetricsFile(folder.metrics, job.data.steps_per_epoch, from_step, start.validated)
    logger = build_logger(config, folder, from_step)
    writer = CheckpointWriter(machine.choices["checkpoints"].value == "background")
    retention = Retention(
        config.monitor,
        config.monitor_mode,
        config.keep_last,
        config.keep_best,
        config.checkpoint_every_steps,
        config.keep_every_steps,
    )
    guard = NanGuard(folder, config.on_nan)
    progress = choose_progress(config.progress)
    monitor = Monitor(folder, machine.device, config.log_every_steps, progress, guard)
    saved_step = start.step if in_place else None
    checkpoints = Checkpoints(folder, writer, retention, saved_step, monitor.check_finite)
    position = Position(
        config.seed,
        machine.ranks.rank,
        job.data.steps_per_epoch,
        job.batch.accumulate,
        config.validate_every_steps,
        start.validated,
    )
    timeout = timedelta(minutes=config.strategy.timeout_minutes)
    stopping = Stopping(signals, checkpoints, config.stop_at, config.every_minutes, timeout)
    trainer = build_trainer(
        config,
        device=machine.device,
        ranks=machine.ranks,
        strategy=build_strategy(strategy, config.strategy, machine.device, machine.ranks),
        precision=lightning_precision(word, apply_precision(word), strategy),
        folder=folder,
        loggers=[metrics, *([logger] if logger else [])],
        callbacks=[
            SyncBuffers(),
            guard,
            position,
            monitor,
            CompileWatch(folder),
            checkpoints,
            stopping,
        ],
        max_steps=job.total_steps,
        accumulate=job.batch.accumulate,
        writer=writer,
    )
    job.module.total_steps, job.data.first_step = job.total_steps, start.step
    try:
        trainer.fit(job.module, datamodule=job.data, ckpt_path=start.checkpoint, weights_only=True)
        finish(config, folder, job.module, job.data, trainer, checkpoints, monitor, metrics)
    except Stopped:
        _wait_for_children(trainer)
        raise
    finally:
        writer.wait()


def _wait_for_children(trainer: Trainer) -> None:
    """Let the ranks that Lightning started end before this one does."""
    for process in getattr(trainer.strategy.launcher, "procs", []):
        process.wait(timeout=60)

"""`train`: prepare, fit, evaluate, write down. A run that was stopped goes on where it was."""

import contextlib
import dataclasses
import multiprocessing
import subprocess
from datetime import timedelta

from lightning.pytorch import Trainer
from omegaconf import DictConfig

from ..environment.folders import place, shown, url_of
from ..errors import INTERRUPTED, OK, PAUSED, Stopped, TrainingFailed
from ..run.checkpoints import Checkpoints, Retention
from ..run.folder import RunFolder
from ..run.lock import RunLock
from ..run.loggers import build_logger, finish_loggers
from ..run.mirror import start_mirror
from ..run.output import SteadyOutput
from ..run.records import MetricsFile
from ..run.signals import Signals
from ..run.writer import CheckpointWriter
from . import settings
from .build import SyncBuffers, build_trainer
from .choices import choose_progress
from .compile_watch import CompileWatch
from .data_wait import DataWait
from .detach import detach
from .deterministic import set_deterministic
from .failures import explained
from .finish import finish
from .machine import look_around
from .monitor import Monitor
from .nan_guard import NanGuard
from .network import lightning_precision
from .out_of_memory import MemoryReport
from .position import Position
from .precision import apply_precision
from .prepare import Job, prepare
from .ranks import agree, leave_group, shared_with_children
from .stopping import Stopping
from .strategy import build_strategy
from .watch import watch_parent, watched


def train(config: DictConfig) -> int:
    """Train as `config` says and return the exit code. Refusals come before data is touched."""
    settings.check(config)
    set_deterministic(config.deterministic)
    machine = look_around(config)
    if config.detach:
        return detach(machine.ranks.launched_outside)
    watch_parent(machine.ranks)
    locks: list[RunLock] = []
    with SteadyOutput() as output, Signals(output, machine.ranks.rank == 0) as signals:
        try:
            job = prepare(config, machine, locks, output)
            code = OK if job is None else _train_and_upload(job, signals)
        except KeyboardInterrupt:
            print("interrupted before training", flush=True)
            return INTERRUPTED
        finally:
            set_deterministic(False)
            for lock in locks:
                lock.release()
            for worker in multiprocessing.active_children():
                worker.kill()  # loader processes leave signals to us
    if code in (OK, PAUSED):
        leave_group(machine.ranks, code)
    return code


def _train_and_upload(job: Job, signals: Signals) -> int:
    """Train; whatever comes of it, what lies elsewhere gets the rest."""
    mirror, ranks = start_mirror(job.folder), job.machine.ranks
    try:
        code = _train(job, signals)
    finally:
        if mirror is not None:
            signals.soft = signals.speaks = False  # Ctrl-C ends the wait, nothing else
            mirror.close(stopped=job.folder.summary.get("status") == "preempted")
    if url_of(job.folder.path) is not None and code in (OK, PAUSED):
        # torchrun would end rank 0 in the middle of it when another rank has left with a 75.
        agree("uploaded", ranks, job.machine.device)
    return code


def _train(job: Job, signals: Signals) -> int:
    """Fit and finish; turns every end into the summary's words and an exit code."""
    folder, ranks = job.folder, job.machine.ranks
    try:
        with shared_with_children(dataclasses.asdict(job.start), ranks), watched(folder, ranks):
            _fit(job, signals)
    except Stopped as stop:
        folder.update_summary(status="preempted", reason=str(stop), steps=stop.step)
        finish_loggers(PAUSED)
        if ranks.rank == 0:
            where = f"step {stop.step} of {job.total_steps}; the same command goes on"
            print(
                f"{'stopped:':<15} {stop}, {where}\n{'run:':<15} {place(folder.path)}", flush=True
            )
        # Lightning kills rank 0 when one of its children ends with another code than 0.
        return PAUSED if ranks.rank == 0 or ranks.launched_outside else OK
    except RuntimeError as error:
        failure = explained(error, job)
        _fail(folder, failure or error)
        if failure is None:
            raise
        raise failure from error
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
    reason = str(error) if isinstance(error, TrainingFailed) else f"{type(error).__name__}: {error}"
    reason = reason.splitlines()[0]  # the rest is printed
    folder.update_summary(status="failed", reason=reason)
    finish_loggers(1)


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
    monitor = Monitor(
        folder, machine.device, config.log_every_steps, progress, guard, DataWait(job.data.wait)
    )
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
            MemoryReport(job),
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
    job.data.skipped.file = folder.path / "skipped.txt"
    job.module.total_steps, job.data.first_step = job.total_steps, start.step
    try:
        trainer.fit(job.module, datamodule=job.data, ckpt_path=start.checkpoint, weights_only=True)
        finish(config, folder, job.module, job.data, trainer, checkpoints, monitor, metrics)
        _wait_for_children(trainer)
    except Stopped:
        _wait_for_children(trainer)
        raise
    finally:
        writer.wait()


def _wait_for_children(trainer: Trainer) -> None:
    """Let the ranks that Lightning started end before this one does: they would miss it."""
    for process in getattr(trainer.strategy.launcher, "procs", []):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)

"""`train`: choose, build, fit, evaluate, write down."""

import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from ..data.base import DataModule, LoaderOptions
from ..data.order import seed_of
from ..environment.folders import shown
from ..errors import Refused, TrainingFailed
from ..models.base import TrainableModule
from ..run.checkpoints import Checkpoints
from ..run.folder import RunFolder, choose_run_dir
from ..run.loggers import build_logger, check_logger, finish_loggers
from ..run.records import MetricsFile
from ..run.weights import load_weights, starting_weights
from . import settings
from .build import SyncBuffers, build, build_trainer, plain
from .choices import BatchPlan, Choice, choose_compile, choose_progress, show
from .compile_watch import CompileWatch
from .machine import Machine, fit_to_model, look_around
from .monitor import Monitor
from .network import lightning_precision, prepare_network
from .precision import apply_precision
from .ranks import agree, shared_with_children
from .strategy import build_strategy

INTERRUPTED = 130  # what a shell gives for Ctrl-C


def train(config: DictConfig) -> int:
    """Train as `config` says and return the exit code. Refusals come before data is touched."""
    settings.check(config)
    machine = look_around(config)
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
    run_dir = agree(str(choose_run_dir(config)) if ranks.rank == 0 else "", ranks, machine.device)
    total_steps, why = _prepare(config, data, machine)
    choices["length"] = Choice(total_steps, why)
    word = choices["precision"].value
    choices["compile"] = choose_compile(config.compile, machine.device, total_steps, word)
    converted = prepare_network(config, machine, module)
    # All that can be refused has been: a run folder exists only from here on.
    folder = RunFolder(Path(run_dir), writes=ranks.rank == 0)
    try:
        _start(config, folder, machine)
        if folder.writes:
            show(choices)
            if converted:
                print(f"{'fp8:':<15} {converted}", flush=True)
        plain_choices = {name: choice.plain() for name, choice in choices.items()}
        folder.write_manifest(config, machine.device, plain_choices)
        folder.update_summary(**plain_choices)
        if converted:
            folder.update_summary(fp8_layers=converted.plain())
        with shared_with_children(run_dir, ranks):
            _fit(config, folder, machine, batch, module, data, total_steps)
    except RuntimeError as error:
        _fail(folder, error)
        if "find_unused_parameters" in str(error):
            raise TrainingFailed(
                "some parameters took no part in a step (a branch left them out), and DDP waits for their "
                "gradients: strategy.find_unused_parameters=true allows it; every rank must take the "
                "same branch (data.order.same_chance)"
            ) from error
        raise
    except SystemExit as error:  # what Lightning makes of Ctrl-C
        _fail(folder, KeyboardInterrupt("Ctrl-C"))
        if ranks.rank == 0:
            step = folder.summary.get("steps", 0)
            print(
                f"interrupted near step {step}; {shown(folder.path)} keeps what was saved",
                flush=True,
            )
        return INTERRUPTED if ranks.rank == 0 else int(bool(error.code))
    except BaseException as error:
        _fail(folder, error)
        raise
    finish_loggers(failed=False)
    return 0


def _fail(folder: RunFolder, error: BaseException) -> None:
    if folder.summary:
        folder.update_summary(status="failed", reason=f"{type(error).__name__}: {error}")
    finish_loggers(failed=True)


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


def _start(config: DictConfig, folder: RunFolder, machine: Machine) -> None:
    """Write what is known, so that whatever happens next can be read."""
    if folder.writes:
        print(f"{'run:':<15} {shown(folder.path)}", flush=True)
    folder.write_config(config)
    empty = {"samples_per_s": None, "tokens_per_s": None, "step_ms": None}
    folder.update_summary(
        status="running",
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        steps=0,
        epochs=0,
        metrics={},
        throughput=empty,
        mfu=Choice(None, "nothing measured yet").plain(),
        peak_memory_gib=None,
        world_size=machine.ranks.size,
    )


def _prepare(config: DictConfig, data: DataModule, machine: Machine) -> tuple[int, str]:
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


def _fit(
    config: DictConfig,
    folder: RunFolder,
    machine: Machine,
    batch: BatchPlan,
    module: TrainableModule,
    data: DataModule,
    total_steps: int,
) -> None:
    """Fit, validate the end, test the best, write the summary."""
    word, strategy = machine.choices["precision"].value, machine.choices["strategy"].value
    metrics = MetricsFile(folder.metrics, data.steps_per_epoch)
    logger = build_logger(config, folder)
    checkpoints = Checkpoints(
        folder,
        config.monitor,
        config.monitor_mode,
        config.keep_last,
        config.keep_best,
        config.checkpoint_every_steps,
    )
    monitor = Monitor(
        folder, machine.device, config.log_every_steps, choose_progress(config.progress)
    )
    trainer = build_trainer(
        config,
        device=machine.device,
        ranks=machine.ranks,
        strategy=build_strategy(strategy, config.strategy, machine.device, machine.ranks),
        precision=lightning_precision(word, apply_precision(word), strategy),
        folder=folder,
        loggers=[metrics, *([logger] if logger else [])],
        callbacks=[SyncBuffers(), checkpoints, monitor, CompileWatch(folder)],
        max_steps=total_steps,
        accumulate=batch.accumulate,
    )
    module.total_steps = total_steps
    # All ranks built the same weights; from here on their dropout differs.
    torch.manual_seed(seed_of(config.seed, "rank", machine.ranks.rank))
    trainer.fit(module, datamodule=data)
    _finish(config, folder, module, data, trainer, checkpoints, monitor, metrics)


def _finish(
    config: DictConfig,
    folder: RunFolder,
    module: TrainableModule,
    data: DataModule,
    trainer: Trainer,
    checkpoints: Checkpoints,
    monitor: Monitor,
    metrics: MetricsFile,
) -> None:
    steps = trainer.global_step
    pace = monitor.pace(module, trainer)
    if not checkpoints.saved[-1]["metrics"]:
        trainer.validate(module, datamodule=data, verbose=False)
    results = {**metrics.latest, **checkpoints.saved[-1]["metrics"]}
    best = folder.checkpoints / checkpoints.best["file"]
    best_step = load_weights(module, best)
    if config.test:
        tested = trainer.test(module, datamodule=data, verbose=False)[0]
        results |= {name: float(value) for name, value in tested.items()}
    results = {name: value for name, value in results.items() if name not in ("step", "epoch")}
    if folder.writes:
        if config.sample_prompt is not None:
            _sample(config, folder, best, module.device)
        _tell(folder, results, best_step)
    folder.update_summary(
        status="finished", steps=steps, metrics=results, best_step=best_step, **pace
    )


def _sample(config: DictConfig, folder: RunFolder, best: Path, device: torch.device) -> None:
    """Print and keep a text that the best checkpoint writes.

    By a model of its own: the trained one may lie in parts on several ranks, or be compiled for one
    length, and a text grows by a token at a time.
    """
    twin: Any = build(config.model, "model", optimizer=plain(config.optimizer))
    load_weights(twin, best)
    text = twin.to(device).sample(config.sample_prompt)
    (folder.path / "sample.txt").write_text(text, encoding="utf-8")
    print(f"\nsample (sample.txt):\n{text}\n", flush=True)


def _tell(folder: RunFolder, results: dict[str, float], best_step: int) -> None:
    """The last lines: what came out, and where it is."""
    print(f"{'finished:':<15} best checkpoint at step {best_step}", flush=True)
    for name, value in results.items():
        if name.startswith(("train_", "val_", "test_")):
            print(f"{name + ':':<15} {value:.4f}", flush=True)
    print(f"{'run:':<15} {shown(folder.path)}", flush=True)

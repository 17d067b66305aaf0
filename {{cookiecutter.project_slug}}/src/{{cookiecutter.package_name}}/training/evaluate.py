"""`evaluate run=<folder>`: a checkpoint's metrics on the test or validation split."""

import tempfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ..data.base import DataModule, LoaderOptions
from ..environment.device import Device, find_device
from ..environment.folders import shown
from ..errors import Refused
from ..models.base import TrainableModule
from ..run.folder import RunFolder, read_config, write_json
from ..run.store import brought, send_result
from ..run.weights import find_checkpoint, load_weights
from . import settings
from .build import SyncBuffers, build, build_trainer, plain
from .choices import choose_workers, plan_batch
from .monitor import evaluated
from .precision import RECIPES, apply_precision, choose_precision
from .ranks import Ranks, agree, find_ranks, shared_with_children
from .strategy import build_strategy
from .watch import watch_parent

SPLITS = ("test", "val")


def evaluate(config: DictConfig) -> int:
    """Evaluate, print the metrics and write `evaluation-<split>.json` into the run folder."""
    settings.check_keys(config, settings.EvaluateSettings)
    if config.split not in SPLITS:
        raise Refused(f"split={config.split}: choose one of {', '.join(SPLITS)}")
    if config.precision.name in RECIPES:
        raise Refused(f"precision={config.precision.name}: evaluation runs in bf16 or higher")
    run = brought(config.run, config.checkpoint)
    if not (run / "config.yaml").is_file():
        raise Refused(f"run={config.run}: no run folder is there (it would hold config.yaml)")
    trained = read_config(run)
    device = find_device(config.accelerator)
    ranks = find_ranks(config.devices, 1, device)
    watch_parent(ranks)
    module: TrainableModule = build(trained.model, "model", optimizer=plain(trained.optimizer))
    checkpoint = find_checkpoint(run, config.checkpoint)
    step = load_weights(module, checkpoint)
    data = _data(config, trained, device, ranks)
    precision = choose_precision(config.precision, device).value
    # Lightning writes into its folder; the run's own files must stay as training left them.
    with tempfile.TemporaryDirectory() as scratch, shared_with_children(str(run), ranks):
        trainer = build_trainer(
            OmegaConf.create({}),
            device=device,
            ranks=ranks,
            strategy=build_strategy(
                "ddp" if ranks.size > 1 else "single", trained.strategy, device, ranks
            ),
            precision=apply_precision(precision),
            folder=RunFolder(Path(scratch), writes=False),
            loggers=[],
            callbacks=[SyncBuffers()],
            max_steps=1,
        )
        run_split = trainer.validate if config.split == "val" else trainer.test
        run_split(module, datamodule=data, verbose=False)
    if ranks.rank == 0:
        _tell(run, config.split, checkpoint, step, evaluated(config.split, trainer))
    return 0


def _data(config: DictConfig, trained: DictConfig, device: Device, ranks: Ranks) -> DataModule:
    wish = trained.num_workers if config.num_workers is None else config.num_workers
    in_process = "context_length" in trained.data
    batch = plan_batch(config.batch_size or trained.batch_size, None, ranks.size)
    options = LoaderOptions(
        batch_size=batch.batch_size,
        micro_batch=batch.micro_batch,
        rank=ranks.rank,
        ranks=ranks.size,
        seed=trained.seed,
        num_workers=choose_workers(wish, device, ranks.here, in_process).value,
        pin_memory=device.kind == "cuda",
    )
    if config.data_folder is not None:
        trained.data.folder = str(Path(config.data_folder).expanduser().absolute())
    data: DataModule = build(trained.data, "data", options=options)
    if ranks.environment.local_rank() == 0:
        data.prepare_data()
    agree("prepared", ranks, device)
    return data


def _tell(run: Path, split: str, checkpoint: Path, step: int, metrics: dict[str, float]) -> None:
    target = run / f"evaluation-{split}.json"
    result = {"split": split, "checkpoint": checkpoint.name, "step": step, "metrics": metrics}
    write_json(target, result)
    send_result(target)
    print(f"{'checkpoint:':<15} {shown(checkpoint)} (step {step})")
    for name, value in metrics.items():
        print(f"{name + ':':<15} {value:.4f}")
    print(f"{'written:':<15} {shown(target)}", flush=True)

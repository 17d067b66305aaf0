"""One training under every strategy: the same losses, the same norms, checkpoints that move between them."""

import csv
import json
from pathlib import Path

import pytest
import torch
from conftest import Command, Door
from omegaconf import DictConfig, OmegaConf

from {{ cookiecutter.package_name }}.environment.device import Device
from {{ cookiecutter.package_name }}.errors import Refused
from {{ cookiecutter.package_name }}.models.language import LanguageModel
from {{ cookiecutter.package_name }}.training.ranks import Ranks, find_ranks
from {{ cookiecutter.package_name }}.training.strategy import choose_strategy

STEPS = 20
TOY = [
    "experiment=language",
    "debug=smoke",
    f"max_steps={STEPS}",
    f"validate_every_steps={STEPS}",
    "batch_size=8",
    "model.layers=2",
    "model.width=64",
    "precision=fp32",
    "accelerator=cpu",
]
LAYOUTS = {
    "one": ["devices=1"],
    "ddp": ["devices=2", "strategy=ddp"],
    "fsdp": ["devices=2", "strategy=fsdp", "strategy.activation_checkpointing=full"],
    "fsdp-sharded": [
        "devices=2",
        "strategy=fsdp",
        "strategy.sharded_checkpoint=true",
        "strategy.reshard_after_forward=false",
        "strategy.activation_checkpointing=selective",
        "micro_batch=2",
    ],
    "fsdp-tp": ["devices=2", "strategy=fsdp-tp"],
}


@pytest.fixture(scope="module")
def layouts(
    command: Command, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    for name, words in LAYOUTS.items():
        places = [f"data_dir={data_dir}", f"run_dir={folder}/{name}"]
        result = command("train", *TOY, *places, *words, cwd=folder)
        assert result.returncode == 0, f"{name}: {result.stdout}\n{result.stderr}"
        assert "Warning" not in result.stderr, result.stderr
        assert (folder / name / "sample.txt").read_text().startswith("def "), name
    return {name: folder / name for name in LAYOUTS}


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one"])
def test_losses_and_norms_are_those_of_one_device(name: str, layouts: dict[str, Path]) -> None:
    for what in ("train_loss", "grad_norm", "val_loss", "test_loss"):
        if "micro_batch=2" in LAYOUTS[name] and "_loss" in what and what != "train_loss":
            continue  # debug=smoke evaluates two batches, which are smaller here
        one, other = column(layouts["one"], what), column(layouts[name], what)
        assert len(one) == (STEPS if what in ("train_loss", "grad_norm") else 1)
        assert other == pytest.approx(one, rel=1e-5), what


def weights(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "checkpoints" / f"step-{STEPS:08d}.ckpt"
    content: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["state_dict"]
    return content


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp-tp"])
def test_plain_checkpoints_hold_the_same_keys_and_weights(
    name: str, layouts: dict[str, Path]
) -> None:
    one, other = weights(layouts["one"]), weights(layouts[name])
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert type(other[key]) is torch.Tensor
        torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5)


def test_a_sharded_checkpoint_is_evaluated_by_one_process(
    layouts: dict[str, Path], door: Door
) -> None:
    run = layouts["fsdp-sharded"]
    assert (run / "checkpoints" / f"step-{STEPS:08d}.ckpt").is_dir()
    losses = []
    for folder in (run, layouts["one"]):
        assert door("evaluate", f"run={folder}", "accelerator=cpu", "precision=fp32") == 0
        result = json.loads((folder / "evaluation-test.json").read_text())
        losses.append(result["metrics"]["test_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_checkpoints_start_a_run_with_another_number_of_processes(
    layouts: dict[str, Path], command: Command, data_dir: Path, tmp_path: Path
) -> None:
    """Sharded by two, taken up by one and by two with split layers; nothing learned in between."""
    source = layouts["fsdp-sharded"] / "checkpoints" / f"step-{STEPS:08d}.ckpt"
    for name, words in {"one": LAYOUTS["one"], "fsdp-tp": LAYOUTS["fsdp-tp"]}.items():
        places = [f"data_dir={data_dir}", f"run_dir={tmp_path}/{name}", f"init_from={source}"]
        result = command("train", *TOY, *places, *words, "optimizer.lr=0.0", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        before, after = weights(layouts["one"]), weights(tmp_path / name)
        for key, value in before.items():
            torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-5)


REFUSALS = {
    "strategy=fsdp-tp strategy.tensor_parallel=3 devices=2": "strategy.tensor_parallel=3",
    "strategy=fsdp-tp devices=2 experiment=vision model.backbone=test_vit": "no tensor-parallel plan",
    "strategy=fsdp-tp devices=2 model.context_length=127": "model.context_length=127",
    "strategy.activation_checkpointing=some": "none, selective, full",
    "strategy=single devices=2": "devices=1",
    "precision=fp8": "needs an NVIDIA GPU",
    "precision=fp8 precision.recipe=delayed": "tensorwise, rowwise",
}


@pytest.mark.parametrize("wish", REFUSALS)
def test_bad_pairs_are_refused_by_name(
    wish: str, door: Door, capfd: pytest.CaptureFixture[str]
) -> None:
    assert door("train", "experiment=language", "accelerator=cpu", *wish.split()) == 2
    assert REFUSALS[wish] in capfd.readouterr().err


def test_fallback_takes_the_best_there_is(door: Door, tmp_path: Path) -> None:
    words = [*TOY, "precision=fp8", "precision.fallback=true", f"run_dir={tmp_path}/run"]
    words = [word for word in words if word != "precision=fp32"]
    assert door("train", *words, "max_steps=2") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["precision"]["value"] in ("fp32", "bf16")
    assert "precision.fallback=true" in summary["precision"]["reason"]


OPTIMIZER = {"name": "adamw", "schedule": "constant", "grad_clip": 1.0}


@pytest.mark.parametrize(
    ("layers", "width", "count", "gib", "expected"),
    [
        (2, 256, 1, 80, "single"),
        (12, 768, 8, 80, "ddp"),
        (24, 2048, 8, 80, "fsdp"),  # over a billion parameters
        (12, 768, 8, 2, "fsdp-tp"),  # not even shards and activations fit
        (160, 8192, 8, 80, "pipeline parallelism"),
    ],
)
def test_auto_goes_by_memory(
    layers: int, width: int, count: int, gib: float, expected: str
) -> None:
    device = Device("cuda", "a GPU", count, (9, 0), gib)
    here = find_ranks(1, 1, Device("cpu", "", 1))
    ranks = Ranks(0, count, count, count, here.environment)
    with torch.device("meta"):
        module = LanguageModel(50257, 1024, layers, 8, width, "gelu", True, 0.0, OPTIMIZER)
    options: DictConfig = OmegaConf.create({"name": "auto", "activation_checkpointing": "none"})
    if expected == "pipeline parallelism":
        with pytest.raises(Refused, match=expected):
            choose_strategy(options, ranks, device, module, 4)
    else:
        choice = choose_strategy(options, ranks, device, module, 4)
        assert choice.value == expected and "M parameters" in choice.reason

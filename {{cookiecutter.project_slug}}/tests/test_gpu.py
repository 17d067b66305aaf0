"""What only a GPU can show: every precision learns alike, checkpoints move between them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, Door

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
TE = importlib.util.find_spec("transformer_engine") is not None
needs_fp8 = pytest.mark.skipif(CAPABILITY < (8, 9), reason="FP8 needs compute capability 8.9")
needs_te = pytest.mark.skipif(not TE, reason="Transformer Engine is not installed")
needs_ampere = pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs compute capability 8.0")

TOY = [
    "experiment=language",
    "max_steps=50",
    "batch_size=32",
    "model.layers=2",
    "model.width=256",
    "limit_eval_batches=8",
    "optimizer.lr=2e-3",
    "optimizer.grad_clip=1.0",
    "optimizer.warmup_steps=5",
    "log_every_steps=50",
    "sample_prompt=null",
    "validate_every_steps=50",
]
ALL = "precision.layers=all"
MODES = [
    pytest.param(["precision=tf32"], marks=needs_ampere, id="tf32"),
    pytest.param(["precision=bf16"], marks=needs_ampere, id="bf16"),
    pytest.param(["precision=fp16"], id="fp16"),
    pytest.param(["precision=fp8", ALL], marks=needs_fp8, id="fp8-tensorwise"),
    pytest.param(
        ["precision=fp8", ALL, "precision.recipe=rowwise"], marks=needs_fp8, id="fp8-rowwise"
    ),
    pytest.param(["precision=fp8-te", ALL], marks=[needs_fp8, needs_te], id="fp8-te-delayed"),
    pytest.param(
        ["precision=fp8-te", ALL, "precision.recipe=current"],
        marks=[needs_fp8, needs_te],
        id="fp8-te-current",
    ),
]


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def fp32(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("fp32") / "run"
    assert door("train", *TOY, "precision=fp32", f"run_dir={run}") == 0
    assert summary(run)["device"]["value"] == "cuda"
    return run


@pytest.mark.parametrize("words", MODES)
def test_every_precision_reaches_the_loss_of_fp32(
    words: list[str], fp32: Path, door: Door, tmp_path: Path
) -> None:
    assert door("train", *TOY, *words, f"run_dir={tmp_path}/run") == 0
    here, there = summary(tmp_path / "run"), summary(fp32)
    for name in ("train_loss", "val_loss"):
        assert here["metrics"][name] == pytest.approx(there["metrics"][name], rel=0.1)
    content = torch.load(tmp_path / "run/checkpoints/step-00000050.ckpt", weights_only=True)
    assert all(value.dtype == torch.float32 for value in content["state_dict"].values())
    reference = torch.load(fp32 / "checkpoints/step-00000050.ckpt", weights_only=True)
    assert content["state_dict"].keys() == reference["state_dict"].keys()


@needs_fp8
@pytest.mark.parametrize("words", MODES[3:])
def test_a_checkpoint_goes_on_under_fp8_and_back(
    words: list[str], fp32: Path, door: Door, tmp_path: Path
) -> None:
    """The loss goes on from where it was, there and back again."""
    more = ["max_steps=10", "log_every_steps=10", "validate_every_steps=10", "optimizer.lr=1e-4"]
    start = f"init_from={fp32}/checkpoints/step-00000050.ckpt"
    assert door("train", *TOY, *more, *words, start, f"run_dir={tmp_path}/there") == 0
    start = f"init_from={tmp_path}/there/checkpoints/step-00000010.ckpt"
    assert door("train", *TOY, *more, "precision=bf16", start, f"run_dir={tmp_path}/back") == 0
    before = summary(fp32)["metrics"]["val_loss"]
    for run in ("there", "back"):
        assert summary(tmp_path / run)["metrics"]["val_loss"] == pytest.approx(before, rel=0.03)


@needs_fp8
def test_fp8_with_a_ten_class_head_and_an_odd_last_batch(door: Door, tmp_path: Path) -> None:
    words = [
        "experiment=vision",
        "model.backbone=test_vit",
        "data.image_size=160",
        "data.channels=3",
    ]
    words += ["data.mean=[0.3,0.3,0.3]", "data.std=[0.3,0.3,0.3]", "max_steps=10", "batch_size=50"]
    assert door("train", *words, "precision=fp8", ALL, f"run_dir={tmp_path}/run") == 0
    result = summary(tmp_path / "run")
    assert result["fp8_layers"]["bf16"]["head"] == "the head"
    losses = []
    for size in (50, 7):
        assert door("evaluate", f"run={tmp_path}/run", f"batch_size={size}", "precision=fp32") == 0
        metrics = json.loads((tmp_path / "run/evaluation-test.json").read_text())["metrics"]
        losses.append(metrics)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert result["metrics"]["test_loss"] == pytest.approx(losses[0]["test_loss"], rel=0.1)


@needs_ampere
def test_compiled_training_does_not_break_or_recompile(door: Door, tmp_path: Path) -> None:
    words = [*TOY, "precision=bf16", "compile=true", "validate_every_steps=20"]
    words += ["sample_prompt=def"]
    assert door("train", *words, f"run_dir={tmp_path}/run") == 0
    compiled = summary(tmp_path / "run")["compiled"]
    assert compiled["graphs"] > 0
    assert compiled["graph_breaks"] == 0 and compiled["recompiles"] == []


@needs_fp8
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fsdp_on_the_gpu(
    precision: str, fp32: Path, command: Command, data_dir: Path, tmp_path: Path
) -> None:
    words = [*TOY, f"precision={precision}", "strategy=fsdp", "compile=true"]
    words += [ALL] if precision == "fp8" else []
    result = command("train", *words, f"data_dir={data_dir}", f"run_dir={tmp_path}/run")
    assert result.returncode == 0, result.stderr
    loss = summary(tmp_path / "run")["metrics"]["val_loss"]
    assert loss == pytest.approx(summary(fp32)["metrics"]["val_loss"], rel=0.1)


def test_a_deterministic_run_is_reproduced(door: Door, tmp_path: Path, capfd: Any) -> None:
    run = tmp_path / "run"
    words = [*TOY, "max_steps=20", "log_every_steps=5", "deterministic=true", f"run_dir={run}"]
    assert door("train", *words) == 0
    manifest = json.loads((run / "manifest.json").read_text())
    assert len(manifest["device"]["names"]) == torch.cuda.device_count() and manifest["driver"]
    capfd.readouterr()
    assert door("reproduce", str(run), "--here", "--json") == 0
    assert json.loads(capfd.readouterr().out)["verdict"]["word"] == "identical"


VISION = [
    "experiment=vision",
    "model.backbone=resnet10t",
    "batch_size=64",
    "validate_every_steps=5",
]
DETERMINISTIC = {"vision": VISION, "language": [*TOY, "validate_every_steps=5", "compile=false"]}


@pytest.mark.parametrize("task", DETERMINISTIC)
def test_deterministic_runs_are_equal_bit_for_bit(
    task: str, command: Command, data_dir: Path, tmp_path: Path
) -> None:
    """Two fresh runs, and one that was stopped and went on: convolutions, attention's backward."""
    words = [*DETERMINISTIC[task], "deterministic=true", "max_steps=10", f"data_dir={data_dir}"]
    for name, more, code in (
        ("one", [], 0),
        ("two", [], 0),
        ("stopped", ["stop_at=4"], 75),
        ("stopped", [], 0),
    ):
        result = command("train", *words, *more, f"run_dir={tmp_path}/{name}")
        assert result.returncode == code, result.stderr
    file = "checkpoints/step-00000010.ckpt"
    states = [
        torch.load(tmp_path / name / file, map_location="cpu", weights_only=True)["state_dict"]
        for name in ("one", "two", "stopped")
    ]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), f"{key} differs between two fresh runs"
        assert torch.equal(value, states[2][key]), f"{key} differs after a stop"


def test_out_of_memory_names_the_share_to_lower(
    command: Command, data_dir: Path, tmp_path: Path
) -> None:
    words = ["experiment=language", "model=gpt-124m", "batch_size=4096", "max_steps=2"]
    words += ["data.vocab_size=50304", "compile=false", "sample_prompt=null"]
    result = command("train", *words, f"data_dir={data_dir}", f"run_dir={tmp_path}/run")
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "out of GPU memory at step 1" in result.stderr
    assert "activations" in result.stderr and "Change first: micro_batch=2048" in result.stderr
    assert (tmp_path / "run/memory.pickle").stat().st_size > 0
    found = summary(tmp_path / "run")
    assert found["status"] == "failed"
    memory = found["memory_gib"]
    assert memory["weights"] > 0.3 and memory["activations"] > memory["weights"]
    assert memory["total"] == pytest.approx(
        torch.cuda.get_device_properties(0).total_memory / 2**30, rel=0.05
    )

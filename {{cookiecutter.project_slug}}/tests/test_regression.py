"""Three optimizer steps of each default experiment against recorded numbers, tensor by tensor.

A change that was not meant to change training must leave these as they are; after one that was,
`pytest tests/test_regression.py --renew` writes them anew and prints what moved. (A slightly other
weight decay or beta2 does not show in three steps.)

Recorded are the loss of each step; each parameter's size (root mean square) and its projection onto a
fixed direction, and the same of its first and last gradient and of the buffers at the end; and the
size of what the steps changed. All in fp32 on the CPU. Other instructions, thread counts and builds
of torch add in another order: that stays well within TOLERANCE of a tensor's size, or of the median
size where a tensor is smaller (a gradient that cancels to nearly nothing is mostly rounding). AdamW
divides by the gradient's size, so that an element near zero can move either way: hence no projection
of the change, and the vectors as one.
"""

import json
import math
import re
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PACKAGE, SHORT
from hydra import compose, initialize_config_module
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from {{ cookiecutter.package_name }}.training import settings
from {{ cookiecutter.package_name }}.training.build import build, plain

GOLDEN = Path(__file__).with_name("regression.json")
STEPS = 3
TOLERANCE = {"weight": 1e-4, "loss": 1e-4, "gradient": 1e-4, "change": 1e-3, "buffer": 1e-4}
Numbers = dict[str, list[float]]  # "<what> <tensor>": what was recorded of it


@pytest.fixture(autouse=True)
def full_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Recorder(Callback):
    """Collects the numbers while Lightning trains, in the order of the forward pass."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first: dict[str, Tensor] = {}
        self.gradients: Numbers = {}
        self.numbers: Numbers = {}

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.first = {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        if (step := trainer.global_step) in (0, STEPS - 1):
            found = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
            self.gradients |= {f"gradient {step} {name}": told(grad) for name, grad in found}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        last = dict(module.named_parameters())
        moved = {name: last[name].detach() - value for name, value in self.first.items()}
        vectors = [name for name, value in self.first.items() if value.ndim < 2]
        moved["of all vectors"] = torch.cat([moved.pop(name) for name in vectors])
        self.numbers = {f"weight {name}": told(value) for name, value in self.first.items()}
        self.numbers |= {"loss": self.losses, **self.gradients}
        self.numbers |= {f"change {name}": told(value)[:1] for name, value in moved.items()}
        self.numbers |= {f"buffer {name}": told(value) for name, value in module.named_buffers()}


def told(value: Tensor) -> list[float]:
    """Root mean square, and a projection onto a fixed direction of about that size."""
    flat = value.detach().double().flatten()
    direction = torch.cos(torch.arange(len(flat), dtype=torch.float64) * math.sqrt(2))
    size = math.sqrt(len(flat))
    return [float(f"{float(x) / size:.9g}") for x in (flat.norm(), flat @ direction)]


def batches(task: str) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    if task == "vision":
        images = torch.randn(STEPS, 16, 1, 32, 32, generator=draw)
        return [(image, torch.arange(16) % 10) for image in images]
    tokens = torch.randint(256, (STEPS, 4, 65), generator=draw)
    return [(text[:, :-1], text[:, 1:]) for text in tokens]


def train(task: str) -> Numbers:
    settings.register()
    with initialize_config_module(f"{PACKAGE}.configs", version_base="1.3"):
        config = compose("train", SHORT[task])
    seed_everything(1, verbose=False)
    module: Any = build(config.model, "model", optimizer=plain(config.optimizer))
    module.total_steps, recorder = STEPS, Recorder()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="32-true",
        max_steps=STEPS,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no validation is meant
        trainer.fit(module, DataLoader(batches(task), batch_size=None))  # type: ignore[arg-type]
    return recorder.numbers


def differences(there: Numbers, here: Numbers) -> list[str]:
    """One line for each entry that left its tolerance, in the order of the forward pass."""
    kinds = {kind: [there[key][0] for key in there if key.startswith(kind)] for kind in TOLERANCE}
    lines = [f"{key}: gone" for key in there if key not in here]
    for key, values in here.items():
        if key not in there:
            lines.append(f"{key}: new")
            continue
        kind = key.split()[0]
        size = max(there[key][0], statistics.median(kinds[kind]), 1e-12)
        far = max(abs(a - b) for a, b in zip(there[key], values, strict=True)) / size
        if not far <= TOLERANCE[kind]:
            lines.append(f"{key}: {there[key]} -> {values} (by {far:.1e} of its size)")
    return lines


def write(golden: dict[str, Numbers]) -> None:
    """One line for each entry, so that a diff shows what moved."""
    text = json.dumps(golden, indent=1)
    text = re.sub(r"\[\s+([^]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    GOLDEN.write_text(text + "\n")


@pytest.mark.parametrize("task", list(SHORT))
def test_three_steps_are_as_recorded(task: str, request: pytest.FixtureRequest) -> None:
    found = train(task)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    changed = differences(golden.get(task, {}), found)
    if request.config.getoption("--renew"):
        write({**golden, task: found})
        with request.getfixturevalue("capsys").disabled():
            title = f"\n{task}: {len(changed)} of {len(found)} entries moved"
            print(title, *changed[:20], *["..."] * (len(changed) > 20), sep="\n  ")
        return
    assert not changed, (
        f"{task}: {len(changed)} of {len(found)} entries moved, the first: {changed[0]}\n"
        "meant so? pytest tests/test_regression.py --renew"
    )

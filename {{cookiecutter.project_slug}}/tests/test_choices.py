"""Automatic choices: what is taken where, and what is refused with a way out."""

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from {{ cookiecutter.package_name }}.environment.device import Device
from {{ cookiecutter.package_name }}.errors import Refused
from {{ cookiecutter.package_name }}.training.choices import (
    BatchPlan,
    choose_compile,
    choose_workers,
    plan_batch,
)
from {{ cookiecutter.package_name }}.training.precision import (
    apply_precision,
    choose_precision,
)

CPU = Device("cpu", "a laptop", 1)
SERVER_CPU = Device("cpu", "a server", 1, cpu_bf16=True)
V100 = Device("cuda", "Tesla V100-SXM2-32GB", 1, (7, 0), 32)
T4 = Device("cuda", "Tesla T4", 1, (7, 5), 16)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 8, (8, 0), 80)
H200 = Device("cuda", "NVIDIA H200", 8, (9, 0), 140)


def asking(name: str, **options: object) -> DictConfig:
    return OmegaConf.create({"name": name, "fallback": False, **options})


@pytest.mark.parametrize(
    ("device", "best"),
    [
        (CPU, "fp32"),
        (SERVER_CPU, "bf16"),
        (V100, "fp16"),
        (T4, "fp16"),
        (A100, "bf16"),
        (H200, "bf16"),
    ],
)
def test_precision_follows_the_hardware(device: Device, best: str) -> None:
    choice = choose_precision(asking("auto"), device)
    assert choice.value == best and choice.reason


@pytest.mark.parametrize(
    ("wish", "device"), [("tf32", CPU), ("fp16", CPU), ("bf16", T4), ("tf32", V100)]
)
def test_precision_without_hardware_is_refused_with_a_way_out(wish: str, device: Device) -> None:
    with pytest.raises(Refused, match=r"precision=\w+ works"):
        choose_precision(asking(wish), device)


@pytest.mark.parametrize(
    ("word", "matmul"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "high"), ("fp16", "high")]
)
def test_tf32_is_set_explicitly_both_ways(word: str, matmul: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if matmul == "highest" else "highest")
        apply_precision(word)
        assert torch.get_float32_matmul_precision() == matmul
    finally:
        torch.set_float32_matmul_precision(before)


def test_dense_peaks_are_told_apart() -> None:
    assert A100.peak_bf16_tflops == 312 and H200.peak_bf16_tflops == 989
    assert Device("cuda", "NVIDIA H100 PCIe", 1).peak_bf16_tflops == 756
    assert Device("cuda", "NVIDIA H100 80GB HBM3", 1).peak_bf16_tflops == 989
    assert CPU.peak_bf16_tflops is None and T4.peak_bf16_tflops is None


def test_batches_are_shared_out_evenly_or_refused() -> None:
    assert plan_batch(64, None, 4) == BatchPlan(64, 16, 1)
    assert plan_batch(64, 4, 4) == BatchPlan(64, 4, 4)
    with pytest.raises(Refused, match="batch_size=63 or 66"):
        plan_batch(64, None, 3)
    with pytest.raises(Refused, match="micro_batch=8 does"):
        plan_batch(64, 10, 4)


def test_workers_and_compile_follow_the_device() -> None:
    assert choose_workers("auto", CPU, 1, in_process=False).value == 0
    assert choose_workers("auto", H200, 1, in_process=True).value == 0
    assert choose_workers("auto", H200, 1, in_process=False).value >= 1
    assert choose_workers(3, CPU, 1, in_process=True).value == 3
    with pytest.raises(Refused, match="num_workers"):
        choose_workers("lots", CPU, 1, in_process=False)
    assert choose_compile("auto", CPU, 10_000, "bf16").value is False
    assert choose_compile("auto", H200, 10, "bf16").value is False
    assert choose_compile("auto", H200, 10_000, "bf16").value is True
    assert choose_compile(True, CPU, 1, "fp32").value is True

"""Automatic choices: what is taken where, and what is refused with a way out."""

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from {{ cookiecutter.package_name }}.environment.device import Device
from {{ cookiecutter.package_name }}.errors import Refused
from {{ cookiecutter.package_name }}.training.choices import (
    BatchPlan,
    choose_compile,
    choose_workers,
    plan_batch,
)
from {{ cookiecutter.package_name }}.training.fp8 import convert_to_fp8
from {{ cookiecutter.package_name }}.training.precision import (
    apply_precision,
    choose_precision,
    propose_fp8,
)
from {{ cookiecutter.package_name }}.training.ranks import find_ranks

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


def test_fp32_means_fp32_in_nvidias_images_too() -> None:
    """They start torch with TF32 on through a variable; `fp32` must win."""
    code = (
        "import torch; started = torch.get_float32_matmul_precision(); "
        "from {{ cookiecutter.package_name }}.training.precision import apply_precision; "
        "apply_precision('fp32'); print(started, torch.get_float32_matmul_precision())"
    )
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["high", "highest"]


def test_devices_are_held_against_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_ranks([0, 3], 1, A100).devices == [0, 3]
    for wish in (9, [0, 8], [0, 0], [], "two"):
        with pytest.raises(Refused, match="devices="):
            find_ranks(wish, 1, A100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c0ffee")
    slice_ = Device("cuda", "NVIDIA H200 MIG 1g.18gb", 1, (9, 0), 18)
    with pytest.raises(Refused, match="one MIG device"):
        find_ranks(2, 1, slice_)


def test_fp8_is_proposed_where_it_pays_and_never_taken() -> None:
    auto = choose_precision(asking("auto"), H200)
    assert "precision=fp8" in propose_fp8(auto, H200, 2048).reason
    assert propose_fp8(auto, H200, 2048).value == "bf16"
    assert propose_fp8(auto, H200, 768) == auto
    assert propose_fp8(choose_precision(asking("auto"), A100), A100, 4096).value == "bf16"
    assert "fp8" not in propose_fp8(choose_precision(asking("auto"), A100), A100, 4096).reason


def test_fp8_takes_only_layers_that_fit_and_gain() -> None:
    net = nn.Sequential(nn.Linear(2048, 8192), nn.Linear(8192, 2048), nn.Linear(2048, 10))
    odd = nn.Sequential(nn.Linear(2048, 8191))
    for recipe, layers in (("tensorwise", "fast"), ("rowwise", "all")):
        options = asking("fp8", recipe=recipe, layers=layers)
        twin = copy.deepcopy(net)
        result = convert_to_fp8(twin, options, [twin[2]])
        assert result.fp8 == ["0", "1"] and result.kept == {"2": "the head"}
        assert twin.state_dict().keys() == net.state_dict().keys()
        with pytest.raises(Refused, match="no multiple of 16"):
            convert_to_fp8(odd, options, [])
    with pytest.raises(Refused, match="too small to gain"):
        convert_to_fp8(
            nn.Sequential(nn.Linear(64, 64)), asking("fp8", recipe="tensorwise", layers="fast"), []
        )


class OldTE:
    """Transformer Engine before 2.9, as far as it is called."""

    class Linear(nn.Linear):
        def __init__(self, k: int, n: int, bias: bool, params_dtype: torch.dtype, device: object):
            super().__init__(k, n, bias=bias, dtype=params_dtype)

    def __init__(self) -> None:
        self.entered: list[object] = []

    @contextlib.contextmanager
    def fp8_autocast(self, enabled: bool, fp8_recipe: object) -> Iterator[None]:
        self.entered.append(fp8_recipe)
        yield


class NewTE(OldTE):
    @contextlib.contextmanager
    def autocast(self, enabled: bool, recipe: object) -> Iterator[None]:
        self.entered.append(recipe)
        yield


@pytest.mark.parametrize("kind", [OldTE, NewTE])
def test_transformer_engine_by_its_old_and_its_new_name(
    kind: type[OldTE], monkeypatch: pytest.MonkeyPatch
) -> None:
    te = kind()
    recipe = SimpleNamespace(
        DelayedScaling=lambda: "delayed", Float8CurrentScaling=lambda: "current"
    )
    package = SimpleNamespace(pytorch=te, common=SimpleNamespace(recipe=recipe))
    for name, module in {
        "transformer_engine": package,
        "transformer_engine.pytorch": te,
        "transformer_engine.common": package.common,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))
    before = net(torch.ones(2, 32))
    result = convert_to_fp8(net, asking("fp8-te", recipe="current", layers="all"), [])
    assert result.fp8 == ["0", "1"] and isinstance(net[0], OldTE.Linear)
    assert torch.equal(net(torch.ones(2, 32)), before), "the same fp32 weights"
    assert te.entered == ["current"]


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

"""What the manifest says of a run's attempts, its data and its machine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import SHORT, Door

from {{ cookiecutter.package_name }}.data.base import LoaderOptions
from {{ cookiecutter.package_name }}.data.folders import sampled_blocks, spread
from {{ cookiecutter.package_name }}.data.images import ImageData
from {{ cookiecutter.package_name }}.data.tokens import TokenDataset


def manifest(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return content


def test_every_attempt_stays_and_no_secret_is_written(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = [*SHORT["vision"], "test=false", f"run_dir={run}"]
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hush-hush")
    monkeypatch.setenv("CUDA_MARK", "seen")
    monkeypatch.setenv("IMAGE_DIGEST", "sha256:one")
    assert door("train", *words, "stop_at=1") == 75
    first = manifest(run)
    assert door("train", *words, "stop_at=2") == 75
    monkeypatch.setenv("IMAGE_DIGEST", "sha256:two")
    assert door("train", *words) == 0
    last = manifest(run)
    assert [attempt["from_step"] for attempt in last["attempts"]] == [0, 1]
    assert last["from_step"] == 2
    assert "stop_at=1" in last["attempts"][0]["overrides"]
    assert [attempt["image"]["digest"] for attempt in last["attempts"]] == ["sha256:one"] * 2
    assert last["image"]["digest"] == "sha256:two"
    assert "packages" not in last["attempts"][0], "what is the same is not written twice"
    assert first["config"] != {} and first["data"] == last["data"]
    assert last["environment"]["CUDA_MARK"] == "seen"
    assert "hush" not in json.dumps(last)


def test_a_run_does_not_go_on_with_other_data(
    door: Door, data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORT["vision"], "test=false", f"run_dir={tmp_path}/run", f"data_dir={tmp_path}"]
    assert door("train", *words, "stop_at=2") == 75
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    seen = manifest(tmp_path / "run")["data"]
    assert summary["data"]["fingerprint"] == seen["fingerprint"]
    assert summary["data"]["train"] == seen["splits"]["train"]["counts"]["samples"]
    next((tmp_path / "digits" / "train" / "3").iterdir()).unlink()
    capfd.readouterr()
    assert door("train", *words) == 2
    complaint = capfd.readouterr().err
    assert "saw other data" in complaint and "train: class 3" in complaint
    assert manifest(tmp_path / "run")["attempts"] == [], "a refusal changed the run"
    assert door("train", *words, "resume=never", "max_steps=1") == 0


def test_the_fingerprint_follows_the_data_and_not_its_place(
    runs: dict[str, Path], data_dir: Path, tmp_path: Path
) -> None:
    def fingerprint(folder: Path) -> str:
        options = LoaderOptions(batch_size=4, micro_batch=4)
        data = ImageData(
            str(folder), 10, 8, 1, [0.5], [0.5], "none", 0.1, 0.1, options, source=None
        )
        data.setup()
        return data.fingerprint()

    shutil.copytree(data_dir / "digits", tmp_path / "moved")
    before = fingerprint(data_dir / "digits")
    assert fingerprint(tmp_path / "moved") == before
    image = next((tmp_path / "moved" / "val" / "1").iterdir())
    image.rename(image.with_name("9999.png"))
    assert fingerprint(tmp_path / "moved") != before


def test_the_digest_of_tokens_sees_sampled_blocks_and_the_size(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    file.write_bytes(bytes(range(256)) * 64)

    def digest() -> str:
        return TokenDataset(file, 16, shift=False, seed=1).digest()

    before = digest()
    file.write_bytes(bytes(range(256)) * 63 + bytes(256))
    assert digest() != before
    assert len(sampled_blocks(file, most=2, size=10)) == 10 + 16384 % 10
    assert spread(range(10), 3) == [0, 4, 9]

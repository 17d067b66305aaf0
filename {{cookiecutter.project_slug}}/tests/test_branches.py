"""Dynamic control flow: branches under DDP, and graphs, breaks and recompiles under torch.compile."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SHORT, Command
from torch import Tensor, nn

from {{ cookiecutter.package_name }}.data.order import same_chance
from {{ cookiecutter.package_name }}.run.folder import RunFolder
from {{ cookiecutter.package_name }}.training.compile_watch import CompileWatch

WORDS = [
    "train",
    *SHORT["language"],
    "max_steps=6",
    "accelerator=cpu",
    "precision=fp32",
    "sample_prompt=null",
    "model._target_=branches.Branching",
]


@pytest.fixture
def go(
    command: Command, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return lambda name, *words: command(
        *WORDS, f"data_dir={data_dir}", f"run_dir={tmp_path}/{name}", *words, cwd=tmp_path
    )


def test_a_branch_by_chance_under_ddp(go: Command, tmp_path: Path) -> None:
    assert len({same_chance(0, step, 0.5) for step in range(6)}) == 2, "both branches must occur"
    refused = go("refused", "devices=2")
    assert refused.returncode == 1
    assert "strategy.find_unused_parameters=true" in refused.stderr
    for name, words in {
        "one": ["devices=1"],
        "two": ["devices=2", "strategy.find_unused_parameters=true"],
    }.items():
        result = go(name, *words)
        assert result.returncode == 0, result.stderr
    losses = []
    for name in ("one", "two"):
        with (tmp_path / name / "metrics.csv").open() as file:
            losses.append([float(r["train_loss"]) for r in csv.DictReader(file) if r["train_loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Breaking(nn.Module):
    """Its branch depends on the data: torch.compile must leave the graph to look."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return x * 2


@pytest.mark.parametrize(("net", "breaks"), [(nn.Linear(4, 4), 0), (Breaking(), 1)])
def test_graphs_breaks_and_recompiles_are_counted(
    net: nn.Module, breaks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    net.compile(backend="eager", dynamic=False)  # needs no C++ compiler; the graphs are the same
    folder = RunFolder(tmp_path / "run", writes=True)
    watch = CompileWatch(folder)
    for step, size in enumerate([8, 8, 8, 8, 5], start=1):
        trainer = SimpleNamespace(global_step=step, is_global_zero=True)
        watch.on_train_batch_start(trainer)  # type: ignore[arg-type]
        net(torch.ones(size, 4))
        watch.on_train_batch_end(trainer)  # type: ignore[arg-type]
    watch.on_train_end(trainer)  # type: ignore[arg-type]
    compiled = folder.summary["compiled"]
    assert compiled["graphs"] >= 1 and (compiled["graph_breaks"] > 0) == (breaks > 0)
    assert len(compiled["recompiles"]) == 1 and "step 5" in compiled["recompiles"][0]
    printed = capsys.readouterr().out
    assert "compiled again at step 5" in printed
    assert ("left the graph" in printed) == (breaks > 0)
    assert folder.summary["first_step_s"] >= 0

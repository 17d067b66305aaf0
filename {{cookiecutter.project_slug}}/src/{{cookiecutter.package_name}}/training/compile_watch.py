"""How long the first step took, how many graphs torch.compile made, and whether it compiles again later."""

import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from ..run.folder import RunFolder

WARM_UP = 2  # optimizer steps that may compile


class CompileWatch(Callback):
    """Writes `first_step_s` and `compiled` into the summary; a recompile after warm-up is a warning."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.started: float | None = None
        self.first_step_s: float | None = None
        self.recompiles: list[str] = []
        self.graphs_before = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.started is None:
            torch._dynamo.utils.counters.clear()
            torch._dynamo.utils.clear_compilation_metrics()
            self.started = time.perf_counter()
        self.graphs_before = _graphs()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self.first_step_s is None and self.started is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.first_step_s = round(time.perf_counter() - self.started, 3)
        if trainer.global_step > WARM_UP and _graphs() > self.graphs_before:
            reason = _last_reason()
            self.recompiles.append(f"step {trainer.global_step}: {reason}")
            if trainer.is_global_zero:
                print(
                    f"warning: torch.compile compiled again at step {trainer.global_step}: {reason}"
                )

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        compiled = {
            "graphs": _graphs(),
            "graph_breaks": _breaks(),
            "recompiles": self.recompiles,
        }
        self.folder.update_summary(first_step_s=self.first_step_s, compiled=compiled)
        if compiled["graph_breaks"] and trainer.is_global_zero:
            places = compiled["graph_breaks"]
            print(
                f"warning: torch.compile left the graph at {places} places; TORCH_LOGS=graph_breaks names them"
            )


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _breaks() -> int:
    """Where the graph was left: each place goes on in a function of its own. (torch 2.14 no longer
    counts a branch on data among its `graph_break` counters.)"""
    names = (
        getattr(m, "co_name", None) or "" for m in torch._dynamo.utils.get_compilation_metrics()
    )
    return len({name for name in names if name.startswith("torch_dynamo_resume_in")})


def _last_reason() -> str:
    """What changed, in torch's words (a tensor's size, most often)."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    reasons = [m.recompile_reason for m in metrics if getattr(m, "recompile_reason", None)]
    return " ".join(str(reasons[-1]).split()) if reasons else "torch gives no reason"

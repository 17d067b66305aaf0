"""metrics.csv: one row per log step or validation, whichever loggers run beside it."""

import csv
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

FIRST = ("step", "epoch")


class MetricsFile(Logger):
    """Appends to a CSV file; a metric that was not seen before adds a column.

    Lightning's CSVLogger keeps all rows in memory and deletes the file when a run goes on.

    Args:
        from_step: the step this run goes on from. Rows of later steps are dropped (a killed run may
            have gone further than its last checkpoint), and so are evaluations that come again.
        validated: whether the validation at that step stays.
    """

    def __init__(
        self, path: Path, steps_per_epoch: int, from_step: int = 0, validated: bool = False
    ) -> None:
        super().__init__()
        self.path, self.steps_per_epoch = path, steps_per_epoch
        self.columns: list[str] = []
        self.latest: dict[str, float] = {}
        if path.exists():
            rows = [row for row in self._read() if _stays(row, from_step, validated)]
            self._rewrite(rows)
            for row in rows:
                self.latest.update({k: float(v) for k, v in row.items() if v})

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return self.path.parent.name

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {key.replace("/", "_"): value for key, value in metrics.items()}
        row["step"] = step or 0  # optimizer steps, for Lightning's own calls too
        row["epoch"] = round(row["step"] / self.steps_per_epoch, 4)
        self.latest.update(row)
        new = [key for key in (*FIRST, *row) if key not in self.columns]
        if new:
            self._add_columns(list(dict.fromkeys(new)))
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, restval="").writerow(row)

    def _add_columns(self, new: list[str]) -> None:
        rows = self._read() if self.path.exists() else []
        self.columns += new
        self._rewrite(rows)

    def _read(self) -> list[dict[str, str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        self.columns = list(reader.fieldnames or [])
        return rows

    @rank_zero_only
    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)


def _stays(row: dict[str, str], from_step: int, validated: bool) -> bool:
    if any(value and key.startswith("test_") for key, value in row.items() if key):
        return False
    is_validation = any(value and key.startswith("val_") for key, value in row.items() if key)
    step = int(row["step"] or 0) if (row.get("step") or "").isdigit() else from_step + 1
    return step < from_step or (step == from_step and (validated or not is_validation))

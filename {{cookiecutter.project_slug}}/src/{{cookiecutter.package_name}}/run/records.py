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
    """

    def __init__(self, path: Path, steps_per_epoch: int) -> None:
        super().__init__()
        self.path, self.steps_per_epoch = path, steps_per_epoch
        self.columns: list[str] = []
        self.latest: dict[str, float] = {}
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self.columns = next(csv.reader(file), [])

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
        rows: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        self.columns += new
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)

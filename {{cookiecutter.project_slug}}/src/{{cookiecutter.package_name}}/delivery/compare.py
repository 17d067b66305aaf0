"""Two runs' metrics.csv, step by step."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

# What the clock decides.
_NOT_COMPARED = ("_per_s", "_ms", "_gib", "_seconds")

Values = dict[tuple[int, str], str]


@dataclass(frozen=True)
class Verdict:
    """What the comparison found.

    Attributes:
        word: "identical", "within tolerance" or "differs".
        values, steps: how many were compared.
        step, column, there, here: "within tolerance": where the relative difference is largest;
            "differs": the first step that does. None when identical.
        relative: that difference; infinite when one side has no value.
    """

    word: str
    values: int
    steps: int
    step: int | None = None
    column: str | None = None
    there: str | None = None
    here: str | None = None
    relative: float = 0.0

    def __str__(self) -> str:
        size = f"{self.values} values at {self.steps} step{'s' * (self.steps != 1)}"
        if self.word == "identical":
            return f"identical ({size})"
        at = f"{self.column} at step {self.step}: {self.there} there, {self.here} here"
        if self.word == "differs":
            return f"differs from step {self.step} on ({at}; {size} compared)"
        return f"within tolerance (largest relative difference {self.relative:.2g}, {at}; {size})"


def read_metrics(file: Path) -> Values:
    """Every comparable value of a metrics.csv, as written, by step and column."""
    with file.open(newline="", encoding="utf-8") as lines:
        return {
            (int(row["step"]), column): value
            for row in csv.DictReader(lines)
            for column, value in row.items()
            if value and column != "step" and not column.endswith(_NOT_COMPARED)
        }


def compare(there: Values, here: Values, tolerance: float, last_step: int | None) -> Verdict:
    """Hold two runs against each other.

    Args:
        tolerance: the largest relative difference that counts as equal enough.
        last_step: where the second run was stopped on purpose (what was due at that very step may
            be missing); None: both are whole, and a value that only one has is a difference.
    """
    keys = [key for key in there | here if last_step is None or key[0] <= last_step]
    if last_step is not None:
        both = [key for key in keys if key[0] < last_step or (key in there and key in here)]
        keys = both or keys
    keys.sort(key=lambda key: key[0])  # stable: columns stay in the file's order
    counts = len(keys), len({step for step, _ in keys})
    gaps = {key: _gap(there.get(key), here.get(key)) for key in keys}
    far = next((key for key in keys if gaps[key] > tolerance), None)
    worst = far or max(keys, key=lambda key: gaps[key])
    if gaps[worst] == 0:
        return Verdict("identical", *counts)
    sides = there.get(worst, "nothing"), here.get(worst, "nothing")
    return Verdict("differs" if far else "within tolerance", *counts, *worst, *sides, gaps[worst])


def _gap(there: str | None, here: str | None) -> float:
    """Relative difference of two values as written."""
    if there is None or here is None:
        return math.inf
    a, b = float(there), float(here)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b) / max(abs(a), abs(b))
    return math.inf if math.isnan(gap) else gap

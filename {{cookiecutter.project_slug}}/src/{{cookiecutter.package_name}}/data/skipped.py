"""Samples that cannot be read: the end of training, or left out, counted and named."""

import os
from pathlib import Path

from ..errors import Refused

ON_ERROR = ("raise", "skip")
SHOWN = 5  # lines on the terminal; the file has them all


class Skipped:
    """What becomes of a sample that cannot be read. Copied into each loader process.

    Args:
        on_error: `raise` ends the run; `skip` notes the sample once.

    Attributes:
        file: where they are named, a line each; None: nowhere but on the terminal.
    """

    def __init__(self, on_error: str = "raise") -> None:
        if on_error not in ON_ERROR:
            raise Refused(f"data.on_error={on_error}: choose one of {', '.join(ON_ERROR)}")
        self.on_error = on_error
        self.file: Path | None = None
        self.met: set[str] = set()

    def note(self, sample: str, error: Exception) -> None:
        """Keep in mind that this sample was left out.

        Raises:
            Refused: with `on_error=raise`.
        """
        why = " ".join(str(error).split()) or type(error).__name__
        if self.on_error == "raise":
            raise Refused(
                f"cannot read {sample} ({why}): mend or remove it, or data.on_error=skip"
            ) from error
        if sample in self.met or sample in self.named():
            return
        self.met.add(sample)
        if len(self.met) <= SHOWN:
            print(f"{'warning:':<15} skipped: cannot read {sample} ({why})", flush=True)
        if self.file is not None:
            line = f"{sample}\t{why}\n".encode("utf-8", "surrogateescape")
            number = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(number, line)  # one write: lines of several processes do not mix
            finally:
                os.close(number)

    def named(self) -> set[str]:
        """The samples in the file, by whatever process or earlier part of the run."""
        if self.file is None or not self.file.exists():
            return set()
        text = self.file.read_text(encoding="utf-8", errors="surrogateescape")
        return {line.split("\t")[0] for line in text.splitlines()}

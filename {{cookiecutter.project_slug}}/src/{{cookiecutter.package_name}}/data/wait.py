"""How long the device stood still for want of data, known without making anybody wait."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


class WaitClock:
    """Adds up the waits for batches.

    On a GPU an event goes onto its stream when a batch is asked for and another when it has come. Both
    pass at once while the device still has work; what lies between them is time in which it had none.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def take(self) -> float:
        """Seconds since the last call. On a GPU only after a synchronisation."""
        for pair in self.events:
            self.seconds += pair[0].elapsed_time(pair[1]) / 1e3
        self.free += self.events
        seconds, self.seconds, self.events = self.seconds, 0.0, []
        return seconds

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each wait for one counted."""
        on_gpu = torch.cuda.is_initialized()
        while True:
            started = time.perf_counter()
            pair = self._pair() if on_gpu else None
            if pair:
                pair[0].record()
            batch = next(batches, None)
            if pair:
                pair[1].record()
                self.events.append(pair)
            else:
                self.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def _pair(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if self.free:
            return self.free.pop()
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class WatchedLoader(DataLoader[Any]):
    """A DataLoader whose waits are counted; `clock` is set after it is made."""

    clock: WaitClock | None = None

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return batches if self.clock is None else self.clock.watch(batches)

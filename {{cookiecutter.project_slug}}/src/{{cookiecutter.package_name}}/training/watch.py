"""A rank's death ends all ranks, with a line: without it the others would wait for it in a collective."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from lightning.pytorch.strategies.launchers import subprocess_script

from ..environment.memory import killed_for_memory
from ..errors import FAILED, Stopped
from ..run.folder import RunFolder
from .ranks import Ranks

Process: TypeAlias = "subprocess.Popen[Any]"
GRACE = 10  # seconds that a rank gets to end by itself, which leaves better words
_LOST = re.compile(
    r"gloo.*(onnection|Broken pipe|Read error|Timed out)|remote process exited|communicator was aborted",
    re.DOTALL,
)


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or does not answer."""
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


def watch_parent(ranks: Ranks) -> None:
    """End this rank when the process that started it is gone: rank 0, torchrun or srun."""
    if ranks.size == 1 or (ranks.rank == 0 and not ranks.launched_outside):
        return
    first = 0 if ranks.launched_outside else 1
    speaks = ranks.environment.local_rank() == first
    parent = os.getppid()
    threading.Thread(target=_wait_for_parent, args=(parent, speaks), daemon=True).start()


def _wait_for_parent(parent: int, speaks: bool) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    line = f"process {parent}, which started the ranks, is gone: they end; the same command goes on"
    _end(line if speaks else "", [])


class RankWatch(threading.Thread):
    """Looks at the ranks that this process has started, until all have ended well.

    Args:
        first: the rank of this process; those that it started follow.
    """

    def __init__(self, folder: RunFolder, first: int, processes: list[Process]) -> None:
        super().__init__(daemon=True)
        self.folder, self.first, self.processes = folder, first, processes
        self.hurry = threading.Event()
        self.over = False

    def run(self) -> None:
        while not self.over:
            codes = [process.poll() for process in self.processes]
            if not any(code != 0 for code in codes):
                return
            for number, code in enumerate(codes, self.first + 1):
                if code:
                    self._end_all(number, code)
                    return
            time.sleep(0.2)

    def _end_all(self, rank: int, code: int) -> None:
        if code > 0:
            self.hurry.wait(GRACE)  # what it met, this rank may meet as well, and say it better
        if self.over or self.folder.summary.get("status") == "finished":
            return
        line = f"rank {rank} {how_it_ended(code)}: all ranks end; the same command goes on"
        self.folder.update_summary(status="failed", reason=line)
        _end(line, self.processes)

    def close(self) -> None:
        """This rank ends with words of its own: the others get some time to do so too."""
        self.over = True
        end = time.monotonic() + GRACE
        for process in self.processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def watched(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Watch the ranks that Lightning starts, in place of its own observer: that one kills this
    process too, and says nothing."""
    watches: list[RankWatch] = []

    def observe(child_processes: list[Process]) -> None:
        watches.append(RankWatch(folder, ranks.rank, child_processes))
        watches[-1].start()

    before = subprocess_script._launch_process_observer
    subprocess_script._launch_process_observer = observe
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        if lost_a_rank(error):
            for watch in watches:
                watch.hurry.set()
            time.sleep(GRACE / 2)  # whoever knows which rank it was ends this process meanwhile
        for watch in watches:
            watch.close()
        raise
    finally:
        subprocess_script._launch_process_observer = before


def how_it_ended(code: int) -> str:
    """A process's exit code in words; below 0 it is a signal's number."""
    if code > 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if name != "SIGKILL":
        return f"was killed by {name}"
    killed = killed_for_memory()
    why = "by hand, by the scheduler, or by the kernel for want of host memory"
    if killed:
        why = f"the kernel has killed {killed} processes here for want of host memory"
    return f"was killed by {name} ({why})"


def _end(line: str, processes: list[Process]) -> None:
    """End this process from a thread, whatever its main thread waits for."""
    for process in processes:
        process.kill()
    for worker in multiprocessing.active_children():
        worker.kill()
    if line:
        name = __name__.split(".")[0].replace("_", "-")
        print(f"{name}: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(FAILED)

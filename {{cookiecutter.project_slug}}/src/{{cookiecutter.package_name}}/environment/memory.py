"""Host memory: what is left, how large /dev/shm is, and whether the kernel has ended processes."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def host_memory_left(cgroup: Path = CGROUP) -> float | None:
    """Bytes that this process may still take: the machine's, or its container's if less; None: unknown."""
    left = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        left += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        used = int((cgroup / "memory.current").read_text())
        left.append(float(int((cgroup / "memory.max").read_text()) - used))
    except (OSError, ValueError):  # no Linux; no cgroup v2; "max" where there is no limit
        pass
    return min(left, default=None)


def killed_for_memory(cgroup: Path = CGROUP) -> int:
    """How many processes of this container the kernel has killed for want of memory; 0: none known."""
    try:
        lines = (cgroup / "memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def shared_memory() -> tuple[float, float] | None:
    """Free bytes and size of /dev/shm, by which loader processes hand batches over; None: not there."""
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    return float(found.f_bavail * found.f_frsize), float(found.f_blocks * found.f_frsize)

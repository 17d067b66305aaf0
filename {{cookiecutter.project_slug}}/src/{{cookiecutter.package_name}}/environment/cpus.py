"""How many CPUs this process may really use. The machine's count is not it."""

import os
from pathlib import Path


def granted_cpus() -> int:
    """CPUs granted by affinity, cgroup quota (v2 or v1) and SLURM, whichever is least; at least 1."""
    counts = [_affinity(), _cgroup_quota(), _slurm()]
    return max(1, min(count for count in counts if count is not None))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Whole CPUs of the container's time quota, rounded up; None without a quota."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota == "max" or int(quota) <= 0:
        return None
    return -(-int(quota) // int(period))


def _slurm() -> int | None:
    """CPUs of this task inside an allocation (`srun` binds them, but not on every cluster)."""
    value = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(value) if value.isdigit() else None

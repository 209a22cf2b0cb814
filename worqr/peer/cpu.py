"""How many cores a process may use, and how many it needs.

This module imports neither Trio nor other modules of the peer, so that any program can use it.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path


class CpuMeter:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._used = time.process_time()
        self._waited = _wait_times()

    def wanted(self) -> float:
        """Return the number of cores that the process has needed since its creation.

        This is the average number of threads that ran, or were ready to run without getting a core. Systems other than Linux do
        not report waiting threads; there, only running threads count.
        """
        waited = sum([wait - self._waited.get(thread, 0) for thread, wait in _wait_times().items()]) / 1e9
        return (time.process_time() - self._used + waited) / (time.monotonic() - self._began)


def _wait_times() -> dict[str, int]:
    """Return for each thread the nanoseconds in which it was ready to run without running."""
    found: dict[str, int] = {}
    threads = Path("/proc/self/task")
    try:
        names = os.listdir(threads)
    except OSError:
        return found
    for name in names:
        words = _read_words(threads / name / "schedstat")  # time on a core, time ready without one, times it ran
        if len(words) == 3:
            found[name] = int(words[1])
    return found


def default_processes(root: Path = Path("/")) -> int:
    """Return the default number of worker processes: the number of cores that this process may use, rounded up."""
    return max(1, math.ceil(usable_cores(root)))


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use: its CPU affinity, limited by the quota of its control group."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(cpus), *_quotas(root)])


def _quotas(root: Path) -> list[float]:
    """Return the quotas from the files of control groups, versions 2 and 1, where they can be read."""
    found: list[float] = []
    groups, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            folder = groups / path.strip("/")
            for level in [folder, *folder.parents]:
                if level == groups.parent:
                    break
                found += _parse_quota(_read_words(level / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for level in (groups / "cpu" / path.strip("/"), groups / "cpu"):
                found += _parse_quota(
                    _read_words(level / "cpu.cfs_quota_us") + _read_words(level / "cpu.cfs_period_us")
                )
    return found


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").split()
    except OSError:
        return []


def _parse_quota(words: list[str]) -> list[float]:
    """Return the cores of a quota and its period, both in microseconds: ``["150000", "100000"]`` is one and a half cores.

    "max" and -1 are no quota.
    """
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return [int(words[0]) / int(words[1])]
    return []

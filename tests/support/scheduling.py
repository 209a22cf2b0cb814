"""In which order tests begin, and what one process runs of a file when several run side by side (pytest-xdist)."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ONE_BY_ONE = (
    *("test_benchmarks", "test_cut_connections", "test_crash_points", "test_web", "test_plugin", "test_zombies"),
    *("test_jobs", "test_worker", "test_examples", "test_demo", "test_refusals", "test_recovery"),
)
"""Files that take longest. Their tests share no set-up, so they go to whichever process is free, one by one."""

LONGEST_FIRST = (*ONE_BY_ONE, "test_cluster", "test_project", "test_cluster_faults", "test_document")
"""Files that begin first, so that none of them is left over when the processes beside it have nothing to do."""


def rank(path: PurePath) -> int:
    """Where the tests of a file stand in a run."""
    return LONGEST_FIRST.index(path.stem) if path.stem in LONGEST_FIRST else len(LONGEST_FIRST)


class ByFile(LoadScopeScheduling):
    """Gives each process a file at a time, because tests of a file share set-ups; of the longest files a test at a time."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # which would begin with the files that have most tests

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if PurePath(file).stem in ONE_BY_ONE else file

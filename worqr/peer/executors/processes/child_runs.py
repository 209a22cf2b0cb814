"""The runs of a worker process, as the functions in it see them. What is sent to the parent is in `child_reports`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from worqr.peer.executors.processes.child_reports import ChildProgress, ChildSaves, Pipe
from worqr.peer.executors.processes.protocol import Extended, RunRequest
from worqr.peer.list_run import ListItem, ListRun
from worqr.peer.run import Run, Save
from worqr.policy import Policy


class ProcessHost:
    """The `RunHost` of this process."""

    def __init__(
        self,
        queue: str,
        id_suffix: str,
        policy: Policy,
        state: object,
        pipe: Pipe,
        progress: ChildProgress,
        saves: ChildSaves,
    ) -> None:
        self.queue = queue
        self.id_suffix = id_suffix
        self.policy = policy
        self.state = state
        self._pipe = pipe
        self.report_progress: Callable[[Run[Any], float | None, str], None] = progress.report
        self.save: Callable[[Run[Any], Save], Future[None]] = saves.save

    def policy_with(self, own: tuple[tuple[bytes, bytes], ...]) -> Policy:
        """Return the policy of a job with policy fields of its own."""
        return self.policy.with_overrides({name.decode(): value.decode() for name, value in own})

    def extend(self, run: Run[Any], seconds: float) -> None:
        """Request more time from the parent. From any thread. A run without a timeout stays without one."""
        if run.timer is not None:
            run.timer.move_to(time.monotonic() + seconds)
            self._pipe.send(Extended(seconds))


class ProcessRun(Run[ProcessHost]):
    """A run in this process. It observes no cancellation, because a cancelled run is killed."""

    __slots__ = ()

    def check_cancelled(self) -> None:
        """Do nothing, because a run that is cancelled is killed."""

    def check_may_wait(self, instead: str) -> None:
        """Do nothing, because this process waits for nothing else."""


class ProcessListRun(ListRun):
    """A list run in this process."""

    __slots__ = ()

    def check_cancelled(self) -> None:
        """Do nothing, because a run that is cancelled is killed."""

    def check_may_wait(self, instead: str) -> None:
        """Do nothing, because this process waits for nothing else."""


class ProcessListItem(ListItem):
    """A call of a list run in this process."""

    __slots__ = ()

    def check_cancelled(self) -> None:
        """Do nothing, because a run that is cancelled is killed."""

    def check_may_wait(self, instead: str) -> None:
        """Do nothing, because this process waits for nothing else."""


def run_of(host: ProcessHost, request: RunRequest) -> Run[Any]:
    """Return the run that the peer requests."""
    if request.calls is None:
        return ProcessRun(host, None, request.fence, request.entry)
    first, *others = [ProcessListItem(host, None, fence, entry) for fence, entry in request.calls]
    run = ProcessListRun(first)
    for item in others:
        run.add(item)
    run.begin_calls(time.monotonic())
    return run

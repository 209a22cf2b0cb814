"""`BlockingControls`: the schedules and workers of a mesh for synchronous code. `BlockingMesh` inherits it.

A call runs the coroutine of the same name to its end in the calling thread.
"""

from __future__ import annotations

from datetime import tzinfo
from typing import Literal, Protocol

from worqr.client.blocking_jobs import BlockingJob, run_coroutine
from worqr.client.client import Client
from worqr.client.job import Job
from worqr.cron import Schedule


class AsyncControls(Protocol):
    """What `BlockingControls` calls: the methods of `worqr.Mesh`."""

    async def schedules(self) -> list[Schedule]: ...
    async def pause_schedule(self, name: str, *, paused: bool = True) -> None: ...
    async def run_schedule(self, name: str) -> Job[bytes]: ...
    async def override_schedule(self, name: str, cron: str | None, *, timezone: str | tzinfo | None = None) -> None: ...
    async def ask_worker(
        self,
        worker_id: str,
        what: Literal["quiet", "resume", "drain"] | None = None,
        *,
        concurrency: int | Literal["auto"] | None = None,
    ) -> None: ...


class BlockingControls:
    """The part of `BlockingMesh` that controls schedules and workers."""

    __slots__ = ("_client", "_controls")

    def __init__(self, controls: AsyncControls, client: Client) -> None:
        self._controls = controls
        self._client = client

    def schedules(self) -> list[Schedule]:
        """Return all schedules of the mesh, by name. See ``mesh.schedules``."""
        return run_coroutine(self._client, self._controls.schedules())

    def pause_schedule(self, name: str, *, paused: bool = True) -> None:
        """Pause a schedule, or resume it with ``paused=False``. See ``mesh.pause_schedule``.

        Args:
            name: The name of the schedule.
            paused: False: resume it.

        Raises:
            UsageError: There is no schedule of this name.
        """
        run_coroutine(self._client, self._controls.pause_schedule(name, paused=paused))

    def run_schedule(self, name: str) -> BlockingJob[bytes]:
        """Enqueue the task of a schedule now. See ``mesh.run_schedule``.

        Args:
            name: The name of the schedule.

        Returns:
            A handle of the job. Its `outcome` is ``unchanged`` if the previous run has not ended.

        Raises:
            UsageError: There is no schedule of this name, or a newer version of worqr declared it.
        """
        return BlockingJob(self._client, run_coroutine(self._client, self._controls.run_schedule(name)))

    def override_schedule(self, name: str, cron: str | None, *, timezone: str | tzinfo | None = None) -> None:
        """Give a schedule other times than its code, or return to those of the code. See ``mesh.override_schedule``.

        Args:
            name: The name of the schedule.
            cron: A cron expression. None: the times of the code.
            timezone: An IANA name, or a ``zoneinfo.ZoneInfo``. None: that of the code.

        Raises:
            UsageError: The expression or the zone is not valid, or there is no schedule of this name.
        """
        run_coroutine(self._client, self._controls.override_schedule(name, cron, timezone=timezone))

    def ask_worker(
        self,
        worker_id: str,
        what: Literal["quiet", "resume", "drain"] | None = None,
        *,
        concurrency: int | Literal["auto"] | None = None,
    ) -> None:
        """Ask a worker to take no new tasks, to take tasks again, to leave, or for another concurrency. See ``mesh.ask_worker``.

        Args:
            worker_id: As in ``mesh.workers()``.
            what: ``"quiet"``, ``"resume"`` or ``"drain"``.
            concurrency: The number of units of work that it runs at once, or ``"auto"``.

        Raises:
            UsageError: An argument is not valid, or there is no worker with this id.
        """
        run_coroutine(self._client, self._controls.ask_worker(worker_id, what, concurrency=concurrency))

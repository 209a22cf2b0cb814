"""`Fleet`: list the workers of a mesh, evict one, find a job in all queues, and watch the connection to the server.

`Mesh` is a `Fleet`. `peer.session` registers workers, and `peer.leader` finds dead ones.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final, Literal

from worqr import ops
from worqr.client.client import Client
from worqr.client.events import ConnectionEvent, connection_events_of
from worqr.client.finished import forget_jobs_of, forgotten_in_all
from worqr.client.inspection import all_shards, all_workers, queue_names, read_log, status_of
from worqr.client.permits import named_limits
from worqr.errors import UsageError, WorqrError
from worqr.job_options import check_id, check_tag
from worqr.keys import QueueKeys, RegistryKeys, shard_of
from worqr.limits import LimitInfo
from worqr.link import Link
from worqr.log_events import emit
from worqr.mesh_records import LogEntry, MeshInfo, WorkerInfo
from worqr.records import Forgotten, Status
from worqr.validation import check_count, check_text

logger: logging.Logger = logging.getLogger("worqr.fleet")  # a documented name

AT_ONCE: Final = 1_000
"""Requests in one round trip."""

REQUESTS: Final = ("quiet", "resume", "drain")
MOST_UNITS: Final = 1_000_000
"""The largest concurrency that a worker can be asked for: a typing error must not claim a whole queue."""
NEAREST = 3
"""Ids that the error about an unknown id suggests at most."""


class Fleet:
    """The part of `Mesh` that shows the whole mesh, finds jobs and evicts workers. Its calls need ``mesh.connect()`` or
    ``join()``.
    """

    _client: Client

    async def workers(self) -> list[WorkerInfo]:
        """Return all workers, by id. A worker that died is listed until its tasks are given back, within about 5 s.

        A page of 500 workers is one request.

        Raises:
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return sorted(await all_workers(self._client), key=lambda info: info.id)

    async def info(self) -> MeshInfo:
        """Return the whole mesh at one moment: its leader, its queues, and the workers of each application.

        While programs call this, the leader stores a snapshot every 3 s, and all callers read that. Without a fresh snapshot,
        for example because no worker runs, this process reads the queues itself, at most once in 5 s.

        Returns:
            The snapshot. Its `source` and `age` say who made it, and how long ago.

        Raises:
            UsageError: Outside `connect` and `join`.
            RefusedByServer: Your user lacks a permission.
            Unavailable: The server did not reply within `patience`.
        """
        return await self._client.mesh_info.read()

    async def limits(self) -> list[LimitInfo]:
        """Return the limits with a name that programs of the mesh have used in the last 30 days, by name, and what is in use.

        Raises:
            UsageError: Outside `connect` and `join`.
            RefusedByServer: Your user lacks a permission.
            Unavailable: The server did not reply within `patience`.
        """
        return await named_limits(self._client)

    async def find(self, id: str) -> dict[str, Status]:
        """Return the queues that know a job of this id, with its status there.

        It asks every queue of the mesh, up to 1,000 at once. If you know the queue, use ``queue.read(id)``.

        Args:
            id: The job's id.

        Returns:
            The status in each queue that knows the id, by the queue's name. Empty if none does.

        Raises:
            UsageError: The id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        checked, prefix = check_id(id, generated=True), self._client.settings.prefix
        names = await queue_names(self._client.ask, RegistryKeys(prefix))
        queues = sorted({replace(QueueKeys.of(prefix, name), tag="") for name in names}, key=lambda keys: keys.name)
        found: dict[str, Status] = {}
        for start in range(0, len(queues), AT_ONCE):
            some = queues[start : start + AT_ONCE]
            places = [shard_of(await self._client.sharding.shards(keys, declare=False), checked) for keys in some]
            seen = await self._client.link.call_all([ops.job_status(keys, checked, 0) for keys in places])
            found |= {
                keys.display_name: status_of(state)
                for keys, state in zip(some, seen, strict=True)
                if state.state != "gone"
            }
        return found

    async def forget_tagged(self, tag: str, *, reason: str = "") -> Forgotten:
        """Delete all that the mesh stores of the jobs with a tag, in all queues: for a customer who has left.

        Jobs that do not run are cancelled, with what they have saved; running ones are being cancelled, and nothing is kept of
        them. Kept jobs, results and dead letters are deleted, also in the queues of failure handlers. Jobs that are dispatched
        meanwhile stay. If it is interrupted, call it again.

        Args:
            tag: The tag.
            reason: A text for people, for callers that wait for a job that is cancelled.

        Returns:
            What was deleted, and where data may still be.

        Raises:
            UsageError: An argument is not valid; the tag has more than 100,000 jobs in a queue; or outside `connect` and
                `join`.
            Unavailable: The server did not reply within `patience`. Some queues may have been done.
        """
        checked, prefix = check_tag(tag), self._client.settings.prefix
        check_text(reason, "reason")
        names = await queue_names(self._client.ask, RegistryKeys(prefix))
        queues = await all_shards(self._client, [QueueKeys.of(prefix, name) for name in names])
        found = [await forget_jobs_of(self._client, shards, checked, reason) for _, shards in queues]
        total = forgotten_in_all(found)
        await self._client.note("tag_forgotten", count=total.waiting + total.kept, text=checked)
        return total

    async def log(self, limit: int = 100, after: str = "") -> list[LogEntry]:
        """Return what has happened in the mesh, the oldest first: workers that joined, left or died, and what operators did.

        The server keeps about the last 2,000 entries. An entry about an action is written right after it, and may be missing if
        the connection is lost in between. So the log helps people to understand; it proves nothing.

        Args:
            limit: At most this many entries, 1 to 1,000.
            after: The id of an entry: return the entries after it. Empty: return the newest entries.

        Raises:
            UsageError: An argument is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await read_log(self._client, limit, after)

    async def evict(self, worker_id: str) -> None:
        """Declare a worker dead, and return its tasks to the front of their queues now, without waiting for its keepalive.

        Use it for a worker that hangs, or that is gone and has ``keepalive=None``. No other worker has to be running. Each of
        the tasks counts one stall more. A worker that is alive notices within a second: it cancels its tasks (`cancel_reason`
        is ``lost``) and joins again under a new id. Tasks that it does not stop in time run twice. To stop a worker for good,
        stop its process.

        Args:
            worker_id: As in ``mesh.workers()``.

        Raises:
            UsageError: There is no worker with this id: it was mistyped, or the worker left or was evicted before.
            RefusedByServer: Your user lacks the permissions of a worker, or a key of a queue has another type.
            Unavailable: The server did not reply within `patience`. If it has a note, the worker is evicted, but some of its
                tasks are not back yet. Call it again, or leave them to the leader.
        """
        link, registry = self._client.link, RegistryKeys(self._client.settings.prefix)
        worker = check_text(worker_id, "worker_id")
        if (
            await link.call(ops.condemn_worker(registry, worker, ops.ANY_BEAT, who=self._client.who, text="evicted"))
            == "gone"
        ):
            heartbeats = await link.call(ops.look_at_workers(registry))
            raise UsageError(_unknown_worker_text(worker, [*heartbeats.beats, *heartbeats.dying]))
        text = "worker %(worker)s was declared dead: %(reason)s"
        emit(logger, "condemn_worker", text, worker=worker, reason="it was evicted")
        await _sweep(link, registry, worker)

    async def ask_worker(
        self,
        worker_id: str,
        what: Literal["quiet", "resume", "drain"] | None = None,
        *,
        concurrency: int | Literal["auto"] | None = None,
    ) -> None:
        """Ask a worker to take no new tasks, to take tasks again, to leave, or to run more or fewer tasks at once.

        The worker reads the request with its next heartbeat, within about a second, and its `WorkerInfo` then says what it did.
        The call does not wait for it. A request holds until the process of the worker ends, also if it registers again.

        Args:
            worker_id: As in ``mesh.workers()``.
            what: ``"quiet"``: take no new tasks; running tasks continue, and the worker stays registered. ``"resume"``: take
                tasks again. ``"drain"``: end as on SIGTERM. The worker takes no more tasks, and running ones have `grace`
                seconds; then ``mesh.run()`` and ``worqr run`` end the process. In your own program, the worker leaves its queues
                as after ``peer.drain()``: ``peer.wait()`` returns, and the program decides what comes next.
            concurrency: The number of units of work that it runs at once, or ``"auto"``, as in ``peer.set_concurrency()``. The
                sizes of its thread and process pools stay.

        Raises:
            UsageError: An argument is not valid, or there is no worker with this id; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        worker, asked = check_text(worker_id, "worker_id"), _asked(what, concurrency)
        registry, units = RegistryKeys(self._client.settings.prefix), "" if concurrency is None else str(concurrency)
        if not await self._client.ask(ops.ask_worker(registry, worker, what or "", units)):
            heartbeats = await self._client.ask(ops.look_at_workers(registry))
            raise UsageError(_unknown_worker_text(worker, list(heartbeats.beats)))
        await self._client.note("worker_asked", worker=worker, text=asked)

    def connection_events(self) -> AbstractAsyncContextManager[AsyncIterator[ConnectionEvent]]:
        """Return a block in which you hear when the connection to the server is lost and when it is back.

        It begins with a ``lost`` if the server is away already. Each ``lost`` is followed by one ``back`` of the same server.
        worqr reconnects by itself: use the events to report, not to reconnect. An idle connection is checked once a second
        while you wait for the next event. A connection that breaks while it is idle, and is back by then, is no event. The
        iterator ends with the block.

        Returns:
            An async context manager, which gives an iterator of `ConnectionEvent`.

        Raises:
            UsageError: On entry: outside `connect` and `join`.
        """
        return connection_events_of(self._client)


def _asked(what: object, concurrency: object) -> str:
    """Return a request as a text for people. Raises UsageError if it is not valid."""
    if what is None and concurrency is None:
        raise UsageError('ask_worker() needs "quiet", "resume", "drain" or concurrency=')
    if what not in (None, *REQUESTS):
        raise UsageError(f"a worker can be asked for {', '.join(map(repr, REQUESTS))}, not {what!r}")
    if concurrency is None:
        return str(what)
    if concurrency != "auto" and check_count(concurrency, "concurrency") > MOST_UNITS:
        raise UsageError(f"concurrency must be at most {MOST_UNITS:,}, not {concurrency!r}")
    return f"{what}, concurrency {concurrency}" if what else f"concurrency {concurrency}"


async def _sweep(link: Link, registry: RegistryKeys, worker: str) -> None:
    """Give back the claims of a condemned worker, and forget it. A leader may do so at the same time, so each
    step can be repeated.

    Raises: the first error of a queue, after all other queues are done.
    """
    done: set[str] = set()
    failed: WorqrError | None = None
    while todo := set(await link.call(ops.forget_worker(registry, worker))) - done:
        done |= todo
        for queue in sorted(todo):
            try:
                while (await link.call(ops.fail_worker(QueueKeys.of(registry.prefix, queue), worker))).more:
                    pass
                await link.call(ops.unmap_work(registry, worker, queue))
            except WorqrError as error:
                failed = failed or error
                failed.add_note(f"worker {worker} is evicted, but its tasks on queue {queue!r} are not back yet")
    if failed is not None:
        raise failed


def _unknown_worker_text(worker: str, known: list[str]) -> str:
    """Return the text of the error about an unknown `worker`, with a suggestion."""
    near = [each for each in known if each.startswith(worker)] or difflib.get_close_matches(worker, known, NEAREST, 0.3)
    hint = "`mesh.workers()` and `worqr workers` list those that are registered" if known else "none is registered"
    if near:
        hint = f"did you mean {' or '.join(map(repr, near[:NEAREST]))}?"
    return f"there is no worker {worker!r}: it has left, or was evicted before; {hint}"

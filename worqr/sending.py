"""Sending calls of functions: one, or many in few round trips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from worqr import ops
from worqr.call import Call as Request
from worqr.errors import UsageError
from worqr.function import Call
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, Dispatched, NewJob
from worqr.ops.replies import in_pieces
from worqr.task import check_task

if TYPE_CHECKING:
    from worqr.job import Job
    from worqr.mesh import Mesh

R = TypeVar("R")
T = TypeVar("T")
K = TypeVar("K")


class Sender:
    """Sends the calls of one mesh's functions. Tests put another one in its place."""

    def __init__(self, mesh: Mesh[Any]) -> None:
        self._mesh = mesh

    async def enqueue(self, call: Call[Any]) -> None:
        """Send one call as a raw task."""
        keys = QueueKeys(self._mesh.prefix, call.queue)
        await self._mesh.link_to(call.queue).call(ops.enqueue(keys, [call.task], max_length=_bound(call)))

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """Send one call as a job."""
        keys = QueueKeys(self._mesh.prefix, call.queue)
        done = await self._mesh.link_to(call.queue).call(ops.dispatch_jobs(keys, [_job(call)]))
        return self._mesh.queue(call.queue).handle_of(done[0], call.results)

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Send calls as raw tasks, in one round trip per thousand."""
        stored = sending = 0
        try:
            for some in self._thousands(calls):
                for call in some:
                    if call.options.keys() - {"max_length"}:
                        raise UsageError(f"a call of {call.name!r} has options, which make it a job: use dispatch_many")
                pieces = [
                    (name, _request_to_enqueue(QueueKeys(self._mesh.prefix, name), piece))
                    for (name, _), of_queue in _grouped(some, lambda call: (call.queue, _bound(call)))
                    for piece in in_pieces(of_queue, _size)
                ]
                sending = len(some)
                stored += sum(await self._send(pieces))
                sending = 0
        except Exception as error:
            _note(error, "stored", stored, sending)
            raise
        if not stored:
            await self._send([])  # a checkpoint, as every call is
        return stored

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Send calls as jobs, in one round trip per thousand; answers their handles, in the order of the calls."""
        jobs: list[Job[R]] = []
        sending = 0
        try:
            for some in self._thousands(calls):
                requests: list[tuple[str, Request[list[Dispatched]]]] = []
                places: list[int] = []
                for name, of_queue in _grouped(enumerate(some), lambda each: each[1].queue):
                    for piece in in_pieces(of_queue, lambda each: len(each[1].task)):
                        keys = QueueKeys(self._mesh.prefix, name)
                        requests.append((name, ops.dispatch_jobs(keys, [_job(call) for _, call in piece])))
                        places += [place for place, _ in piece]
                sending = len(some)
                done = [each for answers in await self._send(requests) for each in answers]
                by_place = dict(zip(places, done, strict=True))
                jobs += [
                    self._mesh.queue(call.queue).handle_of(by_place[place], call.results)
                    for place, call in enumerate(some)
                ]
                sending = 0
        except Exception as error:
            _note(error, "dispatched", len(jobs), sending)
            raise
        if not jobs:
            await self._send([])
        return jobs

    def _thousands(self, calls: Iterable[Call[R]]) -> Iterator[list[Call[R]]]:
        self._mesh.check_connected()
        waiting = iter(calls)
        while some := list(islice(waiting, MAX_ITEMS)):
            for call in some:
                if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise UsageError(f"give calls, as in function.call(...), not {call!r}")
                if call.declared is not None:
                    call.declared.home()
                check_task(call.task, self._mesh.max_payload)
            yield some

    async def _send(self, requests: Sequence[tuple[str, Request[T]]]) -> list[T]:
        """Send requests together and wait for all answers, in their order; the first error, once all have answered."""
        for name in {name for name, _ in requests}:
            self._mesh.link_to(name)
        return await self._mesh.link.call_all([request for _, request in requests])


def _note(error: Exception, verb: str, done: int, sending: int) -> None:
    """Say in `error` how far it had come."""
    if done or sending > 1:
        also = f"; of the {sending:,} after them, some may be" if sending else ""
        error.add_note(f"the first {done:,} calls were {verb}{also}")


def _request_to_enqueue(keys: QueueKeys, calls: Sequence[Call[Any]]) -> Request[int]:
    return ops.enqueue(keys, [call.task for call in calls], max_length=_bound(calls[0]))


def _bound(call: Call[Any]) -> int | None:
    return cast("int | None", call.options.get("max_length"))


def _job(call: Call[Any]) -> NewJob:
    return call.options, call.task


def _size(call: Call[Any]) -> int:
    return len(call.task)


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    """The items by a key of theirs, each group in the old order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())

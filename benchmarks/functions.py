"""How fast typed functions go in and are drained, beside raw tasks of the same size with a handler of bytes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import worqr
from benchmarks.loads import CALLERS, CONCURRENCY, Countdown, drain, put_in
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn
from benchmarks.server import bare
from worqr.codecs import Compress, Fernet, Signed
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

ORDER = UUID("7f8ad1cf-95b5-4cf7-8b0d-6a6f17a6cf5e")
AT = datetime(2026, 1, 1, tzinfo=UTC)
BODY = "b" * 40
KEY = b"b1Yx5rkyEFXDoTxFxGN1sAFZoqRGoeYbNSDxhqRhD-k="


@dataclass
class Order:
    """The data of a typed payload."""

    id: UUID
    at: datetime
    body: str


async def pass_on(context: worqr.Context, call_next: Callable[[], Awaitable[object]]) -> object:
    """The least that a middleware does."""
    return await call_next()


def stamp(sending: worqr.Sending) -> None:
    """The least that a send middleware does for a job."""
    sending.set(meta={"tenant": "acme"})


class Functions:
    """The functions of one mesh, each of which ends a drain when it was called often enough."""

    def __init__(self, server: EmbeddedServer, **options: Any) -> None:
        self.mesh = worqr.Mesh(server.url, **options)
        self.client = bare(server)
        self.ran = Countdown(0)

        @self.mesh.task(name="mail")
        async def mail(to: str, subject: str, body: str = "") -> int:
            return self.ran.take()

        @self.mesh.task(name="ship")
        async def ship(order: Order, /) -> int:
            return self.ran.take()

        @self.mesh.task(name="job", result_ttl=60)
        async def job(to: str, subject: str, body: str = "") -> int:
            return self.ran.take()

        @self.mesh.task(name="given", result_ttl=60)
        async def given(to: str, subject: str, body: str = "", *, address: str = worqr.Depends(lambda: BODY)) -> int:
            return self.ran.take()

        self.mail, self.ship, self.job, self.given = mail, ship, job, given

    def _begin(self, count: int) -> None:
        for name in ("mail", "ship", "job", "given", "raw"):
            self.client.unlink(QueueKeys("worqr", name).base)
        self.ran = Countdown(count)

    def mails(self, count: int) -> list[worqr.Call[int]]:
        return [self.mail.call("ada@example.org", f"subject {n}", BODY) for n in range(count)]

    async def drain(self, name: str, count: int) -> float:
        """Tasks per second, from joining to the last call."""
        self._begin(count)
        async with self.mesh.connect():
            if name == "mail":
                await self.mesh.enqueue_many(self.mails(count))
            elif name == "ship":
                await self.mesh.enqueue_many(self.ship.call(Order(ORDER, AT, BODY)) for _ in range(count))
            elif name in {"job", "given"}:
                function = self.job if name == "job" else self.given
                await self.mesh.dispatch_many(
                    function.call("ada@example.org", f"subject {n}", BODY) for n in range(count)
                )
            else:
                await self.mesh.queue(name).enqueue(*[call.task for call in self.mails(count)])
                return await drain(self.mesh, self.ran, [name], only=["ship"])
            return await drain(self.mesh, self.ran, only=[name])

    async def put_in(self, callers: int, count: int, *, raw: bool = False) -> float:
        self._begin(0)
        queue, task = self.mesh.queue("mail"), self.mail.call("ada@example.org", "hi", BODY).task
        typed = partial(self.mail.enqueue, "ada@example.org", "hi", BODY)
        async with self.mesh.connect():
            return await put_in(partial(queue.enqueue, task) if raw else typed, count, callers)

    async def many(self, count: int, *, raw: bool = False) -> float:
        self._begin(0)
        async with self.mesh.connect():
            tasks = [call.task for call in self.mails(count)] if raw else []
            began = time.perf_counter()
            if raw:
                await self.mesh.queue("mail").enqueue(*tasks)
            else:
                await self.mesh.enqueue_many(self.mails(count))
            return count / (time.perf_counter() - began)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Drains of typed functions, and ways to put their calls in, in turn with raw tasks."""
    functions = Functions(server)
    count, few = plan.size(30_000, 1_000), plan.size(2_000, 200)
    mails, orders, results, raw = await in_turn(
        plan.runs, *(partial(functions.drain, name, count) for name in ("mail", "ship", "job", "raw"))
    )
    one, raw_one, at_once, raw_at_once, many, raw_many = await in_turn(
        plan.runs,
        partial(functions.put_in, 1, few),
        partial(functions.put_in, 1, few, raw=True),
        partial(functions.put_in, CALLERS, count),
        partial(functions.put_in, CALLERS, count, raw=True),
        partial(functions.many, count),
        partial(functions.many, count, raw=True),
    )
    options: dict[str, dict[str, Any]] = {
        "codec: Signed": {"codec": Signed(KEY)},
        "codec: Fernet": {"codec": Fernet(KEY)},
        "codec: Compress": {"codec": Compress()},
        "one middleware": {"middleware": [pass_on]},
        "one send middleware": {"send_middleware": [stamp]},
    }
    drains = [partial(Functions(server, **each).drain, "job", count) for each in options.values()]
    plain, given, *with_option = await in_turn(
        plan.runs, partial(functions.drain, "job", count), partial(functions.drain, "given", count), *drains
    )
    extras = {**dict(zip(options, with_option, strict=True)), "one injected dependency": given}
    return [
        Table(
            "functions: calls dispatched with a result are drained, by what their mesh has",
            "the same with nothing of this, in turn",
            [Row(name, "jobs/s", found, plain) for name, found in extras.items()],
        ),
        Table(
            f"functions: typed calls drained, one process, concurrency {CONCURRENCY}, from joining to the last call",
            "raw tasks of the same bytes with a handler of bytes, in turn",
            [
                Row("three texts", "tasks/s", mails, raw, Bar(15_000)),
                Row("a dataclass with UUID and datetime, whole", "tasks/s", orders, raw),
                Row("three texts, dispatched, the result kept", "jobs/s", results, raw),
            ],
        ),
        Table(
            "functions: typed calls enqueued",
            "the same bytes enqueued raw, in turn",
            [
                Row("one await at a time", "tasks/s", one, raw_one),
                Row(f"{CALLERS} callers", "tasks/s", at_once, raw_at_once),
                Row("enqueue_many, calls made in the same time", "tasks/s", many, raw_many),
            ],
        ),
    ]

"""`Sender`: the requests of a producer, each with a line in the ledger before and after it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

import worqr
from benchmarks.chaos.ledger import Ledger

WAITS: Final = 10
"""Results that are waited for at a time."""
PATIENT: Final = 60.0


class Sender:
    """Names tasks, and makes requests.

    Attributes:
        name: the producer's.
        mesh: its mesh.
        ledger: its ledger.
        rng: its random numbers.
    """

    def __init__(self, name: str, mesh: worqr.Mesh, ledger: Ledger, rng: random.Random) -> None:
        self.name = name
        self.mesh = mesh
        self.ledger = ledger
        self.rng = rng
        self._tasks = 0
        self._calls = 0
        self._waits = trio.CapacityLimiter(WAITS)

    def new_task(self, queue: str, end: str = "") -> str:
        self._tasks += 1
        return f"{queue}/{self.name}/{self._tasks}{end}"

    def begin(self, what: str, **facts: Any) -> int:
        """Write that a request is about to be made, and return its number."""
        self._calls += 1
        self.ledger.write(what, call=self._calls, **facts)
        return self._calls

    def failed(self, call: int, error: worqr.WorqrError) -> None:
        """Write that the producer cannot tell whether a request took effect."""
        self.ledger.write("unknown", call=call, error=repr(error)[:200])

    async def send(self, queue: str, tasks: list[str], request: Callable[[], Awaitable[Any]], **facts: Any) -> Any:
        """Make a request that adds tasks; return None if it failed."""
        call = self.begin("send", queue=queue, tasks=tasks, **facts)
        try:
            answer = await request()
        except worqr.NotReplicated as error:
            self.failed(call, error)  # a failover may lose it
            return error.job
        except worqr.WorqrError as error:
            sent = error.sent if isinstance(error, worqr.Unavailable) else False
            what = {False: "refused", None: "unknown", True: "acked"}[sent]
            self.ledger.write(what, call=call, error=repr(error)[:200])
            return None
        except trio.Cancelled:
            self.ledger.write("gave_up", call=call)
            raise
        self.ledger.write("acked", call=call, outcome=getattr(answer, "outcome", None))
        return answer

    async def cancel(
        self, queue: str, task: str, cancel: Callable[[], Awaitable[worqr.CancelCount]], after: float | None = None
    ) -> None:
        """Cancel a task, `after` so many seconds."""
        await trio.sleep(self.rng.choice([0, 0, 0.02, 0.3]) if after is None else after)
        call = self.begin("cancel", queue=queue, task=task)
        try:
            count = await cancel()
        except worqr.WorqrError as error:
            self.failed(call, error)
        else:
            self.ledger.write("cancelled", call=call, waiting=count.waiting, running=count.running)

    async def wait_for_result(self, queue: str, task: str, job: worqr.Job[Any]) -> None:
        """Wait for the result of a job, unless enough results are being waited for."""
        if not self._waits.available_tokens:
            return
        async with self._waits:
            outcome, value = "finished", None
            try:
                found = await job.result(PATIENT)
                value = found.decode() if isinstance(found, bytes) else found
            except worqr.JobFailed as error:
                outcome, value = "failed", error.error.type
            except worqr.JobCancelled:
                outcome = "cancelled"
            except worqr.NoResult as error:
                outcome, value = "none", str(error)
            except worqr.WorqrError as error:
                outcome, value = "unknown", type(error).__name__
            self.ledger.write("result", queue=queue, task=task, outcome=outcome, value=value)

"""`Sender`: the requests of a producer, each with a line in the ledger before and after it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import trio

import worqr
from benchmarks.chaos.ledger import Ledger


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

"""`Tracing`: what a mesh calls so that a trace continues from the caller to the run. Pure.

`worqr.otel` implements it with OpenTelemetry; a mesh without ``tracing=`` calls none of it. The context of a trace travels as a
carrier, a few names and texts, in the `meta` of a job, beside the payload. A plain task has no place for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import msgspec

from worqr.job_options import MAX_META

Operation = Literal["enqueue", "dispatch"]
Carrier = Mapping[str, str]


class Server(Protocol):
    """The server that a call goes to. `worqr.link.settings.Address` is one."""

    @property
    def host(self) -> str:
        """The host name."""
        ...

    @property
    def port(self) -> int:
        """The port."""
        ...

    @property
    def path(self) -> str:
        """The path of a unix socket; empty for TCP."""
        ...


class SendSpan(Protocol):
    """The span of one call that sends tasks."""

    def sent(self, count: int, id: str | None) -> None:
        """Note how many tasks were sent, and the id of the job if it was one job."""
        ...


class Tracing(Protocol):
    """The tracing of a mesh."""

    def sending(self, operation: Operation, queue: str | None, server: Server) -> AbstractContextManager[SendSpan]:
        """Return a context manager around a call that sends tasks. `queue`: None if there may be several."""
        ...

    def carrier(self) -> Carrier:
        """Return the context of the current span."""
        ...

    def plain_carrier(self) -> Carrier | None:
        """Return the context for the plain tasks of the current span; None: they are sent without one."""
        ...

    def creating(self, queue: str, server: Server) -> Carrier:
        """Return the context for one of many jobs of a call."""
        ...

    def run(self, context: Any, call_next: Callable[[], Awaitable[object]]) -> Awaitable[object]:
        """Run a handler inside a span. A middleware: see ``Mesh(middleware=...)``."""
        ...

    @property
    def continuing(self) -> Callable[[Carrier], AbstractContextManager[object]]:
        """A function of a module: the context manager around a run in a worker process, which gets the span's carrier."""
        ...


def meta_of_plain_tasks(tracing: Tracing | None) -> str | None:
    """Return the encoded `meta` that plain tasks get; None: they are sent without one."""
    carrier = None if tracing is None else tracing.plain_carrier()
    if not carrier:
        return None
    encoded = msgspec.json.encode(carrier)
    return encoded.decode() if len(encoded) <= MAX_META else None


def meta_with(carrier: Carrier, meta: Mapping[str, str]) -> Mapping[str, str]:
    """Return `meta` with the carrier added. What the caller put there stays, and a carrier without room is left out."""
    both = {**carrier, **meta}
    return both if len(msgspec.json.encode(both)) <= MAX_META else meta

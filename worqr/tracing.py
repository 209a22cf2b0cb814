"""`Tracing`: what a mesh calls so that a trace continues from the caller to the run.

`worqr.otel` implements it with OpenTelemetry; a mesh without ``tracing=`` calls none of it. The context of a trace travels as a
carrier, a few names and texts, in the `meta` of a job, beside the payload. A plain task has no place for it.

Samplers, span processors and exporters are code of the application. A mesh calls them through `FencedTracing`: what they raise is
reported once, and the call or the run goes on without its span.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeVar, cast

import msgspec

from worqr.job_options import MAX_META
from worqr.log_events import raise_ctrl_c, report_once

T = TypeVar("T")

Operation = Literal["enqueue", "dispatch"]
Carrier = Mapping[str, str]

TRACEPARENT: Final = "traceparent"
MAX_CARRIER: Final = 512
"""Bytes of the context of a trace in a job, as JSON."""


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


class FiringSpan(Protocol):
    """The span of one firing of a schedule. It is not recorded unless it is ended."""

    @property
    def carrier(self) -> Carrier:
        """Its context."""
        ...

    def end(self, id: str) -> None:
        """Note that the firing was enqueued as the job `id`."""
        ...


class Taken(Protocol):
    """A task that was taken by hand. `worqr.Claim` is one."""

    @property
    def meta(self) -> Mapping[str, str]:
        """The `meta` of its job."""
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

    def firing(self, schedule: str, queue: str, server: Server) -> FiringSpan:
        """Return the span of a firing, which begins a trace of its own."""
        ...

    def taken(self, queue: str, server: Server, began_ns: int, tasks: Sequence[Taken]) -> None:
        """Note that these tasks were taken by hand. `began_ns`: when they were asked for, in ns since 1970."""
        ...

    def run(self, context: Any, call_next: Callable[[], Awaitable[object]]) -> Awaitable[object]:
        """Run a handler inside a span. A middleware: see ``Mesh(middleware=...)``."""
        ...

    @property
    def continuing(self) -> Callable[[Carrier], AbstractContextManager[object]]:
        """A function of a module: the context manager around a run in a worker process, which gets the span's carrier."""
        ...


class FencedTracing:
    """A tracing that decides nothing: it raises only what the blocks and handlers inside it raise, and Ctrl-C."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def sending(self, operation: Operation, queue: str | None, server: Server) -> AbstractContextManager[SendSpan]:
        """Return a context manager around a call that sends tasks."""
        return FencedBlock(partial(self._tracing.sending, operation, queue, server))

    def carrier(self) -> Carrier:
        """Return the context of the current span; empty if that fails."""
        return _fenced(lambda: _checked(self._tracing.carrier()), {})

    def plain_carrier(self) -> Carrier | None:
        """Return the context for plain tasks; None if there is none, or if that fails."""
        return _fenced(self._plain_carrier, None)

    def _plain_carrier(self) -> Carrier | None:
        carrier = self._tracing.plain_carrier()
        return None if carrier is None else _checked(carrier)

    def creating(self, queue: str, server: Server) -> Carrier:
        """Return the context for one of many jobs; empty if that fails."""
        return _fenced(lambda: _checked(self._tracing.creating(queue, server)), {})

    def firing(self, schedule: str, queue: str, server: Server) -> FiringSpan:
        """Return the span of a firing. This is not fenced: the caller logs the schedule as well."""
        return self._tracing.firing(schedule, queue, server)

    def taken(self, queue: str, server: Server, began_ns: int, tasks: Sequence[Taken]) -> None:
        """Note that these tasks were taken by hand."""
        _fenced(lambda: self._tracing.taken(queue, server, began_ns, tasks), None)

    async def run(self, context: Any, call_next: Callable[[], Awaitable[object]]) -> object:
        """Run a handler inside a span. Its outcome is that of the handler, which runs once, whatever the tracing does."""
        outcome = _Outcome(call_next)
        try:
            await self._tracing.run(context, outcome.call)
        except BaseException as raised:
            if raised is outcome.error or isinstance(raised, GeneratorExit):
                raise
            _report(raised)
        if not outcome.begun:
            return await call_next()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    @property
    def continuing(self) -> Callable[[Carrier], AbstractContextManager[object]]:
        """A function of a module: the context manager around a run in a worker process."""
        return self._tracing.continuing


class _Outcome:
    """Calls a handler, and keeps what came of it."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self.begun: bool = False
        self.value: object = None
        self.error: BaseException | None = None

    async def call(self) -> object:
        """Run the handler."""
        self.begun = True
        try:
            self.value = await self._call()
        except BaseException as error:
            self.error = error
            raise
        return self.value


class FencedBlock(AbstractContextManager[SendSpan]):
    """The context manager that `make` returns, and its span. What they raise is reported; an error of the block passes."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: tuple[AbstractContextManager[Any], Any] | None = None

    def __enter__(self) -> SendSpan:
        self._entered = _fenced(self._enter, None)
        return self

    def _enter(self) -> tuple[AbstractContextManager[Any], Any]:
        block = self._make()
        return block, block.__enter__()

    def sent(self, count: int, id: str | None) -> None:
        """Note how many tasks were sent, and the id of the job if it was one job."""
        if self._entered is not None:
            _fenced(partial(self._entered[1].sent, count, id), None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered is None:
            return
        try:
            self._entered[0].__exit__(kind, error, traceback)
        except BaseException as raised:
            if raised is not error:
                _report(raised)


def _fenced(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except BaseException as raised:
        _report(raised)
        return otherwise


def _report(raised: BaseException) -> None:
    raise_ctrl_c(raised)
    report_once("the tracing", raised)


def _checked(carrier: Carrier) -> Carrier:
    """Raise TypeError unless a carrier consists of names and texts."""
    if not all(isinstance(text, str) for text in cast("Iterable[object]", (*carrier, *carrier.values()))):
        raise TypeError(f"a carrier must consist of texts, not {carrier!r}")
    return carrier


def meta_of_plain_tasks(tracing: Tracing | None) -> str | None:
    """Return the encoded `meta` that plain tasks get; None: they are sent without one."""
    carrier = None if tracing is None else tracing.plain_carrier()
    return encoded_meta(carrier or {}) or None


def encoded_meta(carrier: Carrier) -> str:
    """Return the encoded `meta` of a task that has no other; empty for an empty carrier."""
    limited = limit(carrier)
    return msgspec.json.encode(limited).decode() if limited else ""


def meta_with(carrier: Carrier, meta: Mapping[str, str]) -> Mapping[str, str]:
    """Return `meta` with the carrier added.

    A `traceparent` of the caller stays, without anything of the carrier. A carrier without room is left out.
    """
    if TRACEPARENT in meta:
        return meta
    both = {**limit(carrier), **meta}
    return both if len(msgspec.json.encode(both)) <= MAX_META else meta


def limit(carrier: Carrier) -> Carrier:
    """Return a carrier of at most `MAX_CARRIER` bytes: of a larger one only the `traceparent`, which is what links need."""
    if len(msgspec.json.encode(carrier)) <= MAX_CARRIER:
        return carrier
    return {name: value for name, value in carrier.items() if name == TRACEPARENT and len(value) < MAX_CARRIER // 2}

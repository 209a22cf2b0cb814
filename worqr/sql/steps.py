"""Effects in a database that happen once: whether a step of a job was committed, in a row of the transaction of the effect
itself.

The key is the queue, the life of the job, and the step. A life is the number of the dispatch that created the job and the
SHA-1 of its payload: retries and runs after a crash keep both, and a later job with the same id has another number.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, get_type_hints

import msgspec

from worqr.errors import UsageError
from worqr.peer.run import Run, current_run
from worqr.policy import Failure, Retry
from worqr.sql.connections import Place
from worqr.sql.statements import Statement, Statements
from worqr.stored_values import whole
from worqr.validation import check_text

KEPT_DAYS: Final = 29
"""Days after its dispatch in which a job may take steps. They are deleted a day later: clocks differ."""
LOCKED_DELAY: Final = 5.0
CONFLICT_DELAY: Final = 1.0
_LOCKED, _CONFLICT = ("55P03",), ("40001", "40P01")
_TIMEOUT: Final[Statement] = ("SELECT set_config('lock_timeout', ?, true)", ("5s",))
_OLD_TIMEOUT: Final[Statement] = ("SELECT current_setting('lock_timeout')", ())


class TooOld(Failure):
    """The job was dispatched more than 29 days ago, and its steps may have been forgotten. It moves to the dead-letter queue,
    and its effect is not repeated.
    """

    __module__ = "worqr.sql"


def life_of(run: Run[Any]) -> str:
    """Return what names the job of a run: the same in each of its runs, and in no other job.

    Raises:
        UsageError: it is a plain task.
        TooOld: its steps may have been forgotten.
    """
    number = None if run.record is None else whole(run.record.get(b"first"), 0)
    if not number:
        raise UsageError(
            "only a job can take steps in a database, and this is a plain task: dispatch it, or enqueue it by an outbox"
        )
    days = (time.time() - number / 1e6) / 86400
    if days > KEPT_DAYS:
        raise TooOld(f"the job was dispatched {days:.0f} days ago, and its steps are kept for {KEPT_DAYS}")
    return f"{number}-{hashlib.sha1(run.task, usedforsecurity=False).hexdigest()[:16]}"


def _key(place: Place, step: str) -> tuple[str, str, str]:
    """Return the key of a step of the current run.

    Raises:
        UsageError: there is none, or the place is inside a savepoint.
    """
    try:
        run: Run[Any] = current_run.get()
    except LookupError:
        raise UsageError(
            "outbox.first() and outbox.step() are for code inside a handler, which a worker runs"
        ) from None
    if place.in_savepoint():
        raise UsageError(
            "outbox.first() must be outside savepoints: if one is rolled back, the step would be done without its effect"
        )
    return run.queue, life_of(run), check_text(step, "step")


@contextmanager
def retried() -> Generator[None]:
    """Raise Retry, uncounted, in a handler if another transaction holds a lock, or if the database wants this one again."""
    try:
        yield
    except Exception as error:
        if current_run.get(None) is None:
            raise
        cause = getattr(error, "orig", None) or error
        cause = (
            getattr(cause, "__cause__", None) if getattr(cause, "sqlstate", None) is None and cause.__cause__ else cause
        )
        state = str(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None))
        if state in _LOCKED or "database is locked" in str(error):
            raise Retry("another transaction holds a lock", delay=LOCKED_DELAY, counted=False) from error
        if state in _CONFLICT:
            raise Retry("the database wants this transaction again", delay=CONFLICT_DELAY, counted=False) from error
        raise


def _check(autocommits: bool) -> None:
    if autocommits:
        raise UsageError(
            "no transaction is open on this connection: begin one, so that step and effect are committed together"
        )


def first(place: Place, sql: Statements, step: str) -> Any:
    """Take a step; see ``Outbox.first``."""
    key = _key(place, step)
    if place.is_async:
        return _first_async(place, sql, key)
    _check(place.autocommits())
    with retried():
        if place.dialect != "postgresql":
            return bool(place.run(sql.take_step(*key)))
        [(old,)] = place.run(_OLD_TIMEOUT)
        place.run(_TIMEOUT)
        found = place.run(sql.take_step(*key))
        place.run((_TIMEOUT[0], (old,)))
    return bool(found)


async def _first_async(place: Place, sql: Statements, key: tuple[str, str, str]) -> bool:
    autocommits: Any = place.autocommits()
    _check(await autocommits if inspect.isawaitable(autocommits) else autocommits)
    with retried():
        if place.dialect != "postgresql":
            return bool(await place.run(sql.take_step(*key)))
        [(old,)] = await place.run(_OLD_TIMEOUT)
        await place.run(_TIMEOUT)
        found = await place.run(sql.take_step(*key))
        await place.run((_TIMEOUT[0], (old,)))
    return bool(found)


def _decoder(fn: Callable[..., Any]) -> Callable[[bytes], Any]:
    try:
        kind = get_type_hints(fn).get("return", Any)
    except (NameError, TypeError) as error:
        raise UsageError(f"the return annotation of {fn!r} cannot be read: {error}") from error
    return msgspec.json.Decoder(type(None) if kind is None else kind).decode


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"JSON cannot carry the result of the step: {error}") from error


def kept_step(place: Place, sql: Statements, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
    """Call a function once, and keep its result; see ``Outbox.step``."""
    key, decode = _key(place, name), _decoder(fn)
    if place.is_async:
        return _kept_async(place, sql, key, call, decode)
    if first(place, sql, name):
        value = _encoded(call())
        place.run(sql.keep_value(*key, value))
    else:
        [(value,)] = place.run(sql.value(*key))
    return decode(bytes(value or b"null"))


async def _kept_async(
    place: Place, sql: Statements, key: tuple[str, str, str], call: Callable[[], Any], decode: Callable[[bytes], Any]
) -> Any:
    if await _first_async(place, sql, key):
        found = call()
        value = _encoded(await found if inspect.isawaitable(found) else found)
        await place.run(sql.keep_value(*key, value))
    else:
        [(value,)] = await place.run(sql.value(*key))
    return decode(bytes(value or b"null"))

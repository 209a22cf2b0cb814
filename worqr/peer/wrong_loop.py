"""Recognise handlers that run on one event loop and call libraries that need the other one, by the errors of those libraries.

Another try of such a run would end in the same way. So the run fails without a retry, and its error names the remedy. The errors
recognised here were collected from asyncio, aiohttp, asyncpg, aiosqlite, SQLAlchemy, redis, anyio, sniffio and Trio.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from worqr.peer.executors.offloaded import Handler, named_after
from worqr.policy import Failure, Retry, Undecodable
from worqr.tracebacks import add_note, is_a, related_errors, text_of
from worqr.validation import qualname_of

if TYPE_CHECKING:
    from worqr.peer.run import Run, RunHost

LoopName = Literal["asyncio", "Trio"]

_MESSAGES: Final[dict[LoopName, re.Pattern[str]]] = {
    "asyncio": re.compile(
        r"no running event loop"  # asyncio.get_running_loop()
        r"|There is no current event loop"  # asyncio.get_event_loop()
        r"|should be used inside a task"  # asyncio.timeout(), aiohttp
        r"|library written for some other framework like asyncio"  # Trio, of an awaited asyncio future
        r"|'NoneType' object has no attribute 'create_future'"  # asyncio.Event, asyncio.Queue
    ),
    "Trio": re.compile(
        r"must be called from async context"  # trio.sleep(), trio.move_on_after()
        r"|Task got bad yield"  # asyncio, of a checkpoint of Trio
        r"|'RunContext' object has no attribute"  # trio.open_nursery()
    ),
}
_ERROR_TYPES: Final = (RuntimeError, TypeError, AttributeError)
_ERROR_NAMES: Final = frozenset({"AsyncLibraryNotFoundError", "NoEventLoopError"})
"""Errors of sniffio and anyio, which these libraries raise if they find neither loop."""
_LONGEST: Final = 1000
"""Characters of an error's text that are searched."""

HANDLER_REMEDY: Final[dict[LoopName, str]] = {
    "asyncio": (
        'this handler runs on a Trio event loop, and needs asyncio: declare it with runs_in="asyncio", '
        'or make that the default of all async handlers with Mesh(runs_in="asyncio")'
    ),
    "Trio": 'this handler runs on an asyncio event loop, and needs Trio: declare it with runs_in="loop"',
}
MIDDLEWARE_REMEDY: Final = (
    "middleware runs on a Trio event loop: use Trio there, or move what needs asyncio into a handler with "
    'runs_in="asyncio"'
)


def find_wrong_loop_error(error: BaseException, wanted: LoopName) -> BaseException | None:
    """Return the error that shows that code needs the `wanted` loop: `error`, a member of its group, or one of its causes."""
    return next((each for each in related_errors(error) if _is_wrong_loop_error(each, wanted)), None)


def wrong_loop_failure(error: Exception, wanted: LoopName, remedy: str) -> Failure | None:
    """Return the error to raise instead of `error`, or None if the loop is not the problem.

    `error` gets the remedy as a note.
    """
    if any(is_a(error, kind) for kind in (Retry, Failure, Undecodable)):
        return None
    sign = find_wrong_loop_error(error, wanted)
    if sign is None:
        return None
    add_note(error, remedy)
    return Failure(f"{qualname_of(type(sign))}: {text_of(sign, _LONGEST)} ({remedy})")


def with_wrong_loop_remedy(run: Run[RunHost], error: BaseException) -> BaseException:
    """Return the error of a failed run.

    If a handler on Trio needs asyncio, this is a failure with the remedy, else `error` itself.
    """
    return error if run.offloaded is not None else _with_remedy(error, "asyncio")


def with_trio_remedy(error: BaseException) -> BaseException:
    """Return the error of a run on an asyncio loop. If its handler needs Trio, this is a failure with the remedy."""
    return _with_remedy(error, "Trio")


def _with_remedy(error: BaseException, wanted: LoopName) -> BaseException:
    failure = wrong_loop_failure(error, wanted, HANDLER_REMEDY[wanted]) if is_a(error, Exception) else None
    if failure is None:
        return error
    failure.__cause__ = error
    return failure


def detecting_wrong_loop(run: Handler, remedy: str) -> Handler:
    """Return `run` for the Trio loop. If it needs asyncio, it fails without a retry, and the error has the remedy.

    This costs each run some time. Without middleware, `with_wrong_loop_remedy` does the same for runs that have failed.
    """

    async def on_the_loop(task: bytes) -> object:
        try:
            return await run(task)
        except Exception as error:
            failure = wrong_loop_failure(error, "asyncio", remedy)
            if failure is None:
                raise
            raise failure from error

    return named_after(run, on_the_loop)


def _is_wrong_loop_error(error: BaseException, wanted: LoopName) -> bool:
    if qualname_of(type(error)) in _ERROR_NAMES:
        return wanted == "asyncio"
    return issubclass(type(error), _ERROR_TYPES) and _MESSAGES[wanted].search(text_of(error, _LONGEST)) is not None

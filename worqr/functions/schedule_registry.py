"""`ScheduleRegistry`: declares the schedules of an application while it is imported. Nothing is sent before a peer joins.

`worqr.cron` computes the firings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import tzinfo
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypedDict, TypeVar, overload

from worqr.client.call import Call
from worqr.cron import MAX_CATCH_UP, MAX_TASK, MIN_PERIOD, Definition, Overlap, Trigger, zone_name
from worqr.errors import UsageError
from worqr.foreign import EVERY, explain_arguments, hint_at_option
from worqr.functions.declarations import Declarations
from worqr.functions.no_such_option import NoSuchOption
from worqr.keys import check_name
from worqr.validation import Seconds, seconds

OVERLAPS: Final = ("skip", "queue", "cancel")
MISFIRES: Final = {"skip": 0, "once": 1}


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule, for `cron` and `every`."""

    name: str
    """The name of the schedule, unique in the mesh. Default: the name of the function."""
    timezone: str | tzinfo
    """Only for `cron`: an IANA name, or a ``zoneinfo.ZoneInfo``. Default: "UTC"."""
    misfire: Literal["skip", "once"] | int
    """What to do about firings that were missed while no worker ran. "skip": nothing. "once": run once. A number from 1 to 100:
    run the last n. Default: "once".
    """
    overlap: Overlap
    """What to do if the job of the last firing still waits or runs. "skip": leave out this firing. "queue": run it afterwards.
    "cancel": cancel the older job. Default: "skip".
    """
    jitter: Seconds
    """Seconds, or a timedelta: delay the job by a random time up to this long. Default: 0."""


class NoArgFunction(Protocol):
    """A function without arguments that can make a `Call` of itself."""

    def call(self) -> Call[Any]: ...


F = TypeVar("F", bound=NoArgFunction)


class ScheduleRegistry:
    """The part of `Registry` that declares schedules. Nothing is sent before `join`."""

    _declarations: Declarations

    @overload
    def cron(
        self,
        expression: str,
        call: Call[Any],
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> None: ...
    @overload
    def cron(
        self,
        expression: str,
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> Callable[[F], F]: ...
    def cron(self, expression: str, call: Call[Any] | None = None, /, **how: Any) -> Callable[[F], F] | None:
        """Enqueue a call at the times that a cron expression names.

        ``mesh.cron("0 3 * * *", report.call("eu"))``; or, without a call, a decorator of a function without arguments. Each
        firing is enqueued exactly once, however many workers there are, as a job with the id ``cron:NAME``.

        Args:
            expression: Minute, hour, day of month, month, day of week; as in Debian's cron, with ``L`` and ``#``.
            call: The call to enqueue. None: return a decorator.
            **how: See `ScheduleOptions`.

        Returns:
            None; without a call, a decorator that returns the function unchanged.

        Raises:
            UsageError: The expression or an option is not valid, the name is taken, or an extra is missing (``pip install
                'worqr[cron]'``).
        """
        if not isinstance(expression, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"a cron expression must be a str, not {type(expression).__name__}")
        return self._declare(call, how, cron=" ".join(expression.split()))

    @overload
    def every(
        self,
        period: Seconds,
        call: Call[Any],
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> None: ...
    @overload
    def every(
        self,
        period: Seconds,
        /,
        *,
        name: str = ...,
        timezone: str | tzinfo = ...,
        misfire: Literal["skip", "once"] | int = ...,
        overlap: Overlap = ...,
        jitter: Seconds = ...,
        **unknown: NoSuchOption,
    ) -> Callable[[F], F]: ...
    def every(self, period: Seconds, call: Call[Any] | None = None, /, **how: Any) -> Callable[[F], F] | None:
        """Enqueue a call once in each period.

        A period fires at its multiples since the Unix epoch: ``every(3600)`` fires on the hour, no matter when the workers
        start. Otherwise it is like `cron`.

        Args:
            period: Seconds, or a timedelta; at least 0.1 s.
            call: The call to enqueue. None: return a decorator.
            **how: See `ScheduleOptions`; a period has no `timezone`.

        Returns:
            None; without a call, a decorator that returns the function unchanged.

        Raises:
            UsageError: The period or an option is not valid, or the name is taken.
        """
        if "timezone" in how:
            raise UsageError("every() goes by real time and takes no timezone; for local times use cron()")
        period_ms = round(seconds(period, "period", positive=True) * 1000)
        if period_ms < MIN_PERIOD * 1000:
            raise UsageError(f"period must be at least {MIN_PERIOD:g} s, not {period!r}")
        return self._declare(call, how, every_ms=period_ms)

    if not TYPE_CHECKING:  # a type checker knows the signature
        every = explain_arguments("every()", EVERY)(every)

    def _declare(self, call: Call[Any] | None, how: Mapping[str, Any], **when: Any) -> Callable[[F], F] | None:
        given = _checked(how)

        def declare(call: Call[Any]) -> None:
            if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"a schedule takes a call, as in mesh.call('name') or function.call(), not {call!r}")
            named: dict[str, Any] = {"name": call.queue, "queue": call.queue, "task": call.task}
            definition = Definition(**(named | given | when))
            if len(call.task) > MAX_TASK:
                raise UsageError(
                    f"schedule {definition.name!r}: its payload has {len(call.task):,} bytes, at most {MAX_TASK:,} fit"
                )
            self._declarations.add_schedule(definition)

        unnamed: dict[str, Any] = {"name": "", "queue": "", "task": b""}
        Trigger(Definition(**(unnamed | given | when)))  # raises if the expression or zone is not valid
        if call is not None:
            declare(call)
            return None

        def decorator(function: F) -> F:
            if not hasattr(function, "call"):
                name = getattr(function, "__name__", repr(function))
                raise UsageError(
                    f"a schedule needs a declared function: put @mesh.task between this line and `def {name}`"
                )
            declare(_call_of(function))
            return function

        return decorator


def _call_of(function: NoArgFunction) -> Call[Any]:
    """Return a call of a function without arguments. Raises UsageError if it needs some."""
    try:
        return function.call()
    except TypeError as error:
        name = getattr(function, "__name__", "fn")
        raise UsageError(
            f"a schedule calls its function without arguments ({error}): give the parameters defaults, or declare a schedule for "
            f"a call, as in mesh.cron('0 3 * * *', {name}.call(...)) below the function"
        ) from None


def _checked(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a schedule as fields of its definition."""
    for option in how:
        if option not in ScheduleOptions.__annotations__:
            known = ScheduleOptions.__annotations__
            hint = hint_at_option(option, known, f"it takes {', '.join(known)}")
            raise UsageError(f"a schedule has no option {option!r}; {hint}")
    found: dict[str, Any] = {}
    if "name" in how:
        found["name"] = check_name(how["name"], "schedule name")
    if "timezone" in how:
        found["timezone"] = zone_name(how["timezone"])
    if "misfire" in how:
        found["misfire"] = _misfire_count(how["misfire"])
    if "overlap" in how:
        if how["overlap"] not in OVERLAPS:
            raise UsageError(f"overlap must be one of {', '.join(map(repr, OVERLAPS))}, not {how['overlap']!r}")
        found["overlap"] = how["overlap"]
    if "jitter" in how:
        found["jitter_ms"] = round(seconds(how["jitter"], "jitter") * 1000)
    return found


def _misfire_count(misfire: object) -> int:
    if isinstance(misfire, str) and misfire in MISFIRES:
        return MISFIRES[misfire]
    if isinstance(misfire, bool) or not isinstance(misfire, int) or not 1 <= misfire <= MAX_CATCH_UP:
        raise UsageError(f"misfire must be 'skip', 'once' or a number from 1 to {MAX_CATCH_UP}, not {misfire!r}")
    return misfire

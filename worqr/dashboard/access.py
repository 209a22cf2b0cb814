"""Who looks at the dashboard, and what they may do: `Viewer`, its rights, and the call of the application's `access`.

The application decides who made a request. `worqr.dashboard.routes` says which right each request needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, cast, get_args

from worqr.errors import UsageError, did_you_mean

Right = Literal[
    "look", "payloads", "cancel", "retry", "drop", "delete", "pause", "send", "schedules", "workers", "enqueue"
]
"""``look``: every page, with the beginning of payloads, redacted. ``payloads``: download a whole payload. ``cancel``, ``retry``,
``drop`` (delete dead-letter records), ``delete`` (all waiting tasks of a queue), ``pause`` (queues and lanes; also resume,
limits and weights), ``send`` (a value to a workflow, which may be a decision such as an approval), ``schedules`` (pause, run now,
other times), ``workers`` (quiet, drain, concurrency, evict) and ``enqueue`` (by hand, if the dashboard allows it): the acts.
"""
RIGHTS: Final[tuple[str, ...]] = get_args(Right)
_OPERATOR: Final = ("look", "cancel", "retry", "drop", "pause", "schedules")

Scope = MutableMapping[str, Any]
"""The scope of an ASGI request."""


@dataclass(frozen=True)
class Viewer:
    """A person who uses the dashboard, and what they may do.

    Args:
        name: The name, for the page and for the reasons of cancels and pauses.
        may: The rights; ``look`` is needed for every page. `reader`, `operator` and `admin` return the usual ones.
        queues: Patterns of queue names, such as ``"mail.*"``. For this viewer, other queues do not exist.

    Raises:
        UsageError: A right does not exist, or an argument has the wrong type.
    """

    name: str
    may: Collection[str] = ("look",)
    queues: Collection[str] = ("*",)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - applications may be untyped
            raise UsageError(f"Viewer(name=...) must be a str, not {self.name!r}")
        for field in ("may", "queues"):
            value = getattr(self, field)
            if isinstance(value, str) or not all(isinstance(each, str) for each in value):
                raise UsageError(f"Viewer({field}=...) must be a collection of str, such as ({value!r},)")
        for right in self.may:
            if right not in RIGHTS:
                hint = did_you_mean(right, RIGHTS, f"there are {', '.join(RIGHTS)}")
                raise UsageError(f"there is no right {right!r}; {hint}")

    def sees(self, queue: str) -> bool:
        """Return True if one of the patterns matches the name of the queue."""
        return any(fnmatchcase(queue, pattern) for pattern in self.queues)

    @property
    def sees_all(self) -> bool:
        """True if no queue is hidden from this viewer."""
        return "*" in self.queues

    def without(self, right: Right) -> Viewer:
        """Return the same viewer without a right."""
        return Viewer(self.name, tuple(each for each in self.may if each != right), self.queues)

    def without_acts(self) -> Viewer:
        """Return the same viewer with the right to look only."""
        return Viewer(self.name, ("look",) if "look" in self.may else (), self.queues)


Access = Callable[[Scope], "Viewer | Awaitable[Viewer | None] | None"]
"""The application's function: it returns the viewer who made the request, or None."""


def reader(name: str, queues: Collection[str] = ("*",)) -> Viewer:
    """Return a viewer who may look, and change nothing.

    Args:
        name: The name of the viewer.
        queues: As in `Viewer`.
    """
    return Viewer(name, ("look",), queues)


def operator(name: str, queues: Collection[str] = ("*",)) -> Viewer:
    """Return a viewer who may cancel, retry, drop, pause and resume, and who sees payloads redacted.

    Args:
        name: The name of the viewer.
        queues: As in `Viewer`.
    """
    return Viewer(name, _OPERATOR, queues)


def admin(name: str, queues: Collection[str] = ("*",)) -> Viewer:
    """Return a viewer with all rights, who may also download whole payloads.

    Args:
        name: The name of the viewer.
        queues: As in `Viewer`.
    """
    return Viewer(name, get_args(Right), queues)


THREE_WAYS: Final = """Dashboard(mesh, access=...) is required: without it, everyone could cancel your tasks. \
Pass a function of the request that returns a Viewer, or None. Three ways:

    # 1. The login of your application:
    async def access(scope):
        user = await my_login(scope)
        return operator(user.name) if user and user.is_staff else None

    # 2. A header that your proxy sets, if nothing but the proxy can reach this program:
    def access(scope):
        name = dict(scope["headers"]).get(b"x-forwarded-user", b"").decode()
        return reader(name) if name else None

    # 3. On your own machine only, for a while:
    def access(scope):
        return admin("me") if scope["client"][0] == "127.0.0.1" else None
"""


def checked_access(access: object) -> Access:
    """Return `access`, or raise the UsageError that shows what to pass."""
    if not callable(access):
        raise UsageError(THREE_WAYS)
    return cast("Access", access)


async def viewer_of(access: Access, scope: Scope) -> Viewer | None:
    """Call the application's `access`. Raises: what it raises; TypeError if it returns neither a `Viewer` nor None."""
    found = access(scope)
    if inspect.isawaitable(found):
        found = await found
    if found is not None and not isinstance(found, Viewer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"access(scope) must return a worqr.dashboard.Viewer or None, not {type(found).__name__}")
    return found

"""Credentials that change: the value of ``Mesh(credentials=...)``, which is called anew for each connection.

Here: `Credentials`, which calls the provider and checks the result. Not here: sending it to the server (`connection`). A
password is never logged, printed or kept.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Protocol, cast

from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.log_events import emit

logger: logging.Logger = logging.getLogger(__name__)

_MOST = 300  # characters of an error's text


class CredentialProvider(Protocol):
    """The interface of redis-py's ``CredentialProvider``."""

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return ``(username, password)``, or ``(password,)`` for the user ``default``."""
        ...


GivenCredentials = Callable[[], tuple[str, str]] | CredentialProvider
"""The value of ``credentials=``: a function that returns ``(username, password)``, or a provider of redis-py."""


class Credentials:
    """Calls the provider, in the thread that connects. Several threads may call it at once.

    Raises:
        UsageError: `given` cannot be asked.
    """

    def __init__(self, given: GivenCredentials) -> None:
        provider = getattr(given, "get_credentials", None)
        ask = provider if callable(provider) and not isinstance(given, type) else given
        if not callable(ask) or isinstance(ask, type):
            raise UsageError(
                "credentials= must be a function that returns (username, password), or a CredentialProvider of redis-py, "
                f"not {_kind(given)}"
            )
        self._name: str = getattr(given, "__qualname__", type(given).__qualname__)
        if inspect.iscoroutinefunction(ask):
            raise UsageError(
                f"credentials={self._name} is async: give a plain function, which may block; worqr calls it in a thread"
            )
        self._ask = cast("Callable[[], object]", ask)
        self._lock = threading.Lock()
        self._failing = False

    def __repr__(self) -> str:
        return f"<Credentials {self._name}>"

    def get(self, address: str) -> tuple[str, ...]:
        """Return ``(username, password)`` or ``(password,)`` for a new connection to `address`.

        Logs the first of several failures in a row, directly: this thread has just run the application's code anyway.

        Raises:
            Unavailable: it raised an error; the next connection asks again.
            UsageError: it returned something else.
        """
        raised = ""
        try:
            found = self._ask()
        except BaseException as error:  # including SystemExit: this is not the application's thread
            raised, found = f"{type(error).__name__}: {_one_line(str(error))}", None
        if raised:  # outside of the block: its unknown host must not count as an unknown server
            failure: WorqrError = Unavailable(f"credentials={self._name} raised {raised}")
        else:
            parts = _parts(found)
            wrong = _what_is_wrong(found, parts)
            if not wrong:
                self._failing = False
                return parts if len(parts) == 1 or parts[0] else parts[1:]
            failure = UsageError(f"credentials={self._name} returned {wrong}")
        self._tell(address, str(failure))
        raise failure

    def _tell(self, address: str, cause: str) -> None:
        with self._lock:
            told, self._failing = self._failing, True
        if not told:
            text = "could not connect to %(server)s: %(error)s; asking again for the next attempt"
            emit(logger, "link.credentials", text, server=address, error=cause)


def _parts(found: object) -> tuple[str, ...]:
    """The strings that were returned; none if it was something else."""
    parts = cast("tuple[object, ...]", found) if isinstance(found, tuple | list) else ()
    texts = tuple(part for part in parts if isinstance(part, str))
    return texts if len(texts) == len(parts) else ()


def _what_is_wrong(found: object, parts: tuple[str, ...]) -> str:
    """Empty if these are credentials."""
    if inspect.iscoroutine(found):
        found.close()
    if len(parts) not in (1, 2):
        return f"{_shape(found)}; it must return (username, password), two strings"
    if not parts[-1]:
        return "an empty password"
    try:
        "".join(parts).encode()
    except UnicodeEncodeError:
        return "text that is not valid Unicode"
    return ""


def _kind(value: object) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else type(value).__name__


def _shape(found: object) -> str:
    """Return the type of the value and of its parts, never their content."""
    if not isinstance(found, tuple | list):
        return type(found).__name__
    parts = cast("tuple[object, ...]", found)
    return f"{type(parts).__name__}({', '.join(type(part).__name__ for part in parts)})"


def _one_line(text: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= _MOST else text[:_MOST] + "..."

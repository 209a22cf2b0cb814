"""`Dialer`: attempts to connect, each in a thread, because name resolution and a handshake can block for long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from worqr.errors import WorqrBug, WorqrError
from worqr.link.connection import Wire, open_connection
from worqr.link.driver import Driver
from worqr.link.endpoints import EndpointResolver
from worqr.link.server_errors import ConnectionLost
from worqr.link.settings import LinkSettings
from worqr.lua import Script

Dialled = Callable[[Wire | None, WorqrError | None], None]


class Dialer:
    """The attempts to connect to one server. All methods belong to the driver's loop, except `_attempt`.

    Attributes:
        dialling: an attempt is being made.

    Args:
        dialled: gets the open connection, or the error.
        purpose: see `open_connection`, like `timeout`.
        scripts: returns the scripts to load.
    """

    def __init__(
        self,
        settings: LinkSettings,
        driver: Driver,
        resolver: EndpointResolver,
        dialled: Dialled,
        *,
        purpose: str = "data",
        timeout: float | None = None,
        scripts: Callable[[], Sequence[Script]] = tuple,
    ) -> None:
        self.dialling: bool = False
        self._settings = settings
        self._driver = driver
        self._resolver = resolver
        self._dialled = dialled
        self._purpose = purpose
        self._timeout = timeout
        self._scripts = scripts
        self._stood = False  # an attempt has succeeded
        self._number = 0
        self._closed = False

    def dial(self) -> None:
        """Begin an attempt."""
        self.dialling = True
        self._number += 1
        attempt = partial(self._attempt, self._number)
        try:
            threading.Thread(target=attempt, name="worqr-dial", daemon=True).start()
        except RuntimeError:  # the system is out of threads: block here, and expire requests late
            attempt()

    def forget(self) -> None:
        """Discard the present attempt, which connects to an outdated address."""
        self._number += 1
        self.dialling = False

    def close(self) -> None:
        self._closed = True

    def _attempt(self, number: int) -> None:
        """Connect. Runs in the attempt's thread."""
        wire: Wire | None = None
        error: WorqrError | None = None
        try:
            wire = open_connection(
                *(self._settings, self._resolver, self._purpose),
                timeout=self._timeout,
                scripts=self._scripts(),
                on_silence=self._give_up,
                first=self._purpose == "data"
                and not self._stood,  # the data connection reports what else is at the port
            )
        except WorqrError as exc:
            error = exc
        except BaseException as exc:
            error = WorqrBug(f"connecting failed ({type(exc).__name__}: {exc}); please report this")
            error.__cause__ = exc
        if self._closed and wire is not None:
            wire.close()
        else:
            self._driver.post(partial(self._end, number, wire, error))

    def _give_up(self) -> None:
        """While a server that was dialled is silent."""
        if self._closed:
            raise ConnectionLost("the link was closed", innocent=True)

    def _end(self, number: int, wire: Wire | None, error: WorqrError | None) -> None:
        """In the loop."""
        if number != self._number or self._closed:
            if wire is not None:
                wire.close()
            return
        self.dialling = False
        self._stood = self._stood or wire is not None
        self._dialled(wire, error)

"""The parts of redis-py that worqr uses, imported when the first connection is made.

Importing redis-py takes as long as importing the rest of worqr, Trio included. A program that only declares functions, or
prints its help, should not wait for it.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport] - it has hooks for forks, as below
import os
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


class RedisPy:
    """The classes of redis-py.

    Attributes, set once:
        exceptions: its module of errors.
        errors: the errors of a broken connection (OSError: before redis-py has wrapped it).
        timeout: the error of a timeout.
        response_error: the error of an error reply.
        connections: its connection classes by worqr's names: tcp, tls, unix.
        options: the options that switch off a connection's automatic actions.
        key_slot: the hash slot of a key on a cluster.
    """

    __slots__ = ("connections", "errors", "exceptions", "key_slot", "options", "response_error", "timeout")

    def __init__(self) -> None:
        from redis import exceptions
        from redis.backoff import NoBackoff
        from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
        from redis.crc import key_slot
        from redis.maint_notifications import MaintNotificationsConfig
        from redis.retry import Retry

        class TlsConnection(SSLConnection):
            """Use the connect timeout for the handshake, not the longer one of a reply: without TLS a server stays silent."""

            def _wrap_socket_with_ssl(self, sock: Any) -> Any:
                sock.settimeout(self.socket_connect_timeout)
                wrapped: Any = super()._wrap_socket_with_ssl(sock)  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType]
                wrapped.settimeout(self.socket_timeout)
                return wrapped

        self.exceptions: ModuleType = exceptions
        self.errors: tuple[type[Exception], ...] = (exceptions.RedisError, OSError)
        self.timeout: type[Exception] = exceptions.TimeoutError
        self.response_error: type[Exception] = exceptions.ResponseError
        self.connections: dict[str, Callable[..., Any]] = {
            "tcp": Connection,
            "tls": TlsConnection,
            "unix": UnixDomainSocketConnection,
        }
        self.options: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        self.key_slot: Callable[[bytes], int] = key_slot


_importing = threading.RLock()
"""Held while redis-py is imported, and during each fork. Otherwise a child could have half of a module for ever.

What is imported must not register hooks for forks that belong together, because a fork may have begun that waits for the import.
So the module that does so is imported above.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire,
        after_in_parent=_importing.release,
        after_in_child=_importing.release,
    )


@cache
def redis_py() -> RedisPy:
    """Return the parts of redis-py, imported at the first call."""
    with _importing:
        import encodings.idna  # noqa: F401  # pyright: ignore[reportUnusedImport] - for the first look-up of a host

        return RedisPy()

"""What we use of redis-py, imported when the first connection is made.

It takes as long to import as everything else of worqr together, Trio included; a program that only declares its functions, or
prints its help, shall not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


class RedisPy:
    """The classes of redis-py.

    Attributes, set once:
        exceptions: its module of errors.
        errors: what it raises when a connection breaks (OSError: before it has wrapped it).
        timeout: what it raises when nothing comes in time.
        response_error: what it raises for an error reply.
        connections: its kinds of connections by ours: tcp, tls, unix.
        options: with which a connection does nothing on its own.
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
            """The handshake has the timeout of connecting, not the longer one of an answer: without TLS a server is silent."""

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


@cache
def redis_py() -> RedisPy:
    """redis-py, imported now if it was not."""
    return RedisPy()

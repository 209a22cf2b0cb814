"""`FunctionDefinition`: what all handles of one declared function share: name, options, handler, and the client of its mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from worqr.argument_codec import Signature
from worqr.client.call import Call
from worqr.client.job import Results
from worqr.client.mesh_client import MeshClient
from worqr.errors import UsageError
from worqr.handler_options import Handling, check_failure_handler
from worqr.keys import QueueKeys
from worqr.records import Failed
from worqr.validation import check_task


class FunctionDefinition:
    """The data that all handles of one function share. Changed only while an application is imported.

    Attributes:
        name: the function's, and its queue's; with the prefixes under which its registry was included.
        aliases: older names, whose queues are served and never enqueued to.
        client: that of the function's mesh; None until a mesh includes its registry.
    """

    def __init__(
        self, fn: Callable[..., Any], name: str, aliases: tuple[str, ...], how: Handling, *, is_async: bool
    ) -> None:
        self.fn = fn
        self.name: str = name
        self.aliases: tuple[str, ...] = aliases
        self.how: Handling = how
        self.is_async = is_async
        self.client: MeshClient | None = None
        self.signature: Signature = Signature(fn, name, keeps=how.policy.result_ttl > 0)
        self.results: Results = Results(self.signature.decode_result, how.policy.result_ttl > 0)
        bound = {} if how.max_length is None else {"max_length": how.max_length}
        self.defaults: Mapping[str, object] = bound
        self.handler: Callable[[bytes], Any] = self._make_handler()

    def bind(self, client: MeshClient | None) -> None:
        """Make the function one of a mesh."""
        self.client = client

    def rename(self, name: str, aliases: tuple[str, ...]) -> None:
        """Its registry was included somewhere, with a prefix."""
        self.name = self.signature.name = name
        self.aliases = aliases

    def require_client(self) -> MeshClient:
        """Return the client of the function's mesh.

        Raises:
            UsageError: the function's registry was not included in one.
        """
        if self.client is None:
            raise UsageError(
                f"{self.name!r} belongs to a Registry that no mesh has included yet: call mesh.include(registry) first"
            )
        return self.client

    def call(self, options: Mapping[str, object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        """A call, checked and encoded."""
        signature = self.signature
        values = signature.bind(args, kwargs)
        task = signature.encode(values)
        if self.client is not None:
            check_task(task, self.client.settings.max_payload)
        return Call(self.name, *signature.split(values), task, options, self)

    def add_on_failure(self, handler: Callable[[Failed], object]) -> None:
        """Set the failure handler; there is one."""
        if self.how.on_failure is not None:
            raise UsageError(f"{self.name!r} has a failure handler already: {self.how.on_failure!r}")
        check_failure_handler(handler)
        self.how = replace(self.how, on_failure=handler, policy=replace(self.how.policy, on_failure=True))

    def keys(self) -> QueueKeys:
        """Return the keys of the function's queue.

        Raises:
            UsageError: No mesh has included the function's registry.
        """
        return QueueKeys(self.require_client().settings.prefix, self.name)

    def served(self) -> list[tuple[str, Callable[[Any], object], Handling]]:
        """Return the queues that a peer serves the function from, those of its aliases too, each with its handler.

        Raises:
            UsageError: An annotation names something that does not exist; or there are options of a failure handler, and no
                failure handler.
        """
        self.signature.ready()
        self.how.check_failing(self.name)
        return [(name, self.handler, self.how) for name in (self.name, *self.aliases)]

    def _make_handler(self) -> Callable[[bytes], Any]:
        """The function as a handler of its queue: decodes the payload, then calls it; of its kind, async or plain."""
        fn, decode = self.fn, self.signature.decode

        async def awaited(task: bytes) -> Any:
            args, kwargs = decode(task)
            return await fn(*args, **kwargs)

        def called(task: bytes) -> Any:
            args, kwargs = decode(task)
            return fn(*args, **kwargs)

        handler = functools.wraps(fn)(awaited if self.is_async else called)
        del handler.__wrapped__  # its signature is a handler's
        return handler

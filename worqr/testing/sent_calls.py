"""The calls that a test has sent, or recorded, through the functions of a mesh."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from worqr.client.call import Call
from worqr.functions.function import Function
from worqr.testing.recorded_batch import SentBatch

R = TypeVar("R")


class Sent:
    """The calls that were sent through the functions of a mesh, in order. `recording` makes it."""

    def __init__(self, calls: list[Call[Any]], batches: list[SentBatch] | None = None) -> None:
        self._calls = calls
        self._batches = [] if batches is None else batches

    @property
    def batches(self) -> list[SentBatch]:
        """The batches that were made so far, in order, with the calls of their jobs.

        The jobs that a handler adds to ``mesh.current_batch()`` are in a batch of their own, without a follow-up.
        """
        return list(self._batches)

    @overload
    def calls(self, fn: Function[..., R]) -> list[Call[R]]: ...
    @overload
    def calls(self, fn: str) -> list[Call[Any]]: ...
    def calls(self, fn: Function[..., Any] | str) -> list[Call[Any]]:
        """Return the calls of a function so far.

        They are equal to what ``fn.call(...)`` or ``mesh.call(name, ...)`` returns for the same arguments, whatever the
        options.

        Args:
            fn: The function, or its name.
        """
        name = fn if isinstance(fn, str) else fn.name
        return [call for call in self._calls if call.queue == name]

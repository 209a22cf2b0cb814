"""`BlockingFunction`: a function for plain threads, where no event loop runs. ``fn.blocking`` makes it.

Its calls are sent by the producer of the mesh, as from a coroutine; see `worqr.client.blocking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack

from worqr.client.blocking_jobs import BlockingJob, run_coroutine
from worqr.client.job import Job
from worqr.errors import UsageError
from worqr.foreign import CALLS, no_such_method
from worqr.functions.definition import FunctionDefinition
from worqr.job_options import RAW_OPTIONS, JobOptions, check_id, encode_options

P = ParamSpec("P")
R = TypeVar("R")


class BlockingFunction(Generic[P, R]):
    """A function for synchronous code; ``fn.blocking``."""

    __slots__ = ("_definition", "_options")

    def __init__(self, definition: FunctionDefinition, options: Mapping[str, object]) -> None:
        self._definition = definition
        self._options = options

    def __repr__(self) -> str:
        return f"<BlockingFunction {self._definition.name!r}>"

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue a call as a plain task, which costs least and has no handle. For ids, times and results, see `dispatch`.

        Of the options, a plain task can have `max_length`, `wait` and `replicas`:
        ``fn.blocking.options(max_length=1000, wait=30).enqueue(...)``.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: An argument has the wrong type, there are options that make a job, or an event loop runs in this
                thread.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing was stored.
            NotReplicated: The task was stored, but fewer `replicas` than requested had it in time.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the task may have been stored.
        """
        definition = self._definition
        client = definition.require_client()
        if self._options.keys() - RAW_OPTIONS:
            raise UsageError(
                f"a call of {definition.name!r} with options is a job: use dispatch() instead of enqueue()"
            )
        run_coroutine(client, client.producer.enqueue(definition.call(self._options, args, kwargs)))

    def dispatch(self, /, *args: P.args, **kwargs: P.kwargs) -> BlockingJob[R]:
        """Put a call into the function's queue as a job.

        Args:
            *args: The function's arguments.
            **kwargs: The function's arguments.

        Returns:
            A handle of this dispatch, with its `outcome`.

        Raises:
            TypeError: The function does not take these arguments.
            UsageError: An argument has the wrong type, or an event loop runs in this thread.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
            Duplicate: The id is taken, and ``if_exists="raise"``. Nothing was stored.
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing was stored.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it in time. The error has the handle.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the job may have been stored.
        """
        definition = self._definition
        client = definition.require_client()
        return BlockingJob(
            client, run_coroutine(client, client.producer.dispatch(definition.call(self._options, args, kwargs)))
        )

    def options(self, **options: Unpack[JobOptions]) -> BlockingFunction[P, R]:
        """Return this function with options for its calls: ``fn.blocking.options(delay=5).dispatch(...)``.

        Args:
            **options: See `JobOptions`.

        Raises:
            UsageError: An option does not exist or is not valid.
        """
        definition = self._definition
        return BlockingFunction(definition, definition.with_options(self._options, encode_options(options)))

    def job(self, id: str) -> BlockingJob[R]:
        """Return a handle of the job with this id. This does no I/O; the job does not have to exist.

        Args:
            id: The job's id.

        Raises:
            UsageError: The id is not valid.
        """
        definition = self._definition
        client = definition.require_client()
        return BlockingJob(
            client, Job(client, definition.keys(), check_id(id, generated=True), results=definition.results)
        )

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            hint = f"use `{{fn}}.blocking.{'options(delay=60).dispatch' if name == 'apply_async' else 'enqueue'}(...)`"
            raise AttributeError(
                no_such_method("BlockingFunction", self._definition.name, name, dict.fromkeys(CALLS, hint))
            )

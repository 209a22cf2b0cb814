"""`run_tasks`: run what a test enqueues in the thread and the transaction of the test. No server is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.db import connections
from django.test import TestCase

from worqr.client.producer import Call
from worqr.django.backend import Backend
from worqr.django.meshes import mesh_of
from worqr.django.task_api import signals, task_backends
from worqr.inside import definition_of
from worqr.mesh import Mesh
from worqr.testing import Sent, context, recording

MOST: Final = 1000
"""The calls that one block runs. More are a task that enqueues itself."""


@contextmanager
def run_tasks(*, raise_errors: bool = True) -> Iterator[list[Any]]:
    """Run what a block has enqueued, when the block ends. Use it in a ``TestCase``.

    First the ``on_commit`` hooks of the block run, as in ``captureOnCommitCallbacks(execute=True)``. Then each task and each
    call of the meshes' functions runs here, in order, and what they enqueue runs, too. A task runs once, and `run_after` and
    delays are not waited for. A call of a function that the mesh does not declare is for another application, and does not run.
    A function that takes a list gets each call by itself.

    Args:
        raise_errors: Raise what a task raises. False: its result is FAILED.

    Yields:
        The `TaskResult` of each task that has run, filled at the end of the block.

    Raises:
        AssertionError: More than 1,000 calls were enqueued.
        UsageError: A mesh is on a bench, recording, or connected by an event loop.
    """
    ran: list[Any] = []
    backends = [each for each in task_backends.all() if isinstance(each, Backend)]
    meshes: dict[int, Mesh[Any]] = {id(mesh): mesh for mesh in map(mesh_of, backends)}
    with ExitStack() as stack:
        sent: list[tuple[Mesh[Any], Sent]] = []
        for mesh in meshes.values():
            mesh.close()
            sent.append((mesh, stack.enter_context(recording(mesh))))
        with _hooks():
            yield ran
        _run_all(sent, ran, raise_errors=raise_errors)


@contextmanager
def _hooks() -> Iterator[None]:
    """Run the hooks that the block has registered, at its end, on all databases."""
    with ExitStack() as stack:
        for alias in connections:
            stack.enter_context(TestCase.captureOnCommitCallbacks(using=alias, execute=True))
        yield


def _run_all(sent: list[tuple[Mesh[Any], Sent]], ran: list[Any], *, raise_errors: bool) -> None:
    done = [0] * len(sent)
    while any(done[n] < len(each.all()) for n, (_, each) in enumerate(sent)):
        for n, (mesh, each) in enumerate(sent):
            for call in each.all()[done[n] :]:
                done[n] += 1
                assert sum(done) <= MOST, f"run_tasks() has run {MOST:,} calls: does {call.name} enqueue itself?"
                if call.queue in mesh.functions:
                    with _hooks():
                        _run(mesh, call, ran, raise_errors=raise_errors)


def _run(mesh: Mesh[Any], call: Call[Any], ran: list[Any], *, raise_errors: bool) -> None:
    def finished(task_result: Any, **_: Any) -> None:
        ran.append(task_result)

    definition = definition_of(mesh.functions[call.queue])
    name = str(call._options.get("id", "test"))
    calls = None if definition.options.batch_size is None else 1
    signals.task_finished.connect(finished, weak=False)
    try:
        with context(id=name, queue=call.queue, task=call.task, failures=9, calls=calls):
            _call(definition.fn, call, takes_list=calls is not None)
    except Exception:
        if raise_errors:
            raise
    finally:
        signals.task_finished.disconnect(finished)


def _call(function: Callable[..., Any], call: Call[Any], *, takes_list: bool) -> None:
    run = async_to_sync(function) if iscoroutinefunction(function) else function
    if takes_list:
        run([*call.args, *call.kwargs.values()])
    else:
        run(*call.args, **call.kwargs)

"""`options`: worqr's own options of a Django task, beneath ``@task``. Pure: nothing of Django is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar, Unpack

from worqr.errors import UsageError
from worqr.handler_options import HandlerOptions, handling

F = TypeVar("F", bound=Callable[..., Any])

ATTRIBUTE: Final = "__worqr_options__"
NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


def options(**given: Unpack[HandlerOptions]) -> Callable[[F], F]:
    """Set worqr's options of a Django task, beneath ``@task``: ``@worqr.django.options(timeout=60, limit=worqr.Limit(20))``.

    The options are an attribute of the function, so other backends ignore them. A task with options has a queue of its own,
    ``django:QUEUE/MODULE.NAME``.

    Args:
        **given: See `HandlerOptions`. ``Lanes(by=...)`` names a parameter of the task.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        UsageError: An option does not exist or is not valid, or the decorator stands above ``@task``.
    """
    checked = dict(given)
    handling("task", checked)
    if "batch_size" in checked:
        raise UsageError("a Django task takes no batch_size: declare a function with @mesh.task(batch_size=...)")

    def decorator(function: F) -> F:
        if hasattr(function, "enqueue"):
            raise UsageError(
                f"put @worqr.django.options(...) between @task and the function, not above @task: {function!r}"
            )
        setattr(function, ATTRIBUTE, MappingProxyType(checked))
        return function

    return decorator


def options_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the options of a task's function; empty if it has none."""
    found: Mapping[str, Any] = getattr(function, ATTRIBUTE, NO_OPTIONS)
    return found

"""The error about an option that the `enqueue` of a raw queue does not take. It names `dispatch`, which takes more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from worqr.errors import UsageError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


def explain_enqueue(enqueue: F) -> F:
    """Wrap the `enqueue` of a raw queue: its error about an unknown option names `dispatch`, which takes more."""
    known = [name for name in inspect.signature(enqueue).parameters if name not in {"self", "tasks"}]

    def check(options: Iterable[str]) -> None:
        for name in options:
            if name not in known:
                job = f"a job takes more, as in queue.dispatch(task, {name}=...)"
                raise UsageError(f"enqueue() has no option {name!r}; {did_you_mean(name, known, job)}")

    @wraps(enqueue)
    async def checked_async(self: object, *tasks: Any, **options: Any) -> Any:
        check(options)
        return await enqueue(self, *tasks, **options)

    @wraps(enqueue)
    def checked(self: object, *tasks: Any, **options: Any) -> Any:
        check(options)
        return enqueue(self, *tasks, **options)

    return cast("F", checked_async if inspect.iscoroutinefunction(enqueue) else checked)

"""Names from other task queues, and what worqr calls the same thing. Pure: only for the texts of errors.

Users know these names from Celery, RQ, arq, Dramatiq, taskiq and SAQ. An error about such a name shows the spelling that works;
for a typing mistake, `did_you_mean` has a suggestion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, cast

from worqr.errors import UsageError, did_you_mean

_LATER: Final = "use delay, as in fn.options(delay=60).dispatch(...)"
_AT: Final = "use run_at, as in fn.options(run_at=datetime.now(UTC) + timedelta(hours=1)).dispatch(...)"
_TRIES: Final = "use retry=worqr.RetryPolicy(max_failures=3), which counts the first try too"
_QUEUE: Final = "a function's name is its queue: set it with @mesh.task(name=...)"
_ID: Final = "use id, as in fn.options(id='report-7').dispatch(...)"
_TIMEOUT: Final = "use timeout, in seconds"
_RESULT: Final = "use result_ttl, in seconds"
_BACKOFF: Final = "use retry=worqr.RetryPolicy(min_backoff=1, max_backoff=60)"
_RETRY_ON: Final = "use retry=worqr.RetryPolicy(retry_on=(OSError,))"
_RATE: Final = "use limit=worqr.Limit(rate=10, per=60): 10 starts a minute in the whole mesh"
_LANES: Final = "use lanes=worqr.Lanes('customer') for a parameter of the function, or fn.options(lane='acme')"
_PRIORITY: Final = (
    "give urgent calls a lane with a weight: lanes=worqr.Lanes(weights={'urgent': 100}), and fn.options(lane='urgent')"
)

OPTIONS: Final = {
    **dict.fromkeys(("countdown", "defer_by", "defer"), _LATER),
    **dict.fromkeys(("eta", "defer_until", "scheduled", "schedule_at"), _AT),
    **dict.fromkeys(("max_retries", "retries", "max_tries", "max_attempts", "attempts"), _TRIES),
    **dict.fromkeys(("queue", "queue_name"), _QUEUE),
    **dict.fromkeys(("task_id", "job_id", "key"), _ID),
    **dict.fromkeys(("time_limit", "soft_time_limit", "job_timeout"), _TIMEOUT),
    **dict.fromkeys(("result_expires", "keep_result", "ttl"), _RESULT),
    **dict.fromkeys(("retry_backoff", "default_retry_delay", "retry_delay"), _BACKOFF),
    **dict.fromkeys(("autoretry_for", "retry_for"), _RETRY_ON),
    **dict.fromkeys(("rate_limit", "rate", "limiter", "throttle"), _RATE),
    **dict.fromkeys(("group", "group_id", "tenant", "partition", "partition_key", "concurrency_key"), _LANES),
    **dict.fromkeys(("workers", "max_jobs", "max_workers"), "use concurrency, as in mesh.run(concurrency=50)"),
    "acks_late": "worqr always acknowledges a task after its run; leave the option out",
    "bind": "leave it out: worqr.current() is the running task, in any handler",
    "ignore_result": "leave it out: results are not kept unless you set result_ttl",
    "priority": _PRIORITY,
    "wait": "it is an option of a call: fn.options(wait=30).dispatch(...)",
    "queues": "use only, as in mesh.run(only=['mail.*'])",
    "tz": "use timezone, as in mesh.cron('0 7 * * *', timezone='Europe/Berlin')",
}
"""What to write instead of an option."""

_URL: Final = "give the server's URL as the first argument, as in worqr.Mesh('redis://localhost:6379/0')"
MESH: Final = {
    **dict.fromkeys(("redis_url", "broker", "broker_url", "dsn", "redis_dsn", "connection", "redis", "host"), _URL),
    **dict.fromkeys(("backend", "result_backend"), "leave it out: results are kept in the same server as the tasks"),
    **dict.fromkeys(
        ("name", "app_name", "main"), "use app='shop' for the name in lists of workers, prefix= for the keys"
    ),
    **dict.fromkeys(("namespace", "key_prefix", "queue_name"), "use prefix, the first part of all keys"),
}
"""What to write instead of an option of a mesh."""

_ENQUEUE: Final = "use `await {fn}.enqueue(...)`, or `{fn}.blocking.enqueue(...)` where no event loop runs"
_DISPATCH: Final = (
    "use `await {fn}.options(delay=60).dispatch(...)`, or `{fn}.blocking` in place of `{fn}` where no event loop runs"
)
CALLS: Final = {
    **dict.fromkeys(("delay", "send", "kiq", "remote"), _ENQUEUE),
    **dict.fromkeys(("apply_async", "send_with_options", "kicker", "enqueue_in", "enqueue_at"), _DISPATCH),
    **dict.fromkeys(("s", "si", "signature", "message"), "use `{fn}.call(...)`, which is a call as a value"),
}
"""What to call instead of a method of a function."""


def hint_at_option(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of an error about an unknown option `name`."""
    return OPTIONS.get(name) or did_you_mean(name, known, otherwise)


def no_such_method(kind: str, function: str, name: str, own: dict[str, str] | None = None) -> str:
    """Return the text of an AttributeError of a function's handle; hints in `own` take precedence over those in `CALLS`."""
    hint = (own or {}).get(name) or CALLS.get(name, "")
    short = function.rpartition(".")[2]
    return f"{kind!r} object has no attribute {name!r}" + (f": {hint.format(fn=short)}" if hint else "")


def not_bytes(task: object) -> str:
    """Return the text of an error about a task of a raw queue that is not bytes."""
    kind = type(task).__name__
    hint = "to pass Python values, declare a function with @mesh.task and enqueue calls of it"
    if isinstance(task, str):
        hint = f"use text.encode(); {hint}"
    elif kind == "Call":
        hint = "pass calls to mesh.enqueue_many([...]) or mesh.dispatch_many([...])"
    elif isinstance(task, list | tuple):
        found = list(cast("list[object]", task))
        each = bool(found) and all(isinstance(one, bytes | bytearray | memoryview) for one in found)
        hint = "pass several tasks as arguments, as in queue.enqueue(*tasks)" if each else _as_json(hint)
    elif isinstance(task, dict | int | float | None):
        hint = _as_json(hint)
    return f"a task must be bytes, bytearray or memoryview, not {kind}: {hint}"


def _as_json(hint: str) -> str:
    return f"use json.dumps(value).encode(); {hint}"


def explain_options(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor, so that its error about an unknown option names the right one."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(self: object, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                hint = MESH.get(name) or did_you_mean(name, known, f"it takes {', '.join(known)}")
                raise UsageError(f"{type(self).__name__}() has no option {name!r}; {hint}")
        init(self, *args, **options)

    return checked

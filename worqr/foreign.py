"""Names from other task queues, and what worqr calls the same thing. Pure: only for the texts of errors.

Users know these names from Celery, RQ, arq, Dramatiq, taskiq and SAQ. An error about such a name shows the spelling that works;
for a typing mistake, `did_you_mean` has a suggestion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar, cast

from worqr.errors import UsageError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")

_LATER: Final = "use delay, as in fn.options(delay=60).dispatch(...)"
_AT: Final = "use run_at, as in fn.options(run_at=datetime.now(UTC) + timedelta(hours=1)).dispatch(...)"
_TRIES: Final = "use retry=worqr.RetryPolicy(max_failures=3), which counts the first try too"
_QUEUE: Final = "a function's name is its queue: set it with @mesh.task(name=...)"
_ID: Final = "use id, as in fn.options(id='report-7').dispatch(...)"
_TIMEOUT: Final = "use timeout, in seconds"
_SOFT: Final = (
    "use timeout, in seconds: it cancels a coroutine, kills a process, and asks a thread to stop, where "
    "worqr.current().check_cancelled() raises"
)
_PERIOD: Final = "use a timedelta or seconds, as in mesh.every(timedelta(minutes=5)) or mesh.every(300)"
_FAIL_ON: Final = "use retry=worqr.RetryPolicy(fail_on=(ValueError,)): these errors are final"
_JITTER: Final = "use retry=worqr.RetryPolicy(jitter=True), which is the default"
_SHARED: Final = (
    "share options with a dict, as in BASE: worqr.HandlerOptions = {'timeout': 30} and @mesh.task(**BASE); code around each "
    "call is a middleware"
)
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
    **dict.fromkeys(("time_limit", "job_timeout"), _TIMEOUT),
    "soft_time_limit": _SOFT,
    **dict.fromkeys(("result_expires", "keep_result", "ttl"), _RESULT),
    **dict.fromkeys(("retry_backoff", "default_retry_delay", "retry_delay"), _BACKOFF),
    **dict.fromkeys(("autoretry_for", "retry_for"), _RETRY_ON),
    **dict.fromkeys(("rate_limit", "rate", "limiter", "throttle"), _RATE),
    **dict.fromkeys(("group", "group_id", "tenant", "partition", "partition_key", "concurrency_key"), _LANES),
    **dict.fromkeys(("workers", "max_jobs", "max_workers"), "use concurrency, as in mesh.run(concurrency=50)"),
    **dict.fromkeys(("minutes", "hours", "days", "weeks", "seconds"), _PERIOD),
    **dict.fromkeys(("dont_autoretry_for", "throws", "abort_on"), _FAIL_ON),
    "retry_jitter": _JITTER,
    "base": _SHARED,
    "expires": "it is an option of a call: fn.options(expires=60).dispatch(...)",
    **dict.fromkeys(
        ("link", "link_error"), "use @fn.on_failure for errors; for a next step, let the function dispatch it"
    ),
    **dict.fromkeys(
        ("reject_on_worker_lost", "task_reject_on_worker_lost"),
        "leave it out: worqr always gives a task of a dead worker back",
    ),
    "serializer": "leave it out: arguments are JSON, by the annotations of the function",
    "acks_late": "worqr always acknowledges a task after its run; leave the option out",
    "bind": "leave it out: worqr.current() is the running task, in any handler",
    "ignore_result": "leave it out: results are not kept unless you set result_ttl",
    "priority": _PRIORITY,
    "wait": "it is an option of a call: fn.options(wait=30).dispatch(...)",
    "queues": "use only, as in mesh.run(only=['mail.*'])",
    **dict.fromkeys(
        ("cron", "every", "schedule", "run_every", "crontab", "interval"),
        "write @mesh.cron('0 3 * * *') or @mesh.every(60) above @mesh.task",
    ),
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
    **dict.fromkeys(
        ("concurrency", "workers", "max_jobs"),
        "it is an option of a worker: `worqr run --concurrency 50`, mesh.run(concurrency=50)",
    ),
}
"""What to write instead of an option of a mesh."""

_ENQUEUE: Final = "use `await {fn}.enqueue(...)`, or `worqr.sync({fn}.enqueue, ...)` where no event loop runs"
_DISPATCH: Final = (
    "use `await {fn}.options(delay=60).dispatch(...)`, or `worqr.sync({fn}.options(delay=60).dispatch, ...)` where no event "
    "loop runs"
)
_MANY: Final = "use `await mesh.enqueue_many(map({fn}.call, values))`, or mesh.dispatch_many for jobs"
CALLS: Final = {
    **dict.fromkeys(("delay", "send", "kiq", "remote"), _ENQUEUE),
    **dict.fromkeys(("apply_async", "send_with_options", "kicker", "enqueue_in", "enqueue_at"), _DISPATCH),
    **dict.fromkeys(("enqueue_many", "dispatch_many", "map", "starmap", "chunks", "bulk"), _MANY),
    **dict.fromkeys(("s", "si", "signature", "message"), "use `{fn}.call(...)`, which is a call as a value"),
}
"""What to call instead of a method of a function."""


_TOTAL: Final = "use max_failures, which counts the first run, too: max_failures=4 allows 3 retries"
_BACKOFFS: Final = "use min_backoff and max_backoff, in seconds, as in worqr.RetryPolicy(min_backoff=1, max_backoff=60)"
RETRY_POLICY: Final = {
    **dict.fromkeys(("max_retries", "retries", "max_tries", "max_attempts", "attempts", "tries", "stop"), _TOTAL),
    **dict.fromkeys(("retry_backoff", "delay", "countdown", "wait", "interval", "min_delay"), _BACKOFFS),
    **dict.fromkeys(
        ("retry_delay", "default_retry_delay", "initial_interval", "retry_backoff_max", "max_delay"), _BACKOFFS
    ),
    **dict.fromkeys(("exceptions", "autoretry_for", "on"), "use retry_on=(OSError,)"),
    **dict.fromkeys(("dont_autoretry_for", "throws", "abort_on", "ignore"), "use fail_on=(ValueError,)"),
    "retry_jitter": "use jitter=True, which is the default",
    "timeout": "it is an option of the function: @mesh.task(timeout=30)",
    "": "write worqr.RetryPolicy(max_failures=3)",
}
"""What to write instead of an option of a RetryPolicy; "" is for arguments without a name."""
_DELAY: Final = "use delay, in seconds, as in raise worqr.Retry(delay=5)"
RETRY: Final = {
    **dict.fromkeys(("countdown", "defer", "seconds", "after", "in_", "retry_delay", "timeout"), _DELAY),
    **dict.fromkeys(("eta", "at", "when", "defer_until"), "use run_at, a datetime with a timezone"),
    **dict.fromkeys(("exc", "error", "cause"), "write raise worqr.Retry(delay=5) from error"),
    **dict.fromkeys(
        ("max_retries", "retries"), "set it on the function: @mesh.task(retry=worqr.RetryPolicy(max_failures=4))"
    ),
    "": "write worqr.Retry('why', delay=5)",
}
"""What to write instead of an option of a Retry."""
_AFTER: Final = "write raise worqr.RateLimited(30): seconds, of its Retry-After"
RATE_LIMITED: Final = {**dict.fromkeys(("delay", "countdown", "seconds", "after", "wait"), _AFTER), "": _AFTER}
"""What to write instead of an option of a RateLimited."""
_PER: Final = "use per, in seconds, as in worqr.Limit(rate=10, per=60)"
LIMIT: Final = {
    **dict.fromkeys(("period", "seconds", "interval", "window", "duration", "every"), _PER),
    **dict.fromkeys(
        ("requests", "calls", "count", "max_rate", "rate_limit", "max", "limit"), _PER.replace("per,", "rate and per,")
    ),
    **dict.fromkeys(
        ("max_concurrency", "workers", "max_running", "size"), "write worqr.Limit(10): 10 tasks may run at once"
    ),
    "": "write worqr.Limit(10) for 10 at once, or worqr.Limit(rate=10, per=60) for 10 starts in 60 seconds",
}
"""What to write instead of an option of a Limit."""
BATCH: Final = {"": "write batch.dispatch(fn.call(...)): a batch takes a call as a value"}
"""What to write instead of arguments of ``batch.dispatch``."""
EVERY: Final = dict.fromkeys(("minutes", "hours", "days", "weeks", "seconds", "period", "interval"), _PERIOD)
"""What to write instead of arguments of ``mesh.every``."""

_STATE: Final = "use `await job.status()`: its `state` is 'waiting', 'active', 'finished', 'failed' or another one"
JOB: Final = {
    **dict.fromkeys(("get", "wait", "fetch", "join", "return_value"), "use `await job.result(timeout=30)`"),
    **dict.fromkeys(
        ("state", "ready", "successful", "done", "is_finished", "is_failed", "failed", "get_status", "info"), _STATE
    ),
    **dict.fromkeys(("revoke", "abort", "terminate", "stop", "delete", "kill"), "use `await job.cancel()`"),
    **dict.fromkeys(("retry", "requeue"), "use `await queue.failed.retry(job.id)`, for a job in the dead-letter queue"),
    "forget": "leave it out: a result expires after its result_ttl",
}
"""What to use instead of an attribute of a job."""
_BY_NAME: Final = (
    "use `await fn.enqueue(...)` of the function, or `worqr.sync(fn.enqueue, ...)` where no event loop runs; by its name "
    "alone, `await mesh.enqueue_many([mesh.call('shop.send', to='ada')])`"
)
MESH_ATTRIBUTES: Final = {
    **dict.fromkeys(
        ("send_task", "enqueue", "delay", "apply_async", "dispatch", "send", "submit", "add_task"), _BY_NAME
    ),
    **dict.fromkeys(("enqueue_job", "enqueue_in", "enqueue_at"), _BY_NAME),
    **dict.fromkeys(("actor", "job", "background", "function"), "use @mesh.task"),
    **dict.fromkeys(
        ("add_periodic_task", "schedule", "periodic"),
        "use mesh.every(60, fn.call(...)) or mesh.cron('0 3 * * *', fn.call(...))",
    ),
    **dict.fromkeys(("AsyncResult", "get_result", "fetch_job"), "use fn.job(id), or mesh.queue('name').job(id)"),
    **dict.fromkeys(
        ("conf", "config_from_object"), "settings are arguments, as in worqr.Mesh('redis://...', prefix='shop')"
    ),
    **dict.fromkeys(
        ("worker_main", "start", "start_worker", "serve_forever", "work"), "use mesh.run(), or `worqr run app:mesh`"
    ),
    **dict.fromkeys(("control", "inspect"), "use mesh.workers(), mesh.running() and queue.cancel(), or `worqr --help`"),
}
"""What to use instead of an attribute of a mesh."""
QUEUE: Final = {
    **dict.fromkeys(
        ("put", "push", "add", "send", "publish", "lpush", "enqueue_call"), "use `await queue.enqueue(b'...')`"
    ),
    **dict.fromkeys(("empty", "purge", "clear"), "use `await queue.delete()`"),
    **dict.fromkeys(
        ("get", "pop", "receive", "dequeue"), "a worker takes tasks: `mesh.join(serve=...)`, or peer.work(queue)"
    ),
    **dict.fromkeys(("size", "qsize", "length", "get_queue_size"), "use `await queue.count()`"),
}
"""What to use instead of an attribute of a queue."""
CONTEXT: Final = {
    "retry": "write raise worqr.Retry(delay=5)",
    "request": "worqr.current() is it: .id, .attempt, .meta",
    "update_state": "use .progress(0.5, 'half'), or worqr.state(value)",
    "set_progress": "use .progress(0.5, 'half')",
    "retries": "use .attempt, which is 1 in the first run",
    "job_try": "use .attempt, which is 1 in the first run",
    **dict.fromkeys(("job_id", "task_id", "job"), "use .id"),
    **dict.fromkeys(("is_aborted", "cancelled", "is_cancelled"), "use .check_cancelled(), or .cancel_reason"),
}
"""What to use instead of an attribute of the running task."""


def hint_at_option(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of an error about an unknown option `name`."""
    return OPTIONS.get(name) or did_you_mean(name, known, otherwise)


def no_such_method(kind: str, function: str, name: str, own: dict[str, str] | None = None) -> str:
    """Return the text of an AttributeError of a function's handle; hints in `own` take precedence over those in `CALLS`."""
    hint = (own or {}).get(name) or CALLS.get(name, "")
    short = function.rpartition(".")[2]
    return f"{kind!r} object has no attribute {name!r}" + (f": {hint.format(fn=short)}" if hint else "")


def no_such_attribute(kind: str, name: str, words: dict[str, str]) -> str:
    """Return the text of an AttributeError of an object of worqr."""
    hint = words.get(name, "")
    return f"{kind!r} object has no attribute {name!r}" + (f": {hint}" if hint else "")


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


def explain_arguments(what: str, words: dict[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: if a call does not fit the signature, the TypeError has the words for what was given.

    It costs a call that fits one frame. The words for "" are about arguments without a name.
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        @wraps(fn)
        def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return fn(*args, **kwargs)
            except TypeError:
                signature = inspect.signature(fn)
                try:
                    signature.bind(*args, **kwargs)
                except TypeError:
                    hint = _hint_at_arguments(what, words, signature, kwargs)
                    if hint:
                        raise TypeError(hint) from None
                raise

        return explained

    return decorate


def _hint_at_arguments(what: str, words: dict[str, str], signature: inspect.Signature, given: dict[str, Any]) -> str:
    """Return the text about arguments that do not fit `signature`; empty if Python's own words are better."""
    known = [name for name in signature.parameters if name not in {"self", "how"}]
    for name in given:
        if name in words and name not in known:
            return f"{what} has no option {name!r}; {words[name]}"
    takes = f"it takes {', '.join(known)}"
    for name in given:
        if name not in known:
            return f"{what} has no option {name!r}; {did_you_mean(name, known, takes)}"
    return f"{what} does not take these arguments; {words['']}" if words.get("") else ""


def explained_class(words: dict[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class, which explains the arguments of its constructor."""

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__
        explained: Any = explain_arguments(f"{cls.__name__}()", words)(init)
        type.__setattr__(cls, "__init__", explained)
        return cls

    return decorate

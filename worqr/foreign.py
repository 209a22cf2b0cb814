"""The words of other task queues, and what worqr calls the same thing. Pure: for the texts of errors only.

Celery, RQ, arq, Dramatiq, taskiq and SAQ taught people these words. A name that is here is answered with the spelling that
works; a typing mistake is answered by `did_you_mean`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from worqr.errors import did_you_mean

_LATER: Final = "use delay, as in fn.options(delay=60).dispatch(...)"
_AT: Final = "use run_at, as in fn.options(run_at=datetime.now(UTC) + timedelta(hours=1)).dispatch(...)"
_TRIES: Final = "use retry=worqr.RetryPolicy(max_failures=3), which counts the first try too"
_QUEUE: Final = "a function's name is its queue: set it with @mesh.task(name=...)"
_ID: Final = "use id, as in fn.options(id='report-7').dispatch(...)"
_TIMEOUT: Final = "use timeout, in seconds"
_RESULT: Final = "use result_ttl, in seconds"
_BACKOFF: Final = "use retry=worqr.RetryPolicy(min_backoff=1, max_backoff=60)"
_RETRY_ON: Final = "use retry=worqr.RetryPolicy(retry_on=(OSError,))"

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
    "tz": "use timezone, as in mesh.cron('0 7 * * *', timezone='Europe/Berlin')",
}
"""Options: what to write instead."""

_ENQUEUE: Final = "use `await {fn}.enqueue(...)`, or `{fn}.blocking.enqueue(...)` where no event loop runs"
_DISPATCH: Final = (
    "use `await {fn}.options(delay=60).dispatch(...)`, or `{fn}.blocking` in place of `{fn}` where no event loop runs"
)
CALLS: Final = {
    **dict.fromkeys(("delay", "send", "kiq", "remote"), _ENQUEUE),
    **dict.fromkeys(("apply_async", "send_with_options", "kicker", "enqueue_in", "enqueue_at"), _DISPATCH),
    **dict.fromkeys(("s", "si", "signature", "message"), "use `{fn}.call(...)`, which is a call as a value"),
}
"""Methods of a function: what to call instead."""


def hint_at_option(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about an option `name` that is none of `known`."""
    return OPTIONS.get(name) or did_you_mean(name, known, otherwise)


def no_such_method(kind: str, function: str, name: str, own: dict[str, str] | None = None) -> str:
    """The text of an AttributeError of a function's handle; `own` are hints beside those of `CALLS`."""
    hint = (own or {}).get(name) or CALLS.get(name, "")
    short = function.rpartition(".")[2]
    return f"{kind!r} object has no attribute {name!r}" + (f": {hint.format(fn=short)}" if hint else "")

"""The handlers of forms: each is one kind of call of the public API, and returns to its page with the exact outcome.

Clicking twice changes nothing more: a job that was cancelled, retried or dropped is not found the second time.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal

from starlette.responses import JSONResponse, RedirectResponse, Response

from worqr.client.job import address_of, check_event, note_ended, note_rewound, note_sent
from worqr.client.job import end_wait as end_wait_of
from worqr.client.job import rewind as rewind_of
from worqr.dashboard.access import Refused
from worqr.dashboard.pages import all_workers, check_sees_all, look
from worqr.dashboard.reads import gathered
from worqr.dashboard.request import LONGEST_VALUE, NEW, UNKNOWN, UNSENT, Visit, notice
from worqr.errors import NoJob, Unavailable, UsageError, WorqrError
from worqr.escaping import escape
from worqr.inside import client_of, definition_of
from worqr.keys import QueueKeys
from worqr.limits import Limit
from worqr.policy import Undecodable
from worqr.stored_values import whole
from worqr.validation import encode_json
from worqr.views.schemas import FormField, form_fields, form_value, mismatch, read_json
from worqr.views.tables import open_waits

if TYPE_CHECKING:
    from worqr.client.dead_letters import DeadLetters
    from worqr.client.queue import Queue
    from worqr.functions.definition import FunctionDefinition
    from worqr.records import CancelCount


# What may start: limits and weights.


async def limit(visit: Visit) -> Response:
    """Set the limits of a queue or of a lane, or return to those of the code."""
    queue, lane = visit.queue(visit.text("queue")), visit.text("lane") or None
    clears, limits = visit.text("clear") == "yes", _limits(visit)
    if clears == bool(limits):
        raise Refused(
            400, "Fill in how many may run at once, or how many may start in how many seconds; or clear the limit."
        )

    async def act() -> str:
        if clears:
            await queue.clear_limit(lane=lane)
            return "limit-cleared"
        await queue.set_limit(*limits, lane=lane)
        return "limit"

    return await done(visit, act)


def _limits(visit: Visit) -> list[Limit]:
    """Return the limits of the form. Raises Refused, and UsageError for numbers that a limit cannot have."""
    concurrency, rate, per = (_whole(visit, name) for name in ("concurrency", "rate", "per"))
    if (rate is None) != (per is None):
        raise Refused(400, "A rate needs both: how many tasks may start, and in how many seconds.")
    found = [] if concurrency is None else [Limit(concurrency)]
    return found if rate is None or per is None else [*found, Limit(rate=rate, per=per)]


def _whole(visit: Visit, name: str) -> int | None:
    value = visit.text(name).strip()
    if value and not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise Refused(400, f"{name!r} must be a whole number.")
    return int(value) if value else None


async def weigh(visit: Visit) -> Response:
    """Set the weight of a lane; without a number, return to that of the code."""
    queue, lane, weight = visit.queue(visit.text("queue")), visit.text("lane"), _whole(visit, "weight")

    async def act() -> str:
        await queue.set_weight(lane, weight)
        return "weight"

    return await done(visit, act)


# Schedules: pause, resume, run now, other times, and back to the times of the code.


async def pause_schedule(visit: Visit) -> Response:
    """Pause or resume a schedule."""
    check_sees_all(visit)
    name, paused = visit.text("name"), visit.choice("paused", ("yes", "no")) == "yes"

    async def act() -> str:
        await visit.mesh.pause_schedule(name, paused=paused)
        return "schedule-pause" if paused else "schedule-resume"

    return await done(visit, act)


async def run_schedule(visit: Visit) -> Response:
    """Enqueue the task of a schedule now."""
    check_sees_all(visit)
    name = visit.text("name")

    async def act() -> str:
        job = await visit.mesh.run_schedule(name)
        return "schedule-busy" if job.outcome == "unchanged" else "schedule-run"

    return await done(visit, act)


async def override_schedule(visit: Visit) -> Response:
    """Give a schedule other times, or those of its code."""
    check_sees_all(visit)
    name, reset = visit.text("name"), visit.choice("reset", ("no", "yes")) == "yes"
    cron, timezone = visit.text("cron").strip(), visit.text("timezone").strip()

    async def act() -> str:
        if reset:
            await visit.mesh.override_schedule(name, None)
            return "schedule-reset"
        await visit.mesh.override_schedule(name, cron, timezone=timezone or None)
        return "schedule-override"

    return await done(visit, act)


# The forms of a worker: quiet, resume, drain, another concurrency, and its eviction.


MODES: Final[dict[str, Literal["quiet", "resume", "drain"]]] = {"quiet": "quiet", "resume": "resume", "drain": "drain"}


async def ask_worker(visit: Visit) -> Response:
    """Ask a worker for something."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Requests to workers are for viewers who see all queues only.")
    worker, what = visit.text("id"), visit.choice("what", ("quiet", "resume", "drain", "concurrency"))
    mode = MODES.get(what)
    concurrency = _concurrency(visit.text("n").strip()) if mode is None else None

    async def act() -> str:
        await visit.mesh.ask_worker(worker, mode, concurrency=concurrency)
        return "worker-asked"

    return await done(visit, act)


def _concurrency(word: str) -> int | Literal["auto"]:
    if word == "auto":
        return "auto"
    if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word)):
        raise Refused(400, "The number of tasks must be a whole number, at least 1, or: auto.")
    return int(word)


async def evict_worker(visit: Visit) -> Response:
    """Declare a worker dead whose process is gone. The form repeats the number of its process, because it may not be."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Workers are evicted by viewers who see all queues only.")
    found = [each for each in await all_workers(visit) if each.id == visit.text("id")]
    if not found:
        raise Refused(400, "There is no worker with this id: it has left, or it was evicted before.")
    if visit.text("typed").strip() != str(found[0].pid):
        raise Refused(400, f"Nothing was done. To confirm, type the number of the process: {found[0].pid}.")

    async def act() -> str:
        await visit.mesh.evict(found[0].id)
        return "worker-evicted"

    return await done(visit, act)


ACKNOWLEDGED_WITHIN: Final = 5.0
"""Seconds for which a cancel waits for the runs to end."""
LONGEST_PAUSE: Final = 366 * 86400
"""Seconds."""
MOST_IDS: Final = 100
"""Tasks of one act, so that it never holds up the server."""


def _ids(visit: Visit, name: str = "id") -> list[str]:
    ids = _values(visit, name)
    if not ids:
        raise Refused(400, "No task was chosen. Tick the box of at least one, then try again.")
    return ids


def _values(visit: Visit, name: str) -> list[str]:
    """Return the values of a field that a form may have several times."""
    found = [value for field, value in visit.form if field == name and value]
    if max(map(len, found), default=0) > LONGEST_VALUE:
        raise Refused(400, f"{name!r} is longer than {LONGEST_VALUE} characters.")
    if len(found) > MOST_IDS:
        raise Refused(400, f"At most {MOST_IDS} tasks at a time. For more, act on all tasks that a list shows.")
    return found


async def done(visit: Visit, act: Callable[[], Awaitable[str]]) -> Response:
    """Return to the page of the form, also if the server has not answered. Without such a page, do not act."""
    if not visit.by_token:
        visit.back()
    try:
        done = await act()
    except Unavailable as error:
        done = UNSENT if error.sent is False else UNKNOWN
    return visit.see_other(done)


async def note(visit: Visit, kind: str, queue: str, ids: Sequence[str] = (), count: int = 0, text: str = "") -> None:
    """Write an act into the log of the mesh, unless the call of the API does so."""
    job = ids[0] if len(ids) == 1 else ""
    await client_of(visit.mesh).note(kind, queue=queue, job=job, count=count, text=text)


def reason_of(visit: Visit) -> str:
    """Return the name of the viewer, with the reason in the form."""
    words = visit.text("reason").strip()
    return f"{visit.viewer.name}: {words}" if words else visit.viewer.name


async def cancel(visit: Visit) -> Response:
    """Cancel jobs, and wait until their runs have ended."""
    queue, reason, claims = visit.queue(visit.text("queue")), reason_of(visit), _values(visit, "claim")
    ids = [] if claims else _ids(visit)

    async def one(job: str) -> CancelCount:
        return await queue.job(job).cancel(reason=reason, wait=ACKNOWLEDGED_WITHIN)

    async def plain() -> CancelCount:
        return await queue.cancel_claims(*claims, reason=reason, wait=ACKNOWLEDGED_WITHIN)

    async def act() -> str:
        began = time.monotonic()
        counts = await gathered([partial(one, job) for job in ids] + ([plain] if claims else []))
        ms = round((time.monotonic() - began) * 1000)
        sums = [sum(getattr(each, name) for each in counts) for name in ("waiting", "running", "acknowledged")]
        await note(visit, "cancelled", queue.name, ids, sums[0] + sums[1], visit.text("reason").strip())
        return ":".join(map(str, ("cancel", *sums, ms)))

    return await done(visit, act)


def _dead_letters(visit: Visit) -> DeadLetters:
    queue = visit.queue(visit.text("queue"))
    return queue.failed if visit.choice("list", ("failed", "undecodable")) == "failed" else queue.undecodable


async def change_dead_letters(verb: Literal["retry", "drop"], visit: Visit) -> Response:
    """Put dead-letter records back into their queue, or delete them."""
    dead_letters, ids = _dead_letters(visit), _ids(visit)

    async def act() -> str:
        count = await (dead_letters.retry if verb == "retry" else dead_letters.drop)(*ids)
        if not count:
            await note(visit, "retried" if verb == "retry" else "dropped", visit.text("queue"), ids)
        return f"{verb}:{count}:{len(ids)}"

    return await done(visit, act)


async def run_now(visit: Visit) -> Response:
    """Make scheduled jobs due now."""
    queue, ids = visit.queue(visit.text("queue")), _ids(visit)

    async def act() -> str:
        count = await queue.run_now(*ids)
        await note(visit, "run_now", queue.name, ids, count)
        return f"run:{count}:{len(ids)}"

    return await done(visit, act)


# Jobs that have ended, and jobs with a tag


async def run_again(visit: Visit) -> Response:
    """Dispatch a kept job once more, as a new job."""
    queue, kept = visit.queue(visit.text("queue")), visit.text("kept")

    async def act() -> str:
        job = await queue.run_again(kept)
        await note(visit, "run_again", queue.name, [job.id])
        return "again"

    return await done(visit, act)


async def forget(visit: Visit) -> Response:
    """Delete what is kept of some jobs."""
    queue, kept = visit.queue(visit.text("queue")), _ids(visit, "kept")

    async def act() -> str:
        count = await queue.forget(*kept)
        await note(visit, "forgotten", queue.name, (), count)
        return f"drop:{count}:{len(kept)}"

    return await done(visit, act)


async def change_tagged(verb: Literal["cancel", "retry", "forget"], visit: Visit) -> Response:
    """Cancel, retry or forget all jobs of a queue with a tag. To forget, the tag must be typed."""
    queue, tag, reason = visit.queue(visit.text("queue")), visit.text("tag"), reason_of(visit)
    if verb == "forget" and visit.text("typed").strip() != tag:
        raise Refused(400, "Nothing was deleted. To confirm, type the tag: go back to try again.")

    async def act() -> str:
        began = time.monotonic()
        if verb == "cancel":
            count = await queue.cancel_tagged(tag, reason=reason)
            return f"cancel:{count.waiting}:{count.running}:0:{round((time.monotonic() - began) * 1000)}"
        if verb == "retry":
            retried = await queue.retry_tagged(tag)
            return f"retry:{retried}:{retried}"
        found: Any = await queue.forget_tagged(tag, reason=reason)
        total = found.waiting + found.running + found.kept + found.results + found.dead_letters
        return f"drop:{total}:{total}"

    return await done(visit, act)


async def pause(visit: Visit) -> Response:
    """Pause a queue or a lane, until it is resumed or for some seconds."""
    queue, lane, reason = visit.queue(visit.text("queue")), visit.text("lane") or None, reason_of(visit)
    seconds = visit.number("duration", -1, 0, LONGEST_PAUSE)

    async def act() -> str:
        await queue.pause(reason, duration=None if seconds < 0 else seconds, lane=lane)
        return "pause" if lane is None else "lane-pause"

    return await done(visit, act)


async def resume(visit: Visit) -> Response:
    """Resume a queue or a lane."""
    queue, lane = visit.queue(visit.text("queue")), visit.text("lane") or None

    async def act() -> str:
        await queue.resume(lane=lane)
        return "resume" if lane is None else "lane-resume"

    return await done(visit, act)


# A value for a workflow


FIELD: Final = "field."
"""The beginning of the names of inputs for the fields of an object."""


async def send(visit: Visit) -> Response:
    """Send a value to a workflow. The form of a page has the key of a wait: sent twice, or after that wait, it sends nothing."""
    queue, job, name = visit.queue(visit.text("queue")), visit.text("id"), check_event(visit.text("name"))
    life, key = whole(visit.text("life"), 0), visit.text("key")
    record = await queue.read(job)
    waits = [each for each in open_waits(record, name) if key in ("", each.key)] if life in (0, record.life) else []
    if key and not waits:
        raise Refused(
            400, "The workflow does not wait for this any more, so nothing was sent. Reload the page of the job."
        )
    value = _value(visit, waits[0].schema if waits else "")
    if waits and (why := mismatch(waits[0].schema, value)):
        raise Refused(400, f"Nothing was sent: the value is not of the type that the workflow waits for: {why}.")

    async def act() -> str:
        try:
            if life:
                outcome = await visit.mesh.send(address_of(queue.name, life, job), name, value)
            else:
                outcome = await queue.job(job).send(name, value)
        except NoJob:
            return "sent-none"
        if outcome in ("woke", "stored"):
            await note_sent(client_of(visit.mesh), queue.name, job, name, value)
        return f"sent-{outcome}"

    return await done(visit, act)


async def end_wait(visit: Visit) -> Response:
    """End a wait of one life of a workflow. Sent twice, it ends nothing."""
    queue, job, entry = visit.queue(visit.text("queue")), visit.text("id"), visit.text("entry")
    life, client = whole(visit.text("life"), 0), client_of(visit.mesh)

    async def act() -> str:
        keys = QueueKeys(client.settings.prefix, queue.name)
        key = await _key_of(queue, job, entry)
        try:
            shard = await client.sharding.shard_of_id(keys, job)
            ended = await end_wait_of(client, shard, job, key, life=life)
        except (NoJob, UsageError):
            return "wait-none"
        if ended:
            await note_ended(client, queue.name, job, key)
        return "wait-ended" if ended else "wait-none"

    return await done(visit, act)


def mark_of(key: str) -> str:
    """Return what a form names an entry of a time line by: its key may have arguments that the page hides."""
    return sha256(key.encode()).hexdigest()[:32]


async def _key_of(queue: Queue, job: str, entry: str) -> str:
    """Return the key of the entry of a time line that a form, or a program by the key, names so; empty if there is none."""
    return next((each.key for each in (await queue.read(job)).time_line if entry in (mark_of(each.key), each.key)), "")


async def rewind(visit: Visit) -> Response:
    """Let one life of a workflow run again from an entry of its time line. Sent twice, it finds the entry no more."""
    queue, job, entry = visit.queue(visit.text("queue")), visit.text("id"), visit.text("entry")
    life, client = whole(visit.text("life"), 0), client_of(visit.mesh)

    async def act() -> str:
        keys = QueueKeys(client.settings.prefix, queue.name)
        key = await _key_of(queue, job, entry)
        try:
            shard = await client.sharding.shard_of_id(keys, job)
            dropped = await rewind_of(client, shard, job, key, life=life)
        except (NoJob, UsageError):
            return "rewind-none"
        await note_rewound(client, queue.name, job, key, dropped)
        return f"rewind:{dropped}"

    return await done(visit, act)


def _value(visit: Visit, schema: str) -> Any:
    """Return the value of the form: a field for each field of an object, a text as it was typed, or JSON. None without any."""
    typed: Mapping[str, str] = {name: text.replace("\r\n", "\n") for name, text in visit.form}
    try:
        if any(name.startswith(FIELD) for name in typed):
            given = {name.removeprefix(FIELD): text for name, text in typed.items() if name.startswith(FIELD)}
            return form_value(form_fields(schema), given)
        if "text" in typed:
            return typed["text"]
        return FormField("", "json", "", True).value(typed["value"]) if "value" in typed else None
    except ValueError as error:
        raise Refused(400, f"Nothing was sent: {error}.") from None


# A task that an operator enqueues by hand: the form, and the act.
#
# If the dashboard is mounted with the mesh that declares the function of the queue, the form has a field for each argument.
# What is typed is decoded as a worker would decode it, before anything is sent. For other queues, the payload is typed.


PAYLOAD: Final = "payload"
ARGUMENT: Final = "arg."
"""The beginning of the names of fields for arguments."""
OFF: Final = (
    "You may not enqueue tasks by hand. It needs the right 'enqueue', and a dashboard that allows it: allow_enqueue=True, "
    "or --allow-enqueue."
)
LONGEST_DELAY: Final = 366 * 86_400


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a function: its name, its type and its default as the form names them, and what was typed."""

    name: str
    kind: str
    default: str
    text: str
    is_text: bool
    needed: bool

    def value(self) -> Any:
        """Return the argument: a text as it is typed, anything else as JSON. Raise UsageError if it is neither."""
        if self.is_text:
            return self.text
        try:
            return read_json(self.text)
        except ValueError as error:
            raise UsageError(f"The argument {self.name!r} must be JSON, such as 42, true or [1, 2]: {error}.") from None


async def new_task(visit: Visit) -> Response:
    """The form."""
    if "enqueue" not in visit.viewer.may:
        raise Refused(403, OFF)
    if name := visit.text("queue"):
        visit.queue(name)
    await look(visit)  # for the header
    return _new_task_form(visit, "", 200)


def _new_task_form(visit: Visit, why: str, status: int) -> Response:
    """Return the form with what was typed, and what is wrong with it."""
    if why and visit.by_token:
        return JSONResponse({"error": why}, status)
    name = visit.text("queue").strip()
    given = {field: visit.text(field) for field in ("id", "delay")}
    fields = fields_of_function(visit, name)
    return visit.page(
        "new.html", status, live="", queue=name, fields=fields, payload=typed_text(visit, PAYLOAD), why=why, **given
    )


def typed_text(visit: Visit, name: str) -> str:
    """Return a field that may be long. Browsers end lines of a text with two characters."""
    return dict(visit.form).get(name, "").replace("\r\n", "\n")


def _definition(visit: Visit, name: str) -> FunctionDefinition | None:
    function = visit.functions.get(name)
    return None if function is None else definition_of(function)


def fields_of_function(visit: Visit, queue: str) -> Sequence[Argument]:
    """Return a field for each argument of the function of a queue; none if it is not known here."""
    return _fields(visit, _definition(visit, queue))


def _fields(visit: Visit, definition: FunctionDefinition | None) -> Sequence[Argument]:
    """Return a field for each argument; none if there is no function, or it takes any arguments."""
    if definition is None:
        return ()
    return [_field(each, typed_text(visit, f"{ARGUMENT}{each.name}")) for each in definition.codec.parameters]


def _field(parameter: inspect.Parameter, text: str) -> Argument:
    hint, default = parameter.annotation, parameter.default
    kind = "" if hint is parameter.empty else hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    needed = default is parameter.empty
    return Argument(parameter.name, kind, "" if needed else repr(default)[:100], text, kind == "str", needed)


def payload_of(visit: Visit, name: str) -> bytes:
    """Return the payload that was typed. Raise UsageError if the queue's function cannot take it."""
    definition = _definition(visit, name)
    fields = _fields(visit, definition)
    if fields:
        values = {each.name: each.value() for each in fields if each.text or (each.needed and each.is_text)}
        missing = [each.name for each in fields if each.needed and each.name not in values]
        if missing:
            raise UsageError(f"The argument {missing[0]!r} needs a value.")
        only = definition is not None and definition.codec.payload_is_argument
        try:
            payload = encode_json(next(iter(values.values())) if only else values)
        except (UnicodeEncodeError, RecursionError):
            raise UsageError(
                "An argument has half of a surrogate pair, or is nested too deeply: JSON cannot hold it."
            ) from None
    else:
        payload = typed_text(visit, PAYLOAD).encode()
    if definition is not None:
        try:
            definition.codec.decode(payload)
        except Undecodable as error:
            raise UsageError(f"A worker could not decode this: {error}") from None
    return payload


def _delay(visit: Visit) -> float | None:
    text = visit.text("delay").strip()
    if not text:
        return None
    if not text.isascii() or not text.replace(".", "", 1).isdigit() or float(text) > LONGEST_DELAY:
        raise UsageError("The delay must be a number of seconds, at most a year, such as 90 or 0.5.")
    return float(text)


async def enqueue(visit: Visit) -> Response:
    """Enqueue what was typed: a plain task, or a job if there is an id or a delay."""
    name = visit.text("queue").strip()
    try:
        queue, job = visit.queue(name), await _enqueued(visit, name)
    except Unavailable as error:
        return _new_task_form(visit, notice(UNSENT if error.sent is False else UNKNOWN), 503)
    except WorqrError as error:
        return _new_task_form(visit, escape(str(error)), 400)
    await note(visit, "enqueued", queue.name, [job] if job else [], 1)
    if visit.by_token:
        return JSONResponse({"outcome": notice(NEW), "id": job or None})
    target = partial(visit.link, "/job", queue=name, id=job) if job else partial(visit.link, "/queue", name=name)
    return RedirectResponse(target(done=NEW), 303)


async def _enqueued(visit: Visit, name: str) -> str:
    """Enqueue it. Return the id of the job; empty for a plain task."""
    queue, payload = visit.queue(name), payload_of(visit, name)
    given = {"id": visit.text("id").strip() or None, "delay": _delay(visit)}
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    if not options:
        await queue.enqueue(payload)
        return ""
    return (await queue.dispatch(payload, if_exists="raise", **options)).id

"""A task that an operator enqueues by hand: the form, and the act.

If the dashboard is mounted with the mesh that declares the function of the queue, the form has a field for each argument. What is
typed is decoded as a worker would decode it, before anything is sent. For other queues, the payload is typed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse, RedirectResponse, Response

from worqr.dashboard.forms import note
from worqr.dashboard.guard import Refused
from worqr.dashboard.pages import look
from worqr.dashboard.request import NEW, UNKNOWN, UNSENT, Visit, notice
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.escaping import escape
from worqr.inside import definition_of
from worqr.policy import Undecodable
from worqr.validation import encode_json

if TYPE_CHECKING:
    from worqr.functions.definition import FunctionDefinition


PAYLOAD: Final = "payload"
ARGUMENT: Final = "arg."
"""The beginning of the names of fields for arguments."""
OFF: Final = (
    "You may not enqueue tasks by hand. It needs the right 'enqueue', and a dashboard that allows it: allow_enqueue=True, "
    "or --allow-enqueue."
)
LONGEST_DELAY: Final = 366 * 86_400


@dataclass(frozen=True, slots=True)
class Field:
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
            return json.loads(self.text)
        except ValueError as error:
            raise UsageError(f"The argument {self.name!r} must be JSON, such as 42, true or [1, 2]: {error}.") from None


async def page(visit: Visit) -> Response:
    """The form."""
    if "enqueue" not in visit.viewer.may:
        raise Refused(403, OFF)
    if name := visit.text("queue"):
        visit.queue(name)
    await look(visit)  # for the header
    return _form(visit, "", 200)


def _form(visit: Visit, why: str, status: int) -> Response:
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


def fields_of_function(visit: Visit, queue: str) -> Sequence[Field]:
    """Return a field for each argument of the function of a queue; none if it is not known here."""
    return _fields(visit, _definition(visit, queue))


def _fields(visit: Visit, definition: FunctionDefinition | None) -> Sequence[Field]:
    """Return a field for each argument; none if there is no function, or it takes any arguments."""
    if definition is None:
        return ()
    return [_field(each, typed_text(visit, f"{ARGUMENT}{each.name}")) for each in definition.codec.parameters]


def _field(parameter: inspect.Parameter, text: str) -> Field:
    hint, default = parameter.annotation, parameter.default
    kind = "" if hint is parameter.empty else hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    needed = default is parameter.empty
    return Field(parameter.name, kind, "" if needed else repr(default)[:100], text, kind == "str", needed)


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
        payload = encode_json(next(iter(values.values())) if only else values)
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


async def create(visit: Visit) -> Response:
    """Enqueue what was typed: a plain task, or a job if there is an id or a delay."""
    name = visit.text("queue").strip()
    try:
        queue, job = visit.queue(name), await _enqueued(visit, name)
    except Unavailable as error:
        return _form(visit, notice(UNSENT if error.sent is False else UNKNOWN), 503)
    except WorqrError as error:
        return _form(visit, escape(str(error)), 400)
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

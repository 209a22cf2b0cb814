"""Errors and dead-letter records as stored text: encode exceptions, and decode them again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, cast

import msgspec

from worqr.records import Failed, RemoteError
from worqr.stored_values import whole
from worqr.tracebacks import format_error, text_of
from worqr.validation import clean_text, encode_json, from_ms, name_of

FIELDS: Final = 4096
"""Bytes of an error's attributes, as JSON."""
MANY_FIELDS: Final = 100
LONGEST_MESSAGE: Final = 4096
LONGEST_TRACEBACK: Final = 16384


def remote_error(error: BaseException) -> RemoteError:
    """Return an exception as text: its type, its message and the end of its traceback.

    For an exception from another process, it is what that process reported.
    """
    remote = getattr(error, "__worqr_remote__", None)
    if isinstance(remote, RemoteError):
        return remote
    message = clean_text(text_of(error))[:LONGEST_MESSAGE]
    lines = clean_text(format_error(error))[-LONGEST_TRACEBACK:]
    return RemoteError(name_of(type(error)), message, lines, _fields_of(error))


def error_type(error: BaseException) -> str:
    """Return the type of an exception as `remote_error` has it, without the work for the rest."""
    remote = getattr(error, "__worqr_remote__", None)
    return remote.type if isinstance(remote, RemoteError) else name_of(type(error))


def error_from_text(type: str, message: str) -> RemoteError:
    """Return an error with this type and message, which no code raised."""
    return RemoteError(type, clean_text(message)[:LONGEST_MESSAGE], "")


def with_stderr(error: RemoteError, output: str) -> RemoteError:
    """Return an error with the output that its run wrote to the standard error."""
    output = output.strip("\n")
    if not output:
        return error
    parts = [part for part in (error.traceback.rstrip("\n"), "stderr:", output) if part]
    return replace(error, traceback="\n".join(parts) + "\n")


def _fields_of(error: BaseException) -> dict[str, Any]:
    """Return the attributes of an exception that can be sent, as many as fit."""
    found: dict[str, Any] = {}
    left = FIELDS
    for name, value in list(vars(error).items())[:MANY_FIELDS]:
        if name.startswith("_") or not isinstance(value, str | int | float | list | tuple | dict | None):
            continue
        try:
            encoded = encode_json({name: cast("object", value)})
            sent: dict[str, Any] = msgspec.json.decode(encoded) if len(encoded) <= left else {}
        except Exception:  # noqa: S112 - a type of the user may raise any error when it is encoded
            continue
        left -= len(encoded) if sent else 0
        found |= sent
    return found


def fields_as_json(error: RemoteError) -> bytes:
    """Return the fields of an error as they are stored; empty if there are none."""
    return encode_json(error.fields) if error.fields else b""


def fields_of(text: str) -> dict[str, Any]:
    """Return the stored fields of an error; none if another program stored something else."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except (msgspec.MsgspecError, RecursionError):
        return {}


def meta_of(text: str) -> Mapping[str, str]:
    """Return a stored `meta`; empty if another program stored something else."""
    try:
        return msgspec.json.decode(text, type=dict[str, str]) if text else {}
    except (msgspec.MsgspecError, RecursionError):
        return {}


def failed_record(queue: str, task: bytes, facts: Mapping[str, bytes | str]) -> Failed:
    """Return the dead-letter record of a task, read from its stored fields."""

    def field(name: str) -> str:
        value = facts.get(name, "")
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    return Failed(
        id=field("id"),
        queue=queue,
        task=task,
        reason=cast('Literal["failed", "stalled", "timeout", "expired", "broken"]', field("reason")),
        error=RemoteError(
            field("error_type"), field("error_message"), field("error_traceback"), fields_of(field("error_fields"))
        ),
        failures=whole(field("failures"), 0),
        stalls=whole(field("stalls"), 0),
        timeouts=whole(field("timeouts"), 0),
        worker=field("worker"),
        at=from_ms(whole(field("at"), 0)),
        meta=meta_of(field("meta")),
        size=whole(field("size"), len(task)),
    )

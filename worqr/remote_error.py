"""Errors and dead-letter records as stored text: describe exceptions, and decode them again. Pure.

`describe` is the one way from an exception to text. It is called where the handler ran, and never raises (see `tracebacks`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from types import NoneType
from typing import Any, Final, Literal, cast
from uuid import UUID

import msgspec

from worqr.policy import ChildError, RateLimited, Retry
from worqr.records import Failed, RemoteError
from worqr.stored_values import public_name, whole
from worqr.tracebacks import (
    MAX_CHAIN,
    ErrorFormatter,
    attributes_of,
    builtin_kind,
    cause_of,
    is_a,
    leaves_of,
    parts_of,
    shortened,
)
from worqr.validation import clean_text, encode_json, from_ms, name_of

FIELDS: Final = 4096
"""Bytes of an error's attributes, as JSON."""
MANY_FIELDS: Final = 100
LONGEST_MESSAGE: Final = 4096
LONGEST_TRACEBACK: Final = 16384
_PLAIN: Final = (str, int, float, bool, list, tuple, dict, NoneType)
"""The types of attributes that are sent, with their subclasses."""
_SENT_INSIDE: Final = (*_PLAIN, date, time, timedelta, Decimal, UUID)
_NESTING: Final = 10
"""Containers inside containers of an attribute that is sent."""


class Description(msgspec.Struct, frozen=True):
    """An exception as text.

    Attributes:
        error: as it is stored.
        line: in one line, for the log.
    """

    error: RemoteError
    line: str


def describe(error: BaseException) -> Description:
    """Return an exception as text. It never raises, whatever the exception is like.

    For an exception from another process, it is what that process reported. A `Retry` that was raised from another error is
    described as that error. A group in which all errors have one type has that type, and the text of the first one.
    """
    if (remote := reported_error(error)) is not None:
        return Description(remote, _line_of(remote))
    (subject, others), whole, texts = _subject(error), _kept(error), ErrorFormatter()
    line = texts.one_line(whole)
    if whole is not error and texts.text(error):
        line = shortened(f"{line} ({texts.one_line(error)})")
    remote = reported_error(subject)
    lines = remote.traceback if remote is not None and subject is whole else texts.traceback(whole)
    if remote is None:
        kind, message, found = name_of(type(subject)), texts.text(subject)[:LONGEST_MESSAGE], _fields_of(subject)
    else:
        kind, message, found = remote.type, remote.message, dict(remote.fields)
    if others:
        message = f"{message} (and {others:,} more)"
    return Description(RemoteError(kind, message, lines[-LONGEST_TRACEBACK:], found), line)


TRACEBACKS_STEP: Final = "@errors"
"""The step under which a handler saves the tracebacks of its failed runs."""
MANY_TRACEBACKS: Final = 10


def add_traceback(saved: bytes | None, claim: int, traceback: str) -> bytes:
    """Return what is saved under `TRACEBACKS_STEP`, with the traceback of one more run; the last ten are kept.

    Args:
        saved: what was saved before.
        claim: the fencing token of the run.
        traceback: as `describe` returns it.
    """
    texts = tracebacks_of(saved or b"") | {claim // 1000: traceback}
    return b"json " + encode_json([[ms, texts[ms]] for ms in sorted(texts)[-MANY_TRACEBACKS:]])


def tracebacks_of(saved: bytes) -> dict[int, str]:
    """Return the saved tracebacks by the time of the claim in ms; none if another program saved something else."""
    try:
        return dict(msgspec.json.decode(saved.removeprefix(b"json "), type=list[tuple[int, str]]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def remote_error(error: BaseException) -> RemoteError:
    """Return an exception as it is stored."""
    return describe(error).error


def error_type(error: BaseException) -> str:
    """Return the type of an exception as `describe` has it, without the work for the rest."""
    subject, _ = _subject(error)
    return _type_of(subject)


def reported_error(error: BaseException) -> RemoteError | None:
    """Return what another process reported of an error; None for an error of this process."""
    if is_a(error, ChildError):
        return error.remote
    try:
        remote: object = attributes_of(error).get("__worqr_remote__")
    except BaseException:  # a name among its attributes that raises when it is compared
        return None
    return remote if type(remote) is RemoteError else None


def _type_of(error: BaseException) -> str:
    remote = reported_error(error)
    return name_of(type(error)) if remote is None else remote.type


def _line_of(remote: RemoteError) -> str:
    text = " ".join(remote.message.split())
    name = remote.type.removeprefix("worqr.")
    return shortened(f"{name}: {text}" if text else name)


def _kept(error: BaseException) -> BaseException:
    """Return the error that a `Retry` was raised from; without one, the error itself."""
    for _ in range(MAX_CHAIN):
        cause = cause_of(error) if is_a(error, Retry) and not is_a(error, RateLimited) else None
        if cause is None:
            return error
        error = cause
    return error


def _subject(error: BaseException) -> tuple[BaseException, int]:
    """Return the error that stands for another one in records, and how many more of its type there are."""
    kept = _kept(error)
    if not is_a(kept, BaseExceptionGroup):
        return kept, 0
    leaves = [leaf for leaf, _ in leaves_of(kept)]
    first = leaves[0] if leaves else kept
    name = _type_of(first)
    if any(type(leaf) is not type(first) or is_a(leaf, ChildError) for leaf in leaves) and any(
        _type_of(leaf) != name for leaf in leaves
    ):
        return kept, 0
    return first, max(0, len(leaves) - 1)


def error_from_text(type: str, message: str) -> RemoteError:
    """Return an error with this type and message, which no code raised."""
    return RemoteError(type, clean_text(message)[:LONGEST_MESSAGE], "")


_PLACE: Final = re.compile(r'^ *File ".*", line \d+.*$', re.MULTILINE)


def redacted(error: RemoteError) -> RemoteError:
    """Return an error without its texts: its type, and the places of its traceback."""
    return RemoteError(error.type, "", places_of(error.traceback))


def places_of(traceback: str) -> str:
    """Return the lines of a traceback that name places."""
    return "".join(f"{line}\n" for line in _PLACE.findall(f"\n{traceback}".partition("\nstderr:")[0]))


def redacted_step(saved: bytes) -> bytes:
    """Return what is saved of an error of a step without its texts: ``failed`` and its error, a failed try, or tracebacks."""
    if saved.startswith(b"json "):
        return b"json " + encode_json([[ms, places_of(text)] for ms, text in tracebacks_of(saved).items()])
    kind, space, told = saved.partition(b" ") if saved.startswith(b"failed ") else (b"", b"", saved)
    name, _, *rest = msgspec.json.decode(told)
    return (
        kind + space + encode_json([name, "", *(places_of(each) if isinstance(each, str) else each for each in rest)])
    )


def packed_error(stored: bytes) -> RemoteError:
    """Return an error from an array of its type, its message, its traceback and its fields as JSON, in MessagePack."""
    try:
        kind, message, traceback, fields = msgspec.msgpack.decode(stored, type=tuple[str, str, str, str])
        return RemoteError(kind, message, traceback, msgspec.json.decode(fields, type=dict[str, Any]) if fields else {})
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RemoteError("unknown", "", "")  # another program has written it


def with_stderr(error: RemoteError, output: str) -> RemoteError:
    """Return an error with the output that its run wrote to the standard error."""
    output = output.strip("\n")
    if not output:
        return error
    parts = [part for part in (error.traceback.rstrip("\n"), "stderr:", output) if part]
    return replace(error, traceback="\n".join(parts) + "\n")


def _fields_of(error: BaseException) -> dict[str, Any]:
    """Return the public attributes of an exception that can be sent, as many as fit. Large ones are not encoded."""
    found: dict[str, Any] = {}
    left = FIELDS
    try:
        attributes = list(islice(dict[Any, Any].items(attributes_of(error)), MANY_FIELDS))
    except BaseException:  # another thread changes them
        return {}
    for name, value in attributes:
        if type(name) is not str or name.startswith("_") or not issubclass(type(value), _PLAIN):
            continue
        try:
            plain, _ = _plain({name: value}, left, _NESTING)
            encoded = encode_json(plain)
            sent: dict[str, Any] = msgspec.json.decode(encoded) if len(encoded) <= left else {}
        except BaseException:  # noqa: S112 - it is too large, or no JSON; or the user's own encoder raised
            continue
        left -= len(encoded) if sent else 0
        found |= sent
    return found


def _plain(value: Any, left: int, depth: int) -> tuple[Any, int]:
    """Return `value` with its containers copied, and how many of `left` bytes are left. Raises ValueError if it is too large."""
    kind = builtin_kind(value)
    left -= 1 + (str.__len__(value) if kind is str else int.bit_length(value) // 4 if kind is int else 0)
    if left < 0 or depth < 0 or not issubclass(type(value), _SENT_INSIDE):
        raise ValueError("it is too large, or may be")
    if kind is dict:
        found: dict[Any, Any] = {}
        for key, each in dict[Any, Any].items(value):
            _, left = _plain(key, left, 0)
            found[key], left = _plain(each, left, depth - 1)
        return found, left
    if kind is list or kind is tuple:
        items: list[Any] = []
        for each in parts_of(value):
            plain, left = _plain(each, left, depth - 1)
            items.append(plain)
        return items, left
    return value, left


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
        reason=cast('Literal["failed", "stalled", "timeout", "expired", "undecodable"]', public_name(field("reason"))),
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

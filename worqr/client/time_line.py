"""The time line of a workflow: what is stored of its runs, in the form for people. Pure.

`read_job` returns of a field that may be large its size, a space, and its beginning, which never has a value. Any program may
have written the fields: what cannot be read is left out, or shown without what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from worqr.errors import UsageError
from worqr.keys import keys_at
from worqr.records import Entry, RemoteError
from worqr.stored_values import whole
from worqr.validation import moment

_WAIT: Final = re.compile(rb"(event|sleep|children|first) (\d+) (\d+|-)\n([^\n]*)\n(.*)", re.DOTALL)
_END: Final = re.compile(rb"(\d+) ([a-z]+) (\d+) (\d+) ", re.ASCII)
_CHILD: Final = re.compile(r"\d+ \d+ ([^\n]+)\n(.+)", re.DOTALL)
_AT: Final = re.compile(rb"\d+ (\d{1,14}) (\d{0,14})", re.ASCII)
_EVENT: Final = re.compile(r"(\d+):(.*)", re.DOTALL)
_NUMBERED: Final = re.compile(r"(.*) #(\d{1,9})", re.DOTALL)
_KINDS: Final[Mapping[bytes, Any]] = {
    b"event": "wait",
    b"sleep": "sleep",
    b"children": "children",
    b"first": "children",
}
LONGEST_ERROR: Final = 500
"""Characters of the message of an error."""

Fields = Mapping[str, bytes]


def time_line(prefix: str, fields: Fields) -> tuple[Entry, ...]:
    """Return the entries of a workflow from its record; none for any other job that has saved no step.

    Args:
        prefix: that of the mesh.
        fields: the record, as `read_job` returns it.
    """
    return (
        *sorted(_steps(fields), key=_when),
        *sorted(_waits(fields), key=_when),
        *sorted(_children(prefix, fields), key=_when),
        *sorted(_events(fields), key=_place),
    )


def _place(entry: Entry) -> tuple[str, int]:
    """Return the place of an entry among others: the second of one name after the first."""
    match = _NUMBERED.fullmatch(entry.key)
    return (match[1], int(match[2])) if match else (entry.key, 1)


def _when(entry: Entry) -> tuple[float, str, int]:
    """Return what sorts entries by time, the oldest first, and those without one by name."""
    return (entry.began.timestamp() if entry.began else 0.0, *_place(entry))


def _named(fields: Fields, prefix: str) -> Iterator[tuple[str, bytes]]:
    for name, value in fields.items():
        if name.startswith(prefix):
            yield name[len(prefix) :], value


def _outline(value: bytes) -> tuple[int | None, bytes]:
    """Return the bytes of a value, and how it begins."""
    size, _, told = value.partition(b" ")
    return whole(size), told


def _times(fields: Fields, kind: str, key: str) -> dict[str, Any]:
    """Return when a step or a child began, and when it ended, as far as that is stored."""
    if (match := _AT.fullmatch(fields.get(f"at:{kind}:{key}", b""))) is None:
        return {}
    at, took = whole(match[1], 0), whole(match[2])
    if kind == "step":
        return {"began": moment(None if took is None else max(0, at - took)), "ended": moment(at)}
    return {"began": moment(at), "ended": moment(None if took is None else at + took)}


def _steps(fields: Fields) -> Iterator[Entry]:
    tries = {key: _outline(value)[1].partition(b" ") for key, value in _named(fields, "try:")}
    for key, value in _named(fields, "step:"):
        size, told = _outline(value)
        kind, _, stored = told.partition(b" ")
        tried = whole(tries.pop(key, (b"", b"", b""))[0], 0)
        if kind == b"failed":
            yield Entry("step", key, key, "failed", tried, error=_error(stored), **_times(fields, "step", key))
        else:
            more = len(kind) + 1 if kind else 0
            left = None if size is None else max(0, size - more)
            yield Entry("step", key, key, "done", tried, size=left, **_times(fields, "step", key))
    for key, (number, _, stored) in tries.items():
        yield Entry("step", key, key, "trying", whole(number, 0), error=_error(stored))


def _waits(fields: Fields) -> Iterator[Entry]:
    is_open = _open(fields.get("open", b"\x90"))
    for key, value in _named(fields, "wait:"):
        if (match := _WAIT.fullmatch(value)) is None:
            continue
        kind, began, until, name, about = match.groups()
        about = about.decode("utf-8", "replace")
        shown = name.decode("utf-8", "replace") or (
            about.replace("\n", ", ") if kind in {b"children", b"first"} and about else key
        )
        times: dict[str, Any] = {"began": moment(whole(began)), "until": moment(whole(until))}
        end = fields.get(f"end:{key}")
        if end is None and key in is_open:
            schema = about if kind == b"event" else ""
            yield Entry(_KINDS[kind], shown, key, "open", schema=schema, **times)
        elif end is not None:
            state, at, size, _ = _end(end)
            size = size if state == "value" else None
            yield Entry(_KINDS[kind], shown, key, state, ended=moment(at), size=size, **times)


def _end(value: bytes) -> tuple[str, int | None, int | None, bytes]:
    """Return the outcome of a wait or of a child, the number behind it, the bytes of its value, and an error that follows."""
    if (match := _END.match(value)) is None:
        return "ended", None, None, b""
    size = max(0, (whole(match[1]) or 0) - (match.end() - match.end(1) - 1))
    return match[2].decode(), whole(match[3]), size, value[match.end() :]


def _open(packed: bytes) -> frozenset[str]:
    try:
        keys = msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return frozenset()
    return (
        frozenset(key for key in cast("Any", keys) if isinstance(key, str)) if isinstance(keys, list) else frozenset()
    )


def _children(prefix: str, fields: Fields) -> Iterator[Entry]:
    for key, value in _named(fields, "child:"):
        if (match := _CHILD.fullmatch(value.decode("utf-8", "replace"))) is None:
            continue
        try:
            queue = keys_at(prefix, match[1]).display_name
        except UsageError:  # another program has made it up
            continue
        end = fields.get(f"end:{key}")
        state, _, size, stored = ("started", None, None, b"") if end is None else _end(end)
        error = _error(stored) if state == "failed" else None
        times: dict[str, Any] = _times(fields, "child", key)
        size = size if state == "finished" else None
        yield Entry("child", key, key, state, size=size, error=error, queue=queue, job=match[2], **times)


def _events(fields: Fields) -> Iterator[Entry]:
    for prefix, state in (("event:", "stored"), ("refused:", "refused")):
        for key, value in _named(fields, prefix):
            match = _EVENT.fullmatch(key)
            name, number = (match[2], match[1]) if match else (key, "1")
            size, kind = _outline(value)
            size = None if size is None else max(0, size - len(kind.strip()) - 1)
            yield Entry("event", name, f"{name} #{number}", state, size=size)


def _error(stored: bytes) -> RemoteError | None:
    """Return an error from an array of its type and its message, as JSON or MessagePack; None if it is none."""
    for decode in (msgspec.json.decode, msgspec.msgpack.decode):
        try:
            found = cast("Any", decode)(stored)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        match found:
            case [str(kind), str(message), *_]:
                return RemoteError(kind, message[:LONGEST_ERROR], "")
            case _:
                continue
    return None

"""Just enough of the server's protocol to tell one request or reply from the next in a stream of bytes."""

from __future__ import annotations

_BULKS = b"$=!"
_PUSHES = {b"message", b"pmessage", b"smessage"} | {p + b"subscribe" for p in (b"", b"p", b"s", b"un", b"pun", b"sun")}
_LISTS = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}


def frame_end(data: bytes | bytearray, at: int = 0) -> int | None:
    """Where the frame (RESP2 or RESP3) that starts at `at` ends; None: it is not complete yet."""
    line_end = data.find(b"\r\n", at)
    if line_end < 0:
        return None
    kind, rest = bytes(data[at : at + 1]), line_end + 2
    if kind in _LISTS:
        for _ in range(max(int(data[at + 1 : line_end]), 0) * _LISTS[kind]):
            end = frame_end(data, rest)
            if end is None:
                return None
            rest = end
        return frame_end(data, rest) if kind == b"|" else rest  # an attribute belongs to the frame after it
    if kind in _BULKS:
        length = int(data[at + 1 : line_end])
        end = rest if length < 0 else rest + length + 2
        return end if end <= len(data) else None
    return rest  # a line: a status, an error, a number, or an inline request


def words(frame: bytes) -> list[bytes]:
    """The words of a request: a list of bulk strings, or an inline one."""
    if not frame.startswith(b"*"):
        return frame.split()
    found: list[bytes] = []
    at = frame.index(b"\r\n") + 2
    while at < len(frame):
        line_end = frame.index(b"\r\n", at)
        length = int(frame[at + 1 : line_end])
        found.append(frame[line_end + 2 : line_end + 2 + length])
        at = line_end + 2 + length + 2
    return found


def is_push(frame: bytes) -> bool:
    """Not the reply to a request: a message or a confirmation of a subscription (RESP2 sends them as plain lists)."""
    if not frame.startswith(b"*"):
        return frame.startswith(b">")
    at = frame.index(b"\r\n") + 2
    if frame[at : at + 1] != b"$":
        return False
    line_end = frame.index(b"\r\n", at)
    return frame[line_end + 2 : line_end + 2 + max(int(frame[at + 1 : line_end]), 0)] in _PUSHES

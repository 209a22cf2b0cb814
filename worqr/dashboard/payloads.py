"""Payloads and error texts made safe to show: escaped, redacted, bounded. Pure.

JSON is read word by word, without recursion. So a document that is cut off or nested a thousand levels deep is redacted like
any other. The reader stops at the first character that is not JSON and hides the rest, which it could not redact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from worqr.errors import UsageError
from worqr.escaping import escape

HEAD: Final = 4096
"""Bytes of a payload that a page shows, at most."""
LINE: Final = 120
"""Characters of a payload in a table."""
HIDDEN: Final = "•••"
DEEPEST: Final = 12
"""Levels of JSON that are indented further; deeper ones stay on the margin of this one."""
HEX_LINES: Final = 32

SECRET_NAMES: Final = r"password|passwd|secret|token|api[_-]?key|authorization|cookie|card|iban|ssn"  # noqa: S105 - names of secrets
"""The values of keys that contain one of these are hidden, in any case."""

Show = Callable[[str, bytes], str | bytes]
"""Makes a payload readable, given the name of its queue and the stored bytes."""
Kind = Literal["JSON", "text", "binary", "empty", "hidden"]
Mode = Literal["redacted", "never", "full"]

_TOKEN: Final = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")'
    r"|(?P<mark>[\[\]{}:,])"
    r"|(?P<word>true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=[\s,\]}]|$))"
)
_CUT_STRING: Final = re.compile(r'\s*"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')


@dataclass(frozen=True, slots=True)
class Shown:
    """A payload as a page shows it. `line` is the beginning of it in one line; `cut` says that there is more."""

    kind: Kind
    text: str
    line: str
    size: int
    cut: bool = False
    note: str = ""


class Redactor:
    """Shows payloads and texts without secrets. It never changes.

    Args:
        names: a regular expression; values of keys that contain it are hidden.
        mode: ``redacted``, ``full`` (nothing is hidden), or ``never`` (payloads and error texts are hidden).
        show: the application's function, which makes a payload readable.
    """

    def __init__(self, names: str = SECRET_NAMES, mode: Mode = "redacted", show: Show | None = None) -> None:
        """Raise UsageError if `names` is not a regular expression, or `show` is not a function."""
        if show is not None and not callable(show):
            raise UsageError(f"show must be a function of a queue's name and a payload, not {show!r}")
        self.mode: Mode = mode
        self._show = show
        try:
            self._names = re.compile(names, re.IGNORECASE)
        except re.error as error:
            raise UsageError(f"redact must be a regular expression, and {names!r} is none: {error}") from None
        # What may repeat is bounded: a text of 10,000 letters would take seconds otherwise.
        self._pairs = re.compile(
            rf"(?i)((?:{names})[\w.-]{{0,64}}[\"']?\s{{0,8}}[=:]\s{{0,8}})"
            rf"((?:bearer|basic) \S+|\"[^\"]*\"|'[^']*'|[^\s,;&]+)"
        )

    def payload(self, data: bytes, size: int | None = None, *, cut: bool = False, queue: str = "") -> Shown:
        """Return the first bytes of a payload for a page.

        A whole payload goes through the application's `show` first. Of a payload that is cut, or that `show` cannot read, the
        stored bytes are shown.

        Args:
            data: the payload, or its beginning.
            size: the size of the whole payload; None: `data` is the whole, unless `cut`.
            cut: `data` is the beginning of a payload of unknown size.
            queue: the name of its queue.
        """
        total = len(data) if size is None else size
        if self._show is None or self.mode == "never" or not data or cut or total > len(data):
            return self._stored(data, total, cut=cut)
        try:
            readable = self._show(queue, data)
            found = readable.encode() if isinstance(readable, str) else bytes(readable)
        except Exception as error:
            note = f"show= of the dashboard raised {type(error).__name__}, so this is what is stored."
            return replace(self._stored(data, total), note=note)
        return replace(self._stored(found, len(found)), size=total)

    def _stored(self, data: bytes, total: int, *, cut: bool = False) -> Shown:
        head = data[:HEAD]
        cut = cut or total > len(head)
        if self.mode == "never":
            return Shown("hidden", "", "hidden", total)
        if not head:
            return Shown("empty", "", "", total)
        text = _decoded(head, cut=cut)
        if text is None:
            return Shown("binary", _hex(head), _short(head[:24].hex(" ")), total, cut)
        if text.lstrip()[:1] in {"{", "["}:
            return self._json(text, total, cut=cut)
        shown = escape(self.text(text), keep="\n")
        return Shown("text", shown, _short(shown), total, cut)

    def text(self, text: str) -> str:
        """Return an error message, a traceback or a plain text with the values of ``password=...`` hidden."""
        if self.mode == "never":
            return HIDDEN if text else ""
        if self.mode == "full":
            return text
        hidden = self._pairs.sub(rf"\g<1>{HIDDEN}", text)
        return re.sub(r"(://)[^\s/@]+@", rf"\g<1>{HIDDEN}@", hidden)

    def meta(self, name: str, value: str) -> str:
        """Return one value of a job's `meta`."""
        return HIDDEN if self.mode != "full" and self._names.search(name) else self.text(value)

    def _json(self, text: str, size: int, *, cut: bool) -> Shown:
        printer = _Printer(self._names if self.mode == "redacted" else None)
        end = 0
        for kind, word, after in _tokens(text):
            if not printer.take(kind, word):
                break
            end = after
        rest = text[end:]
        if cut and _CUT_STRING.fullmatch(rest) and printer.take_part(rest.lstrip()):
            rest = ""
        whole = not rest.strip() and not printer.depth
        note = "" if whole or cut else "The rest is not valid JSON, and is hidden."
        if not whole and self.mode == "full":
            return Shown("text", escape(text, keep="\n"), _short(text), size, cut)
        pretty = printer.text + ("" if whole else "\n…")
        return Shown("JSON", escape(pretty, keep="\n"), _short(re.sub(r"\n\s*", " ", printer.text)), size, cut, note)


class _Printer:
    """Prints JSON with indentation, one word after the other, and leaves out what a secret key names."""

    def __init__(self, names: re.Pattern[str] | None) -> None:
        self._names = names
        self._parts: list[str] = []
        self._stack: list[str] = []
        self._expects: str = "value"
        self._secret_from: int | None = None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def depth(self) -> int:
        return len(self._stack)

    def take(self, kind: str, word: str) -> bool:
        """Print a word; return False if JSON cannot have it here."""
        if kind == "mark":
            return self._mark(word)
        if self._expects in {"key", "key or end"}:
            return kind == "string" and self._key(word)
        if self._expects not in {"value", "value or end"}:
            return False
        self._write_value(word)
        self._value_ended()
        return True

    def take_part(self, word: str) -> bool:
        """Print the beginning of a string that was cut off, if it is a value that is not secret."""
        if self._expects not in {"value", "value or end"} or self._secret_from is not None:
            return False
        self._write_value(word)
        return True

    def _key(self, word: str) -> bool:
        if self._secret_from is None:
            self._line()
            self._parts.append(f"{word}: ")
            name = json.loads(word)
            if self._names is not None and self._names.search(name):
                self._parts.append(HIDDEN)
                self._secret_from = len(self._stack)
        self._expects = ":"
        return True

    def _mark(self, word: str) -> bool:
        if word in "{[" and self._expects in {"value", "value or end"}:
            self._write_value(word)
            self._stack.append(word)
            self._expects = "key or end" if word == "{" else "value or end"
            return True
        if word in "}]" and self._stack and self._stack[-1] == {"}": "{", "]": "["}[word]:
            return self._expects in {"comma", f"{'key' if word == '}' else 'value'} or end"} and self._close(word)
        if word == ":" and self._expects == ":":
            self._expects = "value"
            return True
        if word == "," and self._expects == "comma" and self._stack:
            if self._secret_from is None:
                self._parts.append(",")
            self._expects = "key" if self._stack[-1] == "{" else "value"
            return True
        return False

    def _close(self, word: str) -> bool:
        empty = self._expects != "comma"
        self._stack.pop()
        if self._secret_from is None:
            if not empty:
                self._line()
            self._parts.append(word)
        self._value_ended()
        return True

    def _write_value(self, word: str) -> None:
        if self._secret_from is not None:
            return
        if self._stack and self._stack[-1] == "[":
            self._line()
        self._parts.append(word)

    def _value_ended(self) -> None:
        if self._secret_from is not None and len(self._stack) <= self._secret_from:
            self._secret_from = None
        self._expects = "comma"

    def _line(self) -> None:
        self._parts.append("\n" + "  " * min(len(self._stack), DEEPEST))


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """The tokens of JSON, each with the position behind it, until the first character that is none."""
    place = 0
    while match := _TOKEN.match(text, place):
        kind = match.lastgroup or ""
        place = match.end()
        yield kind, match[kind], place


def _decoded(head: bytes, *, cut: bool) -> str | None:
    """Return UTF-8 as text; of a head that was cut off, without the half of a character at its end. None: it is binary."""
    for length in range(len(head), max(len(head) - (4 if cut else 1), 0), -1):
        try:
            text = head[:length].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return None if "\x00" in text else text
    return None


def _hex(data: bytes) -> str:
    """Return a dump: the offset, 16 bytes, and the characters that are ASCII."""
    lines: list[str] = []
    for start in range(0, min(len(data), HEX_LINES * 16), 16):
        row = data[start : start + 16]
        characters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        lines.append(f"{start:06x}  {row.hex(' '):47}  {characters}")
    return "\n".join(lines)


def _short(text: str) -> str:
    line = escape(re.sub(r"\s*\n\s*", " ", text[: 4 * LINE]))
    return line if len(line) <= LINE else line[: LINE - 1] + "…"

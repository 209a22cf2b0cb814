"""Payloads and error texts made safe to show: escaped, redacted, bounded. Pure.

JSON is read word by word, without recursion. So a document that is cut off or nested a thousand levels deep is redacted like
any other. The reader stops at the first character that is not JSON and hides the rest, which it could not redact.

All other texts, and the strings in JSON, are read from one secret name to the next. Each character is looked at a few times, so
the time is in proportion to the length. In doubt, more is hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, Literal

from worqr.codecs import encoded_by
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
_WORD: Final = re.compile(r"(?:[\w.]|-(?!>))*")
"""The rest of a name."""
_WHOLE_WORD: Final = re.compile(r"[\w.-]+")
_SPACE: Final = r"(?:\s|\\+[nrt])"
"""Also one that is escaped, in a string in a string."""
_SEPARATOR: Final = re.compile(
    rf"""(?:\[[^][\n]{{0,64}}\])?(?P<quote>\\*["'`])?\]?{_SPACE}*(?:[-=~]+>|!?[:=]+|%3[AD]|[→：＝])(?P<gap>{_SPACE}*)""",
    re.IGNORECASE,
)
"""What stands between a name and its value: ``password: x``, ``"password": x``, ``[PASSWORD]=x``, ``password -> x``."""
_PAIR: Final = re.compile(
    rf"""\\*["'`]{_SPACE}*,{_SPACE}*(?=[bru]{{0,2}}\\*["'`({{[])(?!\\*["']?(?:values?|val|content|data|default)\\*["']?\s*[=:])"""
    rf"""|\\*["'`]?(?:[,;]|{_SPACE})+\\*["']?(?:values?|val|content|data|default)\\*["']?{_SPACE}*[=:]{_SPACE}*""",
    re.IGNORECASE,
)
"""The same in a list of names and values: ``("password", "x")``, ``{"name": "password", "value": "x"}``."""
_GIVEN: Final = re.compile(
    rf"""{_SPACE}+(?:(?:is|was|not|in|must|be){_SPACE}+){{0,4}}(?=[bru]{{0,2}}\\*["'`])""", re.IGNORECASE
)
"""The same in ``wrong password 'x'``."""
_INPUT: Final = re.compile(r"[ \t]*(?:\n|\\+n)[ \t]+[^\n]{0,500}?\binput_value=")
"""The same in an error of Pydantic: the name in a line of its own."""
_TAG: Final = re.compile(r"[^<>\n]{0,200}>")
_IN_TAG: Final = re.compile(r"<((?:[\w-]{1,32}:)?)\Z")
_BLANK: Final = re.compile(r"\s+")
_QUOTE: Final = re.compile(r"""[bru]{0,2}(?P<escapes>\\*)(?P<mark>\"{3}|'{3}|["'`])""", re.IGNORECASE)
_BRACKETS: Final = {"(": ")", "[": "]", "{": "}"}
_IN_BRACKETS: Final = re.compile(r"""(?P<escapes>\\*)(?P<mark>["'`])|[][(){}]""")
_HEADER: Final = re.compile(r"authorization|cookie", re.IGNORECASE)
"""Names whose values have commas, quotes and blanks of their own, if they stand outside of quotes."""
_BEARER: Final = re.compile(r"\b((?:bearer|basic)\s{1,8})[\w.~+/-]{16,}=*", re.IGNORECASE)
"""Without the name of its header, in an error of an HTTP client."""
_URL: Final = re.compile(r"://")
_URL_END: Final = re.compile(r"""[^\s"<>]*""")
_WEB_PORT: Final = re.compile(r"[^\s/@:]*:\d{1,5}(?=/)")
_ESCAPED_LETTER: Final = re.compile(r"(?<!\\)\\+u00([46][1-9a-f]|[57][0-9a]|3[0-9]|5f|2d)", re.IGNORECASE)
_NAME_FIELDS: Final = frozenset(
    {"name", "key", "k", "field", "header", "param", "parameter", "attribute", "property", "variable"}
)
_VALUE_FIELDS: Final = frozenset({"value", "values", "val", "v", "content", "data", "default"})
"""In ``{"name": "password", "value": "x"}``."""
_A_NAME: Final = re.compile(r"[\w.\-:]{1,100}")
_STRING: Final = re.compile(r'\s*"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"\s*')
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
        self._is_anchored = re.search(r"[\^$]|\\[AZ]", names) is not None

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
        if self.mode != "never" and (name := encoded_by(data)):
            return Shown("text", f"encoded ({name})", f"encoded ({name})", total)
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
            safe = self._safe_bytes(head)
            dump = _hex(head[:safe]) + (f"\n{HIDDEN} what follows a secret name is hidden" if safe < len(head) else "")
            return Shown("binary", dump, _short(head[: min(24, safe)].hex(" ") or HIDDEN), total, cut)
        if text.lstrip()[:1] in {"{", "["}:
            return self._json(text, total, cut=cut)
        shown = escape(self._string(text) or self.text(text), keep="\n")
        return Shown("text", shown, _short(shown), total, cut)

    def _string(self, text: str) -> str:
        """Return a text that is one string of JSON, or the beginning of one, without its secrets; empty if it is none."""
        word = text.strip() if _STRING.fullmatch(text) else f'{text.lstrip()}"' if _CUT_STRING.fullmatch(text) else ""
        return _safe_word(self, word) if word else ""

    def _safe_bytes(self, data: bytes) -> int:
        """Return how many bytes of a binary payload may be shown: those before a secret name, or before another secret."""
        if self.mode == "full":
            return len(data)
        view = data.decode("latin-1")
        shown = self.text(view)
        same = next((n for n, (a, b) in enumerate(zip(view, shown, strict=False)) if a != b), len(data))
        found = self._names.search(view)
        if found is not None:
            return min(same, found.end())
        return 0 if self._names.search(view.replace("\x00", "")) else same

    def text(self, text: str) -> str:
        """Return an error message, a traceback or a plain text with the values of ``password=...`` hidden."""
        if self.mode == "never":
            return HIDDEN if text else ""
        if self.mode == "full":
            return text
        text = _BEARER.sub(rf"\g<1>{HIDDEN}", text)
        return _without_users(self._without_values(_ESCAPED_LETTER.sub(_unescaped, text)))

    def _without_values(self, text: str) -> str:
        """Hide what follows secret names."""
        parts: list[str] = []
        shown = place = 0
        while place <= len(text) and (found := self._next_name(text, place)) is not None:
            start, place = found
            value = _value_behind(text, start, place)
            if value is not None and value[1] > value[0]:
                parts += [text[shown : value[0]], HIDDEN]
                shown = place = value[1]
            elif place == start:  # the expression matches nothing at all
                place += 1
        return "".join(parts) + text[shown:] if parts else text

    def _next_name(self, text: str, place: int) -> tuple[int, int] | None:
        """Return the start and the end of the next word with a secret name in it."""
        if self._is_anchored:  # in a word by itself, as in the key of an object
            words = _WHOLE_WORD.finditer(text, place)
            word = next((each for each in words if self._names.search(each[0])), None)
            return None if word is None else word.span()
        found = self._names.search(text, place)
        if found is None:
            return None
        start = found.start()
        while start > place and (text[start - 1].isalnum() or text[start - 1] in "_.-"):
            start -= 1
        return start, max(_end_of(_WORD, text, found.end()), found.end())

    def meta(self, name: str, value: str) -> str:
        """Return one value of a job's `meta`."""
        return HIDDEN if self.mode != "full" and self._names.search(name) else self.text(value)

    def _json(self, text: str, size: int, *, cut: bool) -> Shown:
        tokens = list(_tokens(text))
        redactor = self if self.mode == "redacted" else None
        printer = _Printer(redactor, set() if redactor is None else self._named_objects(tokens))
        end = 0
        for kind, word, after in tokens:
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

    def is_secret(self, name: str) -> bool:
        """Return True if the values of this key are hidden."""
        return self._names.search(name) is not None

    def names_secret(self, string: str) -> bool:
        """Return True if a string is the name of a secret, as in a list of names and values."""
        return _A_NAME.fullmatch(string) is not None and self.is_secret(string)

    def _named_objects(self, tokens: Sequence[tuple[str, str, int]]) -> set[int]:
        """Return the numbers of the tokens at which objects begin that have the name of a secret in a field such as ``name``."""
        found: set[int] = set()
        stack: list[int] = []
        key = ""
        for number, (kind, word, _) in enumerate(tokens):
            if word in {"{", "["} and kind == "mark":
                stack.append(number)
            elif word in {"}", "]"} and kind == "mark" and stack:
                stack.pop()
            elif kind == "string":
                if key in _NAME_FIELDS and stack and self.names_secret(json.loads(word)):
                    found.add(stack[-1])
                is_key = number + 1 < len(tokens) and tokens[number + 1][1] == ":"
                key = json.loads(word).lower() if is_key else ""
            elif word != ":":
                key = ""
        return found


class _Printer:
    """Prints JSON with indentation, one word after the other, and leaves out what a secret key names.

    Args:
        redactor: knows secret keys, and hides secrets in strings; None: nothing is hidden.
        named: the objects that name a secret, by the numbers of their first tokens.
    """

    def __init__(self, redactor: Redactor | None, named: Set[int]) -> None:
        self._redactor = redactor
        self._named = named
        self._parts: list[str] = []
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._number = -1
        self._expects: str = "value"
        self._secret_from: int | None = None
        self._after_name: bool = False
        """The last value of the list is the name of a secret, so the next one is the secret."""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def depth(self) -> int:
        return len(self._stack)

    def take(self, kind: str, word: str) -> bool:
        """Print a word; return False if JSON cannot have it here."""
        self._number += 1
        if kind == "mark":
            return self._mark(word)
        if self._expects in {"key", "key or end"}:
            return kind == "string" and self._key(word)
        if self._expects not in {"value", "value or end"}:
            return False
        self._write_value(word)
        self._value_ended()
        if kind == "string" and self._redactor is not None and self._stack[-1:] == ["["] and self._secret_from is None:
            self._after_name = self._redactor.names_secret(json.loads(word))
        return True

    def take_part(self, word: str) -> bool:
        """Print the beginning of a string that was cut off, if it is a value that is not secret."""
        if self._expects not in {"value", "value or end"} or self._secret_from is not None:
            return False
        self._write_value(f'{word}"')
        if self._secret_from is None:
            self._parts[-1] = self._parts[-1][:-1]
        return True

    def _key(self, word: str) -> bool:
        if self._secret_from is None:
            self._line()
            self._parts.append(f"{_safe_word(self._redactor, word)}: ")
            name = json.loads(word)
            if self._redactor is not None and (
                self._redactor.is_secret(name) or (name.lower() in _VALUE_FIELDS and self._starts[-1] in self._named)
            ):
                self._parts.append(HIDDEN)
                self._secret_from = len(self._stack)
        self._expects = ":"
        return True

    def _mark(self, word: str) -> bool:
        if word in "{[" and self._expects in {"value", "value or end"}:
            self._write_value(word)
            self._stack.append(word)
            self._starts.append(self._number)
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
        self._starts.pop()
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
        if self._after_name:
            self._after_name = False
            self._secret_from = len(self._stack)
        self._parts.append(HIDDEN if self._secret_from is not None else _safe_word(self._redactor, word))

    def _value_ended(self) -> None:
        if self._secret_from is not None and len(self._stack) <= self._secret_from:
            self._secret_from = None
        self._after_name = False
        self._expects = "comma"

    def _line(self) -> None:
        self._parts.append("\n" + "  " * min(len(self._stack), DEEPEST))


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Return where a match of the pattern ends that begins at this place; the place itself if there is none."""
    match = pattern.match(text, place)
    return place if match is None else match.end()


def _value_behind(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Return where the value of a name begins and ends. Args: the start and the end of the name. None: there is no value."""
    prefix = _IN_TAG.search(text, max(0, start - 40), start)
    if prefix is not None and (tag := _TAG.match(text, end)) is not None:
        closing = text.find(f"</{prefix[1]}{text[start:end]}", tag.end())
        return tag.end(), len(text) if closing < 0 else closing
    separator = _SEPARATOR.match(text, end)
    if separator is not None:
        place, gap = separator.end(), separator["gap"]
        if separator["quote"] is None and _HEADER.search(text, start, end) is not None:
            return place, _end_of_line(text, place)
        return place, _end_of_block(text, place, gap) if "\n" in gap else _end_of_value(text, place)
    for pattern in (_PAIR, _GIVEN, _INPUT):
        if (match := pattern.match(text, end)) is not None:
            return match.end(), _end_of_value(text, match.end())
    if text.startswith("-", start) and (match := _BLANK.match(text, end)) is not None:  # --password x
        return match.end(), _end_of_value(text, match.end())
    return None


def _end_of_line(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _end_of_block(text: str, place: int, gap: str) -> int:
    """Return where a value ends that begins below its name: behind the lines that are indented as it is, or are items."""
    indented = gap.rpartition("\n")[2]
    end = _end_of_value(text, place)
    while text.startswith("\n", end):
        begins = end + 1
        if not text.startswith(indented or "- ", begins) or text[begins : begins + 1] in {"", "\n"}:
            break
        end = _end_of_line(text, begins)
    return end


def _end_of_value(text: str, place: int) -> int:
    """Return where a value ends: at the quote or bracket that matches its first character, or at the end of the line.

    A call such as ``SecretStr('x')`` ends at the end of the line, or below it where its last bracket is. Without a matching
    quote or bracket, nothing that follows is shown.
    """
    while (quote := _QUOTE.match(text, place)) is not None:
        place = _end_of_string(text, quote)
        after = text[place : place + 1]
        if not (after.isalnum() or text.startswith(quote["escapes"] + quote["mark"][0], place)):  # 'it''s', 'a'b
            return place
    if text[place : place + 1] in _BRACKETS:
        return _end_of_brackets(text, place)
    end = _end_of_line(text, place)
    if re.match(r"[|>][-+\d]*\s*$", text[place : min(end, place + 8)]):  # a block of YAML
        return _end_of_block(text, end, "\n ")
    opened = next((n for n in range(place, end) if text[n] in _BRACKETS), end)
    while opened < end:
        closed = _end_of_brackets(text, opened)
        end = max(end, _end_of_line(text, closed) if closed > end else end)
        opened = next((n for n in range(closed, end) if text[n] in _BRACKETS), end)
    return end


def _end_of_string(text: str, quote: re.Match[str]) -> int:
    """Return where a string ends, given the match of its first quote; the end of the text if it has no other.

    A string in a string, such as one of JSON in JSON, has quotes with backslashes before them: 1, 3 or 7.
    """
    mark, level = quote["mark"], len(quote["escapes"])
    place = quote.end()
    while (place := text.find(mark, place)) >= 0:
        before = place
        while before > quote.end() and text[before - 1] == "\\":
            before -= 1
        escapes = place - before
        place += len(mark)
        if escapes < level or (escapes - level) // (level + 1) % 2 == 0:
            return place
    return len(text)


def _end_of_brackets(text: str, place: int) -> int:
    """Return where the bracket at `place` is closed, apart from brackets in strings; the end of the text if it is not."""
    open_ones: list[str] = []
    while (match := _IN_BRACKETS.search(text, place)) is not None:
        place = match.end()
        if match["mark"] is not None:
            quote = _QUOTE.match(text, match.start())
            assert quote is not None
            place = _end_of_string(text, quote)
        elif match[0] in _BRACKETS:
            open_ones.append(_BRACKETS[match[0]])
        elif open_ones[-1] == match[0]:
            open_ones.pop()
            if not open_ones:
                return place
    return len(text)


def _without_users(text: str) -> str:
    """Hide users and passwords in URLs, also with an @ or a slash in the password."""
    parts: list[str] = []
    shown = place = end = at = 0
    while (found := _URL.search(text, place)) is not None:
        place = found.end()
        if place >= end:
            end = _end_of(_URL_END, text, place)
            at = text.rfind("@", place, end)
        if at >= place and _has_user(text, found.start(), place, at):
            parts += [text[shown:place], HIDDEN]
            shown = place = at
    return "".join(parts) + text[shown:] if parts else text


def _has_user(text: str, scheme_end: int, place: int, at: int) -> bool:
    """Return False for a URL of a page with an @ in its path."""
    slash = text.find("/", place, at)
    if slash < 0 or not text[max(0, scheme_end - 5) : scheme_end].lower().endswith(("http", "https")):
        return True
    return ":" in text[place:slash] and _WEB_PORT.match(text, place) is None


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))


def _safe_word(redactor: Redactor | None, word: str) -> str:
    """Return a word of JSON without the secrets that a string may have in it: a URL, a header, JSON."""
    if redactor is None or not word.startswith('"'):
        return word
    string = json.loads(word)
    shown = redactor.text(string)
    return word if shown == string else json.dumps(shown, ensure_ascii=False)


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """The tokens of JSON, each with the position behind it, until the first character that is none."""
    place = 0
    while match := _TOKEN.match(text, place):
        kind = match.lastgroup or ""
        place = match.end()
        yield kind, match[kind], place


def _decoded(head: bytes, *, cut: bool) -> str | None:
    """Return a payload as text; of a head that was cut off, without the half of a character at its end. None: it is binary.

    JSON is text also with some bytes that are not UTF-8, and in UTF-16 and UTF-32.
    """
    for length in range(len(head), max(len(head) - (4 if cut else 1), 0), -1):
        try:
            text = head[:length].decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        if "\x00" not in text:
            return text
    encoding = json.detect_encoding(head)
    text = head.decode(encoding, "surrogateescape" if encoding.startswith("utf-8") else "replace")
    return text if text.lstrip()[:1] in {"{", "["} else None


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

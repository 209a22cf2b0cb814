"""An error as text, for logs and records: in one line, or with a traceback that begins at the user's first frame. Pure.

An error is code of the user: its class, attributes, texts, causes and members may raise, lie, recurse, or be huge. So each part
is read by the descriptor of the builtin class, which runs no code of the user; or, where that must run (``str``), behind a fence
that catches everything. Nothing here recurses without a bound, and all of it stops at a budget of texts and time.

Formatted frames are cached, because thousands of tasks often fail in the same place.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from types import CodeType, TracebackType
from typing import Any, Final, TypeGuard, TypeVar, cast

from worqr.validation import clean_text, name_of, qualname_of

T = TypeVar("T")

FRAMES: Final = 30
"""Frames of a traceback that are kept: the last ones."""
MANY_PLACES: Final = 100
TRACEBACK: Final = "Traceback (most recent call last):\n"
OURS: Final = f"{Path(__file__).parent}{os.sep}"
"""The prefixes of worqr's own source files."""
ONE_LINE: Final = 500
"""Characters of an error's text in a log line."""
LONGEST_TEXT: Final = 16384
"""Characters of an error's text anywhere."""
MANY_ERRORS: Final = 3
"""Errors of a group that are named in one line."""
MAX_CHAIN: Final = 20
"""Errors of a chain of causes that a traceback shows: the last ones."""
MAX_DEPTH: Final = 5
"""Groups inside groups that a traceback shows."""
MAX_WIDTH: Final = 15
"""Errors of one group that a traceback shows."""
MAX_SHOWN: Final = 50
"""Errors that one traceback shows."""
MAX_MEMBERS: Final = 10_000
"""Errors of a group, with those of its groups, that are looked at."""
TIME: Final = 1.0
"""Seconds after which no further part of an error is read."""
SMALL: Final = 1000
"""Values of which a value consists that is shown in full."""

_RUNNERS: Final = re.compile(r"[/\\](?:trio[/\\](?:_core[/\\]|_threads\.py)|asyncio[/\\]\w+\.py$)")
"""Source files of the event loops, which call worqr's code."""
_CAUSED: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_HANDLED: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"
_frames: dict[tuple[tuple[int, int], ...], tuple[str, list[CodeType]]] = {}
"""The formatted frames of errors, by code and instruction. The code objects are kept, so that their ids are not used again."""

_BASE: Final[Any] = BaseException.__dict__
_MRO: Final[Any] = type.__dict__["__mro__"]
_CLASS_DICT: Final[Any] = type.__dict__["__dict__"]
_MEMBERS: Final[Any] = BaseExceptionGroup.__dict__["exceptions"]
_TEXTS: Final[Any] = (str, bytes, bytearray)
_BUILTINS: Final[Any] = (*_TEXTS, int, dict, list, tuple, set, frozenset)
_SYNTAX_ERRORS: Final = (SyntaxError, IndentationError, TabError)


# Its parts, read without code of the user


def is_a(value: object, kind: type[T]) -> TypeGuard[T]:
    """Return True for an instance of `kind`. Unlike ``isinstance``, do not read ``value.__class__``, which may raise or lie."""
    return issubclass(type(value), kind)


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and the classes that it is derived from."""
    return cast("tuple[type, ...]", _MRO.__get__(kind))


def attributes_of(error: BaseException) -> dict[Any, Any]:
    """Return the attributes of an error. Their names need not be texts."""
    return cast("dict[Any, Any]", _BASE["__dict__"].__get__(error))


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error."""
    return cast("TracebackType | None", _BASE["__traceback__"].__get__(error))


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error after ``raise ... from``."""
    return cast("BaseException | None", _BASE["__cause__"].__get__(error))


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the errors of a group; of another error, none."""
    return cast("tuple[BaseException, ...]", _MEMBERS.__get__(error) or ()) if is_a(error, BaseExceptionGroup) else ()


def leaves_of(error: BaseException) -> Iterator[tuple[BaseException, tuple[type, ...]]]:
    """Return the errors in a group and in its groups, each once, with the classes of the groups around it; or `error` alone.

    At most `MAX_MEMBERS` are looked at.
    """
    if not is_a(error, BaseExceptionGroup):
        yield error, ()
        return
    seen: set[int] = set()
    left: list[tuple[BaseException, tuple[type, ...]]] = [(error, ())]
    while left and len(seen) < MAX_MEMBERS:
        each, around = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if is_a(each, BaseExceptionGroup):
            around = around if any(type(each) is kind for kind in around) else (*around, type(each))
            left.extend((member, around) for member in reversed(members_of(each)[:MAX_MEMBERS]))
        else:
            yield each, around


def related_errors(error: BaseException) -> Iterator[BaseException]:
    """Return an error, the members of its group and their causes, each once, but no errors that were only being handled."""
    seen: set[int] = set()
    left = [error]
    while left and len(seen) < MAX_MEMBERS:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if (cause := cause_of(each)) is not None:
            left.append(cause)
        left.extend(reversed(members_of(each)[:MAX_MEMBERS]))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, if it takes one."""
    with suppress(BaseException):
        BaseException.add_note(error, note)


# Its text


def one_line(error: BaseException) -> str:
    """Return the type and text of an error in one line of limited length; for a group, also those of the first errors in it."""
    return ErrorFormatter().one_line(error)


def shortened(text: str) -> str:
    """Return `text`, cut to the length that a log line may have."""
    return text if len(text) <= ONE_LINE else f"{text[: ONE_LINE - 3]}..."


def text_of(error: BaseException, most: int = LONGEST_TEXT) -> str:
    """Return ``str(error)``, at most its first `most` characters; or a replacement if that raises."""
    try:
        return clean_text(_text_of(error, most)[:most])
    except BaseException as unreadable:  # even a SystemExit: a request for a text must not end the process
        return f"<its text cannot be read: {qualname_of(type(unreadable))}>"


def _text_of(error: BaseException, most: int) -> str:
    """Return ``str(error)``. The builtin one, which formats the arguments in full, is replaced by one that stops at `most`."""
    maker = next(kind for kind in bases_of(type(error)) if "__str__" in _CLASS_DICT.__get__(kind))
    if maker is not BaseException and maker is not KeyError:
        return str.__str__(str(error))
    args = cast("tuple[object, ...]", _BASE["args"].__get__(error))
    if len(args) != 1:
        return _shown(args, most) if args else ""
    if maker is KeyError:
        return _shown(args[0], most)
    return _said(args[0], most)


def _said(value: object, most: int) -> str:
    """Return ``str(value)``, or the beginning of it if the value is a large container."""
    if type(value) is str:
        return value
    if _is_small(value):
        return str.__str__(str(value))
    return str.__getitem__(value, slice(most)) if is_a(value, str) else _cut_repr(value, most, MAX_DEPTH)


def _shown(value: object, most: int) -> str:
    """Return ``repr(value)``, or the beginning of it if the value is large."""
    return str.__str__(repr(value)) if _is_small(value) else _cut_repr(value, most, MAX_DEPTH)


def _is_small(value: object) -> bool:
    """Return True unless the value is a large text, or a builtin container of many values or of large ones."""
    left, items, size = [value], 0, 0
    while left:
        each = left.pop()
        items += 1
        kind = builtin_kind(each)
        if kind is int:
            size += int.bit_length(cast("int", each)) // 3
        elif kind in _TEXTS:
            size += kind.__len__(each)
        elif kind is not None:
            if items + len(left) + kind.__len__(each) > SMALL:
                return False
            left.extend(parts_of(each))
        if items > SMALL or size > 4 * LONGEST_TEXT:
            return False
    return True


def builtin_kind(value: object) -> Any:
    """Return which of the builtin containers, texts and int the value is, or is derived from; None for any other value."""
    return next((kind for kind in _BUILTINS if issubclass(type(value), kind)), None)


def parts_of(value: Any) -> Iterator[object]:
    """Return the values in a builtin container, and of a dict each key before its value. No method of a subclass runs."""
    kind = builtin_kind(value)
    return chain.from_iterable(dict[Any, Any].items(value)) if kind is dict else kind.__iter__(value)


def _cut_repr(value: Any, most: int, depth: int) -> str:
    """Return about the first `most` characters of ``repr(value)``."""
    kind = builtin_kind(value)
    if kind is None:
        return str.__str__(repr(value))[:most]
    if kind is int:
        return "<a large number>" if int.bit_length(value) > most else repr(value)
    if kind in _TEXTS:
        return repr(kind.__getitem__(value, slice(most))) + ("..." if kind.__len__(value) > most else "")
    brackets = {dict: "{}", set: "{}", list: "[]"}.get(kind, "()")
    found, length = brackets[0], kind.__len__(value)
    for n, part in enumerate(islice(parts_of(value), SMALL) if depth else ()):
        separator = "" if n == 0 else ": " if kind is dict and n % 2 else ", "
        found += separator + _cut_repr(part, most - len(found), depth - 1)
        if len(found) >= most:
            return found
    return f"{found}{'...' if length and (not depth or length > SMALL) else ''}{brackets[1]}"


# Its traceback


def users_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame that belongs neither to worqr nor to an event loop; all of it if all do."""
    whole = at = traceback_of(error)
    while at is not None and _is_ours(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return at or whole


def _is_ours(path: str) -> bool:
    return path.startswith(OURS) or _RUNNERS.search(path) is not None


def format_error(error: BaseException) -> str:
    """Format an error like ``traceback.format_exception``, from the user's first frame on."""
    return ErrorFormatter().traceback(error)


class ErrorFormatter:
    """Formats one error, with its causes and its members, until it has shown `MAX_SHOWN` errors or `TIME` is over.

    The text of each error is read once. No method raises.
    """

    def __init__(self) -> None:
        self._left = MAX_SHOWN
        self._until = monotonic() + TIME
        self._texts: dict[int, str] = {}

    def text(self, error: BaseException) -> str:
        """Return the text of an error, at most its first `LONGEST_TEXT` characters."""
        found = self._texts.get(id(error))
        if found is None:
            found = text_of(error) if monotonic() <= self._until else "<not read, to save time>"
            self._texts[id(error)] = found
        return found

    def one_line(self, error: BaseException) -> str:
        """Return the type and text of an error in one line, and those of the first errors of a group."""
        return shortened(self._line(error, MAX_DEPTH))

    def _line(self, error: BaseException, depth: int) -> str:
        text, name = " ".join(self.text(error)[: 2 * ONE_LINE].split()), qualname_of(type(error))
        found = f"{name}: {text}" if text else name
        if inner := members_of(error):
            more = "; ..." if len(inner) > MANY_ERRORS else ""
            told = "; ".join(self._line(each, depth - 1) for each in inner[:MANY_ERRORS]) if depth else "..."
            found += f" ({told}{more})"
        return shortened(found)

    def traceback(self, error: BaseException) -> str:
        """Format an error like ``traceback.format_exception``, from the user's first frame on."""
        return self._with_causes(error, MAX_DEPTH)

    def _with_causes(self, error: BaseException, depth: int) -> str:
        """Format an error below the errors that led to it."""
        if _before(error) is None:
            return self._alone(error, depth)
        links, seen = [(error, "")], {id(error)}
        while (found := _before(links[-1][0])) is not None and id(found[0]) not in seen:
            if len(links) == MAX_CHAIN:
                links.append((error, "... (earlier errors of this chain are not shown)\n" + found[1]))
                break
            links.append(found)
            seen.add(id(found[0]))
        shown = [self._alone(each, depth) for each, _ in links[:MAX_CHAIN]]  # the last error first, while there is time
        texts = [text if n == MAX_CHAIN else f"{shown[n]}{text}" for n, (_, text) in enumerate(links)]
        return "".join(reversed(texts))

    def _alone(self, error: BaseException, depth: int) -> str:
        self._left -= 1
        if self._left < 0 or monotonic() > self._until:
            return f"{name_of(type(error))}: ...\n"
        try:
            frames = _format_frames(error)
        except BaseException as unreadable:  # a loader of source code is code of the user
            frames = f"  <its frames cannot be read: {qualname_of(type(unreadable))}>\n"
        last = self._last_lines(error)
        if not (members := members_of(error)):
            return f"{TRACEBACK}{frames}{last}" if frames else last
        head = f"Exception Group {TRACEBACK}{frames}" if frames else ""
        return f"  + {_indented(head + last, '  | ')[4:]}{self._members(members, depth)}"

    def _members(self, members: tuple[BaseException, ...], depth: int) -> str:
        shown = members[:MAX_WIDTH] if depth else ()
        found = ""
        for n, each in enumerate(shown):
            found += f"{'    +' if n else '  +-+'}---------------- {n + 1} ----------------\n"
            found += _indented(self._with_causes(each, depth - 1), "    | ")
        if len(shown) < len(members):
            found += f"    +---------------- ... (and {len(members) - len(shown):,} more)\n"
        return f"{found}    +------------------------------------\n"

    def _last_lines(self, error: BaseException) -> str:
        """Return the type, the text and the notes of an error."""
        if any(type(error) is kind for kind in _SYNTAX_ERRORS):
            try:
                return "".join(traceback.format_exception_only(error))[:LONGEST_TEXT]
            except BaseException:  # noqa: S110 - its attributes are not what they should be
                pass
        name, text = name_of(type(error)), self.text(error)
        return (f"{name}: {text}\n" if text else f"{name}\n") + _notes_of(error)


def _before(error: BaseException) -> tuple[BaseException, str] | None:
    """Return the error that led to this one, and the sentence between them."""
    if (cause := cause_of(error)) is not None:
        return cause, _CAUSED
    context: BaseException | None = _BASE["__context__"].__get__(error)
    if context is None or _BASE["__suppress_context__"].__get__(error):
        return None
    return context, _HANDLED


def _indented(text: str, with_: str) -> str:
    return "".join(f"{with_}{line}" for line in text.splitlines(keepends=True))


def _notes_of(error: BaseException) -> str:
    try:
        notes: object = attributes_of(error).get("__notes__")
        if notes is None:
            return ""
        some = islice(parts_of(notes), MAX_WIDTH) if builtin_kind(notes) in (list, tuple) else [notes]
        return "".join(f"{clean_text(_said(note, LONGEST_TEXT)[:LONGEST_TEXT])}\n" for note in some)
    except BaseException as unreadable:
        return f"<its notes cannot be read: {qualname_of(type(unreadable))}>\n"


def _format_frames(error: BaseException) -> str:
    """Format the frames of an error.

    ``traceback`` checks each source file and parses its lines. So the frames are cached by place, because thousands of tasks
    often fail in the same place.
    """
    codes: list[CodeType] = []
    path: list[tuple[int, int]] = []
    first = at = users_traceback(error)
    while at is not None:
        codes.append(at.tb_frame.f_code)
        path.append((id(at.tb_frame.f_code), at.tb_lasti))
        at = at.tb_next
    key = tuple(path[-FRAMES:])
    known = _frames.get(key)
    if known is None:
        if len(_frames) >= MANY_PLACES:
            _frames.clear()
        known = _frames[key] = "".join(traceback.format_tb(first, limit=-FRAMES)), codes[-FRAMES:]
    return known[0]

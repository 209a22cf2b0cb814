"""Read values that the server stores, and that any program with access to it may have written. Pure.

Nothing here raises. A number that cannot be read is None, or a default, so that one such value hides neither the rest of its
record nor other records. Python's own `int` accepts digits of other scripts and underscores, and raises for more than 4,300
digits.

A name may be bytes that are not UTF-8. `exact` keeps them for requests, `readable` makes a name for people.
"""

from __future__ import annotations

import math
from typing import Final, overload

MOST_DIGITS: Final = 18
"""Digits of the largest number that worqr stores: a claim has 16."""
TIME_DIGITS: Final = 14
"""Digits of a time of a schedule in ms. They reach the year 5138, and datetime ends at 9999."""
_LONGEST_NUMBER: Final = 32
_NAMES: Final = {"due": "scheduled", "broken": "undecodable"}
"""Words of keys, records, totals and events whose name is another one in Python and for people."""
_WORDS: Final = {name: word for word, name in _NAMES.items()}

Stored = bytes | str | int | None
"""A value in a reply: text of a hash, a number of a script, or nothing."""


@overload
def whole(value: Stored, default: int, *, digits: int = ...) -> int: ...
@overload
def whole(value: Stored, default: None = ..., *, digits: int = ...) -> int | None: ...
def whole(value: Stored, default: int | None = None, *, digits: int = MOST_DIGITS) -> int | None:
    """Return a whole number that is not negative; `default` for everything else, and for more than so many digits."""
    if type(value) is bytes:  # nearly always; only ASCII counts as a digit there
        return int(value) if value.isdigit() and len(value) <= digits else default
    if isinstance(value, int):
        return value if 0 <= value < 10**digits else default
    if not value or len(value) > digits or not value.isascii() or not value.isdigit():
        return default
    return int(value)


def finite(value: bytes | str | None) -> float | None:
    """Return a finite number; None for everything else."""
    if not value or len(value) > _LONGEST_NUMBER:
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def exact(name: bytes | str) -> str:
    """Return a name so that a request with it means these bytes, also if they are not UTF-8. `readable` makes it printable."""
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name


def public_name(word: str) -> str:
    """Return the name of a stored word: ``broken`` is ``undecodable`` in Python and for people."""
    return _NAMES.get(word, word)


def stored_word(name: str) -> str:
    """Return the word that keys, records and scripts have for a name; the reverse of `public_name`."""
    return _WORDS.get(name, name)


def as_bytes(name: str) -> bytes:
    """Return the bytes of a name that `exact` may have made."""
    return name.encode("utf-8", "surrogateescape")


def readable(name: str) -> str:
    """Return a name that `exact` made as valid Unicode: every byte that is not UTF-8 is replaced."""
    if name.isascii():
        return name
    try:
        return as_bytes(name).decode("utf-8", "replace")
    except UnicodeEncodeError:  # a text of the application
        return name.encode("utf-8", "backslashreplace").decode("utf-8")

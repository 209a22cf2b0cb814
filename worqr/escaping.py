"""Text made safe to show, on a terminal or on a page. Pure.

Payloads, names, errors and reasons may come from any client. They must not move the cursor, change colours, reverse the
direction of text or hide parts of it. So `escape` replaces every character that is not printable.
"""

from __future__ import annotations

import unicodedata
from typing import Final

from worqr.codecs import encoded_by

_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str, *, keep: str = "") -> str:
    """Return `text` with control characters, format characters and lone surrogates as escapes.

    A backslash stays as it is, so that ordinary text can be copied; the exact value is in the JSON.

    Args:
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or _is_plain(c) else _escaped(c) for c in text)


def _is_plain(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    code = ord(character)
    short = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _NAMED.get(character, short)


def escape_bytes(data: bytes) -> str:
    """Return a payload as text, with escapes for bytes that are not UTF-8. Of one that is encoded, return by what."""
    if name := encoded_by(data):
        return f"encoded ({name})"
    return escape(data.decode("utf-8", "backslashreplace"))

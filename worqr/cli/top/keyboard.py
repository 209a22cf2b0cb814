"""The keys that are typed at a terminal, one by one: without echo, and without waiting for Enter.

Signal keys stay what they are: Ctrl-C interrupts, Ctrl-Z suspends.
"""

from __future__ import annotations

import codecs
import os
import re
import termios
import tty
from collections.abc import AsyncIterator
from typing import Any, Final

import trio

_NAMED: Final = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
}
_KEY: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
"""An escape sequence of a terminal, or one character."""


def split_keys(text: str) -> list[str]:
    """Return the keys of a text that a terminal sent. Keys without a name and control characters are left out."""
    found: list[str] = _KEY.findall(text)
    return [_NAMED.get(key, key) for key in found if key in _NAMED or key.isprintable()]


class UnbufferedKeys:
    """Lets a terminal pass on each key at once, without echo, from `begin` until `end`, which restores its settings."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: list[Any] = termios.tcgetattr(fd)

    def begin(self) -> None:
        """Change the settings."""
        tty.setcbreak(self._fd)

    def end(self) -> None:
        """Restore the settings."""
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


async def read_keys(fd: int) -> AsyncIterator[str]:
    """Yield each key that is typed, until the terminal is closed."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        await trio.lowlevel.wait_readable(fd)
        try:
            data = os.read(fd, 1024)
        except OSError:
            return  # how Linux reports that the other end is closed
        if not data:
            return
        for key in split_keys(decoder.decode(data)):
            yield key

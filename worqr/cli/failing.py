"""How a command fails: exit codes, and the sentence that tells why."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130


class WrongUse(Exception):
    """The words of the command make no sense together: exit code 2."""


class Unhappy(Exception):
    """What was asked for did not come about: exit code 1.

    Attributes:
        detail: what is to be shown below the sentence, on lines of its own.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

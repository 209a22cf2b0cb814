"""The errors of commands, and the exit codes. `worqr.cli.main` prints the text of an error."""

from __future__ import annotations

from typing import Final

EXIT_FAILED: Final = 1
EXIT_INVALID: Final = 2
EXIT_INTERRUPTED: Final = 130


class InvalidArguments(Exception):
    """The arguments are invalid: exit code 2."""


class CommandFailed(Exception):
    """The command failed: exit code 1.

    Attributes:
        detail: lines to print below the message.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

"""Types of options that several commands share. Each is an annotation for cyclopts, with its help text."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def flag(help: str) -> Parameter:
    """An option without a value."""
    return Parameter(help=help, show_default=False)


def duration_option(help: str) -> Parameter:
    """An option whose value is a duration; `worqr.cli.parsing.parse_duration` reads it."""
    return Parameter(help=help, metavar="DURATION")


def time_option(help: str) -> Parameter:
    """An option whose value is a time; `worqr.cli.parsing.parse_time` reads it."""
    return Parameter(help=help, metavar="TIME")


QueueName = Annotated[str, Parameter(help="Name of the queue.")]
JsonLines = Annotated[bool, flag("Print JSON Lines: one object per entry, with all fields.")]

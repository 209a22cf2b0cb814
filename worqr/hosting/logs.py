"""Logging of ``worqr run`` on the standard error: lines for people, or JSON Lines for programs.

If the user's module has set up logging, its set-up stays, except with ``--log-json``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal

from worqr.escaping import escape

LINE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
Level = Literal["debug", "info", "warning", "error"]

_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LINE_START: Final = re.compile(r"\n(?=\S)")
_RESERVED: Final = ("time", "level", "logger", "message", "exception", "stack")


def set_up_logging(level: Level | None, *, as_json: bool) -> None:
    """Log to the standard error, unless logging is set up already and `as_json` is False. worqr logs `level` and above."""
    root, own = logging.getLogger(), logging.getLogger("worqr")
    number = logging.getLevelNamesMapping()[(level or "info").upper()]
    if as_json or not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if as_json else PlainFormatter(LINE))
        root.handlers[:] = [handler]
        root.setLevel(number)
    if level is not None or own.level == logging.NOTSET:
        own.setLevel(number)


class JsonFormatter(logging.Formatter):
    """Format each record as a JSON object on one line.

    The fields are ``time`` (UTC), ``level``, ``logger`` and ``message``; ``exception`` and ``stack`` if the record has them; and
    the values of ``extra`` under their own names.
    """

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_text:
            found["exception"] = record.exc_text
        elif record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            found["stack"] = record.stack_info
        for name, value in vars(record).items():
            if name not in _STANDARD_FIELDS:
                found[f"extra_{name}" if name in _RESERVED else name] = value
        try:
            return json.dumps(found, default=str, allow_nan=False)
        except (TypeError, ValueError, RecursionError):  # `extra` has keys that are not text, a reference cycle, or NaN
            return json.dumps({name: _plain(value) for name, value in found.items()})


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | None) else repr(value)


class PlainFormatter(logging.Formatter):
    """Format lines for people, and escape them, because an exception may contain a payload.

    Further lines of a record are indented, so that an error text with a line feed cannot look like a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        return _LINE_START.sub("\n  ", escape(super().format(record), keep="\n\t"))

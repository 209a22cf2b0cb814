"""What the user of ``worqr top`` sees and types: the view, the selected row, the filter, a question. Pure: keys in, acts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from worqr.cli.top.actions import Act, ActKind, acts_of
from worqr.cli.top.views import COLUMNS, Reading, Row, View


class Mode(Enum):
    """What keys mean.

    | mode   | keys                                                    | leads to                          |
    |--------|---------------------------------------------------------|-----------------------------------|
    | BROWSE | move, choose a view, sort, ask for an act               | FILTER, ASK, HELP                 |
    | FILTER | are the text of the filter                              | BROWSE by Enter or Escape         |
    | ASK    | `y`, or the words and Enter, carries the act out        | BROWSE, also by any other answer  |
    | HELP   | any key closes the help                                 | BROWSE                            |
    """

    BROWSE = auto()
    FILTER = auto()
    ASK = auto()
    HELP = auto()


class Request(Enum):
    """What a key asks of the program, besides an act."""

    QUIT = auto()
    READ = auto()
    """Read the table now: another one was chosen."""


QUIT: Final = Request.QUIT
READ: Final = Request.READ
_ACTS: Final = {
    "p": ActKind.PAUSE,
    "c": ActKind.CANCEL,
    "r": ActKind.RETRY,
    "d": ActKind.DROP,
    "w": ActKind.SET,
    "m": ActKind.LIMIT,
}
_VIEWS: Final = {str(place): view for place, view in enumerate(View, 1)}


@dataclass(frozen=True, slots=True)
class Picture:
    """What is to be drawn: the rows from `first` on, and which of them is selected."""

    rows: Sequence[Row]
    selected: int
    sorted_by: int | None


class Browser:
    """The state of the screen. `read_only`: acts are refused."""

    def __init__(self, view: View = View.QUEUES, *, read_only: bool = False) -> None:
        self.view: View = view
        self.queue: str = ""
        self.mode: Mode = Mode.BROWSE
        self.filter: str = ""
        self.notice: str = ""
        self.pending: Act | None = None
        self.typed: str = ""
        self._read_only = read_only
        self._rows: Sequence[Row] = ()
        self._key: str = ""
        self._sort: int | None = None
        self._page = 10

    def show(self, reading: Reading) -> None:
        """Show these rows from now on."""
        self._rows = reading.rows

    def resize(self, rows: int) -> None:
        """Note how many rows there is room for."""
        self._page = max(1, rows)

    def notify(self, notice: str) -> None:
        """Show the result of an act."""
        self.notice = notice

    def picture(self) -> Picture:
        """Return the rows that pass the filter, in order, and the place of the selected one."""
        rows = self._visible()
        return Picture(rows, self._place(rows), self._sort)

    def press(self, key: str) -> Act | Request | None:
        """Handle a key. Return what is to be done now."""
        self.notice = ""
        match self.mode:
            case Mode.FILTER:
                self._edit_filter(key)
            case Mode.ASK:
                return self._confirm(key)
            case Mode.HELP:
                self.mode = Mode.BROWSE
            case Mode.BROWSE:
                return self._browse(key)
        return None

    def _confirm(self, key: str) -> Act | None:
        """Return the act that was asked about, once the answer is complete and right."""
        act, words = self.pending, key
        if act is not None and act.is_typed:
            if key not in ("enter", "escape"):
                self.typed = self.typed[:-1] if key == "backspace" else self.typed + (key if len(key) == 1 else "")
                return None
            words = self.typed if key == "enter" else ""
        self.pending, self.typed, self.mode = None, "", Mode.BROWSE
        confirmed = None if act is None else act.confirmed(words)
        if confirmed is None:
            self.notice = "nothing was done"
        return confirmed

    def _browse(self, key: str) -> Act | Request | None:
        if key == "q":
            return QUIT
        if key in _VIEWS:
            return self._open(_VIEWS[key], self.queue)
        if key in _ACTS:
            self._ask(_ACTS[key])
        elif key == "?":
            self.mode = Mode.HELP
        elif key == "/":
            self.mode = Mode.FILTER
        elif key == "s":
            self._sort = ((-1 if self._sort is None else self._sort) + 1) % len(COLUMNS[self.view])
        elif key == "enter":
            return self._open_selected(View.RUNNING if self.view is View.QUEUES else self.view)
        elif key == "l":
            return self._open_selected(View.LANES)
        elif key == "escape":
            return self._back()
        else:
            self._move(key)
        return None

    def _open(self, view: View, queue: str) -> Request:
        self.view, self.queue = view, queue
        self._rows, self._key, self._sort = (), "", None
        return READ

    def _open_selected(self, view: View) -> Request | None:
        """Show a view of the selected queue, or of the queue of the selected task or lane."""
        row = self._selected()
        if row is None or not row.queue:
            return None
        self.filter = ""
        return self._open(view, row.queue)

    def _back(self) -> Request | None:
        if self.filter:
            self.filter = ""
            return None
        return self._open(View.QUEUES if self.queue else self.view, "") if self.queue else None

    def _edit_filter(self, key: str) -> None:
        if key == "enter":
            self.mode = Mode.BROWSE
        elif key == "escape":
            self.mode, self.filter = Mode.BROWSE, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key

    def _ask(self, kind: ActKind) -> None:
        row = self._selected()
        act = None if row is None else acts_of(self.view, row).get(kind)
        if self._read_only:
            self.notice = "nothing can be changed: worqr top runs with --read-only"
        elif act is None:
            self.notice = f"there is nothing to {kind.value} here"
        else:
            self.pending, self.mode = act, Mode.ASK

    def _move(self, key: str) -> None:
        rows = self._visible()
        last = len(rows) - 1
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self._page, "page down": self._page}
        if key in steps:
            place = self._place(rows) + steps[key]
        elif key in ("home", "end"):
            place = 0 if key == "home" else last
        else:
            return
        self._key = rows[min(max(place, 0), last)].key if rows else ""

    def _visible(self) -> Sequence[Row]:
        wanted = self.filter.casefold()
        columns = COLUMNS[self.view]
        rows = [row for row in self._rows if not wanted or wanted in _text_of(row).casefold()]
        if self._sort is None:
            return rows
        place = self._sort
        return sorted(rows, key=lambda row: _sort_key(row.values[place]), reverse=columns[place].right)

    def _place(self, rows: Sequence[Row]) -> int:
        return next((place for place, row in enumerate(rows) if row.key == self._key), 0)

    def _selected(self) -> Row | None:
        rows = self._visible()
        return rows[self._place(rows)] if rows else None


def _text_of(row: Row) -> str:
    return " ".join(value for value in row.values if isinstance(value, str))


def _sort_key(value: Any) -> tuple[bool, Any]:
    """Sort missing values before all others, which may have another type."""
    return (False, 0) if value is None else (True, value)

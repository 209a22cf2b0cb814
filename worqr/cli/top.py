"""``worqr top``: the command, and the loop that reads the mesh, draws the screen and handles keys."""

from __future__ import annotations

import codecs
import os
import re
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import trio
from cyclopts import Parameter

from worqr.cli.errors import InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    JsonLines,
    duration_option,
    flag,
    parse_duration,
    parse_rate,
    queue_by_name,
    run_connected,
)
from worqr.cli.output import (
    fit,
    grid,
    has_ellipsis,
    is_terminal,
    one_line,
    open_console,
    payload_fields,
    print_json,
    printable,
    show_table,
)
from worqr.client.schedules import schedules_of
from worqr.errors import UsageError, WorqrError
from worqr.inside import client_of
from worqr.keys import RegistryKeys
from worqr.limits import MOST_WEIGHT, Limit, check_limits, describe_limits
from worqr.ops import page_schedules, survey_schedules
from worqr.views.tables import (
    EMPTY,
    FAILED,
    LANES,
    LOG,
    QUEUES,
    RUNNING,
    SCHEDULES,
    WORKERS,
    Column,
    fields_of,
    of_pairs,
)
from worqr.views.values import worker as short_worker

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from worqr.mesh import Mesh
    from worqr.mesh_records import MeshInfo, QueueInfo

# What the user of ``worqr top`` sees and types: the table, the selected row, the filter, a question. Keys in, acts out.

# The tables: what each reads from the mesh.


FAILED_PER_QUEUE: Final = 50
"""Newest failed tasks that are read of each queue."""
LOG_ENTRIES: Final = 200
"""Newest entries of the log that are read."""
LANES_PER_QUEUE: Final = 1_000
"""Lanes that are read of each queue: those with the most tasks."""
SCHEDULES_READ: Final = 1_000
"""Declared schedules that are read, and stored ones."""
QUEUES_READ: Final = 20
"""Queues of which tasks or lanes are read at once, if none is chosen: those with the most of them."""


class View(Enum):
    """A table. The value is its title; the number of its key is its place."""

    QUEUES = "queues"
    RUNNING = "running"
    WORKERS = "workers"
    FAILED = "failed"
    SCHEDULES = "schedules"
    LOG = "log"
    LANES = "lanes"


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        key: identifies what the row shows, so that it stays selected when the table is read again.
        target: what the row shows: a record, or a pair of the name of its queue and a record.
        queue: the name of its queue; empty if it has none.
    """

    key: str
    target: Any
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read from the mesh at one moment. `more`: a remark if not everything was read."""

    mesh: MeshInfo | None
    rows: Sequence[Row]
    more: str = ""


COLUMNS: Final[dict[View, tuple[Column, ...]]] = {
    View.QUEUES: (*QUEUES.columns, QUEUES.state),
    View.RUNNING: RUNNING,
    View.WORKERS: (*WORKERS.columns, WORKERS.state),
    View.FAILED: FAILED.columns,
    View.SCHEDULES: (*SCHEDULES.columns, SCHEDULES.state),
    View.LOG: LOG.columns,
    View.LANES: of_pairs((*LANES.columns, LANES.state)),
}


PAIRS: Final = (View.RUNNING, View.LANES)
"""Tables whose rows are pairs of the name of a queue and a record."""


async def read_view(mesh: Mesh, view: View, queue: str) -> Reading:
    """Read a table. `queue`: only of this queue; empty: of all."""
    info = await mesh.info()
    match view:
        case View.QUEUES:
            more = f"{info.queues_left_out:,} quieter queues are left out" if info.queues_left_out else ""
            return Reading(
                info, [Row(each.name, each, each.name) for each in info.queues if queue in ("", each.name)], more
            )
        case View.WORKERS:
            found = [each for each in await mesh.workers() if not queue or queue in each.queues]
            return Reading(info, [Row(each.id, each) for each in found])
        case View.SCHEDULES:
            return await _read_schedules(mesh, info)
        case View.LOG:
            entries = [entry for entry in reversed(await mesh.log(LOG_ENTRIES)) if queue in ("", entry.queue)]
            return Reading(info, [Row(entry.id, entry, entry.queue) for entry in entries])
        case _:
            return await _read_queues(mesh, info, view, queue)


async def _read_schedules(mesh: Mesh, info: MeshInfo) -> Reading:
    """Read a page of the declared schedules, and one of those that programs have stored, which may be one for each user."""
    client, keys = client_of(mesh), RegistryKeys(mesh.prefix)
    survey = await client.ask(survey_schedules(keys, limit=SCHEDULES_READ))
    stored, now = await client.ask(page_schedules(keys, "", limit=SCHEDULES_READ))
    found = sorted(await schedules_of(client, [*survey.rows, *stored], now), key=lambda schedule: schedule.name)
    left_out = survey.declared + survey.stored - len(found)
    more = f"{left_out:,} schedules left out: see `worqr schedules --stored PREFIX`" if left_out > 0 else ""
    return Reading(info, [Row(each.name, each) for each in found], more)


async def _read_queues(mesh: Mesh, info: MeshInfo, view: View, queue: str) -> Reading:
    """Read a table that is in several queues."""
    names, more = _chosen(info.queues, queue, view)
    queues = [(name, queue_by_name(mesh, name)) for name in names]
    if view is View.RUNNING:
        tasks = [(name, task) for name, each in queues for task in await each.running()]
        tasks.sort(key=lambda pair: (pair[1].since is None, pair[1].since))
        return Reading(
            info, [Row(f"{name} {task.worker} {task.since}", (name, task), name) for name, task in tasks], more
        )
    if view is View.FAILED:
        records = [record for _, each in queues for record in await each.failed.list(FAILED_PER_QUEUE)]
        records.sort(key=lambda record: record.at, reverse=True)
        return Reading(info, [Row(f"{each.queue} {each.id}", each, each.queue) for each in records], more)
    found = {name: await each.lanes(limit=LANES_PER_QUEUE) for name, each in queues}
    if not more and any(len(lanes) == LANES_PER_QUEUE for lanes in found.values()):
        more = f"{LANES_PER_QUEUE:,} lanes of each queue, those with the most tasks"
    rows = [Row(f"{name} {lane.name}", (name, lane), name) for name, lanes in found.items() for lane in lanes]
    return Reading(info, rows, more)


def _chosen(queues: Sequence[QueueInfo], queue: str, view: View) -> tuple[list[str], str]:
    """Return the names of the queues whose tasks or lanes are read, and a remark if some are left out."""
    if queue:
        return [queue], ""

    def size(info: QueueInfo) -> int:
        return int(getattr(info, view.value))

    full = sorted(filter(size, queues), key=size, reverse=True)
    left_out = len(full) - QUEUES_READ
    more = f"{left_out} more queues: open one on the first page" if left_out > 0 else ""
    return [info.name for info in full[:QUEUES_READ]], more


# What an operator can do to a row: pause, cancel, retry, drop, ask a worker, set and limit a lane.


ACKNOWLEDGED_WITHIN: Final = 5.0
"""Seconds for which a cancel waits for the acknowledgement of the worker."""
MODES: Final[dict[str, Literal["quiet", "resume", "drain"]]] = {"quiet": "quiet", "resume": "resume", "drain": "drain"}
REASON: Final = "worqr top"


class ActKind(Enum):
    """What may be done. The value is a verb for messages."""

    PAUSE = "pause or resume"
    CANCEL = "cancel"
    RETRY = "retry"
    DROP = "drop"
    SET = "set"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Act:
    """One act on one row.

    Attributes:
        question: asked before the act.
        run: carries the act out, and returns what it did.
        name: must be typed before an act on many tasks; empty: `y` is enough.
        choose: makes the act of the words that are typed, or returns None if they mean nothing; None: there is nothing to choose.
    """

    question: str
    run: Callable[[Mesh], Awaitable[str]]
    name: str = ""
    choose: Callable[[str], Act | None] | None = None

    @property
    def is_typed(self) -> bool:
        """True if words are typed before the act, and not only `y`."""
        return bool(self.name) or self.choose is not None

    def confirmed(self, words: str) -> Act | None:
        """Return the act that these words confirm; None if they are wrong."""
        if self.choose is not None:
            return self.choose(words.strip())
        return self if words == (self.name or "y") else None


def acts_of(view: View, row: Row) -> dict[ActKind, Act]:
    """Return what can be done to a row of this view."""
    queue, target = row.queue, row.target
    match view:
        case View.QUEUES:
            acts = {ActKind.PAUSE: _pausing(f"queue {queue}", target, partial(_pause, queue=queue, lane=None))}
            if target.failed:
                count = f"all {target.failed:,} failed tasks of queue {queue}"
                acts |= _dead_letter_acts(count, queue, "", queue)
            return acts
        case View.RUNNING if target[1].id is not None:
            job = str(target[1].id)
            return {ActKind.CANCEL: Act(f"cancel job {job}", partial(_cancel, queue=queue, id=job))}
        case View.FAILED:
            return _dead_letter_acts(f"{target.id} of queue {queue}", queue, target.id)
        case View.WORKERS:
            question = f"worker {short_worker(target.id)}: quiet, resume, drain, auto or a number"
            run = partial(_ask_worker, worker=target.id, word="quiet")
            return {ActKind.SET: Act(question, run, choose=partial(_asking, target.id))}
        case View.LANES:
            return _acts_on_lane(queue, target[1])
        case View.SCHEDULES:
            return {
                ActKind.PAUSE: _pausing(f"schedule {target.name}", target, partial(_pause_schedule, name=target.name))
            }
        case _:
            return {}


def _pausing(what: str, target: Any, pause: Callable[..., Awaitable[str]]) -> Act:
    """Return the act that pauses or resumes: `paused` of a queue or a lane is None or a reason, of a schedule a bool."""
    paused = target.paused not in (None, False)
    return Act(f"{'resume' if paused else 'pause'} {what}", partial(pause, what=what, paused=not paused))


def _dead_letter_acts(what: str, queue: str, id: str, name: str = "") -> dict[ActKind, Act]:
    """Return the acts on one dead-letter record; without an id, on all of the queue."""
    return {
        ActKind.RETRY: Act(f"retry {what}", partial(_retry_or_drop, queue=queue, id=id, retries=True), name),
        ActKind.DROP: Act(f"delete {what}", partial(_retry_or_drop, queue=queue, id=id, retries=False), name),
    }


def _acts_on_lane(queue: str, target: Any) -> dict[ActKind, Act]:
    what, of_lane = f"lane {target.name} of queue {queue}", {"queue": queue, "lane": target.name}
    weight = f"weight of {what}: 1 to {MOST_WEIGHT:,}, 0: as declared"
    limit = f"limits of {what}: 5, 100/1m, both, none or clear"
    return {
        ActKind.PAUSE: _pausing(what, target, partial(_pause, **of_lane)),
        ActKind.CANCEL: Act(f"cancel all jobs of {what}", partial(_cancel_lane, **of_lane), target.name),
        ActKind.SET: Act(weight, partial(_set_weight, **of_lane, weight=None), choose=partial(_weighting, **of_lane)),
        ActKind.LIMIT: Act(limit, partial(_set_limits, **of_lane, limits=None), choose=partial(_limiting, **of_lane)),
    }


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 10


def _asking(worker: str, word: str) -> Act | None:
    """Return the request to a worker that a word means: a mode, or how many tasks it runs at once."""
    if word not in (*MODES, "auto") and not (_is_number(word) and int(word)):
        return None
    return Act(f"ask worker {worker}: {word}", partial(_ask_worker, worker=worker, word=word))


def _weighting(word: str, *, queue: str, lane: str) -> Act | None:
    """Return the weight of a lane that a word means."""
    if not _is_number(word) or int(word) > MOST_WEIGHT:
        return None
    change = partial(_set_weight, queue=queue, lane=lane, weight=int(word) or None)
    return Act(f"set the weight of lane {lane}: {word}", change)


def _limiting(words: str, *, queue: str, lane: str) -> Act | None:
    """Return the limits of a lane that words mean: how many run at once, rates, or both."""
    try:
        limits = None if words == "clear" else () if words == "none" else _parse_limits(words)
    except (InvalidArguments, UsageError):
        return None
    return Act(f"limit lane {lane}: {words}", partial(_set_limits, queue=queue, lane=lane, limits=limits))


def _parse_limits(words: str) -> tuple[Limit, ...]:
    parts = words.split()
    if not parts:
        raise InvalidArguments("type a limit")
    return check_limits(
        [Limit(int(part)) if _is_number(part) else parse_rate(part, "a rate") for part in parts], "limits"
    )


async def _pause(mesh: Mesh, *, queue: str, lane: str | None, what: str, paused: bool) -> str:
    target = queue_by_name(mesh, queue)
    await (target.pause(REASON, lane=lane) if paused else target.resume(lane=lane))
    return f"{'Paused' if paused else 'Resumed'} {what}"


async def _pause_schedule(mesh: Mesh, *, name: str, what: str, paused: bool) -> str:
    await mesh.pause_schedule(name, paused=paused)
    return f"{'Paused' if paused else 'Resumed'} {what}"


async def _cancel_lane(mesh: Mesh, *, queue: str, lane: str) -> str:
    count = await queue_by_name(mesh, queue).cancel_lane(lane, reason=REASON, wait=ACKNOWLEDGED_WITHIN)
    still = count.running - count.acknowledged
    ending = f", of which {still:,} still run after {ACKNOWLEDGED_WITHIN:g} s" if still else ""
    return f"Cancelled {count.waiting + count.running:,} jobs of lane {lane} of queue {queue}{ending}"


async def _set_weight(mesh: Mesh, *, queue: str, lane: str, weight: int | None) -> str:
    await queue_by_name(mesh, queue).set_weight(lane, weight)
    return f"The weight of lane {lane} is {'what the code declares' if weight is None else weight}"


async def _set_limits(mesh: Mesh, *, queue: str, lane: str, limits: tuple[Limit, ...] | None) -> str:
    target = queue_by_name(mesh, queue)
    if limits is None:
        await target.clear_limit(lane=lane)
        return f"The limits of lane {lane} are what the code declares"
    await target.set_limit(*limits, lane=lane)
    return f"The limits of lane {lane}: {describe_limits(limits)}"


async def _ask_worker(mesh: Mesh, *, worker: str, word: str) -> str:
    if word in MODES:
        await mesh.ask_worker(worker, MODES[word])
        return f"Asked worker {worker}: {word}"
    await mesh.ask_worker(worker, concurrency="auto" if word == "auto" else int(word))
    return f"Asked worker {worker} to run {word} tasks at once"


async def _cancel(mesh: Mesh, *, queue: str, id: str) -> str:
    began = perf_counter()
    count = await queue_by_name(mesh, queue).job(id).cancel(reason=REASON, wait=ACKNOWLEDGED_WITHIN)
    took = 1000 * (perf_counter() - began)
    if count.acknowledged:
        return f"Cancelled job {id}: its worker has acknowledged it after {took:.0f} ms"
    if count.running:
        return f"Job {id} is being cancelled, and still runs after {ACKNOWLEDGED_WITHIN:g} s"
    return f"Cancelled job {id}, which had not started" if count.waiting else f"Job {id} had ended already"


async def _retry_or_drop(mesh: Mesh, *, queue: str, id: str, retries: bool) -> str:
    """Retry or delete one dead-letter record; without an id, all of the queue."""
    failed, did = queue_by_name(mesh, queue).failed, "Retried" if retries else "Deleted"
    if not id:
        return f"{did} {await (failed.retry_all if retries else failed.drop_all)():,} tasks of queue {queue}"
    count = await (failed.retry if retries else failed.drop)(id)
    return f"{did} {id}" if count else f"{id} is no longer in the dead-letter queue"


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
        rows = [row for row in self._rows if not wanted or wanted in _text_of(columns, row).casefold()]
        if self._sort is None:
            return rows
        by = columns[self._sort]
        return sorted(rows, key=lambda row: _sort_key(by.value(row.target)), reverse=by.form.right)

    def _place(self, rows: Sequence[Row]) -> int:
        return next((place for place, row in enumerate(rows) if row.key == self._key), 0)

    def _selected(self) -> Row | None:
        rows = self._visible()
        return rows[self._place(rows)] if rows else None


def _text_of(columns: Sequence[Column], row: Row) -> str:
    """Return the texts of a row, without its numbers and times."""
    return " ".join(value for each in columns if isinstance(value := each.value(row.target), str))


def _sort_key(value: Any) -> tuple[bool, Any]:
    """Sort missing values before all others, which may have another type."""
    return (False, 0) if value is None else (True, value)


# ``worqr top``: the command, and the loop that reads the mesh, draws the screen and handles keys.

# The keys that are typed at a terminal, one by one: without echo, and without waiting for Enter.
#
# Signal keys stay what they are: Ctrl-C interrupts, Ctrl-Z suspends.


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


# Drawing ``worqr top``: one line for each row, as wide and as high as the terminal.


SAMPLES: Final = 60
"""Readings that the graphs of the header show."""
_BARS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = " .:-=+*#@"
LEAST: Final = 6
"""Characters that a column keeps, if it does not say more."""
HEADER: Final = 4
FOOTER: Final = 1
HELP: Final = (
    "1 to 7      choose a table",
    "up, down    select a row; also j and k, page up, page down, home, end",
    "Enter       show only the tasks of the selected queue",
    "l           show the lanes of the selected queue",
    "Escape      clear the filter, then show all queues again",
    "/           show only rows that contain a text",
    "s           sort by the next column",
    "p           pause or resume the selected queue, lane or schedule",
    "c           cancel the selected running job, or all jobs of the selected lane",
    "r           retry the selected failed task, or all of the selected queue",
    "d           delete the selected failed task, or all of the selected queue",
    "w           ask the selected worker to be quiet, resume, drain, or run N tasks;",
    "            or set the weight of the selected lane",
    "m           limit what may start in the selected lane",
    "q           quit; also Ctrl-C",
)


class Rates:
    """How many tasks finished and failed per second, computed from the totals of successive readings."""

    def __init__(self) -> None:
        self.finished: deque[float] = deque(maxlen=SAMPLES)
        self.failed: deque[float] = deque(maxlen=SAMPLES)
        self._last: tuple[float, int, int] | None = None

    def add(self, mesh: MeshInfo) -> None:
        """Note the totals of a snapshot; one that was noted before adds nothing."""
        now, queues = mesh.at.timestamp(), _all(mesh)
        finished = sum(info.counts.get("finished", 0) for info in queues)
        failed = sum(info.counts.get("failed", 0) for info in queues)
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            self.finished.append(max(0, finished - self._last[1]) / seconds)
            self.failed.append(max(0, failed - self._last[2]) / seconds)
        self._last = (now, finished, failed)


@dataclass(frozen=True, slots=True)
class Header:
    """What is drawn above the table."""

    prefix: str
    mesh: MeshInfo | None
    rates: Rates
    problem: str
    more: str


def sparkline(values: Sequence[float], width: int, *, unicode: bool = True) -> str:
    """Return the last `width` values as a line of bars, the highest one as high as a character."""
    bars, highest = (_BARS if unicode else _ASCII_BARS), max(values, default=0.0)
    if not highest:
        return ""
    return "".join(bars[round(value / highest * (len(bars) - 1))] for value in list(values)[-width:])


def draw(browser: Browser, header: Header, width: int, height: int) -> Group:
    """Return the whole screen."""
    from rich.console import Group

    room = max(1, height - HEADER - FOOTER)
    browser.resize(room)
    lines = _header(browser, header)
    if browser.mode is Mode.HELP:
        lines += map(one_line, HELP[: room + 1])
    else:
        lines += table(COLUMNS[browser.view], browser.picture(), width, room)
        if not browser.picture().rows:
            lines.append(one_line(_nothing(browser), "dim"))
    lines = lines[: height - FOOTER]
    lines += [one_line("") for _ in range(height - FOOTER - len(lines))]
    return Group(*lines, _footer(browser, header, width))


def table(columns: Sequence[Column], picture: Picture, width: int, room: int) -> Sequence[RenderableType]:
    """Return the heading and at most `room` rows around the selected one, each on one line."""
    from rich.styled import Styled

    first = max(0, min(picture.selected - room // 2, len(picture.rows) - room))
    rows = [row.target for row in picture.rows[first : first + room]]
    kept = [
        (place, column)
        for place, column in enumerate(columns)
        if not column.hidden and (place == 0 or any(column.value(row.target) not in EMPTY for row in picture.rows))
    ]
    cells = [[printable(column.shown(row)) for _, column in kept] for row in rows]
    titles = [f"{column.title} *" if picture.sorted_by == place else column.title for place, column in kept]
    shown = [column for _, column in kept]
    while (widths := fit(shown, titles, cells, width)) is None and len(shown) > 1:
        shown.pop()  # there is no room for the last column
        titles, cells = titles[:-1], [texts[:-1] for texts in cells]
    widths = widths or [max(1, width)]
    parts: list[RenderableType] = [grid(shown, widths, [titles], "bold", one_line=True)]
    for number, (row, texts) in enumerate(zip(rows, cells, strict=True), first):
        part = grid(shown, widths, [texts], row=row, one_line=True)
        parts.append(Styled(part, "reverse") if number == picture.selected else part)
    return parts


def _header(browser: Browser, header: Header) -> list[RenderableType]:
    infos = () if header.mesh is None else _all(header.mesh)
    names = ("waiting", "scheduled", "running", "failed")
    text = "   ".join(f"{name} {sum(getattr(info, name) for info in infos):,}" for name in names)
    if rates := header.rates.finished:
        text += f"   finished {rates[-1]:,.0f}/s {sparkline(rates, 30, unicode=has_ellipsis())}"
    title = f"worqr top   prefix {header.prefix}   {_source(header.mesh)}"
    tabs = one_line("")
    for place, view in enumerate(View, 1):
        tabs.append(f" {place} {view.value}", "reverse" if view is browser.view else "dim")
    if browser.queue:
        tabs.append(f"  of {printable(browser.queue)}", "bold")
    return [one_line(title, "dim"), one_line(header.problem, "bold red") if header.problem else one_line(text), tabs]


def _all(mesh: MeshInfo) -> Sequence[QueueInfo]:
    return mesh.queues if mesh.others is None else (*mesh.queues, mesh.others)


def _source(mesh: MeshInfo | None) -> str:
    """Return when the figures were read, and who leads the mesh."""
    if mesh is None:
        return "reading"
    leader = "no worker leads" if mesh.leader is None else f"leader {short_worker(mesh.leader)}"
    return f"figures of {mesh.at.astimezone():%H:%M:%S}   {leader}"


def _nothing(browser: Browser) -> str:
    if browser.filter:
        return f"nothing contains {browser.filter!r}: press Escape to clear the filter"
    nothing = {
        View.QUEUES: "no queue holds tasks or has workers",
        View.RUNNING: "no task is running",
        View.WORKERS: "no worker is registered",
        View.FAILED: "no task has failed for good",
        View.SCHEDULES: "no worker has declared a schedule",
        View.LOG: "nothing has happened yet",
        View.LANES: "no lane has tasks, is paused, or was set by an operator"
        if browser.queue
        else "no task waits in a lane; for other lanes, select a queue and press l",
    }
    return nothing[browser.view]


def _footer(browser: Browser, header: Header, width: int) -> Text:
    if browser.mode is Mode.FILTER:
        return one_line(f"/{browser.filter}_", "bold")
    if browser.mode is Mode.ASK and browser.pending is not None:
        what = browser.pending.name or "one"
        answer = f"type {what} and Enter: {browser.typed}_" if browser.pending.is_typed else "y: yes, any other key: no"
        question, shown = one_line(f"{browser.pending.question}? ", "bold yellow"), one_line(answer, "bold yellow")
        question.truncate(max(LEAST, width - shown.cell_len))  # what you type stays in sight
        return question.append(shown)
    if browser.notice:
        return one_line(browser.notice, "bold")
    said = f"filter: {browser.filter}   " if browser.filter else ""
    said += f"{header.more}   " if header.more else ""
    return one_line(f"{said}? help   / filter   s sort   Enter open   q quit", "dim")


FASTEST: Final = 0.2
"""Seconds between two readings, at least."""
_ENDING: Final = {signal.SIGINT: 0, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGHUP: 128 + signal.SIGHUP}
"""Signals that end the program, and its exit code then."""
_WATCHED: Final = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


def top(
    *,
    view: Annotated[View, Parameter(help="The table to begin with.")] = View.QUEUES,
    every: Annotated[str, duration_option("Read the mesh this often.")] = "1s",
    read_only: Annotated[bool, flag("Refuse to change anything.")] = False,
    once: Annotated[bool, flag("Print the table once, as in a pipe.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> int:
    """Watch a mesh: queues, lanes, running tasks, workers, failed tasks, schedules and the log.

    Press ? for the keys. Ctrl-C or q ends it.
    """
    seconds = parse_duration(every, "--every") or 0
    if seconds < FASTEST:
        raise InvalidArguments(f"--every must be at least {FASTEST:g}s, not {every!r}")
    if once or json or not is_terminal() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        _print_once(connect, view, json=json)
        return 0

    async def command(mesh: Mesh) -> int:
        return await _Top(mesh, Browser(view, read_only=read_only), seconds).run()

    try:
        return run_connected(connect, command)
    except KeyboardInterrupt:
        return 0


def _print_once(connect: ConnectOptions, view: View, *, json: bool) -> None:
    async def command(mesh: Mesh) -> Reading:
        return await read_view(mesh, view, "")

    reading = run_connected(connect, command)
    if json:
        for row in reading.rows:
            print_json({"queue": row.queue, **_fields(view, row.target)})
    else:
        show_table(COLUMNS[view], [row.target for row in reading.rows])


def _fields(view: View, target: Any) -> dict[str, Any]:
    """Return the attributes of a row's subject for JSON; a payload as text or base64."""
    fields = fields_of(target[1] if view in PAIRS else target)
    task = fields.pop("task", None)
    return {**fields, **(payload_fields(task) if isinstance(task, bytes) else {})}


def _clock() -> str:
    return f"{datetime.now().astimezone():%H:%M:%S}"


class _Top:
    """The running program."""

    def __init__(self, mesh: Mesh, browser: Browser, every: float) -> None:
        self._mesh = mesh
        self._browser = browser
        self._every = every
        self._rates = Rates()
        self._reading = Reading(None, ())
        self._problem = ""
        self._read_now = trio.Event()
        self._code = 0
        self._live: Live | None = None
        self._keys = UnbufferedKeys(sys.stdin.fileno())

    async def run(self) -> int:
        """Show the mesh until the user quits. Return the exit code: 0, or that of a signal."""
        from rich.live import Live

        with ExitStack() as stack:
            signals = stack.enter_context(trio.open_signal_receiver(*_WATCHED))
            stack.enter_context(self._keys)
            self._live = stack.enter_context(
                Live(console=open_console(follow_size=True), screen=True, auto_refresh=False)
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._handle_signals, signals, nursery.cancel_scope.cancel)
                nursery.start_soon(self._handle_keys, nursery)
                nursery.start_soon(self._watch_connection)
                nursery.start_soon(self._read_forever)
        return self._code

    async def _read_forever(self) -> None:
        while True:
            self._read_now = trio.Event()
            view, queue = self._browser.view, self._browser.queue
            try:
                reading = await read_view(self._mesh, view, queue)
            except WorqrError as error:
                self._problem = self._problem or str(error)
            else:
                self._problem = ""
                if reading.mesh is not None:
                    self._rates.add(reading.mesh)
                if (view, queue) == (self._browser.view, self._browser.queue):
                    self._reading = reading
                    self._browser.show(reading)
            self._draw()
            with trio.move_on_after(self._every):
                await self._read_now.wait()

    async def _watch_connection(self) -> None:
        """Show at once that the server is away. The readings that wait for it would show it only after their patience."""
        async with self._mesh.connection_events() as events:
            async for event in events:
                if event.type == "lost":
                    self._problem = f"No answer since {_clock()}, the figures are of then: {event.cause}"
                else:
                    self._problem = ""
                    self._read_now.set()
                self._draw()

    async def _handle_keys(self, nursery: trio.Nursery) -> None:
        async for key in read_keys(sys.stdin.fileno()):
            result = self._browser.press(key)
            if result is QUIT:
                break
            if result is READ:
                self._read_now.set()
            elif isinstance(result, Act):
                nursery.start_soon(self._carry_out, result)
            self._draw()
        nursery.cancel_scope.cancel()

    async def _carry_out(self, act: Act) -> None:
        try:
            notice = await act.run(self._mesh)
        except WorqrError as error:
            notice = str(error)
        self._browser.notify(notice)
        self._read_now.set()
        self._draw()

    async def _handle_signals(self, signals: AsyncIterator[int], quit: Callable[[], None]) -> None:
        async for number in signals:
            if number in _ENDING:
                self._code = _ENDING[signal.Signals(number)]
                quit()
            elif number == signal.SIGTSTP:
                self._suspend()
            self._draw()

    def _suspend(self) -> None:
        """Give the terminal back to the shell, and stop until the shell continues this process."""
        assert self._live is not None
        self._live.stop()
        self._keys.end()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._keys.begin()
        self._live.start()

    def _draw(self) -> None:
        assert self._live is not None
        width, height = os.get_terminal_size(sys.stdout.fileno())
        header = Header(self._mesh.prefix, self._reading.mesh, self._rates, self._problem, self._reading.more)
        self._live.update(draw(self._browser, header, width, height), refresh=True)

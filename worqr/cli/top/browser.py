"""What the user of ``worqr top`` sees and types: the table, the selected row, the filter, a question. Keys in, acts out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

from worqr.cli.errors import InvalidArguments
from worqr.cli.options import parse_rate, queue_by_name
from worqr.errors import UsageError
from worqr.limits import MOST_WEIGHT, Limit, check_limits, describe_limits
from worqr.views.tables import (
    FAILED,
    LANES,
    LOG,
    QUEUES,
    RUNNING,
    SCHEDULES,
    WORKERS,
    Column,
    of_pairs,
)
from worqr.views.values import worker as short_worker

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.mesh_records import MeshInfo, QueueInfo

# The tables: what each reads from the mesh.


FAILED_PER_QUEUE: Final = 50
"""Newest failed tasks that are read of each queue."""
LOG_ENTRIES: Final = 200
"""Newest entries of the log that are read."""
LANES_PER_QUEUE: Final = 1_000
"""Lanes that are read of each queue: those with the most tasks."""
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
            return Reading(info, [Row(each.name, each) for each in await mesh.schedules()])
        case View.LOG:
            entries = [entry for entry in reversed(await mesh.log(LOG_ENTRIES)) if queue in ("", entry.queue)]
            return Reading(info, [Row(entry.id, entry, entry.queue) for entry in entries])
        case _:
            return await _read_queues(mesh, info, view, queue)


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

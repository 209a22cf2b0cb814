"""Every table that people see: its columns, how their values are written, and the notes that mark what needs attention. Pure.

The commands, ``worqr top``, the pages and their live numbers take columns and notes from here. So a thing has one word on all of
them: *failed* and *undecodable* make up the *dead letters*, and the *longest wait* is that of the oldest task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from math import isinf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from worqr.escaping import escape_bytes
from worqr.limits import HELD_BACK, describe_limits
from worqr.views import values
from worqr.views.values import shorten, span

if TYPE_CHECKING:
    from worqr.batches import BatchInfo
    from worqr.cron import Schedule
    from worqr.limits import LimitInfo
    from worqr.mesh_records import LaneInfo, LogEntry, QueueInfo, WorkerInfo
    from worqr.records import Entry, JobRecord, RemoteError

Fit = Literal["whole", "fold", "cut"]
"""What happens to a cell that is too long: nothing, it continues on the next line, or its end is left out."""
Level = Literal["good", "warn", "held", "bad", "idle", "busy"]

LATE_LOOP: Final = 1.0
"""Seconds by which an event loop is late from which on it is marked: the log has a `loop.blocked` from then on, too."""
LATE_AFTER: Final = 3.0
"""Seconds without a heartbeat after which a worker is marked: the default of ``keepalive``."""
OVERDUE: Final = timedelta(seconds=60)
BAD: Final = "bold red"


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one kind are written: exactly in pipes and files, short on terminals and pages. None is a dash."""

    plain: Callable[[Any], str] = str
    shown: Callable[[Any], str] = str
    page: Callable[[Any], str] = str
    right: bool = False


TEXT: Final = Form(page=values.line)
COUNT: Final = Form(str, values.count, values.count, right=True)
SECONDS: Final = Form(values.exact_seconds, span, values.brief, right=True)
MILLIS: Final = Form("{:.3f} s".format, span, values.duration, right=True)
TIME: Final = Form(values.exact_time, values.short_time, values.clock)
WORKER: Final = Form(shown=values.worker, page=values.worker)
SHARE: Final = Form("{:g}".format, values.percent, values.percent, right=True)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: the end of the key of its live text.
        title: the heading; `short` replaces it where there is little room.
        value: returns the value of a row.
        form: how the value is written.
        style: the colour on a terminal, or a function of the value that returns it.
        fit: what a terminal does with a long cell; `least` is the number of characters that it keeps.
        always: terminals show the column even if all its values are empty.
        below: on a terminal, the column may move to a line below its row.
        hidden: terminals do not show it; pipes do.
        wide: only wide pages show it.
    """

    name: str
    title: str
    value: Callable[[Any], Any]
    form: Form = TEXT
    short: str = ""
    style: str | Callable[[Any], str] = ""
    fit: Fit = "whole"
    least: int = 12
    always: bool = False
    below: bool = False
    hidden: bool = False
    wide: bool = False

    @property
    def heading(self) -> str:
        """The title on a page."""
        return f"{self.title[:1].upper()}{self.title[1:]}"

    @property
    def css(self) -> str:
        """The classes of its cells on a page."""
        return " ".join(filter(None, ("num" if self.form.right else "", "wide" if self.wide else "")))

    def plain(self, row: object) -> str:
        """Return the cell as pipes and files get it."""
        return "-" if (value := self.value(row)) is None or value == "" else self.form.plain(value)

    def shown(self, row: object) -> str:
        """Return the cell as a terminal shows it."""
        return "-" if (value := self.value(row)) is None else self.form.shown(value)

    def on_page(self, row: object) -> str:
        """Return the cell as a page shows it."""
        return values.NONE if (value := self.value(row)) is None else self.form.page(value)

    def colour(self, row: object) -> str:
        """Return the style of the cell on a terminal."""
        if (value := self.value(row)) in EMPTY:
            return "dim"
        return self.style if isinstance(self.style, str) else self.style(value)


EMPTY: Final = (None, "", "-", 0, "0")
"""Values for which a column need not be shown."""


def column(name: str, form: Form = TEXT, title: str = "", **options: Any) -> Column:
    """Return the column of an attribute of its rows, with the same title if no other is given."""
    return Column(name.rpartition(".")[2], title or name.replace("_", " "), attrgetter(name), form, **options)


def count(name: str, short: str = "", title: str = "", **options: Any) -> Column:
    """Return the column of a whole number."""
    return column(name, COUNT, title, short=short, **options)


def above(limit: float, style: str = BAD) -> Callable[[Any], str]:
    """Return a function that returns the style for values above the limit."""
    return lambda value: style if value > limit else ""


def styles_of(styles: Mapping[str, str]) -> Callable[[Any], str]:
    """Return a function that returns the style of a word."""
    return lambda word: styles.get(word, "")


@dataclass(frozen=True, slots=True)
class Note:
    """Something to know about a row. `word` is the same everywhere; `more` is a reason, `until` when it ends by itself."""

    level: Level
    word: str
    more: str = ""
    until: float | None = None

    @property
    def text(self) -> str:
        """The note in a line of text."""
        return ", ".join(filter(None, (f"{self.word}: {self.more}" if self.more else self.word, self.ends)))

    @property
    def ends(self) -> str:
        """For how long it holds; empty if that is not known."""
        return "" if self.until is None else f"for {values.duration(self.until)}"


@dataclass(frozen=True, slots=True)
class Table:
    """One table. `key` is the beginning of the keys of the live texts of a row."""

    columns: tuple[Column, ...]
    notes: Callable[[Any], Sequence[Note]] = lambda _: ()
    key: Callable[[Any], str] = lambda _: ""

    def pick(self, names: str, *more: Column) -> tuple[Column, ...]:
        """Return columns by their names, in this order, and some more at the end."""
        by_name = {each.name: each for each in self.columns}
        return (*(by_name[name] for name in names.split()), *more)

    @property
    def state(self) -> Column:
        """The notes as one column."""
        return Column("state", "state", self.state_of, style="yellow", fit="fold", least=16)

    def state_of(self, row: object) -> str:
        """Return the notes in one text."""
        return "; ".join(each.text for each in self.notes(row))

    def live(self, row: object, names: str) -> dict[str, str]:
        """Return the texts of these columns as a page shows them, by their keys."""
        key = self.key(row)
        return {f"{key}.{each.name}": each.on_page(row) for each in self.pick(names)}


# Queues and lanes


def age_of(info: QueueInfo) -> float | None:
    """Return the seconds for which the oldest task of a queue has waited; None if it is not known."""
    return info.oldest_job if info.age is None else info.age


def age_text(info: QueueInfo | None) -> str:
    """Return the longest wait of a queue: ``3 min``, or ``~3 min`` if that is an estimate."""
    age = None if info is None else age_of(info)
    about = "~" if info is not None and info.age is not None and info.age_estimated else ""
    return f"{about}{values.brief(age)}" if age is not None else values.NONE


def is_unserved(info: QueueInfo) -> bool:
    """Return True if tasks wait and no worker serves the queue: they wait until one does."""
    return info.waiting > 0 and not info.workers


def queue_notes(info: QueueInfo) -> Sequence[Note]:
    """Return why tasks of a queue do not start."""
    found = [Note("bad", "no worker")] if is_unserved(info) else []
    if info.paused is not None:
        return [*found, Note("held", "paused", info.paused, info.held_for)]
    if info.held_back and info.waiting:
        found.append(Note("held", HELD_BACK[info.held_back], until=info.held_for))
    return found


def lane_key(queue: str, lane: str) -> str:
    """Return a key for a lane. The name of a queue has no braces, so no two lanes have the same."""
    return f"lane.{{{queue}}}.{lane}"


def lane_notes(lane: LaneInfo) -> Sequence[Note]:
    """Return why no task of a lane starts."""
    if lane.paused is not None:
        return [Note("held", "paused", lane.paused, lane.held_for)]
    if not lane.held:
        return ()
    return [Note("held", HELD_BACK["concurrency" if lane.held_for is None else "rate"], until=lane.held_for)]


QUEUES: Final = Table(
    (
        column("name", title="queue", fit="fold"),
        count("waiting", "wait", always=True),
        count("scheduled", "sched", wide=True),
        count("blocked", "block"),
        count("suspended", "susp"),
        count("running", "run", always=True),
        count("failed", "fail", style=BAD),
        count("undecodable", "undec", "undecodable", style=BAD),
        count("workers", "wrkrs", always=True, wide=True),
        Column("age", "longest wait", age_of, SECONDS, "longest", wide=True),
    ),
    queue_notes,
    lambda info: f"queue.{info.name}",
)
DEAD: Final = Column("dead", "dead letters", lambda info: info.failed + info.undecodable, COUNT)
"""On pages that have no room for both."""
RATE: Final = Column("rate", "finished/s", lambda _: None, Form(right=True), wide=True)
SPARK: Final = Column("spark", "last hour", lambda _: "", wide=True)
HOLD: Final = Column("hold", "why none starts", lambda _: "", wide=True)
CHANGE: Final = Column("change", "change", lambda _: "")
ACT: Final = Column("act", "act", lambda _: "")
"""Columns of pages, which draw their cells."""
LANES: Final = Table(
    (
        column("name", title="lane", fit="fold"),
        count("waiting", "wait", always=True),
        count("running", "run", always=True),
        count("weight", wide=True),
        Column(
            "limits", "limits", lambda lane: describe_limits(lane.limits) if lane.limits else "", fit="cut", wide=True
        ),
    ),
    lane_notes,
)
OF_QUEUE: Final = column("queue", fit="fold", least=8)
"""The queue of a row that has one."""

# Workers


def worker_notes(info: WorkerInfo) -> Sequence[Note]:
    """Return what is unusual about a worker: that it leads, that it takes no tasks, and what was asked of it and is not done."""
    states: Mapping[str, Note] = {
        "quiet": Note("held", "quiet"),
        "leaving": Note("held", "leaving"),
        "missing": Note("bad", "no heartbeat"),
        "dead": Note("bad", "dead"),
    }
    found = [Note("good", "leader")] if info.leads else []
    if info.state in states:
        found.append(states[info.state])
    if info.request:
        found.append(Note("warn", "has not answered yet", info.request))
    elif info.answer not in ("", "done"):
        found.append(Note("warn", f"has {info.answer}"))
    return found


def workers_table(found: Iterable[WorkerInfo]) -> Table:
    """Return `WORKERS`, with a note of the version of each if there are several, and of the deploys of an application."""
    rows = list(found)
    versions, deploys = {info.version for info in rows}, {(info.app, info.deploy) for info in rows}
    rolling = {app for app, _ in deploys if sum(other == app for other, _ in deploys) > 1}
    if len(versions) < 2 and not rolling:
        return WORKERS

    def notes(info: WorkerInfo) -> Sequence[Note]:
        more = [Note("warn", f"version {info.version or 'unknown'}")] if len(versions) > 1 else []
        if info.app in rolling:
            more.append(Note("held", f"deploy {info.deploy}" if info.deploy else "no deploy"))
        return [*worker_notes(info), *more]

    return replace(WORKERS, notes=notes)


WORKERS: Final = Table(
    (
        column("id", WORKER, "worker", fit="fold"),
        column("host", fit="fold", least=8, below=True, wide=True),
        column("pid", Form(right=True), wide=True),
        column("app", hidden=True),  # the id begins with it
        count("running", "run", always=True),
        count("room", always=True),
        column(
            "beat_age",
            SECONDS,
            "last beat",
            short="beat",
            style=above(LATE_AFTER),
            always=True,
        ),
        Column(
            "lag",
            "lag",
            lambda info: None if info.lag is None else round(info.lag, 1),
            SECONDS,
            style=above(LATE_LOOP),
        ),
        column("started", TIME, "since", wide=True),
        column("version", hidden=True, wide=True),
        count("deploy", hidden=True),
        column("python", hidden=True),
        count("threads", hidden=True),
        count("processes", hidden=True),
        Column("queues", "queues", lambda info: ", ".join(sorted(info.queues)), fit="fold", least=16, below=True),
    ),
    worker_notes,
    lambda info: f"worker.{info.id}",
)


# Tasks and jobs


def error_text(error: RemoteError | None) -> str:
    """Return an error as tables show it: its type and its message."""
    if error is None:
        return ""
    return f"{error.type}: {error.message}" if error.message else error.type


def payload(least: int = 16) -> Column:
    """Return the column of the beginning of a payload."""
    return Column(
        "task",
        "task",
        lambda row: shorten(escape_bytes(row.task)),
        style="dim",
        fit="cut",
        least=least,
        below=True,
    )


def error(least: int, **options: Any) -> Column:
    """Return the column of the type and the message of an error."""
    show: dict[str, Any] = {"style": "red", "fit": "cut", "below": True, "least": least, **options}
    return Column("error", "error", lambda row: shorten(error_text(row.error)), **show)


def of_pairs(columns: Iterable[Column], first: str = "queue") -> tuple[Column, ...]:
    """Return columns for rows that are pairs of the name of a queue and what the columns are about."""

    def inside(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda row: get(row[1])

    queue = Column(first, first, lambda row: row[0], fit="fold", least=11)
    return (queue, *(replace(each, value=inside(each.value)) for each in columns))


APPS: Final = Table(
    of_pairs([count(name, always=True) for name in ("workers", "running", "room")], "application"),
    key=lambda row: f"app.{row[0]}",
)
"""Rows are names and `AppInfo`."""
TASKS: Final = Table(
    (
        column("id", fit="fold", least=11, always=True),
        column("claim", hidden=True),
        column("worker", WORKER, fit="fold", least=13),
        column("since", TIME),
        column("run_at", TIME),
        column("attempts", COUNT, short="tries", style=above(1, "yellow")),
        column("progress", SHARE, short="done"),
        Column("message", "message", lambda task: shorten(task.message), fit="cut", below=True),
        error(24),
        payload(),
    )
)
RUNNING: Final = of_pairs(TASKS.pick("id claim worker since attempts progress message task"))
JOBS: Final = TASKS.pick("id run_at attempts error task")
STATE: Final = Column("state", "state", lambda task: task.state, style=lambda state: "red" if state == "failed" else "")
TAGS: Final = Column("tags", "tags", lambda task: " ".join(task.tags), fit="cut", below=True)
KEPT: Final = (
    *TASKS.pick("id"),
    STATE,
    column("ended", TIME),
    column("seconds", SECONDS, "took"),
    *TASKS.pick("attempts error task"),
    TAGS,
)
"""Jobs that have ended, or that have a tag."""
WAITS_FOR: Final = Column(
    "waits_for", "waits for", lambda task: shorten(task.waits_for), fit="fold", least=16, always=True
)
SUSPENDED: Final = (*TASKS.pick("id"), WAITS_FOR, *TASKS.pick("attempts task"))
OUTCOMES: Final = {"ok": "finished", "timeout": "timed out"}
"""Outcomes of runs that have other words for people."""
ENDED: Final = Table(
    (
        column("id", fit="fold", least=11, always=True),
        column("claim", hidden=True),
        Column(
            "outcome",
            "outcome",
            lambda run: OUTCOMES.get(run.outcome, run.outcome),
            style=lambda outcome: "" if outcome == "finished" else "red",
        ),
        column("started", TIME),
        column("seconds", MILLIS, "took"),
        column("worker", WORKER, fit="fold", least=13, wide=True),
        column("error", style="red", fit="cut", below=True, wide=True),
    )
)
TRIES: Final = Table(
    (
        column("at", TIME, "ended"),
        column("seconds", SECONDS, "took"),
        column("worker", WORKER, fit="fold", least=13, wide=True),
        column("reason"),
        Column(
            "error",
            "error",
            lambda tried: shorten(tried.error.message if tried.reason == "retry" else error_text(tried.error)),
            style="red",
            fit="cut",
            least=30,
            below=True,
        ),
    )
)
ENTRY_STATES: Final = {"value": "received", "large": "result too large", "gone": "lost"}
"""States of the entries of a time line that have other words for people."""
ENTRY_STYLES: Final = {
    "failed": BAD,
    "refused": "red",
    "gone": BAD,
    "trying": "yellow",
    "open": "green",
    "started": "green",
}


def entry_state(entry: Entry) -> str:
    """Return the state of an entry of a time line for people, with the number of its failed tries."""
    state = ENTRY_STATES.get(entry.state, entry.state)
    return f"{state}, {values.plural(entry.tries, 'failed try', 'failed tries')}" if entry.tries else state


def entry_name(entry: Entry) -> str:
    """Return the name of an entry of a time line; of a child also where it is."""
    return f"{entry.name} (job {entry.job} of {entry.queue})" if entry.job else entry.name


SIZE: Final = Form(str, values.size, values.size, right=True)
TIME_LINE: Final = Table(
    (
        column("kind", title="entry"),
        Column("name", "name", lambda entry: shorten(entry_name(entry)), fit="fold", least=16, always=True),
        Column(
            "state",
            "state",
            entry_state,
            style=lambda state: ENTRY_STYLES.get(state.partition(",")[0], ""),
            always=True,
        ),
        column("began", TIME),
        column("until", TIME),
        column("ended", TIME),
        column("seconds", SECONDS, "took"),
        column("size", SIZE),
        error(24),
    )
)
"""Rows are the entries of `JobRecord.time_line`."""


def open_waits(record: JobRecord, name: str = "") -> list[Entry]:
    """Return the open waits of a workflow for events; those for the event `name`, or for any."""
    return [
        each for each in record.time_line if (each.kind, each.state) == ("wait", "open") and name in ("", each.name)
    ]


def entry_fields(entry: Entry) -> dict[str, Any]:
    """Return an entry of a time line for JSON."""
    error = None if entry.error is None else {"type": entry.error.type, "message": entry.error.message}
    return {**fields_of(entry), "seconds": entry.seconds, "error": error}


FAILED: Final = Table(
    (
        OF_QUEUE,
        column("id", fit="fold"),
        column("at", TIME, "failed at", short="when"),
        column("reason", always=True),
        count("failures", "fails"),
        count("stalls"),
        count("timeouts", "t/o"),
        Column(
            "error",
            "error",
            lambda record: shorten(error_text(record.error)),
            style="red",
            fit="cut",
            least=30,
            below=True,
        ),
        Column(
            "task",
            "task",
            lambda record: shorten(escape_bytes(record.task)),
            style="dim",
            fit="cut",
            least=16,
            below=True,
        ),
    ),
)

# Batches, schedules, the log


def batch_state(info: BatchInfo) -> str:
    """Return the state of a batch for people: how an ended batch ended."""
    if info.state != "ended":
        return info.state
    return "finished" if info.succeeded else "failed" if info.cancel_reason is None else "cancelled"


def limit_notes(info: LimitInfo) -> Sequence[Note]:
    """Return why blocks and functions wait for a limit with a name, and that a program died with permits of it."""
    found = [Note("bad", f"{info.expired:,} of dead programs")] if info.expired else []
    if info.waiting:
        full = info.concurrency is not None and info.held >= info.concurrency
        found.append(Note("held", HELD_BACK["concurrency" if full else "rate"]))
    return found


LIMITS: Final = Table(
    (
        column("name", title="limit", fit="fold"),
        column("bound", title="allows", fit="fold"),
        count("held", title="in use", always=True),
        count("used", title="in period", always=True),
        count("waiting", "wait", always=True),
        count("expired", style=BAD),
    ),
    limit_notes,
    lambda info: f"limit.{info.name}",
)
OUTBOXES: Final = Table(
    (
        column("table", fit="fold"),
        count("rows", always=True),
        column("oldest", SECONDS, always=True),
        count("failed", style="red", always=True),
        count("held", style="yellow", always=True),
        column("age", SECONDS, "unseen", wide=True),
    )
)
TOPICS: Final = Table(
    (
        column("pattern", fit="fold"),
        column("queue", fit="fold"),
        column("app"),
        column("seen", SECONDS, always=True),
    )
)
SUBSCRIBERS: Final = Table(
    (
        *TOPICS.columns,
        count("waiting", always=True),
        count("delivered", always=True, wide=True),
        count("refused", style="yellow", always=True, wide=True),
        count("dead", title="dead letters", style=BAD, always=True),
    )
)
"""The same on pages, with the tasks of the queue."""
OUTBOX_ROWS: Final = Table(
    (
        column("id"),
        column("queue", fit="fold"),
        column("age", SECONDS),
        count("tries", always=True),
        column("error", style="red", fit="cut", least=30, below=True),
    )
)
BATCH_STYLES: Final = {"open": "green", "sealed": "green", "failed": BAD, "cancelled": "yellow"}
BATCHES: Final = Table(
    (
        OF_QUEUE,
        column("id", title="batch", fit="fold"),
        Column("state", "state", batch_state, style=styles_of(BATCH_STYLES)),
        count("jobs", always=True),
        count("finished", "done", always=True),
        count("failed", style="red"),
        count("cancelled", "canc", wide=True),
        column("created", TIME, "made", wide=True),
        column("ended", TIME, wide=True),
    ),
    lambda info: [Note("held", "cancelled", info.cancel_reason)] if info.cancel_reason else (),
)


def schedule_times(schedule: Schedule) -> str:
    """Return when a schedule runs."""
    if schedule.every:
        return f"every {schedule.every:g} s"
    return f"{schedule.cron} {schedule.timezone}" if schedule.cron else ""


def outcome_text(schedule: Schedule) -> str:
    """Return how the last run of a schedule ended, with its error; empty if that is not known."""
    last = schedule.last_outcome
    if last is None or last.outcome == "finished":
        return "" if last is None else last.outcome
    why = ": ".join(filter(None, (last.error_type, last.error)))
    return f"{last.outcome}: {why}" if why else last.outcome


def schedule_notes(schedule: Schedule, now: datetime | None = None) -> Sequence[Note]:
    """Return what is unusual about a schedule; with the time of the server, also that it is overdue."""
    found = [Note("bad", "problem", schedule.problem)] if schedule.problem else []
    if schedule.paused:
        found.append(Note("held", "paused"))
    elif now is not None and now - schedule.next_run > OVERDUE:
        found.append(Note("bad", "overdue"))
    if schedule.override is not None:
        found.append(Note("idle", f"overridden by {schedule.override.by or 'an operator'}"))
    return found


def _failed_style(text: str) -> str:
    return BAD if text.startswith("failed") else ""


SCHEDULES: Final = Table(
    (
        column("name", title="schedule", fit="fold"),
        Column("times", "times", schedule_times, fit="cut", wide=True),
        column("next_run", TIME),
        column("last_run", TIME, always=True, wide=True),
        Column("outcome", "last outcome", outcome_text, style=_failed_style, fit="cut", least=8),
    ),
    schedule_notes,
)


def of_point(name: str, short: str = "", title: str = "", **options: Any) -> Column:
    """Return the column of a counter of a `HistoryPoint`. A point without a record has none."""
    return Column(
        name, title or name.replace("_", " "), lambda point: getattr(point, name) or 0, COUNT, short, **options
    )


def of_times(title: str, name: str, share: float) -> Column:
    """Return the column of a quantile of run times or waiting times."""
    return Column(title, title, lambda point: getattr(point, name).quantile(share), MILLIS)


HISTORY: Final = Table(
    (
        column("at", TIME, "until"),
        of_point("enqueued", "enq", always=True),
        of_point("finished", "done", always=True),
        of_point("retried", "retr"),
        of_point("failed", "fail", style=BAD),
        of_point("cancelled", "canc"),
        of_point("timed_out", "late"),
        of_point("stalled", "stall"),
        of_point("waiting", "wait", always=True),
        of_point("running", "run"),
        of_point("workers", "wrkrs"),
        column("age", SECONDS, "longest wait", short="longest"),
        of_times("run p50", "runs", 0.5),
        of_times("run p95", "runs", 0.95),
        of_times("wait p95", "waits", 0.95),
    ),
    lambda point: [Note("warn", "no record")] if point.is_gap else (),
)


def entry_details(entry: LogEntry) -> str:
    """Return what an entry of the log says beside its columns."""
    return f"{entry.text} (job {entry.job})".strip() if entry.job else entry.text


LOG: Final = Table(
    (
        column("at", TIME, "time"),
        column("kind", title="event", style=styles_of({"dead": BAD})),
        column("who", title="by", wide=True),
        column("queue", fit="fold"),
        column("worker", WORKER, fit="fold"),
        Column("count", "number", lambda entry: entry.count, COUNT, "n", wide=True),
        Column("details", "details", entry_details, fit="cut", least=16, below=True, wide=True),
    )
)


# The same as JSON


def fields_of(record: object) -> dict[str, Any]:
    """Return the attributes of a record for JSON, which has no infinity: the age of an expired heartbeat is null."""
    fields: dict[str, Any] = asdict(record)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    if isinstance(fields.get("beat_age"), float) and isinf(fields["beat_age"]):
        fields["beat_age"] = None
    return fields


def picked(record: object, names: str) -> dict[str, Any]:
    """Return attributes of a record by their names."""
    return {name: getattr(record, name) for name in names.split()}

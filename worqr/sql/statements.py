"""The SQL of an outbox: its rows, its two tables, and every statement, for PostgreSQL and SQLite. Pure.

Parameters are written as ``?``; `worqr.sql.connections` writes them as the driver wants. Each statement of a sender is a
transaction of its own. The query for rows has no lower bound: rows that commit late, with lower ids, are found.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from worqr.errors import UsageError

# A row of an outbox: its id, its options as bytes, and what is left of its times when it is sent. Pure.
#
# The table has the times of the database's clock. The server has its own, so a delay travels as a delay.


FORMAT: Final = 1
"""Of a row. A sweep leaves rows of a higher format alone: a newer version has stored them."""
WAITING, FAILED, HELD, IDENTITY = "waiting", "failed", "held", "outbox"
"""The states of a row; the last one is that of the row with the id of the outbox itself."""
MAX_TRIES: Final = 10
"""Refusals of a row after which it is given up."""
LONGEST_BACKOFF: Final = 300_000
"""Milliseconds until a refused row is tried again, at most."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, object]).decode


class Row(NamedTuple):
    """One row, as a sender reads it. `age_ms`: since it was inserted, by the database's clock."""

    id: str
    queue: str
    payload: bytes
    options: bytes
    age_ms: int
    tries: int


def new_row_id() -> str:
    """Return the id of a new row: a UUID of version 7 as 32 hexadecimal digits, so that ids are about in the order of time."""
    drawn = int.from_bytes(os.urandom(10), "big")
    high = (time.time_ns() // 1_000_000) << 16 | 0x7000 | drawn >> 68
    return f"{high << 64 | 0b10 << 62 | drawn & (1 << 62) - 1:032x}"


def encode_row_options(row: str, options: Mapping[str, object]) -> bytes:
    """Return the options of a row as bytes. A job without an id and a lane has the id of its row."""
    named = {} if "id" in options or "lane" in options else {"id": row}
    random = {"random": row} if "lane" in options and "id" not in options else {}
    return _encode({**options, **named, **random, "row": row})


def options_to_send(row: Row) -> dict[str, object] | None:
    """Return the options of a row for the server, with what is left of its delay and of its time to begin. None: it has expired.

    Raises:
        ValueError: another program wrote them, and they cannot be read.
    """
    try:
        options = _decode(row.options)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the options of the row cannot be read: {error}") from error
    options["row"] = row.id
    delay, expires = options.get("delay", 0), options.get("expires")
    if "run_at" in options or not isinstance(delay, int):
        return options
    left = delay - row.age_ms
    if "delay" in options:
        options["delay"] = max(0, left)
    if isinstance(expires, str) and expires.isdecimal():
        expires_in = int(expires) + min(0, left)
        if expires_in < 0:
            return None
        options["expires"] = str(expires_in)
    return options


def queues_of(queue: str, options: Mapping[str, Any]) -> set[str]:
    """Return the queues that a row starts jobs in: its own, and those of its follow-ups.

    Raises:
        ValueError, TypeError, AttributeError: another program wrote them, and they cannot be read.
    """
    found = {queue}
    for name, given, _ in options.get("follow_ups", {}).values():
        found |= queues_of(name, given)
    return found


def replicas_of(options: Mapping[str, object]) -> int:
    """Return the number of replicas that the options of a row ask for."""
    found: object = options.get("replicas", 0)
    return int(found) if isinstance(found, int) else 0


def backoff_ms(tries: int) -> int:
    """Return the milliseconds until a row is tried again that was refused so many times."""
    return min(LONGEST_BACKOFF, 1000 << tries)


Statement = tuple[str, tuple[Any, ...]]
"""SQL with ``?``, and its parameters."""
NOW: Final = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}
"""The time in milliseconds since 1970, by the clock of the database at this moment: not that of the transaction's begin."""
BYTES: Final = {"postgresql": "BYTEA", "sqlite": "BLOB"}
STORAGE: Final = {
    "postgresql": " WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)",
    "sqlite": "",
}
"""Each row is inserted and deleted, so the table is vacuumed by the number of dead rows."""
SETTLED_MS: Final = 2000
"""Age of a row after which a sweep sends it: before that, its sender does."""
SWEEP_ROWS: Final = 500
"""Rows that are read, sent and deleted together, at most: fewer if they are large."""
MOST_SWEPT: Final = 10_000
"""Rows of one sweep."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,50}(\.[A-Za-z_][A-Za-z0-9_]{0,50})?")


def check_dialect(name: str) -> str:
    """Return the name of a dialect that an outbox knows.

    Raises:
        UsageError: it is another one.
    """
    if name not in NOW:
        raise UsageError(f"an outbox needs PostgreSQL or SQLite, not {name!r}")
    return name


def check_table(name: object) -> str:
    """Return the name of a table as databases know one without quotes: in small letters.

    Raises:
        UsageError: it has other characters than letters, digits and underscores.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"table must be a name of letters, digits and underscores, 'schema.name' at most, not {name!r}"
        )
    return name.lower()


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements of the outbox whose table has this name, in one dialect."""

    dialect: str
    table: str

    @property
    def now(self) -> str:
        """The time in milliseconds, as an expression."""
        return NOW[self.dialect]

    def create(self) -> list[str]:
        """Return what creates the tables, unless they are there."""
        binary, storage = BYTES[self.dialect], STORAGE[self.dialect]
        return [
            f"CREATE TABLE IF NOT EXISTS {self.table} (id TEXT NOT NULL PRIMARY KEY, format INTEGER NOT NULL, queue TEXT NOT "
            f"NULL, payload {binary} NOT NULL, options {binary} NOT NULL, at BIGINT NOT NULL, tries INTEGER DEFAULT 0 NOT NULL, "
            f"retry_at BIGINT DEFAULT 0 NOT NULL, state TEXT DEFAULT '{WAITING}' NOT NULL, error TEXT){storage}",
            f"CREATE TABLE IF NOT EXISTS {self.table}_steps (queue TEXT NOT NULL, life TEXT NOT NULL, step TEXT NOT NULL, "
            f"at BIGINT NOT NULL, value {binary}, PRIMARY KEY (queue, life, step))",
        ]

    # Rows

    def insert(self, row: str, queue: str, payload: bytes, options: bytes) -> Statement:
        """Store a row."""
        columns = "id, format, queue, payload, options, at"
        return (
            f"INSERT INTO {self.table} ({columns}) VALUES (?, {FORMAT}, ?, ?, ?, {self.now})",  # noqa: S608
            (row, queue, payload, options),
        )

    def sizes(self, rows: Sequence[str]) -> Statement:
        """Read the ids of these rows, of those that are there, each with the bytes of its payload and its options."""
        select = f"SELECT id, LENGTH(payload) + LENGTH(options) FROM {self.table}"  # noqa: S608
        return f"{select} WHERE id IN ({_marks(rows)}) ORDER BY id", tuple(rows)

    def by_id(self, rows: Sequence[str]) -> Statement:
        """Read these rows, of those that are committed and wait."""
        select = f"SELECT id, queue, payload, options, {self.now} - at, tries FROM {self.table}"  # noqa: S608
        where = f"WHERE id IN ({_marks(rows)}) AND state = '{WAITING}' AND retry_at <= {self.now} ORDER BY id"
        return f"{select} {where}", tuple(rows)

    def to_sweep(self, only: Collection[str] | None, without: Collection[str], after: str = "") -> Statement:
        """Read the first rows that wait, that no sender holds any more, of these queues or of all, `without` some: id, queue,
        time of the insert in ms, tries. Those up to the id `after` were read before, and wait.

        A sweep asks once, and reads its pages by their ids: before it finds a row, the database may read a million dead ones.
        """
        where = (
            f"state = '{WAITING}' AND format <= {FORMAT} AND at <= {self.now} - {SETTLED_MS} AND retry_at <= {self.now}"
        )
        if only is not None:
            where += f" AND queue IN ({_marks(only)})"
        if without:
            where += f" AND queue NOT IN ({_marks(without)})"
        if after:
            where += " AND id > ?"
        select = f"SELECT id, queue, at, tries FROM {self.table} WHERE {where} ORDER BY id LIMIT {MOST_SWEPT}"  # noqa: S608
        return select, (*(only or ()), *without, *([after] if after else []))

    def lookup(self, row: str) -> Statement:
        """Read a row for a caller that knows its id: queue, payload, the time of its insert in ms, state, error."""
        return f"SELECT queue, payload, at, state, error FROM {self.table} WHERE id = ?", (row,)  # noqa: S608

    def delete(self, rows: Sequence[str]) -> Statement:
        """Delete these rows; return their ids."""
        return f"DELETE FROM {self.table} WHERE id IN ({_marks(rows)}) RETURNING id", tuple(rows)  # noqa: S608

    def refuse(self, row: Row, wait_ms: int, error: str, *, last: bool) -> Statement:
        """Note why the server has refused a row. It is tried again in so many ms, or never."""
        state = FAILED if last else WAITING
        change = f"tries = tries + 1, retry_at = {self.now} + {int(wait_ms)}, state = '{state}', error = ?"
        return f"UPDATE {self.table} SET {change} WHERE id = ?", (error, row.id)  # noqa: S608

    def defer(self, rows: Sequence[str], wait_ms: int, error: str) -> Statement:
        """Try these rows again in so many ms, which counts once at most: a row that was tried is not held."""
        tries = "CASE WHEN tries = 0 THEN 1 ELSE tries END"
        change = f"tries = {tries}, retry_at = {self.now} + {int(wait_ms)}, error = ?"
        return f"UPDATE {self.table} SET {change} WHERE id IN ({_marks(rows)})", (error, *rows)  # noqa: S608

    def hold(self, only: Collection[str] | None, since: int, before: int) -> Statement:
        """Hold the rows of these queues, or of all, that were never tried, and stored between these times in ms. Return one
        column for each.
        """
        where = f"state = '{WAITING}' AND format <= {FORMAT} AND tries = 0 AND at > ? AND at < ?"
        if only is not None:
            where += f" AND queue IN ({_marks(only)})"
        return f"UPDATE {self.table} SET state = '{HELD}' WHERE {where} RETURNING 1", (since, before, *(only or ()))  # noqa: S608

    def totals(self) -> Statement:
        """Count the rows of each state; with the age of the oldest in ms."""
        select = f"SELECT state, COUNT(*), {self.now} - MIN(at) FROM {self.table}"  # noqa: S608
        return f"{select} WHERE state <> '{IDENTITY}' GROUP BY state", ()

    def listed(self, state: str, limit: int) -> Statement:
        """Read rows for people: id, queue, age in ms, tries, error."""
        select = f"SELECT id, queue, {self.now} - at, tries, error FROM {self.table}"  # noqa: S608
        return f"{select} WHERE state = ? ORDER BY id LIMIT {int(limit)}", (state,)

    def again(self, state: str, rows: Sequence[str] | None) -> Statement:
        """Let rows that failed, or that are held, be sent: these, or all. Return their ids."""
        tries = 0 if state == FAILED else 1  # a row that was released is not held again
        change = f"UPDATE {self.table} SET state = '{WAITING}', tries = {tries}, retry_at = 1"  # noqa: S608
        chosen = "" if rows is None else f" AND id IN ({_marks(rows)})"
        return f"{change} WHERE state = '{state}'{chosen} RETURNING id", tuple(rows or ())

    def drop(self, rows: Sequence[str]) -> Statement:
        """Delete rows that failed or are held. Return their ids."""
        where = f"WHERE state IN ('{FAILED}', '{HELD}') AND id IN ({_marks(rows)})"
        return f"DELETE FROM {self.table} {where} RETURNING id", tuple(rows)  # noqa: S608

    # The outbox itself

    def identify(self, id: str) -> Statement:
        """Store the id of the outbox, unless it has one."""
        insert = f"INSERT INTO {self.table} (id, format, queue, payload, options, at, state) "
        values = f"VALUES ('{IDENTITY}', {FORMAT}, ?, ?, ?, {self.now}, '{IDENTITY}') ON CONFLICT DO NOTHING"
        return insert + values, (id, b"", b"")

    def identity(self) -> Statement:
        """Read the id of the outbox, and the time."""
        return f"SELECT queue, {self.now} FROM {self.table} WHERE id = '{IDENTITY}'", ()  # noqa: S608

    # Steps

    def take_step(self, queue: str, life: str, step: str) -> Statement:
        """Store that a step is done, unless it is; return it if it was not."""
        insert = f"INSERT INTO {self.table}_steps (queue, life, step, at) VALUES (?, ?, ?, {self.now})"  # noqa: S608
        return f"{insert} ON CONFLICT DO NOTHING RETURNING step", (queue, life, step)

    def keep_value(self, queue: str, life: str, step: str, value: bytes) -> Statement:
        """Store the value of a step."""
        update = f"UPDATE {self.table}_steps SET value = ? WHERE queue = ? AND life = ? AND step = ?"  # noqa: S608
        return update, (value, queue, life, step)

    def value(self, queue: str, life: str, step: str) -> Statement:
        """Read the value of a step."""
        select = f"SELECT value FROM {self.table}_steps WHERE queue = ? AND life = ? AND step = ?"  # noqa: S608
        return select, (queue, life, step)

    def drop_steps(self, older_ms: int) -> Statement:
        """Delete some of the steps that are older; return one column for each."""
        key = "(queue, life, step)"
        old = f"SELECT queue, life, step FROM {self.table}_steps WHERE at < {self.now} - {int(older_ms)} LIMIT {SWEEP_ROWS}"  # noqa: S608
        return f"DELETE FROM {self.table}_steps WHERE {key} IN ({old}) RETURNING 1", ()  # noqa: S608

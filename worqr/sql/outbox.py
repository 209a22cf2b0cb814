"""`Outbox`: calls that are stored in a transaction of your database, and become jobs once it has been committed.

`enqueue` inserts a row. After the commit, `worqr.sql.sender` reads it, dispatches the job and deletes the row. What a process
that died has left, a worker of the mesh sends. `Outbox.first` notes an effect in its own transaction. Not here:
the SQL (`statements`), the drivers (`connections`).
"""

from __future__ import annotations

import hashlib
import inspect
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast, get_type_hints

import msgspec

from worqr.client.job import Job
from worqr.client.producer import Call
from worqr.errors import UsageError
from worqr.inside import client_of, peers_of
from worqr.job_options import check_replicas
from worqr.keys import QueueKeys, check_name
from worqr.mesh import Mesh
from worqr.peer.run import Run, current_run
from worqr.policy import Failure, Retry
from worqr.sql.connections import DjangoPlace, Place, Rows, database_of, is_in_memory, place_of
from worqr.sql.sender import Sender
from worqr.sql.statements import (
    STORAGE,
    Statement,
    Statements,
    check_dialect,
    check_table,
    encode_row_options,
    new_row_id,
    queues_of,
)
from worqr.stored_values import whole
from worqr.validation import Seconds, check_text, seconds

if TYPE_CHECKING:
    from worqr.client.client import Client


R = TypeVar("R")

_REFUSED: Final = {
    "batch": "a batch adds its jobs itself: an outbox takes no call of one",
    "raise": 'if_exists="raise" of a call in an outbox has nobody to raise to: use if_exists="skip"',
}
_inside: ContextVar[list[str] | None] = ContextVar("rows of the block of transaction()", default=None)


class Promise(Generic[R]):
    """A call that becomes a job once the transaction has been committed.

    Attributes:
        id: The id of the row, 32 hexadecimal digits.
    """

    def __init__(self, outbox: Outbox, call: Call[R], id: str, job: str | None) -> None:
        self.id: str = id
        self._outbox = outbox
        self._call = call
        self._job = job

    def __repr__(self) -> str:
        return f"<Promise {self.id} of {self._call.queue!r}>"

    def cancel(self, session: Any) -> Any:
        """Delete the row, in the transaction that is open in `session`: nothing is sent if it was not sent yet.

        Args:
            session: As for ``outbox.enqueue``; await the result if it is an async one.

        Returns:
            True if the row was there. A sender that has read it before your commit sends it all the same, up to a minute later.
            False: its job exists already; cancel it with ``handle().cancel()``.
        """
        place = place_of(session)
        found = place.run(self._outbox.statements(place.dialect).delete([self.id]))
        return _was_there(found) if place.is_async else bool(found)

    def handle(self) -> Job[R]:
        """Return the handle of the job. It does no I/O. Until the row has been sent, there is no job of that id.

        Raises:
            UsageError: The call has a lane and no id, so that its job gets an id only when it is sent.
        """
        if self._job is None:
            raise UsageError(
                "the job of a call with a lane has an id only when it is sent: give one with .options(id=...)"
            )
        return self._outbox.job_of(self._call, self._job)


async def _was_there(found: Any) -> bool:
    return bool(await found)


class Outbox:
    """A transactional outbox: calls are rows in your database, and become jobs of the mesh when their transaction has committed.

    It does no I/O by itself. Workers of the mesh that import it sweep its table: they send what a process has left that died
    between its commit and its send.

    Attributes:
        alias: The alias of its database in Django; None if it is not Django's.

    Args:
        mesh: The mesh that runs the calls.
        database: Where the table is: an engine of SQLAlchemy, sync or async; Django's ``connection``, or
            ``connections["other"]``; or a function without parameters that returns a new connection of sqlite3, psycopg or
            asyncpg. The outbox uses connections of its own, in a thread.
        table: The name of the table, ``name`` or ``schema.name``. A second one, ``..._steps``, belongs to `first` and `step`.
        queues: The queues that rows may be sent to. Everyone who may insert into the table may start these functions, with any
            arguments. None: all.
        sweep: False: workers of this program do not sweep, because they have no access to the database.
        replicas: The number of replicas of the server that must have a job before its row is deleted, 0 to 100.

    Raises:
        UsageError: An argument is not valid, or the database is neither PostgreSQL nor SQLite.
    """

    def __init__(
        self,
        mesh: Mesh[Any],
        database: Any,
        *,
        table: str = "worqr_outbox",
        queues: Collection[str] | None = None,
        sweep: bool = True,
        replicas: int = 0,
    ) -> None:
        self._client: Client = client_of(mesh)
        self._table = check_table(table)
        self._queues = None if queues is None else _check_queues(queues)
        self.alias: str | None = getattr(database, "alias", None)
        self._raw: deque[str] = deque(maxlen=1000)
        self._blocks: dict[int, list[str]] = {}
        connect, in_memory = database_of(database), partial(is_in_memory, database)
        self._sender = Sender(self._client, connect, in_memory, self._table, self._queues, check_replicas(replicas))
        if sweep:
            peers_of(mesh).run_beside(self._sender.sweeping)

    def __repr__(self) -> str:
        return f"<Outbox {self._table!r}>"

    def is_of(self, mesh: Mesh[Any]) -> bool:
        """Return True if `mesh` runs the calls of this outbox."""
        return client_of(mesh) is self._client

    @property
    def sender(self) -> Sender:
        """The part that sends rows, for worqr's own commands and tests."""
        return self._sender

    # The table

    def statements(self, dialect: str) -> Statements:
        """Return the SQL of this outbox, for ``postgresql`` or ``sqlite``."""
        return Statements(check_dialect(dialect), self._table)

    def ddl(self, dialect: str) -> list[str]:
        """Return the statements that create the tables, for migrations that you write by hand.

        Args:
            dialect: ``postgresql`` or ``sqlite``.

        Raises:
            UsageError: It is another one.
        """
        return self.statements(dialect).create()

    def create_tables(self) -> None:
        """Create the tables unless they exist. It blocks: call it at the start of a program, or in a migration."""
        self._sender.create_tables()

    @cached_property
    def metadata(self) -> Any:
        """The tables as a ``MetaData`` of SQLAlchemy, for Alembic: ``target_metadata = [Base.metadata, outbox.metadata]``."""
        import sqlalchemy  # an extra

        sa = cast("Any", sqlalchemy)

        def column(name: str, kind: Any, **how: Any) -> Any:
            return sa.Column(name, kind, **{"nullable": False, **how})

        schema, _, name = self._table.rpartition(".")
        metadata = sa.MetaData(schema=schema or None)
        storage = dict(
            each.split(" = ") for each in STORAGE["postgresql"].removeprefix(" WITH (").rstrip(")").split(", ")
        )
        sa.Table(
            name,
            metadata,
            column("id", sa.Text, primary_key=True),
            column("format", sa.Integer),
            column("queue", sa.Text),
            column("payload", sa.LargeBinary),
            column("options", sa.LargeBinary),
            column("at", sa.BigInteger),
            column("tries", sa.Integer, server_default="0"),
            column("retry_at", sa.BigInteger, server_default="0"),
            column("state", sa.Text, server_default="waiting"),
            column("error", sa.Text, nullable=True),
            postgresql_with=storage,
        )
        keys = (column(each, sa.Text, primary_key=True) for each in ("queue", "life", "step"))
        value = column("value", sa.LargeBinary, nullable=True)
        sa.Table(f"{name}_steps", metadata, *keys, column("at", sa.BigInteger), value)
        return metadata

    @property
    def table(self) -> Any:
        """The table of the rows as a ``Table`` of SQLAlchemy."""
        return self.metadata.tables[self._table]

    # Calls

    def enqueue(self, session: Any, call: Call[R], *, atomic: bool = True) -> Any:
        """Store a call in the transaction that is open in `session`. It becomes a job after the commit, and never without one.

        The call is always a job: without an ``id=``, its id is that of the row. It is sent at once after the commit of a
        session of SQLAlchemy, of Django's ``atomic``, or of the block of `transaction`. Drivers have no such hook: there,
        call `send`, or it is sent by a worker up to 12 s later. Rows that become jobs keep no order among them.

        Args:
            session: A session or connection of SQLAlchemy, a connection of psycopg, asyncpg or sqlite3, or Django's
                ``connection``. For an async one, await the result.
            call: As in ``function.call(...)`` or ``function.options(...).call(...)``. `delay` and `expires` count from now.
                `wait` has no meaning: a row waits until its queue has room.
            atomic: False: accept a connection in autocommit, where the row is committed by itself.

        Returns:
            A `Promise`; or a coroutine that returns it, for an async `session`.

        Raises:
            UsageError: No transaction is open; it is no call; its options are of a batch or have ``if_exists="raise"``; its
                queue is not among `queues`; or the connection is of another alias of Django.
            PayloadTooLarge: The payload is larger than the mesh's `max_payload`.
        """
        return self.store(session, call, new_row_id(), atomic=atomic)

    def store(self, session: Any, call: Call[R], row: str, *, atomic: bool = True) -> Any:
        """Do as `enqueue`, with an id from `new_row_id` for the row: for callers that must know it before."""
        producer = self._client.producer
        options = producer.row_options(call)
        reason = "batch" if "batch" in options else str(options.get("exists"))
        if reason in _REFUSED:
            raise UsageError(_REFUSED[reason])
        if self._queues is not None and (others := queues_of(call.queue, options) - {*self._queues}):
            raise UsageError(f"{min(others)!r} is not among the queues of {self!r}: add it to Outbox(queues=...)")
        job = cast("str | None", options.get("id", None if "lane" in options else row))
        promise = Promise(self, call, row, job)
        if producer.note_row(call):
            return _done(promise) if place_of(session).is_async else promise
        place = self._place(session)
        insert = self.statements(place.dialect).insert(row, call.queue, call.task, encode_row_options(row, options))
        if place.is_async:
            return self._enqueue_async(place, insert, promise, atomic)
        if atomic:
            _check_open(place.autocommits())
        place.run(insert)
        self._noted(place, row)
        return promise

    async def _enqueue_async(self, place: Place, insert: Any, promise: Promise[R], atomic: bool) -> Promise[R]:
        found: Any = place.autocommits()
        is_open = not (await found if inspect.isawaitable(found) else found)
        if atomic:
            _check_open(not is_open)
        await place.run(insert)
        self._noted(place, promise.id)
        return promise

    def _place(self, session: Any) -> Place:
        place = place_of(session)
        if isinstance(place, DjangoPlace) and self.alias is not None and place.alias != self.alias:
            raise UsageError(f"{self!r} is in the database {self.alias!r}, and this connection is of {place.alias!r}")
        return place

    def _noted(self, place: Place, row: str) -> None:
        block = self._blocks.get(place.key)
        if block is None:
            if not place.when_committed(partial(self._sender.hand_over, (row,))):
                self._raw.append(row)
            block = self._block_around()
        if block is not None:
            block.append(row)

    def _block_around(self) -> list[str] | None:
        """Return the rows of the open block that this code is in. Its connection may be the caller's, in another wrapper."""
        inside = _inside.get()
        return inside if any(each is inside for each in list(self._blocks.values())) else None

    def send(self) -> None:
        """Send what this process has stored on connections of drivers, after their commit. It does not wait.

        Rows whose transaction has not been committed are left to the workers.
        """
        rows = list[str]()
        with suppress(IndexError):  # other threads may add rows, or send them
            while True:
                rows.append(self._raw.popleft())
        self._sender.hand_over(rows)

    def close(self, timeout: Seconds = 5) -> None:
        """Send what was committed and not sent yet, and close the outbox's connection to the database: at the end of a script.

        It blocks. A program that ends without it leaves its last rows to the workers. The outbox can be used again.

        Args:
            timeout: Seconds, at least 0, to wait at most.
        """
        self.send()
        self._sender.close(seconds(timeout, "timeout"))

    def transaction(self, connection: Any) -> _Block:
        """Return a block around a transaction of a connection, at whose end its calls are sent: ``async with
        outbox.transaction(connection):``, or ``with`` for a connection that is not async.

        In a transaction that is open before, it is a savepoint. Then its calls are sent as without a block.

        Args:
            connection: As for `enqueue`.

        Raises:
            UsageError: It is no connection.
            Retry: In a handler, and another connection writes to the SQLite database for longer than this one waits; or
                PostgreSQL wants the transaction again at its commit. It is not counted; let it pass.
        """
        return _Block(self._place(connection), self._blocks, self._sender.hand_over, self._noted)

    def job_of(self, call: Call[R], id: str) -> Job[R]:
        """Return a handle of the job of a call. This does no I/O."""
        client = self._client
        target = cast("Any", call)._target
        return Job(
            client,
            QueueKeys(client.settings.prefix, call.queue),
            id,
            results=None if target is None else target.results,
        )

    # Effects that happen once

    def first(self, session: Any, step: str = "") -> Any:
        """Return True if no run of this job has committed this step before. Call it in a handler, first of all in the
        transaction.

        It stores the queue, the job and the step in the same transaction as the effect. So the effect happens once, although
        the task may run twice: ``if await outbox.first(session, "charge"): ...``. If another run holds the step, it waits for
        it, at most 5 s.

        Args:
            session: As for `enqueue`; await the result for an async one. It must be of the database of the effect.
            step: A name, for handlers with several steps.

        Returns:
            True or False; or a coroutine that returns it, for an async `session`.

        Raises:
            UsageError: Outside a handler, in a plain task, in a run with a list of calls, in a savepoint, or in autocommit.
            TooOld: The job was dispatched more than 29 days ago, and its steps may have been forgotten.
            Retry: The step is locked, or the database wants the transaction again. It is not counted; let it pass.
        """
        place = self._place(session)
        return first(place, self.statements(place.dialect), step)

    def step(self, session: Any, name: str, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function unless an earlier run of this job has committed this step: then return what it returned then.

        The result is stored as JSON in the transaction of the effect, and decoded by the function's return annotation.

        Args:
            session: As for `first`.
            name: The name of the step.
            fn: A function, which is called in the transaction; with an async session, it may be async.
            *args: Passed to it.
            **kwargs: Passed to it.

        Returns:
            What the function returned; or a coroutine that returns it, for an async `session`.

        Raises:
            UsageError: As `first`; JSON does not know the result; or the step was committed without one, as by `first`.
            TooOld: As `first`.
            Retry: As `first`.
        """
        place = self._place(session)
        return kept_step(place, self.statements(place.dialect), name, partial(fn, *args, **kwargs), fn)


def _check_queues(given: Collection[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not given:
        raise UsageError(
            f"queues must be a list of names, queues=['shop.confirm'], or None for all queues, not {given!r}"
        )
    return tuple(check_name(each) for each in given)


async def _done(promise: Promise[R]) -> Promise[R]:
    return promise


def _check_open(autocommits: bool) -> None:
    if autocommits:
        raise UsageError(
            "no transaction is open on this connection, so the row would be committed without your changes: begin one, use "
            "`async with outbox.transaction(connection):`, or pass atomic=False if that is what you want"
        )


class _Block:
    """A transaction of a connection; its rows are sent after the commit."""

    def __init__(
        self,
        place: Place,
        blocks: dict[int, list[str]],
        hand_over: Callable[[Sequence[str]], None],
        note: Callable[[Place, str], None],
    ) -> None:
        self._place = place
        self._blocks = blocks
        self._hand_over = hand_over
        self._note = note
        self._is_savepoint = False
        self._outer: list[str] | None = None
        self._rows: list[str] = []
        self._block: Any = None
        self._token: Any = None

    def _begin(self) -> Any:
        self._is_savepoint = self._place.in_transaction()
        self._block = self._place.block()
        return self._block

    def _begun(self) -> None:
        self._outer = self._blocks.get(self._place.key)
        self._blocks[self._place.key] = self._rows
        self._token = _inside.set(self._rows)

    def _end(self, committed: bool) -> None:
        with suppress(ValueError):  # frameworks may end a block in another context than they begin it
            _inside.reset(self._token)
        if self._outer is None:
            del self._blocks[self._place.key]
        else:
            self._blocks[self._place.key] = self._outer
        if committed and self._outer is not None:
            self._outer.extend(self._rows)  # a savepoint
        elif committed and self._is_savepoint:
            for row in self._rows:
                self._note(self._place, row)
        elif committed:
            self._hand_over(self._rows)

    def __enter__(self) -> None:
        if self._place.is_async:
            raise UsageError("this connection is async: write `async with outbox.transaction(connection):`")

        with retried():
            self._begin().__enter__()
        self._begun()

    def __exit__(self, *error: Any) -> bool | None:
        committed = False
        try:
            with retried():
                swallows = self._block.__exit__(*error)  # as that of psycopg its Rollback
            committed = error[0] is None
        finally:
            self._end(committed)
        return bool(swallows)

    async def __aenter__(self) -> None:
        if not self._place.is_async:
            raise UsageError("this connection is not async: write `with outbox.transaction(connection):`")
        await self._begin().__aenter__()
        self._begun()

    async def __aexit__(self, *error: Any) -> bool | None:
        committed = False
        try:
            with retried():
                swallows = await self._block.__aexit__(*error)
            committed = error[0] is None
        finally:
            self._end(committed)
        return bool(swallows)


# Effects in a database that happen once: whether a step of a job was committed, in a row of the transaction of the effect
# itself.
#
# The key is the queue, the life of the job, and the step. A life is the number of the dispatch that created the job and the
# SHA-1 of its payload: retries and runs after a crash keep both, and a later job with the same id has another number.


KEPT_DAYS: Final = 29
"""Days after its dispatch in which a job may take steps. They are deleted a day later: clocks differ."""
LOCKED_DELAY: Final = 5.0
CONFLICT_DELAY: Final = 1.0
_LOCKED, _CONFLICT = ("55P03",), ("40001", "40P01")
_TIMEOUT: Final[Statement] = ("SELECT set_config('lock_timeout', ?, true)", ("5s",))
_OLD_TIMEOUT: Final[Statement] = ("SELECT current_setting('lock_timeout')", ())


class TooOld(Failure):
    """The job was dispatched more than 29 days ago, and its steps may have been forgotten. It moves to the dead-letter queue,
    and its effect is not repeated.
    """

    __module__ = "worqr.sql"


def life_of(run: Run[Any]) -> str:
    """Return what names the job of a run: the same in each of its runs, and in no other job.

    Raises:
        UsageError: it is a plain task, or the run is of several jobs.
        TooOld: its steps may have been forgotten.
    """
    if run.is_list:
        raise UsageError(
            "a run with a list of calls is of several jobs, and takes no steps: declare the function without batch_size"
        )
    number = None if run.record is None else whole(run.record.get(b"first"), 0)
    if not number:
        raise UsageError(
            "only a job can take steps in a database, and this is a plain task: dispatch it, or enqueue it by an outbox"
        )
    days = (time.time() - number / 1e6) / 86400
    if days > KEPT_DAYS:
        raise TooOld(f"the job was dispatched {days:.0f} days ago, and its steps are kept for {KEPT_DAYS}")
    return f"{number}-{hashlib.sha1(run.task, usedforsecurity=False).hexdigest()[:16]}"


def _key(place: Place, step: str) -> tuple[str, str, str]:
    """Return the key of a step of the current run.

    Raises:
        UsageError: there is none, or the place is inside a savepoint.
    """
    try:
        run: Run[Any] = current_run.get()
    except LookupError:
        raise UsageError(
            "outbox.first() and outbox.step() are for code inside a handler, which a worker runs"
        ) from None
    if place.in_savepoint():
        raise UsageError(
            "outbox.first() must be outside savepoints: if one is rolled back, the step would be done without its effect"
        )
    return run.queue, life_of(run), check_text(step, "step")


@contextmanager
def retried() -> Generator[None]:
    """Raise Retry, uncounted, in a handler if another transaction holds a lock, or if the database wants this one again."""
    try:
        yield
    except Exception as error:
        if current_run.get(None) is None:
            raise
        cause = getattr(error, "orig", None) or error
        cause = (
            getattr(cause, "__cause__", None) if getattr(cause, "sqlstate", None) is None and cause.__cause__ else cause
        )
        state = str(getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None))
        if state in _LOCKED or re.search("database (table |schema )?is locked", str(error)):
            raise Retry("another transaction holds a lock", delay=LOCKED_DELAY, counted=False) from error
        if state in _CONFLICT:
            raise Retry("the database wants this transaction again", delay=CONFLICT_DELAY, counted=False) from error
        raise


def _check(autocommits: bool) -> None:
    if autocommits:
        raise UsageError(
            "no transaction is open on this connection: begin one, so that step and effect are committed together"
        )


def first(place: Place, sql: Statements, step: str) -> Any:
    """Take a step; see ``Outbox.first``."""
    key = _key(place, step)
    if place.is_async:
        return _first_async(place, sql, key)
    _check(place.autocommits())
    with retried():
        if place.dialect != "postgresql":
            return bool(place.run(sql.take_step(*key)))
        [(old,)] = place.run(_OLD_TIMEOUT)
        place.run(_TIMEOUT)
        found = place.run(sql.take_step(*key))
        place.run((_TIMEOUT[0], (old,)))
    return bool(found)


async def _first_async(place: Place, sql: Statements, key: tuple[str, str, str]) -> bool:
    autocommits: Any = place.autocommits()
    _check(await autocommits if inspect.isawaitable(autocommits) else autocommits)
    with retried():
        if place.dialect != "postgresql":
            return bool(await place.run(sql.take_step(*key)))
        [(old,)] = await place.run(_OLD_TIMEOUT)
        await place.run(_TIMEOUT)
        found = await place.run(sql.take_step(*key))
        await place.run((_TIMEOUT[0], (old,)))
    return bool(found)


def _decoder(fn: Callable[..., Any]) -> Callable[[bytes], Any]:
    try:
        kind = get_type_hints(fn).get("return", Any)
    except (NameError, TypeError) as error:
        raise UsageError(f"the return annotation of {fn!r} cannot be read: {error}") from error
    return msgspec.json.Decoder(type(None) if kind is None else kind).decode


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"JSON cannot carry the result of the step: {error}") from error


def kept_step(place: Place, sql: Statements, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
    """Call a function once, and keep its result; see ``Outbox.step``."""
    key, decode = _key(place, name), _decoder(fn)
    if place.is_async:
        return _kept_async(place, sql, key, call, decode)
    if first(place, sql, name):
        value = _encoded(call())
        place.run(sql.keep_value(*key, value))
    else:
        value = _value(name, place.run(sql.value(*key)))
    return decode(value)


async def _kept_async(
    place: Place, sql: Statements, key: tuple[str, str, str], call: Callable[[], Any], decode: Callable[[bytes], Any]
) -> Any:
    if await _first_async(place, sql, key):
        found = call()
        value = _encoded(await found if inspect.isawaitable(found) else found)
        await place.run(sql.keep_value(*key, value))
    else:
        value = _value(key[2], await place.run(sql.value(*key)))
    return decode(value)


def _value(name: str, found: Rows) -> bytes:
    """Return the stored result of a step.

    Raises:
        UsageError: it has none.
    """
    [(value,)] = found
    if value is None:
        raise UsageError(
            f"the step {name!r} has no result: outbox.first() has the same name, which must differ; or its function has raised, "
            "and the transaction was committed all the same: let errors pass, so that it is rolled back"
        )
    return bytes(value)

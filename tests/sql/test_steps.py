"""Effects that happen once: a step is committed with its effect, runs that come later skip it, runs beside it wait for it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm

import worqr
from tests.sql.test_outbox import Connect, NewOutbox
from tests.support.patience import PATIENCE
from tests.support.postgres import Postgres
from worqr.errors import UsageError
from worqr.peer.run import current_run
from worqr.sql import Outbox, TooOld
from worqr.sql.sender import Passes
from worqr.sql.statements import SWEEP_ROWS, Statements
from worqr.testing import context

pytestmark = [pytest.mark.one_server, pytest.mark.leaves("*")]


class FakeRun:
    """A run of a job, as far as a step looks at it."""

    def __init__(self, first: int | None = None, task: bytes = b"{}", queue: str = "charge") -> None:
        number = int(time.time() * 1e6) if first is None else first
        self.record: dict[bytes, bytes] | None = {b"first": str(number).encode()} if number else None
        self.task = task
        self.queue = queue
        self.is_list = False


def in_run(run: FakeRun, act: Callable[[], Any]) -> Any:
    token = current_run.set(run)  # type: ignore[arg-type]
    try:
        return act()
    finally:
        current_run.reset(token)


def test_connections_whose_rows_are_dicts(new_outbox: NewOutbox, cluster: Postgres, database: str) -> None:
    def connect() -> Any:
        return psycopg.connect(cluster.dsn(database), row_factory=psycopg.rows.dict_row)

    outbox = new_outbox(connect)
    assert outbox.sender.once(Passes.sweep) == 0
    run = FakeRun()
    with connect() as connection:
        assert in_run(run, lambda: outbox.first(connection))
        assert in_run(run, lambda: outbox.step(connection, "number", lambda: 7)) == 7
        assert in_run(run, lambda: outbox.step(connection, "number", lambda: 8)) == 7


def test_sqlite_connections_whose_rows_are_dicts(new_outbox: NewOutbox, file: Connect) -> None:
    def connect() -> sqlite3.Connection:
        connection = file()
        connection.row_factory = lambda cursor, row: {
            each[0]: at for each, at in zip(cursor.description, row, strict=True)
        }
        return connection

    outbox, connection, run = new_outbox(connect), connect(), FakeRun()
    assert outbox.sender.once(Passes.sweep) == 0
    assert in_run(run, lambda: outbox.step(connection, "number", lambda: 7)) == 7
    assert in_run(run, lambda: outbox.step(connection, "number", lambda: 8)) == 7
    connection.close()


@pytest.mark.parametrize("crash", [False, True])
def test_a_run_that_comes_again_skips_what_was_committed_and_repeats_what_was_not(
    new_outbox: NewOutbox, file: Connect, crash: bool
) -> None:
    outbox, run, connection = new_outbox(file), FakeRun(), file()
    assert in_run(run, lambda: outbox.first(connection, "a"))
    connection.rollback() if crash else connection.commit()
    assert in_run(run, lambda: outbox.first(connection, "a")) is crash
    assert in_run(run, lambda: outbox.first(connection, "b"))
    connection.close()


def test_another_life_of_the_same_id_is_another_job(new_outbox: NewOutbox, file: Connect) -> None:
    """An id that is used again, a firing of a schedule, and a job whose payload was replaced."""
    outbox, now, connection = new_outbox(file), int(time.time() * 1e6), file()
    for run in (FakeRun(now), FakeRun(now + 1), FakeRun(now, b"other"), FakeRun(now, queue="other")):
        assert in_run(run, lambda: outbox.first(connection))
        assert not in_run(run, lambda: outbox.first(connection))
    connection.close()


def test_where_a_step_is_refused(new_outbox: NewOutbox, file: Connect) -> None:
    outbox, connection = new_outbox(file), file()
    with pytest.raises(UsageError, match="inside a handler"):
        outbox.first(connection)
    with pytest.raises(UsageError, match="plain task"):
        in_run(FakeRun(0), lambda: outbox.first(connection))
    with context(calls=2), pytest.raises(UsageError, match="without batch_size"):
        outbox.first(connection)
    old = int((time.time() - 30 * 86400) * 1e6)
    with pytest.raises(TooOld, match="30 days ago"):
        in_run(FakeRun(old), lambda: outbox.first(connection))
    assert issubclass(TooOld, worqr.Failure)
    connection.isolation_level = None
    with pytest.raises(UsageError, match="no transaction is open"):
        in_run(FakeRun(), lambda: outbox.first(connection))
    connection.close()
    engine = sa.create_engine("sqlite://")
    with orm.Session(engine) as session, session.begin_nested():
        with pytest.raises(UsageError, match="outside savepoints"):
            in_run(FakeRun(), lambda: Outbox(worqr.Mesh(), engine, sweep=False).first(session))
    engine.dispose()


def test_a_step_returns_in_each_run_what_it_has_returned_first(new_outbox: NewOutbox, file: Connect) -> None:
    outbox, run, connection, called = new_outbox(file), FakeRun(), file(), []

    def charge(cents: int) -> dict[str, int]:
        called.append(cents)
        return {"charged": cents}

    for cents in (7, 8):
        assert in_run(run, lambda cents=cents: outbox.step(connection, "charge", charge, cents)) == {"charged": 7}
        connection.commit()
    assert called == [7]

    def odd() -> object:
        return object()

    with pytest.raises(UsageError, match="JSON"):
        in_run(run, lambda: outbox.step(connection, "odd", odd))
    connection.close()


def test_a_step_without_a_result_is_refused(new_outbox: NewOutbox, file: Connect) -> None:
    """Of `first` with the same name, or of a function whose error the handler has caught."""
    outbox, run, connection = new_outbox(file), FakeRun(), file()
    assert in_run(run, lambda: outbox.first(connection, "charge"))
    with pytest.raises(UsageError, match="'charge' has no result"):
        in_run(run, lambda: outbox.step(connection, "charge", dict))

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_run(run, lambda: outbox.step(connection, "fails", fails))
    connection.commit()
    with pytest.raises(UsageError, match="'fails' has no result"):
        in_run(run, lambda: outbox.step(connection, "fails", fails))
    assert in_run(run, lambda: outbox.step(connection, "none", lambda: None)) is None
    assert in_run(run, lambda: outbox.step(connection, "none", lambda: 1)) is None
    connection.close()


def test_steps_are_forgotten_after_thirty_days_a_few_in_each_transaction(
    new_outbox: NewOutbox, file: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, connection = new_outbox(file), file()
    statements: list[str] = []
    in_run(FakeRun(), lambda: outbox.first(connection))
    old = [("charge", str(n), "", int(time.time() * 1000) - 31 * 86_400_000) for n in range(2 * SWEEP_ROWS + 1)]
    connection.executemany("INSERT INTO worqr_outbox_steps (queue, life, step, at) VALUES (?, ?, ?, ?)", old)
    connection.commit()

    def noted(passes: Passes) -> None:
        monkeypatch.setattr("worqr.sql.sender.STEPS_WITHIN", PATIENCE)
        passes._database._connection.set_trace_callback(statements.append)  # type: ignore[attr-defined]
        passes.sweep()

    outbox.sender.once(noted)
    assert connection.execute("SELECT COUNT(*) FROM worqr_outbox_steps").fetchone() == (1,)
    assert len([each for each in statements if each.startswith("DELETE FROM worqr_outbox_steps")]) == 3
    connection.close()


def test_a_writer_that_holds_the_database_is_a_retry_that_counts_nothing(new_outbox: NewOutbox, file: Connect) -> None:
    """In SQLite, another run that hangs in its transaction keeps all writers out."""
    outbox, zombie, successor = new_outbox(file), file(), file()
    successor.execute("PRAGMA busy_timeout = 0")

    def begin() -> None:
        with outbox.transaction(successor):
            raise AssertionError("it has not begun")

    with outbox.transaction(zombie):
        with pytest.raises(worqr.Retry) as found:
            in_run(FakeRun(), begin)
        assert not found.value.counted
        with pytest.raises(sqlite3.OperationalError):
            begin()
    zombie.close()
    successor.close()


def test_a_table_that_is_locked_in_a_shared_cache_is_a_retry_too(new_outbox: NewOutbox, file: Connect) -> None:
    """As in the databases in memory of Django's tests."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect("file:steps?mode=memory&cache=shared", uri=True, timeout=0)

    outbox, keeper, zombie, successor, run = new_outbox(file), connect(), connect(), connect(), FakeRun()
    for sql in outbox.ddl("sqlite"):
        keeper.execute(sql)
    assert in_run(run, lambda: outbox.first(zombie))
    with pytest.raises(worqr.Retry) as found:
        in_run(run, lambda: outbox.first(successor))
    assert not found.value.counted
    for each in (zombie, successor, keeper):
        each.close()


# PostgreSQL


def test_a_second_run_waits_for_the_first_and_gives_up_uncounted(
    new_outbox: NewOutbox, cluster: Postgres, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.sql.outbox._TIMEOUT", ("SELECT set_config('lock_timeout', ?, true)", ("10ms",)))
    outbox, run = new_outbox(lambda: psycopg.connect(cluster.dsn(database))), FakeRun()
    with psycopg.connect(cluster.dsn(database)) as zombie, psycopg.connect(cluster.dsn(database)) as successor:
        successor.execute("SET lock_timeout = '7s'")
        assert in_run(run, lambda: outbox.first(zombie))
        with pytest.raises(worqr.Retry) as found:
            in_run(run, lambda: outbox.first(successor))
        assert not found.value.counted
        successor.rollback()
        zombie.commit()
        successor.execute("SET lock_timeout = '7s'")
        assert not in_run(run, lambda: outbox.first(successor))
        assert successor.execute("SHOW lock_timeout").fetchone() == ("7s",)


def test_a_serialization_failure_is_a_retry_that_counts_nothing(
    new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    outbox, run = new_outbox(lambda: psycopg.connect(cluster.dsn(database))), FakeRun()
    strict = "-c default_transaction_isolation=repeatable\\ read"
    with (
        psycopg.connect(cluster.dsn(database), options=strict) as late,
        psycopg.connect(cluster.dsn(database)) as other,
    ):
        late.execute("SELECT 1")
        assert in_run(run, lambda: outbox.first(other))
        other.commit()
        with pytest.raises(worqr.Retry) as found:
            in_run(run, lambda: outbox.first(late))
        assert not found.value.counted


def test_a_serialization_failure_at_the_commit_of_a_block_is_a_retry_that_counts_nothing(
    new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    def connect() -> Any:
        return psycopg.connect(cluster.dsn(database), options="-c default_transaction_isolation=serializable")

    def count_up(connection: Any) -> None:
        connection.execute("INSERT INTO numbers SELECT COUNT(*) FROM numbers")

    outbox, late, other = new_outbox(connect), connect(), connect()
    other.execute("CREATE TABLE numbers (n INTEGER)")
    other.commit()

    def beside() -> None:
        with outbox.transaction(late):
            count_up(late)
            count_up(other)
            other.commit()

    with pytest.raises(worqr.Retry) as found:
        in_run(FakeRun(), beside)
    assert not found.value.counted
    with pytest.raises(psycopg.errors.SerializationFailure):
        beside()
    late.close()
    other.close()


def test_steps_with_asyncpg_and_its_errors(new_outbox: NewOutbox, cluster: Postgres, database: str) -> None:
    def connect() -> Any:
        return asyncpg.connect(host=str(cluster.folder), port=cluster.port, user="postgres", database=database)

    async def seven() -> int:
        return 7

    async def main() -> None:
        outbox, connection = new_outbox(connect), await connect()
        current_run.set(FakeRun())  # type: ignore[arg-type]
        async with connection.transaction():
            assert await outbox.first(connection, "a")
            assert not await outbox.first(connection, "a")
            assert await outbox.step(connection, "b", seven) == 7
            assert await outbox.step(connection, "b", seven) == 7
        await connection.close()
        await asyncio.to_thread(outbox.close, PATIENCE)

    asyncio.run(main())


# In a worker


def test_a_job_that_is_retried_does_its_effect_once(
    mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect
) -> None:
    outbox, runs = new_outbox(file), []

    @mesh.task(name="charge", result_ttl=60, retry=worqr.RetryPolicy(min_backoff=0.01, max_backoff=0.01))
    def charge() -> int:
        runs.append(1)
        connection = file()
        with outbox.transaction(connection):
            if outbox.first(connection):
                connection.execute("INSERT INTO effects VALUES (1)")
        connection.close()
        if len(runs) < 3:
            raise RuntimeError("after the commit")
        return len(runs)

    connection = file()
    connection.execute("CREATE TABLE effects (n INTEGER)")
    with outbox.transaction(connection):
        promise = outbox.enqueue(connection, charge.call())
    with mesh.join_in_thread():
        outbox.close(PATIENCE)
        assert worqr.sync(promise.handle().result, PATIENCE) == 3
        again = worqr.sync(charge.options(id=promise.handle().id).dispatch)
        assert worqr.sync(again.result, PATIENCE) == 4
    assert connection.execute("SELECT COUNT(*) FROM effects").fetchone() == (2,)
    connection.close()


def test_each_firing_of_a_schedule_does_its_effect(mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect) -> None:
    """All of them have one id."""
    outbox, ran = new_outbox(file), threading.Semaphore(0)
    connection = file()
    connection.execute("CREATE TABLE effects (id TEXT)")
    connection.commit()

    @mesh.task(name="beat")
    def beat() -> None:
        own = file()
        with outbox.transaction(own):
            if outbox.first(own):
                own.execute("INSERT INTO effects VALUES (?)", (worqr.current().id,))
        own.close()
        ran.release()

    mesh.every(1, beat.call(), name="heart")
    with mesh.join_in_thread():
        assert all(ran.acquire(timeout=PATIENCE) for _ in range(2))
    found = connection.execute("SELECT id FROM effects").fetchall()
    assert len(found) >= 2
    assert {*found} == {("cron:heart",)}
    connection.close()


def test_a_plain_context_of_a_test_has_no_job(new_outbox: NewOutbox, file: Connect) -> None:
    outbox, connection = new_outbox(file), file()
    with context(), pytest.raises(UsageError, match="plain task"):
        outbox.first(connection)
    connection.close()


def test_the_statements_have_no_payload_in_their_text() -> None:
    for dialect in ("postgresql", "sqlite"):
        sql, parameters = Statements(dialect, "t").insert("0a" * 16, "q", b"secret", b"{}")
        assert "secret" not in sql
        assert b"secret" in parameters

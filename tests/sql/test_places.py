"""An outbox with PostgreSQL, and with every library: SQLAlchemy, sync and async, psycopg, asyncpg and Django."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, LiteralString

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import worqr
from tests.sql.test_outbox import NewOutbox, waiting
from tests.support.children import ROOT
from tests.support.patience import PATIENCE, wait_until
from tests.support.postgres import Postgres, program
from worqr.errors import UsageError
from worqr.sql import Outbox
from worqr.sql.sender import SHARE, Passes
from worqr.sql.statements import SWEEP_ROWS

pytestmark = [pytest.mark.one_server, pytest.mark.leaves("*")]

DRIVERS = ("sqlite", "psycopg")
ASYNC_DRIVERS = ("aiosqlite", "asyncpg", "psycopg")


@pytest.fixture
def confirm(mesh: worqr.Mesh[Any]) -> Any:
    @mesh.task(name="confirm")
    def confirm(order: int) -> None: ...

    return confirm


def url_of(driver: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if "sqlite" in driver:
        return f"sqlite+{'pysqlite' if driver == 'sqlite' else driver}:///{tmp_path / 'app.db'}"
    cluster: Postgres = request.getfixturevalue("cluster")
    return cluster.url(driver, request.getfixturevalue("database"))


@pytest.fixture(params=DRIVERS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(url_of(request.param, request, tmp_path))
    if request.param == "sqlite":

        @sa.event.listens_for(made, "connect")
        def connected(connection: Any, _: object) -> None:
            connection.isolation_level = None

        @sa.event.listens_for(made, "begin")
        def begun(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

    yield made
    made.dispose()


def left(outbox: Outbox) -> int:
    return sum(number for _, number, _ in outbox.sender.ask(lambda sql: sql.totals()))


# SQLAlchemy


def test_the_commit_of_a_session_sends_at_once(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, engine: sa.Engine
) -> None:
    outbox = new_outbox(engine)
    with orm.Session(engine) as session, session.begin():
        promise = outbox.enqueue(session, confirm.call(1))
    outbox.close(PATIENCE)
    assert (waiting(mesh), left(outbox)) == (1, 0)
    assert worqr.sync(promise.handle().status).state == "waiting"


def test_a_savepoint_that_is_released_sends_nothing_before_the_commit(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, engine: sa.Engine
) -> None:
    outbox = new_outbox(engine)
    with orm.Session(engine) as session:
        with session.begin_nested():
            outbox.enqueue(session, confirm.call(1))
        assert outbox.sender._thread is None
        session.rollback()
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            outbox.enqueue(session, confirm.call(2))
            raise ZeroDivisionError
        with session.begin_nested():
            outbox.enqueue(session, confirm.call(3))
        session.commit()
    outbox.close(PATIENCE)
    assert (waiting(mesh), left(outbox)) == (1, 0)


def test_a_session_with_an_engine_for_each_model_names_the_remedy(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, engine: sa.Engine
) -> None:
    outbox = new_outbox(engine)
    with orm.Session(binds={}) as session, pytest.raises(UsageError, match=r"pass Session\(bind=engine"):
        outbox.enqueue(session, confirm.call(1))


@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only", "control_fully"])
def test_a_session_that_joins_a_transaction_does_not_decide_its_commit(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, engine: sa.Engine, mode: Any
) -> None:
    outbox = new_outbox(engine)
    with engine.connect() as connection:
        transaction = connection.begin()
        with orm.Session(connection, join_transaction_mode=mode) as session:
            outbox.enqueue(session, confirm.call(1))
            session.commit()
        if transaction.is_active:
            transaction.rollback()
    outbox.close(PATIENCE)
    assert waiting(mesh) == (1 if mode == "control_fully" else 0)


def test_a_commit_that_fails_sends_nothing(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, engine: sa.Engine
) -> None:
    """A deferred constraint fails at the commit itself."""
    outbox = new_outbox(engine)
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA foreign_keys = ON")
        connection.exec_driver_sql("CREATE TABLE a (id INTEGER PRIMARY KEY)")
        connection.exec_driver_sql("CREATE TABLE b (a INTEGER REFERENCES a (id) DEFERRABLE INITIALLY DEFERRED)")
    with engine.connect() as raw, orm.Session(raw) as session:
        if engine.dialect.name == "sqlite":
            raw.connection.execute("PRAGMA foreign_keys = ON")  # type: ignore[attr-defined]
        outbox.enqueue(session, confirm.call(1))
        session.execute(sa.text("INSERT INTO b VALUES (7)"))
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
    outbox.close(PATIENCE)
    assert (waiting(mesh), left(outbox)) == (0, 0)


def test_a_connection_is_sent_by_its_block_or_by_send(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, engine: sa.Engine
) -> None:
    outbox = new_outbox(engine)
    with engine.begin() as connection:
        outbox.enqueue(connection, confirm.call(1))
    outbox.send()
    with engine.connect() as connection, outbox.transaction(connection):
        outbox.enqueue(connection, confirm.call(2))
    outbox.close(PATIENCE)
    assert (waiting(mesh), left(outbox)) == (2, 0)


def test_a_database_that_only_one_connection_sees_is_refused(mesh: worqr.Mesh[Any], confirm: Any) -> None:
    """With `StaticPool`, the sender would commit the transactions of the application; with one cache in memory, its statements
    would make those of the application fail.
    """
    given = {"poolclass": sa.StaticPool, "connect_args": {"check_same_thread": False}}
    pool = {"poolclass": sa.QueuePool, "connect_args": {"check_same_thread": False}}
    shared = "file:places?mode=memory&cache=shared"
    for url, options in (("sqlite://", {}), ("sqlite://", given), (f"sqlite:///{shared}&uri=true", pool)):
        engine = sa.create_engine(url, **options)  # type: ignore[arg-type]
        outbox = Outbox(mesh, engine, sweep=False)
        with pytest.raises(UsageError, match="a file"):
            outbox.create_tables()
        outbox.metadata.create_all(engine)
        with orm.Session(engine) as session:
            outbox.enqueue(session, confirm.call(1))
            with pytest.raises(UsageError, match="a file"):
                outbox.sender.once(Passes.sweep)
            session.rollback()
            assert session.execute(sa.select(sa.func.count()).select_from(outbox.table)).scalar() == 0
        engine.dispose()
    for another in (
        create_async_engine("sqlite+aiosqlite://"),
        lambda: sqlite3.connect(":memory:"),
        lambda: sqlite3.connect(shared, uri=True),
    ):
        with pytest.raises(UsageError, match="a file"):
            Outbox(mesh, another, sweep=False).create_tables()


def test_a_database_whose_transactions_its_sender_would_not_commit_is_refused(
    mesh: worqr.Mesh[Any], engine: sa.Engine
) -> None:
    """It deletes rows in transactions of its own, and a session begins one that somebody else commits."""
    makers = orm.sessionmaker(engine), orm.scoped_session(orm.sessionmaker(engine)), async_sessionmaker()
    connection = sqlite3.connect(":memory:")
    for given in (*makers, connection):
        with pytest.raises(UsageError, match="needs its database: an engine"):
            Outbox(mesh, given)
    connection.close()
    for connect in (engine.connect, lambda: orm.Session(engine)):
        with pytest.raises(UsageError, match="give the engine itself"):
            Outbox(mesh, connect, sweep=False).create_tables()


def test_an_outbox_may_have_thousands_of_queues(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, engine: sa.Engine
) -> None:
    outbox = new_outbox(engine, queues=["confirm", *map("q{}".format, range(2000))])
    with engine.begin() as connection:
        outbox.enqueue(connection, confirm.call(1))
        connection.exec_driver_sql("UPDATE worqr_outbox SET at = at - 3000")
    assert outbox.sender.once(Passes.sweep) == 1


def test_an_engine_in_autocommit_is_refused(confirm: Any, new_outbox: NewOutbox, engine: sa.Engine) -> None:
    outbox = new_outbox(engine)
    if engine.dialect.name == "sqlite":
        pytest.skip("this engine begins its transactions itself")
    with orm.Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        with pytest.raises(UsageError, match="no transaction is open"):
            outbox.enqueue(session, confirm.call(1))
    assert left(outbox) == 0


def test_the_tables_are_the_same_from_alembic_and_from_create_tables(
    new_outbox: NewOutbox, mesh: worqr.Mesh[Any], engine: sa.Engine
) -> None:
    made = new_outbox(engine)
    declared = Outbox(mesh, engine, table="Other_Outbox", sweep=False)  # databases know no capitals without quotes
    declared.metadata.create_all(engine)
    assert declared.table.name == "other_outbox"
    assert left(declared) == 0

    def columns(table: str) -> list[Any]:
        found = sa.inspect(engine).get_columns(table)
        return [(each["name"], str(each["type"]), each["nullable"]) for each in found]

    for name in ("", "_steps"):
        assert columns(f"worqr_outbox{name}") == columns(f"other_outbox{name}")
    made.create_tables()


SHOP = """
import sqlalchemy as sa, worqr
from sqlalchemy import orm
from worqr.sql import Outbox
engine = sa.create_engine({url!r})
outbox = Outbox(worqr.Mesh(), engine)
class Base(orm.DeclarativeBase): ...
class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
"""


@pytest.mark.parametrize("driver", DRIVERS)
def test_alembic_creates_the_tables_finds_no_difference_and_drops_nothing(
    driver: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = url_of(driver, request, tmp_path)

    def run(*command: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def alembic(*words: str, code: int = 0) -> str:
        return run("-m", "alembic", *words, code=code)

    (tmp_path / "shop.py").write_text(SHOP.format(url=url))
    alembic("init", "migrations")
    env, ini = tmp_path / "migrations" / "env.py", tmp_path / "alembic.ini"
    with_outbox = env.read_text().replace(
        "target_metadata = None", "import shop; target_metadata = [shop.Base.metadata, shop.outbox.metadata]"
    )
    assert "shop.outbox" in with_outbox
    env.write_text(with_outbox)
    ini.write_text(ini.read_text().replace("driver://user:pass@localhost/dbname", url))
    alembic("revision", "--autogenerate", "-m", "shop")
    alembic("upgrade", "head")
    assert "No new upgrade operations" in alembic("check")
    run("-c", "import shop; shop.outbox.create_tables()")
    assert "No new upgrade operations" in alembic("check")
    env.write_text(with_outbox.replace(", shop.outbox.metadata", ""))
    assert "remove_table" in alembic("check", code=255)  # this is what the line is for
    env.write_text(with_outbox)
    alembic("downgrade", "base")
    run("-c", "import shop; shop.outbox.create_tables(); shop.Base.metadata.create_all(shop.engine)")
    alembic("stamp", "head")
    assert "No new upgrade operations" in alembic("check")


@pytest.mark.parametrize("driver", ASYNC_DRIVERS)
def test_an_async_session_sends_after_its_commit(
    mesh: worqr.Mesh[Any],
    confirm: Any,
    new_outbox: NewOutbox,
    driver: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    async def main() -> None:
        engine = create_async_engine(url_of(driver, request, tmp_path))
        outbox = new_outbox(engine)
        async with AsyncSession(engine) as session:
            async with session.begin():
                await outbox.enqueue(session, confirm.call(1))
                async with session.begin_nested():
                    await outbox.enqueue(session, confirm.call(2))
            await outbox.enqueue(session, confirm.call(3))
            await session.rollback()
        async with engine.connect() as connection, outbox.transaction(connection):
            promise = await outbox.enqueue(connection, confirm.call(4))
            assert await promise.cancel(connection)
        await asyncio.to_thread(outbox.close, PATIENCE)
        assert await asyncio.to_thread(left, outbox) == 0
        await engine.dispose()

    asyncio.run(main())
    assert waiting(mesh) == 2


# Drivers


def test_psycopg(mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str) -> None:
    outbox = new_outbox(lambda: psycopg.connect(cluster.dsn(database)))
    with psycopg.connect(cluster.dsn(database), autocommit=True) as connection:
        with pytest.raises(UsageError, match="no transaction is open"):
            outbox.enqueue(connection, confirm.call(1))
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(2))
        with connection.transaction(force_rollback=True):
            outbox.enqueue(connection, confirm.call(3))
        outbox.enqueue(connection, confirm.call(4), atomic=False)
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(5))
            raise psycopg.Rollback
        connection.cursor_factory = psycopg.RawCursor
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(6))
    outbox.send()
    outbox.close(PATIENCE)
    assert (waiting(mesh), left(outbox)) == (3, 0)


def test_psycopg_on_asyncio(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    async def main() -> None:
        outbox = new_outbox(lambda: psycopg.AsyncConnection.connect(cluster.dsn(database)))
        async with await psycopg.AsyncConnection.connect(cluster.dsn(database)) as connection:
            with pytest.raises(UsageError, match="async with"), outbox.transaction(connection):
                pass
            async with outbox.transaction(connection):
                await outbox.enqueue(connection, confirm.call(1))
            async with outbox.transaction(connection):
                await outbox.enqueue(connection, confirm.call(2))
                raise psycopg.Rollback
            connection.cursor_factory = psycopg.AsyncRawCursor
            async with outbox.transaction(connection):
                await outbox.enqueue(connection, confirm.call(3))
        await asyncio.to_thread(outbox.close, PATIENCE)

    asyncio.run(main())
    assert waiting(mesh) == 2


def test_asyncpg(mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str) -> None:
    def connect() -> Any:
        return asyncpg.connect(host=str(cluster.folder), port=cluster.port, user="postgres", database=database)

    async def main() -> None:
        outbox = new_outbox(connect)
        connection = await connect()
        with pytest.raises(UsageError, match="no transaction is open"):
            await outbox.enqueue(connection, confirm.call(1))
        async with outbox.transaction(connection):
            await outbox.enqueue(connection, confirm.call(2))
        async with connection.transaction():
            await outbox.enqueue(connection, confirm.call(3))
        outbox.send()
        await connection.close()
        await asyncio.to_thread(outbox.close, PATIENCE)

    asyncio.run(main())
    assert waiting(mesh) == 2


def test_a_block_inside_a_transaction_that_is_open_does_not_decide_its_commit(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    """psycopg has begun it at the first statement, so the block is a savepoint."""
    outbox = new_outbox(lambda: psycopg.connect(cluster.dsn(database)))
    with psycopg.connect(cluster.dsn(database)) as connection:
        connection.execute("SELECT 1")
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(1))
        assert outbox.sender._thread is None
    outbox.close(PATIENCE)
    assert (waiting(mesh), left(outbox)) == (1, 0)


def test_two_programs_may_create_the_tables_at_the_same_time(
    mesh: worqr.Mesh[Any], cluster: Postgres, database: str
) -> None:
    """PostgreSQL refuses one of them, although it says IF NOT EXISTS."""
    outbox, errors = Outbox(mesh, lambda: psycopg.connect(cluster.dsn(database)), sweep=False), list[Exception]()

    def create() -> None:
        try:
            outbox.create_tables()
        except Exception as error:
            errors.append(error)

    with psycopg.connect(cluster.dsn(database)) as other:
        for sql in outbox.ddl("postgresql"):
            other.execute(sql.encode())
        thread = threading.Thread(target=create)
        thread.start()
        with psycopg.connect(cluster.dsn(database), autocommit=True) as watch:
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            wait_until(lambda: watch.execute(waits).fetchone())
    thread.join()
    assert errors == []
    assert left(outbox) == 0


def test_rows_that_commit_late_with_lower_ids_are_found(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    outbox = new_outbox(lambda: psycopg.connect(cluster.dsn(database)))
    with psycopg.connect(cluster.dsn(database)) as early, psycopg.connect(cluster.dsn(database)) as late:
        outbox.enqueue(early, confirm.call(1))
        outbox.enqueue(late, confirm.call(2))
        late.execute("UPDATE worqr_outbox SET at = at - 3000")
        late.commit()
        assert outbox.sender.once(Passes.sweep) == 1
        early.execute("UPDATE worqr_outbox SET at = at - 3000")
        early.commit()
    assert outbox.sender.once(Passes.sweep) == 1
    assert waiting(mesh) == 2


def test_the_time_of_a_row_is_that_of_its_insert_by_the_clock_of_the_database(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    """Not that of the transaction's begin: a row of a long transaction is not old when it is committed."""
    outbox = new_outbox(lambda: psycopg.connect(cluster.dsn(database)))
    with psycopg.connect(cluster.dsn(database)) as connection:
        connection.execute("SELECT now(), pg_sleep(0.05)")
        outbox.enqueue(connection, confirm.call(1))
        later = connection.execute("SELECT at - EXTRACT(EPOCH FROM now()) * 1000 FROM worqr_outbox").fetchone()
        assert later is not None
        assert 50 <= later[0] < PATIENCE * 1000


def test_a_million_dead_rows_under_an_old_snapshot_make_sweeps_rare_and_hide_no_row(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    """A backup keeps them from the vacuum. A sweep reads them once, whatever it sends, and pauses for 20 times as long."""
    outbox = new_outbox(lambda: psycopg.connect(cluster.dsn(database)))
    with psycopg.connect(cluster.dsn(database)) as backup, psycopg.connect(cluster.dsn(database)) as connection:
        backup.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        backup.execute("SELECT COUNT(*) FROM worqr_outbox")
        connection.execute(
            "INSERT INTO worqr_outbox (id, format, queue, payload, options, at) "
            "SELECT lpad(n::text, 32, '0'), 1, 'confirm', '', '', 0 FROM generate_series(1, 1000000) n"
        )
        connection.commit()
        connection.execute("DELETE FROM worqr_outbox")
        for n in range(3 * SWEEP_ROWS):
            outbox.enqueue(connection, confirm.call(n))
        connection.execute("UPDATE worqr_outbox SET at = at - 3000")
        connection.commit()

        def two(passes: Passes) -> tuple[int, float, float, float]:
            query, scans = passes._database.query, []

            def noted(statement: Any) -> Any:
                scans.extend([statement[0]] * ("LIMIT" in statement[0] or "COUNT" in statement[0]))
                return query(statement)

            passes._database.query = noted  # type: ignore[method-assign]
            sent, sweeps = passes.sweep(), 1
            while sent < 3 * SWEEP_ROWS:  # a slow machine
                sent, sweeps = sent + passes.sweep(), sweeps + 1
            passes._database.query = query  # type: ignore[method-assign]
            passes._interval = 0.0  # what is left is the pause after a slow sweep
            began = time.monotonic()
            passes.sweep()
            return sent, len(scans) / sweeps, passes.pause(), time.monotonic() - began

        sent, scans, pause, took = outbox.sender.once(two)
    assert (sent, waiting(mesh)) == (3 * SWEEP_ROWS, 3 * SWEEP_ROWS)
    assert scans <= 3, "rows, a count, and steps"
    assert took / 2 < pause / SHARE < took


def test_a_row_in_a_prepared_transaction_is_a_job_once_it_is_committed(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    """Another process may commit it, after the database was killed. If it is rolled back, there is no job."""
    outbox = new_outbox(lambda: psycopg.connect(cluster.dsn(database)))

    def end(second: LiteralString, n: int) -> int:
        connection = psycopg.connect(cluster.dsn(database))
        connection.tpc_begin(f"row {n}")
        outbox.enqueue(connection, confirm.call(n))
        connection.tpc_prepare()
        connection.close()
        outbox.send()
        outbox.close(PATIENCE)
        assert outbox.sender.once(Passes.sweep) == 0
        cluster.restart(str(program("pg_ctl")))
        with psycopg.connect(cluster.dsn(database), autocommit=True) as other:
            other.execute(second)
            other.execute("UPDATE worqr_outbox SET at = at - 3000")
        sent: int = outbox.sender.once(Passes.sweep)
        return sent

    assert end("ROLLBACK PREPARED 'row 1'", 1) == 0
    assert end("COMMIT PREPARED 'row 2'", 2) == 1
    assert (waiting(mesh), left(outbox)) == (1, 0)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "engine", "async engine"])
def test_rows_are_sent_at_once_although_the_connection_of_the_sender_was_cut(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str, driver: str
) -> None:
    """As by a restart of the database, or a proxy that closes idle connections. No worker sweeps here."""
    places: dict[str, Callable[[], Any]] = {
        "psycopg": lambda: lambda: psycopg.connect(cluster.dsn(database)),
        "asyncpg": lambda: (
            lambda: asyncpg.connect(host=str(cluster.folder), port=cluster.port, user="postgres", database=database)
        ),
        "engine": lambda: sa.create_engine(cluster.url("psycopg", database)),
        "async engine": lambda: create_async_engine(cluster.url("asyncpg", database)),
    }
    place = places[driver]()
    outbox = new_outbox(place)
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
    for n in range(3):
        with psycopg.connect(cluster.dsn(database)) as connection:
            with outbox.transaction(connection):
                outbox.enqueue(connection, confirm.call(n))
            wait_until(lambda n=n: waiting(mesh) == n + 1)  # type: ignore[misc]
            wait_until(lambda: not outbox.sender._sending)
            connection.execute(cut, (database,))
    if driver == "engine":
        place.dispose()


def test_a_session_that_commits_in_two_phases_sends_at_once(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    engine = sa.create_engine(cluster.url("psycopg", database))
    outbox = new_outbox(engine)
    with orm.Session(engine, twophase=True) as session:
        outbox.enqueue(session, confirm.call(1))
        session.prepare()
        assert outbox.sender._thread is None
        session.commit()
    outbox.close(PATIENCE)
    assert (waiting(mesh), left(outbox)) == (1, 0)
    engine.dispose()


def test_a_sweep_locks_no_row_while_it_waits_for_the_server(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, cluster: Postgres, database: str
) -> None:
    """A sender's delete, in a web request, does not wait for it, under the strictest isolation either."""
    outbox = new_outbox(
        lambda: psycopg.connect(cluster.dsn(database), options="-c default_transaction_isolation=serializable")
    )
    with psycopg.connect(cluster.dsn(database)) as connection:
        promise = outbox.enqueue(connection, confirm.call(1))
        connection.execute("UPDATE worqr_outbox SET at = at - 3000")
        connection.commit()

        def beside(passes: Passes) -> int:
            send = passes._send

            def deleted_meanwhile(rows: Any, read_at: float) -> int:
                connection.execute("SET lock_timeout = '1ms'")
                assert promise.cancel(connection)
                connection.commit()
                return send(rows, read_at)

            passes._send = deleted_meanwhile  # type: ignore[method-assign]
            return passes.sweep()

        assert outbox.sender.once(beside) == 1
    assert left(outbox) == 0


# Django


@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_django(
    mesh: worqr.Mesh[Any],
    confirm: Any,
    new_outbox: NewOutbox,
    vendor: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    import django
    from django.conf import settings
    from django.db import connections, transaction

    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "app.db")}
    if vendor == "postgresql":
        cluster: Postgres = request.getfixturevalue("cluster")
        name = request.getfixturevalue("database")
        file = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "HOST": str(cluster.folder),
            "PORT": str(cluster.port),
        }
        file["USER"] = "postgres"
    if not settings.configured:
        settings.configure(DATABASES={"default": {}, "other": {}})
        django.setup()

    def run() -> None:  # in a thread, which has connections of its own
        connections.configure_settings({})
        connections.databases.update(
            {alias: {**connections.databases["default"], "AUTOCOMMIT": True, **file} for alias in ("default", "other")}
        )
        connection = connections["default"]
        outbox = new_outbox(connection)
        with pytest.raises(UsageError, match="no transaction is open"):
            outbox.enqueue(connection, confirm.call(1))
        with transaction.atomic():
            outbox.enqueue(connection, confirm.call(2))
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                outbox.enqueue(connection, confirm.call(3))
                raise ZeroDivisionError
        with transaction.atomic(using="other"), pytest.raises(UsageError, match="'other'"):
            outbox.enqueue(connections["other"], confirm.call(4))
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(5))
        outbox.close(PATIENCE)
        with transaction.atomic():  # as that of a request
            with outbox.transaction(connection):
                outbox.enqueue(connection, confirm.call(6))
            assert outbox.sender._thread is None
        outbox.close(PATIENCE)
        assert left(outbox) == 0
        connections.databases["default"]["AUTOCOMMIT"] = False  # for the connections of the sender, too
        with transaction.atomic():
            outbox.enqueue(connection, confirm.call(7))
        outbox.close(PATIENCE)
        assert left(outbox) == 0
        outbox.sender.once(Passes.sweep)
        connections.close_all()

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    assert waiting(mesh) == 4

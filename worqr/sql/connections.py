"""The connections of an application, and the outbox's own: SQLAlchemy, psycopg, asyncpg, sqlite3 and Django, by one interface.

`place_of` recognises what the application passes to `enqueue` by the module of its class, so no driver is imported here. A
`Place` runs a statement in the transaction that is open there. A `Database` is what a sender uses, in its thread: each
statement is a transaction of its own, on connections in autocommit, so that no transaction is open while a request to the
server is.
"""

# Drivers are not dependencies of worqr, so what they return has no types here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from worqr.errors import UsageError
from worqr.sql.statements import Statement, check_dialect

if TYPE_CHECKING:
    import asyncio

Rows = list[tuple[Any, ...]]
_MARK: Final = re.compile(r"\?")


def kinds_of(given: object) -> set[str]:
    """Return the names of the classes of an object, each with its library: ``sqlalchemy.Session``."""
    return {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(given).__mro__}


def numbered_marks(sql: str, prefix: str, first: int) -> str:
    """Write the parameters of a statement as numbers: ``$1`` or ``:p0``."""
    numbers = count(first)
    return _MARK.sub(lambda _: f"{prefix}{next(numbers)}", sql)


class Place(Protocol):
    """A connection or session of the application."""

    dialect: str
    is_async: bool
    key: int
    """What names the connection or session as long as it is there."""

    def run(self, statement: Statement) -> Any:
        """Run a statement; return its rows, or a coroutine that does."""
        ...

    def autocommits(self) -> Any:
        """Return True if the statement would be committed at once, by itself; or a coroutine that does, for an async session."""
        ...

    def in_transaction(self) -> bool:
        """Return True if a transaction is open, in which `block` would be a savepoint."""
        ...

    def in_savepoint(self) -> bool:
        """Return True if a savepoint is open, as far as the library says."""
        ...

    def when_committed(self, done: Callable[[], object]) -> bool:
        """Call `done` after the commit. Return False if the library has no such hook."""
        ...

    def block(self) -> Any:
        """Return the library's block around a transaction."""
        ...


def place_of(given: Any) -> Place:
    """Return the place for a session or connection of an application.

    Raises:
        UsageError: it is no such thing, or of another database.
    """
    if hasattr(given, "registry") and callable(given) and "sqlalchemy" in type(given).__module__:
        given = given()  # a scoped_session
    kinds = kinds_of(given)
    for name, place in _PLACES.items():
        if name in kinds:
            return place(given)
    if hasattr(given, "in_atomic_block") and hasattr(given, "alias"):
        return DjangoPlace(given)
    raise UsageError(
        "an outbox takes a session or connection of SQLAlchemy, a connection of psycopg, asyncpg or sqlite3, or Django's "
        f"`connection`, not {type(given).__name__}"
    )


class _DriverPlace:
    """A connection of a driver."""

    dialect = "postgresql"
    is_async = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.key: int = id(connection)

    def in_transaction(self) -> bool:
        return False  # `block` would raise

    def in_savepoint(self) -> bool:
        return False  # no driver says

    def when_committed(self, done: Callable[[], object]) -> bool:
        return False  # no driver has such a hook

    def block(self) -> Any:
        return self._connection.transaction()


class SqlitePlace(_DriverPlace):
    """A connection of sqlite3."""

    dialect = "sqlite"

    def run(self, statement: Statement) -> Any:
        sql, parameters = statement
        cursor = self._connection.cursor()
        cursor.row_factory = None  # the application's may make dicts
        return cast("Rows", cursor.execute(sql, parameters).fetchall())

    def autocommits(self) -> bool:
        return _sqlite_autocommits(self._connection)

    def block(self) -> Any:
        return _SqliteBlock(self._connection)


def _sqlite_autocommits(connection: Any) -> bool:
    if connection.in_transaction:
        return False
    return getattr(connection, "autocommit", None) is True or connection.isolation_level is None


class _SqliteBlock:
    """``BEGIN IMMEDIATE``, and a commit or rollback: a transaction that reads first and writes then would fail at once if another
    one writes.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if getattr(self._connection, "autocommit", None) is not False:  # else a transaction is always open
            self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._end("commit")
        finally:  # also of a commit that failed
            self._end("rollback")

    def _end(self, how: str) -> None:
        if getattr(self._connection, "autocommit", None) is not True:
            getattr(self._connection, how)()
        elif self._connection.in_transaction:  # there, commit() and rollback() do nothing
            self._connection.execute(how)


class PsycopgPlace(_DriverPlace):
    """A connection of psycopg 3."""

    def run(self, statement: Statement) -> Any:
        found = self._execute(statement)
        return cast("Rows", found.fetchall() if found.description else [])

    def _execute(self, statement: Statement) -> Any:
        """Execute with a cursor of the application, whose rows are tuples here, and whose marks may be those of the server."""
        sql, parameters = statement
        cursor = self._connection.cursor(row_factory=sys.modules["psycopg.rows"].tuple_row)
        is_raw = any(each.__name__ == "RawCursorMixin" for each in type(cursor).__mro__)
        return cursor.execute(numbered_marks(sql, "$", 1) if is_raw else _MARK.sub("%s", sql), parameters)

    def autocommits(self) -> bool:
        return bool(self._connection.autocommit) and not self.in_transaction()

    def in_transaction(self) -> bool:
        return bool(self._connection.info.transaction_status)  # 0 is IDLE


class AsyncPsycopgPlace(PsycopgPlace):
    """An async connection of psycopg 3."""

    is_async = True

    def run(self, statement: Statement) -> Any:
        return self._run(statement)

    async def _run(self, statement: Statement) -> Rows:
        found = await self._execute(statement)
        return await found.fetchall() if found.description else []


class AsyncpgPlace(_DriverPlace):
    """A connection of asyncpg, or one of its pool."""

    is_async = True

    async def run(self, statement: Statement) -> Rows:
        sql, parameters = statement
        found = await self._connection.fetch(numbered_marks(sql, "$", 1), *parameters)
        return [tuple(each) for each in found]

    def autocommits(self) -> bool:
        return not self.in_transaction()

    def in_transaction(self) -> bool:
        return bool(self._connection.is_in_transaction())


class DjangoPlace(_DriverPlace):
    """Django's connection of one alias, in this thread."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.alias: str = connection.alias
        own = sys.modules["django.db"].connections[self.alias]  # `connection` is the same object in all threads
        self.key: int = id(own)
        self.dialect: str = check_dialect(connection.vendor)

    def run(self, statement: Statement) -> Rows:
        sql, parameters = statement
        with self._connection.cursor() as cursor:
            cursor.execute(_MARK.sub("%s", sql), parameters)
            return [tuple(each) for each in cursor.fetchall()] if cursor.description else []

    def autocommits(self) -> bool:
        return not self.in_transaction()

    def in_transaction(self) -> bool:
        return bool(self._connection.in_atomic_block)

    def in_savepoint(self) -> bool:
        return any(self._connection.savepoint_ids)

    def when_committed(self, done: Callable[[], object]) -> bool:
        sys.modules["django.db"].transaction.on_commit(done, using=self.alias, robust=True)
        return True

    def block(self) -> Any:
        return sys.modules["django.db"].transaction.atomic(using=self.alias)


# SQLAlchemy


def _to_text(statement: Statement) -> tuple[Any, dict[str, Any]]:
    """Return a statement as SQLAlchemy runs it, and its parameters."""
    sql, parameters = statement
    return sys.modules["sqlalchemy"].text(numbered_marks(sql, ":p", 0)), {
        f"p{n}": each for n, each in enumerate(parameters)
    }


def _rows(result: Any) -> Rows:
    return [tuple(each) for each in result.fetchall()] if result.returns_rows else []


def _autocommits(connection: Any) -> bool:
    """Return True if a connection of SQLAlchemy, in its sync form, commits each statement by itself."""
    raw = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        driver = getattr(raw, "driver_connection", raw)
        return _sqlite_autocommits(driver)
    options = connection.get_execution_options()
    return bool(getattr(raw, "autocommit", False)) or options.get("isolation_level") == "AUTOCOMMIT"


class AlchemyPlace(_DriverPlace):
    """A connection of SQLAlchemy."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.dialect: str = check_dialect(connection.dialect.name)

    def run(self, statement: Statement) -> Any:
        return _rows(self._connection.execute(*_to_text(statement)))

    def autocommits(self) -> bool:
        return _autocommits(self._connection)

    def in_savepoint(self) -> bool:
        return bool(self._connection.in_nested_transaction())

    def block(self) -> Any:
        return self._connection.begin()


class AsyncAlchemyPlace(AlchemyPlace):
    """An async connection of SQLAlchemy."""

    is_async = True

    def run(self, statement: Statement) -> Any:
        return self._run(statement)

    async def _run(self, statement: Statement) -> Rows:
        return _rows(await self._connection.execute(*_to_text(statement)))

    def autocommits(self) -> bool:
        return _autocommits(self._connection.sync_connection)


class SessionPlace(_DriverPlace):
    """A session of SQLAlchemy. It has hooks for the commit, which also run at the release of a savepoint."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._session = session
        try:
            bind = session.get_bind()
        except sys.modules["sqlalchemy.exc"].UnboundExecutionError as error:
            raise UsageError(
                "this session has no engine for tables without a model, such as the outbox: pass Session(bind=engine, ...), "
                "or give the outbox the session's connection"
            ) from error
        self.dialect: str = check_dialect(bind.dialect.name)

    def run(self, statement: Statement) -> Any:
        return _rows(self._session.connection().execute(*_to_text(statement)))

    def autocommits(self) -> Any:
        return _autocommits(self._session.connection())

    def in_savepoint(self) -> bool:
        return bool(self._session.in_nested_transaction())

    def when_committed(self, done: Callable[[], object]) -> bool:
        after_commit(self._session, done)
        return True

    def block(self) -> Any:
        return self._session.begin()


class AsyncSessionPlace(SessionPlace):
    """An async session of SQLAlchemy. Its hooks are those of the session inside."""

    is_async = True

    def __init__(self, session: Any) -> None:
        super().__init__(session.sync_session)
        self._outer = session

    def run(self, statement: Statement) -> Any:
        return self._run(statement)

    async def _run(self, statement: Statement) -> Rows:
        connection = await self._outer.connection()
        return _rows(await connection.execute(*_to_text(statement)))

    def autocommits(self) -> Any:
        return self._autocommits()

    async def _autocommits(self) -> bool:
        return _autocommits((await self._outer.connection()).sync_connection)

    def block(self) -> Any:
        return self._outer.begin()


_WAITING: Final = "worqr.sql.after_commit"
"""In the `info` of a session: what is to be called after its commit, each with the connection of its transaction."""


def after_commit(session: Any, done: Callable[[], object]) -> None:
    """Call `done` when the outermost transaction of a session, and that of its connection, have been committed."""
    _listen()
    session.info.setdefault(_WAITING, []).append((session.connection(), done))


_listening: set[bool] = set()


def _listen() -> None:
    """Listen to the commits of all sessions, from the first one on that stores a row."""
    if not _listening:
        _listening.add(True)
        event, session = sys.modules["sqlalchemy.event"], sys.modules["sqlalchemy.orm"].Session
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_soft_rollback", _rolled_back)


def _committed(session: Any) -> None:
    """After a commit, or the release of a savepoint. A session that joined a transaction has not committed it either."""
    waiting = session.info.get(_WAITING)
    if waiting:
        ready = [each for each in waiting if each[0].closed or not each[0].in_transaction()]
        session.info[_WAITING] = [each for each in waiting if each not in ready]
        for _, done in ready:
            done()


def _rolled_back(session: Any, previous: Any) -> None:
    """Nothing of a whole transaction is stored. Rows of a savepoint are looked for in vain by the sender."""
    if not previous.nested:
        session.info.pop(_WAITING, None)


_PLACES: Final[dict[str, Callable[[Any], Place]]] = {
    "sqlite3.Connection": SqlitePlace,
    "psycopg.AsyncConnection": AsyncPsycopgPlace,
    "psycopg.Connection": PsycopgPlace,
    "asyncpg.Connection": AsyncpgPlace,
    "asyncpg.PoolConnectionProxy": AsyncpgPlace,
    "sqlalchemy.AsyncSession": AsyncSessionPlace,
    "sqlalchemy.Session": SessionPlace,
    "sqlalchemy.AsyncConnection": AsyncAlchemyPlace,
    "sqlalchemy.Connection": AlchemyPlace,
}


# The outbox's own connections, in the thread of its sender


class Database(Protocol):
    """The database of an outbox."""

    def query(self, statement: Statement) -> Rows:
        """Run a statement as a transaction of its own, and return its rows."""
        ...

    def close(self) -> None:
        """Close the connections that it has opened in this thread."""
        ...

    @property
    def dialect(self) -> str:
        """The name of its dialect; it may connect to learn it."""
        ...


def database_of(given: Any) -> Callable[[], Database]:
    """Return what makes the connections of a sender, in its thread.

    Raises:
        UsageError: it is neither an engine, nor Django's `connection`, nor a function that connects.
    """
    kinds = kinds_of(given)
    if "sqlalchemy.AsyncEngine" in kinds:
        check_dialect(given.dialect.name)
        return lambda: AsyncEngineDatabase(given)
    if "sqlalchemy.Engine" in kinds:
        check_dialect(given.dialect.name)
        return lambda: EngineDatabase(given)
    if hasattr(given, "in_atomic_block") and hasattr(given, "alias"):
        check_dialect(given.vendor)
        alias = given.alias
        return lambda: DjangoDatabase(alias)
    if callable(given) and not isinstance(given, type) and kinds.isdisjoint(_NO_FUNCTIONS):
        return lambda: DriverDatabase(given)
    raise UsageError(
        "an outbox needs its database: an engine of SQLAlchemy, Django's `connection`, or a function that returns a new "
        f"connection of sqlite3, psycopg or asyncpg, as in Outbox(mesh, lambda: sqlite3.connect('app.db')), not {given!r}"
    )


def is_in_memory(given: Any) -> bool:
    """Return True if `given` is Django's connection to a database in memory, as in tests."""
    return bool(getattr(given, "is_in_memory_db", bool)())


_NO_FUNCTIONS: Final = {
    "sqlite3.Connection",
    "sqlalchemy.sessionmaker",
    "sqlalchemy.async_sessionmaker",
    "sqlalchemy.scoped_session",
    "sqlalchemy.async_scoped_session",
}
"""What can be called as well, and is given by mistake."""


_ONE_CONNECTION: Final = (
    "an outbox needs a connection of its own beside yours, and {} is in memory, or has only one: use a file, without StaticPool; "
    "in tests, worqr.testing.recording() stores no rows"
)


def _check_connections(engine: Any, *, shares_pool: bool) -> None:
    in_memory = engine.url.database in (None, "", ":memory:") or engine.url.query.get("mode") == "memory"
    is_static = shares_pool and "sqlalchemy.StaticPool" in kinds_of(engine.pool)
    if is_static or (in_memory and engine.dialect.name == "sqlite"):
        raise UsageError(f"{_ONE_CONNECTION.format(f'the database of {engine!r}')}, and outbox.metadata has the tables")


class EngineDatabase:
    """Connections of the engine of an application."""

    def __init__(self, engine: Any) -> None:
        _check_connections(engine, shares_pool=True)
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def dialect(self) -> str:
        return cast("str", self._engine.dialect.name)

    def query(self, statement: Statement) -> Rows:
        with self._engine.connect() as connection:
            found = _rows(connection.execute(*_to_text(statement)))
            connection.commit()  # an application may begin transactions itself, as it must for savepoints in SQLite
        return found

    def close(self) -> None:
        pass


class _Loop:
    """An asyncio loop in the thread of a sender."""

    def __init__(self) -> None:
        import asyncio  # only for drivers on asyncio

        self._loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()

    def wait(self, found: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(found)

    def close(self) -> None:
        self._loop.close()


class AsyncEngineDatabase:
    """An engine like that of an application, with connections of its own, because those of an async engine are of one loop."""

    def __init__(self, engine: Any) -> None:
        given, modules = engine.sync_engine, sys.modules
        _check_connections(given, shares_pool=False)
        own = modules["sqlalchemy.engine"].Engine(given.pool.recreate(), given.dialect, given.url)
        alchemy = modules["sqlalchemy.ext.asyncio"]
        self._engine: Any = alchemy.AsyncEngine(own).execution_options(isolation_level="AUTOCOMMIT")
        self._loop = _Loop()

    @property
    def dialect(self) -> str:
        return cast("str", self._engine.dialect.name)

    def query(self, statement: Statement) -> Rows:
        return cast("Rows", self._loop.wait(self._query(statement)))

    async def _query(self, statement: Statement) -> Rows:
        async with self._engine.connect() as connection:
            found = _rows(await connection.execute(*_to_text(statement)))
            await connection.commit()
        return found

    def close(self) -> None:
        try:
            self._loop.wait(self._engine.dispose())
        finally:  # a connection that was cut cannot be closed
            self._loop.close()


class DjangoDatabase:
    """Django's connection of one alias, in the thread of the sender."""

    def __init__(self, alias: str) -> None:
        self._connection = sys.modules["django.db"].connections[alias]

    @property
    def dialect(self) -> str:
        return cast("str", self._connection.vendor)

    def query(self, statement: Statement) -> Rows:
        try:
            found = DjangoPlace(self._connection).run(statement)
            if not self._connection.get_autocommit():  # as with AUTOCOMMIT = False
                self._connection.commit()
            return found
        finally:  # as Django does after a request: CONN_MAX_AGE, 0 by default, says how long a connection is kept
            self._connection.close_if_unusable_or_obsolete()

    def close(self) -> None:
        self._connection.close()


class DriverDatabase:
    """One connection, which the application's function has opened."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._loop: _Loop | None = None
        found = connect()
        if inspect.isawaitable(found):
            self._loop = _Loop()
            found = self._loop.wait(found)
        self._place = place_of(found)
        self._connection: Any = found
        match self._place:
            case SqlitePlace():
                if not self._place.run(("PRAGMA database_list", ()))[0][2]:
                    found.close()
                    raise UsageError(_ONE_CONNECTION.format("the database that its function has opened"))
                found.isolation_level = None
                if getattr(found, "autocommit", None) is False:  # of Python 3.12; it overrides the isolation level
                    found.autocommit = True
            case AsyncPsycopgPlace():
                self._wait(found.set_autocommit(True))
            case PsycopgPlace():
                found.autocommit = True
            case AsyncpgPlace():
                pass  # it has no transactions of its own accord
            case _:
                self._wait(found.close())
                raise UsageError(
                    f"the function of an outbox has returned a {type(found).__name__}, whose transactions the outbox would not "
                    "commit: give the engine itself, Outbox(mesh, engine), or a new connection of a driver"
                )

    def _wait(self, found: Any) -> Any:
        return found if self._loop is None or not inspect.isawaitable(found) else self._loop.wait(found)

    @property
    def dialect(self) -> str:
        return self._place.dialect

    def query(self, statement: Statement) -> Rows:
        return cast("Rows", self._wait(self._place.run(statement)))

    def close(self) -> None:
        try:
            self._wait(self._connection.close())
        finally:  # a connection that was cut cannot be closed
            if self._loop is not None:
                self._loop.close()

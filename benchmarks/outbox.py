"""An outbox in PostgreSQL: what it costs beside a bare INSERT and beside `enqueue`, and how fast its rows become jobs.

``python -m benchmarks.outbox [--calls 2000] [--rows 20000] [--dead 1000000]``; `benchmarks.transfers` kills its processes.

It needs PostgreSQL (`apt-get install postgresql`), which it starts in a folder of its own, with fsync. It is no subject of
``python -m benchmarks``, which needs no database.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import psycopg

import worqr
from benchmarks.measuring import percentile
from tests.support.postgres import Postgres, program, running_postgres
from worqr.embedded import EmbeddedServer
from worqr.sql import Outbox
from worqr.sql.sender import Passes

PREFIX = "outbox"


class World:
    """A server, a database with its tables, and a mesh with an outbox."""

    def __init__(self, server: EmbeddedServer, postgres: Postgres, database: str) -> None:
        self.dsn = postgres.dsn(database)
        self.server = server
        self.mesh = worqr.Mesh[Any](server.url, prefix=PREFIX)
        self.outbox = Outbox(self.mesh, self.connect, sweep=False)
        self.outbox.create_tables()
        self.started: dict[int, float] = {}
        self.every = threading.Condition()
        self.transfer = self.mesh.task(self._transfer, name="transfer")  # type: ignore[call-overload]

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn)

    def store_old(self, connection: psycopg.Connection[Any], rows: int) -> None:
        """Store and commit rows that are old enough for a sweep."""
        for n in range(rows):
            self.outbox.enqueue(connection, self.mesh.call("late", n=n))
        connection.execute("UPDATE worqr_outbox SET at = at - 3000 WHERE state = 'waiting'")
        connection.commit()

    def _transfer(self, n: int) -> None:
        with self.every:
            self.started[n] = time.perf_counter()
            self.every.notify_all()

    def wait_for(self, number: int) -> None:
        with self.every:
            self.every.wait_for(lambda: len(self.started) >= number, 300)


@contextmanager
def worlds() -> Iterator[World]:
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    if initdb is None or pg_ctl is None:
        sys.exit("PostgreSQL is not installed: try `apt-get install postgresql`")
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        postgres = stack.enter_context(running_postgres(initdb, pg_ctl, fsync=True))
        world = World(server, postgres, stack.enter_context(postgres.database()))
        yield world
        world.outbox.close()
        world.mesh.close()


def show(what: str, *values: tuple[str, str]) -> None:
    print(f"{what:<48}", "  ".join(f"{value} {name}" for value, name in values), flush=True)


def each(calls: int, *acts: Callable[[int], object]) -> list[float]:
    """The median of the microseconds that each of these takes, done in turn."""
    took: list[list[float]] = [[] for _ in acts]
    for n in range(calls):
        for act, times in zip(acts, took, strict=True):
            began = time.perf_counter()
            act(n)
            times.append(time.perf_counter() - began)
    return [median(times) * 1e6 for times in took]


def costs(world: World, calls: int) -> None:
    """One transaction with an insert, with and without a row of the outbox, and beside an enqueue."""
    connection = world.connect()
    connection.execute("CREATE TABLE orders (n INTEGER)")
    connection.commit()
    outbox, transfer = world.outbox, world.mesh.call("idle", n=1)

    def bare(n: int) -> None:
        with connection.transaction():
            connection.execute("INSERT INTO orders VALUES (%s)", (n,))
            connection.execute("INSERT INTO orders VALUES (%s)", (n,))

    def stored(n: int) -> None:
        with connection.transaction():
            connection.execute("INSERT INTO orders VALUES (%s)", (n,))
            outbox.enqueue(connection, transfer)

    def beside(n: int) -> None:
        with connection.transaction():
            connection.execute("INSERT INTO orders VALUES (%s)", (n,))
        worqr.sync(world.mesh.enqueue_many, [transfer])

    names = ("two bare INSERTs in a transaction", "an INSERT and a row of the outbox", "an INSERT, then an enqueue")
    figures = each(calls, bare, stored, beside)
    for what, figure in zip(names, figures, strict=True):
        show(what, (f"{figure:,.0f}", "us"), (f"{figure / figures[0]:.2f}", "x"))
    connection.execute("DELETE FROM worqr_outbox WHERE state = 'waiting'")
    connection.commit()
    connection.close()


def latency(world: World, calls: int) -> None:
    """From the commit to the start of the handler."""
    connection, committed, hand_over = world.connect(), [], world.outbox.sender.hand_over

    def noted(rows: Sequence[str]) -> None:
        committed.append(time.perf_counter())
        hand_over(rows)

    world.outbox.sender.hand_over = noted  # type: ignore[method-assign]
    with world.mesh.join_in_thread():
        for n in range(calls):
            with world.outbox.transaction(connection):
                world.outbox.enqueue(connection, world.transfer.call(n))
            world.wait_for(n + 1)
    took = sorted((world.started[n] - at) * 1e3 for n, at in enumerate(committed))
    connection.close()
    p50, p99 = percentile(took, 50), percentile(took, 99)
    show("commit to start", (f"{p50:.1f}", "ms p50"), (f"{p99:.1f}", "ms p99"))


def sweeps(world: World, rows: int) -> None:
    """A sweep of an empty table, and rows after an outage."""

    def empty(passes: Passes) -> float:
        passes.sweep()
        began = time.perf_counter()
        for _ in range(20):
            passes.sweep()
        return (time.perf_counter() - began) / 20

    took = world.outbox.sender.once(empty)
    show("sweep of an empty table", (f"{took * 1e3:.2f}", "ms"), (f"{1 / took:,.0f}", "sweeps/s"))
    connection = world.connect()
    world.store_old(connection, rows)
    connection.close()
    began, sent = time.perf_counter(), 0
    while sent < rows:
        sent += world.outbox.sender.once(Passes.sweep)
    show("rows after an outage", (f"{rows / (time.perf_counter() - began):,.0f}", "rows/s"))


def dead_rows(world: World, dead: int, rows: int) -> None:
    """Sweeps while an old snapshot, as that of a backup, keeps dead rows from the vacuum."""
    with world.connect() as backup, world.connect() as connection:
        backup.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        backup.execute("SELECT COUNT(*) FROM worqr_outbox")
        connection.execute(
            "INSERT INTO worqr_outbox (id, format, queue, payload, options, at) "
            "SELECT lpad(n::text, 32, '0'), 1, 'late', '{}', '', 0 FROM generate_series(1, %s) n",
            (dead,),
        )
        connection.commit()
        connection.execute("DELETE FROM worqr_outbox WHERE state = 'waiting'")
        connection.commit()

        def measured(passes: Passes) -> None:
            for what in ("the first one", "the next one"):
                began = time.perf_counter()
                passes.sweep()
                took, pause = time.perf_counter() - began, passes.pause()
                show(
                    f"sweep of {dead:,} dead rows, {what}", (f"{took * 1e3:.0f}", "ms"), (f"{pause:.1f}", "s of pause")
                )
            world.store_old(connection, rows)
            began, sent, number = time.perf_counter(), 0, 0
            while sent < rows:
                sent, number = sent + passes.sweep(), number + 1
            took = time.perf_counter() - began
            show(f"{rows:,} rows among them", (f"{rows / took:,.0f}", "rows/s"), (f"{number}", "sweeps"))

        world.outbox.sender.once(measured)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outbox")
    for name, default in (("calls", 2000), ("rows", 20_000), ("dead", 1_000_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with worlds() as world:
        costs(world, given.calls)
        latency(world, given.calls)
        sweeps(world, given.rows)
        dead_rows(world, given.dead, given.rows)


if __name__ == "__main__":
    main()

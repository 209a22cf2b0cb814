"""A ledger: transfers between accounts by an outbox, while senders, workers, the server and the database are killed.

``python -m benchmarks.transfers [--transfers 1000000] [--every 2] [--senders 2] [--workers 2] [--database postgresql]``

Each transfer is a line and a call, in one transaction; its job moves the money, with `outbox.first`. At the end, each transfer
has happened exactly once, each was one job, and all accounts add up. PostgreSQL (`apt-get install postgresql`) runs in a folder
of its own, with fsync.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg

import worqr
from benchmarks.outbox import show
from tests.support.children import ROOT
from tests.support.postgres import program, running_postgres
from tests.support.servers import Server, chosen
from worqr.sql import Outbox

PREFIX: Final = "transfers"
ACCOUNTS: Final = 100
OPENING: Final = 1_000_000
"""Cents of each account at the beginning."""
BATCH: Final = 10
"""Transfers of one transaction."""
MOST_OPEN: Final = 20_000
"""Transfers that wait, at most: senders wait for workers."""
FAILS: Final = 0.03
"""The part of the runs that raise an error after their commit, so that they run again."""
PATIENCE: Final = 120.0
"""Seconds without any progress after which a run is given up."""
SPARED_AFTER: Final = 15.0
"""Seconds without any progress after which nothing is killed: on a busy machine, a worker may be killed before it serves."""
TABLES: Final = (
    "CREATE TABLE accounts (id INTEGER PRIMARY KEY, cents BIGINT NOT NULL)",
    "CREATE TABLE transfers (sender INTEGER, n INTEGER, source INTEGER NOT NULL, target INTEGER NOT NULL, cents BIGINT NOT NULL, "
    "done INTEGER DEFAULT 0 NOT NULL, repeats INTEGER DEFAULT 0 NOT NULL, PRIMARY KEY (sender, n))",
    "CREATE INDEX open_transfers ON transfers (sender) WHERE done = 0",
)
CHECKS: Final = {
    "transfers did not happen": "SELECT COUNT(*) FROM transfers WHERE done = 0",
    "transfers happened more than once": "SELECT COUNT(*) FROM transfers WHERE done > 1",
    "cents too many or too few": f"SELECT CAST(ABS(SUM(cents) - {ACCOUNTS * OPENING}) AS BIGINT) FROM accounts",
    "accounts do not agree with the transfers": f"SELECT COUNT(*) FROM accounts a WHERE cents <> {OPENING} "
    "+ (SELECT COALESCE(SUM(cents), 0) FROM transfers WHERE target = a.id) "
    "- (SELECT COALESCE(SUM(cents), 0) FROM transfers WHERE source = a.id)",
}
"""What each query must find none of."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run. `every`: seconds between two kills."""

    transfers: int = 1_000_000
    every: float = 2.0
    senders: int = 2
    workers: int = 2


def connect(database: str) -> Any:
    """Connect to PostgreSQL by its parameters, or to SQLite by the path of its file."""
    if "=" in database:
        return psycopg.connect(database)
    connection = sqlite3.connect(database, timeout=60, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    return connection


def ask(connection: Any, sql: str, *parameters: object) -> Any:
    """Run one statement, and return its first value."""
    marks = sql.replace("%s", "?") if isinstance(connection, sqlite3.Connection) else sql
    found = connection.execute(marks, parameters)
    row = found.fetchone() if found.description else None
    return None if row is None else row[0] if len(row) == 1 else row


# In the processes that are killed


def send(url: str, database: str, sender: int, number: int) -> None:
    """Write transfers, as many as are left of `number`."""
    mesh, connection = worqr.Mesh[Any](url, prefix=PREFIX), connect(database)
    outbox, rng = Outbox(mesh, lambda: connect(database), sweep=False), random.Random()
    n = ask(connection, "SELECT COUNT(*) FROM transfers WHERE sender = %s", sender)
    connection.commit()
    while n < number:
        first, n = n, min(number, n + BATCH)
        with outbox.transaction(connection):
            for each in range(first, n):
                source, target = rng.sample(range(ACCOUNTS), 2)
                sql = "INSERT INTO transfers (sender, n, source, target, cents) VALUES (%s, %s, %s, %s, %s)"
                ask(connection, sql, sender, each, source, target, rng.randint(1, 10_000))
                outbox.enqueue(connection, mesh.call("move", sender=sender, n=each))
        if n % (100 * BATCH) == 0:
            while ask(connection, "SELECT COUNT(*) FROM transfers WHERE done = 0") > MOST_OPEN:
                connection.commit()
                time.sleep(0.5)
            connection.commit()
    outbox.close()


def work(url: str, database: str) -> None:
    """Move money, until the process is killed."""
    mesh, own = worqr.Mesh[Any](url, prefix=PREFIX), threading.local()
    outbox = Outbox(mesh, lambda: connect(database))
    policy = worqr.RetryPolicy(max_failures=10_000, max_stalls=10_000, min_backoff=0.05, max_backoff=1)

    @contextmanager
    def connection() -> Generator[Any]:
        """The connection of this thread; a new one after an error, as the database may have been killed."""
        own.connection = getattr(own, "connection", None) or connect(database)
        try:
            with outbox.transaction(own.connection):
                yield own.connection
        except BaseException:
            with suppress(Exception):
                own.connection.close()
            own.connection = None
            raise

    @mesh.task(name="move", retry=policy)
    def move(sender: int, n: int) -> None:
        which = "WHERE sender = %s AND n = %s"
        with connection() as c:
            if outbox.first(c, "move"):
                source, target, cents = ask(c, f"SELECT source, target, cents FROM transfers {which}", sender, n)
                for account, change in sorted([(source, -cents), (target, cents)]):
                    ask(c, "UPDATE accounts SET cents = cents + %s WHERE id = %s", change, account)
                ask(c, f"UPDATE transfers SET done = done + 1 {which}", sender, n)
            else:
                ask(c, f"UPDATE transfers SET repeats = repeats + 1 {which}", sender, n)
        if random.random() < FAILS:
            raise RuntimeError("after the commit")

    with mesh.join_in_thread(concurrency=8):
        threading.Event().wait()


# The process that kills


class Ledger:
    """The processes of a run, and what kills them."""

    def __init__(self, plan: Plan, server: Server, database: str, restart_database: Callable[[], None] | None) -> None:
        self._plan = plan
        self._server = server
        self._database = database
        self._restart_database = restart_database
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self.kills: Counter[str] = Counter()
        self.mesh: worqr.Mesh[Any] = worqr.Mesh(server.url, prefix=PREFIX)

    def start(self, role: str, number: int) -> None:
        """Start a process, or start it again."""
        share = self._plan.transfers // self._plan.senders + (number < self._plan.transfers % self._plan.senders)
        more = (str(number), str(share)) if role == "send" else ()
        command = [sys.executable, "-m", "benchmarks.transfers", f"--{role}", self._server.url, self._database, *more]
        quiet = subprocess.DEVNULL  # errors are what this is about
        self._processes[role, number] = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet)

    def kill_one(self) -> None:
        """Kill something at random. What has ended without having finished is started again."""
        kinds = ["sender", "worker", "server"] + (["database"] if self._restart_database else [])
        kind = random.choice(kinds)
        role = {"sender": "send", "worker": "work"}.get(kind, "")
        there = [each for each, process in self._processes.items() if each[0] == role and process.poll() is None]
        if there:
            victim = self._processes[random.choice(there)]
            victim.kill()
            victim.wait()
        elif kind == "server":
            self._server.kill()
            self._server.start()
        elif kind == "database" and self._restart_database is not None:
            self._restart_database()
        else:
            return
        self.kills[kind] += 1

    def tend(self) -> bool:
        """Start again what has died; return True if all senders have finished."""
        for (role, number), process in list(self._processes.items()):
            if process.poll() not in (None, 0):
                self.start(role, number)
        return all(process.poll() == 0 for (role, _), process in self._processes.items() if role == "send")

    def run(self) -> None:
        """Until each transfer has happened, and no row is left; or until nothing moves any more."""
        for role, number in (("send", self._plan.senders), ("work", self._plan.workers)):
            for each in range(number):
                self.start(role, each)
        following = time.monotonic() + self._plan.every
        last, moved_at = None, time.monotonic()
        while time.monotonic() - moved_at < PATIENCE:
            time.sleep(0.2)
            is_sent = self.tend()
            if time.monotonic() < following:
                continue
            seen = self._seen()
            if is_sent and seen == (0, 0):
                return
            last, moved_at = seen, moved_at if seen == last else time.monotonic()
            if time.monotonic() - moved_at < SPARED_AFTER:
                self.kill_one()
            following = time.monotonic() + self._plan.every

    def _seen(self) -> tuple[int, int]:
        """How many transfers have not happened, and how many rows are left."""
        connection = connect(self._database)
        open_ones = ask(connection, "SELECT COUNT(*) FROM transfers WHERE done = 0")
        left = ask(connection, "SELECT COUNT(*) FROM worqr_outbox WHERE state <> 'outbox'")
        connection.close()
        return open_ones, left

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.mesh.close()


def prepare(database: str, mesh: worqr.Mesh[Any]) -> None:
    """Make the tables, and open the accounts."""
    Outbox(mesh, lambda: connect(database), sweep=False).create_tables()
    connection = connect(database)
    for sql in TABLES:
        ask(connection, sql)
    for n in range(ACCOUNTS):
        ask(connection, "INSERT INTO accounts VALUES (%s, %s)", n, OPENING)
    connection.commit()
    connection.close()


def problems(connection: Any, plan: Plan, jobs: int) -> list[str]:
    """What does not add up."""
    found = {what: ask(connection, sql) for what, sql in CHECKS.items()}
    found["transfers are missing"] = plan.transfers - ask(connection, "SELECT COUNT(*) FROM transfers")
    found["jobs too many or too few"] = abs(plan.transfers - jobs)
    connection.close()
    return [f"{number:,} {what}" for what, number in found.items() if number]


def measure(plan: Plan, database: str, restart_database: Callable[[], None] | None) -> list[str]:
    """Run it, print its figures, and return what does not add up."""
    server = Server(chosen()[0])
    server.start()
    ledger = Ledger(plan, server, database, restart_database)
    try:
        prepare(database, ledger.mesh)
        began = time.monotonic()
        ledger.run()
        took = time.monotonic() - began
        jobs = worqr.sync(ledger.mesh.queue("move").info).counts.get("enqueued", 0)
    finally:
        ledger.close()
        server.close()
    connection = connect(database)
    repeats = ask(connection, "SELECT CAST(SUM(repeats) AS BIGINT) FROM transfers")
    found = problems(connection, plan, jobs)
    connection.close()
    show(
        f"{plan.transfers:,} transfers under kills",
        (f"{plan.transfers / took:,.0f}", "transfers/s"),
        (f"{took:,.0f}", "s"),
    )
    show("kills", *((f"{number:,}", f"of a {kind}") for kind, number in sorted(ledger.kills.items())))
    show("runs that came again, and moved nothing", (f"{repeats or 0:,}", "runs"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfers")
    for name, kind, default in (
        ("transfers", int, 1_000_000),
        ("every", float, 2.0),
        ("senders", int, 2),
        ("workers", int, 2),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--send", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.send:
        url, database, sender, number = given.send
        send(url, database, int(sender), int(number))
    elif given.work:
        work(*given.work)
    else:
        run(given)


def run(given: argparse.Namespace) -> None:
    """Kill, and exit with an error if something does not add up."""
    plan = Plan(given.transfers, given.every, given.senders, given.workers)
    with ExitStack() as stack:
        if given.database == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            found = measure(plan, str(Path(folder) / "ledger.db"), None)
        else:
            initdb, pg_ctl = program("initdb"), program("pg_ctl")
            if initdb is None or pg_ctl is None:
                sys.exit("PostgreSQL is not installed: try `apt-get install postgresql`")
            postgres = stack.enter_context(running_postgres(initdb, pg_ctl, fsync=True))
            name = stack.enter_context(postgres.database())
            found = measure(plan, postgres.dsn(name), partial(postgres.restart, pg_ctl))
    if found:
        sys.exit("\n".join(found))
    print("Each transfer happened exactly once, each is one job, and the accounts add up.")


if __name__ == "__main__":
    main()

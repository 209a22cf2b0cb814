"""Rows of an outbox in SQLite: producers commit them and roll them back, peers sweep, and the world reads what was committed."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Final, Literal

import trio

import worqr
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.sender import Sender
from benchmarks.chaos.workload import ROWS
from worqr.sql import Outbox

LOCKED: Final = 30.0
"""Seconds that a writer waits for another one, which may be frozen."""


class Database:
    """The database of a run, with the tables of its outbox and one line for each task that was committed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "rows.db"

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=LOCKED)

    def outbox(self, mesh: worqr.Mesh[Any], replicas: int = 0) -> Outbox:
        return Outbox(mesh, self.connect, replicas=replicas)

    def create(self) -> None:
        """Make the tables."""
        self.outbox(worqr.Mesh()).create_tables()
        with self.connect() as connection:
            connection.execute("CREATE TABLE lines (task TEXT)")
        connection.close()

    def left(self) -> int:
        """How many rows were not sent."""
        connection = self.connect()
        [[count]] = connection.execute("SELECT COUNT(*) FROM worqr_outbox WHERE state <> 'outbox'")
        connection.close()
        return int(count)

    def note_committed(self, ledger: Ledger) -> None:
        """Write what was committed, whether its producer knows or not."""
        connection = self.connect()
        for (task,) in connection.execute("SELECT task FROM lines"):
            ledger.write("committed", queue=ROWS, task=task)
        connection.close()


class RowMaker:
    """Stores calls in transactions. Some of them are rolled back."""

    def __init__(self, sender: Sender, folder: Path, replicas: int) -> None:
        self._sender = sender
        self._database = Database(folder)
        self._outbox = self._database.outbox(sender.mesh, replicas)

    async def make(self, _nursery: trio.Nursery) -> None:
        """Store some calls in one transaction."""
        tasks = [self._sender.new_task(ROWS) for _ in range(self._sender.rng.randint(1, 3))]
        rolls_back = self._sender.rng.random() < 0.2
        call = self._sender.begin("send", queue=ROWS, tasks=tasks)
        self._sender.ledger.write(await trio.to_thread.run_sync(self._store, tasks, rolls_back), call=call)

    def _store(self, tasks: list[str], rolls_back: bool) -> Literal["acked", "refused", "unknown"]:
        connection = self._database.connect()
        try:
            with self._outbox.transaction(connection):
                for task in tasks:
                    connection.execute("INSERT INTO lines VALUES (?)", (task,))
                    self._outbox.enqueue(connection, self._sender.mesh.call(ROWS, task.encode()))
                if rolls_back:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            return "refused"
        except sqlite3.OperationalError:  # another process was frozen in its transaction
            return "unknown"
        finally:
            connection.close()
        return "acked"

"""A mesh, and databases for its outbox: SQLite in a file, and PostgreSQL in a folder and on a socket of its own.

``WORQR_TEST_POSTGRES=1`` makes it a failure that PostgreSQL is not there.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import worqr
from tests.support.patience import PATIENCE
from tests.support.postgres import Postgres, program, running_postgres
from tests.support.servers import Server
from worqr.sql import Outbox


def no_postgres() -> str:
    return "PostgreSQL is not installed, so outboxes are not tried with it: try `apt-get install postgresql`"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Postgres]:
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    if initdb is None or pg_ctl is None:
        (pytest.fail if os.environ.get("WORQR_TEST_POSTGRES") else pytest.skip)(no_postgres())
    with running_postgres(initdb, pg_ctl) as found:
        yield found


@pytest.fixture
def database(cluster: Postgres) -> Iterator[str]:
    """The name of a new database."""
    with cluster.database() as name:
        yield name


@pytest.fixture
def mesh(server: Server, prefix: str) -> Iterator[worqr.Mesh[Any]]:
    made = worqr.Mesh[Any](server.url, prefix=prefix, patience=PATIENCE)
    yield made
    made.close()


@pytest.fixture
def new_outbox(mesh: worqr.Mesh[Any]) -> Iterator[Callable[..., Outbox]]:
    """`new_outbox(database, ...)`: an outbox of the mesh, with its tables, that no worker sweeps by itself."""
    made: list[Outbox] = []

    def make(database: Any, **options: Any) -> Outbox:
        made.append(Outbox(mesh, database, **{"sweep": False, **options}))
        made[-1].create_tables()
        return made[-1]

    yield make
    for each in made:
        each.close(PATIENCE)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[], sqlite3.Connection]:
    """Connects to a database in a file."""
    return lambda: sqlite3.connect(tmp_path / "app.db", timeout=PATIENCE)

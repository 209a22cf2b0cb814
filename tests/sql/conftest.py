"""A mesh, and databases for its outbox: SQLite in a file, and PostgreSQL in a folder and on a socket of its own.

``WORQR_TEST_POSTGRES=1`` makes it a failure that PostgreSQL is not there.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import worqr
from tests.support.patience import PATIENCE
from tests.support.servers import Server, free_port
from worqr.sql import Outbox

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
"""Debian does not put them on the PATH."""


def program(name: str) -> str | None:
    """The path of a program of PostgreSQL."""
    return shutil.which(name) or next((str(each / name) for each in reversed(PROGRAMS) if (each / name).exists()), None)


def no_postgres() -> str:
    return "PostgreSQL is not installed, so outboxes are not tried with it: try `apt-get install postgresql`"


@dataclass(frozen=True)
class Postgres:
    """A running cluster."""

    folder: Path
    port: int

    def dsn(self, database: str) -> str:
        return f"host={self.folder} port={self.port} user=postgres dbname={database}"

    def url(self, driver: str, database: str) -> str:
        return f"postgresql+{driver}://postgres@/{database}?host={self.folder}&port={self.port}"


def as_postgres(folder: Path) -> dict[str, Any]:
    """How its programs are started: by another user if we are root, because they refuse root."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Postgres]:
    initdb, postgres = program("initdb"), program("pg_ctl")
    if initdb is None or postgres is None:
        (pytest.fail if os.environ.get("WORQR_TEST_POSTGRES") else pytest.skip)(no_postgres())
    folder = Path(tempfile.mkdtemp(prefix="worqr-pg-", dir="/tmp"))
    who, port, data = as_postgres(folder), free_port(), folder / "data"
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **who}
    try:
        subprocess.run([initdb, "-D", data, "-A", "trust", "-U", "postgres", "-N"], check=True, **quiet)
        options = f"-k {folder} -p {port} -c listen_addresses='' -c fsync=off -c max_connections=50"
        subprocess.run([postgres, "-D", data, "-w", "-l", folder / "log", "-o", options, "start"], check=True, **quiet)
        try:
            yield Postgres(folder, port)
        finally:
            subprocess.run([postgres, "-D", data, "-m", "immediate", "stop"], check=True, **quiet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database(cluster: Postgres) -> Iterator[str]:
    """The name of a new database."""
    name = f"t{uuid4().hex[:8]}"
    with psycopg.connect(cluster.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield name
    with psycopg.connect(cluster.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


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

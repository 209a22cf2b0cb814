"""PostgreSQL in a folder and on a socket of its own, for tests and benchmarks."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from tests.support.servers import free_port

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
"""Debian does not put them on the PATH."""


def program(name: str) -> str | None:
    """The path of a program of PostgreSQL; None if it is not installed."""
    return shutil.which(name) or next((str(each / name) for each in reversed(PROGRAMS) if (each / name).exists()), None)


@dataclass(frozen=True)
class Postgres:
    """A running cluster."""

    folder: Path
    port: int

    def dsn(self, database: str) -> str:
        return f"host={self.folder} port={self.port} user=postgres dbname={database}"

    def url(self, driver: str, database: str) -> str:
        return f"postgresql+{driver}://postgres@/{database}?host={self.folder}&port={self.port}"

    def restart(self, pg_ctl: str) -> None:
        """Kill all its processes, and start it again."""
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": self.folder}
        command = [pg_ctl, "-D", self.folder / "data", "-w", "-l", self.folder / "log", "-m", "immediate", "restart"]
        subprocess.run(command, check=True, **quiet, **_as_user(self.folder))

    @contextmanager
    def database(self) -> Iterator[str]:
        """The name of a new database, which is there for the length of a block."""
        name = f"t{uuid4().hex[:8]}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        try:
            yield name
        finally:
            with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _as_user(folder: Path) -> dict[str, Any]:
    """How its programs are started: by another user if we are root, because they refuse root."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextmanager
def running_postgres(initdb: str, pg_ctl: str, *, fsync: bool = False) -> Iterator[Postgres]:
    """A cluster for the length of a block."""
    folder = Path(tempfile.mkdtemp(prefix="worqr-pg-", dir="/tmp"))
    port, data = free_port(), folder / "data"
    quiet: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "cwd": folder,
        **_as_user(folder),
    }
    try:
        subprocess.run([initdb, "-D", data, "-A", "trust", "-U", "postgres", "-N"], check=True, **quiet)
        options = (
            f"-k {folder} -p {port} -c listen_addresses='' -c fsync={'on' if fsync else 'off'} -c max_connections=50 "
            "-c max_prepared_transactions=10"
        )
        subprocess.run([pg_ctl, "-D", data, "-w", "-l", folder / "log", "-o", options, "start"], check=True, **quiet)
        try:
            yield Postgres(folder, port)
        finally:
            subprocess.run([pg_ctl, "-D", data, "-m", "immediate", "stop"], check=True, **quiet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

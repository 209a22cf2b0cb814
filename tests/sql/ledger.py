"""A program that is killed: it writes a line of a ledger and its call in one transaction, again and again, and prints each line
that was committed. Arguments: the URL of the server, the prefix, the file of the database, and a name for its lines.
"""

from __future__ import annotations

import sqlite3
import sys
from itertools import count
from typing import Any

import worqr
from worqr.sql import Outbox


def main(url: str, prefix: str, file: str, name: str) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(file, timeout=60)

    mesh = worqr.Mesh[Any](url, prefix=prefix)
    outbox, connection = Outbox(mesh, connect), connect()
    for n in count():
        line = f"{name}-{n}"
        with outbox.transaction(connection):
            connection.execute("INSERT INTO ledger VALUES (?)", (line,))
            outbox.enqueue(connection, mesh.call("transfer", line=line))
        print(line, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5])

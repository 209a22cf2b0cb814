"""A program that is killed: it writes a line of a ledger and its call in one transaction, again and again, and prints each line
that was committed. Arguments: the URL of the server, the prefix, the file of the database.
"""

from __future__ import annotations

import sqlite3
import sys
from itertools import count
from typing import Any

import worqr
from worqr.sql import Outbox

URL, PREFIX, FILE = sys.argv[1:4]
mesh = worqr.Mesh[Any](URL, prefix=PREFIX)


@mesh.task(name="transfer")
def transfer(line: str) -> None: ...


def connect() -> sqlite3.Connection:
    return sqlite3.connect(FILE, timeout=60)


def main() -> None:
    outbox, connection = Outbox(mesh, connect), connect()
    for n in count():
        line = f"{sys.argv[4]}-{n}"
        with outbox.transaction(connection):
            connection.execute("INSERT INTO ledger VALUES (?)", (line,))
            outbox.enqueue(connection, transfer.call(line))
        print(line, flush=True)


if __name__ == "__main__":
    main()

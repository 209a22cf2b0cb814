"""`worqr outbox`: outboxes of the mesh, rows of one, and what is done with them."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.cli import main
from worqr.sql import Outbox
from worqr.sql.sender import Passes

pytestmark = [pytest.mark.one_server, pytest.mark.leaves("*")]


@pytest.fixture
def shop(tmp_path: Path, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with an outbox, which is in the current folder."""
    name = f"shop{uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(
        "import sqlite3, worqr\nfrom worqr.sql import Outbox\n"
        f"mesh = worqr.Mesh({server.url!r}, prefix={prefix!r}, patience={PATIENCE})\n"
        f"outbox = Outbox(mesh, lambda: sqlite3.connect({str(tmp_path / 'app.db')!r}, timeout=60))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    if name in sys.modules:
        sys.modules[name].mesh.close()


def rows(shop: str) -> tuple[Outbox, list[str]]:
    """Store three rows, one of which has failed and one is held."""
    module: Any = __import__(shop)
    outbox: Outbox = module.outbox
    outbox.create_tables()
    connection = sqlite3.connect("app.db")
    ids = [outbox.enqueue(connection, module.mesh.call("confirm", order=n)).id for n in range(3)]
    connection.execute("UPDATE worqr_outbox SET state = 'failed', error = 'why', tries = 10 WHERE id = ?", (ids[1],))
    connection.execute("UPDATE worqr_outbox SET state = 'held', at = at - 9000 WHERE id = ?", (ids[2],))
    connection.commit()
    connection.close()
    return outbox, ids


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["outbox", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_rows_are_listed_retried_deleted_and_released(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, ids = rows(shop)
    target = f"{shop}:outbox"
    code, out, _ = run(capsys, target, "--state", "failed", "--json")
    [row] = map(json.loads, out.splitlines())
    assert (code, row["id"], row["queue"], row["tries"], row["error"]) == (0, ids[1], "confirm", 10, "why")
    assert run(capsys, target, "--retry", ids[1])[:2] == (0, "1 rows will be sent again\n")
    assert run(capsys, target, "--release")[:2] == (0, "1 rows released\n")
    assert run(capsys, target, "--delete", ids[0])[:2] == (0, "0 rows deleted\n")  # it waits
    assert run(capsys, target, "--retry", "all")[:2] == (0, "0 rows will be sent again\n")
    assert len(run(capsys, target, "--json")[1].splitlines()) == 3
    assert "no row is held" in run(capsys, target, "--state", "held")[2]


def test_the_outboxes_of_a_mesh_are_listed_as_workers_see_them(
    shop: str, capsys: pytest.CaptureFixture[str], server: Server, prefix: str
) -> None:
    connect = ("--url", server.url, "--prefix", prefix, "--patience", f"{PATIENCE}s")
    assert "no worker looks after an outbox" in run(capsys, *connect)[2]
    outbox, _ = rows(shop)

    def twice(passes: Passes) -> None:
        passes.sweep()
        passes.give_back()

    outbox.sender.once(twice)
    [found] = map(json.loads, run(capsys, *connect, "--json")[1].splitlines())
    assert (found["table"], found["rows"], found["failed"], found["held"]) == ("worqr_outbox", 1, 1, 1)


def test_what_is_wrong_is_told(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "name the outbox" in run(capsys, "--release")[2]
    code, _, told = run(capsys, f"{shop}:mesh")
    assert code == 1
    assert f"is no worqr.sql.Outbox; there is {shop}:outbox" in told
    code, _, told = run(capsys, f"{shop}:outbox")
    assert code == 1
    assert "no such table" in told

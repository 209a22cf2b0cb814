"""Processes are killed between their commit, the dispatch and the delete of a row. Each line that was committed is one job."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import worqr
from benchmarks.transfers import Plan, ask, connect, measure, problems
from tests.sql import ledger
from tests.sql.test_outbox import Connect, NewOutbox, age, rows
from tests.support.children import ROOT
from tests.support.servers import Server
from worqr.client.producer import Producer
from worqr.inside import client_of
from worqr.sql.sender import Passes

pytestmark = [pytest.mark.one_server, pytest.mark.leaves("*")]

KILLS = 6


def jobs(server: Server, prefix: str) -> Counter[str]:
    """The payloads of the jobs that wait."""
    client = server.client()
    return Counter(
        client.hget(key, "task").decode() for key in client.scan_iter(f"{prefix}:{{transfer}}:job:*", count=1000)
    )


def test_each_committed_line_is_one_job_whenever_its_process_is_killed(
    new_outbox: NewOutbox, file: Connect, server: Server, prefix: str, tmp_path: Path
) -> None:
    outbox, connection = new_outbox(file), file()
    connection.execute("CREATE TABLE ledger (line TEXT)")
    connection.commit()
    for kill in range(KILLS):
        arguments = (ledger.__file__, server.url, prefix, str(tmp_path / "app.db"), str(kill))
        with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            for _ in range(3 + 7 * kill):  # then it is somewhere between a commit, a dispatch and a delete
                process.stdout.readline()
            process.kill()
    age(file, 3000)
    while rows(file):
        outbox.sender.once(Passes.sweep)
    lines = Counter(f'{{"line":"{line}"}}' for (line,) in connection.execute("SELECT line FROM ledger"))
    connection.close()
    assert jobs(server, prefix) == lines
    assert len(lines) >= sum(3 + 7 * kill for kill in range(KILLS))


@pytest.mark.parametrize("dies", ["before the dispatch", "before the delete"])
def test_a_sweep_that_dies_is_done_by_the_next(
    mesh: worqr.Mesh[Any],
    new_outbox: NewOutbox,
    file: Connect,
    server: Server,
    prefix: str,
    dies: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox = new_outbox(file)
    connection = file()
    for n in range(1200):
        outbox.enqueue(connection, mesh.call("transfer", line=str(n)))
    connection.commit()
    connection.close()
    age(file, 3000)
    dispatch, seen = Producer.dispatch_rows, []

    class Killed(BaseException):
        pass

    async def dispatch_rows(self: Producer, *arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == 2 and dies == "before the dispatch":
            raise Killed
        found = await dispatch(self, *arguments)
        if len(seen) == 2:
            raise Killed
        return found

    def until_killed(passes: Passes) -> None:
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(type(client_of(mesh).producer), "dispatch_rows", dispatch_rows)
            while True:
                passes.sweep()

    outbox.sender.once(until_killed)
    assert len(rows(file)) == 700
    ended = jobs(server, prefix)  # what was sent has ended before it is sent again
    assert sum(ended.values()) == (500 if dies == "before the dispatch" else 1000)
    worqr.sync(mesh.queue("transfer").cancel_all)
    while rows(file):
        outbox.sender.once(Passes.sweep)
    assert ended + jobs(server, prefix) == Counter(f'{{"line":"{n}"}}' for n in range(1200))


def test_transfers_happen_exactly_once_whatever_is_killed(tmp_path: Path) -> None:
    """`python -m benchmarks.transfers` does the same with PostgreSQL, for hours. What is lost or doubled, it sees."""
    database, plan = str(tmp_path / "ledger.db"), Plan(transfers=400, every=0.7)
    assert measure(plan, database, None) == []
    for bug, seen in (
        ("UPDATE accounts SET cents = cents + 1 WHERE id = 1", ["1 cents too many", "1 accounts"]),
        ("UPDATE transfers SET done = 0 WHERE sender = 0 AND n = 3", ["1 transfers did not happen"]),
        ("UPDATE transfers SET done = 2 WHERE sender = 0 AND n = 3", ["1 transfers happened more than once"]),
        ("DELETE FROM transfers WHERE sender = 0 AND n = 3", ["1 transfers are missing"]),
    ):
        connection = connect(database)
        connection.execute("BEGIN")
        ask(connection, bug)
        found = "\n".join(problems(connection, plan, 400))
        assert all(each in found for each in seen), found
        connection.close()
    connection = connect(database)
    assert problems(connection, plan, 401) == ["1 jobs too many or too few"]
    connection.close()

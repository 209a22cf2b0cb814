"""An outbox with sqlite3: what is stored, what is sent and when, what is refused, and what cannot be sent."""

from __future__ import annotations

import gc
import sqlite3
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import worqr
from tests.support.children import ROOT
from tests.support.clusters import cluster_of
from tests.support.patience import PATIENCE, wait_until
from tests.support.servers import Server
from worqr import ops
from worqr.client.inspection import OutboxFacts, outboxes_of, read_outbox_facts
from worqr.errors import Unavailable, UsageError
from worqr.inside import client_of
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import boottime
from worqr.sql import Outbox
from worqr.sql.sender import Passes
from worqr.sql.statements import Row, new_row_id, options_to_send
from worqr.testing import recording

pytestmark = [pytest.mark.one_server, pytest.mark.leaves("*")]
"""Jobs that wait are left: no worker takes them."""

Connect = Callable[[], sqlite3.Connection]
NewOutbox = Callable[..., Outbox]
HOUR = 3_600_000


@pytest.fixture
def confirm(mesh: worqr.Mesh[Any]) -> Any:
    @mesh.task(name="confirm")
    def confirm(order: int) -> None: ...

    return confirm


def waiting(mesh: worqr.Mesh[Any], queue: str = "confirm") -> int:
    return worqr.sync(mesh.queue(queue).info).waiting


def scheduled(mesh: worqr.Mesh[Any], queue: str = "confirm") -> int:
    return worqr.sync(mesh.queue(queue).info).scheduled


def rows(connect: Connect, columns: str = "id") -> list[Any]:
    connection = connect()
    found = connection.execute(f"SELECT {columns} FROM worqr_outbox WHERE state <> 'outbox' ORDER BY id").fetchall()
    connection.close()
    return [each[0] for each in found] if "," not in columns else found


def empty(file: Connect) -> None:
    connection = file()
    connection.execute("DELETE FROM worqr_outbox")
    connection.commit()
    connection.close()


def age(connect: Connect, ms: int) -> None:
    """Make all rows older."""
    connection = connect()
    connection.execute("UPDATE worqr_outbox SET at = at - ?", (ms,))
    connection.commit()
    connection.close()


def put(outbox: Outbox, connect: Connect, *calls: Any) -> list[Any]:
    """Store calls, and commit them, as a process that dies then."""
    connection = connect()
    promises = [outbox.enqueue(connection, call) for call in calls]
    connection.commit()
    connection.close()
    return promises


def sweep(outbox: Outbox) -> int:
    found: int = outbox.sender.once(Passes.sweep)
    return found


def test_a_committed_row_becomes_one_job_and_a_rolled_back_one_none(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    connection = file()
    outbox.enqueue(connection, confirm.call(1))
    connection.rollback()
    promise = outbox.enqueue(connection, confirm.call(2))
    outbox.send()  # before the commit: nothing is found
    outbox.close()
    assert waiting(mesh) == 0
    connection.commit()
    connection.close()
    age(file, 3000)
    assert sweep(outbox) == 1
    assert waiting(mesh) == 1
    assert rows(file) == []
    assert worqr.sync(promise.handle().status).state == "waiting"
    assert sweep(outbox) == 0


def test_a_block_sends_at_once_after_its_commit(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    connection = file()
    with outbox.transaction(connection):
        outbox.enqueue(connection, confirm.call(1))
    with pytest.raises(ZeroDivisionError), outbox.transaction(connection):
        outbox.enqueue(connection, confirm.call(2))
        raise ZeroDivisionError
    connection.close()
    outbox.close(60)
    assert (waiting(mesh), rows(file)) == (1, [])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has no autocommit= before Python 3.12")
@pytest.mark.parametrize("autocommit", [True, False])
def test_sqlite_with_autocommit_of_either_kind(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, tmp_path: Path, autocommit: bool
) -> None:
    def connect() -> sqlite3.Connection:
        how: dict[str, Any] = {"autocommit": autocommit}
        return sqlite3.connect(tmp_path / "app.db", timeout=PATIENCE, **how)

    outbox, connection = new_outbox(connect), connect()
    with outbox.transaction(connection):
        outbox.enqueue(connection, confirm.call(1))
    with pytest.raises(ZeroDivisionError), outbox.transaction(connection):
        outbox.enqueue(connection, confirm.call(2))
        raise ZeroDivisionError
    connection.close()
    outbox.close(PATIENCE)
    assert (waiting(mesh), rows(connect)) == (1, [])


def test_a_block_that_ends_in_another_context_than_it_began_sends_at_once(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    """As FastAPI does with a dependency that is not async: each part runs in a thread with a context of its own."""
    outbox, connection = new_outbox(file), file()
    block = outbox.transaction(connection)
    for part in (
        block.__enter__,
        lambda: outbox.enqueue(connection, confirm.call(1)),
        lambda: block.__exit__(None, None, None),
    ):
        copy_context().run(part)
    outbox.sender.close(PATIENCE)
    assert (waiting(mesh), rows(file)) == (1, [])
    connection.close()


def test_a_block_keeps_no_rows_from_their_own_commit(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, tmp_path: Path
) -> None:
    """Not those of another outbox, of another connection that is committed later, or of a task that outlives the block."""

    def other_file() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "other.db", timeout=PATIENCE)

    outbox, other = new_outbox(file), new_outbox(other_file)
    connection, beside = file(), other_file()
    with outbox.transaction(connection):
        other.enqueue(beside, confirm.call(1))
        later = copy_context()
    beside.commit()
    other.close(PATIENCE)
    assert (waiting(mesh), rows(other_file)) == (1, [])
    for stored in (later.run, lambda act: act()):
        stored(lambda: outbox.enqueue(connection, confirm.call(2)))
        connection.commit()
        outbox.close(PATIENCE)
        assert rows(file) == []
    connection.close()
    beside.close()


def test_a_block_whose_commit_fails_is_rolled_back(confirm: Any, new_outbox: NewOutbox, tmp_path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "app.db", timeout=0.1)

    outbox, connection, reader = new_outbox(connect), connect(), connect()
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM worqr_outbox").fetchall()
    with pytest.raises(sqlite3.OperationalError, match="locked"), outbox.transaction(connection):
        outbox.enqueue(connection, confirm.call(1))
    assert not connection.in_transaction
    reader.close()
    connection.close()


def test_send_hands_over_what_drivers_have_committed(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    put(outbox, file, confirm.call(1), confirm.call(2))
    outbox.send()
    outbox.close(60)
    assert (waiting(mesh), rows(file)) == (2, [])


def test_a_row_that_another_thread_stores_meanwhile_is_left_to_the_next_send(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)

    class Raced(deque[str]):
        def __iter__(self) -> Iterator[str]:
            yield from list(super().__iter__())
            if len(self) == 1:
                put(outbox, file, confirm.call(2))

    outbox._raw = Raced(maxlen=1000)
    put(outbox, file, confirm.call(1))
    outbox.send()
    outbox.close(PATIENCE)
    assert rows(file) == []


def test_a_sender_that_dies_before_the_delete_is_repeated_and_adds_no_job(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    put(outbox, file, *(confirm.call(n) for n in range(3)))
    age(file, 3000)

    def without_delete(passes: Passes) -> None:
        delete, passes._database.query = passes._database.query, no_delete(passes._database.query)  # type: ignore[method-assign]
        with pytest.raises(sqlite3.OperationalError, match="killed"):
            passes.sweep()
        passes._database.query = delete  # type: ignore[method-assign]

    outbox.sender.once(without_delete)
    assert (waiting(mesh), len(rows(file))) == (3, 3)
    assert sweep(outbox) == 3
    assert (waiting(mesh), rows(file)) == (3, [])


def no_delete(query: Any) -> Any:
    def run(statement: Any) -> Any:
        if statement[0].startswith("DELETE FROM worqr_outbox WHERE"):
            raise sqlite3.OperationalError("killed")
        return query(statement)

    return run


def test_rows_that_were_deleted_are_remembered_for_ten_minutes_only(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, server: Server, prefix: str
) -> None:
    outbox = new_outbox(file)
    [promise] = put(outbox, file, confirm.call(1))
    age(file, 3000)
    sweep(outbox)
    assert 0 < server.client().pttl(QueueKeys(prefix, "confirm").sent(promise.id)) <= 600_000


def test_autocommit_is_refused_unless_it_is_asked_for(confirm: Any, new_outbox: NewOutbox, file: Connect) -> None:
    outbox = new_outbox(file)
    connection = file()
    connection.isolation_level = None
    with pytest.raises(UsageError, match="no transaction is open"):
        outbox.enqueue(connection, confirm.call(1))
    outbox.enqueue(connection, confirm.call(2), atomic=False)
    connection.execute("BEGIN")
    outbox.enqueue(connection, confirm.call(3))
    connection.execute("COMMIT")
    connection.close()
    assert len(rows(file)) == 2


def test_what_an_outbox_cannot_send_is_refused_before_the_insert(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file, queues=["confirm"])
    connection = file()
    for call, words in (
        (confirm, "give calls"),
        (confirm.options(id="x", if_exists="raise").call(1), "if_exists"),
        (mesh.call("other", n=1), "not among the queues"),
    ):
        with pytest.raises(UsageError, match=words):
            outbox.enqueue(connection, call)
    with pytest.raises(UsageError, match="a session or connection"):
        outbox.enqueue("app.db", confirm.call(1))
    assert not connection.in_transaction
    connection.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"table": "x; DROP"}, "table must be"),
        ({"database": "app.db"}, "needs its database"),
        ({"database": sqlite3.Connection}, "needs its database"),
        ({"replicas": -1}, "replicas"),
        ({"queues": [""]}, "queue name"),
        ({"queues": "confirm"}, r"a list of names.*not 'confirm'"),
        ({"queues": []}, "a list of names"),
    ],
)
def test_arguments_that_are_not_valid(mesh: worqr.Mesh[Any], file: Connect, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Outbox(mesh, **{"database": file, **wrong})


def test_rows_of_other_queues_are_left_alone(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    put(new_outbox(file), file, mesh.call("other", n=1), confirm.call(1))
    age(file, 3000)
    assert sweep(new_outbox(file, queues=["confirm"])) == 1
    assert rows(file, "queue") == ["other"]


def test_the_options_of_a_call_mean_what_they_mean_elsewhere(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    named = confirm.options(id="order-7", meta={"a": "b"})
    promises = put(outbox, file, named.call(1), named.call(2), confirm.options(delay=3600).call(3))
    age(file, 3000)
    sweep(outbox)
    assert (waiting(mesh), scheduled(mesh)) == (1, 1)
    assert promises[1].handle().id == "order-7"
    assert promises[2].handle().id == promises[2].id


def test_a_row_has_its_follow_ups(
    mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect, server: Server, prefix: str
) -> None:
    """Also those of its follow-ups; and once, although its row is sent twice."""
    ran: list[str] = []
    all_ran = threading.Semaphore(0)

    @mesh.task(name="confirm", retry=worqr.RetryPolicy(max_failures=1))
    def confirm(order: str) -> str:
        ran.append(order)
        all_ran.release()
        if order == "bad":
            raise worqr.Failure("bad")
        return order

    ship = confirm.options(then=confirm.call("shipped"), delay=0.01).call("paid")
    calls = [confirm.options(then=ship, otherwise=confirm.call("no")).call(name) for name in ("good", "bad")]
    with pytest.raises(UsageError, match="'confirm' is not among the queues"):
        new_outbox(file, queues=["other"]).enqueue(None, calls[0])
    outbox = new_outbox(file, queues=["confirm"])
    put(outbox, file, *calls)
    age(file, 3000)

    def twice(passes: Passes) -> int:
        [*sent] = passes._database.query(passes._sql.by_id(rows(file)))
        passes.sweep()
        return passes._send([Row(*each) for each in sent], 1e9)

    assert outbox.sender.once(twice) == 2
    with mesh.join_in_thread():
        assert all(all_ran.acquire(timeout=PATIENCE) for _ in range(5))
    assert sorted(ran) == ["bad", "good", "no", "paid", "shipped"]
    held = [server.client().ttl(key) for key in server.client().scan_iter(f"{prefix}:{{confirm}}:part:*")]
    assert held.count(-1) == 1, "those of the job that is in the dead-letter queue; all others expire"


@pytest.mark.parametrize("follow_ups", [7, {"then": 7}, {"then": ["other", {}, b""]}, {"when": ["confirm", {}, b""]}])
def test_follow_ups_that_another_program_wrote_are_refused(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, follow_ups: Any
) -> None:
    outbox = new_outbox(file, queues=["confirm"])
    [bad, _] = put(outbox, file, confirm.call(1), confirm.call(2))
    connection = file()
    options = msgspec.msgpack.encode({"id": "x", "follow_ups": follow_ups})
    connection.execute("UPDATE worqr_outbox SET options = ? WHERE id = ?", (options, bad.id))
    connection.commit()
    connection.close()
    age(file, 3000)
    assert sweep(outbox) == 1
    assert rows(file, "id, tries") == [(bad.id, 1)]


def test_a_promise_is_cancelled_in_a_transaction(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    [promise] = put(outbox, file, confirm.call(1))
    connection = file()
    assert promise.cancel(connection)
    assert not promise.cancel(connection)
    connection.commit()
    connection.close()
    age(file, 3000)
    assert sweep(outbox) == 0


def row(options: dict[str, object], age_ms: int = 0) -> Row:
    return Row("0a" * 16, "q", b"{}", msgspec.msgpack.encode(options), age_ms, 0)


def test_a_delay_and_an_expiry_count_from_the_insert() -> None:
    assert options_to_send(row({"delay": 60_000}, 20_000)) == {"delay": 40_000, "row": "0a" * 16}
    assert options_to_send(row({"delay": 60_000}, 90_000)) == {"delay": 0, "row": "0a" * 16}
    assert options_to_send(row({"expires": "5000"}, 2000)) == {"expires": "3000", "row": "0a" * 16}
    assert options_to_send(row({"expires": "5000"}, 6000)) is None
    assert options_to_send(row({"delay": 9000, "expires": "5000"}, 8000)) == {
        "delay": 1000,
        "expires": "5000",
        "row": "0a" * 16,
    }
    assert options_to_send(row({"delay": 9000, "expires": "5000"}, 15_000)) is None
    assert options_to_send(row({"run_at": 7, "expires": "5"}, 10**9)) == {"run_at": 7, "expires": "5", "row": "0a" * 16}


def test_an_expired_row_is_dropped(mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect) -> None:
    outbox = new_outbox(file)
    put(outbox, file, confirm.options(expires=1).call(1), confirm.call(2))
    age(file, 3000)
    assert sweep(outbox) == 2
    assert (waiting(mesh), rows(file)) == (1, [])


def test_ids_of_rows_sort_by_time_and_are_all_different() -> None:
    made = [new_row_id() for _ in range(1000)]
    assert len({*made}) == 1000
    assert all(len(each) == 32 and each[12] == "7" and each[16] in "89ab" for each in made)
    assert new_row_id()[:11] >= made[0][:11]


def test_a_sweep_reads_few_large_payloads_at_once(mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect) -> None:
    """Else a worker with little memory would be killed, and so would be the next one."""
    outbox = new_outbox(file)
    put(outbox, file, *(mesh.call("large", data="x" * 1_000_000) for _ in range(20)))
    age(file, 3000)
    read: list[int] = []

    def noted(passes: Passes) -> int:
        query = passes._database.query

        def run(statement: Any) -> Any:
            found = query(statement)
            read.append(sum(len(each) for row in found for each in row if isinstance(each, bytes)))
            return found

        passes._database.query = run  # type: ignore[method-assign]
        return passes.sweep()

    assert outbox.sender.once(noted) == 20
    assert sum(read) > 20_000_000
    assert max(read) < 9_000_000


def test_a_version_of_sqlite_that_deletes_no_rows_with_their_ids_is_refused(
    new_outbox: NewOutbox, file: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = new_outbox(file)
    monkeypatch.setattr("worqr.sql.sender.OLDEST_SQLITE", (99, 0))
    for act in (outbox.create_tables, lambda: sweep(outbox)):
        with pytest.raises(UsageError, match=r"needs SQLite 99\.0 .* the database has 3\."):
            act()


def test_a_full_queue_is_left_out_and_others_go_on(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)

    @mesh.task(name="full", max_length=1)
    def full(n: int) -> None: ...

    put(outbox, file, *(full.call(n) for n in range(600)), confirm.call(1))
    age(file, 3000)

    def three(passes: Passes) -> None:
        for _ in range(3):
            passes.sweep()

    outbox.sender.once(three)
    assert (waiting(mesh, "full"), waiting(mesh)) == (1, 1)
    assert rows(file, "DISTINCT queue, tries, state") == [("full", 0, "waiting")]


def test_a_full_queue_is_left_out_for_a_second_at_first_and_after_each_row_that_found_room(
    mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)

    @mesh.task(name="full", max_length=1)
    def full(n: int) -> None: ...

    promises = put(outbox, file, *(full.call(n) for n in range(20)))
    age(file, 3000)

    def pauses(passes: Passes) -> list[float]:
        found = list[float]()
        for ended in [[], [], promises]:
            for promise in ended:
                worqr.sync(promise.handle().cancel)
            passes._blocked = {queue: (0.0, pause) for queue, (_, pause) in passes._blocked.items()}
            passes.sweep()
            found += [pause for _, pause in passes._blocked.values()]
        return found

    assert outbox.sender.once(pauses) == [1.0, 2.0, 1.0]


def test_a_full_lane_delays_no_rows_of_other_lanes(mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect) -> None:
    outbox = new_outbox(file)

    @mesh.task(name="mail", lanes=worqr.Lanes("tenant", max_length=1))
    def mail(tenant: str) -> None: ...

    put(outbox, file, *(mail.call("a") for _ in range(600)))
    time.sleep(0.002)  # the ids of rows sort by their milliseconds
    [other] = put(outbox, file, mail.call("b"))
    age(file, 3000)
    assert sweep(outbox) == 2
    assert (waiting(mesh, "mail"), len(rows(file))) == (2, 599)
    assert other.id not in rows(file)


def test_more_rows_of_full_lanes_than_a_sweep_reads_delay_no_others(
    mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.sql.statements.MOST_SWEPT", 3)
    monkeypatch.setattr("worqr.sql.sender.MOST_SWEPT", 3)
    outbox = new_outbox(file)

    @mesh.task(name="mail", lanes=worqr.Lanes("tenant", max_length=1))
    def mail(tenant: str) -> None: ...

    put(outbox, file, *(mail.call("a") for _ in range(8)))
    time.sleep(0.002)  # the ids of rows sort by their milliseconds
    put(outbox, file, mail.call("b"))
    age(file, 3000)

    def several(passes: Passes) -> None:
        for _ in range(6):
            passes.sweep()
        [first] = worqr.sync(mesh.queue("mail").jobs, limit=1)
        worqr.sync(mesh.queue("mail").job(first.id).cancel)
        passes._in_full_lanes = {}
        for _ in range(6):
            passes.sweep()

    outbox.sender.once(several)
    assert (waiting(mesh, "mail"), len(rows(file))) == (2, 6)


def test_a_node_that_is_away_delays_no_rows_for_queues_of_other_nodes(
    file: Connect, server_kind: str, prefix: str
) -> None:
    with cluster_of(server_kind, replicas=0) as cluster:
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        registry = cluster.owner(f"{{{prefix}}}")
        owners = {name: cluster.owner(f"{prefix}:{{{name}}}") for name in map("q{}".format, range(50))}
        away = next(name for name, owner in owners.items() if owner is not registry)
        here = next(name for name, owner in owners.items() if owner is registry)
        mesh = worqr.Mesh[Any](cluster.url, prefix=prefix, patience=10)
        outbox = Outbox(mesh, file, sweep=False)
        outbox.create_tables()
        put(outbox, file, mesh.call(away, n=1), mesh.call(here, n=1), mesh.call(away, n=2))
        age(file, 3000)
        owners[away].kill()
        assert sweep(outbox) == 1
        assert rows(file, "queue, tries, state") == [(away, 0, "waiting")] * 2
        owners[away].start()
        cluster.settle()
        assert sweep(outbox) == 2
        mesh.close()


def test_a_row_that_the_server_refuses_is_found_and_given_up_after_ten_tries(
    mesh: worqr.Mesh[Any],
    confirm: Any,
    new_outbox: NewOutbox,
    file: Connect,
    caplog: pytest.LogCaptureFixture,
) -> None:
    outbox = new_outbox(file)
    [_, bad, *_] = put(outbox, file, *(confirm.call(n) for n in range(7)))
    connection = file()
    connection.execute(
        "UPDATE worqr_outbox SET options = ? WHERE id = ?", (msgspec.msgpack.encode({"unheard": 1, "id": "x"}), bad.id)
    )
    connection.commit()
    for n in range(10):
        age(file, 3000)
        connection.execute("UPDATE worqr_outbox SET retry_at = 0")
        connection.commit()
        assert sweep(outbox) == (0 if n else 6)
    connection.close()
    assert waiting(mesh) == 6
    [(row, tries, state, error)] = rows(file, "id, tries, state, error")
    assert (row, tries, state) == (bad.id, 10, "failed")
    assert "no such option" in error
    assert "was given up after 10 tries" in caplog.text
    assert outbox.sender.ask(lambda sql: sql.again("failed", None)) == [(bad.id,)]
    assert rows(file, "state, tries") == [("waiting", 0)]


@pytest.mark.parametrize("wrong", ["payload", "options"])
def test_a_text_where_bytes_belong_stops_no_other_row(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, wrong: str
) -> None:
    outbox = new_outbox(file)
    put(outbox, file, confirm.call(1), confirm.call(2))
    connection = file()
    connection.execute(f"UPDATE worqr_outbox SET {wrong} = '{{}}' WHERE id = ?", (rows(file)[0],))
    connection.commit()
    connection.close()
    age(file, 3000)
    sweep(outbox)
    assert waiting(mesh) == (2 if wrong == "payload" else 1)
    assert rows(file, "tries, state") == ([] if wrong == "payload" else [(1, "waiting")])


def test_rows_of_a_newer_version_are_left_to_it(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    [newer, _] = put(outbox, file, confirm.call(1), confirm.call(2))
    connection = file()
    connection.execute("UPDATE worqr_outbox SET format = format + 1 WHERE id = ?", (newer.id,))
    connection.commit()
    connection.close()
    age(file, 3000)
    assert sweep(outbox) == 1
    assert rows(file, "id, tries, state") == [(newer.id, 0, "waiting")]


def test_a_right_that_is_missing_makes_rows_wait_and_counts_nothing(
    file: Connect, own_server: Server, prefix: str
) -> None:
    client = own_server.client()
    client.execute_command("ACL", "SETUSER", "half", "on", ">s", "~*", "&*", "+@all", "-set")
    url = own_server.url.replace("unix://", "unix://half:s@", 1)
    limited = worqr.Mesh[Any](url, prefix=prefix, patience=PATIENCE)
    outbox = Outbox(limited, file, sweep=False)
    outbox.create_tables()
    put(outbox, file, *(limited.call("confirm", order=n) for n in range(5)))
    age(file, 3000)

    def twice(passes: Passes) -> list[str]:
        assert passes.sweep() == passes.sweep() == 0
        return list(passes._blocked)

    assert outbox.sender.once(twice) == ["confirm"]
    assert rows(file, "DISTINCT tries, state") == [(0, "waiting")]
    client.execute_command("ACL", "SETUSER", "half", "+set")
    assert sweep(outbox) == 5
    limited.close()


def test_rows_of_a_restored_database_are_held_until_they_are_released(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them at once, also those that one sweep would not reach."""
    monkeypatch.setattr("worqr.sql.statements.MOST_SWEPT", 3)
    monkeypatch.setattr("worqr.sql.sender.MOST_SWEPT", 3)
    outbox = new_outbox(file)
    promises = put(outbox, file, *map(confirm.call, range(8)))
    connection = file()
    connection.execute("UPDATE worqr_outbox SET format = format + 1 WHERE id = ?", (promises[7].id,))
    connection.commit()
    connection.close()
    age(file, 2 * HOUR)

    def with_coverage(passes: Passes) -> int:
        passes._lease()
        assert passes._facts is not None
        passes._facts = replace(passes._facts, covered=passes._facts.covered - 3 * HOUR)
        return sum(passes.sweep() for _ in range(3))

    assert outbox.sender.once(with_coverage) == 0
    assert sorted(rows(file, "state, tries")) == [("held", 0)] * 7 + [("waiting", 0)], "one is of a newer version"
    assert len(outbox.sender.ask(lambda sql: sql.again("held", None))) == 7
    assert outbox.sender.once(with_coverage) == 7
    assert waiting(mesh) == 7


def test_rows_that_come_back_into_a_table_that_was_emptied_are_held(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    """A backup is loaded while workers sweep: the table has another id meanwhile, and what is known of it still holds."""
    outbox = new_outbox(file)

    def reloaded(passes: Passes) -> int:
        passes.sweep()
        assert passes._facts is not None
        passes._facts = replace(passes._facts, covered=passes._facts.covered - 3 * HOUR)
        empty(file)
        passes.sweep()
        put(outbox, file, confirm.call(1))
        age(file, 2 * HOUR)
        return passes.sweep()

    assert outbox.sender.once(reloaded) == 0
    assert rows(file, "state") == ["held"]


@pytest.mark.parametrize("inserted", [2 * HOUR, HOUR // 2], ids=["long before the last sweep", "soon before it"])
def test_rows_that_come_back_while_no_worker_sweeps_are_held_if_sweeps_before_had_seen_them(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, inserted: int
) -> None:
    """As the workers are stopped before a backup is loaded."""
    outbox = new_outbox(file)

    def before(passes: Passes) -> None:
        passes.sweep()
        assert passes._facts is not None
        seen = passes._facts.seen - HOUR  # the last sweep was an hour ago
        passes._facts = replace(passes._facts, covered=seen - 3 * HOUR, seen=seen)

    outbox.sender.once(before)
    put(outbox, file, confirm.call(1))
    age(file, HOUR + inserted)

    def later(passes: Passes) -> int:
        return passes.sweep() + passes.sweep()

    is_held = inserted > HOUR
    assert outbox.sender.once(later) == (not is_held)
    assert rows(file, "state") == ["held"] * is_held


def test_a_mesh_that_was_off_sends_what_has_waited(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    put(outbox, file, confirm.call(1))
    age(file, 50 * HOUR)
    assert sweep(outbox) == 1


def test_one_worker_sweeps_at_a_time_and_says_what_is_in_the_table(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, prefix: str
) -> None:
    outbox, other = new_outbox(file), new_outbox(file)
    put(outbox, file, confirm.call(1))

    def beside(passes: Passes) -> None:
        passes.sweep()
        age(file, 3000)
        assert other.sender.once(Passes.sweep) == 0
        passes._count_at = 0.0
        passes.sweep()

    outbox.sender.once(beside)
    assert other.sender.once(Passes.sweep) == 0  # nothing is left
    [found] = worqr.sync(client_of(mesh).ask, ops.list_outboxes(RegistryKeys(prefix)))
    facts = read_outbox_facts(found.facts)
    assert (facts.table, facts.rows, facts.failed) == ("worqr_outbox", 0, 0)


@pytest.mark.parametrize(
    "stored",
    ["{odd", '{"unknown":' + "[" * 100_000, '{"oldest":' + "9" * 400 + "}", '{"table":"\udcff"}', '{"rows":1.5}'],
    ids=["no JSON", "deep", "huge", "not UTF-8", "fraction"],
)
def test_what_another_program_wrote_about_an_outbox_says_nothing(stored: str) -> None:
    assert read_outbox_facts(stored) == OutboxFacts()


def test_outboxes_of_two_databases_do_not_wait_for_each_other(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, tmp_path: Path
) -> None:
    """Although their tables have one name: the lease is that of the random id in the table, which may also be emptied."""

    def other_file() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "other.db", timeout=PATIENCE)

    outbox, other = new_outbox(file), new_outbox(other_file)
    put(other, other_file, confirm.call(1))
    age(other_file, 3000)

    def beside(passes: Passes) -> int:
        passes.sweep()
        empty(file)
        assert passes.sweep() == 0
        return sweep(other)

    assert outbox.sender.once(beside) == 1


def test_outboxes_of_one_table_with_other_queues_do_not_wait_for_each_other(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    """People see one table, as the last of their workers has told."""
    outbox, other = new_outbox(file, queues=["other"]), new_outbox(file, queues=["confirm"])
    put(other, file, confirm.call(1))
    age(file, 3000)

    def beside(passes: Passes) -> int:
        assert passes.sweep() == 0
        sent = sweep(other)
        passes._count_at = 0.0
        passes.sweep()
        return sent

    assert outbox.sender.once(beside) == 1
    [(own,)] = outbox.sender.ask(lambda sql: (f"SELECT queue FROM {sql.table} WHERE id = 'outbox'", ()))
    [told] = worqr.sync(outboxes_of, client_of(mesh))
    assert (told.id, told.table) == (own, "worqr_outbox")


@pytest.mark.parametrize("away", [False, True])
def test_a_table_that_was_emptied_is_listed_under_its_new_id_alone(
    mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """`away`: the server, when a sweep notices it."""
    outbox = new_outbox(file)

    async def ask(_: object) -> None:
        raise Unavailable("away")

    def emptied(passes: Passes) -> None:
        passes.sweep()
        empty(file)
        with monkeypatch.context() as patch:
            patch.setattr(client_of(mesh), "ask", ask)
            if away:
                with pytest.raises(Unavailable):
                    passes.sweep()
        passes.sweep()

    outbox.sender.once(emptied)
    [(own,)] = outbox.sender.ask(lambda sql: (f"SELECT queue FROM {sql.table} WHERE id = 'outbox'", ()))
    assert [each.id for each in worqr.sync(outboxes_of, client_of(mesh))] == [own]


def test_a_sender_that_has_slept_for_ten_minutes_sends_nothing_that_it_has_read_before(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    """Another one has sent the row meanwhile, its job has ended, and the server has forgotten it."""
    outbox = new_outbox(file)
    put(outbox, file, confirm.call(1))
    age(file, 3000)

    def sleeping(passes: Passes) -> None:
        read = [Row(*each) for each in passes._database.query(passes._sql.by_id(rows(file)))]
        read_at = boottime() - 600
        with pytest.raises(worqr.Unavailable) as found:
            passes._send(read, read_at)
        assert found.value.sent is False
        assert passes._send(read, read_at + 599) == 1

    assert len(rows(file)) == 1
    outbox.sender.once(sleeping)
    assert (waiting(mesh), rows(file)) == (1, [])


def test_the_application_writes_while_the_server_is_slow_and_a_sweep_of_an_empty_table_locks_nothing(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    """SQLite has one writer at a time."""
    outbox = new_outbox(file)
    put(outbox, file, confirm.call(1))
    age(file, 3000)

    def beside(passes: Passes) -> None:
        connection, send = file(), passes._send
        connection.execute("PRAGMA busy_timeout = 0")

        def while_the_server_is_slow(rows: Any, read_at: float) -> int:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (n INTEGER)")
            connection.commit()
            return send(rows, read_at)

        passes._send = while_the_server_is_slow  # type: ignore[method-assign]
        assert passes.sweep() == 1
        passes._database._connection.execute("PRAGMA busy_timeout = 0")  # type: ignore[attr-defined]
        connection.execute("BEGIN IMMEDIATE")
        assert passes.sweep() == 0
        connection.close()

    outbox.sender.once(beside)


def test_a_row_stays_until_a_replica_has_its_job(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Here there is none. Without `replicas`, it is deleted, and the job is the same one."""
    put(new_outbox(file), file, confirm.call(1))
    age(file, 3000)
    assert sweep(new_outbox(file, replicas=1)) == 0
    assert "rows of the outbox for queue 'confirm' wait" in caplog.text
    assert rows(file, "tries, state") == [(0, "waiting")]
    assert sweep(new_outbox(file)) == 1
    assert (waiting(mesh), rows(file)) == (1, [])


def test_a_row_that_asks_for_a_replica_delays_no_others(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = new_outbox(file)
    [asking, *_] = put(outbox, file, confirm.options(replicas=1).call(0), *(confirm.call(n) for n in range(600)))
    age(file, 3000)
    assert sweep(outbox) + sweep(outbox) == 600
    assert rows(file, "id, tries, state") == [(asking.id, 1, "waiting")]
    assert "rows of the outbox for queue 'confirm' wait" in caplog.text
    assert waiting(mesh) == 601


def test_a_worker_that_ends_during_a_sweep_gives_its_lease_back(
    new_outbox: NewOutbox, file: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, sweep, swept, ended, given = new_outbox(file), Passes.sweep, *(threading.Event() for _ in range(3))
    give_back = Passes.give_back

    def slow(passes: Passes) -> int:
        sent = sweep(passes)
        swept.set()
        assert ended.wait(PATIENCE)
        return sent

    def noted(passes: Passes) -> None:
        give_back(passes)
        given.set()

    monkeypatch.setattr(Passes, "sweep", slow)
    monkeypatch.setattr(Passes, "give_back", noted)
    with outbox.sender.sweeping():
        assert swept.wait(PATIENCE)
    ended.set()
    assert given.wait(20), "the thread would keep it for a minute"


def test_close_waits_for_no_worker(mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect) -> None:
    outbox, connection = new_outbox(file), file()
    with outbox.sender.sweeping():
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(1))
        began = time.monotonic()
        outbox.close(PATIENCE)
        assert time.monotonic() - began < PATIENCE / 2
        assert (waiting(mesh), rows(file)) == (1, [])
    connection.close()


def test_a_worker_without_access_to_the_database_does_not_sweep(mesh: worqr.Mesh[Any], confirm: Any) -> None:
    def no_access() -> sqlite3.Connection:
        raise AssertionError("a worker has connected")

    outbox = Outbox(mesh, no_access, sweep=False)
    with mesh.join_in_thread():
        worqr.sync(confirm.enqueue, 1)
    assert outbox.sender._thread is None


def test_rows_of_a_dump_that_is_restored_are_held_until_they_are_released(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    put(outbox, file, confirm.call(1))

    def over_hours(passes: Passes) -> None:
        """Sweeps go on while the row is sent, its job ends, and the server forgets it. Then its dump comes back."""
        connection = file()
        passes._lease()
        dump = "\n".join(connection.iterdump())
        assert passes._facts is not None
        passes._facts = replace(passes._facts, covered=passes._facts.covered - 3 * HOUR)
        age(file, 3000)
        assert passes.sweep() == 1
        worqr.sync(mesh.queue("confirm").cancel_all)
        for table in ("worqr_outbox", "worqr_outbox_steps"):
            connection.execute(f"DROP TABLE {table}")
        connection.executescript(dump)
        connection.close()
        age(file, 2 * HOUR)
        assert passes.sweep() == 0

    outbox.sender.once(over_hours)
    assert (waiting(mesh), rows(file, "state, tries")) == (0, [("held", 0)])
    assert sweep(outbox) == 0
    assert len(outbox.sender.ask(lambda sql: sql.again("held", None))) == 1  # worqr outbox --release
    assert sweep(outbox) == 1


def test_the_memory_of_a_sender_has_a_bound_and_what_fits_is_sent_at_once(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.sql.sender.MOST_HANDED_OVER", 3)
    outbox, connection = new_outbox(file), file()
    with outbox.transaction(connection):
        for n in range(5):
            outbox.enqueue(connection, confirm.call(n))
    outbox.close(PATIENCE)
    assert (waiting(mesh), len(rows(file))) == (3, 2)
    connection.close()


def test_an_outage_of_the_database_never_reaches_the_caller(
    confirm: Any, new_outbox: NewOutbox, file: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = new_outbox(file)
    connection = file()
    connection.execute("DROP TABLE worqr_outbox")
    connection.commit()
    connection.close()
    outbox.sender.hand_over(["0a" * 16])
    outbox.close(60)
    assert "no such table" in caplog.text


def test_an_error_of_a_driver_that_is_no_exception_ends_no_sender(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """As the panic of a library in Rust, or the `sys.exit()` of a function that reads settings."""
    fails = [True]

    def connect() -> sqlite3.Connection:
        if fails:
            raise SystemExit("no settings")
        return file()

    new_outbox(file)
    outbox, connection = Outbox(mesh, connect, sweep=False), file()
    for n in range(2):
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(n))
        outbox.close(PATIENCE)
        fails.clear()
    assert (waiting(mesh), len(rows(file))) == (1, 1)
    assert "no settings" in caplog.text
    connection.close()


def test_a_driver_that_panics_also_as_its_connection_is_closed_ends_no_sender(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect, tmp_path: Path
) -> None:
    class Panic(BaseException):
        pass

    class Broken(sqlite3.Connection):
        used = 0

        def cursor(self, *given: Any, **named: Any) -> Any:
            self.used += 1
            if fails and self.used > 2:  # the first ones ask for its file and its version
                raise Panic
            return super().cursor(*given, **named)

        def close(self) -> None:
            super().close()
            if fails:
                fails.clear()
                raise Panic

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "app.db", timeout=PATIENCE, factory=Broken)

    fails = [True]
    new_outbox(file)
    outbox, connection = Outbox(mesh, connect, sweep=False), file()
    for n in range(2):
        with outbox.transaction(connection):
            outbox.enqueue(connection, confirm.call(n))
        wait_until(lambda: not fails)
    wait_until(lambda: waiting(mesh) == 1)
    outbox.close(PATIENCE)
    connection.close()


def test_recording_notes_what_is_enqueued_and_stores_nothing(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    connection = file()
    with recording(mesh) as sent:
        outbox.enqueue(connection, confirm.call(1))
        assert sent.calls(confirm) == [confirm.call(1)]
    connection.commit()
    connection.close()
    assert rows(file) == []


def test_a_worker_sweeps_what_a_dead_process_has_left(
    mesh: worqr.Mesh[Any], new_outbox: NewOutbox, file: Connect
) -> None:
    ran: list[int] = []
    done = threading.Semaphore(0)

    @mesh.task(name="confirm")
    def confirm(order: int) -> None:
        ran.append(order)
        done.release()

    outbox = new_outbox(file, sweep=True)
    put(outbox, file, *(confirm.call(n) for n in range(5)))
    age(file, 3000)
    with mesh.join_in_thread():
        assert all(done.acquire(timeout=PATIENCE) for _ in range(5))
    assert sorted(ran) == [0, 1, 2, 3, 4]
    outbox.close(60)
    assert rows(file) == []
    gc.collect()


def test_a_time_of_its_own_is_absolute(
    mesh: worqr.Mesh[Any], confirm: Any, new_outbox: NewOutbox, file: Connect
) -> None:
    outbox = new_outbox(file)
    put(outbox, file, confirm.options(run_at=datetime.now(UTC) + timedelta(hours=1)).call(1))
    age(file, 10 * 60_000)
    sweep(outbox)
    assert scheduled(mesh) == 1


def test_an_outbox_imports_no_driver_and_worqr_no_outbox() -> None:
    code = (
        "import sys, worqr; worqr.Mesh(); assert 'worqr.sql' not in sys.modules; import worqr.sql; "
        "print(*sorted({'sqlalchemy', 'psycopg', 'asyncpg', 'aiosqlite', 'django', 'sqlite3', 'asyncio'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []

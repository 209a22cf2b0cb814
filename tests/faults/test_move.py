"""``worqr move``: a mesh changes its server under load, and programs that know the old one follow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest
import redis
import trio

import worqr
from tests.faults.test_outages import Load
from tests.support.patience import PATIENCE, until
from tests.support.replicated import REPLICATING, follow, wait
from tests.support.servers import Server, programs, started
from worqr.cli import main, move
from worqr.cli.errors import CommandFailed

Start = Callable[..., Server]
PREFIX = "shop"
LISTENERS: list[redis.Connection] = []
"""What must not be collected while a test runs."""


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(kind, name="value")`: a server of this test alone, with settings."""
    servers: list[Server] = []

    def run(kind: str, *, appendonly: bool = True, **settings: str) -> Server:
        given = {name.replace("_", "-"): value for name, value in settings.items()}
        servers.append(started(lambda: Server(kind, appendonly=appendonly, settings={**REPLICATING, **given})))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


@pytest.fixture
def old(server_kind: str, start: Start) -> Server:
    return start(server_kind)


@pytest.fixture
def new(server_kind: str, start: Start) -> Server:
    return start(server_kind)


def arguments(old: Server, new: Server, *options: str) -> list[str]:
    """The server that a program uses over a socket is copied over its port."""
    place = ("--url", old.url, "--from", f"127.0.0.1:{old.port}", "--prefix", PREFIX)
    return ["move", new.tcp_url.removesuffix("/0"), *place, "--patience", str(PATIENCE), *options]


async def move_it(old: Server, new: Server, *options: str) -> None:
    assert await trio.to_thread.run_sync(main, arguments(old, new, *options)) == 0


def role(server: Server) -> str:
    return str(server.look.info("replication")["role"])


async def test_nothing_is_lost_and_nothing_runs_twice(
    old: Server, new: Server, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    load = Load(old, PREFIX)
    async with load.running():
        await load.wait_ran(100)
        await move_it(old, new)
        assert role(new) == "master"
        await load.wait_ran(100)
        wait(lambda: old.look.dbsize() == new.look.dbsize(), "the same keys")
        assert [peer.id for peer in load.peers] == load.ids, "no worker was swept"
        with pytest.raises(redis.exceptions.ReadOnlyError):
            old.look.lpush(f"{PREFIX}:{{Q1}}", "of another language")
        old.stop()
        await load.wait_ran(100)
    load.assert_each_once()
    assert "lost" not in load.cancelled
    assert "is a replica now, and sends programs to" in capfd.readouterr().out
    assert any(record.getMessage().startswith("link.moved: ") for record in caplog.records)


async def test_ids_results_order_and_times_move_with_the_jobs(old: Server, new: Server) -> None:
    mesh, order = worqr.Mesh(old.url, prefix=PREFIX, keepalive=PATIENCE), list[int]()

    @mesh.task(result_ttl=3600, concurrency=1)
    async def double(n: int) -> int:
        order.append(n)
        return 2 * n

    async with mesh.connect():
        jobs = [await double.options(id=f"job-{n}").dispatch(n) for n in range(50)]
        later = await double.options(id="later", delay=3600).dispatch(0)
        due = (await later.status()).run_at
        await move_it(old, new)
        after = worqr.Mesh(new.tcp_url, prefix=PREFIX)
        async with mesh.join(), after.connect():
            assert [await job.result() for job in jobs] == [2 * n for n in range(50)]
            assert order == list(range(50))
            assert (await after.queue(double.queue.name).job("later").status()).run_at == due
    started_later = worqr.Mesh(old.url, prefix=PREFIX)
    async with started_later.connect():
        assert await started_later.queue(double.queue.name).job("job-1").result() == 2


@pytest.mark.parametrize("step", ["_write_addresses", "_hand_over", "_settle"])
async def test_a_move_that_was_killed_is_finished_by_the_next_one(
    old: Server, new: Server, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step but the first, the command has done what comes before. After `_settle` it runs once more for nothing."""
    stopped = list[object]()  # so that its connections are not closed because they are collected

    def stop(*given: object) -> None:
        stopped.extend(given)
        raise KeyboardInterrupt

    load = Load(old, PREFIX)
    async with load.running():
        await load.wait_ran(50)
        with monkeypatch.context() as patched:
            patched.setattr(move.Move, step, stop)
            assert await trio.to_thread.run_sync(main, arguments(old, new)) == 130
        assert stopped
        for server in (old, new):
            await until(lambda look=server.look: "worqr:cli:move" not in {each["name"] for each in look.client_list()})
        await load.wait_ran(1 if step == "_settle" else 50)
        for _ in range(2):
            await move_it(old, new)
            await load.wait_ran(50)
    load.assert_each_once()
    assert (role(old), role(new)) == ("slave", "master")


async def test_a_mesh_moves_back_and_on(old: Server, new: Server, server_kind: str, start: Start) -> None:
    third, load = start(server_kind), Load(old, PREFIX)
    async with load.running():
        for here, there in ((old, new), (new, old), (old, third)):
            await load.wait_ran(30)
            await move_it(here, there)
        await load.wait_ran(30)
        stale = worqr.Mesh(new.url, prefix=PREFIX)  # two moves behind
        async with stale.connect():
            await stale.queue("Q2").enqueue(b"1")
        assert third.look.llen(f"{PREFIX}:{{Q2}}") == 1
    load.assert_each_once()


async def test_the_data_of_redis_move_to_valkey_and_not_back(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    if {"redis", "valkey"} - {*programs()}:
        pytest.skip("needs a server of each kind")
    old, new = start("redis"), start("valkey")
    assert main(arguments(new, old)) == 1
    assert "cannot load the data of Valkey" in capsys.readouterr().err
    load = Load(old, PREFIX)
    async with load.running():
        await load.wait_ran(50)
        await move_it(old, new)
        await load.wait_ran(50)
    load.assert_each_once()


async def test_every_mesh_and_database_is_told(old: Server, new: Server, capfd: pytest.CaptureFixture[str]) -> None:
    others = [worqr.Mesh(url, prefix=prefix) for url, prefix in ((old.url, "other"), (f"{old.url}?db=3", "third"))]
    for mesh in others:
        async with mesh.connect():
            await mesh.queue("Q").enqueue(b"1")
    await move_it(old, new)
    assert "of 3 meshes" in capfd.readouterr().out
    for mesh in others:
        async with mesh.connect():
            await mesh.queue("Q").enqueue(b"2")
            assert (await mesh.queue("Q").info()).waiting == 2


async def test_a_mesh_that_begins_during_the_move_is_told(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = worqr.Mesh(old.url, prefix="late")

    async def enqueue(task: bytes) -> int:
        async with late.connect():
            await late.queue("Q").enqueue(task)
            return (await late.queue("Q").info()).waiting

    hand_over = move.Move._hand_over

    def enqueue_and_hand_over(self: move.Move) -> float:
        trio.run(enqueue, b"1")
        return hand_over(self)

    monkeypatch.setattr(move.Move, "_hand_over", enqueue_and_hand_over)
    await move_it(old, new)
    assert await enqueue(b"2") == 2


async def test_the_password_of_the_new_server_is_stored_if_asked(old: Server, server_kind: str, start: Start) -> None:
    new = start(server_kind, requirepass="secret")
    url = f"redis://:secret@127.0.0.1:{new.port}"
    with_password = [url if word.startswith("redis://") else word for word in arguments(old, new)]
    load = Load(old, PREFIX)
    async with load.running():
        await load.wait_ran(20)
        done = await trio.to_thread.run_sync(partial(main, with_password))
        assert (done, role(old)) == (1, "master")
        assert await trio.to_thread.run_sync(partial(main, [*with_password, "--store-password"])) == 0
        await load.wait_ran(20)
    load.assert_each_once()


async def test_a_replica_that_was_set_up_otherwise_is_not_left(
    old: Server, new: Server, server_kind: str, start: Start
) -> None:
    """A copy of the data, for example for tests, must not send its programs to the server that the data came from."""
    await move_it(old, new)
    copy, other = start(server_kind), start(server_kind)
    follow(copy, new)
    copy.look.execute_command("REPLICAOF", "NO", "ONE")
    follow(other, copy)
    with pytest.raises(worqr.Unavailable, match="replica"):
        async with worqr.Mesh(other.url, prefix=PREFIX, patience=0.5).connect():
            raise AssertionError("a replica was used")
    mesh = worqr.Mesh(copy.url, prefix=PREFIX)
    async with mesh.connect():
        await mesh.queue("Q").enqueue(b"1")
    assert (copy.look.llen(f"{PREFIX}:{{Q}}"), new.look.llen(f"{PREFIX}:{{Q}}")) == (1, 0)


async def test_a_stored_url_that_cannot_be_used_is_an_error(old: Server, new: Server) -> None:
    await move_it(old, new)
    new.look.hset(f"{{{PREFIX}}}:moved", f"127.0.0.1:{new.port}", "http://elsewhere")
    wait(lambda: old.look.hget(f"{{{PREFIX}}}:moved", f"127.0.0.1:{new.port}") == b"http://elsewhere", "the replica")
    with pytest.raises(worqr.RefusedByServer, match="moved to a URL that cannot be used: .* must begin with redis://"):
        async with worqr.Mesh(old.url, prefix=PREFIX).connect():
            pass


def setting(name: str, value: str) -> Callable[[Server, Server], None]:
    def change(_old: Server, new: Server) -> None:
        new.look.config_set(name, value)

    return change


def a_key(_old: Server, new: Server) -> None:
    new.look.set("somebody's", "1")


def a_replica(_old: Server, new: Server) -> None:
    new.look.execute_command("REPLICAOF", "127.0.0.1", "1")


def replica_before(old: Server, _new: Server) -> None:
    old.look.execute_command("REPLICAOF", "127.0.0.1", "1")


def a_user(old: Server, _new: Server) -> None:
    old.look.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all")


def watched(old: Server, _new: Server) -> None:
    connection = old.look.connection_pool.make_connection()
    connection.send_command("SUBSCRIBE", "__sentinel__:hello")
    connection.read_response()
    LISTENERS.append(connection)


def memory(old: Server, new: Server) -> None:
    old.look.set("large", "x" * 4_000_000)
    new.look.config_set("maxmemory", "3500000")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (setting("maxmemory-policy", "allkeys-lru"), "deletes data when its memory is full"),
        (setting("appendonly", "no"), "loses its data at a restart"),
        (a_key, "has 1 keys, which a move would delete"),
        (a_replica, "is a replica of 127.0.0.1:1: choose a server that stands alone"),
        (replica_before, "is a replica of 127.0.0.1:1: move the mesh from its primary"),
        (a_user, "does not accept the user app"),
        (watched, "is watched by Sentinels"),
        (memory, "raise its maxmemory"),
    ],
)
def test_what_would_lose_data_is_refused_before_anything_is_changed(
    old: Server,
    new: Server,
    change: Callable[[Server, Server], None],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(old, new)
    before = [(role(each), each.look.dbsize()) for each in (old, new)]
    for options in ((), ("--check",)):
        assert main(arguments(old, new, *options)) == 1
        assert text in capsys.readouterr().err
    assert [(role(each), each.look.dbsize()) for each in (old, new)] == before


def test_a_server_is_not_moved_to_itself(old: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(old, old)) == 1
    assert "are the same server" in capsys.readouterr().err


def test_a_check_changes_nothing(old: Server, new: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(old, new, "--check")) == 0
    assert capsys.readouterr().out == "all checks passed; nothing was changed\n"
    assert (role(old), role(new), new.look.dbsize()) == ("master", "master", 0)


def test_a_check_leaves_a_hand_over_alone(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(move, "HAND_OVER_WITHIN", 0.2)
    monkeypatch.setattr(move, "_hands_over", lambda _: True)
    assert main(arguments(old, new, "--check")) == 1
    assert "hands over now: run the command without --check" in capsys.readouterr().err


def test_a_new_server_that_is_lost_while_it_takes_over_is_named_with_the_remedy(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(move, "_hands_over", lambda _: True)
    words = arguments(old, new)
    new.stop()
    assert main(words) == 1
    assert "send FAILOVER ABORT to the old one" in capsys.readouterr().err


def test_a_copy_that_was_cut_off_goes_on(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old.look.set("k", "1")
    follow(new, old)
    wait(lambda: new.look.get("k") == b"1", "a copy")
    new.look.replicaof("127.0.0.1", "1")  # as a network that is cut: it keeps its data
    with monkeypatch.context() as patched:
        patched.setattr(move, "REACHED_WITHIN", 0.3)
        place = ["127.0.0.1:1" if word.startswith("127.") else word for word in arguments(old, new)]
        assert main(place) == 1
        assert "cannot copy from 127.0.0.1:1" in capsys.readouterr().err
    assert (role(new), new.look.get("k")) == ("slave", b"1")
    new.look.replicaof("127.0.0.1", str(old.port))
    assert main(arguments(old, new)) == 0
    assert (role(new), new.look.get("k")) == ("master", b"1")


def test_an_old_server_that_the_new_one_cannot_reach_stays_in_use(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(move, "REACHED_WITHIN", 0.3)
    place = ["127.0.0.1:1" if word.startswith("127.") else word for word in arguments(old, new)]
    assert main(place) == 1
    assert "cannot copy from 127.0.0.1:1, and its log says why" in capsys.readouterr().err
    assert (role(old), role(new)) == ("master", "master")


def test_a_copy_that_cannot_be_loaded_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check of versions is left out, so that a real server gets what it cannot read."""
    if {"redis", "valkey"} - {*programs()}:
        pytest.skip("needs a server of each kind")
    old, new = start("valkey"), start("redis")
    old.look.hset("h", "f", "1")
    old.look.execute_command("HEXPIRE", "h", "1000", "FIELDS", "1", "f")
    monkeypatch.setattr(move.Move, "_check_versions", lambda *_: None)
    monkeypatch.setattr(move, "LOADS", 0)
    assert main(arguments(old, new)) == 1
    assert "cannot load the data of" in capsys.readouterr().err
    assert (role(old), role(new)) == ("master", "master")


def test_a_new_server_that_does_not_catch_up_leaves_the_old_one_in_use(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(move, "HAND_OVER_WITHIN", 0.2)
    began = move.Move._hand_over

    def frozen(self: move.Move) -> float:
        new.pause()
        old.look.set("k", "1")
        return began(self)

    monkeypatch.setattr(move.Move, "_hand_over", frozen)
    assert main(arguments(old, new)) == 1
    new.resume()
    assert "did not catch up within 0.2 s" in capsys.readouterr().err
    assert role(old) == "master"
    monkeypatch.undo()
    assert main(arguments(old, new)) == 0
    assert new.look.get("k") == b"1"


def test_a_user_without_rights_is_refused(old: Server, new: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for server in (old, new):
        server.look.execute_command(
            "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-replicaof", "-@admin"
        )
    urls = {old.url: old.url.replace("//", "//app:secret@")}
    assert main([urls.get(word, word) for word in arguments(old, new)]) == 1
    assert "Moving needs a user that may do everything" in capsys.readouterr().err
    assert (role(old), role(new)) == ("master", "master")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["unix:///tmp/s"], "a mesh moves to one server: write redis://HOST:PORT"),
        (["redis+sentinel://h/s"], "a mesh moves to one server"),
        (["http://h"], "must begin with redis://"),
        (["redis://h:1/4"], "databases keep their numbers: write redis://h:1/0"),
        (["redis://h:1", "--url", "redis+cluster://h"], "is not one server"),
        (["redis://h:1", "--url", "unix:///tmp/s"], "cannot reach the socket /tmp/s: give the old one a port"),
        (["redis://h:1", "--from", "h"], "--from must be HOST:PORT"),
        (["redis://h:1", "--from", "h:70000"], "--from must be HOST:PORT"),
        (["redis://h:1"], "the new server cannot reach 127.0.0.1: pass --from HOST:9"),
        (["redis://localhost:1", "--url", "redis://h:1"], "localhost is another machine for each program"),
        (["redis://127.0.0.1:1", "--store-password"], "--store-password needs a user or a password"),
        (["rediss://127.0.0.1:1?ssl_password=secret"], "ssl_password would be stored in the data"),
    ],
)
def test_wrong_arguments_are_named(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = [] if "--url" in given else ["--url", "redis://127.0.0.1:9"]
    assert main(["move", *given, *url]) == 2
    assert text in capsys.readouterr().err


def test_a_server_that_is_away_is_named(new: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["move", new.tcp_url, "--url", "redis://127.0.0.1:1"]) == 1
    assert "cannot connect to redis://127.0.0.1:1" in capsys.readouterr().err


def test_the_error_of_a_lost_connection_says_how_to_go_on(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(move.Side(move.LinkSettings(old.url))) as side:
        old.stop()
        with pytest.raises(CommandFailed, match="run the same command again, it goes on where it stopped"):
            side.info()


async def test_an_old_server_that_cannot_connect_to_the_new_one_accepts_writes_again(
    old: Server,
    server_kind: str,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The end of FAILOVER waits for that for ever. Meanwhile programs find two replicas, and follow neither."""
    new = start(server_kind, requirepass="secret")
    words = [word.replace("//", "//:secret@") if word.startswith("redis://") else word for word in arguments(old, new)]
    prepare = move.Move._prepare

    def prepare_wrongly(self: move.Move, replica: move.Side, primary: move.Side) -> None:
        prepare(self, replica, primary)
        if replica.settings.url == old.url:
            replica.ask("CONFIG", "SET", "masterauth", "wrong")

    load = Load(old, PREFIX)
    async with load.running():
        await load.wait_ran(20)
        with monkeypatch.context() as patched:
            patched.setattr(move, "HAND_OVER_WITHIN", 3.0)
            patched.setattr(move.Move, "_prepare", prepare_wrongly)
            assert await trio.to_thread.run_sync(main, [*words, "--store-password"]) == 1
        assert f"cannot connect to 127.0.0.1:{new.port}, and its log says why" in capfd.readouterr().err
        assert role(old) == "master"
        await load.wait_ran(50)
        assert await trio.to_thread.run_sync(main, [*words, "--store-password"]) == 0
        await load.wait_ran(50)
    load.assert_each_once()


def test_clocks_that_differ_are_refused(
    old: Server, new: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(move, "MOST_APART", -1)
    assert main(arguments(old, new)) == 1
    assert "the clocks of the servers differ by 0 s" in capsys.readouterr().err
    assert role(new) == "master"

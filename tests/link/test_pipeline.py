"""Requests through the I/O thread to a real server: order, neighbours, numbers, refusals of one."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import trio

from tests.link.conftest import LinkTo
from tests.link.scripts import ECHO, Outcomes, append, echo, kill_connections, knows_why, lines, log, script, until
from tests.support.servers import Server
from worqr.command import Command
from worqr.errors import ClaimSettled, QueueFull, RefusedByServer, Unavailable, UsageError, WorqrBug
from worqr.link import Link
from worqr.link.node import ENOUGH
from worqr.link.session import Session


async def test_every_task_gets_its_own_answer(link: Link) -> None:
    wrong: list[str] = []

    async def ask(who: int) -> None:
        for n in range(20):
            text = f"{who}.{n}"
            if await link.call(echo(text)) != text:
                wrong.append(text)

    async with trio.open_nursery() as nursery:
        for who in range(100):
            nursery.start_soon(ask, who)
    assert not wrong


async def test_requests_arrive_in_the_order_in_which_they_were_made(link: Link, server: Server, prefix: str) -> None:
    outcomes = Outcomes()
    for i in range(3000):
        link.post(log(prefix, str(i)), outcomes)
    await outcomes.wait(3000)
    with server.client() as client:
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [str(i).encode() for i in range(3000)]
    assert outcomes.values == list(range(1, 3001))


async def test_what_waits_travels_in_one_pipeline(link: Link) -> None:
    await link.call(echo("so that the script is there"))
    sends: list[int] = []
    real = Session.send

    def counting(self: Session, batch: list[Any], *rest: Any) -> Any:
        sends.append(len(batch))
        return real(self, batch, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "send", counting)
        async with trio.open_nursery() as nursery:
            for i in range(200):
                nursery.start_soon(link.call, echo(str(i)))
    assert sum(sends) == 200
    assert len(sends) < 20


async def test_of_many_calls_the_first_are_sent_before_the_others_are_made(link: Link) -> None:
    made, sends, answers = 0, list[tuple[int, int]](), list[str]()
    real = Session.send

    def noting(self: Session, batch: list[Any], *rest: Any) -> Any:
        sends.append((len(batch), made))
        return real(self, batch, *rest)

    async def ask(text: str) -> None:
        nonlocal made
        made += 1
        answers.append(await link.call(echo(text)))

    async with trio.open_nursery() as nursery:  # one, then a batch of two: after a batch of several, calls gather
        for before in ("first", "second", "third"):
            nursery.start_soon(ask, before)
    made = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "send", noting)
        async with trio.open_nursery() as nursery:
            for i in range(ENOUGH + 10):
                nursery.start_soon(ask, str(i))
    assert sends == [(ENOUGH, ENOUGH), (10, ENOUGH + 10)]
    assert sorted(answers) == sorted(["first", "second", "third", *map(str, range(ENOUGH + 10))])


async def test_a_task_of_many_megabytes_comes_back_whole(link: Link) -> None:
    big = bytes(range(256)) * (12 * 4096)
    call = Command(ECHO, "t:{Q}", (big,), lambda reply: reply[1], size=len(big))
    small: list[str] = []

    async def ask() -> None:
        small.append(await link.call(echo("small")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        assert await link.call(call) == big
        nursery.start_soon(ask)
    assert small == ["small", "small"]


@pytest.mark.parametrize("bad", [None, "\ud800", object()])
async def test_an_argument_that_cannot_be_sent_harms_nobody_else(link: Link, bad: Any) -> None:
    before, after = Outcomes(), Outcomes()
    link.post(echo("before"), before)
    broken = Outcomes()
    link.post(Command(ECHO, "t:{Q}", (bad,), lambda reply: reply, numbered=True), broken)
    link.post(echo("after"), after)
    await after.wait(1)
    assert (before.values, after.values) == (["before"], ["after"])
    assert isinstance(broken.all[0][1], UsageError)
    assert "echo" in str(broken.all[0][1])


async def test_what_read_raises_is_the_outcome_of_that_call_alone(link: Link) -> None:

    def refuse(reply: list[Any]) -> str:
        raise ClaimSettled("it was settled")

    def stumble(reply: list[Any]) -> str:
        return str(1 / 0)

    outcomes = Outcomes()
    for call in (echo("a"), echo("b", refuse), echo("c", stumble), echo("d")):
        link.post(call, outcomes)
    await outcomes.wait(4)
    values, errors = zip(*outcomes.all, strict=True)
    assert values == ("a", None, None, "d")
    assert isinstance(errors[1], ClaimSettled)
    assert isinstance(errors[2], WorqrBug)
    assert isinstance(errors[2].__cause__, ZeroDivisionError)


async def test_a_foreign_type_refuses_that_call_alone(link: Link, server: Server, prefix: str) -> None:
    with server.client() as client:
        client.set(f"{prefix}:{{Q}}", "not a list")
    with pytest.raises(RefusedByServer, match=r"log: WRONGTYPE .* Find it with `redis-cli TYPE KEY`") as caught:
        await link.call(log(prefix, "secret payload"))
    assert f"{prefix}:{{Q}}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert await link.call(echo("a")) == "a"
    assert link.connections == 1


async def test_a_script_that_raises_is_refused_without_its_arguments(link: Link) -> None:
    bad = script("bad", "return KEYS[1] .. nil")
    with pytest.raises(RefusedByServer) as caught:
        await link.call(Command(bad, "t:{Q}", ("secret",), lambda reply: reply))
    assert "bad" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_script_that_does_not_compile_is_refused(link: Link) -> None:
    bad = script("torn", "return (")
    outcomes = Outcomes()
    link.post(Command(bad, "t:{Q}", (), lambda reply: reply), outcomes)
    link.post(echo("a"), outcomes)
    await outcomes.wait(2)
    errors = {type(error): str(error) for _, error in outcomes.all if error}
    assert "torn" in errors[RefusedByServer]
    assert "a" in outcomes.values


# SequenceNumbers


async def test_numbers_count_per_base_and_the_lowest_moves(link: Link, prefix: str) -> None:
    assert await link.call(append(prefix, "a")) == ["ok", 1, 1, 1]
    assert await link.call(append(prefix, "b")) == ["ok", 2, 2, 2]
    assert await link.call(append(prefix, "c", "R")) == ["ok", 1, 1, 1]
    outcomes = Outcomes()
    for _ in range(3):
        link.post(append(prefix, "d"), outcomes)
    await outcomes.wait(3)
    numbers = [(number, lowest) for _, _, number, lowest in outcomes.values]
    assert [number for number, _ in numbers] == [3, 4, 5]
    assert all(3 <= lowest <= number for number, lowest in numbers)


async def test_two_links_are_two_producers(link_to: LinkTo, server: Server, prefix: str) -> None:
    one, other = await link_to(server.url), await link_to(server.url)
    assert one.producer != other.producer
    assert await one.call(append(prefix, "a")) == ["ok", 1, 1, 1]
    assert await other.call(append(prefix, "b")) == ["ok", 2, 1, 1]


# Scripts that the server forgets


async def test_scripts_that_are_flushed_under_load_cost_nothing_and_no_order(
    link: Link, server: Server, prefix: str
) -> None:
    outcomes, stop, flushes = Outcomes(), threading.Event(), 0

    def flush() -> None:
        nonlocal flushes
        with server.client() as client:
            while not stop.wait(0.003):
                client.script_flush()
                flushes += 1

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        for i in range(0, 6000, 20):
            for j in range(i, i + 20):
                link.post(append(prefix, str(j)), outcomes)
            await until(lambda enough=i // 100: flushes >= enough)  # type: ignore[misc]
        await outcomes.wait(6000)
    finally:
        stop.set()
        await trio.to_thread.run_sync(thread.join)
    assert flushes >= 59
    assert [error for _, error in outcomes.all if error] == []
    with server.client() as client:
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [str(i).encode() for i in range(6000)]
    assert link.connections == 1


async def test_a_user_who_may_not_load_scripts_is_told_so(link_to: LinkTo, own_server: Server) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all", "-script|load")
    link = await link_to(own_server.tcp_url.replace("redis://", "redis://bob:pw@"))
    with pytest.raises(RefusedByServer, match="echo: NOPERM"):
        await link.call(echo("a"))
    with own_server.client() as client:
        client.script_load(ECHO.source)
    assert await link.call(echo("b")) == "b"


async def test_a_user_who_may_not_ask_for_info_works_all_the_same(link_to: LinkTo, own_server: Server) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all", "-info", "-client")
    link = await link_to(own_server.tcp_url.replace("redis://", "redis://bob:pw@"))
    assert await link.call(echo("a")) == "a"
    assert link.run_id == ""


# The server cannot work for the moment


async def test_a_server_without_memory_is_a_full_queue(own_link: Link, own_server: Server, prefix: str) -> None:
    with own_server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(QueueFull, match="maxmemory"):
            await own_link.call(append(prefix, "a"))
        with pytest.raises(QueueFull):
            await own_link.call(append(prefix, "b"))
        client.config_set("maxmemory", 0)
        assert client.llen(f"{prefix}:{{Q}}") == 0
    assert await own_link.call(append(prefix, "c")) == ["ok", 1, 3, 3]


async def test_a_server_that_may_not_write_is_waited_for_in_order(
    link_to: LinkTo, own_server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    link = await link_to(own_server.url)
    outcomes = Outcomes()
    with own_server.client() as client:
        await link.call(log(prefix, "first"))
        client.config_set("min-replicas-to-write", 1)
        for i in range(5):
            link.post(log(prefix, str(i)), outcomes)
        await until(lambda: lines(caplog, "link.lost"))
        with pytest.raises(Unavailable, match="NOREPLICAS") as caught:
            await link.call(log(prefix, "late"), patience=0.2)
        assert caught.value.sent is not True
        assert not outcomes.all
        client.config_set("min-replicas-to-write", 0)
        await outcomes.wait(5)
        await until(lambda: lines(caplog, "link.back"))
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [b"first", b"0", b"1", b"2", b"3", b"4"]
    assert (len(lines(caplog, "link.lost")), len(lines(caplog, "link.back"))) == (1, 1)
    assert "NOREPLICAS" in lines(caplog, "link.lost")[0]
    assert link.connections == 1


async def test_a_server_that_is_busy_with_a_script_is_waited_for(
    own_link: Link, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.client() as client, own_server.client() as other:
        client.config_set("busy-reply-threshold", 50)

        def spin() -> None:
            try:
                other.eval("while true do end", 0)
            except Exception as error:
                assert "killed" in str(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, spin)
            await until(lambda: _busy(client))
            outcomes = Outcomes()
            own_link.post(echo("a"), outcomes)
            await until(lambda: lines(caplog, "link.lost"))
            client.execute_command("SCRIPT", "KILL")
            await outcomes.wait(1)
    assert outcomes.all == [("a", None)]
    assert "BUSY" in lines(caplog, "link.lost")[0]


def _busy(client: Any) -> bool:
    try:
        client.ping()
    except Exception as error:
        return "BUSY" in str(error)
    return False


async def test_a_primary_that_becomes_a_replica_is_left_and_tried_again(
    own_link: Link, own_server: Server, prefix: str
) -> None:
    await own_link.call(log(prefix, "a"))
    with own_server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        own_link.post(log(prefix, "b"), Outcomes())
        await knows_why(own_link, "READONLY")
        with pytest.raises(Unavailable, match="READONLY"):
            await own_link.call(log(prefix, "impatient"), patience=0.5)
        client.execute_command("REPLICAOF", "NO", "ONE")
        assert await own_link.call(log(prefix, "c")) == 3
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [b"a", b"b", b"c"]
    assert own_link.connections > 1


async def test_an_evicting_policy_is_warned_of_once(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    with own_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        link = await link_to(own_server.url)
        await kill_connections(link, client)
    await link.call(echo("a"))
    await until(lambda: link.connections == 2)
    link._log_thread.emit(logging.getLogger("worqr.link"), "link.back", "the last line")
    await until(lambda: lines(caplog, "link.back: the last line"))
    [line] = lines(caplog, "link.eviction")
    assert "allkeys-lru" in line
    assert "CONFIG SET maxmemory-policy noeviction" in line


# Our own bugs


async def test_a_bug_ends_everything_that_waits(link: Link, caplog: pytest.LogCaptureFixture) -> None:

    def die(*_: object, **__: object) -> None:
        raise ZeroDivisionError("injected")

    outcomes = Outcomes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "send", die)
        for _ in range(3):
            link.post(echo("a"), outcomes)
        await outcomes.wait(3)
    assert {type(error) for _, error in outcomes.all} == {WorqrBug}
    with pytest.raises(WorqrBug, match="injected"):
        await link.call(echo("b"))
    with pytest.raises(WorqrBug, match="injected"):
        await link.wait_ready()
    link.post(echo("c"), outcomes)
    await outcomes.wait(4)
    assert isinstance(outcomes.all[3][1], WorqrBug)
    await until(lambda: lines(caplog, "link.died"))

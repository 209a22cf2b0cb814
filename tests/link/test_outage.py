"""The server goes and comes back: nothing is lost or doubled, patience holds, the log has two lines."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from tests.link.conftest import NEVER_SILENT, LinkTo
from tests.link.scripts import Outcomes, append, echo, kill_connections, knows_why, lines, log, notice, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.errors import ClaimLost, NotReplicated, RefusedByServer, Unavailable, WrongVersion
from worqr.link import Link, WorkerHandle

IN_TIME = PATIENCE / 2
"""Seconds: more than the patience, by what a machine may take that stands still; less than all else that ends a wait here."""

# Before the first connection


async def test_nobody_there_at_the_start_ends_with_patience(link_to: LinkTo) -> None:
    link = await link_to("redis://ada:hunter2@127.0.0.1:1/0", ready=False, patience=1.5)
    await knows_why(link, "refused")
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"redis://ada:\*\*\*@127.0.0.1:1/0 .*refused") as caught:
        await link.wait_ready()
    assert 1.5 <= time.monotonic() - began < IN_TIME
    assert "hunter2" not in str(caught.value)


async def test_a_server_that_comes_later_is_found(link_to: LinkTo, own_server: Server) -> None:
    own_server.stop()
    link = await link_to(own_server.url, ready=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.wait_ready)
        await trio.to_thread.run_sync(own_server.start)
    assert await link.call(echo("a")) == "a"


async def test_a_wrong_password_is_refused_at_once(link_to: LinkTo, own_server: Server) -> None:
    url = own_server.tcp_url.replace("redis://", "redis://ada:hunter2@")
    with trio.fail_after(PATIENCE), pytest.raises(RefusedByServer, match="WRONGPASS") as caught:
        await link_to(url, patience=10 * PATIENCE)
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__}"


async def test_a_database_that_is_not_there_is_refused_at_once(link_to: LinkTo, server: Server) -> None:
    with pytest.raises(RefusedByServer, match="out of range"):
        await link_to(f"{server.url}?db=4711")


@contextmanager
def old_server(version: str) -> Iterator[str]:
    """Answers INFO as a server of `version` does, and OK to everything else."""
    body = f"# Server\r\nredis_version:{version}\r\n".encode()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(65536):
                    for part in data.split(b"*")[1:]:
                        info = b"INFO" in part
                        connection.sendall(b"$%d\r\n%s\r\n" % (len(body), body) if info else b"+OK\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


async def test_a_server_that_is_too_old_is_refused_at_once(link_to: LinkTo) -> None:
    with old_server("6.2.14") as url, pytest.raises(WrongVersion, match=r"Redis 6\.2\.14"):
        await link_to(url)


async def test_a_replica_is_waited_for(link_to: LinkTo, own_server: Server) -> None:
    with own_server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        link = await link_to(own_server.url, ready=False, patience=0.5)
        await knows_why(link, "replica")
        with pytest.raises(Unavailable, match="replica"):
            await link.wait_ready()
        client.execute_command("REPLICAOF", "NO", "ONE")


# Exactly once, whatever breaks


async def load(link: object, prefix: str, outcomes: Outcomes, count: int) -> None:
    for i in range(count):
        link.post(append(prefix, str(i)), outcomes)  # type: ignore[attr-defined]
        if i % 50 == 49:
            await trio.sleep(0.002)


def assert_all_once_in_order(server: Server, prefix: str, outcomes: Outcomes, count: int) -> None:
    assert [error for _, error in outcomes.all if error] == []
    with server.client() as client:
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [str(i).encode() for i in range(count)]
    assert sorted(value[1] for value in outcomes.values) == list(range(1, count + 1))


async def test_connections_that_are_killed_under_load_lose_and_double_nothing(
    link: Link, server: Server, prefix: str
) -> None:
    outcomes = Outcomes()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load, link, prefix, outcomes, 5000)
        with server.client() as client:
            while (answered := len(outcomes.all)) < 4000:
                mine = [c["id"] for c in client.client_list() if c["name"] == "worqr:test:data"]
                for number in mine:
                    client.execute_command("CLIENT", "KILL", "ID", number)
                await outcomes.wait(
                    answered + 1
                )  # a request that loses every connection on which it is alone is given up
    await outcomes.wait(5000)
    assert link.connections > 3
    assert_all_once_in_order(server, prefix, outcomes, 5000)


async def test_a_server_that_is_killed_and_started_again_loses_and_doubles_nothing(
    link_to: LinkTo, own_server: Server, prefix: str
) -> None:
    with own_server.client() as client:
        client.config_set("appendfsync", "always")
    link = await link_to(own_server.url)
    run_id, connected_at = link.run_id, link.connected_at
    outcomes = Outcomes()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load, link, prefix, outcomes, 3000)
        await outcomes.wait(500)
        await trio.to_thread.run_sync(own_server.kill)
        await trio.to_thread.run_sync(own_server.start)
    await outcomes.wait(3000)
    assert_all_once_in_order(own_server, prefix, outcomes, 3000)
    assert link.run_id != run_id
    assert link.connected_at > connected_at


@pytest.mark.parametrize("fault", ["drop_request", "drop_reply"])
async def test_a_connection_cut_in_the_middle_of_a_request(
    proxied: Link, server: Server, proxy: FaultProxy, prefix: str, fault: str
) -> None:
    made = getattr(proxy, fault)(matching="guilty", on="data")
    outcomes = Outcomes()
    for text in ("0", "1", "guilty", "3", "4"):
        proxied.post(append(prefix, text), outcomes)
    await outcomes.wait(5)
    await made.wait_fired()
    with server.client() as client:
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [b"0", b"1", b"guilty", b"3", b"4"]
    assert [number for _, _, number, _ in outcomes.values] == [1, 2, 3, 4, 5]
    assert outcomes.values[2][0] == ("again" if fault == "drop_reply" else "ok")
    assert proxied.connections == 2


async def test_a_reply_cut_in_half_is_nobody_elses(proxied: Link, proxy: FaultProxy, prefix: str) -> None:
    proxy.drop_reply(matching="half", on="data", after=9)
    outcomes = Outcomes()
    for text in ("whole", "half", "next"):
        proxied.post(echo(text), outcomes)
    await outcomes.wait(3)
    assert outcomes.values == ["whole", "half", "next"]


async def test_an_idle_connection_that_was_reset_costs_no_line_and_no_error(
    link_to: LinkTo, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    link = await link_to(server.tcp_url)
    await link.call(echo("a"))
    with server.client() as client:
        link._client.session.used_at -= 60
        [mine] = [c["id"] for c in client.client_list() if c["name"] == "worqr:test:data"]
        client.execute_command("CLIENT", "KILL", "ID", mine)
    assert await link.call(echo("b")) == "b"
    assert link.connections == 2
    assert not lines(caplog, "link.")


# Patience


async def test_a_call_while_nobody_is_there_is_withdrawn_in_time(
    own_link: Link, own_server: Server, prefix: str
) -> None:
    own_server.stop()
    await notice(own_link)
    began = time.monotonic()
    with pytest.raises(
        Unavailable, match=r"^No connection to .* for .*The request append waited 0\.3 s and was withdrawn\.$"
    ) as caught:
        await own_link.call(append(prefix, "withdrawn"), patience=0.3)
    assert caught.value.sent is False
    assert 0.3 <= time.monotonic() - began < IN_TIME
    own_server.start()
    assert await own_link.call(append(prefix, "a")) == ["ok", 1, 1, 1]  # the withdrawn one used no number


async def test_a_call_whose_answer_is_lost_is_of_unknown_fate(
    proxied: Link, server: Server, proxy: FaultProxy, prefix: str
) -> None:
    await proxied.call(append(prefix, "other", "other"))  # so that the script is there
    hold = proxy.hold_reply(matching="held", on="data")
    began = time.monotonic()
    with pytest.raises(Unavailable, match="may have taken effect") as caught:
        await proxied.call(append(prefix, "held"), patience=0.3)
    assert caught.value.sent is None
    assert 0.3 <= time.monotonic() - began < IN_TIME
    later = Outcomes()
    proxied.post(append(prefix, "next"), later)
    hold.release()
    await later.wait(1)
    assert later.values == [["ok", 2, 2, 2]]  # the given-up one is no longer outstanding, its reply went to nobody


async def test_calls_made_while_a_reply_is_awaited_expire_in_time_too(proxied: Link, proxy: FaultProxy) -> None:
    proxy.blackhole("data")
    outcomes = Outcomes()
    proxied.post(echo("stuck"), outcomes)
    await trio.sleep(0.15)
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await proxied.call(echo("behind"), patience=0.3)
    assert caught.value.sent is False
    assert time.monotonic() - began < IN_TIME
    assert not outcomes.all


async def test_a_half_open_connection_is_given_up_and_the_request_resent(
    link_to: LinkTo, server: Server, proxy: FaultProxy, prefix: str
) -> None:
    link = await link_to(proxy.url, socket_timeout=0.5)
    await link.call(append(prefix, "a"))
    proxy.blackhole("data")
    began = time.monotonic()
    outcomes = Outcomes()
    link.post(append(prefix, "b"), outcomes)
    await until(lambda: link._client.connector.state.name != "READY")
    proxy.pass_all()
    await outcomes.wait(1)
    assert [value[1:] for value in outcomes.values] == [[2, 2, 2]]
    assert 0.5 <= time.monotonic() - began < 20


async def test_patience_ends_while_connecting_hangs(link_to: LinkTo, proxy: FaultProxy) -> None:
    proxy.blackhole()
    began = time.monotonic()
    with pytest.raises(Unavailable):
        await link_to(proxy.url, patience=0.3, **NEVER_SILENT)
    assert time.monotonic() - began < IN_TIME


async def test_many_calls_of_many_patiences_all_expire_in_time(own_link: Link, own_server: Server) -> None:
    own_server.stop()
    late: list[float] = []

    async def ask(patience: float) -> None:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await own_link.call(echo("a"), patience=patience)
        late.append(time.monotonic() - began - patience)

    async with trio.open_nursery() as nursery:
        for i in range(500):
            nursery.start_soon(ask, 0.1 + i / 1000)
    assert len(late) == 500
    assert max(late) < IN_TIME


async def test_an_outage_costs_no_processor(own_link: Link, own_server: Server) -> None:
    own_server.stop()
    outcomes = Outcomes()
    for _ in range(2000):
        own_link.post(echo("a"), outcomes)
    await trio.sleep(0.3)
    took: list[float] = []
    while not took or took[-1] >= 0.1:  # others who have something left to do may use some, but hardly each time
        assert len(took) < 4, took
        before = time.process_time()
        await trio.sleep(1)
        took.append(time.process_time() - before)
    assert not outcomes.all
    own_server.start()
    await outcomes.wait(2000)


# Guilt


async def poison_proxy(proxy: FaultProxy, times: int) -> None:
    for _ in range(times):
        proxy.drop_request(matching="poison", on="data")


async def test_a_request_that_kills_connections_fails_alone(link_to: LinkTo, proxy: FaultProxy, prefix: str) -> None:
    link = await link_to(proxy.url)
    await poison_proxy(proxy, 5)  # two in company, three alone
    outcomes, poisoned = Outcomes(), Outcomes()
    for i in range(5):
        link.post(append(prefix, f"{i}"), outcomes)
    link.post(append(prefix, "poison"), poisoned)
    for i in range(5, 10):
        link.post(append(prefix, f"{i}"), outcomes)
    await outcomes.wait(10)
    [(_, error)] = poisoned.all
    assert isinstance(error, Unavailable)
    assert error.sent is None
    assert "alone lost 3 connections" in str(error)
    assert [e for _, e in outcomes.all if e] == []


async def test_a_request_with_an_owner_is_never_given_up(link_to: LinkTo, proxy: FaultProxy, prefix: str) -> None:
    link = await link_to(proxy.url)
    await poison_proxy(proxy, 6)
    outcomes, poisoned = Outcomes(), Outcomes()
    link.post(append(prefix, "poison"), poisoned, owner=WorkerHandle("W1"))
    link.post(append(prefix, "a"), outcomes)
    await outcomes.wait(1)  # it does not stand behind the guilty one for ever
    assert not poisoned.all
    await poisoned.wait(1)
    assert poisoned.all[0][0][:2] == ["ok", 2]


async def test_the_requests_of_a_dead_owner_are_given_up(link_to: LinkTo, own_server: Server, prefix: str) -> None:
    link = await link_to(own_server.url)
    own_server.stop()
    owner, others, outcomes = WorkerHandle("W1"), Outcomes(), Outcomes()
    link.post(log(prefix, "dead"), outcomes, owner=owner)
    link.post(log(prefix, "alive"), others, owner=WorkerHandle("W2"))
    await trio.sleep(0.1)
    assert not outcomes.all
    owner.dead = True
    await outcomes.wait(1)
    assert isinstance(outcomes.all[0][1], ClaimLost)
    assert "W1" in str(outcomes.all[0][1])
    own_server.start()
    await others.wait(1)
    with own_server.client() as client:
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [b"alive"]


# The log


async def test_an_outage_is_one_warning_and_one_line_when_it_is_over(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "worqr")
    url = own_server.tcp_url
    link = await link_to(url)
    for turn in range(2):
        own_server.stop()
        with pytest.raises(Unavailable):
            await link.call(echo("secret"), patience=0.7)
        own_server.start()
        assert await link.call(echo("a")) == "a"
        await until(lambda turn=turn: len(lines(caplog, "link.back")) > turn)  # type: ignore[misc]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2
    assert url in caplog.records[0].getMessage()
    assert "refused" in caplog.records[0].getMessage() or "closed" in caplog.records[0].getMessage()
    assert "secret" not in caplog.text


async def test_no_password_gets_into_the_log(
    link_to: LinkTo, own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "ada", "on", ">hunter2", "~*", "&*", "+@all")
    link = await link_to(own_server.tcp_url.replace("redis://", "redis://ada:hunter2@"))
    own_server.stop()
    with pytest.raises(Unavailable) as caught:
        await link.call(echo("a"), patience=0.2)
    await until(lambda: lines(caplog, "link.lost"))
    assert "hunter2" not in caplog.text + str(caught.value)


async def test_a_password_that_changed_is_named_and_a_mended_one_works(link_to: LinkTo, own_server: Server) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "ada", "on", ">old", "~*", "&*", "+@all")
        link = await link_to(own_server.tcp_url.replace("redis://", "redis://ada:old@"))
        client.execute_command("ACL", "SETUSER", "ada", "resetpass", ">new")
        await kill_connections(link, client)
    await knows_why(link, "WRONGPASS")
    with own_server.client() as client:
        with pytest.raises(Unavailable, match="WRONGPASS"):
            await link.call(echo("a"), patience=0.3)
        client.execute_command("ACL", "SETUSER", "ada", "resetpass", ">old")
        assert await link.call(echo("b")) == "b"


# Callbacks that send the next request


async def test_calls_end_when_replicas_are_counted_and_no_request_waits_for_it(
    proxied: Link, proxy: FaultProxy, prefix: str
) -> None:
    held = proxy.hold_reply(matching=b"$4\r\nWAIT\r\n", nth=3, on="data")
    while not held.fired:  # a machine that stands still may ask once or twice in the time that a call has
        with pytest.raises(NotReplicated):
            await proxied.call(replace(append(prefix, "x"), replicas=1))
    with trio.fail_after(PATIENCE), pytest.raises(Unavailable):
        await proxied.call(echo("b"), patience=0.5)
    held.release()


async def test_a_late_request_whose_callback_sends_another_costs_no_link(own_link: Link) -> None:
    next_one = Outcomes()
    own_link.post(replace(echo("late"), not_after=0.0), lambda *_: own_link.post(echo("next"), next_one))
    assert await own_link.call(echo("other")) == "other"
    await until(lambda: next_one.all)
    assert not own_link.has_ended


async def test_a_request_is_kept_that_the_callback_of_an_unsendable_one_sends(proxied: Link, proxy: FaultProxy) -> None:
    for _ in range(2):
        assert await proxied.call(echo("a")) == "a"
    held, next_one = proxy.hold_reply(matching="xyzzy", on="data"), Outcomes()
    unsendable: Any = object()
    proxied.post(echo(unsendable), lambda *_: proxied.post(echo("xyzzy"), next_one, patience=0.3))
    await until(lambda: next_one.all)
    assert isinstance(next_one.all[0][1], Unavailable)
    held.release()


async def test_an_outage_ends_while_each_reply_sends_the_next_request(
    proxied: Link, proxy: FaultProxy, prefix: str
) -> None:
    goes_on = True

    def replied(*_: object) -> None:
        if goes_on:
            proxied.post(append(prefix, "x"), replied)

    replied()
    await until(lambda: proxied.condition.up)
    before = proxied.connections
    proxy.drop_reply(on="data")
    await until(lambda: proxied.connections > before and proxied.condition.up)
    goes_on = False
    await proxied.call(echo("last"))

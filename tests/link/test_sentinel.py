"""The primary is where the Sentinels say: found, followed at once, and not lost when some of them are wrong or gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pytest

from tests.link.conftest import LinkTo
from tests.link.scripts import ECHO_CALL, Outcomes, append, echo, knows_why, lines, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.sentinels import SERVICE, FakeSentinel, Sentinel, run_id, started
from tests.support.servers import Server
from worqr.errors import RefusedByServer, Unavailable
from worqr.link import Link, sentinel

pytestmark = pytest.mark.one_server

Says = Callable[..., FakeSentinel]

ENDLESS = 1000.0
"""Seconds that nobody waits for in a test: what happens all the same did not wait for it."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other faster than they do for users. A Sentinel is waited for while the machine stands still."""
    monkeypatch.setattr(sentinel, "_TIMEOUT", PATIENCE)
    monkeypatch.setattr(sentinel, "_LOOK_EVERY", 0.1)
    monkeypatch.setattr(sentinel, "_LOOK_AGAIN", 0.05)


@pytest.fixture
def says() -> Iterator[Says]:
    """`says(server, epoch=1)`: a Sentinel that names this server (or port) as the primary."""
    made: list[FakeSentinel] = []

    def make(primary: Server | int, epoch: int = 1, **options: str) -> FakeSentinel:
        made.append(FakeSentinel(primary if isinstance(primary, int) else primary.port, epoch, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def url_of(*sentinels: FakeSentinel) -> str:
    return f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in sentinels)}/{SERVICE}"


async def asked_again(*sentinels: FakeSentinel, times: int = 2) -> None:
    """Until each of them has been asked so often from now on."""
    before = [each.asked for each in sentinels]
    await until(lambda: all(each.asked >= n + times for each, n in zip(sentinels, before, strict=True)))


# Finding it


async def test_the_primary_that_a_sentinel_names_is_found(link_to: LinkTo, server: Server, says: Says) -> None:
    link = await link_to(says(server).url)
    assert await link.call(echo("a")) == "a"
    assert link.run_id == run_id(server)


async def test_a_real_sentinel_is_asked_as_a_user_with_few_rights(
    link_to: LinkTo, own_server: Server, server_kind: str
) -> None:
    real = started(lambda: Sentinel(server_kind, appendonly=False))
    try:
        real.ask("MONITOR", SERVICE, "127.0.0.1", own_server.port, 1)
        rights = (
            "-@all",
            "+client|setname",
            "+ping",
            *(f"+sentinel|{name}" for name in ("master", "masters", "sentinels")),
        )
        real.look.execute_command(
            "ACL", "SETUSER", "looker", "on", ">secret", *rights, "+sentinel|get-master-addr-by-name"
        )
        url = f"redis+sentinel://127.0.0.1:{real.port}/{SERVICE}?sentinel_username=looker&sentinel_password=secret"
        link = await link_to(url)
        assert await link.call(echo("a")) == "a"
        with pytest.raises(RefusedByServer, match=f"knows no service 'other'; it knows '{SERVICE}'"):
            await link_to(url.replace(f"/{SERVICE}", "/other"))
        with pytest.raises(RefusedByServer, match="WRONGPASS.*sentinel_password"):
            await link_to(url.replace("secret", "hunter2"))
    finally:
        real.close()


async def test_the_server_and_the_sentinels_have_passwords_of_their_own(
    link_to: LinkTo, own_server: Server, says: Says
) -> None:
    own_server.client().execute_command("ACL", "SETUSER", "ada", "on", ">hers", "~*", "&*", "+@all")
    url = says(own_server, looker="theirs").url.replace("://", "://ada:hers@")
    link = await link_to(f"{url}?sentinel_username=looker&sentinel_password=theirs")
    assert await link.call(echo("a")) == "a"
    with pytest.raises(RefusedByServer, match=r"NOAUTH.*sentinel_password") as caught:
        await link_to(url)
    assert "hers" not in str(caught.value)


async def test_a_service_that_nobody_knows_is_refused_at_once(link_to: LinkTo, server: Server, says: Says) -> None:
    one, other = says(server), says(server)
    with pytest.raises(
        RefusedByServer, match=rf"Sentinel at 127\.0\.0\.1:\d+ knows no service 'mails'; it knows '{SERVICE}'"
    ):
        await link_to(url_of(one, other).replace(SERVICE, "mails"), patience=ENDLESS)


async def test_a_server_that_is_no_sentinel_is_refused_at_once(link_to: LinkTo, server: Server) -> None:
    url = f"redis+sentinel://127.0.0.1:{server.port}/{SERVICE}"
    with pytest.raises(RefusedByServer, match=r"is no Sentinel.*write redis://"):
        await link_to(url, patience=ENDLESS)


async def test_a_sentinel_that_is_taken_for_a_server_says_what_to_write(link_to: LinkTo, server_kind: str) -> None:
    real = started(lambda: Sentinel(server_kind, appendonly=False))
    try:
        with pytest.raises(RefusedByServer, match=r"is a Sentinel.*redis\+sentinel://"):
            await link_to(real.tcp_url, patience=ENDLESS)
    finally:
        real.close()


async def test_sentinels_that_are_down_cost_nothing(link_to: LinkTo, server: Server, says: Says) -> None:
    down, alive, also_down = says(server), says(server), says(server)
    down.close()
    also_down.close()
    link = await link_to(url_of(down, alive, also_down))
    assert await link.call(echo("a")) == "a"


async def test_nobody_there_at_the_start_ends_with_patience_and_who_comes_later_is_found(
    link_to: LinkTo, server: Server, says: Says
) -> None:
    late = says(server)
    late.close()
    link = await link_to(late.url, ready=False, patience=1)
    await knows_why(link, "refused")
    with pytest.raises(
        Unavailable, match=rf"Could not connect to redis\+sentinel://.*127\.0\.0\.1:{late.port}.*refused"
    ):
        await link.wait_ready()
    late.open()
    await until(lambda: link.connections == 1)
    assert await link.call(echo("a"), patience=PATIENCE) == "a"


# Following it


async def test_every_connection_goes_to_a_new_primary_at_once(
    link_to: LinkTo, server: Server, own_server: Server, says: Says, prefix: str
) -> None:
    teller = says(server)
    link = await link_to(teller.url, ping_every=ENDLESS, socket_timeout=ENDLESS)
    confirmed: list[int] = []
    link.subscriptions.open(("channel",), lambda *_: None, lambda: confirmed.append(1))
    heartbeat = link.heartbeat(
        make=lambda n, _turning: echo(str(n)), replied=lambda _: None, every=0.2, block_limit=ENDLESS, describe=str
    )
    heartbeat.start()
    await until(lambda: confirmed and heartbeat.acked_at)
    beat = heartbeat.acked_at
    teller.primary = own_server.port
    teller.epoch += 1
    await until(lambda: link.connections == 2 and len(confirmed) == 2 and heartbeat.acked_at > beat)
    assert await link.call(append(prefix, "a")) == ["ok", 1, 1, 1]
    assert link.run_id == run_id(own_server)
    await until(lambda: {f"worqr:test:{each}".encode() for each in ("data", "subscribe", "beat")} <= names(own_server))


async def test_a_heartbeat_goes_to_a_new_primary_while_the_loop_is_blocked(
    link_to: LinkTo, server: Server, own_server: Server, says: Says
) -> None:
    """The Sentinels are asked in a thread: a blocked worker beats until its `block_limit`, also after a failover."""
    teller = says(server)
    link = await link_to(teller.url)
    heartbeat = link.heartbeat(
        make=lambda n, _turning: echo(str(n)), replied=lambda _: None, every=0.1, block_limit=ENDLESS, describe=str
    )
    heartbeat.start()
    await until(lambda: heartbeat.acked_at)
    teller.primary, teller.epoch = own_server.port, 2
    deadline = time.monotonic() + PATIENCE
    while b"worqr:test:beat" not in names(own_server):
        assert time.monotonic() < deadline, "no heartbeat at the new primary"
        time.sleep(0.01)
    acked = heartbeat.acked_at
    while heartbeat.acked_at == acked:
        assert time.monotonic() < deadline, "no beat at the new primary"
        time.sleep(0.01)


def names(server: Server) -> set[bytes]:
    return {str(each["name"]).encode() for each in server.look.client_list()}


async def test_a_request_that_a_frozen_primary_does_not_answer_is_sent_to_the_new_one(
    link_to: LinkTo,
    server: Server,
    proxy_to: Callable[[Server], FaultProxy],
    own_server: Server,
    says: Says,
    prefix: str,
) -> None:
    proxy = proxy_to(server)
    teller = says(proxy.port)
    link = await link_to(teller.url, socket_timeout=ENDLESS, patience=ENDLESS)
    proxy.blackhole()
    outcomes = Outcomes()
    link.post(append(prefix, "a"), outcomes)
    await until(lambda: link._client.requests.in_flight)  # type: ignore[union-attr]
    teller.primary, teller.epoch = own_server.port, 2
    await outcomes.wait(1)
    assert outcomes.all == [(["ok", 1, 1, 1], None)]
    assert own_server.look.lrange(f"{prefix}:{{Q}}", 0, -1) == [b"a"]


async def test_nobody_waits_for_an_attempt_that_hangs_at_the_old_place(
    link_to: LinkTo, server: Server, proxy_to: Callable[[Server], FaultProxy], says: Says
) -> None:
    proxy = proxy_to(server)
    proxy.blackhole()
    teller = says(proxy.port)
    link = await link_to(teller.url, ready=False, socket_timeout=ENDLESS)
    await until(lambda: proxy.connections)
    teller.primary, teller.epoch = server.port, 2
    await link.wait_ready()
    assert await link.call(echo("a")) == "a"


async def test_a_server_that_became_a_replica_leads_to_a_fresh_look(
    link_to: LinkTo, server: Server, own_server: Server, says: Says, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel, "_LOOK_EVERY", ENDLESS)
    teller = says(own_server)
    link = await link_to(teller.url)
    await link.call(append(prefix, "a"))
    teller.primary, teller.epoch = server.port, 2
    own_server.client().execute_command("REPLICAOF", "127.0.0.1", "1")
    assert await link.call(append(prefix, "b")) == ["ok", 1, 2, 2]
    assert link.run_id == run_id(server)
    own_server.client().execute_command("REPLICAOF", "NO", "ONE")
    server.look.delete(f"{prefix}:{{Q}}")


async def test_while_a_failover_is_under_way_looks_follow_each_other(
    link_to: LinkTo, server: Server, own_server: Server, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel, "_LOOK_EVERY", ENDLESS)
    teller = says(server)
    teller.failing_over = True
    link = await link_to(teller.url)
    await asked_again(teller)
    teller.primary, teller.epoch = own_server.port, 2
    await asked_again(teller)  # a look asks for the address first: this one has the new address
    teller.failing_over = False
    await until(lambda: link.run_id == run_id(own_server))


async def test_a_replica_that_is_named_as_the_primary_is_not_used(
    link_to: LinkTo, server: Server, own_server: Server, says: Says
) -> None:
    own_server.client().execute_command("REPLICAOF", "127.0.0.1", "1")
    teller = says(own_server)
    link = await link_to(teller.url, ready=False, patience=1)
    await knows_why(link, "replica")
    with pytest.raises(Unavailable, match="replica"):
        await link.wait_ready()
    teller.primary, teller.epoch = server.port, 2
    await until(lambda: link.connections == 1)
    assert await link.call(echo("a"), patience=PATIENCE) == "a"


# Whom to believe


async def test_a_sentinel_that_was_cut_off_does_not_win(
    link_to: LinkTo, server: Server, own_server: Server, says: Says
) -> None:
    stale, fresh, also_stale = says(own_server, epoch=3), says(server, epoch=4), says(own_server, epoch=3)
    link = await link_to(url_of(stale, fresh, also_stale))
    await asked_again(stale, fresh)
    assert (link.connections, link.run_id) == (1, run_id(server)), "the first connection went to the right one"


async def test_a_stale_sentinel_does_not_win_while_the_others_are_away(
    link_to: LinkTo, server: Server, own_server: Server, says: Says
) -> None:
    stale, fresh = says(own_server, epoch=3), says(server, epoch=4)
    link = await link_to(url_of(stale, fresh))
    fresh.close()
    await asked_again(stale)
    assert link.connections == 1
    assert await link.call(echo("a")) == "a"


async def test_a_sentinel_that_has_been_silent_for_long_is_believed_no_more(
    link_to: LinkTo, server: Server, own_server: Server, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, lower = says(server, epoch=4), says(own_server, epoch=3)
    link = await link_to(url_of(fresh, lower))
    assert link.run_id == run_id(server)
    monkeypatch.setattr(sentinel, "_BELIEVED", 0.1)  # only now: a slow machine may take longer to connect
    fresh.close()
    await until(lambda: link.run_id == run_id(own_server))


async def test_sentinels_that_were_set_up_anew_are_followed(
    link_to: LinkTo, server: Server, own_server: Server, says: Says
) -> None:
    one, other = says(server, epoch=7), says(server, epoch=7)
    link = await link_to(url_of(one, other))
    for each in (one, other):
        each.primary, each.epoch = own_server.port, 0
    await until(lambda: link.run_id == run_id(own_server))


async def test_of_two_that_disagree_about_one_decision_most_win_and_then_the_one_we_have(
    link_to: LinkTo, server: Server, own_server: Server, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel, "_LEARN_EVERY", 0.0)
    sentinels = [says(server), says(own_server), says(server), says(own_server)]
    link = await link_to(url_of(*sentinels[:3]))
    assert link.run_id == run_id(server)
    sentinels[0].others = [each.port for each in sentinels]
    await asked_again(*sentinels)
    assert link.connections == 1


# Who they are


async def test_the_other_sentinels_are_learned_from_the_one_that_the_url_names(
    link_to: LinkTo, server: Server, own_server: Server, says: Says
) -> None:
    named, learned = says(server), says(server)
    named.others = [learned.port]
    link = await link_to(named.url)
    await asked_again(learned)
    named.close()
    learned.primary, learned.epoch = own_server.port, 2
    await until(lambda: link.run_id == run_id(own_server))


async def test_a_learned_sentinel_is_asked_before_anybody_is_believed(
    link_to: LinkTo, server: Server, own_server: Server, says: Says
) -> None:
    stale, fresh = says(own_server, epoch=1), says(server, epoch=2)
    stale.others = [fresh.port]
    link = await link_to(stale.url)
    assert (link.connections, link.run_id) == (1, run_id(server))


async def test_a_sentinel_that_nobody_knows_any_more_is_forgotten(
    link_to: LinkTo, server: Server, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel, "_LEARN_EVERY", 0.0)
    monkeypatch.setattr(sentinel, "_TRY_AGAIN", 0.0)
    named, learned = says(server), says(server)
    named.others = [learned.port]
    link = await link_to(named.url)
    await asked_again(learned)
    learned.close()
    await asked_again(named)
    assert len(known(link)) == 2, "somebody still knows it"
    named.others = []
    await until(lambda: len(known(link)) == 1)


def known(link: Link) -> list[object]:
    assert link._sentinels is not None
    return list(link._sentinels._sentinels)


async def test_when_all_are_away_the_known_primary_is_worked_with_and_the_log_has_two_lines(
    link_to: LinkTo, server: Server, own_server: Server, says: Says, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    one, other = says(server), says(server)
    link = await link_to(url_of(one, other))
    for each in (one, other):
        each.close()
    await until(lambda: lines(caplog, "link.blind"))
    assert await link.call(echo("a")) == "a"
    server.look.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until(lambda: link.post(ECHO_CALL, lambda *_: None) or link.connections == 2)  # type: ignore[func-returns-value]
    for each in (one, other):
        each.open()
        each.primary, each.epoch = own_server.port, 2
    await until(lambda: link.run_id == run_id(own_server))
    await until(lambda: lines(caplog, "link.sighted"))
    assert len(lines(caplog, "link.blind")) == len(lines(caplog, "link.sighted")) == 1
    [moved] = lines(caplog, "link.moved")
    assert moved.endswith(f" is 127.0.0.1:{own_server.port} now; it was 127.0.0.1:{server.port}")


async def test_a_closed_link_ends_while_a_sentinel_is_silent(
    link_to: LinkTo, server: Server, proxy_to: Callable[[Server], FaultProxy]
) -> None:
    proxy = proxy_to(server)
    proxy.blackhole()
    link = await link_to(f"redis+sentinel://127.0.0.1:{proxy.port}/{SERVICE}", ready=False)
    await until(lambda: proxy.connections)
    link.close()

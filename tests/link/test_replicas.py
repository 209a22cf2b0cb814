"""Requests that want replicas, on a real primary with a real replica: met, not met, late, cut, demoted, cancelled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import trio

from tests.link.conftest import LinkTo
from tests.link.scripts import Outcomes, append, echo, script, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.replicated import Pair, follow, mine, own_pair, pair, pair_of_module, promote, wait_for_replicas
from tests.support.servers import Server
from worqr import ops
from worqr.command import Command
from worqr.errors import NotReplicated, QueueFull, RefusedByServer, Unavailable
from worqr.keys import QueueKeys
from worqr.link import Link, LinkSettings, TrioDriver, session
from worqr.link.session import FIRST_SLICE, LONGEST_SLICE, Replication, Request

assert all((mine, own_pair, pair, pair_of_module))  # fixtures

pytestmark = pytest.mark.usefixtures(wait_for_replicas.__name__)

WITHIN = session.REPLICAS_WAIT
"""Before these tests set another one."""

Say = Callable[[float], None]
ProxyTo = Callable[[Server], FaultProxy]


def enqueue(prefix: str, *tasks: bytes, replicas: int = 1, queue: str = "Q1") -> Command[int]:
    return ops.enqueue(QueueKeys(prefix, queue), tasks, replicas=replicas)


@pytest.fixture
def proxy(pair: Pair, proxy_to: ProxyTo) -> FaultProxy:
    return proxy_to(pair.primary)


@pytest.fixture
async def link(link_to: LinkTo, pair: Pair) -> Link:
    return await link_to(pair.primary.tcp_url)


def stored(server: Server, prefix: str, queue: str = "Q1") -> list[bytes]:
    """The tasks of a queue, the oldest first."""
    return server.look.lrange(QueueKeys(prefix, queue).base, 0, -1)[::-1]


def asked(proxy: FaultProxy) -> list[tuple[int, int]]:
    """For how many replicas, and how many ms, WAIT was asked."""
    return [(int(each.words[1]), int(each.words[2])) for each in proxy.seen() if each.words[0] == b"WAIT"]


async def waits_for_replicas(link: Link, count: int = 1) -> None:
    """Until so many requests are answered and wait for replicas."""
    await until(lambda: len(link._client.requests.replication.waiting) == count, what="requests that wait")  # type: ignore[union-attr]


async def post_unreplicated(link: Link, pair: Pair, mine: str) -> Outcomes:
    """Pause the replica, enqueue ``a``, and wait until the primary has stored it."""
    pair.replica.pause()
    outcomes = Outcomes()
    link.post(enqueue(mine, b"a"), outcomes)
    await waits_for_replicas(link)
    return outcomes


# Met


async def test_an_answer_means_that_the_replica_has_it(link: Link, pair: Pair, mine: str) -> None:
    for n in range(20):
        assert await link.call(enqueue(mine, b"%d" % n)) == 1
        assert stored(pair.replica, mine)[-1] == b"%d" % n


async def test_everybody_at_once_asks_together(proxied: Link, pair: Pair, mine: str, proxy: FaultProxy) -> None:
    outcomes = Outcomes()
    with proxied.together:
        for n in range(100):
            proxied.post(enqueue(mine, b"%d" % n, queue=f"Q{n % 50}"), outcomes)
    await outcomes.wait(100)
    assert outcomes.all == [(1, None)] * 100
    assert sum(len(stored(pair.replica, mine, f"Q{n}")) for n in range(50)) == 100
    assert (
        1 <= len(asked(proxy)) < 25
    )  # one as a rule, and one more for each slice in which the replica did not come to answer


async def test_who_wants_no_replica_asks_for_nothing(proxied: Link, mine: str, proxy: FaultProxy) -> None:
    assert await proxied.call(enqueue(mine, b"a", replicas=0)) == 1
    assert not asked(proxy)


async def test_a_refusal_does_not_wait(link_to: LinkTo, pair: Pair, mine: str) -> None:
    pair.replica.pause()
    link = await link_to(pair.primary.tcp_url)
    bounded = ops.enqueue(QueueKeys(mine, "Q1"), [b"a", b"b"], max_length=1, replicas=1)
    with pytest.raises(QueueFull), trio.fail_after(PATIENCE / 2):
        await link.call(bounded)
    broken = Command(script("broken", "error('no')"), "t:{Q}", (), lambda reply: reply, replicas=1)
    with pytest.raises(RefusedByServer), trio.fail_after(PATIENCE / 2):
        await link.call(broken)


# Not met


@pytest.mark.parametrize("how", ["frozen", "gone"])
async def test_not_met_in_time_is_told_and_the_task_is_there_once(
    link_to: LinkTo, pair: Pair, mine: str, how: str, wait_for_replicas: Say
) -> None:
    wait_for_replicas(0.3)
    link = await link_to(pair.primary.tcp_url)
    if how == "frozen":
        pair.replica.pause()
    else:
        promote(pair.replica)
    with pytest.raises(NotReplicated, match="0 of 1 replicas") as caught, trio.fail_after(PATIENCE):
        await link.call(enqueue(mine, b"a"))
    assert (caught.value.wanted, caught.value.reached, caught.value._reply) == (1, 0, 1)
    assert stored(pair.primary, mine) == [b"a"]


def test_the_time_is_two_seconds_or_what_is_left_of_the_callers_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "REPLICAS_WAIT", WITHIN)
    asking = Replication()
    asking.add([Request(enqueue("t", b"a"), 30, 100.0)], 101.0)
    asking.add([Request(enqueue("t", b"a"), 30, 100.0)], 129.0)
    assert [end for _, end in asking.waiting] == [103.0, 130.0]


async def test_patience_is_a_bound(link_to: LinkTo, pair: Pair, mine: str) -> None:
    pair.replica.pause()
    link = await link_to(pair.primary.tcp_url)
    for patience in (0.5, 5, 15):  # a machine that stands still may not get the primary's reply in so short a time
        with pytest.raises((NotReplicated, Unavailable)) as caught, trio.fail_after(PATIENCE / 2):
            await link.call(enqueue(mine, b"a"), patience=patience)
        if isinstance(caught.value, NotReplicated):
            return
    raise caught.value


async def test_each_gets_what_it_wants_and_no_more(link: Link, mine: str) -> None:
    for patience in (1, 5, 15):  # a machine that stands still may not get the primary's reply in so short a time
        outcomes = [Outcomes() for _ in range(3)]
        with link.together:
            for n, each in enumerate(outcomes):
                link.post(enqueue(mine, b"%d" % n, replicas=n), each, patience=patience if n == 2 else PATIENCE)
        for each in outcomes:
            await each.wait(1)
        assert [each.all[0] for each in outcomes[:2]] == [(1, None)] * 2
        value, error = outcomes[2].all[0]
        if isinstance(error, NotReplicated):
            break
    assert value == 1
    assert isinstance(error, NotReplicated)
    assert (error.wanted, error.reached) == (2, 1)


async def test_many_joined_in_one_request_each_get_their_share_of_the_bad_news(
    link_to: LinkTo, pair: Pair, mine: str, wait_for_replicas: Say
) -> None:
    wait_for_replicas(0.3)
    pair.replica.pause()
    link = await link_to(pair.primary.tcp_url)
    outcomes = Outcomes()
    with link.together:
        for n in range(3):
            jobs = [({}, b"%d" % n)] * (n + 1)
            link.post(ops.dispatch_jobs(QueueKeys(mine, "Q1"), jobs, replicas=1), outcomes)
    await outcomes.wait(3)
    errors = [error for _, error in outcomes.all]
    assert len({*map(id, errors)}) == 3
    assert all(isinstance(error, NotReplicated) for error in errors)
    assert [len(value) for value in outcomes.values] == [1, 2, 3]
    assert len({job.id for value in outcomes.values for job in value}) == 6
    assert pair.primary.look.llen(QueueKeys(mine, "Q1").base) == 6
    await link.call(ops.delete_queue(QueueKeys(mine, "Q1")))
    while await link.call(ops.purge_queue(QueueKeys(mine, "Q1"))):
        pass


async def test_of_many_calls_at_once_a_worse_error_comes_first(
    link_to: LinkTo, pair: Pair, mine: str, wait_for_replicas: Say
) -> None:
    wait_for_replicas(0.3)
    pair.replica.pause()
    link = await link_to(pair.primary.tcp_url)
    with pytest.raises(NotReplicated) as caught:
        await link.call_all([enqueue(mine, b"a"), enqueue(mine, b"b", replicas=0), enqueue(mine, b"c", b"d")])
    assert caught.value._reply == [1, 1, 2]
    refused = ops.enqueue(QueueKeys(mine, "Q2"), [b"a", b"b"], max_length=1)
    with pytest.raises(QueueFull):
        await link.call_all([enqueue(mine, b"e"), refused])
    assert stored(pair.primary, mine) == [b"a", b"b", b"c", b"d", b"e"]


async def test_a_server_that_does_not_let_us_ask_is_told_at_once(link_to: LinkTo, pair: Pair, mine: str) -> None:
    pair.primary.look.execute_command("ACL", "SETUSER", "shy", "reset", "on", ">secret", "~*", "&*", "+@all", "-wait")
    link = await link_to(pair.primary.tcp_url.replace("//", "//shy:secret@"))
    with pytest.raises(NotReplicated, match=r"NOPERM.*\+wait.*stored") as caught, trio.fail_after(PATIENCE / 2):
        await link.call(enqueue(mine, b"a"))
    assert (caught.value.wanted, caught.value.reached, caught.value._reply) == (1, 0, 1)
    assert await link.call(enqueue(mine, b"b", replicas=0)) == 1
    assert stored(pair.primary, mine) == [b"a", b"b"]
    pair.primary.look.execute_command("ACL", "DELUSER", "shy")


# Meanwhile


async def test_others_on_the_link_go_on_meanwhile_and_a_replica_that_comes_back_is_seen(
    proxied: Link, pair: Pair, mine: str, proxy: FaultProxy
) -> None:
    outcomes = await post_unreplicated(proxied, pair, mine)
    slowest = 0.0
    for n in range(20):
        began = time.monotonic()
        await proxied.call(enqueue(mine, b"%d" % n, replicas=0))
        slowest = max(slowest, time.monotonic() - began)
    assert not outcomes.all
    pair.replica.resume()
    await outcomes.wait(1)
    assert outcomes.all == [(1, None)]
    assert stored(pair.primary, mine) == [b"a", *(b"%d" % n for n in range(20))]
    assert max(ms for _, ms in asked(proxy)) <= 1000 * LONGEST_SLICE
    assert slowest < PATIENCE / 3


async def test_who_wants_no_replica_is_not_joined_with_one_who_does(link: Link, pair: Pair, mine: str) -> None:
    pair.replica.pause()
    wanting, plain = Outcomes(), Outcomes()
    with link.together:
        link.post(enqueue(mine, b"a"), wanting)
        link.post(enqueue(mine, b"b", replicas=0), plain)
        link.post(enqueue(mine, b"c", replicas=0), plain)
        link.post(enqueue(mine, b"d"), wanting)
    await plain.wait(2)
    assert not wanting.all
    pair.replica.resume()
    await wanting.wait(2)
    assert plain.all == wanting.all == [(1, None)] * 2
    assert stored(pair.replica, mine) == [b"a", b"b", b"c", b"d"]


async def test_a_steady_stream_of_others_does_not_hide_that_a_replica_has_it(link: Link, pair: Pair, mine: str) -> None:
    done = False

    async def stream(queue: str) -> None:
        while not done:
            await link.call(append(mine, "x", queue))

    async with trio.open_nursery() as nursery:
        for n in range(5):
            nursery.start_soon(stream, f"S{n}")
        outcomes = await post_unreplicated(link, pair, mine)
        pair.replica.resume()
        await outcomes.wait(1)
        done = True
    assert outcomes.all == [(1, None)]


async def test_a_cancelled_call_leaves_nothing_behind(link: Link, pair: Pair, mine: str) -> None:
    pair.replica.pause()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.call, enqueue(mine, b"a"))
        await waits_for_replicas(link)
        nursery.cancel_scope.cancel()
    await waits_for_replicas(link, 0)
    _, _, number, lowest = await link.call(append(mine, "b", "Q1"))
    assert number == lowest == 2, "its number is not open any more"
    assert sorted(stored(pair.primary, mine)) == [b"a", b"b"]


async def test_the_end_of_the_link_is_told(pair: Pair, mine: str) -> None:
    link = Link(LinkSettings(pair.primary.tcp_url, app="test"), TrioDriver())
    link.start()
    await link.wait_ready()
    outcomes = await post_unreplicated(link, pair, mine)
    link.close()
    await outcomes.wait(1)
    error = outcomes.all[0][1]
    assert isinstance(error, Unavailable)
    assert error.sent is None


# ConnectionLost connections


async def test_a_connection_lost_before_the_replicas_are_counted(
    proxied: Link, pair: Pair, mine: str, proxy: FaultProxy
) -> None:
    fault = proxy.drop_reply("WAIT")
    assert await proxied.call(enqueue(mine, b"a")) == 1
    assert fault.fired
    assert stored(pair.primary, mine) == stored(pair.replica, mine) == [b"a"]
    assert len([each for each in proxy.seen() if each.words[0] == b"EVALSHA"]) == 2


async def test_a_new_connection_does_not_believe_in_replicas_that_are_not_there(
    proxied: Link, pair: Pair, mine: str, proxy: FaultProxy, wait_for_replicas: Say
) -> None:
    """A WAIT on a connection that wrote nothing would count them all."""
    outcomes = await post_unreplicated(proxied, pair, mine)
    wait_for_replicas(1)
    proxy.cut()
    await outcomes.wait(1)
    value, error = outcomes.all[0]
    assert isinstance(error, NotReplicated)
    assert value == 1
    assert error.reached == 0
    assert proxied.connections == 2
    assert stored(pair.primary, mine) == [b"a"]


@pytest.mark.parametrize("name", ["enqueue", "dispatch_jobs"])
async def test_what_is_sent_again_writes(pair: Pair, mine: str, name: str) -> None:
    keys = QueueKeys(mine, "Q1")
    call = ops.enqueue(keys, [b"a"]) if name == "enqueue" else ops.dispatch_jobs(keys, [({"delay": 1}, b"a")])
    look = pair.primary.look

    def send() -> list[object]:
        look.script_load(call.script.source)
        return look.evalsha(call.script.sha, 1, call.base, "me", 1, 1, *call.args)  # type: ignore[no-any-return]

    def offset() -> int:
        return int(look.info("replication")["master_repl_offset"])

    first, before = send(), offset()
    assert send() == first
    assert offset() > before
    look.delete(*look.keys(f"{mine}:*"))


async def test_memory_that_is_full_meanwhile_is_not_taken_for_nothing_stored(
    proxied: Link, pair: Pair, mine: str, proxy: FaultProxy
) -> None:
    outcomes = await post_unreplicated(proxied, pair, mine)
    pair.primary.look.config_set("maxmemory", 1)
    proxy.cut()
    await until(lambda: proxied._client.connector.state.name == "HELD")  # type: ignore[union-attr]
    pair.primary.look.config_set("maxmemory", 0)
    pair.replica.resume()
    await outcomes.wait(1)
    assert outcomes.all == [(1, None)]
    assert stored(pair.primary, mine) == stored(pair.replica, mine) == [b"a"]


async def test_a_primary_that_is_demoted_meanwhile_and_promoted_again(link: Link, pair: Pair, mine: str) -> None:
    promote(pair.replica)
    outcomes = Outcomes()
    link.post(enqueue(mine, b"a"), outcomes)
    await waits_for_replicas(link)
    pair.primary.look.execute_command("REPLICAOF", "127.0.0.1", "1")
    await waits_for_replicas(link, 0)
    assert not outcomes.all
    promote(pair.primary)
    await trio.to_thread.run_sync(follow, pair.replica, pair.primary)
    await outcomes.wait(1)
    assert outcomes.all == [(1, None)]
    assert stored(pair.primary, mine) == stored(pair.replica, mine) == [b"a"]


async def test_a_replica_that_is_promoted_without_it_gets_it(
    proxied: Link, pair: Pair, mine: str, proxy: FaultProxy
) -> None:
    await proxied.call(enqueue(mine, b"before"))
    promote(pair.replica)
    outcomes = Outcomes()
    proxied.post(enqueue(mine, b"a"), outcomes)
    await waits_for_replicas(proxied)
    proxy.upstream = ("127.0.0.1", pair.replica.port)
    proxy.cut()
    await until(lambda: stored(pair.replica, mine) == [b"before", b"a"])
    assert not outcomes.all
    await trio.to_thread.run_sync(follow, pair.primary, pair.replica)
    await outcomes.wait(1)
    assert outcomes.all == [(1, None)]
    assert stored(pair.replica, mine) == stored(pair.primary, mine) == [b"before", b"a"]
    promote(pair.replica)


async def test_what_was_acknowledged_survives_a_primary_that_is_killed(
    link_to: LinkTo, own_pair: Pair, proxy_to: ProxyTo, wait_for_replicas: Say
) -> None:
    """1,000 tasks, the primary killed in the middle: all of those that were told to be there are, and each of them once."""
    pair = own_pair
    proxy = proxy_to(pair.primary)
    link = await link_to(proxy.url)
    acknowledged: list[bytes] = []
    left = iter(range(1000))

    async def produce() -> None:
        for n in left:
            try:
                await link.call(enqueue("t", b"%d" % n, queue=f"Q{n % 3}"))
            except NotReplicated:  # the promoted one has no replica
                continue
            acknowledged.append(b"%d" % n)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(produce)
        await until(lambda: len(acknowledged) >= 300)
        pair.primary.kill()
        before = set(acknowledged)
        proxy.upstream = ("127.0.0.1", pair.replica.port)
        wait_for_replicas(0.1)
        promote(pair.replica)
    tasks = [task for n in range(3) for task in stored(pair.replica, "t", f"Q{n}")]
    assert before <= set(tasks), "what was acknowledged is there"
    assert sorted(tasks, key=int) == [b"%d" % n for n in range(1000)], "and all else, which was sent again, once"


# When WAIT is asked, without a server


def waiting(*wanted: int) -> tuple[Replication, list[Request]]:
    asking = Replication()
    requests = [Request(enqueue("t", b"a", replicas=replicas), math.inf, 0) for replicas in wanted]
    asking.add(requests, 0)
    return asking, requests


def test_slices_grow_and_leave_two_thirds_of_the_time_to_others() -> None:
    asking, _ = waiting(1)
    now, slices = 0.0, []
    while now < 2:
        question = asking.question(0, now)
        assert question is not None
        slices.append(question[2])
        now += question[2] / 1000
        assert asking.answered(0, question[2] / 1000, now) == []
        assert asking.question(5, now) is None, "not at once, whoever comes"
        now = asking.not_before
    assert slices[:5] == [20, 40, 80, 100, 100]
    assert sum(slices) / 1000 == pytest.approx(now / 3)


def test_the_first_slice_fits_the_replicas_as_they_were_last() -> None:
    asking, (one,) = waiting(1)
    assert asking.answered(1, 0.03, 1.0) == [one]
    assert asking.question(1, 1.0) == ("WAIT", 1, 60)
    asking.add([one], 1.0)
    assert asking.answered(1, 10, 2.0) == [one]
    assert asking.question(1, 2.0) == ("WAIT", 1, round(1000 * LONGEST_SLICE))
    asking.add([one], 2.0)
    assert asking.answered(1, 0, 3.0) == [one]
    assert asking.question(1, 3.0) == ("WAIT", 1, round(1000 * FIRST_SLICE))
    assert asking.question(0, 3.0) is None


def test_the_question_is_for_the_one_who_wants_most() -> None:
    asking, (one, three, two) = waiting(1, 3, 2)
    assert asking.question(0, 0) == ("WAIT", 3, 20)
    assert asking.question(4, 0) == ("WAIT", 4, 20)
    assert asking.answered(2, 0.02, 0) == [one, two]
    assert asking.question(0, asking.not_before) == ("WAIT", 3, 40)
    assert asking.overdue(math.inf) == [three]
    assert asking.question(0, 0) is None


def test_those_who_leave_keep_their_order_and_are_known_to_have_been_executed() -> None:
    asking, requests = waiting(1, 1, 1)
    assert asking.withdraw(lambda request: request is requests[1]) == [requests[1]]
    assert asking.withdraw() == [requests[0], requests[2]]
    assert [request.losses for request in requests] == [1, 1, 1]
    assert not asking.waiting
    assert echo("a").replicas == 0

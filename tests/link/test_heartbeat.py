"""The keepalive: beats on time, whatever the loop, the data or the log does; none for a loop that is stuck."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio

from tests.link.conftest import LinkTo
from tests.link.scripts import Outcomes, echo, lines, script, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.command import Command
from worqr.link import Heartbeat, Link, answer_timeout, boottime, heartbeat
from worqr.link.connector import StaticEndpoint
from worqr.link.heartbeat import LoopMonitor, LoopState, Sent
from worqr.link.log_thread import LogThread
from worqr.link.settings import LinkSettings

pytestmark = pytest.mark.leaves("beat")  # the key that is renewed here, which expires

BEAT = script("beat", "redis.call('SET', KEYS[1] .. ':beat', ARGV[1], 'EX', 60) return {'ok', ARGV[1]}")


class Beats:
    """A heartbeat, and all that it asked and was told."""

    def __init__(
        self, link: Link, prefix: str, *, every: float = 0.05, block_limit: float = 60, timeout: float = PATIENCE
    ) -> None:
        self.made: list[tuple[int, bool]] = []
        self.replies: list[int] = []
        self.prefix = prefix
        self.heartbeat: Heartbeat[int] = link.heartbeat(
            make=self.make,
            replied=self.replies.append,
            every=every,
            block_limit=block_limit,
            timeout=timeout,
            describe=lambda: "culprit()",
        )

    def make(self, n: int, turning: bool) -> Command[int]:
        self.made.append((n, turning))
        return Command(BEAT, f"{{{self.prefix}}}", (n,), lambda reply: int(reply[1]))

    async def wait(self, count: int, within: float = PATIENCE) -> None:
        await until(lambda: len(self.replies) >= count, within, f"{count} replies, there are {len(self.replies)}")


async def beating(link: Link, prefix: str, count: int, **options: float) -> Beats:
    """A heartbeat that has begun, after so many beats."""
    beats = Beats(link, prefix, **options)
    beats.heartbeat.start()
    await beats.wait(count)
    return beats


async def test_beats_are_counted_answered_and_in_time(link_to: LinkTo, server: Server, prefix: str) -> None:
    beats = Beats(await link_to(server.url), prefix)
    began, boot = time.monotonic(), boottime()
    assert beats.heartbeat.acked_at == 0
    beats.heartbeat.start()
    await beats.wait(10)
    assert 0.4 < time.monotonic() - began < 20
    assert beats.replies[:10] == list(range(1, 11))
    assert beats.made[:10] == [(n, True) for n in range(1, 11)]
    assert boot <= beats.heartbeat.acked_at <= boottime()
    assert beats.heartbeat.errors == 0
    beats.heartbeat.stop()


async def test_a_heart_has_a_connection_of_its_own(proxied: Link, proxy: FaultProxy, prefix: str) -> None:
    beats = await beating(proxied, prefix, 2)
    proxy.blackhole("data")
    proxied.post(echo("stuck"), Outcomes())
    await beats.wait(len(beats.replies) + 10)


async def test_no_beat_and_no_reply_after_the_stop(link_to: LinkTo, server: Server, prefix: str) -> None:
    beats = await beating(await link_to(server.url), prefix, 3, every=0.01)
    beats.heartbeat.stop()
    made, replies = len(beats.made), len(beats.replies)
    assert "worqr-heartbeat" not in [thread.name for thread in threading.enumerate()]
    await trio.sleep(0.1)
    assert (len(beats.made), len(beats.replies)) == (made, replies)
    beats.heartbeat.stop()


async def test_a_beat_is_acknowledged_as_of_when_it_was_sent(link_to: LinkTo, proxy: FaultProxy, prefix: str) -> None:
    beats = await beating(await link_to(proxy.url), prefix, 1, every=0.2)
    proxy.delay(0.3, "beat")
    seen = len(beats.replies)
    await beats.wait(seen + 2)
    assert boottime() - beats.heartbeat.acked_at >= 0.3


async def test_answers_that_take_longer_than_a_second_cost_nothing(
    link_to: LinkTo, proxy: FaultProxy, prefix: str
) -> None:
    """No connection is given up for it, and beats go out as often as on a fast line."""
    beats = await beating(await link_to(proxy.url), prefix, 1, every=0.1, timeout=answer_timeout(60))
    connections = len(connections_of(proxy))
    proxy.delay(1.4, "beat")
    await beats.wait(len(beats.replies) + 5)
    await until(lambda: beats.heartbeat.beats - len(beats.replies) > 3, what="several that are on their way")
    assert beats.replies == list(range(1, len(beats.replies) + 1))
    assert (beats.heartbeat.errors, len(connections_of(proxy))) == (0, connections)


async def test_a_connection_that_is_silently_dead_is_left_in_time(
    link_to: LinkTo, proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer is waited for, for `timeout` and no longer; the next beat goes out at once, on a new connection."""
    beats = await beating(await link_to(proxy.url), prefix, 2, every=0.2)
    [hole] = connections_of(proxy)
    acked, replies = beats.heartbeat.acked_at, len(beats.replies)
    monkeypatch.setattr(heartbeat, "_RETRY", 2 * PATIENCE)
    proxy.blackhole(hole)
    beats.heartbeat._every = 2 * PATIENCE  # the beat after the one that gets lost does not come by itself
    connection, timeouts = beats.heartbeat._connection, iter([0.6])

    def make(n: int, turning: bool) -> Command[int]:
        connection._timeout = next(timeouts, PATIENCE)  # of the beat that gets lost; others have the time they need
        return beats.make(n, turning)

    monkeypatch.setattr(beats.heartbeat, "_make", make)
    await until(lambda: beats.heartbeat.errors, what="a beat that is given up")
    assert boottime() - acked >= 0.6
    assert "no answer for 0.6 s" in beats.heartbeat.last_error
    await beats.wait(replies + 1)
    assert (beats.heartbeat.errors, len(connections_of(proxy))) == (1, 2)


def test_a_worker_has_time_for_another_beat_when_one_got_lost() -> None:
    """It is due `every` after the last answer, and found out `timeout` later. The rest is for the new connection."""
    for keepalive in (2, 3, 5, 10, 20, 60, 3600):
        assert min(1, keepalive / 3) + answer_timeout(keepalive) <= keepalive * 5 / 6
    assert answer_timeout(3) > 1.4
    assert answer_timeout(20) > 6
    assert answer_timeout(1) == 1
    assert answer_timeout(None) > 1


async def test_the_first_beat_finds_a_connection(link_to: LinkTo, proxy: FaultProxy, prefix: str) -> None:
    """Which is made while the worker registers; until then nobody beats."""
    beats = Beats(await link_to(proxy.url), prefix)
    beats.heartbeat.open()
    await until(lambda: connections_of(proxy))
    await until(lambda: beats.heartbeat._connection.wire is not None)
    assert beats.heartbeat.beats == 0
    beats.heartbeat.start()
    await beats.wait(2)
    assert len(connections_of(proxy)) == 1
    beats.heartbeat.stop()


def test_a_process_that_is_frozen_while_an_answer_is_awaited_does_not_blame_the_loop() -> None:
    """Time that the system takes to connect is no freeze, though."""
    loop, settings = Loop(), LinkSettings("redis://localhost")
    beating: Heartbeat[int] = Heartbeat(
        *(settings, loop),  # type: ignore[arg-type]
        make=lambda *_: pytest.fail("no beat is due"),
        replied=lambda _: None,
        every=60,
        block_limit=15,
        describe=lambda: "culprit()",
        log_thread=LogThread(),
        resolver=StaticEndpoint(settings.address.redacted, settings.address.seeds[0]),
    )
    beating._begun.set()
    beating._loop.look(time.monotonic() - 20)  # a tick that was not answered since
    beating._next = time.monotonic() + 60
    beating._connection.wire = object()  # type: ignore[assignment]
    beating._connection.sent.append(Sent(None, 0, math.inf))
    beating._loop.begin_slice(time.monotonic() - 20)
    beating._while_silent()
    assert beating._loop.state is LoopState.TURNING
    beating._connection.wire = None  # it connects, and was blocked in the system meanwhile: the loop has had that time
    beating._loop._asked_at = time.monotonic() - 20
    beating._loop.begin_slice(beating._loop._asked_at)
    beating._while_silent()
    assert beating._loop.state is LoopState.STALLED


async def test_a_heart_that_is_stopped_before_it_beats_ends(link_to: LinkTo, server: Server, prefix: str) -> None:
    beats = Beats(await link_to(server.url), prefix)
    beats.heartbeat.open()
    await until(lambda: beats.heartbeat._connection.wire is not None)
    beats.heartbeat.stop()
    await until(lambda: "worqr-heartbeat" not in [thread.name for thread in threading.enumerate()])
    assert beats.made == []


async def test_a_loop_is_watched_while_an_answer_is_awaited(
    link_to: LinkTo, proxy: FaultProxy, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that stalls gets no beats any more, however slow the server is."""
    beats = await beating(await link_to(proxy.url), prefix, 2, timeout=PATIENCE, block_limit=1)
    proxy.blackhole("beat")
    made = len(beats.made)
    await until(lambda: len(beats.made) > made)
    block(1.5, lambda: gave_up(caplog))
    made = len(beats.made)
    time.sleep(0.4)
    assert len(beats.made) == made
    assert beats.heartbeat.errors == 0
    beats.heartbeat.stop()


async def test_each_answer_comes_with_the_time_of_its_own_beat(link_to: LinkTo, proxy: FaultProxy, prefix: str) -> None:
    """A lease counts from there; answers may lie in the loop until later ones have come."""
    beats = await beating(await link_to(proxy.url), prefix, 2, every=0.05)
    heard: list[float] = []
    beats.heartbeat._replied = lambda _: heard.append(beats.heartbeat.heard_at)
    acked: set[float] = set()

    def several_are_answered() -> bool:
        acked.add(beats.heartbeat.acked_at)
        return len(acked) > 4

    block(0.2, several_are_answered)
    latest = beats.heartbeat.acked_at
    await until(lambda: len(heard) > 2)
    assert heard[0] < latest
    assert heard == sorted(set(heard))


@pytest.mark.parametrize("way", ["kill", "flush", "half-open"])
async def test_beats_go_on_after(
    link_to: LinkTo, server: Server, proxy: FaultProxy, prefix: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.link")
    beats = await beating(await link_to(proxy.url), prefix, 3, timeout=1.5 if way == "half-open" else PATIENCE)
    seen, acked = len(beats.replies), beats.heartbeat.acked_at
    with server.client() as client:
        if way == "kill":
            assert proxy.cut("beat") == 1
        elif way == "flush":
            client.script_flush()
        else:
            proxy.blackhole("beat")
            await until(lambda: beats.heartbeat.errors, what="the beat to time out")
            proxy.pass_all()
    await beats.wait(seen + 5)
    assert beats.heartbeat.acked_at > acked
    assert (beats.heartbeat.errors > 0) == (way != "flush")
    assert not [line for line in lines(caplog, "") if not line.startswith("heartbeat.late")]


async def test_an_outage_is_tried_twice_a_second(link_to: LinkTo, own_server: Server, prefix: str) -> None:
    beats = await beating(await link_to(own_server.url), prefix, 1, every=1)
    own_server.stop()
    await until(lambda: beats.heartbeat.errors)
    began, before, acked = time.monotonic(), beats.heartbeat.errors, beats.heartbeat.acked_at
    await until(lambda: beats.heartbeat.errors >= before + 3)
    assert 0.95 <= time.monotonic() - began < 20
    assert beats.heartbeat.acked_at == acked
    assert beats.heartbeat.last_error
    own_server.start()
    await beats.wait(2)


async def test_what_make_read_or_replied_raise_never_stops_the_beat(link: Link, prefix: str) -> None:
    calls = 0

    def make(n: int, turning: bool) -> Command[Any]:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise ZeroDivisionError
        return echo("a") if calls % 3 == 1 else echo("b", lambda reply: reply[99])

    replies = 0

    def replied(value: str) -> None:
        nonlocal replies
        replies += 1
        raise ZeroDivisionError

    heartbeat = link.heartbeat(make=make, replied=replied, every=0.02, block_limit=60, describe=lambda: "")
    heartbeat.start()
    await until(lambda: replies >= 5)
    assert heartbeat.errors >= 8
    heartbeat.stop()


async def test_a_blocked_loop_is_named_once_and_beats_go_on(
    link_to: LinkTo, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    beats = await beating(await link_to(server.url), prefix, 2)
    made = len(beats.made)
    block(1.6, lambda: len(beats.made) - made > 20 and not beats.made[-1][1])
    await until(lambda: lines(caplog, "loop.turns"))
    [line] = lines(caplog, "loop.blocked")
    assert "culprit()" in line
    await until(lambda: beats.heartbeat.lag < 1)
    seen = len(beats.made)
    await until(lambda: len(beats.made) > seen)
    assert beats.made[-1][1]


async def test_a_loop_that_is_stuck_gets_no_beats_until_it_turns(
    link_to: LinkTo, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    beats = await beating(await link_to(server.url), prefix, 2, block_limit=1)
    block(1.5, lambda: gave_up(caplog))
    made = len(beats.made)
    time.sleep(0.4)
    assert len(beats.made) == made
    await until(lambda: len(beats.made) > made + 3)
    assert len(gave_up(caplog)) == 1


def connections_of(proxy: FaultProxy) -> list[int]:
    """The numbers of the connections for beats that there have been."""
    return sorted({request.connection for request in proxy.requests if "beat" in request.name})


def gave_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that say that the loop gets no more beats."""
    return [line for line in lines(caplog, "loop.blocked") if "sends no heartbeats" in line]


def block(seconds: float, until_too: Callable[[], object]) -> None:
    """Block the loop for so long, and until something has happened beside it."""
    began = time.monotonic()
    while time.monotonic() - began < seconds or not until_too():
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.01)


class BlockedHandler(logging.Handler):
    """As one that writes into a full pipe: whoever logs waits, and holds the handler's lock meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.gate.wait(2 * PATIENCE)


async def test_a_log_that_blocks_stops_no_beat(link_to: LinkTo, server: Server, prefix: str) -> None:
    beats = await beating(await link_to(server.url), prefix, 2)
    handler = BlockedHandler()
    logging.getLogger("worqr").addHandler(handler)
    try:
        block(1.6, handler.entered.is_set)
        made = len(beats.made)
        block(0.5, lambda: len(beats.made) > made + 20)
    finally:
        logging.getLogger("worqr").removeHandler(handler)
        handler.gate.set()


class Loop:
    """A driver whose loop turns when it is told to."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], object]] = []

    def post(self, deliver: Callable[[], object]) -> None:
        self.posted.append(deliver)

    def turn(self) -> None:
        while self.posted:
            self.posted.pop()()


def watched(loop: Loop, block_limit: float) -> LoopMonitor:
    return LoopMonitor(loop, lambda: "culprit()", block_limit)  # type: ignore[arg-type]


def test_a_thread_that_could_not_run_does_not_blame_the_loop() -> None:
    loop = Loop()
    watch = watched(loop, block_limit=15)
    watch.look(100.0)
    watch.forgive(60.0)  # the process was frozen
    watch.look(160.2)
    assert watch.state is LoopState.TURNING
    [line] = watch.lines()
    assert (line.event, line.seconds) == ("heartbeat.late", 60)


def test_a_loop_that_goes_on_not_turning_is_blamed_all_the_same() -> None:
    loop = Loop()
    watch = watched(loop, block_limit=15)
    watch.look(100.0)
    watch.forgive(60.0)
    watch.look(161.5)
    assert watch.state is LoopState.BLOCKED
    watch.look(176.0)
    assert watch.state is LoopState.STALLED
    loop.turn()
    watch.look(176.5)
    assert watch.state is LoopState.TURNING
    words = [line.event for line in watch.lines()]
    assert words == ["heartbeat.late", "loop.blocked", "loop.blocked", "loop.turns"]


def test_two_ticks_are_never_on_their_way() -> None:
    loop = Loop()
    watch = watched(loop, block_limit=15)
    for now in range(10):
        watch.look(float(now))
    assert len(loop.posted) == 1


async def test_a_reply_that_waits_when_the_heart_is_stopped_is_not_reported(
    link_to: LinkTo, server: Server, prefix: str
) -> None:
    beats = await beating(await link_to(server.url), prefix, 2, every=0.01)
    replies = len(beats.replies)
    block(0.1, lambda: len(beats.made) > replies + 2)
    assert beats.heartbeat.acked_at > 0
    beats.heartbeat.stop()
    await trio.sleep(0.02)
    assert len(beats.replies) == replies


def test_the_lag_may_be_read_from_any_thread_at_any_time() -> None:
    """Between two writes of the keepalive thread, too: the last tick was long ago, as after a slow connect."""
    read: list[float] = []

    class Watched(LoopMonitor):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if "_slice_began" in vars(self):  # it was made
                read.append(self.lag)

    loop = Loop()
    monitor = Watched(loop, str, 15.0)  # type: ignore[arg-type]
    monitor.look(time.monotonic() - 1000)
    loop.turn()
    read.clear()
    monitor._last_lag = 0.0
    monitor.look(time.monotonic())
    assert max(read) < 100

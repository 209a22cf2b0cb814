"""The driver of plain threads: coroutines that never yield, waits that end, and a link that many threads share."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

from tests.link.conftest import NEVER_SILENT
from tests.link.scripts import append, echo, lines, log
from tests.support.children import Child
from tests.support.patience import PATIENCE, wait_until
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import Server
from worqr.errors import Unavailable, UsageError
from worqr.link import (
    Link,
    LinkSettings,
    Signal,
    ThreadDriver,
    TrioDriver,
    Waiter,
    driver_here,
    run_blocking,
    thread_driver,
)
from worqr.link.driver import wake_all
from worqr.link.session import Session

T = TypeVar("T")


def ended(kinds: tuple[str, ...] = ("worqr-link", "worqr-dial", "worqr-subscriptions", "worqr-log_thread")) -> bool:
    return not [thread for thread in threading.enumerate() if thread.name in kinds]


def until_replied(link: Link, condition: Callable[[], object]) -> None:
    """Wait until replies to posted requests have come: they are read while a thread waits for a reply of its own."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} s"
        run_blocking(link.call(echo("a")))


@pytest.fixture
def driver() -> Iterator[ThreadDriver]:
    driver = ThreadDriver()
    yield driver
    driver.close()


@pytest.fixture
def new_link() -> Iterator[Callable[..., Link]]:
    """`new_link(url, **settings)`: a started link of plain threads."""
    links: list[Link] = []

    def make(url: str, **settings: Any) -> Link:
        links.append(Link(LinkSettings(url, app="test", **settings), ThreadDriver()))
        links[-1].start()
        return links[-1]

    yield make
    for link in links:
        link.close()
    wait_until(ended)


NewLink = Callable[..., Link]


@pytest.fixture
def link(new_link: NewLink, server: Server) -> Link:
    return new_link(server.url, **NEVER_SILENT)


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """What `work(n)` answered, each in a thread of its own, all at once."""
    start = threading.Barrier(count, timeout=PATIENCE)

    def begin(n: int) -> T:
        start.wait()
        return work(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count), timeout=60))


def later(seconds: float, call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


# Waiting


async def wait_for(driver: ThreadDriver, waiter: Waiter) -> None:
    await driver.prepare(waiter)
    await driver.wait(waiter)


def test_a_thread_waits_until_it_is_woken(driver: ThreadDriver) -> None:
    waiter = Waiter()
    began = time.monotonic()
    later(0.05, lambda: driver.post(partial(wake_all, [waiter])))
    run_blocking(wait_for(driver, waiter))
    assert time.monotonic() - began > 0.04
    assert not waiter.abandoned


def test_who_was_woken_before_does_not_wait(driver: ThreadDriver) -> None:
    waiter = Waiter()

    async def late() -> None:
        await driver.prepare(waiter)
        driver.post(partial(wake_all, [waiter]))
        await driver.wait(waiter)

    run_blocking(late())


def test_waking_twice_does_no_harm(driver: ThreadDriver, caplog: pytest.LogCaptureFixture) -> None:
    waiter = Waiter()
    run_blocking(driver.prepare(waiter))
    wake = waiter.wake
    assert wake is not None
    wake()
    wake()
    run_blocking(driver.wait(waiter))
    assert not lines(caplog, "link.deliver")


def test_what_a_delivery_raises_is_logged(driver: ThreadDriver, caplog: pytest.LogCaptureFixture) -> None:
    driver.post(lambda: 1 / 0)
    assert len(lines(caplog, "link.deliver")) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_a_signal_handler_raises_meanwhile_reaches_the_program(
    driver: ThreadDriver, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        driver.post(fail)
    assert not lines(caplog, "link.deliver")


def test_ctrl_c_in_a_delivery_keeps_no_other_one_back(link: Link) -> None:
    def interrupt(_value: object, _error: object) -> None:
        raise KeyboardInterrupt

    heard = list[object]()
    with pytest.raises(KeyboardInterrupt):
        with link.together:
            link.post(echo("a"), interrupt)
            link.post(echo("b"), lambda value, _error: heard.append(value))
        run_blocking(link.call(echo("c")))
    assert heard == ["b"]


def test_a_coroutine_that_waits_for_a_loop_is_refused() -> None:
    closed = []

    class Forever:
        def __await__(self) -> Generator[None, None, None]:
            try:
                while True:
                    yield
            finally:
                closed.append(True)

    async def wait() -> None:
        await Forever()

    with pytest.raises(UsageError, match="waits for an event loop, and none runs"):
        run_blocking(wait())
    assert closed


async def test_the_driver_is_that_of_where_one_is() -> None:
    assert isinstance(driver_here(), TrioDriver)
    assert isinstance(await trio.to_thread.run_sync(driver_here), ThreadDriver)


# Time limits


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_a_limit_ends_its_block(driver: ThreadDriver, seconds: float) -> None:
    waiter, reached = Waiter(), []

    async def wait() -> bool:
        await driver.prepare(waiter)
        with driver.move_on_after(seconds) as scope:
            await driver.wait(waiter)
            reached.append(1)
        return scope.cancelled_caught

    assert run_blocking(wait()) is True
    assert waiter.abandoned
    assert not reached
    driver.post(partial(wake_all, [waiter]))


def test_nothing_is_begun_when_the_limit_has_passed(driver: ThreadDriver) -> None:
    reached = []

    async def begin() -> bool:
        with driver.move_on_after(0) as scope:
            await driver.prepare(Waiter())
            reached.append(1)
        return scope.cancelled_caught

    assert run_blocking(begin()) is True
    assert not reached


@pytest.mark.parametrize("seconds", [60, 1e300, math.inf])
def test_a_limit_that_has_not_passed_says_nothing(driver: ThreadDriver, seconds: float) -> None:
    waiter = Waiter()

    async def wait() -> bool:
        with driver.move_on_after(seconds) as scope:
            await driver.prepare(waiter)
            later(0.02, lambda: driver.post(partial(wake_all, [waiter])))
            await driver.wait(waiter)
        return scope.cancelled_caught

    assert run_blocking(wait()) is False


@pytest.mark.parametrize(("outer", "inner"), [(0.05, 60), (60, 0.05), (0, 0), (math.inf, 0.05), (0.05, math.inf)])
def test_of_limits_the_outermost_that_has_passed_ends(driver: ThreadDriver, outer: float, inner: float) -> None:
    after = []

    async def wait() -> tuple[bool, bool]:
        with driver.move_on_after(outer) as around:
            with driver.move_on_after(inner) as within:
                await wait_for(driver, Waiter())
            after.append(True)
        return around.cancelled_caught, within.cancelled_caught

    assert run_blocking(wait()) == ((True, False) if outer <= inner else (False, True))
    assert after == ([] if outer <= inner else [True])


def test_what_else_ends_a_block_is_not_taken_for_its_limit(driver: ThreadDriver) -> None:
    async def fail() -> None:
        with driver.move_on_after(0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_blocking(fail())
    run_blocking(driver.checkpoint())


def test_a_limit_is_of_one_call_in_one_thread(driver: ThreadDriver) -> None:
    """Also if something broke out of its block without leaving it, as an exception from a signal handler may."""

    async def outer() -> bool:
        driver.move_on_after(0).__enter__()
        await trio_free()
        with pytest.raises(BaseException, match="limit has passed"):
            await driver.checkpoint()
        return True

    async def trio_free() -> None:
        run_blocking(driver.checkpoint())  # a call within a call, as out of an iterator that is read
        (answer,) = in_threads(1, lambda _: run_blocking(driver.checkpoint()))
        assert answer is None

    assert run_blocking(outer())
    run_blocking(driver.checkpoint())


# Signals


@pytest.mark.parametrize("before", [True, False])
def test_a_signal_is_seen_before_and_after(driver: ThreadDriver, before: bool) -> None:
    told = Signal(driver)
    if before:
        told.set()
    else:
        later(0.02, told.set)
    run_blocking(told.wait())
    told.set()
    run_blocking(told.wait())


def test_no_signal_is_missed(driver: ThreadDriver) -> None:
    """Set and waited for at the same moment, again and again."""
    for _ in range(300):
        told = Signal(driver)
        in_threads(2, lambda n, told=told: told.set() if n else run_blocking(told.wait()))  # type: ignore[misc]


@pytest.mark.parametrize("before", [True, False])
async def test_a_signal_under_trio(before: bool) -> None:
    told = Signal(TrioDriver())
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            if before:
                told.set()
            nursery.start_soon(told.wait)
            await trio.testing.wait_all_tasks_blocked()
            told.set()


# A link of many threads


def test_threads_share_a_link(link: Link, server: Server) -> None:
    def ask(n: int) -> list[str]:
        run_blocking(link.wait_ready())
        return [run_blocking(link.call(echo(f"{n}-{i}"))) for i in range(200)]

    assert in_threads(8, ask) == [[f"{n}-{i}" for i in range(200)] for n in range(8)]
    assert link.connections == 1


def test_each_request_of_many_threads_is_executed_once(link: Link, server: Server, prefix: str) -> None:
    def work(n: int) -> None:
        for i in range(100):
            run_blocking(link.call(append(prefix, f"{n}-{i}")))

    in_threads(8, work)
    with server.client() as client:
        found = [text.decode() for text in client.lrange(f"{prefix}:{{Q}}", 0, -1)]
    assert sorted(found) == sorted(f"{n}-{i}" for n in range(8) for i in range(100))
    for n in range(8):
        assert [text for text in found if text.startswith(f"{n}-")] == [f"{n}-{i}" for i in range(100)]  # in order


def test_many_at_once_from_many_threads(link: Link) -> None:
    def ask(n: int) -> list[str]:
        return run_blocking(link.call_all([echo(f"{n}-{i}") for i in range(300)]))

    assert in_threads(8, ask) == [[f"{n}-{i}" for i in range(300)] for n in range(8)]


def test_nothing_at_once(link: Link) -> None:
    assert run_blocking(link.call_all([])) == []


def test_what_threads_post_together_is_their_own(link: Link, server: Server, prefix: str) -> None:
    answers: list[int] = []

    def post(n: int) -> None:
        for i in range(50):
            with link.together:
                for j in range(4):
                    link.post(log(prefix, f"{n}-{i}-{j}"), lambda value, _: answers.append(value or 0))

    in_threads(8, post)
    until_replied(link, lambda: len(answers) == 8 * 50 * 4)
    with server.client() as client:
        found = [text.decode() for text in client.lrange(f"{prefix}:{{Q}}", 0, -1)]
    for n in range(8):
        own = [text for text in found if text.startswith(f"{n}-")]
        assert own == [f"{n}-{i}-{j}" for i in range(50) for j in range(4)]


def test_a_block_of_posts_is_of_one_thread(link: Link, server: Server, prefix: str) -> None:
    answers: list[int] = []

    def post(text: str) -> None:
        link.post(log(prefix, text), lambda value, _: answers.append(value or 0))

    def post_together(_: int) -> None:
        with link.together:
            post("other")
        until_replied(link, lambda: answers)  # though the block around is open still

    with link.together:
        post("first")
        in_threads(1, post_together)
        post("second")
    until_replied(link, lambda: len(answers) == 3)
    with server.client() as client:
        assert client.lrange(f"{prefix}:{{Q}}", 0, -1) == [b"other", b"first", b"second"]


def test_threads_subscribe_at_once(link: Link, server: Server, prefix: str) -> None:
    """The first subscriptions of a link, which make its connection, from several threads."""
    heard: list[tuple[str, bytes]] = []

    def listen(n: int) -> Any:
        subscription = link.subscriptions.open(
            [f"{prefix}:{n}"], lambda channel, message: heard.append((channel, message)), lambda: None
        )
        run_blocking(subscription.wait_confirmed())
        return subscription

    subscriptions = in_threads(8, listen)
    assert link.subscriptions.connections == 1
    with server.client() as client:
        for n in range(8):
            client.publish(f"{prefix}:{n}", b"%d" % n)
        until_replied(link, lambda: len(heard) == 8)
        assert sorted(heard) == [(f"{prefix}:{n}", b"%d" % n) for n in range(8)]
        for subscription in subscriptions:
            subscription.close()
        wait_until(lambda: client.pubsub_channels(f"{prefix}:*") == [])


def test_closing_at_once_leaves_nothing_behind(new_link: NewLink, server: Server) -> None:
    """Who subscribes for the first time while another thread closes is refused, and leaves no thread and no socket."""
    gc.collect()
    for _ in range(40):
        link = new_link(server.url)

        def subscribe(n: int, link: Link = link) -> None:
            if n == 0:
                link.close()
                return
            with suppress(Unavailable):
                subscription = link.subscriptions.open(["a"], lambda *_: None, lambda: None)
                run_blocking(subscription.wait_confirmed())

        in_threads(3, subscribe)
    wait_until(ended)
    before = descriptors()
    gc.collect()  # what was left is closed by this, with a warning
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_confirmation_is_waited_for_as_long_as_the_limit(new_link: NewLink, proxy: FaultProxy) -> None:
    link = new_link(proxy.url)
    proxy.hold(matching="SUBSCRIBE", on="subscribe")
    subscription = link.subscriptions.open(["a"], lambda *_: None, lambda: None)

    async def wait() -> bool:
        with link.driver.move_on_after(0.1) as scope:
            await subscription.wait_confirmed()
        return scope.cancelled_caught

    assert run_blocking(wait())


def test_closing_ends_every_wait(link: Link, server: Server) -> None:
    run_blocking(link.wait_ready())
    failed: list[BaseException] = []

    def ask(n: int) -> None:
        try:
            while True:
                run_blocking(link.call(echo("a")))
        except Unavailable as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    link.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(failed) == 8
    assert all("was closed" in str(error) for error in failed)
    with pytest.raises(Unavailable, match="was closed"):
        run_blocking(link.call(echo("a")))


def test_a_call_of_a_thread_has_patience(new_link: NewLink, proxy: FaultProxy) -> None:
    link = new_link(proxy.url)
    run_blocking(link.wait_ready())
    proxy.blackhole("data")
    with pytest.raises(Unavailable) as caught:
        run_blocking(link.call(echo("a"), patience=3))
    assert caught.value.sent is None


# Interrupts

INTERRUPTED = """
import signal, sys, threading
from tests.link.scripts import append, echo
from worqr.link import Link, LinkSettings, ThreadDriver, run_blocking

link = Link(LinkSettings(sys.argv[1], patience=600), ThreadDriver())
link.start()
run_blocking(link.wait_ready())
assert run_blocking(link.call(append(sys.argv[2], "a")))[1] == 1
print("away?", flush=True)
sys.stdin.readline()
waits = {
    "call": lambda: link.call(append(sys.argv[2], "b")),
    "call_all": lambda: link.call_all([append(sys.argv[2], "c"), append(sys.argv[2], "d")]),
}
for name, wait in waits.items():
    try:
        threading.Timer(0.2, lambda: print("waits", flush=True)).start()
        run_blocking(wait())
    except KeyboardInterrupt:
        print(f"{name} was interrupted", flush=True)
sys.stdin.readline()
print(run_blocking(link.call(append(sys.argv[2], "e")))[1:], flush=True)
link.close()
"""


async def test_an_interrupt_ends_a_wait_and_withdraws_the_request(
    own_server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    child = spawn(INTERRUPTED, own_server.url, prefix)
    await child.line_with("away?")
    own_server.stop()
    child.send("it is")
    for name in ("call", "call_all"):
        await child.line_with("waits")
        child.signal(signal.SIGINT)
        assert await child.line(PATIENCE / 2) == f"{name} was interrupted"
    own_server.start()
    child.send("it is back")
    length, number, lowest = eval(await child.line())
    assert length == 2  # neither b nor c nor d was sent
    assert number == lowest  # and none of them is waited for
    assert await child.ended() == 0


FORKED = """
import os, signal, sys, time
from worqr.link import Link, LinkSettings, ThreadDriver, run_blocking

link = Link(LinkSettings(sys.argv[1], app=sys.argv[2]), ThreadDriver())
link.start()
run_blocking(link.wait_ready())
run_blocking(link.subscriptions.open(["a"], print, lambda: None).wait_confirmed())
if os.fork() == 0:
    print("forked", flush=True)
    time.sleep(60)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_forked_child_keeps_no_connection_of_its_parent(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    child = spawn(FORKED, server.url, prefix)
    await child.line_with("forked")
    with server.client() as client:

        def ours() -> list[str]:
            return sorted(c["name"] for c in client.client_list() if c["name"].startswith(f"worqr:{prefix}:"))

        assert ours() == [f"worqr:{prefix}:data", f"worqr:{prefix}:subscribe"]
        child.send("end")
        await trio.to_thread.run_sync(wait_until, lambda: ours() == [])


# Signal handlers


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """`on_signal(run)`: run this in the main thread, in a handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda run: signal.signal(signal.SIGUSR1, lambda *_: run()) and None
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_call_while_its_thread_waits(
    link: Link, proxy: FaultProxy, new_link: NewLink, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    slow, heard = new_link(proxy.url, patience=PATIENCE), list[str]()
    run_blocking(slow.call(echo("connected")))
    held = proxy.hold_reply(on="data")

    def called() -> None:
        heard.append(run_blocking(link.call(echo("from a handler"))))
        held.release()

    on_signal(called)
    later(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert run_blocking(slow.call(echo("a"))) == "a"
    assert heard == ["from a handler"]


def test_a_call_out_of_the_middle_of_another_one_is_refused(link: Link) -> None:
    with link.driver.entered, pytest.raises(UsageError, match="signal handler"):
        run_blocking(link.call(echo("a")))
    assert run_blocking(link.call(echo("b"))) == "b"


def test_an_interrupt_in_the_middle_of_a_change_leaves_no_thread_waiting(
    new_link: NewLink, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = new_link(server.url, patience=PATIENCE)
    run_blocking(link.call(echo("connected")))
    send = Session.send

    def interrupted(self: Session, batch: list[Any], *rest: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and any(request.call.args == ("interrupt",) for request in batch):
            raise KeyboardInterrupt
        return send(self, batch, *rest)

    monkeypatch.setattr(Session, "send", interrupted)
    failed: list[Unavailable] = []
    gate = threading.Event()

    def wait(_: int) -> None:
        subscription = link.subscriptions.open(["never"], lambda *_: None, lambda: None)
        run_blocking(subscription.wait_confirmed())
        gate.set()
        with pytest.raises(Unavailable, match="interrupted") as caught:
            run_blocking(Signal(link.driver).wait()) or run_blocking(link.call(echo("a")))
        failed.append(caught.value)

    waiting = threading.Thread(target=wait, args=(0,))
    waiting.start()
    gate.wait(PATIENCE)
    wait_until(lambda: link.driver._driving is not None)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        while True:  # until it is this thread that sends the request: the other one may, while it holds the link
            run_blocking(link.call(echo("interrupt")))
    waiting.join(PATIENCE)
    assert failed
    assert link.has_ended


def test_ctrl_c_as_the_lock_was_just_taken_leaves_it_to_other_threads(link: Link) -> None:
    """As Python delivers it between the return of ``acquire`` and the next line."""
    assert run_blocking(link.call(echo("before"))) == "before"
    state = state_of(link)
    lock = state._lock

    class Interrupted:
        release = lock.release

        def acquire(self, **options: bool) -> bool:
            lock.acquire(**options)
            state._lock = lock
            raise KeyboardInterrupt

    state._lock = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_blocking(link.call(echo("interrupted")))
    assert not state.is_owned()
    assert in_threads(1, lambda _: run_blocking(link.call(echo("after")))) == ["after"]


@pytest.mark.parametrize("nested", [False, True])
def test_ctrl_c_at_any_call_of_a_function_leaves_the_lock_to_other_threads(
    new_link: NewLink, server: Server, nested: bool
) -> None:
    """As Python delivers it: also where a function begins, before its first line."""

    def deliver(link: Link) -> None:
        link.post(echo("nested"), lambda _value, _error: None)

    def call(link: Link) -> None:
        if nested:
            link.post(echo("posted"), lambda _value, _error: deliver(link))
        run_blocking(link.call(echo("interrupted")))

    at = 0
    while True:
        link = new_link(server.url)
        run_blocking(link.call(echo("before")))
        if not interrupted(at, lambda link=link: call(link)):
            break
        assert not state_of(link).is_owned(), at
        with suppress(Unavailable):  # it was interrupted in the middle of a change
            in_threads(1, lambda _, link=link: run_blocking(link.call(echo("after"))))
        at += 1
    assert at > 10


@pytest.mark.parametrize("together", [False, True])
def test_ctrl_c_at_any_call_of_a_function_of_the_thread_that_drives_leaves_no_other_one_waiting(
    new_link: NewLink, proxy: FaultProxy, together: bool
) -> None:
    """`together`: its reply comes with those of the others."""

    def drive(link: Link) -> None:
        if together:
            link.post(echo("first"), lambda _value, _error: None)
        run_blocking(link.call(echo("a")))

    def follow(link: Link, ended: list[object]) -> None:
        try:
            ended.append(run_blocking(link.call(echo("b"))))
        except Unavailable as error:  # it was interrupted in the middle of a change
            ended.append(error)

    at = 0
    while True:
        link = new_link(proxy.url)
        run_blocking(link.call(echo("connected")))
        ended = list[object]()
        threads = [threading.Thread(target=follow, args=(link, ended)) for _ in range(2)]
        held, over = proxy.hold_reply(on="data"), threading.Event()
        helper = threading.Thread(target=follow_and_release, args=(link, threads, held, over))
        helper.start()
        is_interrupted = interrupted(at, lambda link=link: drive(link), since="_handle")
        over.set()
        helper.join()
        if not is_interrupted:
            break
        for each in threads:
            each.join(PATIENCE)
        assert len(ended) == 2, at
        link.close()  # it may send again, and the next fault is not for that
        at += 1
    assert at > 10


def test_a_run_that_is_cancelled_before_its_thread_drives_ends_the_wait(
    new_link: NewLink, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just after the look whether it is: what wakes the thread then finds nobody who drives."""

    class CancelledAfterTheFirstLook:
        looks = 0
        wake: Callable[[], object]

        def add_wait(self, wake: Callable[[], object]) -> None:
            self.wake = wake

        def remove_wait(self, wake: Callable[[], object]) -> None:
            pass

        def check_wait(self) -> None:
            self.looks += 1
            if self.looks > 1:
                raise KeyError("cancelled")
            in_threads(1, lambda _: self.wake())

    run = CancelledAfterTheFirstLook()
    link = new_link(server.url)
    run_blocking(link.call(echo("connected")))
    link.driver._timers.clear()  # type: ignore[attr-defined]  # one of them would wake the thread at last
    signalled = Signal(link.driver)
    timer = threading.Timer(PATIENCE / 4, signalled.set)
    timer.start()
    monkeypatch.setattr(thread_driver, "run_here", lambda: run)
    with pytest.raises(KeyError, match="cancelled"):
        run_blocking(signalled.wait())
    timer.cancel()


@pytest.mark.parametrize("since", ["_readable", "receive_all"])
def test_ctrl_c_at_any_call_of_a_function_leaves_no_other_thread_without_its_confirmation(
    new_link: NewLink, proxy: FaultProxy, since: str
) -> None:
    def follow(link: Link, ended: list[object]) -> None:
        subscription = link.subscriptions.open(["b"], lambda *_: None, lambda: None)
        ended.append(run_blocking(subscription.wait_confirmed()))

    at = 0
    while True:
        link = new_link(proxy.url)
        run_blocking(link.call(echo("connected")))
        ended = list[object]()
        thread = threading.Thread(target=follow, args=(link, ended), daemon=True)
        held = proxy.hold_reply(on="subscribe")
        mine = link.subscriptions.open(["a"], lambda *_: None, lambda: None)
        over = threading.Event()
        helper = threading.Thread(target=follow_and_release, args=(link, [thread], held, over))
        helper.start()
        is_interrupted = interrupted(at, lambda mine=mine: run_blocking(mine.wait_confirmed()), since=since)
        over.set()
        helper.join()
        thread.join(PATIENCE)
        if not is_interrupted:
            break
        assert ended == [None], at
        link.close()  # it may subscribe again, and the next fault is not for that
        at += 1
    assert at > 5


def test_what_is_submitted_while_another_thread_has_the_lock_is_sent(link: Link) -> None:
    run_blocking(link.call(echo("before")))
    heard = list[str]()
    with link.driver.entered:
        thread = threading.Thread(target=lambda: heard.append(run_blocking(link.call(echo("a")))))
        thread.start()
        wait_until(lambda: state_of(link).submitted)
    thread.join(PATIENCE)
    assert heard == ["a"]


@pytest.mark.parametrize("at", [0, 1])
def test_ctrl_c_as_a_thread_sends_what_another_one_has_left_loses_nothing(link: Link, at: int) -> None:
    run_blocking(link.call(echo("before")))
    heard, state = list[str](), state_of(link)
    with link.driver.entered:
        state.takes = True  # as the thread that drives
        thread = threading.Thread(target=lambda: heard.append(run_blocking(link.call(echo("a")))))
        thread.start()
        wait_until(lambda: state.submitted and link.driver._driving)  # type: ignore[attr-defined]
        time.sleep(0.05)  # it waits for the socket
        state.takes = False
    assert interrupted(at, lambda: link.post(echo("b"), lambda _value, _error: None), since="_send_all")
    thread.join(PATIENCE)
    assert heard == ["a"]


def follow_and_release(link: Link, threads: list[threading.Thread], held: Fault, over: threading.Event) -> None:
    """Let threads follow the one that drives, and then give it its reply; if its wait is not `over`, because a machine that stood
    still has ended the connection.
    """
    driver: Any = link.driver
    wait_until(lambda: driver._driving is not None or over.is_set())
    for each in threads:
        each.start()
    wait_until(lambda: len(driver._followers) == len(threads) or over.is_set())
    held.release()


def state_of(link: Link) -> Any:
    return link.driver._state  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def interrupted(at: int, call: Callable[[], object], since: str = "") -> bool:
    """Raise KeyboardInterrupt in a call, where the `at`-th function of the driver or of the link begins, counted from the first
    one that is named `since`. Return False if there are fewer.
    """
    left = at if not since else sys.maxsize

    def trace(frame: Any, event: str, _: object) -> None:
        nonlocal left
        code = frame.f_code
        if code.co_name == since and left > at:
            left = at
        # a coroutine that has not begun would only warn that it was not awaited
        if event == "call" and "/worqr/link/" in code.co_filename and code.co_name not in {"run_blocking", "call"}:
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False

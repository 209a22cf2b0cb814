"""Limits with a name as an option of functions: tasks start under one budget, hold no slot before, and leave nothing behind."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from typing import Any, cast

import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh  # noqa: F401 - fixtures
from tests.peer.process_jobs import use_tokens
from tests.peer.tools import serving
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.client.permits import HeldPermits
from worqr.errors import UsageError
from worqr.keys import LimitKeys, QueueKeys
from worqr.link import Link, LinkSettings
from worqr.ops import PermitReply
from worqr.peer.consumer import CROSSED, SharedLimit, StartPermits
from worqr.peer.scheduler import Scheduler

ONE = worqr.Limit(1, name="api")
TOKENS = worqr.Limit(rate=1000, per=3600, unit="tokens", name="tokens")


async def limits_of(mesh: worqr.Mesh[Any]) -> dict[str, worqr.LimitInfo]:
    return {info.name: info for info in await mesh.limits()}


async def until_limit(mesh: worqr.Mesh[Any], name: str, **fields: object) -> None:
    """Wait until a limit has these fields."""
    found: worqr.LimitInfo | None = None
    with trio.fail_after(PATIENCE):
        while found is None or any(getattr(found, field) != value for field, value in fields.items()):
            found = (await limits_of(mesh)).get(name)
            await trio.lowlevel.checkpoint()


async def test_functions_of_two_workers_share_a_limit_and_none_starves(mesh: worqr.Mesh, new_mesh: NewMesh) -> None:
    other, inside, most, ran = new_mesh(), 0, 0, list[str]()

    def declare(of: worqr.Mesh[Any], name: str) -> worqr.Function[[], None]:
        @of.task(name=name, limit=worqr.Limit(2, name="api"))
        async def call() -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await trio.sleep(0.005)
            inside -= 1
            ran.append(name)

        return call

    first, second = declare(mesh, "first"), declare(other, "second")
    async with mesh.join(), other.join():
        await mesh.enqueue_many([first.call() for _ in range(60)])
        await other.enqueue_many([second.call() for _ in range(10)])
        with trio.fail_after(PATIENCE):
            while len(ran) < 70:
                await trio.sleep(0.01)
    assert most == 2
    assert ran[:60].count("second") >= 5  # it waits for turns, not until the other queue is empty


async def test_a_task_that_waits_for_a_limit_holds_no_slot_and_can_be_cancelled(mesh: worqr.Mesh) -> None:
    ran = list[str]()

    @mesh.task(limit=ONE, result_ttl=60)
    async def limited() -> None:
        ran.append("limited")

    @mesh.task(result_ttl=60)
    async def free() -> None:
        ran.append("free")

    async with mesh.join(concurrency=1):
        async with mesh.limit(ONE):
            waits, cancelled = await limited.dispatch(), await limited.dispatch()
            await until_limit(mesh, "api", held=1, waiting=1)
            with trio.fail_after(PATIENCE):
                await (await free.dispatch()).result()
                assert (await cancelled.cancel()).waiting == 1
            assert ran == ["free"]
            assert (await mesh.queue(limited.name).info()).running == 0
        with trio.fail_after(PATIENCE):
            await waits.result()
        await until_limit(mesh, "api", held=0, waiting=0)
    assert ran == ["free", "limited"]


async def test_a_workflow_whose_suspension_was_refused_goes_on_with_a_permit(mesh: worqr.Mesh, server: Server) -> None:
    begun, may_wait, approved = trio.Event(), trio.Event(), list[str | None]()

    @mesh.workflow(name="fulfil", limit=ONE, result_ttl=60)
    async def fulfil() -> None:
        begun.set()
        await may_wait.wait()
        approved.append(await worqr.wait_for("approved", str))

    async with mesh.join():
        with server.client() as client:
            suspended = QueueKeys(mesh.prefix, "fulfil").base + ":suspended"
            job = await fulfil.dispatch()
            await begun.wait()
            assert await job.send("approved", "ada") == "stored"
            client.set(suspended, "foreign")
            may_wait.set()
            await until_limit(mesh, "api", held=0)
            async with mesh.limit(ONE):
                client.delete(suspended)
                with trio.fail_after(PATIENCE):
                    while (await job.status()).state == "active":
                        await trio.sleep(0.01)
                assert not approved
        await job.result(PATIENCE)
    assert approved == ["ada"]


async def test_permits_without_a_task_go_back_and_cost_nothing(mesh: worqr.Mesh) -> None:
    @mesh.task(limit=[ONE, TOKENS], cost=400)
    async def call() -> None: ...

    async with mesh.join():
        await until_limit(mesh, "tokens", used=0, held=0)
        await until_limit(mesh, "api", held=0)


async def test_a_limit_that_refuses_keeps_no_permit_of_another(mesh: worqr.Mesh) -> None:
    done = trio.Event()

    @mesh.task(limit=[TOKENS, ONE], cost=400)
    async def call() -> None:
        done.set()

    async with mesh.join():
        async with mesh.limit(ONE):
            await call.enqueue()
            await until_limit(mesh, "api", held=1, waiting=1)
            await until_limit(mesh, "tokens", used=0, held=0)
        with trio.fail_after(PATIENCE):
            await done.wait()
        await until_limit(mesh, "tokens", used=400, held=0)


@pytest.mark.parametrize("place", ["loop", "thread", "asyncio", "process"])
async def test_what_a_run_uses_replaces_its_estimate(mesh: worqr.Mesh, place: Any) -> None:
    async def use(task: bytes) -> None:
        use_tokens(task)

    handler = use_tokens if place in {"thread", "process"} else use
    async with serving(mesh, "Q1", handler, runs_in=place, limit=TOKENS, cost=400, result_ttl=60):
        for used, total in ((7, 7), (600, 607)):
            with trio.fail_after(PATIENCE):
                await (await mesh.queue("Q1").dispatch(b"%d" % used)).result()
            await until_limit(mesh, "tokens", used=total, held=0)


async def test_a_run_that_ends_in_any_way_gives_its_permit_back(mesh: worqr.Mesh) -> None:
    begun = trio.Event()

    @mesh.task(limit=ONE, keep_failed=0, retry=worqr.RetryPolicy(max_failures=1))
    async def call(how: str) -> None:
        if how == "error":
            raise ValueError
        begun.set()
        await trio.sleep_forever()

    async with mesh.join(grace=0):
        with trio.fail_after(PATIENCE):
            await call.enqueue("error")
            job = await call.dispatch("forever")
            await begun.wait()
            await until_limit(mesh, "api", held=1)
            await job.cancel()
            await until_limit(mesh, "api", held=0)
            begun = trio.Event()
            await call.enqueue("forever")
            await begun.wait()
    async with mesh.connect():
        await until_limit(mesh, "api", held=0, expired=0, waiting=0)


HOLDER = """
import sys, trio, worqr
from worqr.client import permits
from worqr.peer import consumer

consumer.LEASE, permits.LEASE, permits.RENEW_EVERY = 1.0, 1.0, 0.2
mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])

@mesh.task(name="call", limit=worqr.Limit(1, name="api"))
async def call() -> None:
    print("holds", flush=True)
    await trio.sleep_forever()

async def main() -> None:
    async with mesh.join():
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.leaves("{*}", "{*}:*", "*")
async def test_a_worker_that_dies_keeps_no_permit_and_its_task_runs_again(mesh: worqr.Mesh, server: Server) -> None:
    ran = trio.Event()

    @mesh.task(name="call", limit=ONE)
    async def call() -> None:
        ran.set()

    async with mesh.connect():
        await call.enqueue()
    with closing(Child(HOLDER, server.url, mesh.prefix)) as child:
        await child.line_with("holds")
        async with mesh.join():
            await until_limit(mesh, "api", held=1)
            child.kill()
            with trio.fail_after(PATIENCE):
                await ran.wait()


def test_wrong_uses_have_a_remedy(mesh: worqr.Mesh) -> None:
    async def call(values: list[int]) -> None: ...

    task: Any = partial(mesh.task, name="call")
    for options, words in (
        ({"limit": TOKENS, "cost": 1001}, r"cost 1,001 is above limit 'tokens', which allows 1,000 tokens per hour"),
        ({"limit": ONE, "cost": 5}, "cost is for a limit with a name and a unit: write limit="),
        ({"limit": TOKENS, "cost": -1}, "cost must be"),
        ({"limit": [ONE, ONE]}, "two limits have one name"),
        ({"limit": ONE, "batch_size": 5}, "a handler of lists takes several tasks at once"),
    ):
        with pytest.raises(UsageError, match=words):
            task(**options)(call)
    with pytest.raises(UsageError, match="cost is an option of one function"):
        worqr.Mesh(defaults={"cost": 5})


async def test_a_function_gets_its_turn_while_another_one_takes_every_unit_of_its_worker(
    mesh: worqr.Mesh, new_mesh: NewMesh
) -> None:
    other, ran, stop = new_mesh(), list[str](), False

    @mesh.task(name="busy")
    async def busy() -> None:
        await trio.sleep(0.2)
        if not stop:
            await busy.enqueue()

    def declare(of: worqr.Mesh[Any], name: str) -> worqr.Function[[], None]:
        @of.task(name=name, limit=worqr.Limit(2, name="api"))
        async def call() -> None:
            ran.append(name)
            await trio.sleep(0.05)
            if not stop:
                await call.enqueue()

        return call

    first, second = declare(mesh, "first"), declare(other, "second")
    async with mesh.join(concurrency=4), other.join(concurrency=4):
        for _ in range(8):
            await busy.enqueue()
            await second.enqueue()
        await first.enqueue()
        with trio.fail_after(PATIENCE):
            while ran.count("second") < 100:
                await trio.sleep(0.01)
        assert ran.count("first") >= 2  # less than its share, but not nothing
        stop = True
        with trio.fail_after(PATIENCE):
            while any(info.waiting or info.running for info in (await mesh.info()).queues):
                await trio.sleep(0.01)


class PostedLink:
    """Keeps what is posted to a link, to be answered by the test."""

    settings = LinkSettings("redis://127.0.0.1:1")

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.patience: list[float] = []

    def post(self, _call: object, answered: Any, *, patience: float = math.inf) -> None:
        self.answers.append(answered)
        self.patience.append(patience)


async def test_a_sign_of_room_that_overtakes_the_refusal_is_heard(mock_clock: trio.testing.MockClock) -> None:
    link, held = PostedLink(), HeldPermits.__new__(HeldPermits)
    held.note = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    held.tell_other = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    limit = SharedLimit(LimitKeys("p", "api"), "1", "", 1)
    permits = StartPermits("q", cast("Link", link), held, [limit], lambda: True)
    for overtakes in (False, True):
        permits.take(1, lambda _: None)
        if overtakes:
            permits._look()
        link.answers.pop()(PermitReply("wait", 3000, ""), None)
        assert permits.refused
        assert (permits._ask_at <= trio.current_time()) == overtakes


async def test_a_limit_whose_node_is_away_does_not_keep_units_for_ever() -> None:
    link, held = PostedLink(), HeldPermits.__new__(HeldPermits)
    held.note = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    limit = SharedLimit(LimitKeys("p", "api"), "1", "", 1)
    permits = StartPermits("q", cast("Link", link), held, [limit], lambda: True)
    delivered: list[int] = []
    permits.take(1, delivered.append)
    assert link.patience == [LinkSettings("redis://127.0.0.1:1").patience]
    link.answers.pop()(None, worqr.Unavailable("the node is away", sent=None))
    assert delivered == [0]


async def test_a_permit_is_renewed_while_another_limit_has_not_answered() -> None:
    link, held, renewed = PostedLink(), HeldPermits.__new__(HeldPermits), set[str]()
    held.note = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    held.tell_other = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    held.add = lambda keys, _: renewed.add(keys.name)  # type: ignore[method-assign, assignment, return-value]
    held.remove = lambda keys, _: renewed.discard(keys.name)  # type: ignore[method-assign, assignment, return-value]
    limits = [SharedLimit(LimitKeys("p", name), "1", "", 1) for name in ("one", "two")]
    permits = StartPermits("q", cast("Link", link), held, limits, lambda: True)
    permits.take(1, lambda _: None)
    link.answers.pop()(PermitReply("ok", 1, ""), None)
    assert renewed == {"one"}
    link.answers.pop()(None, worqr.Unavailable("the node is away", sent=None))
    assert renewed == set()


async def test_a_cost_of_a_run_that_has_ended_is_not_kept() -> None:
    held = HeldPermits.__new__(HeldPermits)
    permits = StartPermits("q", cast("Link", PostedLink()), held, [], lambda: True)
    permits.note_cost(7, 3)
    assert not permits._used


async def test_a_function_that_gave_back_one_limit_for_another_asks_again_at_a_time_of_its_own(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two that ask for the same limits in another order are woken by what the other one gives back."""
    link, held, asked = PostedLink(), HeldPermits.__new__(HeldPermits), list[float]()
    for name in ("note", "tell_other", "add", "remove"):
        setattr(held, name, lambda *_: None)
    limits = [SharedLimit(LimitKeys("p", name), "1", "", 1) for name in ("one", "two")]

    def on_room() -> bool:
        asked.append(trio.current_time())
        return True

    permits = StartPermits("q", cast("Link", link), held, limits, on_room)
    permits.take(1, lambda _: None)
    link.answers.pop()(PermitReply("ok", 1, ""), None)
    link.answers.pop()(PermitReply("wait", 3000, ""), None)
    permits._look()
    assert permits.refused
    assert not asked
    assert trio.current_time() <= permits._ask_at <= trio.current_time() + CROSSED
    await trio.sleep(CROSSED)
    permits._look()
    assert asked


async def test_functions_that_name_the_same_limits_in_another_order_all_run(mesh: worqr.Mesh, server: Server) -> None:
    ran = 0
    one, two = worqr.Limit(1, name="one"), worqr.Limit(1, name="two")
    all_ran = trio.Event()

    def declare(name: str, *limits: worqr.Limit) -> worqr.Function[[int], None]:
        @mesh.task(name=name, limit=limits)
        async def run(n: int) -> None:
            nonlocal ran
            await trio.sleep(0.005)
            ran += 1
            if ran == 40:
                all_ran.set()

        return run

    functions = [declare("one-two", one, two), declare("two-one", two, one)]
    async with mesh.join(grace=0):
        for function in functions:
            await mesh.enqueue_many(function.call(n) for n in range(20))
        with trio.fail_after(PATIENCE):
            await all_ran.wait()


async def test_a_quiet_worker_starts_nothing_when_a_permit_comes(
    mesh: worqr.Mesh, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, began = list[Scheduler](), list[int]()
    real = Scheduler.__init__

    def noted(self: Scheduler, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Scheduler, "__init__", noted)

    @mesh.task(limit=ONE, name="limited")
    async def limited(n: int) -> None:
        began.append(n)

    async with mesh.join(concurrency=1, grace=0):
        async with mesh.limit(ONE):
            await limited.enqueue(1)
            [consumer] = cast("Any", made[-1])._consumers
            with trio.fail_after(PATIENCE):
                while consumer._ask_again is None:  # it keeps a unit
                    await trio.sleep(0.005)
            made[-1].be_quiet()
        await until_limit(mesh, "api", held=0)
        await trio.sleep(0.3)  # in which the unit that is kept would be used
        assert not began
        made[-1].resume()
        with trio.fail_after(PATIENCE):
            while not began:
                await trio.sleep(0.01)


async def test_functions_without_permits_leave_the_worker_to_others(mesh: worqr.Mesh, server: Server) -> None:
    """At most one of them keeps a unit for a moment, though ten wait for a limit that is used up."""
    now, longest, last, ran = 0, 0, 0, 0  # in hundredths of a second in which the loop turned

    def declare(n: int) -> worqr.Function[[], None]:
        @mesh.task(name=f"limited-{n}", limit=ONE)
        async def limited() -> None: ...

        return limited

    limited = [declare(n) for n in range(10)]

    @mesh.task(name="free")
    async def free() -> None:
        nonlocal longest, last, ran
        longest, last, ran = max(longest, now - last), now, ran + 1
        await trio.sleep(0.02)

    async with mesh.connect(), mesh.limit(ONE), mesh.join(concurrency=2, grace=0):
        await mesh.enqueue_many(function.call() for function in limited for _ in range(3))
        await mesh.enqueue_many(free.call() for _ in range(1000))
        last = now
        for _ in range(400):
            await trio.sleep(0.01)
            now += 1
    assert ran > 60, "40 of 400 ran before"
    assert longest < 250


async def test_a_task_alone_asks_for_one_permit(mesh: worqr.Mesh, server: Server) -> None:
    """Otherwise it would ask for as many as there are slots, and give the rest back one by one."""

    @mesh.task(limit=worqr.Limit(100, name="api"), result_ttl=60)
    async def call() -> None:
        pass

    def scripts() -> int:
        return int(server.look.info("commandstats")["cmdstat_evalsha"]["calls"])

    async with mesh.join(concurrency=100):
        await (await call.dispatch()).result(PATIENCE)
        before = scripts()
        for _ in range(10):
            await (await call.dispatch()).result(PATIENCE)
        assert scripts() - before < 10 * 40

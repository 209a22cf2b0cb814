"""A peer that was declared dead, or thrown out of a queue: it lets go at once, and comes back under a fresh worker id."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.leader.test_due_jobs import hearing
from tests.peer.test_claims import lose
from tests.peer.tools import Held, Runs, at_most, eventually, serving, spying, until
from tests.support.leaks import dump
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr import ops
from worqr.command import Command
from worqr.handler_options import HandlerOptions, Handling, handling, policy_for, refuse_unknown
from worqr.keys import QueueKeys
from worqr.link import Link, boottime
from worqr.ops import Beat
from worqr.peer.options import JoinOptions
from worqr.peer.session import OperatorRequests, Registration
from worqr.policy import Policy


async def test_two_heartbeats_of_three_may_be_lost(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    """The key of a worker has a keepalive of 3 s, and gets it again before two thirds of that are left."""
    mesh = new_mesh()
    async with mesh.join() as peer:
        key = f"{{{prefix}}}:worker:{peer.id}"
        for _ in range(10):  # a busy machine may delay a beat, or this look at it
            least, until_then = math.inf, time.monotonic() + 3.2
            while time.monotonic() < until_then:
                least = min(least, await trio.to_thread.run_sync(server.look.pttl, key))
                await trio.sleep(0.02)
            if least >= 1800:
                return
    raise AssertionError(f"{least} ms were left of the keepalive")


@pytest.mark.one_server
@pytest.mark.parametrize("keepalive", [1, 3, 60, 3600])
async def test_a_beat_is_sent_each_second_or_three_times_in_a_keepalive(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch, keepalive: float
) -> None:
    asked: list[float] = []
    make = Link.heartbeat

    def heartbeat(self: Link, **options: Any) -> Any:
        asked.append(options["every"])
        return make(self, **options)

    monkeypatch.setattr(Link, "heartbeat", heartbeat)
    async with new_mesh(keepalive=keepalive).join():
        pass
    assert asked == [min(1.0, keepalive / 3)]


async def test_a_peer_declared_dead_cancels_what_runs_and_comes_back(
    mesh: worqr.Mesh, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    held, second = Held(), Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=2) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q2", second))
        first = peer.id
        await mesh.queue("Q1").enqueue(b"a")
        await mesh.queue("Q2").enqueue(b"b")
        await held.wait(1)
        await second.wait(1)
        lose(server, prefix, first)
        await held.wait_for(lambda: held.cancelled == [(b"a", "lost")])
        await second.wait_for(lambda: second.cancelled == [(b"b", "lost")])
        await held.wait(2)
        await second.wait(2)
        assert peer.id not in {first, ""}
        for again, before in (held.contexts[::-1], second.contexts[::-1]):
            assert (again.stalls, again.attempt) == (1, 2)
            assert again.fence > before.fence
        await eventually(lambda: ids(mesh), [peer.id])  # a sweep drops the old one after its tasks are back
        held.gate.set()
        second.gate.set()
        for name in ("Q1", "Q2"):
            await eventually(mesh.queue(name).running, [])
            counts = (await mesh.queue(name).info()).counts
            # a task handed over while the other queue's request had reserved the room went back, and was claimed again
            counts["claimed"] -= counts.pop("stopped", 0)
            assert counts == {"enqueued": 1, "claimed": 2, "stalled": 1, "finished": 1}
        assert peer._engine.scheduler.running == 0
        await until(lambda: peer.health().ready)
        nursery.cancel_scope.cancel()
    lost = [record.getMessage() for record in caplog.records if record.getMessage().startswith("worker.lost")]
    assert len(lost) == 1
    assert first in lost[0]


async def test_only_a_beat_that_was_sent_lately_lets_held_claims_go(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        membership, registration = peer._engine.session, peer._engine.session.registration
        assert registration is not None
        assert registration.heartbeat is not None
        registration.heartbeat.stop()
        await trio.testing.wait_all_tasks_blocked(0.01)
        begun: list[bool] = []
        alive, now = Beat(alive=True, revived=False, leads=False, waiting=[]), registration.alive_at
        membership.defer_until_beat(registration, lambda: begun.append(registration.dead))
        for too_old in (now - 3, -math.inf):
            registration.alive_at = too_old
            membership._on_beat(registration, alive)
            assert begun == []
        registration.alive_at = boottime()
        membership._on_beat(registration, alive)
        assert begun == [False]


def test_the_answer_of_a_beat_counts_from_when_it_was_sent() -> None:
    def read(reply: list[Any]) -> Beat:
        return Beat(alive=reply[0], revived=False, leads=False, waiting=[])

    registration = Registration("w")
    registration.alive_at = 0
    early = registration.record_replies(Command(Any, "", (), read))
    between = boottime()
    time.sleep(0.002)
    early.read([True])
    assert 0 < registration.alive_at <= between
    registration.record_replies(Command(Any, "", (), read)).read([False])
    assert registration.alive_at == -math.inf, "the loop has not heard of it yet, but the claims are gone"


async def test_a_lost_handler_that_takes_its_time_settles_nothing_and_keeps_its_room(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs, slow = Runs(), trio.Event()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if len(runs.tasks) == 1:
            with trio.CancelScope(shield=True):
                await slow.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler, room=2) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await runs.wait(1)
        lose(server, prefix, peer.id)
        await runs.wait(2)
        await eventually(q.running, [])
        await until(lambda: peer.health().room == 1)  # a start request may still be under way
        slow.set()  # it returns: too late to be a finish
        await until(lambda: peer.health().room == 2)
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 2, "stalled": 1, "finished": 1}


async def test_a_peer_that_stands_no_longer_in_the_fence_comes_back(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs) as peer:
        first = peer.id
        await eventually(lambda: hungry(server, prefix), 1)
        server.client().hdel(f"{prefix}:{{Q1}}:workers", first)
        await mesh.queue("Q1").enqueue(b"a")
        assert await runs.wait(1) == [b"a"]
        assert peer.id != first
        await eventually(mesh.queue("Q1").running, [])
        # The old id is registered still, without a beat: it is swept as any other dead worker.
        await eventually(lambda: ids(mesh), [peer.id])


async def hungry(server: Server, prefix: str) -> int:
    return server.look.scard(f"{prefix}:{{Q1}}:hungry")


async def ids(mesh: worqr.Mesh) -> list[str]:
    return [worker.id for worker in await mesh.workers()]


async def test_nothing_is_asked_of_a_queue_that_is_just_being_entered_again(
    new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, runs = new_mesh(url=proxy.url), Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs) as peer:
        first = peer.id
        await eventually(lambda: hungry(server, prefix), 1)
        held = proxy.hold_reply(matching=sent_as("map_work"))
        lose(server, prefix, first)
        await held.wait_executed()
        for _ in range(3):
            server.client().publish(f"{prefix}:{{Q1}}", "1")
        await trio.sleep(0.1)
        held.release()
        await until(lambda: peer.health().ready)
        second = peer.id
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await eventually(mesh.queue("Q1").running, [])
        assert peer.id == second
        await eventually(lambda: ids(mesh), [second])
    assert caplog.text.count("worker.lost") == 1


@pytest.mark.parametrize("stage", ["start_worker", "map_work", "start_work"])
async def test_a_peer_that_leaves_while_it_comes_back_leaves_nothing_that_a_sweep_does_not_find(
    new_mesh: NewMesh, prefix: str, server: Server, proxy: FaultProxy, stage: str
) -> None:
    mesh, other = new_mesh(url=proxy.url, keepalive=1), new_mesh(keepalive=1)
    async with other.join() as stays:
        async with at_most(25), serving(mesh, "Q1", Runs()) as peer:
            held = proxy.hold_reply(matching=sent_as(stage))
            lose(server, prefix, peer.id)
            await held.wait_executed()
            held.release()
        await eventually(lambda: ids(other), [stays.id])
        await eventually(lambda: lasting(server, prefix), [])


async def lasting(server: Server, prefix: str) -> list[bytes]:
    return [key for key, entry in dump(server.look, prefix).items() if b"Q1" in key and not entry.expires]


async def test_a_queue_that_is_left_while_it_is_entered_again_is_left(
    new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy
) -> None:
    for stage in (sent_as("map_work"), sent_as("start_work"), "\r\nSUBSCRIBE\r\n"):
        mesh = new_mesh(url=proxy.url)
        async with at_most(60), mesh.join() as peer, trio.open_nursery() as nursery:
            serving = await nursery.start(serve_in_scope, peer)
            await eventually(partial(hearing, server, f"{{{prefix}}}:due"), 1)  # it subscribes to nothing else any more
            first, held = peer.id, proxy.hold(matching=stage)
            lose(server, prefix, first)
            await held.wait_fired()
            serving.cancel()
            await trio.testing.wait_all_tasks_blocked(0.05)
            held.release()
            await until(lambda peer=peer: not peer._engine.consumers)  # type: ignore[misc]
            await until(lambda peer=peer, first=first: peer.id != first and peer.health().ready)  # type: ignore[misc]
            second = peer.id
            await eventually(lambda: lasting(server, prefix), [])
            await trio.sleep(0.1)
            assert peer.id == second
            assert server.client().pubsub_channels(f"{prefix}:{{Q1}}*") == []
            assert await ids(mesh) == [second]


async def serve_in_scope(peer: worqr.Peer, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", Runs()))
            task_status.started(scope)


async def test_what_runs_is_cancelled_before_the_peer_has_come_back(
    new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy
) -> None:
    mesh, held = new_mesh(url=proxy.url), Held()
    async with mesh.connect(), serving(mesh, "Q1", held) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await held.wait(1)
        rejoins = proxy.hold_reply(matching=sent_as("start_worker"))
        lose(server, prefix, peer.id)
        await rejoins.wait_executed()
        await held.wait_for(lambda: held.cancelled == [(b"a", "lost")])
        assert not peer.health().ready
        rejoins.release()
        await held.wait(2)
        held.gate.set()
        await eventually(mesh.queue("Q1").running, [])


async def test_a_cancel_that_meets_a_dying_owner_holds(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    runs, slow = Runs(), trio.Event()

    async def stubborn(task: bytes) -> None:
        runs.begin(task)
        with trio.CancelScope(shield=True):
            await slow.wait()

    async with mesh.connect(), serving(mesh, "Q1", stubborn) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await runs.wait(1)
        assert await q.cancel(b"a", wait=0.1) == worqr.CancelCount(0, 1, 0)
        first = peer.id
        lose(server, prefix, first)
        await until(lambda: peer.id not in {first, ""})
        await eventually(q.running, [])
        slow.set()
        await until(lambda: peer._engine.scheduler.running == 0)
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}
        assert await q.count() == 0
        assert runs.tasks == [b"a"]


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
async def test_a_task_that_keeps_killing_its_workers_is_set_aside_and_takes_no_neighbour_along(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    held, done = Held(), Runs()

    async def handler(task: bytes) -> None:
        await (held(task) if task == b"poison" else done(task))

    async with mesh.connect(), serving(mesh, "Q1", handler) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"poison", b"a", b"b")
        await done.wait(2)
        for n in (1, 2, 3):
            await held.wait(n)
            lose(server, prefix, peer.id)
            await held.wait_for(lambda n=n: len(held.cancelled) == n)  # type: ignore[misc]
        await eventually(q.running, [])
        assert [context.stalls for context in held.contexts] == [0, 1, 2]
        info = await q.info()
        assert (info.failed, info.waiting) == (1, 0)
        assert info.counts == {"enqueued": 3, "claimed": 5, "stalled": 2, "finished": 2, "failed": 1}
        (record,) = [entry.value for key, entry in dump(server.client(), prefix).items() if b":aside:" in key]
        assert (record[b"task"], record[b"reason"], record[b"stalls"]) == (b"poison", b"stalled", b"3")
        await until(lambda: peer.health().ready)


async def test_the_error_of_a_request_that_is_given_up_names_the_dead_worker(
    new_mesh: NewMesh, proxy: FaultProxy, prefix: str
) -> None:
    mesh, registration, failures = new_mesh(url=proxy.url), Registration("api"), list[Exception | None]()
    async with mesh.connect():
        held = proxy.hold_reply(sent_as("list_own_claims"), on="data")
        call = ops.list_own_claims(QueueKeys(prefix, "Q1"), registration.worker)
        mesh._client.link.post(call, lambda _, failure: failures.append(failure), owner=registration)
        await held.wait_executed()
        registration.dead = True
        proxy.cut("data")
        await until(lambda: failures)
    assert registration.worker.startswith("api:")
    [failure] = failures
    assert isinstance(failure, worqr.ClaimLost)
    assert str(failure) == f"worker {registration.worker} is dead; list_own_claims was given up"


# ``mesh.ask_worker``: what a worker does when an operator asks it to be quiet, to resume, to drain, or for other places.


async def worker(mesh: worqr.Mesh) -> worqr.WorkerInfo:
    [found] = await mesh.workers()
    return found


async def answered(mesh: worqr.Mesh, answer: str = "done") -> worqr.WorkerInfo:
    async def given() -> str:
        return (await worker(mesh)).answer

    await eventually(given, answer)
    return await worker(mesh)


async def test_a_quiet_worker_takes_nothing_new_and_stays(new_mesh: NewMesh) -> None:
    mesh = new_mesh(app="shop")
    held, queue = Held(), mesh.queue("Q1")
    async with serving(mesh, "Q1", held) as peer:
        await queue.enqueue(b"before")
        await until(lambda: held.tasks == [b"before"])
        await mesh.ask_worker(peer.id, "quiet")
        info = await answered(mesh)
        assert (info.state, info.request, info.room, info.running) == ("quiet", "", 0, 1)
        await queue.enqueue(b"after")
        held.gate.set()
        await eventually(lambda: numbers(queue), (1, 0))
        assert held.tasks == [b"before"]
        await until(lambda: peer.health().ready)
        await mesh.ask_worker(peer.id, "resume")
        await until(lambda: held.tasks == [b"before", b"after"])
        assert (await answered(mesh)).state == "ready"
        asked = [(entry.kind, entry.worker, entry.text) for entry in await mesh.log() if "_" in entry.kind]
        assert asked[:2] == [("worker_asked", peer.id, "quiet"), ("worker_answered", peer.id, "quiet -: done")]


async def numbers(queue: worqr.Queue) -> tuple[int, int]:
    info = await queue.info()
    return info.waiting, info.running


async def test_another_worker_takes_the_tasks_of_a_quiet_one(new_mesh: NewMesh) -> None:
    one, two = new_mesh(), new_mesh()
    mine, theirs = Runs(), Runs()
    async with serving(one, "Q1", mine) as peer, serving(two, "Q1", theirs):
        await one.ask_worker(peer.id, "quiet")
        await until(lambda: peer._engine.scheduler.quiet)
        for n in range(5):
            await one.queue("Q1").enqueue(b"%d" % n)
        await until(lambda: len(theirs.tasks) == 5)
        assert not mine.tasks


async def test_a_worker_gets_another_concurrency_also_while_it_is_quiet(mesh: worqr.Mesh) -> None:
    async with mesh.join(concurrency=3) as peer:
        await mesh.ask_worker(peer.id, "quiet", concurrency=7)
        assert (await answered(mesh)).state == "quiet"
        assert peer._engine.scheduler.concurrency == 7
        await mesh.ask_worker(peer.id, "resume")
        await until(lambda: peer._engine.scheduler.room == 7)
        await mesh.ask_worker(peer.id, concurrency="auto")
        await until(lambda: peer._engine.scheduler.auto)


async def test_a_concurrency_that_is_too_small_for_a_run_is_refused(mesh: worqr.Mesh) -> None:
    async with serving(mesh, "Q1", Runs(), room=8, size=5) as peer:
        await mesh.ask_worker(peer.id, concurrency=4)
        refused = "refused: queue 'Q1': a run of size 5 would never find room: the concurrency of this peer is 4 units"
        await answered(mesh, refused)
        assert peer._engine.scheduler.concurrency == 8


async def test_a_worker_drains_when_it_is_asked(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with other.connect(), serving(mesh, "Q1", held) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await until(lambda: held.tasks == [b"a"])
        await mesh.ask_worker(peer.id, "drain")
        await until(lambda: peer._engine.leaving)
        assert (await worker(other)).state in ("ready", "leaving")
        held.gate.set()
        await peer.wait()
        assert (await mesh.queue("Q1").info()).running == 0


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("A",), {}, "needs"),
    (("A", "sleep"), {}, "a worker can be asked for 'quiet', 'resume', 'drain', not 'sleep'"),
    (("A",), {"concurrency": 0}, "concurrency must be a whole number of at least 1, not 0"),
    (("A",), {"concurrency": "many"}, "concurrency must be a whole number of at least 1, not 'many'"),
    (("A",), {"concurrency": 10_000_000}, "concurrency must be at most 1,000,000"),
    ((5, "quiet"), {}, "worker_id must be a str"),
]


@pytest.mark.parametrize(("args", "more", "said"), WRONG)
async def test_a_wrong_request_is_refused_before_it_is_sent(
    mesh: worqr.Mesh, args: tuple[Any, ...], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(worqr.UsageError, match=said):
        await mesh.ask_worker(*args, **more)


async def test_an_unknown_worker_is_named(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=f"there is no worker '{peer.id[:-1]}'.*did you mean '{peer.id}'"):
            await mesh.ask_worker(peer.id[:-1], "quiet")


class Recorded:
    """The units of a peer, which note what is done to them."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def set_concurrency(self, n: object) -> None:
        self.calls.append(n)

    def be_quiet(self) -> None:
        self.calls.append("quiet")

    def resume(self) -> None:
        self.calls.append("resume")


def test_a_request_is_carried_out_once_and_answered_until_the_server_has_it() -> None:
    units, reports = Recorded(), list[str]()
    requests = OperatorRequests(units, lambda: units.calls.append("drain"), reports.append)
    for _ in range(2):
        requests.on_request("5 quiet 3")
        assert requests.answer == "5 done"
    requests.on_request("")
    assert requests.answer == ""
    requests.on_request("6 drain -")
    assert units.calls == [3, "quiet", "drain"]
    assert reports == ["quiet 3: done", "drain -: done"]


@pytest.mark.parametrize("wanted", ["dance -", "quiet 0", "quiet x", "quiet", "quiet 1 2", ""])
def test_what_a_worker_does_not_understand_is_refused_and_changes_nothing(wanted: str) -> None:
    units = Recorded()
    requests = OperatorRequests(units, lambda: None, lambda _text: None)
    requests.on_request(f"5 {wanted}")
    assert requests.answer.startswith("5 refused: ")
    assert len(requests.answer) < 220
    assert not units.calls


def test_synchronous_code_asks_a_worker(mesh: worqr.Mesh) -> None:
    async def main() -> None:
        async with mesh.join() as peer:
            await trio.to_thread.run_sync(lambda: worqr.sync(mesh.ask_worker, peer.id, "quiet", concurrency=2))
            await until(lambda: peer._engine.scheduler.quiet)
            await trio.to_thread.run_sync(mesh.close)

    trio.run(main)


# What `serve`, `work` and `join` are called with: checked before anything is sent, refused by name with the remedy.


KNOWN = {"serve": HandlerOptions, "join": JoinOptions}


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        ("serve", "max_retries", r"has no option 'max_retries'; use retry=worqr\.RetryPolicy\(max_failures="),
        ("serve", "eta", "has no option 'eta'; use run_at"),
        ("serve", "concurency", "has no option 'concurency'; did you mean 'concurrency'"),
        ("join", "gracce", "has no option 'gracce'; did you mean 'grace'"),
        ("join", "xyz", "has no option 'xyz'; it takes concurrency, grace"),
        ("serve", "grace", "has no option 'grace'; it takes timeout"),
    ],
)
def test_options_that_do_not_exist_are_refused_with_the_remedy(where: str, name: str, words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        refuse_unknown(where, {name: 1}, tuple(KNOWN[where].__annotations__))


def test_no_options_are_fine() -> None:
    assert policy_for() == Policy()
    assert handling("serve", {}) == Handling(Policy())


def test_the_policy_of_a_handler_is_what_it_was_given_over_the_defaults() -> None:
    given = policy_for(
        worqr.RetryPolicy(max_failures=4, jitter=False), timeout=5, keep_failed=0, result_ttl=60, on_failure=True
    )
    assert given == Policy(max_failures=4, jitter=False, timeout=5.0, keep_failed=0, result_ttl=60.0, on_failure=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"retry": bad}, "retry must be a worqr.RetryPolicy") for bad in (3, {}, "never", worqr.RetryPolicy)),
        *(({"keep_failed": bad}, "keep_failed must be a whole number") for bad in (-1, 1.5, True, "9", None)),
        *(({"timeout": bad}, "timeout must be") for bad in (0, -1, float("nan"), float("inf"), "5", True)),
        *(({"result_ttl": bad}, "result_ttl must be") for bad in (-1, float("nan"), float("inf"), "5", True)),
        *(({"on_failure": bad}, "handler") for bad in (7, "told", b"")),
        *(({"on_failure_retry": bad}, "on_failure_retry must be a worqr.RetryPolicy") for bad in (3, {}, "never")),
        *(({"on_failure_timeout": bad}, "on_failure_timeout must be") for bad in (0, -1, float("inf"), "5", True)),
        *(({"size": bad}, "size of serve") for bad in (0, -1, 1.5, "2", True, None)),
        *(({"priority": bad}, "priority of serve") for bad in (0, -1, 1.5, "2", True, None)),
        *(({"runs_in": bad}, "runs_in must be one of") for bad in ("threads", 1, b"loop", "")),
        ({"runs_in": "thread"}, "async function, whose places are"),
        ({"max_length": 3}, "serve.. takes no max_length"),
    ],
)
async def test_settings_of_a_handler_that_cannot_be_are_refused(mesh: worqr.Mesh, options: Any, words: str) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=words):
            await peer.serve("Q1", Runs(), **options)
        if "retry" in options:
            with pytest.raises(worqr.UsageError, match=words):
                async with peer.work("Q1", **options):
                    pytest.fail("a bad policy")
        assert (await mesh.workers())[0].queues == frozenset()


async def test_options_are_refused_before_anything_is_sent(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    with spying(server, prefix) as spy:
        with pytest.raises(worqr.UsageError, match="only: "):
            async with mesh.join(only=["Q1"]):
                pytest.fail("it must not join")
        assert spy.calls()["start_worker"] == 0
    async with mesh.join() as peer:
        with spying(server, prefix) as spy:
            with pytest.raises(worqr.UsageError, match="'concurency'"):
                await peer.serve("Q1", Runs(), concurency=3)  # type: ignore[call-arg]
            calls = spy.calls()
            assert calls["map_work"] == calls["start_work"] == 0
        assert (await mesh.workers())[0].queues == frozenset()


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf"), "25", True, None])
async def test_grace_is_a_duration(mesh: worqr.Mesh, grace: Any) -> None:
    with pytest.raises(worqr.UsageError, match="grace"):
        async with mesh.join(grace=grace):
            pytest.fail("it must not join")
    if grace is not None:
        async with mesh.join() as peer:
            with pytest.raises(worqr.UsageError, match="grace"):
                await peer.drain(grace)
            assert not peer._engine.leaving


async def test_a_peer_serves_a_queue_once(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1"):
        with pytest.raises(worqr.UsageError, match="'Q1' is served by this peer already.*concurrency"):
            await peer.serve("Q1", Runs())


@pytest.mark.parametrize("name", ["", "a{b", "}", "x" * 201, "a\nb", "\x00", "\x7f", "\udcff", 7, b"Q1", None])
async def test_bad_queue_names_are_refused_by_peers(mesh: worqr.Mesh, name: Any) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match="queue name"):
            await peer.serve(name, Runs())
        with pytest.raises(worqr.UsageError, match="queue name"):
            async with peer.work(name):
                pytest.fail("a bad name")


async def test_a_worker_that_missed_its_deadline_says_why_its_heartbeats_failed(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = worqr.Mesh(own_server.url, keepalive=1)
    async with mesh.join() as peer:
        with own_server.client() as client:

            def beats() -> list[str]:
                return [each["id"] for each in client.client_list() if each["name"].endswith(":beat")]

            await until(beats)  # it connects with its first heartbeat
            client.config_set("maxclients", len(client.client_list()) - 1)
            [beat] = beats()
            client.client_kill_filter(_id=beat)  # only its heartbeats cannot connect again
            await until(lambda: not client.exists(f"{{worqr}}:worker:{peer.id}"))
            client.config_set("maxclients", 100)
        await until(lambda: [each for each in caplog.messages if "missed its heartbeat deadline" in each])
    assert "had failed: ERR max number of clients reached" in caplog.text

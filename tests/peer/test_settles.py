"""Settles that the server refuses: kept with their outcome, sent again, reported once, never given back behind one's back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

import worqr
from tests.peer.test_reconciler import reconnect
from tests.peer.tools import QUICK, Held, eventually, serving, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import RefusedByServer
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.peer.session import Registration
from worqr.peer.settler import CROWDED, Settles

pytestmark = pytest.mark.one_server


# With a made-up link


class Link:
    """A link whose answers a test makes up: `sent` are the claims of each request, `answer` answers the oldest."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self._deliver: list[Callable[[Any, Exception | None], None]] = []

    def post(self, call: Any, deliver: Callable[[Any, Exception | None], None], *, owner: object) -> None:
        self.sent.append(list(call))
        self._deliver.append(deliver)

    def answer(self, value: object = None) -> None:
        error = value if isinstance(value, Exception) else None
        self._deliver.pop(0)(None if error else value, error)


class Desk:
    """`Settles` on such a link; `heard` are the answers of one sender."""

    def __init__(self) -> None:
        self.link = Link()
        self.settles = Settles(cast("Any", self.link))
        self.registration = Registration("w")
        self.heard: list[Any] = []

    def send(self, *claims: int, queue: str = "Q1") -> None:
        def make(some: Sequence[int]) -> Any:
            return some

        def answered(value: object, failure: Exception | None) -> None:
            self.heard.append(value if failure is None else type(failure))

        self.settles.send(QueueKeys("t", queue), self.registration, claims, make, answered)

    @property
    def open(self) -> set[int]:
        return self.settles.claims_of("Q1")


REFUSED = RefusedByServer("NOPERM")


async def test_a_claim_is_open_until_its_settle_is_accepted() -> None:
    desk = Desk()
    desk.send(1, 2)
    desk.send(3, queue="Q2")
    assert (desk.open, desk.settles.claims_of("Q2")) == ({1, 2}, {3})
    desk.link.answer("ok")
    assert (desk.open, desk.settles.claims_of("Q2"), desk.heard) == (set(), {3}, ["ok"])


async def test_what_is_refused_is_sent_again_with_growing_pauses(autojump_clock: trio.testing.MockClock) -> None:
    desk = Desk()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.settles.retry_forever)
        desk.send(1)
        for n, pause in enumerate((1, 2, 4, 8, 16, 30, 30), 1):
            desk.link.answer(REFUSED)
            await trio.sleep(pause - 0.1)
            assert (len(desk.link.sent), desk.open) == (n, {1})
            await trio.sleep(0.1)
            await trio.testing.wait_all_tasks_blocked()
            assert len(desk.link.sent) == n + 1
        assert desk.heard == [RefusedByServer], "the sender hears of the first refusal only"
        desk.link.answer("ok")
        assert (desk.open, desk.heard) == (set(), [RefusedByServer, "ok"])
        await trio.sleep(100)
        assert len(desk.link.sent) == 8
        nursery.cancel_scope.cancel()


async def test_a_refused_batch_is_sent_again_claim_by_claim(autojump_clock: trio.testing.MockClock) -> None:
    desk = Desk()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.settles.retry_forever)
        desk.send(1, 2, 3)
        desk.link.answer(REFUSED)
        await trio.sleep(1.5)
        assert desk.link.sent == [[1, 2, 3], [3], [2], [1]], "the newest first: stopped tasks keep their old order"
        desk.link.answer("ok")
        desk.link.answer(REFUSED)
        desk.link.answer("ok")
        assert desk.open == {2}
        nursery.cancel_scope.cancel()


async def test_what_a_dead_registration_settled_is_not_sent_again(autojump_clock: trio.testing.MockClock) -> None:
    desk = Desk()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.settles.retry_forever)
        desk.send(1)
        desk.send(2)
        desk.link.answer(REFUSED)
        desk.registration.dead = True
        desk.settles.forget(desk.registration)
        desk.link.answer(ClaimLost("dead"))
        await trio.sleep(100)
        assert (len(desk.link.sent), desk.open, desk.heard) == (2, set(), [RefusedByServer, ClaimLost])
        nursery.cancel_scope.cancel()


async def test_leaving_waits_for_answers_and_tries_the_refused_once_more() -> None:
    desk = Desk()
    desk.send(1)
    desk.link.answer(REFUSED)
    desk.send(2)
    left = trio.Event()

    async def leave() -> None:
        await desk.settles.wait_answered("Q1")
        left.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        assert desk.link.sent == [[1], [2], [1]]
        desk.link.answer("ok")
        await trio.testing.wait_all_tasks_blocked()
        assert not left.is_set()
        desk.link.answer(REFUSED)
        await left.wait()
    desk.settles.drop("Q1")
    assert desk.open == set()


async def test_a_queue_with_many_refused_settles_takes_no_more_tasks() -> None:
    desk = Desk()
    desk.send(*range(CROWDED))
    desk.link.answer(REFUSED)
    assert desk.settles.crowded == {"Q1"}
    desk.settles._remove_refused("Q1", [next(iter(desk.settles._refused["Q1"]))])
    assert desk.settles.crowded == set()


# On a server


@pytest.fixture
def spoil(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`spoil.begin()`: every settle on Q1 is refused, because a key has a foreign type; until `spoil.end()`."""
    monkeypatch.setattr("worqr.peer.settler.FIRST_PAUSE", 0.2)
    monkeypatch.setattr("worqr.peer.consumer.RECONCILE_EVERY", 0.1)
    client, key = server.client(), f"{prefix}:{{Q1}}:suspects"
    return SimpleNamespace(begin=lambda: client.set(key, "foreign"), end=lambda: client.delete(key))


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("settle.refused")]


@pytest.mark.parametrize("how", ["finish", "retry", "fail", "timeout"])
async def test_a_refused_settle_keeps_its_outcome_over_a_new_connection(
    mesh: worqr.Mesh,
    server: Server,
    prefix: str,
    spoil: SimpleNamespace,
    how: str,
    caplog: pytest.LogCaptureFixture,
    expects_left: Callable[..., None],
) -> None:
    expects_left("{Q1}:failed", "{Q1}:aside*")
    held = Held()

    async def handler(task: bytes) -> bytes:
        if len(held.tasks) == 1:  # the second run
            held.begin(task)
            return b"again"
        await held(task)
        if how == "retry":
            raise ValueError
        if how == "fail":
            raise worqr.Failure("for good")
        if how == "timeout":
            worqr.current().extend(0.1)
            await trio.sleep_forever()
        return b"result"

    timeout = 2 * PATIENCE if how == "timeout" else None
    async with serving(mesh, "Q1", handler, retry=QUICK, timeout=timeout, result_ttl=60) as peer:
        job = await mesh.queue("Q1").dispatch(b"a", id="a")
        await held.wait(1)
        spoil.begin()
        held.gate.set()
        await until(lambda: refusals(caplog))
        await reconnect(server.client(), mesh)
        [consumer] = peer._engine.consumers.entered()
        await until(lambda: consumer.admission.checked_on == mesh._client.link.connections)
        assert held.tasks == [b"a"]
        spoil.end()
        if how == "fail":
            await eventually(lambda: state(job), "failed")
        else:
            assert await job.result(PATIENCE) == (b"result" if how == "finish" else b"again")
        assert not [record for record in caplog.records if record.getMessage().startswith("claim.stray")]
        assert held.tasks == ([b"a"] if how in {"finish", "fail"} else [b"a", b"a"])
        if how in {"retry", "timeout"}:
            assert held.contexts[1].attempt == 2, "it was counted"
        await until(lambda: not server.client().keys(f"{prefix}:{{Q1}}:claims:*"))


async def state(job: worqr.Job[Any]) -> str:
    return (await job.status()).state


async def test_a_claim_by_hand_that_was_refused_is_settled_later_as_it_was_said(
    mesh: worqr.Mesh, server: Server, prefix: str, spoil: SimpleNamespace
) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a", b"b")
        a, b = await claims.take(2)
        spoil.begin()
        for settle in (a.finish, b.stop):
            with pytest.raises(RefusedByServer, match="WRONGTYPE"):
                await settle()
        spoil.end()
        [again] = await claims.take(1)
        assert (again.task, again.attempt) == (b"b", 1)
        await again.finish()
        await until(lambda: not server.client().keys(f"{prefix}:{{Q1}}:claims:*"))
        assert (await mesh.queue("Q1").info()).counts["finished"] == 2


async def test_a_refused_settle_is_reported_and_its_end_is_too(
    mesh: worqr.Mesh, spoil: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr")
    held = Held()
    async with serving(mesh, "Q1", held):
        await mesh.queue("Q1").enqueue(b"a", b"b", b"c")
        await held.wait(3)
        spoil.begin()
        held.gate.set()
        await until(lambda: refusals(caplog))
        await trio.sleep(0.7)  # two more tries
        spoil.end()
        await until(lambda: any(r.getMessage().startswith("settle.accepted") for r in caplog.records))
        [line] = refusals(caplog)
        assert "'Q1'" in line
        assert "WRONGTYPE" in line
        runs = [r for r in caplog.records if r.getMessage().startswith("settle.accepted")]
        assert len(runs) == 1


async def test_a_refused_settle_is_tried_once_more_before_its_queue_is_left(
    mesh: worqr.Mesh,
    other: worqr.Mesh,
    server: Server,
    prefix: str,
    spoil: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Held()
    async with other.connect():
        async with serving(mesh, "Q1", held):
            await other.queue("Q1").enqueue(b"a")
            await held.wait(1)
            spoil.begin()
            held.gate.set()
            await until(lambda: refusals(caplog))
            spoil.end()
        assert not server.client().keys(f"{prefix}:{{Q1}}:claims:*")
        info = await other.queue("Q1").info()
        assert (info.waiting, info.counts["finished"]) == (0, 1), (
            "the settle was tried once more before the queue was left"
        )

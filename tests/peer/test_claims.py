"""Claims by hand: taken one by one or in batches, settled once, given back when nobody settled them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import QUICK, Runs, at_most, eventually, impatient, serving, spying, until
from tests.support.leaks import dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.ops import MAX_ITEMS
from worqr.peer import consumer_runner

FAILED = ("{Q1}:failed", "{Q1}:aside*")
WAITING_JOBS = ("{Q1}:job:*", "{Q1}:twins:*")


def numbers(n: int, start: int = 0) -> list[bytes]:
    return [b"%d" % i for i in range(start, start + n)]


async def running(q: worqr.Queue) -> int:
    return (await q.info()).running


def tasks(claims: list[worqr.Claim]) -> list[bytes]:
    return [claim.task for claim in claims]


# Taking


async def test_iteration_hands_out_the_queue_in_order(mesh: worqr.Mesh) -> None:
    seen: list[bytes] = []
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(*numbers(20))
        async for claim in claims:
            seen.append(claim.task)
            await claim.finish()
            if len(seen) == 20:
                break
        assert seen == numbers(20)
        assert (await mesh.queue("Q1").info()).counts == {"enqueued": 20, "claimed": 20, "finished": 20}


async def test_a_claim_tells_what_a_context_tells(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        claim = await anext(claims)
        assert isinstance(claim, worqr.Context)
        assert (claim.task, claim.queue, claim.attempt, claim.failures, claim.last_attempt) == (b"a", "Q1", 1, 0, False)
        assert (claim.id, claim.cancel_reason) == (f"@{claim.fence}", None)
        assert str(claim.fence) in repr(claim)
        assert "b'a'" not in repr(claim)
        await claim.finish()


async def test_nothing_is_claimed_that_nobody_asked_for(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(5))
        claim = await anext(claims)
        assert (await q.count(), await running(q)) == (4, 1)
        await claim.finish()
        assert await claims.finish(await claims.take(10)) == []


async def test_iteration_pauses_at_the_room_of_the_peer(mesh: worqr.Mesh) -> None:
    async with mesh.join(concurrency=3) as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(*numbers(5))
        held = [await anext(claims) for _ in range(3)]
        with trio.move_on_after(0.2) as scope:
            await anext(claims)
        assert scope.cancelled_caught
        assert await running(mesh.queue("Q1")) == 3
        await held[1].finish()
        async with at_most():
            assert (await anext(claims)).task == b"3"
        await held[0].stop()
        assert tasks(await claims.take(1)) == [b"0"]
    async with mesh.connect():
        left = (await mesh.queue("Q1").tasks())[::-1]
        assert left == [b"2", b"3", b"0", b"4"]  # in the order in which they were claimed


async def test_take_is_one_request(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(*numbers(60))
        with spying(server, prefix) as spy:
            batch = await claims.take(50)
            assert tasks(batch) == numbers(50)
            assert await claims.finish(batch) == []
            calls = spy.calls()
        assert (calls["start_tasks"], calls["finish_tasks"]) == (1, 1)
        assert tasks(last := await claims.take(50)) == numbers(10, 50)
        assert await claims.finish(last) == []


async def test_take_waits_for_the_first_claim(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims, trio.open_nursery() as nursery:
        batches: list[list[bytes]] = []

        async def take() -> None:
            batch = await claims.take(10)
            batches.append(tasks(batch))
            await claims.finish(batch)

        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        await mesh.queue("Q1").enqueue(b"a", b"b")
        await until(lambda: batches == [[b"a", b"b"]])


async def test_take_within_fills_its_batch(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims, trio.open_nursery() as nursery:
        q = mesh.queue("Q1")

        async def produce() -> None:
            for task in numbers(4):
                await q.enqueue(task)
                await trio.sleep(0.02)

        nursery.start_soon(produce)
        async with at_most(25):
            batch = await claims.take(4, within=30)
        assert tasks(batch) == numbers(4)
        await claims.finish(batch)


async def test_take_within_comes_back_short(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        start = trio.current_time()
        batch = await claims.take(4, within=0.1)
        assert 0.1 <= trio.current_time() - start < 15
        assert tasks(batch) == [b"a"]
        await claims.finish(batch)


async def test_a_cancelled_take_loses_nothing(mesh: worqr.Mesh) -> None:
    q = mesh.queue("Q1")
    async with mesh.join() as peer, peer.work("Q1") as claims:
        with trio.move_on_after(0.05):
            await claims.take(2)
        await q.enqueue(*numbers(3))
        await cancel_a_take_that_waits_for_one_more(claims, q, 3)
        async with at_most():
            assert tasks(batch := await claims.take(2)) == numbers(2)
            await q.enqueue(b"3")
            assert tasks(more := await claims.take(2, within=30)) == numbers(2, 2)
        await claims.finish([*batch, *more])
        for n in range(30):  # cancelled at any moment of the round trip
            await q.enqueue(b"%d" % n)
            batch = []
            with trio.move_on_after(n / 10_000):
                batch = await claims.take(1)
            assert tasks(batch := batch or await claims.take(1)) == [b"%d" % n]
            await claims.finish(batch)
        assert await running(q) == 0


async def cancel_a_take_that_waits_for_one_more(claims: worqr.Claims, q: worqr.Queue, there: int) -> None:
    """It has taken those that are `there`."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(claims.take, there + 1, within=30))
        await eventually(partial(running, q), there)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_what_a_cancelled_take_left_goes_back_at_the_end(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with mesh.join() as peer, peer.work("Q1") as claims:
            await q.enqueue(*numbers(3))
            await cancel_a_take_that_waits_for_one_more(claims, q, 3)
            assert await running(q) == 3
            async with at_most():  # nobody holds them, so nobody is waited for
                await peer.drain(20)
            assert (await q.tasks())[::-1] == numbers(3)
        assert (await q.tasks())[::-1] == numbers(3)


async def test_two_takers_share_the_queue(mesh: worqr.Mesh) -> None:
    seen: list[bytes] = []
    async with mesh.join() as peer, peer.work("Q1") as claims, trio.open_nursery() as nursery:

        async def consume() -> None:
            async for claim in claims:
                seen.append(claim.task)
                await claim.finish()

        for _ in range(3):
            nursery.start_soon(consume)
        await mesh.queue("Q1").enqueue(*numbers(50))
        await until(lambda: len(seen) == 50)
        assert sorted(seen) == sorted(numbers(50))
        await eventually(mesh.queue("Q1").running, [])
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "3", None])
async def test_take_wants_a_number(mesh: worqr.Mesh, n: Any) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        with pytest.raises(worqr.UsageError, match=f"take.*at least 1.*{n!r}"):
            await claims.take(n)
        with pytest.raises(worqr.UsageError, match="within"):
            await claims.take(1, within=-1)


async def test_claims_end_with_their_block(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        async with peer.work("Q1") as claims:
            pass
        with pytest.raises(worqr.UsageError, match="'Q1' ended with their block"):
            await claims.take(1)
        with pytest.raises(worqr.UsageError, match="'Q1' ended with their block"):
            await anext(claims)
        async with peer.work("Q1"):
            pass


# Settling


async def test_a_stopped_claim_is_the_next_to_be_taken_and_counts_nothing(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(*numbers(3))
        await (await anext(claims)).stop()
        assert (await mesh.queue("Q1").tasks())[::-1] == numbers(3)
        claim = await anext(claims)
        assert (claim.task, claim.attempt, claim.failures) == (b"0", 1, 0)
        await claim.finish()
        await mesh.queue("Q1").delete()


async def test_a_retried_claim_goes_to_the_back_and_counts_one_failure(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(*numbers(2))
        await (await anext(claims)).retry(delay=0)
        await (await anext(claims)).retry(delay=0, counted=False)
        first, second = await claims.take(2)
        assert [(claim.task, claim.failures, claim.attempt) for claim in (first, second)] == [
            (b"0", 1, 2),
            (b"1", 0, 1),
        ]
        assert await claims.finish([first, second]) == []


@pytest.mark.leaves(*FAILED)
async def test_a_failed_claim_is_set_aside(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"\x00a")
        claim = await anext(claims)
        await claim.fail("no such account \udcff")
        assert (await mesh.queue("Q1").info()).failed == 1
        record = dump(server.client(), prefix)[f"{prefix}:{{Q1}}:aside:{claim.fence}".encode()].value
        assert record[b"task"] == b"\x00a"
        assert record[b"error_type"] == b"Failure"
        assert record[b"error_message"].startswith(b"no such account")
        assert record[b"worker"] == peer.id.encode()


@pytest.mark.leaves(*FAILED)
async def test_the_tenth_retry_sets_aside(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        for attempt in range(1, 11):
            claim = await anext(claims)
            assert (claim.attempt, claim.last_attempt) == (attempt, attempt == 10)
            await claim.retry(delay=0)
        assert (await mesh.queue("Q1").info()).failed == 1
        assert await mesh.queue("Q1").count() == 0


SETTLES: dict[str, Callable[[worqr.Claim], Awaitable[None]]] = {
    "finish": lambda claim: claim.finish(),
    "stop": lambda claim: claim.stop(),
    "retry": lambda claim: claim.retry(),
    "fail": lambda claim: claim.fail("why"),
}
any_settle = pytest.mark.parametrize("settle", SETTLES.values(), ids=SETTLES)


@any_settle
async def test_a_claim_is_settled_once(mesh: worqr.Mesh, settle: Callable[[worqr.Claim], Awaitable[None]]) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        claim = await anext(claims)
        await claim.finish()
        with pytest.raises(worqr.ClaimSettled, match=f"{claim.fence}.*settled already"):
            await settle(claim)
        with pytest.raises(worqr.ClaimSettled):
            await claims.finish([claim])
        with pytest.raises(worqr.ClaimSettled):
            async with claim:
                pytest.fail("a block of a settled claim")
        assert (await mesh.queue("Q1").info()).counts == {"enqueued": 1, "claimed": 1, "finished": 1}


async def test_a_batch_with_a_wrong_claim_finishes_none(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims, peer.work("Q2") as others:
        await mesh.queue("Q1").enqueue(*numbers(3))
        await mesh.queue("Q2").enqueue(b"other")
        a, b, done = await claims.take(3)
        other = await anext(others)
        await done.finish()
        with pytest.raises(worqr.UsageError, match=f"{other.fence} of 'Q2'.*'Q1'"):
            await claims.finish([a, other])
        with pytest.raises(worqr.UsageError, match="twice"):
            await claims.finish([a, b, a])
        with pytest.raises(worqr.ClaimSettled, match=str(done.fence)):
            await claims.finish([a, done])
        assert await running(mesh.queue("Q1")) == 2
        assert await claims.finish(claim for claim in (a, b)) == []
        assert await others.finish([other]) == []
        assert await claims.finish([]) == []
        assert await running(mesh.queue("Q1")) == 0


@any_settle
async def test_a_lost_claim_cannot_be_settled(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str, settle: Callable[[worqr.Claim], Awaitable[None]]
) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        claim = await anext(claims)
        first = peer.id
        lose(server, prefix, first)
        async with at_most():
            await claim.wait_cancelled()
        assert claim.cancel_reason == "lost"
        with pytest.raises(worqr.ClaimLost, match=f"{claim.fence}"):
            await settle(claim)
        again = await anext(claims)
        assert (again.task, again.stalls) == (b"a", 1)
        assert again.fence > claim.fence
        assert peer.id != first
        await again.finish()
        assert peer._engine.scheduler.running == 0


def lose(server: Server, prefix: str, worker: str) -> None:
    """Sweep a worker by hand, as a leader does: as if its beat had been missing."""
    client = server.client()
    client.delete(f"{{{prefix}}}:worker:{worker}")
    assert client.smove(f"{{{prefix}}}:Workers", f"{{{prefix}}}:Dying", worker)


async def test_a_claim_that_is_lost_on_the_server_is_told_when_it_is_settled(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a", b"b")
        a, b = await claims.take(2)
        client, base = server.client(), f"{prefix}:{{Q1}}"
        client.hdel(f"{base}:workers", peer.id)  # as the first chunk of a sweep does
        client.srem(f"{base}:claims:{peer.id}", a.fence)
        client.delete(f"{base}:claim:{a.fence}")
        assert await claims.finish([a, b]) == [a]
        await until(lambda: peer.health().ready)


async def test_a_batch_tells_which_claims_were_lost(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(*numbers(2))
        lost = await claims.take(2)
        lose(server, prefix, peer.id)
        async with at_most():
            await lost[0].wait_cancelled()
        async with at_most():
            again = await claims.take(2, within=30)
        assert tasks(again) == numbers(2)
        assert await claims.finish([lost[0], *again]) == [lost[0]]
        with pytest.raises(worqr.ClaimLost):
            await lost[1].finish()
        assert peer._engine.scheduler.running == 0


async def test_many_claims_are_finished_although_their_finish_is_cancelled(mesh: worqr.Mesh) -> None:
    q, number = mesh.queue("Q1"), MAX_ITEMS + 1
    async with mesh.join(concurrency=number) as peer, peer.work("Q1") as claims:
        await q.enqueue(*numbers(number))
        held = list[worqr.Claim]()
        while len(held) < number:
            held += await claims.take(number - len(held))
        with trio.CancelScope() as scope:
            scope.cancel()
            await claims.finish(held)
        await eventually(lambda: finished(q), number)


# Blocks


async def test_a_block_finishes_its_claim(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        async with await anext(claims) as claim:
            assert claim.task == b"a"
        assert (await mesh.queue("Q1").info()).counts == {"enqueued": 1, "claimed": 1, "finished": 1}


async def test_a_block_whose_claim_was_settled_inside_leaves_it_so(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        async with await anext(claims) as claim:
            await claim.stop()
        assert await mesh.queue("Q1").tasks() == [b"a"]


@pytest.mark.leaves(*WAITING_JOBS)
@pytest.mark.parametrize("error", [ValueError("x"), ExceptionGroup("two", [ValueError(), KeyError()])])
async def test_an_error_ends_the_block_and_counts_as_a_failure(
    mesh: worqr.Mesh, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with mesh.join() as peer, peer.work("Q1", retry=QUICK) as claims:
        await mesh.queue("Q1").enqueue(b"a")
        async with await anext(claims):
            raise error
        async with await anext(claims) as claim:
            assert (claim.task, claim.failures) == (b"a", 1)
            raise error
        assert (await mesh.queue("Q1").info()).counts["retried"] == 2
        assert caplog.text.count("task.failed") == 2


async def test_a_cancel_from_elsewhere_ends_the_block(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    async with other.connect(), mesh.join() as peer, peer.work("Q1") as claims, trio.open_nursery() as nursery:
        q = other.queue("Q1")
        await q.enqueue(b"a")
        counts: list[worqr.CancelCount] = []

        async def cancel() -> None:
            counts.append(await q.cancel(b"a", wait=30))

        async with await anext(claims) as claim:
            nursery.start_soon(cancel)
            async with at_most():
                await trio.sleep_forever()
        assert claim.cancel_reason == "cancel"
        await until(lambda: counts == [worqr.CancelCount(0, 1, 1)])
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}


async def test_an_outer_cancellation_gives_the_task_of_a_block_back(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(2))
        with trio.CancelScope() as scope:
            async with await anext(claims):
                scope.deadline = trio.current_time() + 0.01
                await trio.sleep_forever()
        assert scope.cancelled_caught
        await eventually(q.tasks, numbers(2)[::-1])
        claim = await anext(claims)
        assert (claim.task, claim.attempt) == (b"0", 1)


async def test_a_cancelled_block_that_came_to_its_end_is_finished(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        with trio.CancelScope() as scope:
            async with await anext(claims):
                scope.cancel()  # the work was done; the cancellation only met what comes after it
        await eventually(lambda: finished(q), 1)


async def finished(q: worqr.Queue) -> int:
    return (await q.info()).counts.get("finished", 0)


async def test_a_claim_without_a_block_hears_of_a_cancel(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    async with other.connect(), mesh.join() as peer, peer.work("Q1") as claims:
        await other.queue("Q1").enqueue(b"a", b"b")
        a, b = await claims.take(2)
        assert await other.queue("Q1").cancel(b"a") == worqr.CancelCount(0, 1, 0)
        async with at_most():
            await a.wait_cancelled()
        assert (a.cancel_reason, b.cancel_reason) == ("cancel", None)
        assert await claims.finish([a, b]) == []
        assert (await other.queue("Q1").info()).counts["cancelled"] == 1
        assert (await other.queue("Q1").info()).counts["finished"] == 1


@any_settle
async def test_a_cancelled_claim_never_comes_back_however_it_is_settled(
    mesh: worqr.Mesh, settle: Callable[[worqr.Claim], Awaitable[None]]
) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        claim = await anext(claims)
        await q.cancel(b"a")
        await settle(claim)
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}
        assert (await q.count(), await running(q)) == (0, 0)


async def test_a_cancel_of_a_claim_that_nobody_took_over_is_acknowledged(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await cancel_a_take_that_waits_for_one_more(claims, q, 1)
        assert await running(q) == 1
        assert await q.cancel(b"a", wait=30) == worqr.CancelCount(0, 1, 1)
        await q.enqueue(b"b")
        assert tasks(batch := await claims.take(2)) == [b"b"]
        await claims.finish(batch)


# Leaving


async def test_what_is_unsettled_goes_back_in_order(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(6))
        async with mesh.join() as peer, peer.work("Q1") as claims:
            batch = await claims.take(5)
            await batch[1].finish()
            await batch[3].stop()
        left = [numbers(6)[i] for i in (0, 2, 4, 3, 5)]  # 3 was in front of 5 when the others came back
        assert (await q.tasks())[::-1] == left
        runs = Runs()
        async with serving(mesh, "Q1", runs, room=1):
            assert await runs.wait(5) == left
            assert {context.attempt for context in runs.contexts} == {1}
            await eventually(q.running, [])


async def test_claims_that_went_back_are_no_longer_ours(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"a", b"b")
        async with peer.work("Q1") as claims:
            a, b = await claims.take(2)
        with pytest.raises(worqr.ClaimLost, match="went back"):
            await a.finish()
        assert await claims.finish([a, b]) == [a, b]
        async with peer.work("Q1"):  # back in the fence: the server would take it for a resend
            with pytest.raises(worqr.ClaimLost):
                await b.stop()
        assert (await q.tasks())[::-1] == [b"a", b"b"]
        assert peer._engine.scheduler.running == 0


async def test_drain_ends_iteration_and_waits_for_what_is_held(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        q, ended, let_go, got = mesh.queue("Q1"), trio.Event(), trio.Event(), trio.Event()

        async def consume() -> None:
            async with peer.work("Q1") as claims:
                async for claim in claims:
                    got.set()
                    await let_go.wait()
                    await claim.finish()
                assert await claims.take(3) == []
                ended.set()

        nursery.start_soon(consume)
        await q.enqueue(b"a", b"b")
        await got.wait()
        nursery.start_soon(peer.drain, 20)
        await until(lambda: peer._engine.leaving)
        let_go.set()
        async with at_most():
            await ended.wait()
            await peer.wait()
        assert (await q.info()).counts["finished"] == 1
        assert await q.tasks() == [b"b"]


async def test_a_drain_that_ran_out_of_patience_cancels_what_is_held(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_runner, "UNWIND_WITHIN", PATIENCE)  # nobody takes so long, whatever the machine does
    q = mesh.queue("Q1")
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        reasons: list[tuple[str, str | None]] = []
        tidy = trio.Event()

        async def consume() -> None:
            async with peer.work("Q1") as claims:
                block, loose = await claims.take(2)
                async with block:
                    nursery.start_soon(drain)
                    try:
                        await trio.sleep_forever()
                    finally:
                        reasons.append(("block", block.cancel_reason))
                        with trio.CancelScope(shield=True):
                            await trio.sleep(0.05)
                            assert await running(q) == 2  # nobody else gets it before we have unwound
                        tidy.set()
                await loose.wait_cancelled()
                reasons.append(("loose", loose.cancel_reason))

        async def drain() -> None:
            await peer.drain(0.1)

        await q.enqueue(b"a", b"b", b"c")
        nursery.start_soon(consume)
        async with at_most(25):
            await peer.wait()
        assert tidy.is_set()
        await until(lambda: len(reasons) == 2)
        assert reasons[0] == ("block", "leaving")
        assert reasons[1][0] == "loose" and reasons[1][1] in {"leaving", "lost"}
        assert (await q.tasks())[::-1] == [b"a", b"b", b"c"]


async def test_a_block_that_came_to_its_end_when_a_drain_cancelled_it_is_finished(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_runner, "UNWIND_WITHIN", PATIENCE)  # nobody takes so long, whatever the machine does
    q, done = mesh.queue("Q1"), list[bytes]()
    async with mesh.join() as peer, peer.work("Q1") as claims, trio.open_nursery() as nursery:
        await q.enqueue(b"a")
        async with await anext(claims) as claim:
            nursery.start_soon(peer.drain, 0)
            with trio.CancelScope(shield=True):  # as in a thread: nothing cancels it
                await claim.wait_cancelled()
            done.append(claim.task)
        assert claim.cancel_reason == "leaving"
    async with mesh.connect():
        assert (await finished(q), await q.tasks(), done) == (1, [], [b"a"])


async def test_work_and_serve_refuse_a_queue_that_is_served(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        async with peer.work("Q1"):
            with pytest.raises(worqr.UsageError, match="'Q1' is served by this peer already"):
                async with peer.work("Q1"):
                    pytest.fail("twice")
            with pytest.raises(worqr.UsageError, match="'Q1' is served by this peer already"):
                await peer.serve("Q1", Runs())
        async with peer.work("Q1"):
            pass


async def test_a_settle_while_the_server_is_away_is_sent_when_it_is_back(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=PATIENCE, keepalive=PATIENCE)
    async with mesh.join() as peer, peer.work("Q1") as claims:
        q = mesh.queue("Q1")
        await q.enqueue(b"a", b"b")
        a, b = await claims.take(2)
        own_server.stop()
        with impatient(mesh), pytest.raises(worqr.Unavailable) as caught:
            await a.finish()
        assert caught.value.sent is None
        with pytest.raises(worqr.ClaimSettled):
            await a.finish()
        own_server.start()
        await until(lambda: mesh._client.link.connections > 1)
        await b.finish()
        await eventually(lambda: finished(q), 2)


async def test_a_claim_by_hand_counts_against_the_room_of_all_queues(new_mesh: NewMesh) -> None:
    mesh, runs = new_mesh(), Runs()
    async with mesh.join(concurrency=2) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q2", runs))
        async with peer.work("Q1") as claims:
            await mesh.queue("Q1").enqueue(b"a", b"b")
            held = await claims.take(2)
            await mesh.queue("Q2").enqueue(b"c")
            await trio.sleep(0.1)
            assert runs.tasks == []
            assert peer.health().room == 0
            await held[0].finish()
            await runs.wait(1)
            await held[1].finish()
        nursery.cancel_scope.cancel()


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(
    ("keep", "kept"), [({}, [b"2", b"1", b"0"]), ({"keep_failed": 2}, [b"2", b"1"]), ({"keep_failed": 0}, [])]
)
async def test_as_many_failed_tasks_are_kept_as_the_block_says(mesh: worqr.Mesh, keep: Any, kept: list[bytes]) -> None:
    q = mesh.queue("Q1")
    async with mesh.join() as peer, peer.work("Q1", **keep) as claims:
        await q.enqueue(*numbers(3))
        for _ in range(3):
            await (await anext(claims)).fail("on purpose")
        assert [failed.task for failed in await q.failed.list()] == kept


async def test_a_wrong_number_of_failed_tasks_is_refused(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match="keep_failed must be a whole number of at least 0, not -1"):
            async with peer.work("Q1", keep_failed=-1):
                pass

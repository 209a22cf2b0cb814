"""``worqr cancel``, ``pause`` and ``resume``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

import worqr
from tests.cli.conftest import Answer, Command
from tests.peer.tools import Held, eventually

Beside = Callable[..., Awaitable[Answer]]


async def test_what_waits_is_cancelled_by_id_by_payload_or_all_of_it(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue = mesh.queue("mails")
        await queue.enqueue(b"a", b"a", b"b", b"c", b"d", "é".encode())
        for name in ("x", "y"):
            await queue.dispatch(b"job", id=name)
        assert (await beside("cancel", "mails", "--task", "a", "--task", "é")).out == "3 removed, 0 running cancelled\n"
        assert (await beside("cancel", "mails", "--id", "x", "--json")).json == [
            {"queue": "mails", "waiting": 1, "running": 0, "acknowledged": 0}
        ]
        assert (await beside("cancel", "mails", "--id", "x", "--id", "y")).out == "1 removed, 0 running cancelled\n"
        assert (await beside("cancel", "mails", "--all")).out == "3 removed, 0 running cancelled\n"
        assert await queue.count() == 0


async def test_what_runs_is_cancelled_and_waited_for(beside: Beside, mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "films", held))
        job = await mesh.queue("films").dispatch(b"film", id="x", result_ttl=60)
        await held.wait(1)
        answer = await beside("cancel", "films", "--id", "x", "--wait", "--reason", "nobody wants it")
        assert answer == Answer(0, "0 removed, 1 running cancelled (1 ended)\n", "")
        with pytest.raises(worqr.JobCancelled, match="nobody wants it"):
            await job.result()
        nursery.cancel_scope.cancel()


async def test_what_does_not_end_in_time_is_said(beside: Beside, mesh: worqr.Mesh) -> None:
    begun, gate = trio.Event(), trio.Event()

    async def stubborn(_task: bytes) -> None:
        begun.set()
        with trio.CancelScope(shield=True):
            await gate.wait()

    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "films", stubborn))
        await mesh.queue("films").enqueue(b"film")
        await begun.wait()
        answer = await beside("cancel", "films", "--task", "film", "--within", "10ms")
        assert answer.code == 1
        assert answer.out == "0 removed, 1 running cancelled (0 ended)\n"
        assert answer.err == (
            "worqr: 1 cancelled runs have not ended within 0.01 s; they will not be retried. "
            "`worqr running 'films'` shows their workers\n"
        )
        gate.set()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("words", [(), ("--all", "--id", "x"), ("--task", "a", "--id", "x"), ("--claim", "7", "--all")])
def test_a_cancel_says_what_it_means(command: Command, words: tuple[str, ...]) -> None:
    assert command("cancel", "mails", *words) == Answer(
        2, "", "worqr: name what to cancel by exactly one of --id, --task, --claim and --all\n"
    )


def test_a_queue_is_paused_and_goes_on(cli: Command) -> None:
    cli("enqueue", "mails", "a")
    assert cli("pause", "mails", "the mail server is down") == Answer(0, "Paused queue mails\n", "")
    assert cli("queues", "--json").json[0]["paused"] == "the mail server is down"
    assert cli("resume", "mails") == Answer(0, "Resumed queue mails\n", "")
    assert cli("pause", "mails").code == 0
    assert cli("queues").lines[1].split()[-1] == "paused"
    cli("resume", "mails")
    cli("cancel", "mails", "--all")


@pytest.mark.leaves("*")
async def test_a_queue_is_deleted_once_that_is_confirmed(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue = mesh.queue("mails")
        await queue.enqueue(b"a", b"b")
        await queue.dispatch(b"c", delay=3600)
        what = "2 waiting, 1 scheduled, 0 suspended and 0 blocked tasks"
        unsure = await beside("delete", "mails")
        assert unsure == Answer(2, "", f"worqr: queue 'mails' has {what}: add --yes to delete them\n")
        assert (await queue.info()).waiting == 2
        assert await beside("delete", "mails", "--yes") == Answer(0, f"Deleted {what} of queue mails\n", "")
        info = await queue.info()
        assert (info.waiting, info.scheduled) == (0, 0)
        wrong = await beside("delete", "mials")
        assert (wrong.code, wrong.err) == (2, "worqr: no queue 'mials' is in use; did you mean 'mails'?\n")


async def suspended_in(mesh: worqr.Mesh, queue: str) -> int:
    return (await mesh.queue(queue).info()).suspended


@pytest.mark.leaves("*")
async def test_a_deletion_counts_workflows_that_are_suspended(beside: Beside, mesh: worqr.Mesh) -> None:
    @mesh.workflow(name="mails")
    async def mails() -> None:
        await worqr.wait_for("go", str, timeout=3600)

    async with mesh.join():
        await mails.dispatch()
        await eventually(lambda: suspended_in(mesh, "mails"), 1)
        what = "0 waiting, 0 scheduled, 1 suspended and 0 blocked tasks"
        assert (await beside("delete", "mails")).err == f"worqr: queue 'mails' has {what}: add --yes to delete them\n"


# Limits


async def test_a_limit_is_set_shown_and_cleared(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "mails", Held(), limit=worqr.Limit(20)))
        assert (await beside("limit", "mails")).out == "mails: 20 at once\n"
        answer = await beside("limit", "mails", "--concurrency", "1", "--rate", "100/1m", "--rate", "5/1s")
        assert answer.out == "mails: 1 at once, 100 per minute, 5 per second, set by an operator\n"
        await mesh.queue("mails").enqueue(b"a", b"b")
        await eventually(lambda: held_back(mesh), "concurrency")
        assert (await beside("limit", "mails")).out.endswith("set by an operator; limit reached\n")
        assert (await beside("queues")).lines[1].endswith("limit reached")
        found = (await beside("limit", "mails", "--json")).json[0]
        assert (found["held_back"], found["held_for"], found["limits_overridden"]) == ("concurrency", None, True)
        assert found["limits"][1] == {"concurrency": None, "rate": 100, "per": 60.0, "name": None, "unit": ""}
        assert (await beside("limit", "mails", "--none")).out == "mails: no limit, set by an operator\n"
        assert (await beside("limit", "mails", "--clear")).out == "mails: 20 at once\n"
        nursery.cancel_scope.cancel()


async def held_back(mesh: worqr.Mesh) -> str:
    return (await mesh.queue("mails").info()).held_back


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--none", "--clear"), "give --concurrency and --rate, or --none, or --clear"),
        (("--concurrency", "5", "--clear"), "give --concurrency and --rate, or --none, or --clear"),
        (("--rate", "100"), "--rate must be a number and a period, such as 100/1m, not '100'"),
        (("--rate", "many/1m"), "--rate must be a number and a period, such as 100/1m, not 'many/1m'"),
        (("--rate", "5/soon"), "the period of --rate must be a duration"),
        (("--rate", "5/60d"), "per of a Limit must be 0.01 s to 31 days"),
        (("--concurrency", "0"), "concurrency of a Limit must be a whole number from 1 to 1,000,000, not 0"),
    ],
)
def test_a_limit_without_sense_is_refused(cli: Command, options: tuple[str, ...], message: str) -> None:
    answer = cli("limit", "mails", *options)
    assert answer.code in {1, 2}
    assert message in answer.err


# Lanes


async def test_lanes_are_listed_and_changed(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue = mesh.queue("mails")
        for lane in ("acme", "acme", "initech"):
            await queue.dispatch(b"a", lane=lane)
        found = (await beside("lanes", "mails")).lines
        assert [line.split() for line in found] == [
            ["lane", "waiting", "running", "weight", "limits", "state"],
            ["acme", "2", "0", "1", "-", "-"],
            ["initech", "1", "0", "1", "-", "-"],
        ]
        await beside("lanes", "mails", "--lane", "acme", "--weight", "5")
        answer = await beside("limit", "mails", "--lane", "acme", "--concurrency", "2")
        assert answer.out == "mails, lane acme: 2 at once\n"
        assert (await beside("pause", "mails", "why", "--lane", "acme")).out == "Paused lane acme of queue mails\n"
        [facts] = (await beside("lanes", "mails", "--lane", "acme", "--json")).json
        assert facts == {
            "queue": "mails",
            "name": "acme",
            "waiting": 2,
            "running": 0,
            "weight": 5,
            "limits": [{"concurrency": 2, "rate": None, "per": None, "name": None, "unit": ""}],
            "paused": "why",
            "held": True,
            "held_for": None,
        }
        assert "paused: why" in (await beside("lanes", "mails")).out
        assert (await beside("resume", "mails", "--lane", "acme")).out == "Resumed lane acme of queue mails\n"
        assert (await beside("limit", "mails", "--lane", "acme", "--clear")).out == "mails, lane acme: no limit\n"
        await beside("lanes", "mails", "--lane", "acme", "--weight", "0")
        assert (await beside("lanes", "mails", "--lane", "acme", "--cancel")).out == "Cancelled 2 jobs of lane acme\n"
        assert [lane.name for lane in await queue.lanes()] == ["initech"]
        await queue.cancel_lane("initech")
        kinds = [entry.kind for entry in await mesh.log() if entry.queue == "mails"]
        assert {"lane_paused", "lane_resumed", "lane_limited", "lane_limit_cleared", "lane_weighted"} <= set(kinds)
        assert kinds.count("lane_cancelled") == 2


def test_a_change_of_a_lane_needs_its_name(cli: Command) -> None:
    for option in (("--weight", "5"), ("--cancel",)):
        answer = cli("lanes", "mails", *option)
        assert (answer.code, answer.err) == (
            2,
            "worqr: --weight and --cancel need --lane, the lane that they are about\n",
        )


async def test_a_pause_for_some_time_ends_by_itself(beside: Beside, mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("mails").enqueue(b"a")
        assert (await beside("pause", "mails", "why", "--for", "15m")).code == 0
        info = await mesh.queue("mails").info()
        assert info.paused == "why"
        assert info.held_for is not None
        assert 0 < info.held_for <= 900
        assert (await beside("pause", "mails", "why", "--for", "500ms")).code == 0
        await eventually(lambda: held_back(mesh), "")
        await mesh.queue("mails").cancel_all()

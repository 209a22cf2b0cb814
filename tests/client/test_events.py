"""``queue.events()`` with ids. What each script tells is in ops/test_events; events without ids are in test_queue."""

from __future__ import annotations

import logging
from collections import defaultdict

import pytest
import trio

import worqr
from tests.peer.conftest import mesh, new_mesh  # noqa: F401 - fixtures
from tests.peer.tools import QUICK, serving
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.client.events import EndedTask, Event, _EventDecoder  # pyright: ignore[reportPrivateUsage]
from worqr.keys import QueueKeys

KEYS = QueueKeys("worqr", "Q1")


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
async def test_an_observer_learns_which_jobs_ran_and_which_failed(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        if task == b"bad":
            raise worqr.Failure("on purpose")

    seen: defaultdict[str, list[str]] = defaultdict(list)
    async with mesh.connect(), mesh.queue("Q1").events() as events:
        q = mesh.queue("Q1")
        await q.dispatch(b"good", id="mail-1")
        await q.dispatch(b"bad", id="mail-2")
        await q.enqueue(b"plain")
        async with serving(mesh, "Q1", handler, retry=QUICK):
            with trio.fail_after(PATIENCE):
                finished = 0
                while finished < 2 or not seen["failed"]:
                    event = await anext(events)
                    seen[event.type] += event.ids
                    assert len(event.ids) <= event.count
                    finished += event.count if event.type == "finished" else 0
    assert seen["enqueued"] == ["mail-1", "mail-2"]
    assert sorted(seen["claimed"]) == ["mail-1", "mail-2"]
    assert (seen["finished"], seen["failed"]) == (["mail-1"], ["mail-2"])


async def test_an_older_listener_hears_what_it_always_heard(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    with server.client().pubsub() as older:
        older.subscribe(f"{prefix}:{{Q1}}:events")
        assert older.get_message(timeout=PATIENCE)
        async with mesh.connect():
            await mesh.queue("Q1").dispatch(b"a", id="x")
            heard = older.get_message(timeout=PATIENCE)
            assert heard is not None and heard["data"] == b"enqueued 1"
            await mesh.queue("Q1").cancel_all()


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
async def test_an_observer_learns_how_runs_ended(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> bytes:
        if task == b"bad":
            raise worqr.Failure("on purpose")
        return task.upper()

    found: dict[tuple[str | None, bytes | None], EndedTask] = {}
    async with mesh.connect(), mesh.queue("Q1").events(ends=True) as events, mesh.queue("Q1").events() as plain:
        q = mesh.queue("Q1")
        await q.dispatch(b"good", id="mail-1", result_ttl=60)
        await q.dispatch(b"silent", id="mail-2")
        await q.dispatch(b"bad", id="mail-3")
        await q.enqueue(b"plain")
        async with serving(mesh, "Q1", handler, retry=QUICK) as peer:
            with trio.fail_after(PATIENCE):
                while len(found) < 4:
                    event = await anext(events)
                    assert (await anext(plain)).ends == ()
                    assert len(event.ends) == (event.count if event.type in ("finished", "failed") else 0)
                    found |= {(end.id, end.task): end for end in event.ends}
            worker = peer.id
    assert found == {
        ("mail-1", None): EndedTask(worker, "mail-1", result=b"GOOD"),
        ("mail-2", None): EndedTask(worker, "mail-2"),
        ("mail-3", None): EndedTask(worker, "mail-3", error=worqr.RemoteError("worqr.Failure", "on purpose", "")),
        (None, b"plain"): EndedTask(worker, task=b"plain"),
    }


def read(*messages: tuple[str, bytes] | None) -> list[Event]:
    """What is made of these messages; None: the channels were subscribed anew."""
    events: list[Event] = []
    decoder = _EventDecoder("Q1", KEYS, events.append)
    for message in messages:
        if message is None:
            decoder.on_subscribed()
        else:
            decoder.on_message(*message)
    return events


def ids(text: str) -> tuple[str, bytes]:
    return KEYS.event_ids_channel, text.encode()


def event(text: str) -> tuple[str, bytes]:
    return KEYS.events_channel, text.encode()


def test_ids_belong_to_the_event_that_comes_next() -> None:
    assert read(None, ids("finished 2\na b"), event("finished 2"), event("finished 2")) == [
        Event("Q1", "finished", 2, ("a b",)),
        Event("Q1", "finished", 2),
    ]


def test_a_type_has_the_name_of_the_totals() -> None:
    assert read(ids("broken 1\na"), event("broken 1")) == [Event("Q1", "undecodable", 1, ("a",))]


def test_ids_whose_event_was_lost_go_to_no_other_one() -> None:
    assert read(ids("finished 1\na"), None, event("finished 1")) == [Event("Q1", "finished", 1)]
    assert read(ids("finished 1\na"), event("claimed 1")) == [Event("Q1", "claimed", 1)]
    assert read(ids("finished 1\na"), ids("finished 1\nb"), event("finished 1"))[0].ids == ("b",)


def ends(text: bytes) -> tuple[str, bytes]:
    return KEYS.event_ends_channel, text


def test_ids_and_ends_belong_to_the_event_that_comes_next() -> None:
    one = ends(b"finished 1\n1 1 -1 4 2 -1 -1\nAxjson42")
    end = EndedTask("A", "x", result=b"42")
    full = Event("Q1", "finished", 1, ("x",), (end,))
    assert read(ids("finished 1\nx"), one, event("finished 1"), event("finished 1")) == [
        full,
        Event("Q1", "finished", 1),
    ]
    assert read(one, ids("finished 1\nx"), event("finished 1")) == [full]
    assert read(one, event("failed 1")) == [Event("Q1", "failed", 1)]
    assert read(one, None, event("finished 1")) == [Event("Q1", "finished", 1)]


@pytest.mark.parametrize(
    "junk",
    [
        b"1",
        b"1 1 -1 4 2 -1 -1\nAxjson4",
        b"1 1 -1 4 2 -1\nAxjson42",
        b"1 1 -2 4 2 -1 -1\nAxjson42",
        b"x\n",
        b"\xff",
        b"1e9",
    ],
)
def test_ends_that_somebody_else_sent_are_noted_and_skipped(junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert read(ends(b"finished 1\n" + junk), event("finished 1")) == [Event("Q1", "finished", 1)]
    assert caplog.text.count("ignored a message of another program") == 1


@pytest.mark.parametrize("junk", ["", "x", "finished", "finished x", "finished 1 2", "finished x\na", "\n\n"])
def test_what_somebody_else_sent_is_noted_and_skipped(junk: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert read(event(junk), ids(junk), event("finished 1")) == [Event("Q1", "finished", 1)]
    assert caplog.text.count("ignored a message of another program") == 1

"""Topics: every subscriber has one job of each event, whoever dies, is full, or is told twice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import sniffio
import trio
from hypothesis import given
from hypothesis import strategies as st

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh  # noqa: F401 - fixtures
from tests.peer.tools import eventually
from tests.support.children import Child
from tests.support.clusters import Cluster, cluster, cluster_of_module  # noqa: F401 - fixtures
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.client import topics
from worqr.client.topics import _Patterns, check_patterns, check_topic
from worqr.errors import UsageError
from worqr.functions.registry import Registry
from worqr.inside import client_of
from worqr.testing import bench, recording

pytestmark = pytest.mark.leaves(
    "topics", "{*}:job:*", "{*}:due", "{*}:sent:*", "{*}:failed", "{*}:aside", "{*}:aside:*"
)
SEGMENTS = st.sampled_from("abc")
TOPICS = st.lists(SEGMENTS, min_size=1, max_size=8).map(".".join)
PATTERNS = st.builds(
    lambda begin, rest: ".".join([*begin, *rest]),
    st.lists(st.sampled_from("abc*"), min_size=1, max_size=7),
    st.sampled_from([[], ["#"]]),
) | st.just("#")


def fits(pattern: str, topic: str) -> bool:
    begin, segments = pattern.split("."), topic.split(".")
    if begin[-1] == "#":
        begin, segments = begin[:-1], segments[: len(begin) - 1]
    return len(begin) == len(segments) and all(a in {"*", b} for a, b in zip(begin, segments, strict=True))


@given(st.lists(st.tuples(PATTERNS, st.sampled_from("qrs")), max_size=20), TOPICS)
def test_an_event_is_for_the_queues_of_which_a_pattern_fits(entries: list[tuple[str, str]], topic: str) -> None:
    assert check_patterns([pattern for pattern, _ in entries]) == tuple(dict.fromkeys(p for p, _ in entries))
    assert check_topic(topic) == topic
    assert _Patterns(entries).match(topic) == {name for pattern, name in entries if fits(pattern, topic)}


@pytest.mark.parametrize("name", ["", ".", "a..b", "a b", "a.", "1.2.3.4.5.6.7.8.9", "a{", None])
def test_a_name_is_refused_with_its_form(name: Any) -> None:
    with pytest.raises(UsageError):
        check_topic(name)
    with pytest.raises(UsageError):
        check_patterns([name])


@pytest.mark.parametrize("pattern", ["#.a", "a.b*", "a.*b.c", "a.#b"])
def test_a_pattern_has_whole_segments_and_its_rest_at_the_end(pattern: str) -> None:
    with pytest.raises(UsageError, match="must be the last"):
        check_patterns([pattern])
    with pytest.raises(UsageError, match="patterns of @mesh.on"):
        check_topic(pattern)


async def come(look: Callable[[], Any], wanted: Any) -> None:
    """Until this is so."""

    async def looked() -> Any:
        return look()

    await eventually(looked, wanted)


class Order(msgspec.Struct):
    """The value of an event."""

    number: int


def shop(registry: Registry, **options: Any) -> list[tuple[str, int, str, str]]:
    """Two subscribers, and what they have got."""
    got: list[tuple[str, int, str, str]] = []

    def note(who: str, order: Order) -> None:
        current = worqr.current()
        got.append((who, order.number, current.id or "", current.meta[topics.TOPIC]))

    @registry.on("order.paid", name="mail", **options)
    async def mail(order: Order) -> None:
        note("mail", order)

    @registry.on("order.*", "order.#", name="audit")
    async def audit(order: Order, /) -> None:
        note("audit", order)

    return got


async def test_each_subscriber_gets_one_job_with_the_value(mesh: worqr.Mesh) -> None:
    got = shop(mesh)
    async with mesh.join():
        assert await mesh.publish("order.paid", Order(7), id="x") == worqr.Published("x", ("audit", "mail"))
        assert (await mesh.publish("order.paid", Order(7), id="x")).to == ("audit", "mail")  # no other jobs
        assert (await mesh.publish("order.sent", {"number": 8}, id="y")).to == ("audit",)
        await come(lambda: sorted(got), [
            ("audit", 7, "e:x", "order.paid"), ("audit", 8, "e:y", "order.sent"), ("mail", 7, "e:x", "order.paid"),
        ])  # fmt: skip
        assert [(each.pattern, each.queue) for each in await mesh.topics()] == [
            *[("order.#", "audit"), ("order.*", "audit"), ("order.paid", "mail")]
        ]


async def test_a_handler_with_a_new_name_gets_each_event_once(new_mesh: NewMesh) -> None:
    old, new = new_mesh(), new_mesh()
    got: list[int] = []

    @old.on("order.paid", name="shop.receipt")
    async def receipt(order: int) -> None: ...

    @new.on("order.paid", name="shop.send_receipt", aliases=["shop.receipt"])
    async def send_receipt(order: int) -> None:
        got.append(order)

    async with old.join(grace=0):
        pass
    async with new.join():
        assert (await new.publish("order.paid", 7)).to == ("shop.send_receipt",)
        await come(lambda: got, [7])


async def test_an_event_that_waits_for_a_full_queue_comes_though_its_handler_has_a_new_name(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "REDELIVER_AFTER", 0.1)
    monkeypatch.setattr(topics, "LEAST_PAUSE", 0.1)
    old, other, new = new_mesh(), new_mesh(), new_mesh()
    got: list[int] = []

    @old.on("order.paid", name="shop.receipt", max_length=1)
    async def receipt(order: int) -> None: ...

    @other.on("order.sent", name="shop.other")
    async def another(order: int) -> None: ...

    @new.on("order.paid", name="shop.send_receipt", aliases=["shop.receipt"])
    async def send_receipt(order: int) -> None:
        got.append(order)

    async with old.join(only=["shop.receipt"], grace=0):
        await old.queue("shop.receipt").pause()
    async with other.connect():
        for number in (1, 2):
            assert (await other.publish("order.paid", number)).to == ("shop.receipt",)
    async with new.join(only=["shop.send_receipt"]), other.join():
        await new.queue("shop.receipt").resume()
        await come(lambda: sorted(got), [1, 2])


async def test_an_event_for_nobody_stores_nothing_and_the_server_is_asked_before_that_is_said(
    new_mesh: NewMesh,
    server: Server,
) -> None:
    publisher, late = new_mesh(), new_mesh()
    async with publisher.connect():
        assert (await publisher.publish("order.paid", 1)).to == ()
        assert server.client().keys(f"*{publisher.prefix}*publish*") == []
        got = shop(late)
        async with late.join():
            assert got == []
            assert (await publisher.publish("order.paid", Order(2))).to == ("audit", "mail")
            await come(lambda: sorted(each[:2] for each in got), [("audit", 2), ("mail", 2)])
        assert (await publisher.publish("order.paid", Order(3))).to == ("audit", "mail")  # it stays


async def test_a_full_subscriber_stops_nobody_and_gets_the_event_later(
    mesh: worqr.Mesh,
    new_mesh: NewMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "REDELIVER_AFTER", 0.1)
    monkeypatch.setattr(topics, "LEAST_PAUSE", 0.1)
    got = shop(mesh, max_length=1)
    async with mesh.join(only=["audit"]):
        mail = mesh.queue("mail")
        await mail.enqueue(b'{"order":{"number":0}}')
        assert (await mesh.publish("order.paid", Order(1))).to == ("audit", "mail")
        await come(lambda: [each[:2] for each in got], [("audit", 1)])
        assert await mail.count() == 1
        assert (await mail.cancel(b'{"order":{"number":0}}')).waiting == 1
        await eventually(mail.count, 1)
        await eventually(mesh.queue("worqr.publish").count, 0)


async def test_an_event_that_a_worker_sends_has_what_the_middleware_of_its_publisher_gave_it(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "REDELIVER_AFTER", 0.1)
    got: list[tuple[int, str]] = []

    def stamp(sending: worqr.Sending) -> None:
        sending.set(meta={"tenant": "acme"}, tags=["customer:7"], result_ttl=60, timeout=50)

    def refuse(sending: worqr.Sending) -> None:
        raise PermissionError(f"{sending.name}: no tenant is logged in")

    publisher, worker = new_mesh(send_middleware=[stamp]), new_mesh(send_middleware=[refuse])

    @worker.on("order.paid", name="mail", max_length=1, tags=["mail"])
    async def mail(order: int) -> None:
        got.append((order, worqr.current().meta["tenant"]))

    async with worker.join(grace=0):
        await mail.queue.pause()
        async with publisher.connect():
            for number in (1, 2):
                await publisher.publish("order.paid", number)
        await mail.queue.resume()
        await come(lambda: sorted(got), [(1, "acme"), (2, "acme")])

        async def tagged() -> dict[str, int]:
            return await mail.queue.count_tagged("customer:7")

        await eventually(tagged, {"finished": 2})


async def test_middleware_does_not_change_the_job_that_sends_an_event_later(new_mesh: NewMesh) -> None:
    seen: list[str] = []

    def stamp(sending: worqr.Sending) -> None:
        seen.append(sending.name)
        sending.set(expires=3600, tags=["acme"])

    mesh = new_mesh(send_middleware=[stamp])

    @mesh.on("order.paid", name="mail", max_length=1)
    async def mail(order: int) -> None: ...

    async with mesh.join(grace=0):
        await mail.queue.pause()
    async with mesh.connect():
        for number in (1, 2):
            event = await mesh.publish("order.paid", number)
        job = await mesh.queue("worqr.publish").read(f"e:{event.id}")
        await mail.queue.resume()
        await mail.queue.delete()
    assert (job.status.state, job.expires_at, job.tags) == ("scheduled", None, ())
    assert seen == ["mail", "mail"]


PUBLISHER = """
    import sys, trio, worqr
    from worqr.client.producer import Producer

    mesh = worqr.Mesh(sys.argv[1], prefix=sys.argv[2])
    send = Producer.dispatch_members

    async def sent(self, calls, *args):
        done = await send(self, calls[: int(sys.argv[3])], *args)
        print("sent")
        await trio.sleep_forever()

    Producer.dispatch_members = sent

    async def main():
        async with mesh.connect():
            await mesh.publish("order.paid", {"number": 7}, id="x")

    trio.run(main)
"""


@pytest.mark.parametrize("before", [0, 1, 2])
async def test_a_publisher_that_dies_between_its_sends_has_published(
    mesh: worqr.Mesh,
    server: Server,
    spawn: Callable[..., Child],
    before: int,
) -> None:
    got = shop(mesh)
    async with mesh.join():
        child = spawn(PUBLISHER, server.url, mesh.prefix, str(before))
        await child.line_with("sent")
        child.kill()
        assert await mesh.queue("worqr.publish").run_now("e:x")
        await come(lambda: sorted(each[0] for each in got), ["audit", "mail"])
        await eventually(mesh.queue("worqr.publish").count, 0)
        assert sorted(each[:3] for each in got) == [("audit", 7, "e:x"), ("mail", 7, "e:x")]


def event(to: tuple[str, ...], **more: object) -> bytes:
    """The job of an event, as any program may write it."""
    return msgspec.json.encode({"id": "x", "topic": "order.paid", "value": {"number": 1}, "to": to, "hops": 1, **more})


ODD_SUBSCRIPTIONS: dict[bytes, bytes] = {
    b"not UTF-8": b'{"app":"\xff"}',
    b"deep": b'{"unknown":' + b"[" * 100_000,
    b"huge": b'{"max_length":1' + b"0" * 30 + b"}",
    b"negative": b'{"max_length":-1}',
    b"name \xff": b"{}",
    b"": b"{}",
    b"a{b}": b"{}",
}


@pytest.mark.parametrize("queue", ODD_SUBSCRIPTIONS)
async def test_a_subscription_that_another_program_wrote_keeps_no_event_from_the_others(
    mesh: worqr.Mesh, server: Server, queue: bytes
) -> None:
    got = list[int]()

    @mesh.on("order.paid", name="honest")
    async def honest(order: int) -> None:
        got.append(order)

    async with mesh.join():
        await come(lambda: server.client().hexists(f"{{{mesh.prefix}}}:topics", "honest"), wanted=True)
        server.client().hset(f"{{{mesh.prefix}}}:topics", queue, ODD_SUBSCRIPTIONS[queue] + b"\n9700000000000 order.*")
        client_of(mesh).topics.reset()
        published = await mesh.publish("order.paid", 7)
        assert "honest" in published.to
        assert len(published.to) == (2 if queue.isalpha() or queue == b"not UTF-8" else 1)
        found = await mesh.topics()
        assert {each.queue.encode().decode() for each in found} == {"honest", queue.decode("utf-8", "replace")}
        await come(lambda: got, [7])


async def test_who_cancels_the_job_of_an_event_does_not_get_it_again(mesh: worqr.Mesh) -> None:
    shop(mesh)
    async with mesh.join(only=["audit"]):
        await mesh.publish("order.paid", Order(1), id="x")
        assert (await mesh.queue("mail").job("e:x").cancel()).waiting == 1
        again = await mesh.queue("worqr.publish").dispatch(event(("audit", "mail", "other")), result_ttl=60)
        await again.result()
        assert await mesh.queue("mail").count() == 0
        assert await mesh.queue("other").count() == 0  # which is not subscribed


@pytest.mark.parametrize("more", [{"exists": "cancel"}, {"front": True}, {"max_length": 1}, {"unique_for": 9000}])
async def test_a_stored_event_gives_its_jobs_nothing_by_which_they_reach_others(
    mesh: worqr.Mesh, more: dict[str, Any]
) -> None:
    """Who may write events may not change the jobs of subscribers, or pass by their bounds."""
    shop(mesh)
    async with mesh.join(only=["audit"]):
        mail = mesh.queue("mail")
        await mail.dispatch(b"theirs", id="theirs")
        given = {"mail": {"id": "theirs", "tags": "customer:7", **more}}
        sent = await mesh.queue("worqr.publish").dispatch(event(("mail",), given=given), result_ttl=60)
        await sent.result()
        assert [job.id for job in await mail.jobs()] == ["theirs", "e:x"]
        assert {*await mail.tasks()} == {b"theirs", b'{"order":{"number":1}}'}
        assert await mail.count_tagged("customer:7") == {"waiting": 1}


ODD_TIMES: tuple[dict[str, Any], ...] = (
    *({"at": at} for at in (9e18, -1, 0.0, None, "NaN", 1e300)),
    *({"first": first} for first in (b"", b"-1", b"nan", b"1", b"1e300", b"9" * 18, b"9" * 400, b"\xff")),
)


async def test_an_event_is_a_dead_letter_after_its_reach_whatever_times_others_write(
    mesh: worqr.Mesh,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "GIVE_UP_AFTER", 0.2)
    monkeypatch.setattr(topics, "LEAST_PAUSE", 0.05)
    shop(mesh, max_length=1)
    async with mesh.join(only=["audit"]):
        await mesh.queue("mail").enqueue(b"full")
        publishing = mesh.queue("worqr.publish")
        await publishing.enqueue(event(("mail",), id="plain"))
        for n, odd in enumerate(ODD_TIMES):
            job = await publishing.dispatch(event(("mail",), **{"id": str(n), **odd}), id=str(n), delay=3600)
            if "first" in odd:
                server.client().hset(f"{mesh.prefix}:{{worqr.publish}}:job:{n}", "first", odd["first"])
            assert await publishing.run_now(job.id)
        await eventually(publishing.failed.count, len(ODD_TIMES) + 1)
        assert await publishing.count() == 0
        assert await mesh.queue("mail").count() == 1


async def test_what_a_queue_has_not_taken_is_not_sent_after_six_days(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "SEND_WITHIN", 0.0)
    monkeypatch.setattr(topics, "GIVE_UP_AFTER", 0.0)
    shop(mesh)
    async with mesh.join(only=["audit"]):
        await mesh.queue("worqr.publish").dispatch(event(("mail",)))
        await eventually(mesh.queue("worqr.publish").failed.count, 1)
        assert await mesh.queue("mail").count() == 0


async def test_a_circle_of_events_ends(mesh: worqr.Mesh) -> None:
    hops: list[str] = []
    ended: list[str] = []

    @mesh.on("ping")
    async def ping(n: int) -> None:
        hops.append(worqr.current().meta[topics.HOPS])
        try:
            await mesh.publish("ping", n + 1)
        except UsageError as error:
            ended.append(str(error))

    async with mesh.join():
        await mesh.publish("ping", 1)
        await come(lambda: len(ended), 1)
    assert hops == [str(n) for n in range(1, 17)]


@pytest.mark.leaves("schedules*", "{*}:schedules*")
async def test_a_server_that_took_over_without_the_declarations_is_told_again(mesh: worqr.Mesh, server: Server) -> None:
    """A primary that dies may have lost its last writes. Its connections end, and the registration may be there."""
    shop(mesh)
    mesh.every(3600, mesh.call("audit"), name="hourly")

    async def declared() -> tuple[int, int]:
        return len(await mesh.topics()), len(await mesh.schedules())

    async with mesh.join(grace=0):
        before = await declared()
        assert min(before) > 0
        with server.client() as client:
            for key in client.scan_iter(f"{{{mesh.prefix}}}:*"):
                if b":topics" in key or b":schedules" in key:
                    client.delete(key)
            client.client_kill_filter(skipme=True)
        await eventually(declared, before)


async def test_a_subscription_ends_by_command_and_a_pattern_that_left_the_code_an_hour_later(
    mesh: worqr.Mesh,
    server: Server,
) -> None:
    shop(mesh)
    async with mesh.join():
        assert await mesh.unsubscribe("mail")
        assert not await mesh.unsubscribe("mail")
        assert (await mesh.publish("order.paid", Order(1))).to == ("audit",)
        assert [entry.queue for entry in await mesh.log() if entry.kind == "unsubscribed"] == ["mail"]


PLACES = worqr.Mesh()


@PLACES.on("order.paid", name="loop", runs_in="loop", result_ttl=60)
async def in_loop(order: Order) -> str:
    return f"{order.number} {sniffio.current_async_library()}"


@PLACES.on("order.paid", name="asyncio", runs_in="asyncio", result_ttl=60)
async def in_asyncio(order: Order) -> str:
    return f"{order.number} {sniffio.current_async_library()}"


@PLACES.on("order.paid", name="thread", result_ttl=60)
def in_thread(order: Order) -> int:
    return os.getpid()


@PLACES.on("order.paid", name="process", runs_in="process", result_ttl=60)
def in_process(order: Order) -> int:
    return os.getpid()


async def test_subscribers_run_in_each_place(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLACES, "url", server.url)
    monkeypatch.setattr(PLACES, "prefix", prefix)
    async with PLACES.join(processes=1):
        await PLACES.publish("order.paid", Order(7), id="x")
        assert await in_loop.job("e:x").result(timeout=PATIENCE) == "7 trio"
        assert await in_asyncio.job("e:x").result(timeout=PATIENCE) == "7 asyncio"
        assert await in_thread.job("e:x").result(timeout=PATIENCE) == os.getpid()
        assert await in_process.job("e:x").result(timeout=PATIENCE) != os.getpid()


@pytest.mark.one_server
async def test_each_node_and_shard_of_a_cluster_gets_its_events(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "LEAST_PAUSE", 0.1)
    worker, publisher = worqr.Mesh(cluster.url), worqr.Mesh(cluster.url)
    got: Counter[tuple[str, int, str]] = Counter()

    def subscribe(name: str, **options: Any) -> None:
        @worker.on("order.*", name=name, **options)
        async def note(order: Order) -> None:
            got[name, order.number, worqr.current().id or ""] += 1

    queues = ("Q0", "Q1", "Q2")  # one on each node
    subscribe("Q0")
    subscribe("Q1", shards=4)
    subscribe("Q2", max_length=3)
    async with worker.join(concurrency=1), publisher.connect():
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(partial(publisher.publish, "order.paid", Order(number), id=str(number)))
        await publisher.queue("worqr.publish").run_now(
            *(f"e:{number}" for number in range(40))
        )  # what was left of them
        await publisher.queue("worqr.publish").dispatch(event(queues, id="40", value={"number": 40}))
        await come(lambda: len(got), 3 * 41)
        await eventually(publisher.queue("worqr.publish").count, 0)
    assert got == Counter({(name, number, f"e:{number}"): 1 for name in queues for number in range(41)})


def test_a_handler_must_take_the_value() -> None:
    registry = Registry()
    with pytest.raises(UsageError, match="must take the value"):

        @registry.on("a")
        def nothing() -> None: ...

    with pytest.raises(UsageError, match="must take the value"):

        @registry.on("a")
        def two(a: int, b: int) -> None: ...

    with pytest.raises(UsageError, match="must be names"):

        @registry.on("a", tags=lambda a: {"t"})
        def tagged(a: int) -> None: ...


async def test_a_registry_subscribes_when_a_mesh_includes_it_and_gives_its_options(mesh: worqr.Mesh) -> None:
    registry = Registry()

    @registry.on("a", name="many", batch_size=10, tags={"t"}, keep=worqr.Keep(jobs=5))
    async def many(values: list[int]) -> None: ...

    mesh.include(registry, prefix="shop.")
    [(queue, found)] = client_of(mesh).topics.declared.items()
    assert queue == "shop.many"
    assert found.facts.parameter == ""
    assert found.facts.options().keys() == {"max_length", "done", "tags"}
    assert "worqr.publish" in mesh.functions


def test_events_are_recorded(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    shop(mesh)
    with recording(mesh) as sent:
        published = worqr.sync(mesh.publish, "order.paid", Order(1))
        assert worqr.sync(mesh.publish, "invoice.paid", Order(1)).to == ()
    assert published.to == ("audit", "mail")
    assert sent.calls("mail") == [mesh.functions["mail"].call(Order(1))]
    assert len(sent.all()) == 2


async def test_events_are_run_by_a_bench() -> None:
    mesh = worqr.Mesh()
    got = shop(mesh)
    async with bench(mesh) as on_bench:
        await mesh.publish("order.paid", Order(1), id="x")
        await on_bench.run_until_empty()
    assert sorted(each[0] for each in got) == ["audit", "mail"]

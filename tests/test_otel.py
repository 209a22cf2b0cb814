"""Tracing with OpenTelemetry: which spans there are, how they are connected, and that payloads stay as they were."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    get_current_span,
    use_span,
)

import worqr
from tests import traced
from tests.peer.tools import until
from tests.support.children import ROOT
from tests.support.servers import Server
from worqr.client.schedules import fire
from worqr.cron import Definition
from worqr.keys import QueueKeys
from worqr.otel import Tracing
from worqr.sql import Outbox
from worqr.tracing import MAX_CARRIER, limit, meta_with

pytestmark = pytest.mark.one_server  # the script that takes traces is tested on each kind in tests/ops

FAILED = ("{Q1}:failed", "{Q1}:aside*")


class Spans:
    """The spans that have ended, by name."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self.exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Tracer = self.provider.get_tracer("tests")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    async def wait(self, name: str, n: int = 1) -> list[ReadableSpan]:
        await until(lambda: len(self.named(name)) >= n, what=f"{n} spans {name!r}")
        return self.named(name)


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    yield spans
    spans.provider.shutdown()


@pytest.fixture
def mesh(server: Server, prefix: str, spans: Spans) -> worqr.Mesh:
    return new_mesh(server, prefix, spans)


def new_mesh(server: Server, prefix: str, spans: Spans, **options: Any) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, tracing=Tracing(tracer_provider=spans.provider, **options))


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def ids_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


async def test_a_run_is_linked_to_the_dispatch_that_is_part_of_the_callers_trace(
    mesh: worqr.Mesh, spans: Spans, server: Server
) -> None:
    @mesh.task(name="Q1", result_ttl=60)
    async def double(n: int) -> int:
        return 2 * n

    async with mesh.join() as peer:
        with spans.tracer.start_as_current_span("request") as request:
            job = await double.dispatch(21)
        assert await job.result() == 42
        [run] = await spans.wait("process Q1")
    [dispatch] = spans.named("dispatch Q1")
    attributes = dict(run.attributes or {})
    assert attributes.pop("worqr.wait_ms", -1) in range(60_000)
    assert dispatch.parent is not None
    assert dispatch.parent.span_id == request.get_span_context().span_id
    assert dispatch.kind is SpanKind.PRODUCER
    assert dict(dispatch.attributes or {}) == {
        "messaging.system": "worqr",
        "messaging.operation.name": "dispatch",
        "messaging.operation.type": "send",
        "messaging.destination.name": "Q1",
        "messaging.message.id": job.id,
        "server.address": server.url.removeprefix("unix://").partition("?")[0],
    }
    assert run.kind is SpanKind.CONSUMER
    assert run.parent is None
    assert links_of(run) == [ids_of(dispatch)]
    assert run.status.status_code is StatusCode.UNSET
    assert attributes == {
        "messaging.system": "worqr",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "Q1",
        "messaging.message.id": job.id,
        "messaging.client.id": peer.id,
        "worqr.attempt": 1,
        "worqr.last_attempt": False,
        "worqr.outcome": "ok",
    }


@pytest.mark.leaves("*")
async def test_a_run_is_linked_to_the_span_in_which_its_row_was_stored_in_an_outbox(
    mesh: worqr.Mesh, spans: Spans, tmp_path: Path
) -> None:
    @mesh.task(name="Q1")
    async def double(n: int) -> None: ...

    outbox = Outbox(mesh, partial(sqlite3.connect, tmp_path / "app.db"), sweep=False)
    outbox.create_tables()
    connection = sqlite3.connect(tmp_path / "app.db")
    with spans.tracer.start_as_current_span("request") as request, outbox.transaction(connection):
        outbox.enqueue(connection, double.call(21))
    connection.close()
    async with mesh.join():
        [run] = await spans.wait("process Q1")
    await trio.to_thread.run_sync(outbox.close)
    stored = request.get_span_context()
    assert links_of(run) == [(stored.trace_id, stored.span_id)]


@pytest.mark.leaves("shards")
async def test_a_run_names_its_shard_and_if_asked_for_the_size_of_its_payload(
    server: Server, prefix: str, spans: Spans
) -> None:
    mesh = new_mesh(server, prefix, spans, body_size=True)

    @mesh.task(name="Q1", shards=3, result_ttl=60)
    async def double(n: int) -> int:
        return 2 * n

    async with mesh.join():
        jobs = [await double.dispatch(7) for _ in range(3)]
        for job in jobs:
            assert await job.result() == 14
        runs = {dict(run.attributes or {})["messaging.message.id"]: run for run in await spans.wait("process Q1", 3)}
    for job in jobs:
        attributes = dict(runs[job.id].attributes or {})
        _, _, shard = job.id.partition("~")
        assert attributes.get("messaging.destination.partition.id", "") == shard
        assert attributes["messaging.message.body.size"] == len(b'{"n":7}')
    assert {job.id.partition("~")[1] for job in jobs} == {"", "~"}


async def test_the_first_attempt_may_be_a_child_and_later_ones_are_linked(
    server: Server, prefix: str, spans: Spans
) -> None:
    mesh = new_mesh(server, prefix, spans, parent="child")

    @mesh.task(name="Q1", retry=worqr.RetryPolicy(min_backoff=0.01))
    async def fail_once() -> None:
        if worqr.current().attempt == 1:
            raise ValueError("the payload, perhaps")

    async with mesh.join():
        await fail_once.dispatch()
        first, second = await spans.wait("process Q1", 2)
    [dispatch] = spans.named("dispatch Q1")
    assert first.parent is not None
    assert (first.parent.trace_id, first.parent.span_id) == ids_of(dispatch)
    assert (links_of(first), links_of(second)) == ([], [ids_of(dispatch)])
    assert second.parent is None
    for run, outcome, status in ((first, "raised", StatusCode.ERROR), (second, "ok", StatusCode.UNSET)):
        assert (run.attributes or {})["worqr.outcome"] == outcome
        assert run.status.status_code is status
    assert (first.attributes or {})["error.type"] == "ValueError"
    assert (first.events, first.status.description) == ((), None), "the text of an error may quote the payload"


async def test_the_text_of_errors_is_recorded_on_request(server: Server, prefix: str, spans: Spans) -> None:
    mesh = new_mesh(server, prefix, spans, record_errors=True)

    @mesh.task(name="Q1", retry=worqr.RetryPolicy(min_backoff=0.01))
    async def fail_once() -> None:
        if worqr.current().attempt == 1:
            raise ValueError("wrong address")

    async with mesh.join():
        await fail_once.dispatch()
        first, _ = await spans.wait("process Q1", 2)
    assert [dict(event.attributes or {})["exception.message"] for event in first.events] == ["wrong address"]


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(
    ("error", "outcome", "is_error"),
    [
        (worqr.Retry(delay=3600), "retry", False),
        (worqr.Failure("no such user"), "failure", True),
        (worqr.Undecodable("not JSON"), "undecodable", True),
    ],
    ids=["Retry", "Failure", "Undecodable"],
)
@pytest.mark.leaves("{Q1}:broken", "{Q1}:due", "{Q1}:job:*")
async def test_the_outcome_of_a_run_is_an_attribute(
    mesh: worqr.Mesh, spans: Spans, error: Exception, outcome: str, is_error: bool
) -> None:
    @mesh.task(name="Q1")
    async def end() -> None:
        raise error

    async with mesh.join():
        await end.dispatch()
        [run] = await spans.wait("process Q1")
    assert (run.attributes or {})["worqr.outcome"] == outcome
    assert (run.status.status_code is StatusCode.ERROR) is is_error


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize("parent", ["link", "child"])
async def test_the_run_of_a_list_has_one_span_with_links_to_all_that_sent_its_calls(
    server: Server, prefix: str, spans: Spans, parent: Any
) -> None:
    mesh = new_mesh(server, prefix, spans, parent=parent)

    @mesh.task(name="Q1", batch_size=10)
    async def work(numbers: list[int]) -> list[Exception | None]:
        return [worqr.Failure("odd") if n % 2 else None for n in numbers]

    async with mesh.connect():
        for n in range(3):
            await work.dispatch(n)
    async with mesh.join():
        [run] = await spans.wait("process Q1")
    assert sorted(links_of(run)) == sorted(ids_of(span) for span in spans.named("dispatch Q1"))
    attributes = dict(run.attributes or {})
    assert (attributes["messaging.batch.message_count"], attributes["worqr.failed_calls"]) == (3, 1)
    assert attributes["worqr.outcome"] == "ok"
    assert "messaging.message.id" not in attributes


@pytest.mark.leaves(*FAILED)
async def test_a_timeout_is_an_error_and_a_cancellation_is_none(mesh: worqr.Mesh, spans: Spans) -> None:
    @mesh.task(name="Q1", timeout=0.05, retry=worqr.RetryPolicy(max_timeouts=1))
    async def take_long() -> None:
        await trio.sleep_forever()

    @mesh.task(name="Q2")
    async def wait() -> None:
        started.set()
        await trio.sleep_forever()

    started = trio.Event()
    async with mesh.join():
        await take_long.dispatch()
        job = await wait.dispatch()
        await started.wait()
        assert await job.cancel(wait=30)
        [late], [cancelled] = await spans.wait("process Q1"), await spans.wait("process Q2")
    assert [(run.attributes or {})["worqr.outcome"] for run in (late, cancelled)] == ["timeout", "cancel"]
    assert [run.status.status_code for run in (late, cancelled)] == [StatusCode.ERROR, StatusCode.UNSET]


async def test_each_of_many_jobs_has_a_span_of_its_own(mesh: worqr.Mesh, spans: Spans) -> None:
    @mesh.task(name="Q1")
    async def double(n: int) -> int:
        return 2 * n

    async with mesh.join():
        await mesh.dispatch_many(double.call(n) for n in range(3))
        runs = await spans.wait("process Q1", 3)
    [dispatch], created = spans.named("dispatch"), spans.named("create Q1")
    assert (dispatch.attributes or {})["messaging.batch.message_count"] == 3
    assert {span.parent.span_id for span in created if span.parent} == {ids_of(dispatch)[1]}
    assert sorted(links_of(run)[0] for run in runs) == sorted(map(ids_of, created))


async def test_many_jobs_may_share_the_span_of_their_call(server: Server, prefix: str, spans: Spans) -> None:
    mesh = new_mesh(server, prefix, spans, creates=False)

    @mesh.task(name="Q1")
    async def double(n: int) -> int:
        return 2 * n

    async with mesh.join():
        await mesh.dispatch_many([double.call(n) for n in range(3)])
        runs = await spans.wait("process Q1", 3)
    [dispatch] = spans.named("dispatch")
    assert spans.named("create Q1") == []
    assert [links_of(run) for run in runs] == [[ids_of(dispatch)]] * 3


async def test_plain_tasks_have_spans_without_links_and_their_payload_stays(mesh: worqr.Mesh, spans: Spans) -> None:
    seen: list[bytes] = []

    @mesh.task(name="Q1")
    async def note(n: int) -> None:
        seen.append(worqr.current().task)

    async with mesh.join():
        await note.enqueue(1)
        await mesh.queue("Q1").enqueue(b'{"n":2}')
        await mesh.enqueue_many([note.call(3), note.call(4)])
        runs = await spans.wait("process Q1", 4)
    assert sorted(seen) == [b'{"n":%d}' % n for n in (1, 2, 3, 4)]
    assert [links_of(run) for run in runs] == [[]] * 4
    assert [span.kind for span in spans.named("enqueue Q1")] == [SpanKind.CLIENT] * 2
    [many] = spans.named("enqueue")
    assert (many.attributes or {})["messaging.batch.message_count"] == 2


async def test_plain_tasks_may_carry_their_trace(server: Server, prefix: str, spans: Spans) -> None:
    mesh = new_mesh(server, prefix, spans, raw=True)
    seen: list[bytes] = []

    @mesh.task(name="Q1", retry=worqr.RetryPolicy(min_backoff=0, max_backoff=0))
    async def note(n: int) -> None:
        current = worqr.current()
        seen.append(current.task)
        if n == 1 and current.attempt == 1:
            raise worqr.Retry

    async with mesh.connect():
        await note.enqueue(1)
        await mesh.queue("Q1").enqueue(b'{"n":2}', b'{"n":3}')
        await mesh.enqueue_many([note.call(4), note.call(5)])
        assert await mesh.queue("Q1").cancel(b'{"n":5}') == worqr.CancelCount(1, 0, 0)
        assert await mesh.queue("Q1").tasks() == [b'{"n":%d}' % n for n in (4, 3, 2, 1)]
    async with mesh.join(concurrency=1):
        runs = await spans.wait("process Q1", 5)
    assert [task for task in seen if task != b'{"n":1}'] == [b'{"n":%d}' % n for n in (2, 3, 4)], "in their order"
    assert seen[0] == b'{"n":1}'
    assert seen.count(b'{"n":1}') == 2
    one, several = spans.named("enqueue Q1")
    [many] = spans.named("enqueue")
    assert [span.kind for span in (one, several, many)] == [SpanKind.PRODUCER] * 3
    senders = dict(zip(seen, [links_of(run) for run in runs], strict=True))
    assert senders == {
        b'{"n":1}': [ids_of(one)],
        b'{"n":2}': [ids_of(several)],
        b'{"n":3}': [ids_of(several)],
        b'{"n":4}': [ids_of(many)],
    }


async def test_plain_tasks_of_a_trace_that_is_not_sampled_stay_plain(server: Server, prefix: str) -> None:
    never = TracerProvider(sampler=ALWAYS_OFF)
    mesh = worqr.Mesh(server.url, prefix=prefix, tracing=Tracing(raw=True, tracer_provider=never))
    mesh.task(name="Q1")(lambda n: None)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"1")
        await mesh.enqueue_many([mesh.call("Q1", n=2)])
        assert [task.id for task in await mesh.queue("Q1").jobs(state="waiting")] == [None, None]
        await mesh.queue("Q1").delete()


@pytest.mark.parametrize("raw", [False, True])
async def test_payloads_are_the_same_with_and_without_tracing(
    server: Server, prefix: str, spans: Spans, raw: bool
) -> None:
    sent: list[list[bytes]] = []
    for tracing in (None, Tracing(tracer_provider=spans.provider, raw=raw)):
        mesh = worqr.Mesh(server.url, prefix=prefix, tracing=tracing)
        note = mesh.task(name="Q1")(lambda n: None)
        queue = mesh.queue("Q1")
        async with mesh.connect():
            await note.enqueue(1)
            await note.options(id="two").dispatch(2)
            await mesh.enqueue_many([note.call(3)])
            await mesh.dispatch_many([note.call(4)])
            await queue.enqueue(b"\x00\xff", front=True)
            sent.append(await queue.tasks())
            await queue.cancel_all()
            while await queue.count():
                pass
    assert sent[0] == sent[1]
    assert len(sent[0]) == 5


async def test_a_mesh_without_tracing_makes_no_spans(server: Server, prefix: str, spans: Spans) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    note = mesh.task(name="Q1", result_ttl=60)(lambda n: n)
    with spans.tracer.start_as_current_span("request"):
        async with mesh.join():
            await note.enqueue(1)
            assert await (await note.dispatch(2)).result() == 2
    assert [span.name for span in spans.exporter.get_finished_spans()] == ["request"]


async def test_a_raw_queue_keeps_the_meta_of_the_caller(mesh: worqr.Mesh, spans: Spans) -> None:
    metas: dict[bytes, dict[str, str]] = {}

    async def handler(task: bytes) -> None:
        metas[task] = dict(worqr.current().meta)

    async with mesh.join() as peer, trio.open_nursery() as nursery:
        queue = mesh.queue("Q1")
        await queue.dispatch(b"a", meta={"tenant": "7"})
        await queue.dispatch(b"b", meta={"traceparent": "mine"})
        nursery.start_soon(peer.serve, "Q1", handler)
        await spans.wait("process Q1", 2)
        nursery.cancel_scope.cancel()
    first, _ = spans.named("dispatch Q1")
    assert first.context is not None
    trace_id, span_id = ids_of(first)
    assert metas == {
        b"a": {"tenant": "7", "traceparent": f"00-{trace_id:032x}-{span_id:016x}-{first.context.trace_flags:02x}"},
        b"b": {"traceparent": "mine"},
    }


def test_a_carrier_without_room_is_left_out() -> None:
    carrier = {"traceparent": "00-" + 32 * "a" + "-" + 16 * "b" + "-01"}
    full = {"text": "x" * 4070}
    assert len(msgspec.json.encode(full)) <= 4096
    assert meta_with(carrier, full) == full
    assert meta_with(carrier, {"tenant": "7"}) == {**carrier, "tenant": "7"}


# Schedules, and claims by hand


@pytest.mark.leaves("{Q1}:job:cron:*", "{Q1}:due")
async def test_a_run_is_linked_to_the_firing_of_its_schedule(mesh: worqr.Mesh, spans: Spans) -> None:
    @mesh.task(name="Q1")
    async def tick() -> None: ...

    mesh.every(0.2, tick.call(), name="s", overlap="queue")
    with spans.tracer.start_as_current_span("startup"):  # it is no parent of firings
        async with mesh.join():
            runs = await spans.wait("process Q1", 3)
    fired = {ids_of(span): span for span in spans.named("dispatch Q1")}
    for run in runs:
        [sender, *_] = links_of(run)
        assert sender in fired
    assert len({links_of(run)[0] for run in runs}) == len(runs)
    assert len({trace_id for trace_id, _ in fired}) == len(fired)
    for span in fired.values():
        assert (span.parent, span.kind) == (None, SpanKind.PRODUCER)
        attributes = dict(span.attributes or {})
        assert attributes.pop("server.address")
        assert attributes == {
            "messaging.system": "worqr",
            "messaging.operation.name": "dispatch",
            "messaging.operation.type": "send",
            "messaging.destination.name": "Q1",
            "messaging.message.id": "cron:s",
            "worqr.schedule": "s",
        }


async def fire_once(mesh: worqr.Mesh, nominal: int, overlap: Literal["skip", "queue"] = "skip") -> str:
    """Fire a schedule as a leader does; return the reply."""
    definition = Definition(name="s", queue="Q1", task=b"tick", every_ms=60_000, overlap=overlap)
    keys, now = QueueKeys(mesh.prefix, "Q1"), round(time.time() * 1000)
    [word] = await fire(mesh._client.link, keys, [(definition, nominal, "")], judged_at=now, tracing=mesh.tracing)
    return word


async def test_only_the_leader_that_has_enqueued_a_firing_has_a_span(mesh: worqr.Mesh, spans: Spans) -> None:
    nominal = round(time.time() * 1000)
    async with mesh.connect():
        assert await fire_once(mesh, nominal) == "ok"
        [dispatch] = spans.named("dispatch Q1")
        assert await fire_once(mesh, nominal) == "again"
        assert await fire_once(mesh, nominal - 1000) == "fired"
        assert await fire_once(mesh, nominal + 1000, "queue") == "busy"
        assert await fire_once(mesh, nominal + 1000) == "skipped"
        [job] = await mesh.queue("Q1").jobs(state="waiting")
        assert job.id == "cron:s"
        record = await mesh.queue("Q1").read("cron:s")
        await mesh.queue("Q1").delete()
    assert spans.named("dispatch Q1") == [dispatch]

    assert record.meta["traceparent"].split("-")[1:3] == [
        f"{n:0{w}x}" for n, w in zip(ids_of(dispatch), (32, 16), strict=True)
    ]


async def test_a_firing_that_fails_has_no_span(mesh: worqr.Mesh, spans: Spans, server: Server) -> None:
    with server.client() as client:
        client.set(QueueKeys(mesh.prefix, "Q1").base, "not a list", ex=60)
    async with mesh.connect():
        with pytest.raises(worqr.WorqrError):
            await fire_once(mesh, 1)
    with server.client() as client:
        client.delete(QueueKeys(mesh.prefix, "Q1").base)
    assert spans.exporter.get_finished_spans() == ()


async def test_a_sampler_that_fails_does_not_keep_a_schedule_from_firing(
    server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Sampler):
        def should_sample(self, *args: Any, **more: Any) -> Any:
            raise ValueError("no quota")

        def get_description(self) -> str:
            return "fails"

    tracing = Tracing(tracer_provider=TracerProvider(sampler=Failing()))
    mesh = worqr.Mesh(server.url, prefix=prefix, tracing=tracing)
    async with mesh.connect():
        assert await fire_once(mesh, round(time.time() * 1000)) == "ok"
        await mesh.queue("Q1").delete()
    assert "schedule 's' is fired without a trace: ValueError: no quota" in caplog.text


async def test_claims_by_hand_are_linked_to_what_sent_them(mesh: worqr.Mesh, spans: Spans) -> None:
    queue = mesh.queue("Q1")
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await queue.dispatch(b"a")
        await queue.dispatch(b"b")
        await queue.enqueue(b"c")
        with spans.tracer.start_as_current_span("batch") as batch:
            taken: list[worqr.Claim] = []
            while len(taken) < 3:
                taken += await claims.take(3 - len(taken))
        await claims.finish(taken)
        await queue.dispatch(b"d")
        async for claim in claims:
            await claim.finish()
            break
        with trio.move_on_after(0.01):
            await claims.take(1)  # nothing is there, and it makes no span
    *takes, step = spans.named("take Q1")
    first, second, third = spans.named("dispatch Q1")
    assert [link for take in takes for link in links_of(take)] == [ids_of(first), ids_of(second)]
    assert sum((take.attributes or {})["messaging.batch.message_count"] for take in takes) == 3  # type: ignore[misc]
    assert links_of(step) == [ids_of(third)]
    assert step.parent is None
    attributes = dict(step.attributes or {})
    assert attributes.pop("server.address")
    assert attributes == {
        "messaging.system": "worqr",
        "messaging.operation.name": "take",
        "messaging.operation.type": "receive",
        "messaging.destination.name": "Q1",
        "messaging.batch.message_count": 1,
    }
    for take in takes:
        assert take.kind is SpanKind.CLIENT
        assert take.parent is not None
        assert take.parent.span_id == batch.get_span_context().span_id
        assert take.start_time is not None
        assert take.end_time is not None
        assert take.start_time <= take.end_time


# The size of a context

HUGE = TraceState([(f"vendor{n}", 200 * "x") for n in range(32)])
SMALL = TraceState([("vendor", "x")])


@pytest.mark.parametrize(("state", "kept"), [(SMALL, "vendor=x"), (HUGE, None)], ids=["small", "huge"])
async def test_a_huge_trace_state_is_left_out_and_the_link_stays(
    server: Server, prefix: str, spans: Spans, state: TraceState, kept: str | None
) -> None:
    mesh = new_mesh(server, prefix, spans, raw=True)
    metas: list[dict[str, str]] = []

    async def handler(task: bytes) -> None:
        metas.append(dict(worqr.current().meta))

    caller = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED), trace_state=state)
    async with mesh.join(concurrency=1) as peer, trio.open_nursery() as nursery:
        queue = mesh.queue("Q1")
        with use_span(NonRecordingSpan(caller)):
            await queue.dispatch(b"a")
            await queue.enqueue(b"b")
            await mesh.dispatch_many([mesh.call("Q1", b"c")])
        await queue.dispatch(b"d", meta={"traceparent": "mine", "text": "x" * 4000})
        nursery.start_soon(peer.serve, "Q1", handler)
        runs = await spans.wait("process Q1", 4)
        nursery.cancel_scope.cancel()
    senders = [*spans.named("dispatch Q1")[:1], *spans.named("enqueue Q1"), *spans.named("create Q1")]
    assert [links_of(run) for run in runs] == [*([ids_of(sender)] for sender in senders), []]
    assert [meta.get("tracestate") for meta in metas] == [kept, kept, kept, None]
    assert metas[3] == {"traceparent": "mine", "text": "x" * 4000}
    for meta in metas[:3]:
        assert len(msgspec.json.encode(meta)) <= MAX_CARRIER


@pytest.mark.parametrize("n", range(400, 600, 7))
def test_a_carrier_has_at_most_512_bytes(n: int) -> None:
    carrier = {"traceparent": 55 * "t", "tracestate": n * "s"}
    limited = limit(carrier)
    assert len(msgspec.json.encode(limited)) <= MAX_CARRIER
    assert limited == (carrier if len(msgspec.json.encode(carrier)) <= MAX_CARRIER else {"traceparent": 55 * "t"})
    assert limit({"traceparent": n * "t", "more": n * "x"}) == {}


def test_a_trace_parent_of_the_caller_stays_alone() -> None:
    carrier = {"traceparent": "ours", "tracestate": "vendor=x"}
    assert meta_with(carrier, {"traceparent": "mine"}) == {"traceparent": "mine"}
    assert meta_with(carrier, {"tenant": "7"}) == {**carrier, "tenant": "7"}


async def test_an_error_of_a_dispatch_is_on_its_span(mesh: worqr.Mesh, spans: Spans) -> None:
    async with mesh.connect():
        queue = mesh.queue("Q1")
        await queue.dispatch(b"a", id="once")
        with pytest.raises(worqr.Duplicate):
            await queue.dispatch(b"a", id="once", if_exists="raise")
        await queue.cancel_all()
    _, refused = spans.named("dispatch Q1")
    assert refused.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["error.type"] == "worqr.Duplicate"


async def test_a_span_around_join_is_no_parent_of_runs(mesh: worqr.Mesh, spans: Spans) -> None:
    @mesh.task(name="Q1")
    async def work() -> None: ...

    with spans.tracer.start_as_current_span("startup") as startup:
        async with mesh.join():
            await work.enqueue()
            [run] = await spans.wait("process Q1")
    assert run.parent is None
    assert links_of(run) == [(startup.get_span_context().trace_id, startup.get_span_context().span_id)]


async def test_a_failure_handler_is_linked_to_the_dispatch_of_the_job(mesh: worqr.Mesh, spans: Spans) -> None:
    @mesh.task(name="Q1")
    async def fail() -> None:
        raise worqr.Failure("no")

    @fail.on_failure
    async def tell(failed: worqr.Failed) -> None: ...

    async with mesh.join():
        await fail.dispatch()
        [run] = await spans.wait("process {Q1}-fail")
        await mesh.queue("Q1").failed.drop_all()
    [dispatch] = spans.named("dispatch Q1")
    assert links_of(run) == [ids_of(dispatch)]


async def test_the_trace_continues_in_a_worker_process(mesh: worqr.Mesh, spans: Spans) -> None:
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        handler = traced.current_trace.__worqr_handler__
        nursery.start_soon(lambda: peer.serve("Q1", handler, runs_in="process"))
        job = await mesh.queue("Q1").dispatch(b"{}", result_ttl=60)
        result: object = await job.result(60)  # a text: the queue has no declared type
        [run] = await spans.wait("process Q1")
        nursery.cancel_scope.cancel()
    trace_id, span_id = ids_of(run)
    assert result == f"{trace_id:032x} {span_id:016x}"


@pytest.mark.parametrize("place", ["asyncio", "thread", "loop"])
async def test_the_trace_continues_wherever_a_handler_runs(mesh: worqr.Mesh, spans: Spans, place: str) -> None:
    found: list[tuple[int, int]] = []

    def note() -> None:
        current = get_current_span().get_span_context()
        found.append((current.trace_id, current.span_id))

    async def note_async() -> None:
        note()

    if place == "thread":
        send = mesh.task(name="Q1")(note).dispatch
    else:
        send = mesh.task(name="Q1", runs_in="asyncio" if place == "asyncio" else "loop")(note_async).dispatch
    async with mesh.join():
        await send()
        [run] = await spans.wait("process Q1")
    assert found == [ids_of(run)]


def test_blocking_calls_are_traced(mesh: worqr.Mesh, spans: Spans) -> None:
    @mesh.task(name="Q1", result_ttl=60)
    def double(n: int) -> int:
        return 2 * n

    with mesh.join_in_thread(), spans.tracer.start_as_current_span("request") as request:
        assert worqr.sync(worqr.sync(double.dispatch, 21).result, 60) == 42
    [dispatch] = spans.named("dispatch Q1")
    assert dispatch.parent is not None
    assert dispatch.parent.span_id == request.get_span_context().span_id


@pytest.mark.parametrize(
    "options",
    [{"parent": "sibling"}, {"creates": 1}, {"raw": None}, {"record_errors": "no"}],
    ids=lambda options: next(iter(options)),
)
def test_a_bad_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(worqr.UsageError, match=next(iter(options))):
        Tracing(**options)


@pytest.mark.parametrize("given", ["on", Tracing], ids=["text", "class"])
def test_a_mesh_refuses_what_is_no_tracing(given: Any) -> None:
    with pytest.raises(worqr.UsageError, match=r"tracing must be worqr\.otel\.Tracing\(\.\.\.\) or None"):
        worqr.Mesh(tracing=given)


def test_worqr_does_not_import_opentelemetry_and_names_what_is_missing() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
import worqr
worqr.Mesh()
try:
    import worqr.otel
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "worqr.otel needs the OpenTelemetry API: pip install 'worqr[otel]'\n"


# A tracing that raises


class Boom(BaseException):
    """What an SDK, or code of the application in it, raises."""


class BadSpan:
    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> BadSpan:
        return self.check("enter")

    def check(self, step: str) -> Any:
        if self.where == step:
            raise Boom(step)
        return self

    def sent(self, count: int, id: str | None) -> None:
        self.check("sent")

    def __exit__(self, *_: object) -> None:
        self.check("exit")


class BadTracing(Tracing):
    """A tracing that raises in one place, and is one otherwise."""

    def __init__(self, where: str) -> None:
        super().__init__(raw=where == "plain_carrier")
        self.where = where

    def check(self, step: str) -> None:
        if self.where == step:
            raise Boom(step)

    def sending(self, *_args: Any) -> Any:
        self.check("sending")
        return BadSpan(self.where)

    def carrier(self) -> Any:
        self.check("carrier")
        return {"traceparent": 7} if self.where == "carrier of another type" else super().carrier()

    def plain_carrier(self) -> Any:
        self.check("plain_carrier")

    def creating(self, *args: Any) -> Any:
        self.check("creating")
        return super().creating(*args)

    def taken(self, *_args: Any) -> Any:
        self.check("taken")

    async def run(self, context: Any, call_next: Any) -> object:
        self.check("before the run")
        if self.where == "the run is left out":
            return None
        try:
            return await call_next()
        finally:
            self.check("after the run")


PLACES = [
    *("sending", "enter", "sent", "exit", "carrier", "carrier of another type", "plain_carrier", "creating", "taken"),
    *("before the run", "the run is left out", "after the run"),
]


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize("where", PLACES)
async def test_a_tracing_that_raises_decides_about_no_task(server: Server, prefix: str, where: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix, tracing=BadTracing(where))
    runs: list[bytes] = []

    async def handler(task: bytes) -> bytes:
        runs.append(task)
        if task == b"bad":
            raise ValueError("its own error")
        return task

    @mesh.task(name="Q2", result_ttl=5)
    async def double(n: int) -> int:
        return 2 * n

    async with mesh.join() as peer, trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        await q.enqueue(b"plain")
        async with peer.work("Q1") as claims:
            (claim,) = await claims.take(1, within=20)
            await claim.finish()
        await nursery.start(partial(peer.serve, "Q1", handler, retry=worqr.RetryPolicy(max_failures=1)))
        assert await (await q.dispatch(b"one", result_ttl=5)).result(20) == b"one"
        with pytest.raises(worqr.JobFailed, match="its own error"):
            await (await q.dispatch(b"bad", result_ttl=5)).result(20)
        await double.enqueue(0)
        jobs = await mesh.dispatch_many(double.call(n) for n in (1, 2))
        assert [await job.result(20) for job in (await double.dispatch(4), *jobs)] == [8, 2, 4]
        assert runs == [b"one", b"bad"]
        nursery.cancel_scope.cancel()

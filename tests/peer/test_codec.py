"""A mesh with a codec: the server has no value in plain text, keys rotate, and a task of another key waits."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio

import worqr
from tests.peer import process_jobs, workflow_jobs
from tests.peer.conftest import NewMesh
from tests.peer.tools import eventually, serving, until
from tests.support.leaks import dump
from tests.support.servers import Server
from worqr import Failure, RetryPolicy, UsageError, codecs
from worqr.codecs import Codec, Compress, Fernet, Signed, Stack, WrongKey
from worqr.inside import client_of
from worqr.policy import Undecodable

OLD, NEW = (base64.urlsafe_b64encode(bytes([n]) * 32) for n in (1, 2))
MARK = "marked-value"
PAYLOAD = f'{{"value":"{MARK}"}}'.encode()
ONCE = RetryPolicy(max_failures=1)
CODEC = Stack([Compress(above=10), Fernet(NEW)])
pytestmark = pytest.mark.leaves(
    *(
        "topics",
        "schedules*",
        "{*}:failed",
        "{*}:broken",
        "{*}:aside*",
        "{*}:job:*",
        "{*}:due",
        "{*}:kept*",
        "{*}:tag*",
    ),
    *("{*}:outbox", "{*}:batch*", "{*}:sent:*", "{*}:calls", "{*}:schedule*", "{*}:end*", "{*}:suspended", "{*}"),
)


@pytest.fixture
def sealed(new_mesh: NewMesh) -> worqr.Mesh:
    return new_mesh(codec=CODEC, accept_plain=False)


class Everywhere:
    """An application that puts a marked value into every place where a program can put one."""

    def __init__(self, mesh: worqr.Mesh, look: Callable[[], None]) -> None:
        self.mesh, self.look = mesh, look
        self.seen: list[Any] = []

        @mesh.task(name="work", result_ttl=60, keep=worqr.Keep(60), retry=ONCE, tags=("t",))
        async def work(value: str) -> str:
            worqr.state({"at": value})
            await worqr.current().save(value.encode())
            for name in ("once", "@once"):
                assert await worqr.step(name, lambda: value) == value
            look()
            return value

        @mesh.task(name="fail", retry=RetryPolicy(max_failures=2, min_backoff=0), keep=worqr.Keep(60))
        async def fail(value: str) -> None:
            self.seen.append((value, worqr.current().saved))
            await worqr.current().save(value.encode())
            raise Failure("no") if worqr.current().failures else ValueError("no")

        @fail.on_failure
        async def failed(found: worqr.Failed) -> None:
            self.seen.append(found.task)

        @mesh.task(name="after")
        async def after(value: str) -> None:
            job = worqr.current().ended_job
            self.seen.append((value, None if job is None else job.result(str)))

        @mesh.task(name="list", batch_size=10, result_ttl=60)
        async def listed(values: list[str]) -> list[str]:
            return values

        @mesh.step(name="step", retry=RetryPolicy(max_failures=2, min_backoff=0))
        async def step(value: str) -> str:
            return value

        @mesh.workflow(name="flow", result_ttl=60)
        async def flow(value: str) -> list[str | None]:
            worqr.state(value.encode())
            first = await worqr.first(work.named("first").run(value))
            assert first is not None
            found = [await step(value), await work.run(value), first[1], await worqr.wait_for("go", str)]
            last = await worqr.wait_for("go", bytes)
            look()
            return [*found, None if last is None else last.decode()]

        @mesh.on("topic")
        async def told(value: str) -> None:
            self.seen.append(value)

        self.work, self.fail, self.after, self.listed, self.flow = work, fail, after, listed, flow
        mesh.cron("0 0 1 1 *", work.call(MARK), name="declared")

    async def fill(self) -> None:
        """Send values to queues that no worker serves yet."""
        mesh, raw = self.mesh, self.mesh.queue("raw")
        await raw.enqueue(MARK.encode())
        await raw.enqueue(MARK.encode(), MARK.encode() + b"2")
        await raw.enqueue(MARK.encode(), unique=True)
        await raw.dispatch(MARK.encode(), id="raw")
        await mesh.enqueue_many([self.after.call(MARK), mesh.call("raw", MARK)])
        await mesh.schedule("stored", self.work.call(MARK), cron="0 0 1 1 *")
        await client_of(mesh).producer.dispatch_rows("raw", [({"row": "1" * 32}, MARK.encode())], 0, 60)
        async with mesh.batch(then=self.after.call(MARK), otherwise=self.after.call(MARK)) as batch:
            await batch.dispatch(self.work.call(MARK))
        await self.work.options(
            then=self.after.options(delay=0.5).call(MARK), otherwise=self.after.call(MARK)
        ).dispatch(MARK)
        self.look()


async def test_the_server_has_no_value_in_plain_text(sealed: worqr.Mesh, server: Server, prefix: str) -> None:
    stored: list[str] = []
    app = Everywhere(sealed, lambda: stored.append(repr(dump(server.client(), prefix))))
    async with sealed.connect():
        await app.fill()
        async with sealed.join():
            job, flow, bad = await app.work.dispatch(MARK), await app.flow.dispatch(MARK), await app.fail.dispatch(MARK)
            assert await job.result(timeout=30) == MARK
            await flow.send("go", MARK)
            await flow.send("go", MARK.encode(), again=True)
            assert await flow.result(timeout=30) == [MARK] * 5
            assert await (await app.listed.dispatch(MARK)).result(timeout=30) == MARK
            await (await sealed.run_schedule("stored")).result(timeout=30)
            await (await sealed.run_schedule("declared")).result(timeout=30)
            with pytest.raises(worqr.JobFailed):
                await bad.result(timeout=30)
            await until(lambda: PAYLOAD in app.seen and (MARK, MARK) in app.seen and (MARK, None) in app.seen)
            await told(app)
            [letter] = await sealed.queue("fail").failed.list()
            assert letter.task == (await sealed.queue("work").read(job.id)).task == PAYLOAD
            [kept] = await sealed.queue("work").jobs(state="finished", limit=1)
            assert kept.task == PAYLOAD
            app.look()
    assert (MARK, MARK.encode()) in app.seen  # what the first run has saved
    assert len(stored) > 5
    assert not [each for each in stored if MARK in each]


async def told(app: Everywhere) -> None:
    """Publish an event when the handler of its topic is known."""

    async def known() -> int:
        return len(await app.mesh.topics())

    await eventually(known, 1)
    client_of(app.mesh).topics.reset()
    await app.mesh.publish("topic", MARK)
    app.look()
    await until(lambda: MARK in app.seen)


async def test_the_first_key_encodes_and_the_others_decode_until_they_are_removed(new_mesh: NewMesh) -> None:
    seen: list[bytes] = []

    async def handler(task: bytes) -> bytes:
        seen.append(task)
        return task

    async def passes(before: Codec, after: Codec) -> None:
        producer, worker = new_mesh(codec=before), new_mesh(codec=after)
        async with producer.connect(), serving(worker, "Q1", handler):
            job = await producer.queue("Q1").dispatch(b"x", result_ttl=60)
            async with worker.connect():
                assert await worker.queue("Q1").job(job.id).result(timeout=30) == b"x"

    await passes(Fernet(OLD), Fernet([OLD, NEW]))
    await passes(Fernet([OLD, NEW]), Fernet([NEW, OLD]))
    await passes(Fernet([NEW, OLD]), Fernet(NEW))
    assert seen == [b"x"] * 3


@pytest.mark.parametrize("given", [{"codec": Signed(OLD)}, {"codec": Fernet(NEW)}, {}])
async def test_a_task_of_an_unknown_key_waits_for_a_worker_that_has_it(
    given: dict[str, Any], new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(codecs, "TRY_AGAIN", 0.05)
    wrong, right = new_mesh(**given), new_mesh(codec=Signed(NEW))
    for mesh in (wrong, right):

        @mesh.task(name="Q1", result_ttl=60, retry=ONCE)
        async def handler(value: str) -> str:
            return value

    async with right.connect():
        [job] = await right.dispatch_many([right.call("Q1", value="x")])

        async def waited() -> bool:
            return len((await right.queue("Q1").read(job.id)).tries) > 2

        async with wrong.join():
            await eventually(waited, True)
        async with right.join():
            assert await job.result(timeout=30) == "x"
        assert (await job.status()).failures == 0
    if given:
        assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1


async def test_a_value_of_an_unknown_key_that_came_before_the_wait_waits_for_a_worker_that_has_it(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "TRY_AGAIN", 0.05)
    old, both = new_mesh(codec=Fernet(OLD)), new_mesh(codec=Fernet([NEW, OLD]))

    async def flow() -> str | None:
        return await worqr.wait_for("go", str)

    flows = [mesh.workflow(name="flow", result_ttl=60, retry=ONCE)(flow) for mesh in (old, both)]
    async with old.connect(), both.connect():
        job = await flows[0].dispatch()
        assert await flows[1].job(job.id).send("go", "on") == "stored"

        async def waited() -> bool:
            return len((await old.queue("flow").read(job.id)).tries) > 0

        async with old.join():
            await eventually(waited, True)
        async with both.join():
            assert await flows[1].job(job.id).result(timeout=30) == "on"


async def test_a_changed_value_is_undecodable(new_mesh: NewMesh) -> None:
    sealed, plain = new_mesh(codec=Signed(NEW)), new_mesh()
    async with sealed.connect():
        await plain_enqueue(plain, Signed(NEW).encode(b"x")[:-1] + b"y")
        await undecodable(sealed, "was changed")


async def test_a_plain_value_of_another_program_is_taken_or_refused(new_mesh: NewMesh) -> None:
    taking, strict = new_mesh(codec=CODEC), new_mesh(codec=CODEC, accept_plain=False)
    seen: list[bytes] = []

    async def handler(task: bytes) -> None:
        seen.append(task)

    async with taking.connect():
        await plain_enqueue(new_mesh(), b"plain")
        async with serving(taking, "Q1", handler):
            await until(lambda: seen == [b"plain"])
        await plain_enqueue(new_mesh(), b"plain")
        await undecodable(strict, "stored without the codec of this mesh")


async def plain_enqueue(plain: worqr.Mesh, task: bytes) -> None:
    async with plain.connect():
        await plain.queue("Q1").enqueue(task)


async def undecodable(mesh: worqr.Mesh, why: str) -> None:
    """Until the only task of a queue is undecodable, for this reason."""

    async def handler(task: bytes) -> None:
        raise AssertionError(task)

    async def found() -> list[bool]:
        return [why in each.error.message for each in await mesh.queue("Q1").undecodable.list()]

    async with serving(mesh, "Q1", handler):
        await eventually(found, [True])


async def test_a_changed_result_is_an_error_of_its_reader(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    mesh = new_mesh(codec=CODEC)

    async def handler(task: bytes) -> bytes:
        return task

    async with mesh.connect(), serving(mesh, "Q1", handler):
        job = await mesh.queue("Q1").dispatch(b"x", result_ttl=60)
        assert await job.result(timeout=30) == b"x"
        other = new_mesh(codec=Fernet(OLD))
        async with other.connect():
            with pytest.raises(WrongKey, match="add that key"):
                await other.queue("Q1").job(job.id).result()
        client: Any = server.client()
        (key,) = [each for each in dump(server.client(), prefix) if b":result:" in each]
        client.hset(key, "value", client.hget(key, "value")[:-1] + b"!")
        with pytest.raises(UsageError, match="was changed"):
            await job.result()


async def test_equal_payloads_are_found_only_if_the_codec_encodes_them_alike(new_mesh: NewMesh) -> None:
    for codec in (Fernet(NEW), Signed(NEW)):
        mesh = new_mesh(codec=codec)
        async with mesh.connect():
            queue = mesh.queue("Q1")
            await queue.enqueue(b"x", unique=True)
            with pytest.raises(worqr.Duplicate):
                await queue.enqueue(b"x", unique=True)
            await queue.enqueue(b"y")
            if isinstance(codec, Signed):
                assert (await queue.find(b"y")).waiting
                assert (await queue.cancel(b"y")).waiting == 1
            else:
                for call in (queue.find, queue.cancel):
                    with pytest.raises(UsageError, match="use the id"):
                        await call(b"y")
            await queue.delete()


class Odd:
    """A codec of an application: it gives equal values other bytes, refuses some, and fails for others."""

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, value: bytes, /) -> bytes:
        self.calls += 1
        if value == b"bad":
            raise ValueError(MARK)
        return b"%d " % self.calls + value[::-1]

    def decode(self, stored: bytes, /) -> bytes:
        number, _, value = stored.partition(b" ")
        int(number)
        return value[::-1]


async def test_a_codec_of_the_application_gets_a_header_and_a_fence(new_mesh: NewMesh) -> None:
    mesh, seen = new_mesh(codec=Odd(), accept_plain=False), list[bytes]()

    async def handler(task: bytes) -> bytes:
        seen.append(task)
        return b"bad" if task == b"1" else task

    async with mesh.connect():
        queue = mesh.queue("Q1")
        with pytest.raises(UsageError, match="cannot encode a value: ValueError$"):
            await queue.enqueue(b"bad")
        with pytest.raises(UsageError, match="use the id"):
            await queue.enqueue(b"x", unique=True)
        good, bad = await queue.dispatch(b"good", result_ttl=60), await queue.dispatch(b"1", result_ttl=60)
        async with serving(mesh, "Q1", handler):
            assert await good.result(timeout=30) == b"good"
            with pytest.raises(worqr.JobFailed, match="cannot be kept"):
                await bad.result(timeout=30)
        await plain_enqueue(new_mesh(), codecs.OWN + b"no number")
        await undecodable(mesh, "cannot decode a value: ValueError")


class Panic(BaseException):
    """What an extension in Rust raises when it panics."""


class Panicking:
    """A codec whose library panics about some values."""

    def encode(self, value: bytes, /) -> bytes:
        if value == b"bad":
            raise Panic
        return value

    def decode(self, stored: bytes, /) -> bytes:
        if stored == b"bad":
            raise Panic
        return stored


async def test_a_codec_that_panics_about_a_value_hides_no_other(new_mesh: NewMesh) -> None:
    mesh = new_mesh(codec=Panicking(), accept_plain=False)
    async with mesh.connect():
        queue = mesh.queue("Q1")
        with pytest.raises(UsageError, match="cannot encode a value: Panic$"):
            await queue.enqueue(b"bad")
        await plain_enqueue(new_mesh(), codecs.OWN + b"bad")
        await queue.enqueue(b"good")
        assert set(await queue.tasks()) == {codecs.OWN + b"bad", b"good"}
        assert {each.task for each in await queue.jobs()} == {codecs.OWN + b"bad", b"good"}
        await queue.delete()
        await plain_enqueue(new_mesh(), codecs.OWN + b"bad")
        await undecodable(mesh, "cannot decode a value: Panic")


async def test_one_call_of_a_list_that_cannot_be_decoded_costs_the_others_nothing(
    new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "TRY_AGAIN", 600.0)
    mesh, seen = new_mesh(codec=Signed(NEW)), list[str]()

    @mesh.task(name="Q1", batch_size=10, batch_wait=0.5, result_ttl=60)
    async def listed(values: list[str]) -> list[str]:
        seen.extend(values)
        return values

    async with mesh.connect():
        changed, foreign = Signed(NEW).encode(b'{"values":"x"}')[:-1] + b"!", Signed(OLD).encode(b'{"values":"y"}')
        await plain_enqueue(new_mesh(), changed)
        await plain_enqueue(new_mesh(), foreign)
        job = await listed.dispatch("z")
        async with mesh.join():
            assert await job.result(timeout=30) == "z"
            queue = mesh.queue("Q1")

            async def counts() -> tuple[int, int]:
                info = await queue.info()
                return info.undecodable, info.scheduled

            await eventually(counts, (1, 1))
        assert seen == ["z"]
        await queue.delete()


async def test_a_claim_by_hand_is_decoded_and_its_result_encoded(
    sealed: worqr.Mesh, server: Server, prefix: str
) -> None:
    async with sealed.connect(), sealed.join() as peer:
        job = await sealed.queue("Q1").dispatch(MARK.encode(), result_ttl=60)
        await plain_enqueue(worqr.Mesh(server.url, prefix=prefix), b"plain")
        async with peer.work("Q1") as claims:
            [claim] = await claims.take(1)
            assert claim.task == MARK.encode()
            await claim.save(MARK.encode())
            await claim.finish(claim.task)

            async def left() -> int:
                return (await sealed.queue("Q1").info()).undecodable

            with trio.move_on_after(0.1):
                await claims.take(1)
            await eventually(left, 1)
        assert await job.result(timeout=30) == MARK.encode()
        assert MARK not in repr(dump(server.client(), prefix))


@pytest.mark.one_server  # a registry is included once
async def test_a_workflow_in_a_process_has_no_key_and_no_value_in_plain_text(
    sealed: worqr.Mesh, server: Server, prefix: str, tmp_path: Any
) -> None:
    sealed.include(workflow_jobs.sealed)
    path = str(tmp_path / MARK)
    async with sealed.join():
        job = await workflow_jobs.with_a_codec.dispatch(path, 7)

        async def state() -> str:
            return (await job.status()).state

        await eventually(state, "suspended")
        assert MARK not in repr(dump(server.client(), prefix))
        await job.send("approved", {"by": MARK})
        assert MARK not in repr(dump(server.client(), prefix))
        assert (await job.result(timeout=30))[:2] == ("paid 7", workflow_jobs.Approval(MARK))
    assert (tmp_path / MARK).read_text() == "7\n"


async def test_a_workflow_that_began_without_a_codec_goes_on_with_one(new_mesh: NewMesh) -> None:
    calls: list[str] = []

    def declared(mesh: worqr.Mesh) -> Any:
        @mesh.step(name="pay")
        async def pay(order: str) -> str:
            calls.append(order)
            return order

        @mesh.workflow(name="flow", result_ttl=60)
        async def flow(order: str) -> list[str | None]:
            return [await pay(order), await worqr.wait_for("go", str), await pay(order + "2")]

        return flow

    before, after = new_mesh(), new_mesh(codec=CODEC)
    plain, sealed = declared(before), declared(after)
    async with before.join():
        job = await plain.dispatch("a")

        async def state() -> str:
            return (await job.status()).state

        await eventually(state, "suspended")
    async with after.join():
        handle = after.queue("flow").job(job.id)
        await handle.send("go", "b")
        await until(lambda: calls == ["a", "a2"])
        assert sealed is not None


async def test_a_job_that_is_dispatched_again_with_the_same_payload_keeps_what_it_has_saved(new_mesh: NewMesh) -> None:
    mesh, saved = new_mesh(codec=Fernet(NEW)), list[bytes | None]()

    @mesh.task(name="Q1", retry=RetryPolicy(max_failures=3, min_backoff=600))
    async def handler(value: str) -> None:
        saved.append(worqr.current().saved)
        await worqr.current().save(b"x")
        raise ValueError

    async with mesh.join():
        for n in (1, 2):
            await handler.options(id="j").dispatch("a")
            await until(lambda n=n: len(saved) == n)
        assert saved == [None, b"x"]
    async with mesh.connect():
        await mesh.queue("Q1").delete()


async def test_a_schedule_is_not_changed_by_each_start(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    stored, counts = list[bytes](), list[tuple[int, int]]()
    for _ in range(2):
        mesh = new_mesh(codec=CODEC)

        @mesh.task(name="Q1")
        async def handler(value: str) -> None: ...

        mesh.cron("0 0 1 1 *", handler.call("x"), name="declared")
        async with mesh.join():

            async def known(mesh: worqr.Mesh = mesh) -> bool:
                return "declared" in [each.name for each in await mesh.schedules()]

            await eventually(known, True)
            stored.append(repr(server.client().hget(f"{{{prefix}}}:schedules", "declared")).encode())
            applied = await mesh.schedules_apply("s/", [("s/1", handler.call("x"), {"cron": "0 0 1 1 *"})])
            counts.append((applied.created, applied.updated))
            lines = await mesh.export_schedules("s/")
            assert '{"value":"x"}' in lines[0]
            assert (await mesh.import_schedules(lines)).unchanged == 1
            [line] = await exported(new_mesh(), "s/")
            assert '"x"' not in line
            assert (await mesh.import_schedules([line])).unchanged == 1
    assert counts == [(1, 0), (0, 0)]
    assert stored[0] == stored[1]


async def exported(mesh: worqr.Mesh, prefix: str) -> list[str]:
    async with mesh.connect():
        return await mesh.export_schedules(prefix)


@pytest.mark.parametrize("runs_in", ["thread", "process"])
async def test_redacted_errors_have_their_types_and_places_and_no_texts(
    runs_in: str, new_mesh: NewMesh, server: Server, prefix: str
) -> None:
    mesh = new_mesh(redact_errors=True)
    async with mesh.connect(), serving(mesh, "Q1", process_jobs.fail_silently, runs_in=runs_in, retry=ONCE):
        job = await mesh.queue("Q1").dispatch(b"x", result_ttl=60)
        with pytest.raises(worqr.JobFailed) as caught:
            await job.result(timeout=30)
        error = caught.value.error
        assert (error.type, error.message, error.fields) == ("ValueError", "", {})
        assert "in fail_silently" in error.traceback
        assert "silent" not in repr(dump(server.client(), prefix)).replace("fail_silently", "")


async def test_redacted_errors_of_steps_have_no_texts(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    mesh, tries = new_mesh(redact_errors=True), list[str]()

    @mesh.step(name="step", retry=RetryPolicy(max_failures=2, min_backoff=0.1))
    async def step() -> None:
        tries.append(repr(dump(server.client(), prefix)))
        raise ValueError(MARK)

    @mesh.workflow(name="Q1", result_ttl=60, retry=ONCE)
    async def flow() -> None:
        await step()

    async with mesh.join():
        with pytest.raises(worqr.JobFailed):
            await (await flow.dispatch()).result(timeout=30)
        assert len(tries) == 2
        assert not [each for each in (*tries, repr(dump(server.client(), prefix))) if MARK in each]


def test_a_mesh_says_nothing_of_its_keys() -> None:
    mesh = worqr.Mesh(codec=Fernet(NEW))
    assert NEW.decode() not in repr(mesh) + repr(vars(mesh)) + repr(mesh.codec)
    with pytest.raises(UsageError, match="have encode and decode, not str"):
        worqr.Mesh(codec=NEW.decode())  # type: ignore[arg-type]


def test_a_value_of_another_codec_is_waited_for_and_not_broken() -> None:
    mine = codecs.StoredValues(Odd(), accept_plain=True)
    for other in (Fernet(NEW), Signed(NEW)):
        with pytest.raises(WrongKey):
            mine.decode(other.encode(b"x"))
        with pytest.raises(WrongKey):
            codecs.StoredValues(other, accept_plain=True).decode(mine.encode(b"x"))
    with pytest.raises(Undecodable):
        mine.decode(codecs.ZLIB + b"x")


@pytest.mark.parametrize(
    "codec", [Odd(), Fernet(NEW), Stack([Compress(), Signed(NEW)])], ids=["own", "fernet", "stack"]
)
def test_what_was_only_compressed_counts_as_plain(codec: Codec) -> None:
    compressed = Compress().encode(bytes(2000))
    assert codecs.StoredValues(codec, accept_plain=True).decode(compressed) == bytes(2000)
    with pytest.raises(Undecodable):
        codecs.StoredValues(codec, accept_plain=False).decode(compressed)


async def test_a_mesh_that_compressed_begins_to_encrypt_with_its_waiting_tasks(new_mesh: NewMesh) -> None:
    before, after = new_mesh(codec=Compress()), new_mesh(codec=Stack([Compress(), Fernet(NEW)]))
    ran: list[str] = []

    @after.task(name="work")
    async def work(value: str) -> None:
        ran.append(value)

    async with before.connect():
        await before.enqueue_many([before.call("work", value="x" * 2000)])
    async with after.join():
        await until(lambda: ran == ["x" * 2000])

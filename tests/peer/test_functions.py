"""Typed functions, served: what a producer says is what the handler gets, and what it returns is what the producer gets."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import worqr
from tests.peer import jobs_in_processes
from tests.peer.conftest import NewMesh
from tests.peer.tools import QUICK, at_most, eventually
from tests.support.leaks import dump
from tests.support.servers import Server
from tests.test_argument_codec import ORDER, TYPES, Color, Order, User, of

SECRET = "correct horse"


class Noted:
    """What functions were called with; from any thread."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, *said: Any) -> None:
        self.calls.append(said)

    async def wait(self, n: int) -> list[Any]:
        async def seen() -> bool:
            return len(self.calls) >= n

        await eventually(seen, True, within=20)
        return self.calls


@pytest.fixture
def noted() -> Noted:
    return Noted()


# Calls


async def test_what_is_enqueued_is_what_the_function_gets(mesh: worqr.Mesh, noted: Noted) -> None:
    @mesh.task
    async def ship(order: Order, color: Color = Color.RED, *, at: datetime | None = None) -> None:
        noted(order, color, at)

    @mesh.task
    def ship_in_a_thread(order: Order, color: Color = Color.RED, *, at: datetime | None = None) -> None:
        assert threading.current_thread() is not threading.main_thread()
        noted(order, color, at)

    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    for function in (ship, ship_in_a_thread):
        noted.calls.clear()
        async with mesh.join():
            await function.enqueue(ORDER, at=noon)
            await function.enqueue(ORDER, Color.GREEN)
            await function.dispatch(order=ORDER)
            assert sorted(await noted.wait(3), key=repr) == [
                (ORDER, Color.GREEN, None),
                (ORDER, Color.RED, None),
                (ORDER, Color.RED, noon),
            ]


@pytest.mark.timeout(120)
async def test_every_type_goes_there_and_comes_back(mesh: worqr.Mesh) -> None:
    def echo(hint: Any) -> Callable[..., Any]:
        async def function(x: Any) -> Any:
            return x

        function.__annotations__ = of(hint).__annotations__
        return function

    functions = {name: mesh.task(name=name, result_ttl=60)(echo(hint)) for name, (hint, _) in TYPES.items()}
    found: dict[str, Any] = {}

    async def call(name: str) -> None:
        found[name] = await (await functions[name].dispatch(TYPES[name][1])).result(timeout=50)

    async with mesh.join(), trio.open_nursery() as nursery:
        for name in functions:
            nursery.start_soon(call, name)
    for name, (_, value) in TYPES.items():
        assert (name, found[name], type(found[name])) == (name, value, type(value))


async def test_a_whole_payload(mesh: worqr.Mesh, noted: Noted) -> None:
    @mesh.task(result_ttl=60)
    async def ship(order: Order, /) -> date:
        noted(order)
        return order.at.date()

    @mesh.task(result_ttl=60)
    async def store(picture: bytes, /) -> bytes:
        noted(picture)
        return picture[::-1]

    async with mesh.join():
        assert await (await ship.dispatch(ORDER)).result(timeout=20) == ORDER.at.date()
        assert await (await store.dispatch(b"\x00\xff{")).result(timeout=20) == b"{\xff\x00"
        assert noted.calls == [(ORDER,), (b"\x00\xff{",)]
        await mesh.queue(store.name).enqueue(b"not json")
        assert (await noted.wait(3))[-1] == (b"not json",)


async def test_the_payload_lies_in_the_queue_as_anybody_would_write_it(mesh: worqr.Mesh) -> None:
    @mesh.task(name="mail.send")
    async def send(to: str, copies: list[str] = [], *, urgent: bool = False) -> None: ...  # noqa: B006

    async with mesh.connect():
        await send.enqueue("ada")
        assert await send.queue.tasks() == [b'{"to":"ada","copies":[],"urgent":false}']
        assert mesh.queue("mail.send").name == send.queue.name == send.name
        await send.queue.delete()


async def test_producers_of_other_languages_and_versions(
    mesh: worqr.Mesh, server: Server, prefix: str, noted: Noted
) -> None:
    @mesh.task(name="mail.send")
    async def send(to: str, subject: str = "hi", *, user: User | None = None) -> None:
        noted(to, subject, user)

    payloads = [
        b'{"to":"ada"}',
        b' { "subject" : "x",\n "to": "b\\u00e9a" } ',
        b'{"to":"cy","user":{"Name":"Cy","age":7},"priority":1,"trace":{"id":[]}}',
    ]
    async with mesh.join():
        for payload in payloads:
            server.client().lpush(f"{prefix}:{{mail.send}}", payload)
        assert sorted(await noted.wait(3), key=repr) == [
            ("ada", "hi", None),
            ("b\u00e9a", "x", None),
            ("cy", "hi", User(Name="Cy")),
        ]


async def test_a_function_that_lives_elsewhere_is_called_by_its_name(
    mesh: worqr.Mesh, other: worqr.Mesh, noted: Noted
) -> None:
    @mesh.task(name="mail.send", result_ttl=60)
    async def send(to: str, subject: str = "hi") -> dict[str, str]:
        noted(to, subject)
        return {"to": to}

    async with mesh.join(), other.connect():
        assert await other.enqueue_many([other.call("mail.send", to="ada")]) == 1
        (job,) = await other.dispatch_many([other.call("mail.send", to="bea", subject="x")])
        assert await job.result(timeout=20) == {"to": "bea"}
        assert sorted(await noted.wait(2)) == [("ada", "hi"), ("bea", "x")]


async def test_parameters_may_be_called_as_ours_are(mesh: worqr.Mesh, noted: Noted) -> None:
    @mesh.task(name="Q1", result_ttl=60)
    async def odd(self: int, args: int, *, kwargs: int, task: int, fn: int) -> list[int]:
        return [self, args, kwargs, task, fn]

    assert await odd(self=1, args=2, kwargs=3, task=4, fn=5) == [1, 2, 3, 4, 5]
    async with mesh.join():
        job = await odd.dispatch(self=1, args=2, kwargs=3, task=4, fn=5)
        assert await job.result(timeout=30) == [1, 2, 3, 4, 5]
        await odd.enqueue(self=1, args=2, kwargs=3, task=4, fn=5)
        assert odd.call(self=1, args=2, kwargs=3, task=4, fn=5).args == (1, 2)


async def test_a_wrong_call_stores_nothing(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    @mesh.task
    async def send(to: str) -> None: ...

    async with mesh.connect():
        wrong: Any = send
        for call in (partial(wrong.enqueue, "ada", subjekt="x"), partial(wrong.options(id="x").dispatch)):
            with pytest.raises(TypeError):
                await call()
        for call in (partial(wrong.enqueue, 7), partial(wrong.dispatch, to=None)):
            with pytest.raises(worqr.UsageError, match="invalid arguments"):
                await call()
        assert not dump(server.client(), prefix)


async def test_options_of_a_dispatch_reach_the_job(mesh: worqr.Mesh) -> None:
    @mesh.task
    async def send(to: str) -> str:
        context = worqr.current()
        return f"{context.id} {context.meta['tenant']} {to}"

    async with mesh.join():
        job = await send.options(id="mail-7", meta={"tenant": "x"}, result_ttl=60).dispatch("ada")
        assert (job.id, job.outcome, job.queue) == ("mail-7", "created", send.name)
        assert await job.result(timeout=20) == "mail-7 x ada"
        assert await send.job("mail-7").result(timeout=20) == "mail-7 x ada"
        assert (await send.options(id="later", delay=60).dispatch("bea")).outcome == "created"
        assert (await send.options(id="later", if_exists="skip").dispatch("bea")).outcome == "unchanged"
        assert (await send.job("later").cancel()).waiting == 1


# What cannot be decoded


@pytest.mark.parametrize("plain", [False, True])
async def test_what_cannot_be_decoded_is_undecodable_byte_for_byte(
    mesh: worqr.Mesh, expects_left: Callable[..., None], noted: Noted, caplog: pytest.LogCaptureFixture, plain: bool
) -> None:
    expects_left("{mail.send}:broken", "{mail.send}:aside*")
    caplog.set_level(logging.DEBUG)

    async def send(to: str, color: Color, user: User | None = None) -> None:
        noted(to, color, user)

    def send_in_a_thread(to: str, color: Color, user: User | None = None) -> None:
        noted(to, color, user)

    mesh.task(name="mail.send", retry=QUICK)(send_in_a_thread if plain else send)
    payloads = [
        f'{{"to":7,"color":"{SECRET}"}}'.encode(),
        f'{{"to":"ada","color":"{SECRET}"}}'.encode(),
        f'{{"to":"ada","color":"red","user":{{"Name":"","born":"{SECRET}"}}}}'.encode(),
        f'["{SECRET}"]'.encode(),
        SECRET.encode() + b"\x00\xff",
        b"",
    ]
    async with mesh.join():
        q = mesh.queue("mail.send")
        await q.enqueue(*payloads, b'{"to":"ada","color":"red"}')
        assert await noted.wait(1) == [("ada", Color.RED, None)]
        await eventually(q.running, [])
        broken = await q.undecodable.list()
        assert sorted(record.task for record in broken) == sorted(payloads)
        assert {(record.reason, record.failures) for record in broken} == {("undecodable", 0)}
        said = {record.task: (record.error.type, record.error.message) for record in broken}
        assert said[payloads[0]] == (
            "worqr.Undecodable",
            "mail.send: ValidationError: Expected `str`, got `int` - at `$.to`. Compare the signature of the function in the "
            "program that enqueued it",
        )
        assert SECRET in said[payloads[1]][1]  # the record may say all of it
        assert (await q.info()).counts["undecodable"] == len(payloads)
    lines = [record.getMessage() for record in caplog.records]
    assert any("task.undecodable: queue 'mail.send'" in line and "ValidationError" in line for line in lines)
    assert SECRET not in caplog.text


async def test_what_was_set_aside_can_be_read_as_a_call(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> None:
    @mesh.task(name="mail.send")
    async def send(to: str, subject: str = "hi") -> None:
        raise worqr.Failure("no such address")

    expects_left("{mail.send}:failed", "{mail.send}:aside*")
    async with mesh.join():
        await send.enqueue("ada")
        await eventually(lambda: count(send.queue.failed), 1)
        (record,) = await send.queue.failed.list()
        call = send.decode(record.task)
        assert (call.args, call.kwargs) == (("ada", "hi"), {})
        assert call == send.call("ada")


async def count(aside: worqr.DeadLetters) -> int:
    return len(await aside.list())


# Results


async def test_a_result_is_waited_for_before_there_is_a_worker(mesh: worqr.Mesh) -> None:
    @mesh.task(result_ttl=60)
    async def add(a: int, b: int) -> int:
        return a + b

    async with mesh.connect():
        job = await add.dispatch(1, 2)
        with pytest.raises(worqr.ResultTimeout):
            await job.result(timeout=0)
        found: list[int] = []

        async def wait() -> None:
            found.append(await job.result(timeout=30))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.05)
            async with mesh.join():
                with trio.fail_after(30):
                    while not found:
                        await trio.sleep(0.01)
        assert found == [3]


async def test_a_function_that_keeps_no_results_says_so_at_once(mesh: worqr.Mesh) -> None:
    @mesh.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with mesh.connect(), at_most(20):
        job = await add.dispatch(1, 2)
        with pytest.raises(worqr.NoResult, match="keeps no result"):
            await job.result()
        await add.queue.delete()


async def test_a_result_of_another_version_does_not_fit(new_mesh: NewMesh) -> None:
    old, new = new_mesh(), new_mesh()

    @old.task(name="add", result_ttl=60)
    async def add(a: int) -> str:
        return str(a)

    @new.task(name="add", result_ttl=60)
    async def add_now(a: int) -> int:
        return a

    async with old.join(), new.connect():
        job = await add_now.dispatch(1)
        with pytest.raises(worqr.UsageError, match="add: the result is not what it is said to return .*Expected `int`"):
            await job.result(timeout=20)
        assert await old.queue("add").job(job.id).result(timeout=20) == "1"


async def test_a_result_that_cannot_be_kept_is_a_failure(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> None:
    @mesh.task(name="get", result_ttl=60)
    async def get() -> Any:
        return object()

    expects_left("{get}:failed", "{get}:aside*")
    async with mesh.join():
        with pytest.raises(worqr.JobFailed, match="its result cannot be kept"):
            await (await get.dispatch()).result(timeout=20)


async def test_a_job_of_a_function_tells_how_it_ended(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> None:
    @mesh.task(name="send", result_ttl=60)
    async def send(to: str) -> None:
        if to == "nobody":
            raise worqr.Failure("no such address")
        await trio.sleep_forever()

    expects_left("{send}:failed", "{send}:aside*")
    async with mesh.join():
        with pytest.raises(worqr.JobFailed, match="no such address") as failed:
            await (await send.dispatch("nobody")).result(timeout=20)
        assert failed.value.error.type == "worqr.Failure"
        job = await send.options(id="endless").dispatch("ada")
        await eventually(lambda: state_of(job), "active")
        assert (await send.job("endless").cancel(reason="button", wait=20)).acknowledged == 1
        with pytest.raises(worqr.JobCancelled, match="button"):
            await job.result(timeout=20)


async def state_of(job: worqr.Job[Any]) -> str:
    return (await job.status()).state


# Failure handlers


@pytest.mark.parametrize("plain", [False, True])
async def test_a_failure_handler_gets_the_record(
    mesh: worqr.Mesh, expects_left: Callable[..., None], noted: Noted, plain: bool
) -> None:
    @mesh.task(name="send", retry=worqr.RetryPolicy(max_failures=2, min_backoff=0))
    async def send(to: str) -> None:
        raise ConnectionError("down")

    def gave_up(record: worqr.Failed) -> None:
        noted(record, send.decode(record.task).args)

    async def gave_up_later(record: worqr.Failed) -> None:
        gave_up(record)

    send.on_failure(gave_up if plain else gave_up_later)
    expects_left("{send}:failed", "{send}:aside*")
    async with mesh.join():
        await send.enqueue("ada")
        ((record, args),) = await noted.wait(1)
        assert args == ("ada",)
        assert (record.queue, record.reason, record.failures, record.error.message) == ("send", "failed", 2, "down")
        await eventually(send.queue.failures.running, [])


async def test_an_undecodable_payload_reaches_the_failure_handler_too(
    mesh: worqr.Mesh, expects_left: Callable[..., None], noted: Noted
) -> None:
    @mesh.task(name="send")
    async def send(to: str) -> None: ...

    @send.on_failure
    async def gave_up(record: worqr.Failed) -> None:
        noted(record.reason, record.task)

    expects_left("{send}:broken", "{send}:aside*")
    async with mesh.join():
        await send.queue.enqueue(b"\x00")
        assert await noted.wait(1) == [("undecodable", b"\x00")]
        await eventually(send.queue.failures.running, [])


async def test_a_declared_function_may_be_a_failure_handler(
    mesh: worqr.Mesh, expects_left: Callable[..., None], noted: Noted
) -> None:
    @mesh.task(name="send")
    async def send(to: str) -> None:
        raise worqr.Failure

    @mesh.task(name="gave_up")
    async def gave_up(record: worqr.Failed) -> None:
        noted(record.queue, record.task)

    send.on_failure(gave_up)
    expects_left("{send}:failed", "{send}:aside*")
    async with mesh.join():
        await send.enqueue("ada")
        assert await noted.wait(1) == [("send", b'{"to":"ada"}')]
        await eventually(send.queue.failures.running, [])


# Processes


async def test_arguments_and_results_of_a_process_are_typed_too(
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    prefix: str,
    expects_left: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in (("url", server.url), ("prefix", prefix)):
        monkeypatch.setattr(jobs_in_processes.mesh, name, value)
    tax, bill = jobs_in_processes.tax, jobs_in_processes.Bill([Decimal("1.10"), Decimal(2)])
    caplog.set_level(logging.DEBUG)
    expects_left("{tax}:broken", "{tax}:aside*")
    async with jobs_in_processes.mesh.join(processes=1):
        job = await tax.dispatch(bill, owner=os.getpid())
        assert await job.result(timeout=50) == Decimal("0.5890")
        payload = f'{{"owner":7,"bill":{{"items":["{SECRET}"]}}}}'.encode()
        await tax.queue.enqueue(payload)
        await eventually(lambda: count(tax.queue.undecodable), 1, within=50)
        (record,) = await tax.queue.undecodable.list()
        assert record.task == payload
        assert record.error.message.startswith("tax: ValidationError: ")
    assert "task.undecodable: queue 'tax'" in caplog.text
    assert SECRET not in caplog.text


# Names


async def test_older_names_are_served_and_never_enqueued_to(mesh: worqr.Mesh, other: worqr.Mesh, noted: Noted) -> None:
    @mesh.task(name="new", aliases=["old", "older"], result_ttl=60)
    async def send(to: str) -> str:
        noted(worqr.current().queue, to)
        return to

    async with other.connect():
        await other.enqueue_many([other.call("old", to="a"), other.call("older", to="b")])
        (job,) = await other.dispatch_many([other.call("old", to="c")])
    async with mesh.join():
        await send.enqueue("d")
        assert sorted(await noted.wait(4)) == [("new", "d"), ("old", "a"), ("old", "c"), ("older", "b")]
        assert await mesh.queue("old").job(job.id).result(timeout=20) == "c"
        assert {info.name for info in await mesh.queues()} == {"new", "old", "older"}


async def test_included_functions_are_served_under_their_new_names(mesh: worqr.Mesh, noted: Noted) -> None:
    shop, inner = worqr.Registry(), worqr.Registry()

    @shop.task(name="buy")
    async def buy(what: str) -> None:
        noted(worqr.current().queue, what)

    before = buy.call("early")
    shop.include(inner, prefix="inner.")
    mesh.include(shop, prefix="shop.")

    @inner.task(name="pay", aliases=["old"])
    async def pay(what: str) -> None:
        noted(worqr.current().queue, what)

    async with mesh.join():
        await buy.enqueue("book")
        await pay.enqueue("card")
        await mesh.queue("shop.inner.old").enqueue(b'{"what":"cash"}')
        await mesh.enqueue_many([before])
        assert sorted(await noted.wait(4)) == [
            ("shop.buy", "book"),
            ("shop.buy", "early"),
            ("shop.inner.old", "cash"),
            ("shop.inner.pay", "card"),
        ]


# What a peer serves


async def queues_of(mesh: worqr.Mesh, peer: worqr.Peer) -> set[str]:
    return {name for worker in await mesh.workers() if worker.id == peer.id for name in worker.queues}


def declare(mesh: worqr.Mesh, *names: str, **options: Any) -> None:
    async def nothing() -> None: ...

    for name in names:
        mesh.task(name=name, **options)(nothing)


@pytest.mark.parametrize(
    ("only", "served"),
    [
        (None, {"mail.send", "mail.read", "web.get", "{web.get}-fail"}),
        (["web.get"], {"web.get", "{web.get}-fail"}),
        (["mail.*"], {"mail.send", "mail.read"}),
        (("*.read", "mail.read", "w[e]b.*"), {"mail.read", "web.get", "{web.get}-fail"}),
        ({"*"}, {"mail.send", "mail.read", "web.get", "{web.get}-fail"}),
    ],
)
async def test_a_peer_serves_all_or_only_those(mesh: worqr.Mesh, only: Any, served: set[str]) -> None:
    declare(mesh, "mail.send", "mail.read")
    declare(mesh, "web.get", on_failure=print)
    options = {} if only is None else {"only": only}
    async with mesh.join(**options) as peer:
        assert await queues_of(mesh, peer) == served


async def test_an_alias_comes_with_its_function(mesh: worqr.Mesh) -> None:
    declare(mesh, "new", aliases=["old"])
    declare(mesh, "other")
    async with mesh.join(only=["new"]) as peer:
        assert await queues_of(mesh, peer) == {"new", "old"}


@pytest.mark.parametrize(
    ("only", "words"),
    [
        (["mail.sned"], "only: no function is named 'mail.sned'; did you mean 'mail.send'"),
        (["mail.*", "xxxxx*"], "only: no function is named 'xxxxx\\*'; there are 'mail.read', 'mail.send'"),
        ("mail.send", r"only must be a collection of names, as in only=\['mail.send'\], not a str"),
        ([], r"only=\[\] serves nothing"),
        ([7], "only must be a collection of names or globs, not of 7"),
        ([""], "only must be a collection of names or globs, not of ''"),
    ],
)
async def test_names_that_nobody_has_are_refused_before_anything_is_sent(only: Any, words: str) -> None:
    mesh = worqr.Mesh("redis://nowhere.invalid:1/0")
    declare(mesh, "mail.send", "mail.read")
    with pytest.raises(worqr.UsageError, match=words):
        async with mesh.join(only=only):
            pass


async def test_a_peer_that_would_serve_nothing_says_so_when_it_is_waited_for(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, at_most(30):
        with pytest.raises(
            worqr.UsageError, match=r"this peer serves nothing: no function is declared on <Mesh '.*'> with @mesh"
        ):
            await peer.wait()
        async with trio.open_nursery() as nursery:
            await nursery.start(peer.serve, "Q1", print)
            nursery.start_soon(peer.wait)
            await peer.drain()


async def test_a_type_that_is_not_there_is_an_error_before_anything_is_sent() -> None:
    mesh = worqr.Mesh("redis://nowhere.invalid:1/0")

    async def send(to: Nobody) -> None:  # type: ignore[name-defined]  # noqa: F821
        ...

    mesh.task(name="mail.send")(send)
    with pytest.raises(worqr.UsageError, match=r"^mail\.send: an annotation names what is not there .*'Nobody'"):
        async with mesh.join():
            pass


async def test_a_queue_of_a_function_is_served_once(mesh: worqr.Mesh) -> None:
    declare(mesh, "mail.send")
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=r"'mail\.send' is served .*already"):
            await peer.serve("mail.send", print)


async def test_a_function_may_be_served_by_hand_too(mesh: worqr.Mesh, other: worqr.Mesh, noted: Noted) -> None:
    @other.task(name="mail.send")
    async def send(to: str) -> None:
        noted(to)

    async with mesh.join() as peer, other.connect(), trio.open_nursery() as nursery:
        handler: Any = send
        await nursery.start(peer.serve, "mail.copies", handler)
        await mesh.queue("mail.copies").enqueue(b'{"to":"ada"}')
        assert await noted.wait(1) == [("ada",)]
        nursery.cancel_scope.cancel()


# Limits


async def test_a_full_queue_refuses_the_functions_calls(mesh: worqr.Mesh) -> None:
    @mesh.task(name="send", max_length=2)
    async def send(to: str) -> None: ...

    async with mesh.connect():
        await send.enqueue("a")
        await send.options(max_length=1000).dispatch("b")
        for call in (
            partial(send.enqueue, "c"),
            partial(send.dispatch, "c"),
            partial(mesh.enqueue_many, [send.call("c")]),
            partial(mesh.dispatch_many, [send.call("c")]),
        ):
            with pytest.raises(worqr.QueueFull, match="'send'"):
                await call()
        assert await send.queue.count() == 2
        await send.queue.delete()


async def test_a_timeout_of_a_function_is_a_timeout(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> None:
    @mesh.task(name="sleep", timeout=0.05, retry=worqr.RetryPolicy(max_timeouts=1), result_ttl=60)
    async def sleep() -> None:
        await trio.sleep_forever()

    expects_left("{sleep}:failed", "{sleep}:aside*")
    async with mesh.join():
        with pytest.raises(worqr.JobFailed, match="it ran longer than 0.05 s"):
            await (await sleep.dispatch()).result(timeout=30)


async def test_functions_share_one_payload_format(mesh: worqr.Mesh) -> None:
    """What one function enqueues, `json` can read, and the other way round."""

    @mesh.task(name="ship")
    async def ship(order: Order, *, color: Color = Color.RED) -> None: ...

    said = json.loads(ship.call(ORDER).task)
    assert ship.decode(json.dumps(said).encode()).args == (ORDER,)

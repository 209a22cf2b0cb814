"""Web-hooks: messages that are sent, signed and tried again, addresses that are not called, and the verifier of receivers."""

from __future__ import annotations

import base64
import json
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import httpcore
import pytest
import standardwebhooks
import trio
import trustme
from hypothesis import given
from hypothesis import strategies as st

import worqr
from tests.peer.tools import eventually, until
from worqr import webhooks
from worqr.webhooks import Webhooks, WrongSignature, is_public, new_secret, sign, verify

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
QUICK_TRIES = worqr.RetryPolicy(max_failures=4, min_backoff=0)

pytestmark = [pytest.mark.leaves("{*}:failed", "{*}:aside*", "{*}:outbox", "{*}:batch*", "{*}:part:*")]


class Receiver:
    """An HTTP server on 127.0.0.1: what it got, and what it answers next, (status, headers, body)."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.stays_silent = threading.Event()
        self.stays_silent.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append((self.path, {name.lower(): text for name, text in self.headers.items()}, body))
                receiver.stays_silent.wait(30)
                status, headers, reply = receiver.answers.pop(0) if receiver.answers else (204, {}, b"")
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name, text)
                self.end_headers()
                with suppress(ConnectionError):  # that of a sender who has read enough
                    self.wfile.write(reply)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/in?token=1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def messages(self) -> list[dict[str, Any]]:
        return [verify(SECRET, headers, body) for _, headers, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.stays_silent.set()
    found.server.shutdown()
    found.server.server_close()


Hooked = Callable[..., tuple[Webhooks, worqr.AsyncFunction[[str], dict[str, int]]]]


@pytest.fixture
def hooked(mesh: worqr.Mesh) -> Hooked:
    """Web-hooks of the mesh, and a function whose runs finish or fail."""

    def declare(**options: Any) -> tuple[Webhooks, worqr.AsyncFunction[[str], dict[str, int]]]:
        hooks = Webhooks(mesh, **{"secret": SECRET, "allow": ["127.0.0.0/8"], "retry": QUICK_TRIES} | options)

        @mesh.task(name="work", retry=worqr.RetryPolicy(max_failures=1))
        async def work(how: str) -> dict[str, int]:
            if how == "fail":
                raise ValueError("no rows")
            return {"rows": 3}

        return hooks, work

    return declare


def both(hooks: Webhooks, receiver: Receiver) -> dict[str, Any]:
    call = hooks.call(receiver.url)
    return {"then": call, "otherwise": call}


async def failed(mesh: worqr.Mesh) -> list[str]:
    return [each.error.message for each in await mesh.queue(webhooks.FUNCTION).failed.list() if each.error]


# Messages


async def test_the_end_of_a_job_is_told_once_signed_and_with_what_it_returned(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, work = hooked()
    async with mesh.join():
        job = await work.options(meta={"tenant": "a"}, **both(hooks, receiver)).dispatch("")
        await until(lambda: receiver.got)
        [message] = receiver.messages()
        assert message["type"] == "job.finished"
        expected = {"id": job.id, "queue": "work", "outcome": "finished", "reason": "", "result": {"rows": 3}}
        assert message["data"] == expected | {"meta": {"tenant": "a"}}
        [(path, headers, body)] = receiver.got
        assert path == "/in?token=1"
        assert headers["content-type"] == "application/json"
        assert standardwebhooks.Webhook(SECRET).verify(body, headers) == message, "by the specification's own library"
        await until(lambda: message["timestamp"].endswith("Z"))
    assert len(receiver.got) == 1


async def test_a_job_that_failed_and_one_that_was_cancelled_are_told_without_a_traceback(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, work = hooked()
    async with mesh.join():
        await work.options(**both(hooks, receiver)).dispatch("fail")
        await until(lambda: receiver.got)
        job = await work.options(delay=600, **both(hooks, receiver)).dispatch("")
        await job.cancel(reason="no longer wanted")
        await until(lambda: len(receiver.got) == 2)
    first, second = receiver.messages()
    assert (first["type"], first["data"]["error"]) == ("job.failed", {"type": "ValueError", "message": "no rows"})
    assert (second["type"], second["data"]["reason"]) == ("job.cancelled", "no longer wanted")
    assert b"Traceback" not in receiver.got[0][2]


async def test_a_message_of_your_own_and_the_end_of_a_batch(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, work = hooked()
    async with mesh.join():
        await hooks.send(receiver.url, "invoice.paid", {"invoice": 7})
        await until(lambda: receiver.got)
        async with mesh.batch(**both(hooks, receiver)) as batch:
            await batch.dispatch(work.call(""))
        await until(lambda: len(receiver.got) == 2)
    own, ended = receiver.messages()
    assert (own["type"], own["data"]) == ("invoice.paid", {"invoice": 7})
    assert (ended["type"], ended["data"]["finished"], ended["data"]["id"]) == ("batch.ended", 1, batch.id)


async def test_a_message_is_tried_again_under_the_same_name_and_then_set_aside(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, _ = hooked()
    receiver.answers = [
        (500, {}, b"oops"),
        (302, {"location": f"{receiver.url}&again"}, b""),
        (204, {}, b""),
        *[(503, {}, b"")] * 4,
    ]
    async with mesh.join():
        await hooks.send(receiver.url, "a")
        await until(lambda: len(receiver.got) == 3)
        names = {headers["webhook-id"] for _, headers, _ in receiver.got}
        assert len(names) == 1
        assert {path for path, _, _ in receiver.got} == {"/in?token=1"}, "a redirect is not followed"
        await hooks.send(receiver.url, "b")
        await eventually(lambda: failed(mesh), ["127.0.0.1 answered 503; it must answer 200 to 299"])
        assert len(receiver.got) == 7
        await mesh.queue(webhooks.FUNCTION).failed.retry_all()
        await until(lambda: len(receiver.got) == 8)
    assert len({headers["webhook-id"] for _, headers, _ in receiver.got[3:]}) == 1, "also after it was put back"


async def test_messages_of_one_id_have_different_names_in_ascii_and_their_tries_the_same(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    """As those of a schedule, whose jobs all have the same id: a receiver ignores a name that it has had."""
    hooked()
    function = mesh.queue(webhooks.FUNCTION)
    call = mesh.call(webhooks.FUNCTION, url=receiver.url, type="ping", data=1)
    receiver.answers = [(500, {}, b""), (204, {}, b""), *[(500, {}, b"")] * 4]
    async with mesh.join():
        await function.dispatch(call.task, id="cron:ping/Zürich")
        await until(lambda: len(receiver.got) == 2)
        await eventually(lambda: _state(function, "cron:ping/Zürich"), "gone")
        await function.dispatch(call.task, id="cron:ping/Zürich")
        await until(lambda: len(receiver.got) == 6)
        await eventually(lambda: failed(mesh), ["127.0.0.1 answered 500; it must answer 200 to 299"])
        await function.failed.retry_all()
        await until(lambda: len(receiver.got) == 7)
    names = [headers["webhook-id"] for _, headers, _ in receiver.got]
    assert names[0] == names[1] != names[2]
    assert len({*names[2:]}) == 1, "also after it was put back"
    assert all(name.startswith("msg_cron:ping/Z%C3%BCrich-") for name in names)


async def _state(queue: worqr.Queue, id: str) -> str:
    return (await queue.job(id).status()).state


async def test_a_receiver_may_ask_for_a_pause_or_for_no_more(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, _ = hooked()
    receiver.answers = [(429, {"retry-after": "600"}, b""), (410, {}, b"")]
    async with mesh.join():
        job = await hooks.send(receiver.url, "a")
        await eventually(lambda: state_of(job), "scheduled")
        due = (await job.status()).run_at
        assert due is not None
        assert 590 < due.timestamp() - time.time() < 610
        await job.cancel()
        await hooks.send(receiver.url, "b")
        await eventually(lambda: failed(mesh), ["127.0.0.1 wants no more messages (410)"])
    assert len(receiver.got) == 2


async def test_a_receiver_that_always_asks_for_a_second_does_not_use_up_the_tries(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, _ = hooked(retry=worqr.RetryPolicy(max_failures=4, min_backoff=600, max_backoff=600))
    receiver.answers = [(503, {"retry-after": "0"}, b"")] * 4
    async with mesh.join():
        job = await hooks.send(receiver.url, "a")
        await eventually(lambda: state_of(job), "scheduled")
        due = (await job.status()).run_at
        assert due is not None
        assert due.timestamp() - time.time() > 250
        await job.cancel()
    assert len(receiver.got) == 1


async def state_of(job: worqr.Job[None]) -> str:
    return (await job.status()).state


async def test_a_receiver_that_does_not_answer_and_one_that_says_too_much_hold_nothing_up(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "WITHIN", 0.3)
    hooks, _ = hooked(retry=worqr.RetryPolicy(max_failures=1))
    receiver.stays_silent.clear()
    async with mesh.join():
        await hooks.send(receiver.url, "a")
        await eventually(lambda: failed(mesh), ["127.0.0.1 did not answer within 0.3 s"])
        receiver.stays_silent.set()
        monkeypatch.setattr(webhooks, "WITHIN", 30)
        receiver.answers = [(200, headers, b"x" * 5_000_000) for headers in ({}, {"content-length": "5000000"})]
        for _ in range(2):
            job = await hooks.send(receiver.url, "b")
            await eventually(partial(state_of, job), "gone")
        assert len(await failed(mesh)) == 1, "the first"


async def test_a_message_was_taken_if_the_status_says_so_whatever_comes_of_the_body(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, _ = hooked()
    receiver.answers = [(200, {"content-length": "5"}, b"ok"), (410, {"content-length": "5"}, b"")]
    async with mesh.join():
        job = await hooks.send(receiver.url, "a")
        await eventually(partial(state_of, job), "gone")
        await hooks.send(receiver.url, "b")
        await eventually(lambda: failed(mesh), ["127.0.0.1 wants no more messages (410)"])
    assert len(receiver.got) == 2


async def test_a_host_that_is_slow_leaves_the_others_their_places(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    hooks, _ = hooked(allow=["127.0.0.0/8", "localhost"])
    receiver.stays_silent.clear()
    async with mesh.join():
        for number in range(webhooks.PER_HOST + 2):
            await hooks.send(f"{receiver.url}&slow", "a", number)
        await until(lambda: len(receiver.got) == webhooks.PER_HOST)
        await hooks.send(receiver.url.replace("127.0.0.1", "localhost"), "b")
        await until(lambda: len(receiver.got) > webhooks.PER_HOST)
        assert "slow" not in receiver.got[-1][0]
        receiver.stays_silent.set()
        await until(lambda: len(receiver.got) == webhooks.PER_HOST + 3)


async def test_secrets_may_be_one_for_each_receiver_and_two_while_one_is_replaced(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    old, new = new_secret(), new_secret()
    asked: list[str] = []

    def of(url: str) -> list[str]:
        asked.append(url)
        return [new, old]

    hooks, _ = hooked(secret=of)
    async with mesh.join():
        await hooks.send(receiver.url, "a")
        await until(lambda: receiver.got)
    [(_, headers, body)] = receiver.got
    assert asked == [receiver.url]
    for secret in (old, new):
        assert verify(secret, headers, body)["type"] == "a"
        assert standardwebhooks.Webhook(secret).verify(body, headers)["type"] == "a"
    with pytest.raises(WrongSignature, match="no signature fits"):
        verify(SECRET, headers, body)


async def test_a_program_without_a_loop_sends_a_message(mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver) -> None:
    hooks, _ = hooked()
    async with mesh.join():
        job = await trio.to_thread.run_sync(lambda: worqr.sync(hooks.send, receiver.url, "a", [1]))
        await until(lambda: receiver.got)
    [message] = receiver.messages()
    assert (message["data"], receiver.got[0][1]["webhook-id"]) == ([1], f"msg_{job.id}")


# Addresses


class Names(trio.abc.HostnameResolver):
    """Names of the test, with what they resolve to, one answer after the other; the last one stays."""

    def __init__(self, **names: list[str]) -> None:
        self.names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        self.asked.append(name)
        answers = self.names[name]
        address = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(2, 1, 6, "", (address, port))]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


async def test_a_name_whose_address_is_private_is_not_called(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    names = Names(hooks_example_org=["127.0.0.1", "93.184.216.34"])
    hooks, _ = hooked(allow=[], retry=worqr.RetryPolicy(max_failures=1))

    trio.socket.set_custom_hostname_resolver(names)
    async with mesh.join():
        await hooks.send(f"https://hooks.example.org:{receiver.port}/", "a")
        told = "hooks.example.org has no public address: write allow=['hooks.example.org'] if it is one of yours"
        await eventually(lambda: failed(mesh), [told])
    assert names.asked == ["hooks.example.org"]
    assert receiver.got == []


async def test_what_was_checked_is_called_although_the_name_means_something_else_by_then(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver
) -> None:
    names = Names(hooks_example_org=["127.0.0.1", "192.0.2.1"])
    hooks, _ = hooked(allow=["hooks.example.org"])
    trio.socket.set_custom_hostname_resolver(names)
    async with mesh.join():
        await hooks.send(f"http://hooks.example.org:{receiver.port}/", "a")
        await until(lambda: receiver.got)
    assert names.asked == ["hooks.example.org"]


async def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    mesh: worqr.Mesh, hooked: Hooked, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "WITHIN", 2)
    connect = httpcore.TrioBackend.connect_tcp

    async def connect_tcp(self: Any, host: str, port: int, timeout: float | None = None, **options: Any) -> Any:
        if host == "127.0.0.9":
            await trio.sleep(math.inf if timeout is None else timeout)
            raise httpcore.ConnectTimeout
        return await connect(self, host, port, timeout, **options)

    class Two(Names):
        async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
            return [(2, 1, 6, "", (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

    monkeypatch.setattr(httpcore.TrioBackend, "connect_tcp", connect_tcp)
    # the machine may stand still, but not at each try; without time for the next address, each fails
    hooks, _ = hooked(allow=["hooks.example.org"], retry=worqr.RetryPolicy(max_failures=3, min_backoff=0))
    trio.socket.set_custom_hostname_resolver(Two())
    async with mesh.join():
        job = await hooks.send(f"http://hooks.example.org:{receiver.port}/", "a")
        await eventually(partial(state_of, job), "gone")
    assert receiver.got


async def test_a_certificate_is_that_of_the_name(mesh: worqr.Mesh, hooked: Hooked) -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("hooks.test").configure_cert(server)
    authority.configure_trust(client)
    receiver = Receiver(server)
    names = Names(hooks_test=["127.0.0.1"], other_test=["127.0.0.1"])
    hooks, _ = hooked(allow=["*.test"], tls=client, retry=worqr.RetryPolicy(max_failures=1))

    trio.socket.set_custom_hostname_resolver(names)
    async with mesh.join():
        await hooks.send(f"https://hooks.test:{receiver.port}/", "a")
        await until(lambda: receiver.got)
        await hooks.send(f"https://other.test:{receiver.port}/", "a")
        await until(lambda: len(names.asked) == 2)
        await eventually(lambda: counted(mesh), 1)
        [reason] = await failed(mesh)
    assert "certificate" in reason.lower()
    assert len(receiver.got) == 1
    receiver.server.shutdown()
    receiver.server.server_close()


async def test_the_certificates_are_read_once(
    mesh: worqr.Mesh, hooked: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, made = trustme.CA(), list[ssl.SSLContext]()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)

    def trusting() -> ssl.SSLContext:
        made.append(ssl.create_default_context())
        authority.configure_trust(made[-1])
        return made[-1]

    monkeypatch.setattr(httpcore, "default_ssl_context", trusting)
    receiver, (hooks, _) = Receiver(server), hooked()
    async with mesh.join():
        for _ in range(2):
            await hooks.send(f"https://127.0.0.1:{receiver.port}/", "a")
        await until(lambda: len(receiver.got) == 2)
    assert len(made) == 1
    receiver.server.shutdown()
    receiver.server.server_close()


async def counted(mesh: worqr.Mesh) -> int:
    return len(await failed(mesh))


PRIVATE_NETWORKS = [
    ip_network(each)
    for each in (
        *(
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.168.0.0/16",
        ),
        *(
            "192.0.0.0/24",
            "192.0.2.0/24",
            "198.18.0.0/15",
            "224.0.0.0/4",
            "240.0.0.0/4",
            "::/127",
            "64:ff9b:1::/48",
            "fc00::/7",
            "fe80::/10",
            "fec0::/10",
            "ff00::/8",
        ),
    )
]


@given(st.data())
def test_no_private_address_is_public_in_whatever_form_it_comes(data: st.DataObject) -> None:
    network = data.draw(st.sampled_from(PRIVATE_NETWORKS))
    address = network[data.draw(st.integers(0, network.num_addresses - 1))]
    forms = [str(address)]
    if isinstance(address, IPv4Address):
        inner = int(address)
        forms += [f"::ffff:{address}", str(IPv6Address((0x2002 << 112) | (inner << 80) | 1))]
        forms += [
            str(IPv6Address((0x64FF9B << 96) | inner)),
            str(IPv6Address((0x20010000 << 96) | (inner ^ 0xFFFFFFFF))),
        ]
    else:
        forms.append(f"{address}%eth0")
    assert not any(map(is_public, forms)), forms


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_a_public_address_is_public(address: str) -> None:
    assert is_public(address)


# What is refused at once


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("", "write https://HOST/PATH"),
        ("ftp://example.org/", "write https://HOST/PATH"),
        ("https:///path", "write https://HOST/PATH"),
        ("https://example.org:port/", "not valid"),
        ("https://example..org/", "not valid"),
        ("https://" + "x" * 64 + ".org/", "not valid"),
        ("https://ada:pw@example.org/", "has a space or a user"),
        ("https://example.org/a b", "has a space or a user"),
        ("https://example.org/\r\nx: y", "must be ASCII"),
        ("https://bücher.example/", "must be ASCII"),
        ("https://example.org/" + "x" * 2048, "at most 2,048"),
        ("http://example.org/", r"write https://, or allow=\['example.org'\]"),
        (7, "must be a str"),
    ],
)
def test_a_url_that_cannot_be_called_is_refused_before_anything_is_sent(hooked: Hooked, url: Any, remedy: str) -> None:
    hooks, _ = hooked()
    with pytest.raises(worqr.UsageError, match=remedy):
        hooks.call(url, "a")


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_?", "whsec_YWJj", [], 7, b"whsec_", ["whsec_YWJj"], None])
def test_a_secret_that_is_none_is_refused_and_not_said(mesh: worqr.Mesh, secret: Any) -> None:
    with pytest.raises(worqr.UsageError, match=r"new_secret\(\)") as refused:
        Webhooks(mesh, secret=secret)
    assert "YWJj" not in str(refused.value)


@pytest.mark.parametrize("allow", ["example.org", ["http://example.org"], ["a:80"], ["10.0.0.0/99"], [7], [""]])
def test_what_is_allowed_are_hosts_and_networks(mesh: worqr.Mesh, allow: Any) -> None:
    with pytest.raises(worqr.UsageError, match="allow"):
        Webhooks(mesh, secret=SECRET, allow=allow)


# The verifier


@given(st.binary(max_size=50), st.integers(0, 2**32))
def test_a_receiver_knows_what_was_signed_and_nothing_else(noise: bytes, stamp: int) -> None:
    body = json.dumps({"noise": noise.hex()}).encode()
    headers = {
        "Webhook-Id": "msg_1",
        "Webhook-Timestamp": str(stamp),
        "Webhook-Signature": sign(SECRET, "msg_1", stamp, body),
    }
    assert verify(SECRET, headers, body, now=stamp + 299) == {"noise": noise.hex()}
    for wrong in (
        {"Webhook-Id": "msg_2"},
        {"Webhook-Timestamp": str(stamp + 1)},
        {"Webhook-Timestamp": "soon"},
        {"Webhook-Timestamp": "9" * 400},
        {"Webhook-Signature": "v1,"},
        {"Webhook-Signature": "v1,é"},
        {"Webhook-Signature": "v1,\udcff"},
        {"Webhook-Id": "\udcff"},
        {"Webhook-Signature": headers["Webhook-Signature"].replace("v1,", "v1a,")},
    ):
        with pytest.raises(WrongSignature):
            verify(SECRET, headers | wrong, body, now=stamp)
    for changed, now in ((body + b" ", stamp), (body, stamp + 301), (body, stamp - 301)):
        with pytest.raises(WrongSignature):
            verify(SECRET, headers, changed, now=now)
    with pytest.raises(WrongSignature, match="are needed"):
        verify(SECRET, {}, body)

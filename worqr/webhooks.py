"""Web-hooks: messages to an HTTP address, signed by the specification Standard Webhooks.

The specification is at https://www.standardwebhooks.com.

`Webhooks` declares the function ``worqr.webhook``. A message is a call of it: a follow-up of a job or a batch, or a job.
So messages have retries, a lane for each host and a dead-letter queue. `verify` is for receivers, which
need no mesh. Sending needs the package httpcore: ``pip install 'worqr[webhooks]'``.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import importlib.util
import json
import random
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import SplitResult, quote, urlsplit

import trio

from worqr.batches import BatchInfo, EndedJob
from worqr.errors import UsageError, WorqrError
from worqr.limits import Lanes, Limit
from worqr.peer.context import current
from worqr.peer.run import current_run
from worqr.policy import Failure, Policy, Retry, RetryPolicy
from worqr.validation import Seconds, seconds

if TYPE_CHECKING:
    import ssl

    import httpcore

    from worqr.client.job import Job
    from worqr.client.producer import Call
    from worqr.functions.function import Bound
    from worqr.functions.registry import Registry

__all__ = ["NotTaken", "Webhooks", "WrongSignature", "new_secret", "verify"]

FUNCTION: Final = "worqr.webhook"
WITHIN: Final = 10.0
"""Seconds for one try, from the look-up of the name to the end of the reply."""
REPLY_WITHIN: Final = 1.0
"""Seconds of these for what comes after the status."""
MAX_REPLY: Final = 64 * 1024
"""Bytes of a reply that are read, if it says how many it has. Nothing looks at them."""
PER_HOST: Final = 10
"""Messages that are sent to one host at once, in the whole mesh: a slow one must not take all places of the workers."""
MAX_URL: Final = 2048
TOLERANCE: Final = 300.0
TRIES: Final = 10
_PAUSES: Final = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Seconds after each failed try, as the specification suggests."""
_PREFIX: Final = "whsec_"
_KEY_BYTES: Final = range(24, 65)
_NAT64: Final = IPv6Network("64:ff9b::/96")
_ASSIGNED: Final = IPv4Network("192.0.0.0/24")
"""For protocols of a network, and metadata services. Python before 3.11.10 calls most of it global."""
_OWN_NAT64: Final = IPv6Network("64:ff9b:1::/48")
"""For use inside a network, which decides where in it an IPv4 address stands."""

Secret = str | Collection[str]
"""``whsec_`` and 24 to 64 bytes in base64, or a list of such: while a secret is replaced, the new one and the old one."""


Address = IPv4Address | IPv6Address


class WrongSignature(WorqrError):
    """A message is not from the one who has the secret, was changed on its way, or is too old."""


class NotTaken(WorqrError):
    """A receiver answered with something else than 200 to 299. The message is sent again."""


def new_secret() -> str:
    """Return a new random secret: ``whsec_`` and 32 bytes in base64."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(secret: Secret, name: str, timestamp: int, body: bytes) -> str:
    """Return the header ``webhook-signature``: a signature with each secret, with spaces between them.

    Args:
        secret: One, or several.
        name: The header ``webhook-id``.
        timestamp: The header ``webhook-timestamp``: Unix seconds.
        body: The body, byte for byte.
    """
    signed = b".".join([name.encode(), str(timestamp).encode(), body])
    made = (hmac.digest(key, signed, hashlib.sha256) for key in _keys(secret))
    return " ".join("v1," + base64.b64encode(each).decode() for each in made)


def verify(
    secret: Secret,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance: Seconds = TOLERANCE,
    now: float | None = None,
) -> Any:
    """Return the decoded JSON of a message, if its signature is right. For receivers, in any program.

    A message may come again: keep ``headers["webhook-id"]`` and ignore what you have had.

    Args:
        secret: The secret of this receiver, or several while it is replaced.
        headers: The headers of the request. The case of the names does not matter.
        body: The body as it arrived, byte for byte.
        tolerance: Seconds that the message may be old, or ahead of this clock.
        now: Unix seconds. Default: the present time.

    Raises:
        WrongSignature: A header is missing or malformed, no signature fits, the time is too far away, or the body is no JSON.
        UsageError: The secret is not valid.
    """
    found = {name.lower(): value for name, value in headers.items() if name.lower().startswith("webhook-")}
    try:
        name, stamp, given = (found[f"webhook-{each}"] for each in ("id", "timestamp", "signature"))
        timestamp = int(stamp)
        away = abs(float(time.time() if now is None else now) - timestamp)
        candidates = given.encode().split(b" ")
        name.encode()  # what is no text cannot be signed
    except (KeyError, ValueError, OverflowError):
        raise WrongSignature("the headers webhook-id, webhook-timestamp and webhook-signature are needed") from None
    if away > seconds(tolerance, "tolerance"):
        raise WrongSignature(
            f"the message is {away:.0f} s old or ahead: check the clocks, or it was sent again by another"
        )
    expected = [each.encode() for each in sign(secret, name, timestamp, body).split()]
    pairs = [(each, one) for each in candidates for one in expected]
    if not any([hmac.compare_digest(each, one) for each, one in pairs]):  # noqa: C419 - all of them, in the same time
        raise WrongSignature("no signature fits: the secret is another one, or the body was changed or parsed before")
    try:
        return json.loads(body)
    except ValueError:
        raise WrongSignature("the body is signed, but is no JSON") from None


class Webhooks:
    """Web-hooks of a mesh. Declare them where you declare its functions: its workers send the messages.

    Args:
        mesh: The mesh or registry that gets the function ``worqr.webhook``.
        secret: What messages are signed with: one for all receivers, or a function that returns that of a URL. It is called for
            each try, on the Trio loop, and must not block.
        allow: Hosts and networks that may be called at private and loopback addresses, and by ``http://``:
            ``["*.internal.example.org", "10.1.0.0/16"]``. All other hosts need a public address and ``https://``.
        tls: The TLS context. Default: the certificates of the package certifi.
        retry: When a message is tried again. Default: ten tries in three days, after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h,
            20 h and 24 h.

    Raises:
        UsageError: An argument is not valid, or httpcore is not installed.
    """

    def __init__(
        self,
        mesh: Registry,
        *,
        secret: Secret | Callable[[str], Secret],
        allow: Collection[str] = (),
        tls: ssl.SSLContext | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        if importlib.util.find_spec("httpcore") is None:
            raise UsageError("web-hooks need the package httpcore: pip install 'worqr[webhooks]'")
        if not callable(secret):
            _keys(secret)
        if isinstance(allow, str):
            raise UsageError(f"allow must be a list, as in allow=[{allow!r}]")
        self._secret = secret
        self._allowed = [_place(each) for each in allow]
        self._tls = tls
        policy = RetryPolicy(max_failures=TRIES, backoff=_pause) if retry is None else retry
        self._policy = Policy().with_retry(policy)

        lanes = Lanes(limit=Limit(PER_HOST))

        @mesh.task(name=FUNCTION, retry=policy, timeout=WITHIN + 5, runs_in="loop", concurrency=100, lanes=lanes)
        async def deliver(url: str, type: str, data: Any) -> None:
            await self._deliver(url, type, data)

        self._function = deliver

    def call(self, url: str, type: str = "", data: object = None) -> Call[None]:
        """Return a call that sends a message, for ``then=`` and ``otherwise=`` of a job or a batch, or for an outbox.

        Args:
            url: Where to send it: ``https://``, at most 2,048 characters, without a user.
            type: The type of the event, ``invoice.paid``. Default: that of the job or batch that has ended: ``job.finished``,
                ``job.failed``, ``job.cancelled``, ``batch.ended``.
            data: What JSON can encode. Default: the job or the batch that has ended.

        Raises:
            UsageError: The URL is not valid, or the data cannot be encoded.
        """
        return self._to(url).call(url, type, data)

    def send(self, url: str, type: str, data: object = None) -> Coroutine[Any, Any, Job[None]]:
        """Dispatch a message of your own.

        Args:
            url: As `call`.
            type: The type of the event, ``invoice.paid``.
            data: What JSON can encode.

        Returns:
            Its job: its state is that of the delivery.

        Raises:
            UsageError: As `call`; or outside `connect` and `join`.
            QueueFull: As any dispatch.
            Unavailable: The server did not reply within `patience`.
        """
        return self._to(url).dispatch(url, type, data)

    def _to(self, url: str) -> Bound[[str, str, Any], None]:
        """Return the function with the lane of the URL's host."""
        return self._function.options(lane=(self._checked(url).hostname or "")[-200:])

    def _checked(self, url: object) -> SplitResult:
        if not isinstance(url, str):
            raise UsageError(f"the URL of a web-hook must be a str, not {url!r}")
        remedy = "write https://HOST/PATH"
        try:
            found = urlsplit(url)
            _ = found.port, (found.hostname or "").encode("idna")  # as the look-up of the name does
        except ValueError as error:
            raise UsageError(f"the URL of a web-hook is not valid ({error}): {remedy}") from None
        host = found.hostname
        if (
            found.scheme not in {"https", "http"}
            or not host
            or len(url) > MAX_URL
            or not url.isascii()
            or not url.isprintable()
        ):
            raise UsageError(f"the URL of a web-hook must be ASCII and have at most {MAX_URL:,} characters: {remedy}")
        if " " in url or found.username is not None or found.password is not None:
            raise UsageError(f"the URL of a web-hook has a space or a user: the signature says who sends it; {remedy}")
        if found.scheme == "http" and not self._is_allowed(host):
            raise UsageError(f"messages to {host} would not be encrypted: write https://, or allow=[{host!r}]")
        return found

    def _is_allowed(self, host: str, address: Address | None = None) -> bool:
        return any(place(host, address) for place in self._allowed)

    async def _deliver(self, url: str, type: str, data: Any) -> None:
        """Send one message. Raises if it was not taken."""
        try:
            found = self._checked(url)
        except UsageError as error:
            raise Failure(str(error)) from None
        job, batch = current().ended_job, current().ended_batch
        body = json.dumps(_message(type, data, job, batch), separators=(",", ":")).encode()
        secret = self._secret(url) if callable(self._secret) else self._secret
        name, stamp = f"msg_{_message_id()}", int(time.time())
        headers = {
            "host": found.netloc,
            "content-type": "application/json",
            "user-agent": "worqr",
            "content-length": str(len(body)),
            "webhook-id": name,
            "webhook-timestamp": str(stamp),
            "webhook-signature": sign(secret, name, stamp, body),
        }
        with trio.move_on_after(WITHIN) as scope:
            try:
                await self._post(url, headers, body)
            except OSError as error:
                raise NotTaken(f"{found.hostname} cannot be reached ({error})") from error
        if scope.cancelled_caught:
            raise TimeoutError(f"{found.hostname} did not answer within {WITHIN:g} s")

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send the request, and read the status. Raises if it is no success."""
        import httpcore

        network = cast("httpcore.AsyncNetworkBackend", _Network(self._is_allowed))
        try:
            async with (
                httpcore.AsyncConnectionPool(ssl_context=self._context(), network_backend=network) as pool,
                pool.stream("POST", url, headers=[*headers.items()], content=body) as response,
            ):
                found = {name.lower(): value for name, value in response.headers}
                length = found.get(b"content-length", b"")
                if length.isdigit() and len(length) < 9 and int(length) <= MAX_REPLY:
                    # Else the receiver would see the connection break. The status alone decides.
                    with (
                        trio.move_on_after(REPLY_WITHIN),
                        contextlib.suppress(httpcore.NetworkError, httpcore.ProtocolError),
                    ):
                        await response.aread()
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise OSError(_reason(error)) from error
        least = self._policy.delay_after(current().failures, Retry.__name__, lambda _: None)
        _judge(urlsplit(url).hostname or "", response.status, found.get(b"retry-after", b""), least)

    def _context(self) -> ssl.SSLContext:
        """Return the TLS context. To read all certificates takes 30 ms, in which the event loop stands still: it is made once."""
        if self._tls is None:
            import httpcore

            self._tls = httpcore.default_ssl_context()
        return self._tls


def _reason(error: BaseException | None) -> str:
    """Return the first text among an error and its causes: those of httpcore often have none."""
    while error is not None:
        if text := str(error):
            return text
        error = error.__cause__ or error.__context__
    return "the connection broke"


def _judge(host: str, status: int, after: bytes, least: float) -> None:
    """Raise if a reply says that the message was not taken.

    The next try is after `least` seconds or more: a receiver that is away for an hour, and always asks for a second, must not use
    up the tries.
    """
    if 200 <= status < 300:
        return
    if status == 410:
        raise Failure(f"{host} wants no more messages (410)")
    if status in {429, 503} and after.isdigit():
        raise Retry(f"{host} asks for a pause ({status})", delay=max(least, min(int(after[:9]), _PAUSES[-1])))
    why = "redirects are not followed: give the new address" if 300 <= status < 400 else "it must answer 200 to 299"
    raise NotTaken(f"{host} answered {status}; {why}")


def _message_id() -> str:
    """Return what the message of this run has in each try, and no other message has.

    An id of the program's own may be used again, as that of a schedule is, and has any characters.
    """
    run = current_run.get()
    if run.id.startswith("@"):
        return run.id
    first = b"" if run.record is None else run.record.get(b"first", b"")
    return f"{quote(run.id, safe='/:')}-{first.decode('ascii', 'replace')}"


def _pause(failures: int, _error: str) -> float:
    """Return the seconds until the next try, up to a tenth more."""
    return _PAUSES[min(failures, len(_PAUSES)) - 1] * random.uniform(1, 1.1)


def _message(type: str, data: Any, job: EndedJob | None, batch: BatchInfo | None) -> dict[str, Any]:
    """Return the message: type, time, and what has happened."""
    kind, ended = "message", None
    if job is not None:
        kind, ended = f"job.{job.outcome}", job.ended
        data = _facts_of(job) if data is None else data
    elif batch is not None:
        kind, ended = "batch.ended", batch.ended
        data = {name: getattr(batch, name) for name in _BATCH_FACTS} if data is None else data
    moment = (ended or datetime.now(UTC)).isoformat().replace("+00:00", "Z")
    return {"type": type or kind, "timestamp": moment, "data": data}


_BATCH_FACTS: Final = ("id", "queue", "jobs", "finished", "failed", "cancelled", "meta", "cancel_reason")


def _facts_of(job: EndedJob) -> dict[str, Any]:
    facts: dict[str, Any] = {name: getattr(job, name) for name in ("id", "queue", "outcome", "reason", "meta")}
    facts["meta"] = dict(job.meta)
    if job.error is not None:
        facts["error"] = {"type": job.error.type, "message": job.error.message}
    if job.outcome == "finished":
        try:
            facts["result"] = job.result()
            json.dumps(facts["result"], allow_nan=False)
        except Exception:  # larger than a follow-up gets, or nothing that JSON has
            facts["result"] = None
    return facts


# Addresses


class _Network:
    """Opens connections for httpcore, to addresses that may be called. What is checked is what is connected to."""

    def __init__(self, is_allowed: Callable[[str, Address], bool]) -> None:
        self._is_allowed = is_allowed

    async def connect_tcp(self, host: str, port: int, **options: Any) -> Any:
        import httpcore

        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        usable = [
            each for each in addresses if is_public(each) or self._is_allowed(host, ip_address(each.partition("%")[0]))
        ]
        if not usable:
            raise Failure(f"{host} has no public address: write allow=[{host!r}] if it is one of yours")
        opener: Any = httpcore.TrioBackend()
        for address in usable[:-1]:  # one that does not answer leaves the others their share of the time
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await opener.connect_tcp(address, port, **options | {"timeout": WITHIN / len(usable)})
        return await opener.connect_tcp(usable[-1], port, **options)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)


def is_public(address: str) -> bool:
    """Return True if this address is reached over the internet, and so is the IPv4 address in it, if there is one."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        if ip in _OWN_NAT64 or ip.is_site_local:
            return False
        if ip in _NAT64:
            return is_public(str(IPv4Address(int(ip) & 0xFFFF_FFFF)))
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if any(each is not None and not is_public(str(each)) for each in inner):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and ip not in _ASSIGNED


def _place(text: object) -> Callable[[str, Address | None], bool]:
    """Return what says whether a host or an address is meant by an entry of `allow`."""
    if not isinstance(text, str) or not text:
        raise UsageError(f"allow has hosts and networks, such as '*.example.org' and '10.1.0.0/16', not {text!r}")
    try:
        network = ip_network(text)
    except ValueError:
        if "/" in text or ":" in text:
            raise UsageError(f"allow has a host or a network, without scheme, port and path, not {text!r}") from None
        pattern = text.lower()
        return lambda host, _: fnmatchcase(host.lower(), pattern)

    def meant(host: str, address: Address | None) -> bool:
        if address is None:
            try:
                address = ip_address(host.strip("[]"))
            except ValueError:
                return False
        return address in network

    return meant


# Secrets


def _keys(secret: object) -> list[bytes]:
    """Return the keys of a secret, or of several. No message has a part of a secret."""
    several = isinstance(secret, Collection) and not isinstance(secret, str)
    given = cast("Collection[object]", secret if several else [secret])
    keys = [_key(each) for each in given]
    if not keys:
        raise UsageError(f"secret is an empty list; {_HOW_TO_MAKE}")
    return keys


_HOW_TO_MAKE: Final = "make one with worqr.webhooks.new_secret(), and keep it where your passwords are"


def _key(secret: object) -> bytes:
    try:
        assert isinstance(secret, str)
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (AssertionError, binascii.Error, ValueError):
        raise UsageError(f"a secret of web-hooks is whsec_ and base64; {_HOW_TO_MAKE}") from None
    if len(key) not in _KEY_BYTES:
        raise UsageError(f"a secret of web-hooks has 24 to 64 bytes, not {len(key)}; {_HOW_TO_MAKE}")
    return key

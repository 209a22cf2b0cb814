"""`SentinelEndpoint`: finds the primary of a service. A thread asks all Sentinels every second, and at once after `invalidate()`.

Not here: the consequences of a move for open connections (`link`).

Each Sentinel has its own view. After a failover the Sentinel that led it has the new view first, and the others follow within
a second. A Sentinel that was cut off may name the old primary for hours. That primary accepts writes, which will be lost.

Sentinels number their decisions (the config-epoch), so the highest number wins. A majority is not needed: it agreed when the
number was made. The last view of a silent Sentinel counts for a while, so that an outdated one cannot win while the others
restart. After that it is dropped, so that newly installed Sentinels, which count from 0, win in the end.

The result is a hint: `opening` checks that the server itself is a primary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from worqr.errors import RefusedByServer, Unavailable, WorqrError
from worqr.link.connector import EndpointWatcher, OnSilence, StaticEndpoint, Wire, WireHolder, error_of, open_connection
from worqr.link.driver import copy_of
from worqr.link.failures import ConnectionLost, ErrorReply
from worqr.link.log_thread import LogThread
from worqr.link.settings import Endpoint, LinkSettings

logger: logging.Logger = logging.getLogger(__name__)

_TIMEOUT = 1.0  # seconds for connecting to a Sentinel, and for its reply
_LOOK_EVERY = 1.0  # seconds between looks; writes to a primary that was replaced are lost
_LOOK_AGAIN = 0.25  # seconds between looks after `invalidate()`, or during a failover, at least
_LEARN_EVERY = 30.0  # seconds between requests for the other Sentinels
_BELIEVED = 30.0  # seconds for which the last view of a silent Sentinel counts
_TRY_AGAIN = 10.0  # seconds until a silent Sentinel is tried again, while others reply
_FIND = 3.0  # seconds that a caller waits for the first look
_SLICE = 0.1  # seconds: how late `close` may be noticed


class SentinelReport(msgspec.Struct, frozen=True):
    """The view of one Sentinel: the primary, the number of the decision, a failover in progress, and the time of the reply
    (monotonic).
    """

    primary: Endpoint
    epoch: int
    failing_over: bool
    at: float


class SentinelEndpoint:
    """Finds the primary of a service. Readable from any thread.

    Attributes:
        name: the URL without its secrets.
        primary: its latest known address.
        watcher: the Sentinel thread.

    Args:
        moved: called in the Sentinel thread when the primary has changed.
    """

    def __init__(self, settings: LinkSettings, log_thread: LogThread, moved: Callable[[], None]) -> None:
        self.name: str = settings.address.redacted
        self.primary: Endpoint | None = None
        self._settings = settings
        self._log_thread = log_thread
        self._moved = moved
        self._sentinels: dict[Endpoint, Sentinel] = {}
        self._error: WorqrError = Unavailable("no Sentinel has answered yet")
        self._blind_since: float | None = None
        self._failing_over = False
        self._looked = threading.Event()
        self.watcher: EndpointWatcher = EndpointWatcher(
            "worqr-sentinel", self._look, lambda: tuple(self._sentinels.values())
        )
        self._know(settings.address.seeds)

    def resolve(self, on_silence: OnSilence | None = None) -> Endpoint:
        """Return the latest known address of the primary; wait for the first look, if necessary.

        Raises:
            Unavailable: no Sentinel replies.
            RefusedByServer: no Sentinel has the service, or they refuse the user.
        """
        end = time.monotonic() + _FIND
        while not self._looked.wait(_SLICE) and time.monotonic() < end:
            if on_silence is not None:
                on_silence()
        primary = self.primary
        if primary is None:
            raise copy_of(self._error)
        return primary

    def is_current(self, endpoint: Endpoint) -> bool:
        return endpoint == self.primary

    def invalidate(self) -> None:
        """It was not there, or is no primary: look at once."""
        self.watcher.invalidate()

    def close(self) -> None:
        """End the Sentinel thread, and the wait for its first look."""
        self._looked.set()
        self.watcher.end()

    # The Sentinel thread

    def _look(self) -> tuple[float, float]:
        """Ask the Sentinels; return the pauses for `EndpointWatcher`."""
        try:
            self.look_once()
        except Exception as exc:  # a bug must cost one look, not all later ones
            text = "asking the Sentinels failed, trying again; this is a bug of worqr, please report it"
            self._log_thread.emit(logger, "link.sentinel", text, exc_info=exc)
        self._looked.set()
        return _LOOK_AGAIN, 0.0 if self._failing_over else _LOOK_EVERY - _LOOK_AGAIN

    def look_once(self) -> None:
        """Ask all Sentinels, and use the best view. Silent ones come last, so that they delay no others."""
        asked, errors = set[Sentinel](), list[WorqrError]()
        while some := [each for each in self._sentinels.values() if not (each.silences or each in asked)]:
            self._ask(some, errors)
            asked.update(some)
        self._decide()
        answered = len(errors) < len(asked)
        now = time.monotonic()
        silent = [each for each in self._sentinels.values() if each.silences and each not in asked]
        silent = [each for each in silent if not answered or each.not_before <= now]
        self._ask(silent, errors)
        self._decide()
        answered = len(errors) < len(asked) + len(silent)
        if answered:
            self._forget()
        if not self.watcher.ended.is_set():
            self._tell(errors, answered=answered)

    def _ask(self, sentinels: list[Sentinel], errors: list[WorqrError]) -> None:
        for sentinel in sentinels:
            try:
                sentinel.ask(self._settings, self.watcher.check)
            except WorqrError as error:
                errors.append(error)
            self._know(sentinel.others)

    def _know(self, endpoints: Iterable[Endpoint]) -> None:
        new = {endpoint: Sentinel(endpoint) for endpoint in endpoints if endpoint not in self._sentinels}
        if new:
            self._sentinels = self._sentinels | new  # a new set, because another thread may be reading the old one

    def _forget(self) -> None:
        """Forget the silent Sentinels that no other Sentinel lists any more."""
        known = {*self._settings.address.seeds}
        known.update(*(each.others for each in self._sentinels.values() if not each.silences))
        for endpoint, sentinel in tuple(self._sentinels.items()):
            if sentinel.silences and endpoint not in known:
                self._sentinels = {each: other for each, other in self._sentinels.items() if each != endpoint}

    def _decide(self) -> None:
        """Choose the primary by the highest decision. Ties go to the majority, then to the present primary."""
        oldest = time.monotonic() - _BELIEVED
        views = [each.view for each in self._sentinels.values() if each.view is not None and each.view.at > oldest]
        self._failing_over = any(view.failing_over for view in views)
        if not views:
            return
        epoch = max(view.epoch for view in views)
        votes = Counter(view.primary for view in views if view.epoch == epoch)
        before = self.primary
        best = max(votes, key=lambda primary: (votes[primary], primary == before))
        if best != before:
            self.primary = best
            self._looked.set()
            if before is not None:
                text = "the primary of %(service)s is %(server)s now; it was %(before)s"
                server = str(best)
                self._log_thread.emit(logger, "link.moved", text, service=self.name, server=server, before=str(before))
                self._moved()

    def _tell(self, errors: list[WorqrError], *, answered: bool) -> None:
        """Store why no Sentinel could name the primary, for callers; log it once, if an older address is still in use."""
        if answered:
            if self._blind_since is not None:
                gone = time.monotonic() - self._blind_since
                text = "the Sentinels of %(service)s answer again after %(duration).1f s"
                self._log_thread.emit(logger, "link.sighted", text, service=self.name, duration=gone)
            self._blind_since = None
            return
        self._error = error_of(errors)
        if self.primary is not None and self._blind_since is None and not self.watcher.ended.is_set():
            self._blind_since = time.monotonic()
            text = (
                "no Sentinel of %(service)s answers (%(error)s); continuing with %(server)s, which was the primary, and may not "
                "be any more"
            )
            self._log_thread.emit(
                logger, "link.blind", text, service=self.name, error=str(self._error), server=str(self.primary)
            )


class Sentinel(WireHolder):
    """One Sentinel, and the connection to it. Only the Sentinel thread uses it, except for `interrupt`.

    Attributes:
        view: its last reply.
        others: the other Sentinels that it lists.
        silences: the number of failures in a row.
        not_before: when to try again, while others reply (monotonic).
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self.view: SentinelReport | None = None
        self.others: frozenset[Endpoint] = frozenset()
        self.silences: int = 0
        self.not_before: float = 0.0
        self._endpoint = endpoint
        self._learned_at = 0.0

    def ask(self, settings: LinkSettings, on_silence: OnSilence) -> None:
        """Ask for its view, and now and then for the other Sentinels.

        Raises:
            Unavailable: it does not reply.
            RefusedByServer: it is not a Sentinel, does not have the service, or refuses the user.
        """
        try:
            wire = self.wire
            if wire is None:
                wire = self.hold(self._open(settings, on_silence))
            self._exchange(wire, settings.address.service)
        except (ConnectionLost, WorqrError) as error:
            self.close()
            self.silences += 1
            self.not_before = time.monotonic() + _TRY_AGAIN
            if isinstance(error, ConnectionLost | Unavailable):
                raise Unavailable(f"Sentinel {self._endpoint}: {error}") from error
            raise
        self.silences = 0

    def _open(self, settings: LinkSettings, on_silence: OnSilence) -> Wire:
        self._learned_at = 0.0
        resolver = StaticEndpoint(f"{self._endpoint} (a Sentinel)", self._endpoint)
        try:
            return open_connection(
                *(settings, resolver, "sentinel"),
                timeout=_TIMEOUT,
                on_silence=on_silence,
                sentinel=True,
                first=self.view is None,
            )
        except RefusedByServer as error:
            if not any(word in str(error) for word in ("NOAUTH", "WRONGPASS", "AUTH <password>")):
                raise
            hint = "; what a Sentinel wants to hear goes into sentinel_username and sentinel_password"
            raise RefusedByServer(f"{error}{hint}") from error.__cause__

    def _exchange(self, wire: Wire, service: str) -> None:
        now = time.monotonic()
        learn = not self._learned_at or now - self._learned_at > _LEARN_EVERY
        place, facts, others = wire.exchange(
            [
                ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service),
                ("SENTINEL", "MASTER", service),
                ("SENTINEL", "SENTINELS", service) if learn else ("PING",),
            ]
        )
        if isinstance(place, ErrorReply):
            raise RefusedByServer(
                f"the server at {self._endpoint} is no Sentinel, or does not let us ask ({place}); for a server that stands "
                "alone write redis://, and name a user of the Sentinels in sentinel_username and sentinel_password"
            )
        if not place:
            self.view = None
            raise RefusedByServer(self._unknown(wire, service))
        failing_over = b"failover_in_progress" in _fields(facts).get(b"flags", b"")
        self.view = SentinelReport(_endpoint(place[0], place[1]), _number(facts, b"config-epoch"), failing_over, now)
        if learn:
            self._learned_at = now
            self.others = frozenset(
                _endpoint(each[b"ip"], each[b"port"]) for each in _rows(others) if each.get(b"port")
            )

    def _unknown(self, wire: Wire, service: str) -> str:
        """It watches something else."""
        (masters,) = wire.exchange([("SENTINEL", "MASTERS")])
        names = [each.get(b"name", b"").decode("utf-8", "replace") for each in _rows(masters)]
        known = f"; it knows {', '.join(map(repr, sorted(names)))}" if names else ""
        return f"the Sentinel at {self._endpoint} knows no service {service!r}{known}"


def _endpoint(host: bytes, port: bytes) -> Endpoint:
    return Endpoint(host.decode("utf-8", "replace"), int(port))


def _fields(flat: Any) -> dict[bytes, bytes]:
    """Return a dict from a Sentinel's list of alternating names and values."""
    words = cast("list[bytes]", flat) if isinstance(flat, list) else []
    return dict(zip(words[::2], words[1::2], strict=False))


def _rows(answer: Any) -> list[dict[bytes, bytes]]:
    """Return a dict for each item of a list; an empty list if the user has no permission."""
    return [] if isinstance(answer, ErrorReply) else [_fields(each) for each in answer]


def _number(flat: Any, name: bytes) -> int:
    text = _fields(flat).get(name, b"")
    return int(text) if text.isdigit() else 0

"""`Topology`: which node of a cluster has which slot. A thread with its own connection asks every few seconds, and soon after
`invalidate()`.

Here: `Topology`, and its resolvers. Not here: which requests are sent to which node (`cluster_router`).

Any node can be asked, and each has its own view. A node that was cut off, or has just been
replaced, may be wrong for a while.
So the view of a node that reports a working cluster is preferred. A redirect (``MOVED``) is believed at once: if it is wrong,
it costs one more request.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from worqr.errors import RefusedByServer, Unavailable, WorqrBug, WorqrError
from worqr.link.connection import (
    ConnectionLost,
    ErrorAction,
    ErrorReply,
    OnSilence,
    StaticEndpoint,
    Wire,
    open_connection,
    remedy_for,
)
from worqr.link.connector import Outage, pause_after
from worqr.link.endpoint_watcher import EndpointWatcher, WireHolder, error_of
from worqr.link.log_thread import LogThread
from worqr.link.session import SLOTS
from worqr.link.settings import Endpoint, LinkSettings

logger: logging.Logger = logging.getLogger(__name__)

_TIMEOUT = 1.0  # seconds for connecting to a node, and for its reply
_LOOK_EVERY = 5.0  # seconds between regular looks
_LOOK_AGAIN = 0.25  # seconds between looks after `invalidate()`, at least


class TopologyView:
    """The owners of all slots, as one node reported them. Immutable.

    Attributes:
        owners: by slot; None: no known owner.
        primaries: the nodes that have a slot.
        works: the node reports that the cluster works.
    """

    __slots__ = ("owners", "primaries", "works")

    def __init__(self, owners: Sequence[Endpoint | None], *, works: bool = True) -> None:
        self.owners: tuple[Endpoint | None, ...] = tuple(owners)
        once = {id(owner): owner for owner in self.owners}  # a hash for each object, not for each of 16384 slots
        self.primaries: frozenset[Endpoint] = frozenset(owner for owner in once.values() if owner is not None)
        self.works: bool = works


class Hooks(Protocol):
    """The callbacks of a topology. They are posted to the driver's loop, and must not raise."""

    def changed(self) -> None:
        """Slots have other owners than before, or the owners are known for the first time."""
        ...

    def meanwhile(self) -> None:
        """The owners are not known yet, or not all: expire late requests. Called every second at least."""
        ...

    def looked(self, error: WorqrError | None) -> None:
        """A look has ended; `error`: no node could report the owners."""
        ...


class Topology:
    """The nodes of one cluster, by the latest reports. Readable from any thread.

    Attributes:
        view: the owners of the slots. Replaced, never changed, so that a reader gets consistent answers.
        why: the error of the last look; empty if it succeeded.
        watcher: the thread.
        outage: the time until the owners are known for the first time.
    """

    def __init__(
        self, settings: LinkSettings, log_thread: LogThread, hooks: Hooks, post: Callable[[Callable[[], object]], None]
    ) -> None:
        self.view: TopologyView = TopologyView([None] * SLOTS)
        self.why: str = ""
        self.outage: Outage = Outage(log_thread, logger, settings.address.redacted)
        self._settings = settings
        self._log_thread = log_thread
        self._hooks = hooks
        self._post = post
        self._learning = threading.Lock()
        self._asking = WireHolder()
        self._asked = settings.address.seeds[0]
        self._failures = 0  # looks in a row
        self.watcher: EndpointWatcher = EndpointWatcher("worqr-topology", self._look, lambda: (self._asking,))

    def owner(self, slot: int) -> Endpoint | None:
        """Return the node that has `slot`; None if it is unknown."""
        return self.view.owners[slot]

    def invalidate(self) -> None:
        """Something was not where it should be: look again, soon."""
        self.watcher.invalidate()

    def learn(self, redirects: Iterable[str], asked: Endpoint) -> None:
        """Apply redirects, each ``SLOT HOST:PORT``. Without a host (or with ``?``), the host is that of `asked`."""
        self.invalidate()
        told = [each for each in (_redirect(text, asked) for text in redirects) if each is not None]
        with self._learning:
            news = {slot: owner for slot, owner in told if self.owner(slot) != owner}
            if news:
                owners = list(self.view.owners)
                for slot, owner in news.items():
                    owners[slot] = owner
                self.view = TopologyView(owners)
        if news:
            self._post(self._hooks.changed)

    # The topology thread

    def _look(self) -> tuple[float, float]:
        """Ask the nodes, and store the result; return the pauses for `EndpointWatcher`."""
        try:
            error = self.look_once()
        except Exception as exc:  # a bug must cost one look, not all later ones
            error = WorqrBug(f"the nodes cannot be asked ({type(exc).__name__}: {exc}); please report this")
            text = "asking the cluster failed, trying again; this is a bug of worqr, please report it"
            self._log_thread.emit(logger, "link.topology", text, exc_info=exc)
            self._asking.close()
        self._failures = 0 if error is None else self._failures + 1
        self._tell(error)
        self._post(partial(self._hooks.looked, error))
        refused = error is not None and not isinstance(error, Unavailable)
        pause = max(_LOOK_AGAIN, pause_after(self._failures, refused=refused))
        return pause, _LOOK_EVERY if error is None else 0.0

    def _tell(self, error: WorqrError | None) -> None:
        """Store why no node could report the owners. Log it until they are known for the first time; later each node's client
        does.
        """
        self.why = "" if error is None else str(error)
        if error is None:
            self.outage.end()
        elif not (self.view.primaries or self.watcher.has_ended):
            self.outage.begin(self.why, remedy=remedy_for(error, self._settings))

    def look_once(self) -> WorqrError | None:
        """Ask a node, and apply its view. Return the error if no node could report the owners."""
        try:
            self._take(self._ask())
        except WorqrError as error:
            return error
        return None

    def _ask(self) -> TopologyView:
        """Return the view of a node that reports a working cluster; else that of any node that replies.

        Raises:
            Unavailable: no node replies.
            RefusedByServer, WrongVersion: waiting does not help.
        """
        second_best: TopologyView | None = None
        errors: list[WorqrError] = []
        for endpoint in self._whom_to_ask():
            if self.watcher.has_ended:
                break
            self._post(self._hooks.meanwhile)
            try:
                view = self._view_of(endpoint)
            except WorqrError as error:
                errors.append(error)
                continue
            if view.works:
                return view
            second_best = second_best or view
            self._asking.close()
        if second_best is not None:
            return second_best
        raise error_of(errors)

    def _whom_to_ask(self) -> Sequence[Endpoint | None]:
        """Return None for the open connection; then the known nodes in any order, then the seeds of the URL."""
        nodes = list(self.view.primaries)
        random.shuffle(nodes)
        first: list[Endpoint | None] = [] if self._asking.wire is None else [None]
        return [*first, *dict.fromkeys((*nodes, *self._settings.address.seeds))]

    def _view_of(self, endpoint: Endpoint | None) -> TopologyView:
        try:
            wire = self._asking.wire if endpoint is None else self._open(endpoint)
            assert wire is not None, "None stands for the open connection"
            slots, info = wire.exchange([("CLUSTER", "SLOTS"), ("CLUSTER", "INFO")])
        except (ConnectionLost, Unavailable) as error:
            self._asking.close()
            raise Unavailable(f"{self._asked}: {error}") from error
        if isinstance(slots, ErrorReply):
            self._asking.close()
            if slots.action is not ErrorAction.REFUSED:
                raise Unavailable(str(slots))
            raise RefusedByServer(
                f"the server at {self._asked} is no node of a cluster, or does not let us ask ({slots}); for a single server "
                "write redis://, and give the user the right to CLUSTER SLOTS"
            )
        works = not isinstance(info, bytes) or b"cluster_state:ok" in info
        return TopologyView(owners_of(cast("list[Any]", slots), self._asked.host, self.view.primaries), works=works)

    def _open(self, endpoint: Endpoint) -> Wire:
        self._asking.close()
        self._asked = endpoint
        wire = open_connection(
            *(self._settings, StaticEndpoint(str(endpoint), endpoint), "topology"),
            timeout=_TIMEOUT,
            on_silence=self.watcher.check,
            replica=True,
            first=not self.view.primaries,
        )
        return self._asking.hold(wire)

    def _take(self, view: TopologyView) -> None:
        """Apply a view. A slot without an owner keeps its previous one, because no node reports a newer one.

        Raises:
            Unavailable: no node has any slot.
        """
        with self._learning:
            old = self.view
            new = TopologyView([now or was for now, was in zip(view.owners, old.owners, strict=True)])
            changed = new.owners != old.owners
            if changed:
                self.view = new
        if not self.view.primaries:
            raise Unavailable("no node of the cluster has any slot")
        if changed:
            self._post(self._hooks.changed)


class NodeEndpoint(StaticEndpoint):
    """One node, which may have lost its slots to another one."""

    __slots__ = ("_topology",)

    def __init__(self, topology: Topology, endpoint: Endpoint) -> None:
        super().__init__(str(endpoint), endpoint)
        self._topology = topology

    def invalidate(self) -> None:
        self._topology.invalidate()


class ShardEndpoint:
    """The node that has a slot, whichever it is."""

    __slots__ = ("_slot", "_topology", "name")

    def __init__(self, topology: Topology, slot: int, name: str) -> None:
        self.name: str = name
        self._topology = topology
        self._slot = slot

    def resolve(self, on_silence: OnSilence | None = None) -> Endpoint:
        owner = self._topology.owner(self._slot)
        if owner is None:
            self._topology.invalidate()
            raise Unavailable(self._topology.why or f"no node of the cluster is known to have slot {self._slot}")
        return owner

    def is_current(self, endpoint: Endpoint) -> bool:
        return self._topology.owner(self._slot) in (endpoint, None)

    def invalidate(self) -> None:
        self._topology.invalidate()


def owners_of(slots: list[Any], asked: str, before: Iterable[Endpoint] = ()) -> list[Endpoint | None]:
    """Return the owners by slot from a reply to CLUSTER SLOTS. A node without a host is at the asked node's host.

    Nodes that were known `before` keep their objects, so that two views are compared quickly.
    """
    owners: list[Endpoint | None] = [None] * SLOTS
    known = {endpoint: endpoint for endpoint in before}
    for first, last, primary, *_ in slots:
        endpoint = Endpoint(_host((primary[0] or b"").decode("utf-8", "replace"), asked), int(primary[1]))
        owners[first : last + 1] = [known.setdefault(endpoint, endpoint)] * (last - first + 1)
    return owners


def _redirect(text: str, asked: Endpoint) -> tuple[int, Endpoint] | None:
    """The slot and its owner in ``SLOT HOST:PORT``; None: it cannot be read."""
    slot, _, place = text.partition(" ")
    host, colon, port = place.rpartition(":")
    if not (slot.isdigit() and port.isdigit() and colon) or int(slot) >= SLOTS:
        return None
    return int(slot), Endpoint(_host(host.strip("[]"), asked.host), int(port))


def _host(told: str, asked: str) -> str:
    """Replace an unknown host (empty, ``?``) by that of the asked node."""
    return asked if told in ("", "?") else told

"""Which node of a cluster has which slot. A thread with a connection of its own asks, when somebody doubts and now and then.

Here: `Topology`, and the routes it gives. Not here: what is sent where (`cluster`).

Any node can be asked, and each has its own view: one that was cut off, or has just been replaced, may be wrong for a while. So a
node that says itself that the cluster works is believed before one that does not, and what a node answers to a request
(``MOVED``) is believed at once: it costs one request to find out that it was wrong too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from worqr.errors import RefusedByServer, Unavailable, WorqrError
from worqr.link.connection import Wire, open_connection
from worqr.link.dialect import SLOTS
from worqr.link.faults import Lost, Refused
from worqr.link.outage import pause_after
from worqr.link.routes import Fixed, Silence
from worqr.link.settings import Endpoint, LinkSettings

_TIMEOUT = 1.0  # seconds for connecting to a node, and for its answer
_LOOK_EVERY = 5.0  # seconds between looks that nobody has asked for
_LOOK_AGAIN = 0.25  # seconds between looks while somebody doubts, at least
_END_WAIT = 0.2  # seconds that closing waits for the thread; only one that is just connecting takes longer


@dataclass(frozen=True, slots=True)
class View:
    """What one node says: who has which slot, and whether the cluster works."""

    owners: tuple[Endpoint | None, ...]
    works: bool

    @property
    def primaries(self) -> frozenset[Endpoint]:
        """The nodes that have a slot."""
        return frozenset(owner for owner in self.owners if owner is not None)


class Topology:
    """The nodes of one cluster, as far as we know. Readable from any thread.

    Attributes:
        why: what stood in the way of the last look; empty if nothing did.
        refused: set while every node refuses us in a way that waiting does not mend.
    """

    def __init__(
        self, settings: LinkSettings, changed: Callable[[], None], looked: Callable[[WorqrError | None], None]
    ) -> None:
        self.why: str = ""
        self.refused: WorqrError | None = None
        self._settings = settings
        self._changed = changed
        self._looked = looked
        self._owners: list[Endpoint | None] = [None] * SLOTS
        self._primaries: frozenset[Endpoint] = frozenset()
        self._known = threading.Event()
        self._doubted = threading.Event()
        self._ended = threading.Event()
        self._learning = threading.Lock()
        self._wire: Wire | None = None
        self._asked = settings.address.seeds[0]
        self._thread = threading.Thread(target=self._run, name="worqr-topology", daemon=True)

    @property
    def known(self) -> bool:
        """Some node has answered, once."""
        return self._known.is_set()

    @property
    def primaries(self) -> frozenset[Endpoint]:
        """The nodes that have a slot."""
        return self._primaries

    def owner(self, slot: int) -> Endpoint | None:
        """The node that has `slot`; None: nobody we know of."""
        return self._owners[slot]

    def doubt(self) -> None:
        """Something was not where it should be: look again, soon."""
        self._doubted.set()

    def learn(self, redirect: str) -> Endpoint | None:
        """What a node has answered: ``SLOT HOST:PORT``. The endpoint, if it can be read."""
        text, _, place = redirect.partition(" ")
        host, _, port = place.rpartition(":")
        self.doubt()
        if not (text.isdigit() and port.isdigit() and host) or int(text) >= SLOTS:
            return None  # a node that does not know its own name says nothing of its host
        slot, owner = int(text), Endpoint(host.strip("[]"), int(port))
        with self._learning:
            if self._owners[slot] == owner:
                return owner
            self._owners[slot] = owner
            self._primaries |= {owner}
        self._changed()
        return owner

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._doubted.set()
        wire = self._wire
        if wire is not None:
            wire.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_WAIT)

    def poison(self) -> None:
        """In a forked child: the thread does not exist here, and the socket is the parent's."""
        self._ended.set()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abandon()

    # The thread

    def _run(self) -> None:
        attempts = 0
        while not self._ended.is_set():
            self._doubted.clear()
            try:
                self._take(self._ask())
            except WorqrError as error:
                attempts += 1
                self.why = str(error)
                self.refused = None if isinstance(error, Unavailable) else error
                self._looked(error)
            else:
                attempts = 0
                self.why, self.refused = "", None
                self._looked(None)
            self._ended.wait(max(_LOOK_AGAIN, pause_after(attempts, refused=self.refused is not None)))
            if attempts == 0:
                self._doubted.wait(_LOOK_EVERY)
        self._drop()

    def _ask(self) -> View:
        """The view of a node that says that the cluster works; else of any that answers.

        Raises:
            Unavailable: none answers. RefusedByServer, WrongVersion: nor will any.
        """
        second_best: View | None = None
        errors: list[WorqrError] = []
        for endpoint in self._whom_to_ask():
            if self._ended.is_set():
                break
            try:
                view = self._view_of(endpoint)
            except WorqrError as error:
                errors.append(error)
                continue
            if view.works:
                return view
            second_best = second_best or view
            self._drop()
        if second_best is not None:
            return second_best
        refusals = [error for error in errors if not isinstance(error, Unavailable)]
        if refusals and len(refusals) == len(errors):
            raise refusals[0]
        raise Unavailable(str(errors[0]) if errors else "the link was closed")

    def _whom_to_ask(self) -> Sequence[Endpoint | None]:
        """None: over the connection that stands; then the nodes in any order, then those we were told at first."""
        nodes = list(self._primaries)
        random.shuffle(nodes)
        first: list[Endpoint | None] = [] if self._wire is None else [None]
        return [*first, *dict.fromkeys((*nodes, *self._settings.address.seeds))]

    def _view_of(self, endpoint: Endpoint | None) -> View:
        try:
            if endpoint is None:
                assert self._wire is not None
            else:
                self._drop()
                self._wire = open_connection(
                    *(self._settings, Fixed(str(endpoint), endpoint), "topology"),
                    timeout=_TIMEOUT,
                    on_silence=self._while_silent,
                    replica=True,
                )
                self._asked = endpoint
            slots, info = self._wire.exchange([("CLUSTER", "SLOTS"), ("CLUSTER", "INFO")])
        except Lost as lost:
            self._drop()
            raise Unavailable(lost.cause) from lost
        if isinstance(slots, Refused):
            self._drop()
            raise RefusedByServer(
                f"the server at {self._asked} is no node of a cluster, or does not let us ask ({slots}); for a single server "
                "write redis://, and give the user the right to CLUSTER SLOTS"
            )
        works = not isinstance(info, bytes) or b"cluster_state:ok" in info
        return View(_owners(cast("list[Any]", slots), self._asked.host), works)

    def _while_silent(self) -> None:
        if self._ended.is_set():
            raise Lost("the link was closed", innocent=True)

    def _take(self, view: View) -> None:
        """Believe it. A slot that nobody has keeps the owner it had: there is nobody else to ask.

        Raises:
            Unavailable: no node has any slot.
        """
        with self._learning:
            owners = [new or old for new, old in zip(view.owners, self._owners, strict=True)]
            changed = owners != self._owners
            self._owners, self._primaries = owners, frozenset(owner for owner in owners if owner is not None)
        if not self._primaries:
            raise Unavailable("no node of the cluster has any slot")
        if changed:
            self._known.set()
            self._changed()

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


class NodeRoute(Fixed):
    """The route to one node, which may have lost its slots to another one."""

    __slots__ = ("_topology",)

    def __init__(self, topology: Topology, endpoint: Endpoint) -> None:
        super().__init__(str(endpoint), endpoint)
        self._topology = topology

    def doubt(self) -> None:
        self._topology.doubt()


class ShardRoute:
    """The route to whichever node has a slot."""

    __slots__ = ("_slot", "_topology", "name")

    def __init__(self, topology: Topology, slot: int, name: str) -> None:
        self.name: str = name
        self._topology = topology
        self._slot = slot

    def find(self, on_silence: Silence | None = None) -> Endpoint:
        owner = self._topology.owner(self._slot)
        if owner is None:
            self._topology.doubt()
            raise Unavailable(self._topology.why or f"no node of the cluster is known to have slot {self._slot}")
        return owner

    def leads_to(self, endpoint: Endpoint) -> bool:
        return self._topology.owner(self._slot) in (endpoint, None)

    def doubt(self) -> None:
        self._topology.doubt()


def _owners(slots: list[Any], asked: str) -> tuple[Endpoint | None, ...]:
    """The answer to CLUSTER SLOTS, slot by slot. A node that does not know its own host is where we asked it."""
    owners: list[Endpoint | None] = [None] * SLOTS
    for first, last, primary, *_ in slots:
        host = (primary[0] or b"").decode("utf-8", "replace")
        endpoint = Endpoint(asked if host in ("", "?") else host, int(primary[1]))
        owners[first : last + 1] = [endpoint] * (last - first + 1)
    return tuple(owners)

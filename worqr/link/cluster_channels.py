"""The channels of a cluster. A queue's channels are sharded, on the node that has its slot; the registry's are plain.

Here: `ClusterSubscriptions`, with the interface of the `Subscriptions` of one server. A subscription follows its slot to
another node. Messages that were published meanwhile are lost, as with any connection, and the subscriber is woken to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.link.cluster_router import ClusterRouter
from worqr.link.driver import Driver, copy_of
from worqr.link.log_thread import LogThread
from worqr.link.pubsub_state import SHARDED, Channels
from worqr.link.settings import Endpoint, LinkSettings
from worqr.link.subscription import Subscription, SubscriptionListener
from worqr.link.subscriptions import Subscriptions
from worqr.link.topology import NodeEndpoint, ShardEndpoint, TopologyView
from worqr.link.wire_form import slot_of


class ClusterSubscriptions:
    """All subscriptions of a link to a cluster, with one connection per node."""

    def __init__(
        self, settings: LinkSettings, driver: Driver, log_thread: LogThread, router: ClusterRouter, registry: str
    ) -> None:
        self.driver: Driver = driver
        self.ended: WorqrError | None = None
        self._settings = settings
        self._log_thread = log_thread
        self._topology = router.topology
        self._registry = registry
        self._open: dict[Subscription, int] = {}
        self._hubs: dict[Endpoint, Subscriptions] = {}
        resolver = ShardEndpoint(self._topology, router.home, settings.address.redacted)
        self._plain = Subscriptions(settings, driver, log_thread, resolver=resolver)
        self._followed: TopologyView | None = None
        router.when_looked(self._follow)

    @property
    def connections(self) -> int:
        """The number of connections so far, to the nodes in use and to the registry's."""
        return self._plain.connections + sum(hub.connections for hub in list(self._hubs.values()))

    def open(
        self, channels: Iterable[str], deliver: Callable[[str, bytes], object], confirmed: Callable[[], object]
    ) -> Subscription:
        """Listen to `channels`, all of one queue or of the registry. See ``Subscriptions.open``."""
        names = tuple(channels)
        if any(name.startswith(f"{self._registry}:") for name in names):
            return self._plain.open(names, deliver, confirmed)
        subscription = Subscription(self, names, deliver, confirmed)
        slots = {slot_of(name) for name in names}
        if len(slots) > 1:
            raise UsageError(f"on a cluster the channels of a subscription must share a slot: {', '.join(names)}")
        if self.ended is not None:
            raise copy_of(self.ended)
        with self.driver.entered:
            self._open[subscription] = slots.pop()
            self._place(subscription, self._topology.view)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Remove the listener."""
        with self.driver.entered:
            self._open.pop(subscription, None)
            listener = subscription.listener
            if listener is not None:
                listener.hub.let_go(listener)

    def close(self) -> None:
        """End all connections; callers that wait for a confirmation get Unavailable. Idempotent."""
        error = self.ended = self.ended or Unavailable(f"the link to {self._settings.address.redacted} was closed")
        homeless = [each for each in self._open if each.listener is None]
        for hub in (self._plain, *self._hubs.values()):
            hub.close()
        for subscription in homeless:
            self.driver.post(lambda subscription=subscription: subscription.fail(error))  # type: ignore[misc]

    def poison(self, error: WorqrError) -> None:
        """In a forked child: subscriptions work in the parent only."""
        self.ended = error
        for hub in (self._plain, *self._hubs.values()):
            hub.poison(error)

    def _place(self, subscription: Subscription, view: TopologyView) -> None:
        """Listen on the node that now has the slot, if it is known."""
        owner = view.owners[self._open[subscription]]
        if owner is None:
            self._topology.invalidate()
            return
        hub = self._hubs.get(owner)
        if hub is None:
            resolver, channels = NodeEndpoint(self._topology, owner), Channels[SubscriptionListener](SHARDED, _group_of)
            hub = Subscriptions(self._settings, self.driver, self._log_thread, resolver=resolver, channels=channels)
            self._hubs[owner] = hub
        if subscription.listener is None or subscription.listener.hub is not hub:
            hub.listen(subscription)

    def _follow(self) -> None:
        """Slots may have other owners than before."""
        view = self._topology.view
        if self.ended is not None or view is self._followed:
            return
        self._followed = view
        for subscription in self._open:
            self._place(subscription, view)
        gone = [hub for endpoint, hub in self._hubs.items() if endpoint not in view.primaries]
        self._hubs = {endpoint: hub for endpoint, hub in self._hubs.items() if hub not in gone}
        self._plain.reconsider()
        for hub in gone:
            hub.close()


def _group_of(channel: bytes) -> int:
    return slot_of(channel.decode())

"""The link: the only home of ``import redis``. Tasks and threads put calls in, the server's replies come out.

`Link` is what the rest of worqr uses. Behind it, from the inside out:

* `settings`, `tls`, `checks`, `faults`: an address, its certificates, a server, an error, each turned into something we can
  decide on;
* `reasons`, `strangers`, `credentials`: why a server cannot be reached, what else is at its port, and who logs in;
* `connection`: opens one checked connection, which blocks; `transport`: the same connection, driven without blocking;
* `request`, `backlog`, `replication`, `session`: calls on their way, their order, and their replies; no I/O;
* `node_client`: the requests of one server over all of its connections; `dialer`, `outage`: attempts to connect;
* `cluster`, `topology`, `slot_order`, `sentinel`, `routes`: which server that is;
* `driver` and `trio_driver`, `asyncio_driver`, `thread_driver`: who waits for sockets and times; `loops` chooses;
* `subscriptions`, `heart`: a thread and a connection each, for messages and for the keepalive; `loop_watch`: does the loop turn;
* `scribe`: writes log lines of threads; `watchers`: the listeners for lost connections.
"""

from worqr.link.clocks import boottime
from worqr.link.credentials import Credentials, GivenCredentials
from worqr.link.driver import Driver, Signal, Waiter
from worqr.link.heart import Heart, answer_timeout
from worqr.link.link import Link
from worqr.link.loops import driver_here, loop_here, loop_name_here
from worqr.link.request import Owner, Request
from worqr.link.settings import DEFAULT, GIVEN, Address, LinkSettings, checked_credentials
from worqr.link.subscription import Subscription
from worqr.link.subscriptions import Subscriptions
from worqr.link.thread_driver import ThreadDriver, run_blocking
from worqr.link.trio_driver import TrioDriver
from worqr.link.watchers import Change

__all__ = [
    "DEFAULT",
    "GIVEN",
    "Address",
    "Change",
    "Credentials",
    "Driver",
    "GivenCredentials",
    "Heart",
    "Link",
    "LinkSettings",
    "Owner",
    "Request",
    "Signal",
    "Subscription",
    "Subscriptions",
    "ThreadDriver",
    "TrioDriver",
    "Waiter",
    "answer_timeout",
    "boottime",
    "checked_credentials",
    "driver_here",
    "loop_here",
    "loop_name_here",
    "run_blocking",
]

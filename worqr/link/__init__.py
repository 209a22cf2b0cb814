"""The link: the only home of ``import redis``. Tasks and threads put calls in, the server's answers come out.

`Link` is the face. Behind it, from the inside out:

* `settings`, `checks`, `faults`: an address, a server, an error, each turned into something we can decide on;
* `connection`: one checked connection that raises nothing but our own errors;
* `request`, `backlog`: calls on their way, in their order; pure;
* `exchange`, `uplink`, `pipe`: a batch, the connection it goes over, the thread that does it;
* `subscriptions`, `heart`: a thread and a connection each, for messages and for the keepalive;
* `mailbox`, `threads`: how results get back into an event loop, or to plain threads; `scribe`: how lines get into the log.
"""

from worqr.link.heart import Heart, boottime
from worqr.link.link import Link
from worqr.link.mailbox import Mailbox, Signal, TrioMailbox, Waiter
from worqr.link.request import Owner, Request
from worqr.link.settings import Address, LinkSettings
from worqr.link.subscriptions import Subscription, Subscriptions
from worqr.link.threads import ThreadMailbox, mailbox_here, run_blocking

__all__ = [
    "Address",
    "Heart",
    "Link",
    "LinkSettings",
    "Mailbox",
    "Owner",
    "Request",
    "Signal",
    "Subscription",
    "Subscriptions",
    "ThreadMailbox",
    "TrioMailbox",
    "Waiter",
    "boottime",
    "mailbox_here",
    "run_blocking",
]

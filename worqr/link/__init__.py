"""The link: the only home of ``import redis``. Tasks and threads put calls in, the server's answers come out.

`Link` is the face. Behind it, from the inside out:

* `settings`, `tls`, `checks`, `faults`: an address, its certificates, a server, an error, each turned into something we can
  decide on;
* `reasons`, `strangers`, `credentials`: why a server cannot be reached, what else is at its port, and who logs in;
* `connection`: one checked connection that raises nothing but our own errors;
* `request`, `backlog`: calls on their way, in their order; pure;
* `exchange`, `uplink`, `pipe`: a batch, the connection it goes over, the thread that does it;
* `subscriptions`, `heart`: a thread and a connection each, for messages and for the keepalive; `loop_watch`: does the loop turn;
* `mailbox`, `aio`, `threads`: how results get back into a loop, Trio's or asyncio's, or to plain threads; `loops` knows
  which of them it is here; `scribe`: how lines get into the log; `watchers`: the listeners for
  lost connections.
"""

from worqr.link.clocks import boottime
from worqr.link.credentials import Credentials, GivenCredentials
from worqr.link.heart import Heart, answer_timeout
from worqr.link.link import Link
from worqr.link.loops import loop_here, loop_name_here, mailbox_here
from worqr.link.mailbox import Mailbox, Signal, TrioMailbox, Waiter
from worqr.link.request import Owner, Request
from worqr.link.settings import DEFAULT, GIVEN, Address, LinkSettings, checked_credentials
from worqr.link.subscriptions import Subscription, Subscriptions
from worqr.link.threads import ThreadMailbox, run_blocking
from worqr.link.watchers import Change

__all__ = [
    "DEFAULT",
    "GIVEN",
    "Address",
    "Change",
    "Credentials",
    "GivenCredentials",
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
    "answer_timeout",
    "boottime",
    "checked_credentials",
    "loop_here",
    "loop_name_here",
    "mailbox_here",
    "run_blocking",
]

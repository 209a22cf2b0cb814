"""The link to the server: the only package that imports redis-py. Tasks and threads submit calls and get the server's replies.

The rest of worqr uses `Link`. The modules behind it:

* `settings`: parses the address, and supplies passwords;
* `failures`: sorts errors by their remedy, and explains failed attempts;
* `connector`: opens and checks one connection, the attempts and the pauses between them, and the open connection without
  blocking; also the threads that have a connection of their own;
* `session`: requests, their order and states, and their bytes and replies on one connection; no I/O;
* `node`: the requests of one server over one connection after another, and those of slots that have moved;
* `cluster`, `sentinel`: find the server for a request;
* `driver`, `asyncio_driver`, `thread_driver`: wait for sockets and times in the caller's loop or threads;
* `link`: detects the running event loop and chooses the driver;
* `messages`: messages, on a second connection that the same driver drives;
* `heartbeat`: the keepalive with its own thread and connection; detects a blocked event loop;
* `log_thread`: writes log lines in a thread that exists only while there are lines.
"""

from worqr.link.connector import server_version
from worqr.link.driver import Signal, TrioDriver, Waiter
from worqr.link.heartbeat import Heartbeat, answer_timeout
from worqr.link.link import Link, ServerReport, ServerStats, can_wait_here, driver_here, loop_here, loop_name_here
from worqr.link.log_thread import Change, boottime
from worqr.link.messages import Subscription
from worqr.link.node import LinkCondition
from worqr.link.session import Request, WorkerHandle
from worqr.link.settings import (
    DEFAULT,
    GIVEN,
    Address,
    Credentials,
    GivenCredentials,
    LinkSettings,
    checked_credentials,
)
from worqr.link.thread_driver import ThreadDriver, as_sync, end_waits_by, here, run_blocking

__all__ = [
    "DEFAULT",
    "GIVEN",
    "Address",
    "Change",
    "Credentials",
    "GivenCredentials",
    "Heartbeat",
    "Link",
    "LinkCondition",
    "LinkSettings",
    "Request",
    "ServerReport",
    "ServerStats",
    "Signal",
    "Subscription",
    "ThreadDriver",
    "TrioDriver",
    "Waiter",
    "WorkerHandle",
    "answer_timeout",
    "as_sync",
    "boottime",
    "can_wait_here",
    "checked_credentials",
    "driver_here",
    "end_waits_by",
    "here",
    "loop_here",
    "loop_name_here",
    "run_blocking",
    "server_version",
]

"""The link to the server: the only package that imports redis-py. Tasks and threads submit calls and get the server's replies.

The rest of worqr uses `Link`. The modules behind it:

* `settings`, `tls`, `server_info`, `server_errors`: parse the address, check certificate files and the server, classify errors;
* `server_stats`: what the server reports of itself, for metrics and for people;
* `reasons`, `credentials`: explain failed connections, detect other programs at the port, supply passwords;
* `connection`: opens and checks one connection with blocking calls; `transport`: drives the same connection without blocking;
* `request`, `request_queue`, `replication`, `session`, `wire_form`: requests, their states and their replies; no I/O;
* `pipeline`, `live_connection`: batches on one connection, and their failures;
* `connector`, `outage`: attempts to connect, the pauses between them, and their log lines;
* `node_client`: the requests of one server over all of its connections; `rebalancer`: requests of slots that have moved;
* `cluster_router`, `topology`, `sentinel`, `endpoint_watcher`, `endpoints`: find the server for a request;
* `driver`, `trio_driver`, `asyncio_driver`, `thread_driver`: wait for sockets and times in the caller's loop or threads;
* `loops`: detects the running event loop and chooses the driver; `timers`: callbacks at a certain time;
* `subscriptions`, `pubsub_state`: messages, on a second connection that the same driver drives;
* `heartbeat`, `beat_connection`, `loop_monitor`: the keepalive with its own thread and connection; detects a blocked event loop;
* `log_thread`: writes log lines in a thread that exists only while there are lines; `watchers`: listeners for lost connections.
"""

from worqr.link.clocks import boottime
from worqr.link.credentials import Credentials, GivenCredentials
from worqr.link.driver import Driver, Signal, Waiter
from worqr.link.heartbeat import Heartbeat, answer_timeout
from worqr.link.link import Link
from worqr.link.loops import driver_here, loop_here, loop_name_here
from worqr.link.node_client import LinkCondition
from worqr.link.request import Request, WorkerHandle
from worqr.link.server_info import server_version
from worqr.link.server_stats import ServerReport, ServerStats
from worqr.link.settings import DEFAULT, GIVEN, Address, LinkSettings, checked_credentials
from worqr.link.subscription import Subscription
from worqr.link.subscriptions import Subscriptions
from worqr.link.thread_driver import ThreadDriver
from worqr.link.thread_limits import end_waits_by, run_blocking
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
    "Heartbeat",
    "Link",
    "LinkCondition",
    "LinkSettings",
    "Request",
    "ServerReport",
    "ServerStats",
    "Signal",
    "Subscription",
    "Subscriptions",
    "ThreadDriver",
    "TrioDriver",
    "Waiter",
    "WorkerHandle",
    "answer_timeout",
    "boottime",
    "checked_credentials",
    "driver_here",
    "end_waits_by",
    "loop_here",
    "loop_name_here",
    "run_blocking",
    "server_version",
]

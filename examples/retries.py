"""How a handler retries or fails a task, and a failure handler for the failed ones.

``retries.py work`` delivers mails, ``retries.py send ADDRESS...`` enqueues some. An address without ``@`` fails for good,
``later@...`` is delayed once, ``broken@...`` fails until its last attempt. Failed mails go to the failure handler.
"""

import sys

import trio

import worqr

POLICY = worqr.RetryPolicy(max_failures=3, min_backoff=0.2, max_backoff=1)


async def deliver(task: bytes) -> None:
    run, address = worqr.current(), task.decode()
    if "@" not in address:
        raise worqr.Failure(f"{address} is no address")
    if address.startswith("later@") and run.failures == 0:
        raise worqr.Retry("the server asks us to wait", delay=0.5)
    if address.startswith("broken@"):
        raise ConnectionError("connection refused")
    print(f"delivered to {address} in run {run.attempt}", flush=True)


def bounce(record: worqr.Failed) -> None:
    """A failure handler has a patient retry policy of its own, so this mail is delivered in the end."""
    print(f"given up after {record.failures}: {record.task.decode()}: {record.error.message}", flush=True)


async def work() -> None:
    mesh = worqr.Mesh()
    async with mesh.join(grace=1) as peer:
        await peer.serve("deliveries", deliver, timeout=30, retry=POLICY, on_failure=bounce)


async def send(*addresses: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        await mesh.queue("deliveries").enqueue(*(address.encode() for address in addresses))


match sys.argv[1:]:
    case ["work"]:
        trio.run(work)
    case ["send", *addresses]:
        trio.run(send, *addresses)
    case _:
        sys.exit("usage: retries.py work | send ADDRESS...")

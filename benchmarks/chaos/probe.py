"""Send each server a PING all the time, and note slow replies: a slow disk is trouble, too. Read how full a queue is."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import redis

from benchmarks.chaos.ledger import Ledger, now
from benchmarks.chaos.servers import Cluster, Node, Servers

SLOW = 0.4
PAUSE = 0.2
LENGTH_EVERY = 0.1


@contextmanager
def probing(servers: Cluster | Servers, ledger: Ledger, bounded: str) -> Generator[None]:
    """Probe from threads for the length of a block. `bounded`: the key of a queue whose length is read."""
    stop = threading.Event()
    threads = [threading.Thread(target=_probe, args=(node, ledger, stop), daemon=True) for node in servers.nodes]
    threads.append(threading.Thread(target=_read_length, args=(servers, bounded, ledger, stop), daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _probe(node: Node, ledger: Ledger, stop: threading.Event) -> None:
    client = node.new_client()
    begin = now()
    while not stop.wait(PAUSE):
        with suppress(redis.RedisError):
            client.ping()
            if now() - begin > SLOW + PAUSE:
                ledger.write("trouble", begin=begin, end=now(), who=None, why="slow server")
            begin = now()
    client.close()


def _read_length(servers: Cluster | Servers, base: str, ledger: Ledger, stop: threading.Event) -> None:
    """Write how many tasks wait in a queue: those that may start now, and those that start later."""
    while not stop.wait(LENGTH_EVERY):
        with suppress(redis.RedisError, OSError, LookupError, StopIteration):
            node = servers.owner(base)
            ledger.write("length", waiting=node.ask("LLEN", base) + node.ask("ZCARD", f"{base}:due"))

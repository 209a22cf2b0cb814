"""Send each server a PING all the time, and note slow replies: a slow disk is trouble, too."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import redis

from benchmarks.chaos.ledger import Ledger, now
from benchmarks.chaos.servers import Node

SLOW = 0.4
PAUSE = 0.2


@contextmanager
def probing(nodes: list[Node], ledger: Ledger) -> Generator[None]:
    """Probe from threads for the length of a block."""
    stop = threading.Event()
    threads = [threading.Thread(target=_probe, args=(node, ledger, stop), daemon=True) for node in nodes]
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

"""Simulated idle peers, hundreds in one thread: so the cost of a fleet can be measured on a machine of two cores.

An idle peer takes about 0.2 % of a core, so a thousand of them need more than two cores, and would measure each other. A
stand-in runs the same worqr scripts as a peer: it registers, serves a queue, waits for tasks, listens to its channels and sends
a heartbeat once a second. When it is woken it claims and finishes tasks, then waits again. It never leads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import redis

from benchmarks.server import command
from worqr import ops
from worqr.command import Command
from worqr.keys import QueueKeys, RegistryKeys

KEEPALIVE_MS = 3000
ROOM = 100
SLICES = 20
"""A twentieth of them beat every twentieth of a second."""


class StandIns:
    """All simulated peers of one process. `serve_forever` never returns; `enter` returns when they all serve."""

    def __init__(self, socket: str, queue: str, count: int) -> None:
        self._client = redis.Redis(unix_socket_path=socket)
        self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        self._registry = RegistryKeys("worqr")
        self._keys = QueueKeys("worqr", queue)
        self._workers = [f"stand-in:{n:032x}" for n in range(count)]
        self._by_channel = {self._keys.wake_channel(worker).encode(): worker for worker in self._workers}
        self._numbers = dict.fromkeys(self._workers, 0)
        self._requests = 0
        self._beats = 0

    def _send(self, calls: Sequence[Command[Any]]) -> list[Any]:
        """Send one pipeline; return the replies as the calls decode them."""
        pipe = self._client.pipeline(transaction=False)
        for call in calls:
            self._requests += 1
            pipe.evalsha(*command(call, self._requests, self._requests))
        return [call.read(reply) for call, reply in zip(calls, pipe.execute(), strict=True)]

    def _start(self, worker: str) -> Command[ops.StartReply]:
        self._numbers[worker] += 1
        return ops.start_tasks(self._keys, worker, self._numbers[worker], ROOM)

    def enter(self) -> None:
        """Register, serve the queue, listen, and find it empty: from then on they wait for tasks."""
        for worker in self._workers:
            self._send(
                [
                    ops.start_worker(self._registry, worker, keepalive_ms=KEEPALIVE_MS, facts=[("app", "stand-in")]),
                    ops.map_work(self._registry, worker, self._keys.queue),
                    ops.start_work(self._keys, worker, max_stalls=3, keep_failed=1000, last=0),
                ]
            )
            self._pubsub.subscribe(self._keys.wake_channel(worker), self._keys.base, self._keys.cancel_channel)
            self._send([self._start(worker)])
        self._beat(self._workers)

    def _beat(self, workers: Sequence[str]) -> None:
        self._beats += 1
        self._send(
            [
                ops.keep_worker_alive(
                    self._registry, worker, self._beats, keepalive_ms=KEEPALIVE_MS, lease_ms=0, running=0, room=ROOM
                )
                for worker in workers
            ]
        )

    def serve_forever(self) -> None:
        """Beat in turn, and see to what comes between."""
        due = time.monotonic()
        while True:
            for slice_ in range(SLICES):
                self._beat(self._workers[slice_::SLICES])
                due += 1 / SLICES
                while (left := due - time.monotonic()) > 0:
                    message = self._pubsub.get_message(timeout=left)
                    if message is not None:
                        self._woken(self._by_channel.get(message["channel"]))

    def _woken(self, worker: str | None) -> None:
        if worker is not None:
            (started,) = self._send([self._start(worker)])
            if started.entries:
                claims = [started.first + n for n in range(len(started.entries))]
                self._send([ops.finish_tasks(self._keys, worker, claims)])

"""Events of topics: producers publish them, some twice, and each subscriber must get one job of each. One of them is often full.

In the ledger, an event is a request for each subscriber, whose task is the payload of the event's job there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import trio

import worqr
from benchmarks.chaos.handlers import Handlers, options_of
from benchmarks.chaos.sender import Sender
from benchmarks.chaos.workload import HEARERS

TOPIC: Final = "chaos.happened"
BY_WEIGHT: Final = ("acked", "unknown", "refused")
"""Which of two answers counts: an event that was refused may be there, if it is not known what an earlier call did."""
FULL_AT: Final = 1
"""How many tasks may wait at the second subscriber."""


def subscribe(mesh: worqr.Mesh[Any], handlers: Handlers) -> None:
    """Declare the subscribers of a peer."""
    for name, max_length in zip(HEARERS, (None, FULL_AT), strict=True):

        @mesh.on("chaos.*", "#", name=name, max_length=max_length, on_failure=handlers.bury, **options_of(name))
        async def hear(event: str) -> None:
            await handlers.in_loop(event.encode())


class EventMaker:
    """Publishes events."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    async def publish(self, _nursery: trio.Nursery) -> None:
        """Publish an event, perhaps twice."""
        sender = self._sender
        event = sender.new_task("events")
        task = f'{{"event":"{event}"}}'
        calls: dict[str, int] = {queue: sender.begin("send", queue=queue, tasks=[task]) for queue in HEARERS}
        answers, errors = defaultdict[str, set[str]](set), list[str]()
        for _ in range(sender.rng.choice((1, 1, 1, 2))):
            for queue, answer in (await self._answers(event, errors)).items():
                answers[queue].add(answer)
        for queue, given in answers.items():
            answer = next(each for each in BY_WEIGHT if each in given)
            sender.ledger.write(answer, call=calls[queue], error="; ".join(errors)[:200])

    async def _answers(self, event: str, errors: list[str]) -> dict[str, str]:
        """Publish an event, and return by queue whether it took the event. Until a peer has joined, no queue is subscribed."""
        try:
            published = await self._sender.mesh.publish(TOPIC, event, id=event)
        except worqr.WorqrError as error:
            errors.append(repr(error))
            was_sent = getattr(error, "sent", None) is not False or isinstance(error, worqr.NotReplicated)
            return dict.fromkeys(HEARERS, "unknown" if was_sent else "refused")
        errors.append(f"to {published.to}")
        return {queue: "acked" if queue in published.to else "refused" for queue in HEARERS}

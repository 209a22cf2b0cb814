"""The errors of requests that are not sent, or not sent again: too late, too old, or the likely cause of lost connections."""

from __future__ import annotations

from collections.abc import Iterable

from worqr.errors import ClaimLost, Unavailable
from worqr.link.request import Request
from worqr.link.request_queue import SEND_AGAIN_WITHIN, RequestQueue
from worqr.link.server_errors import ConnectionLost


def give_up(late: Iterable[Request], orphans: Iterable[Request], outage: str) -> None:
    """Set the errors of requests whose patience has ended, and of those whose owner is dead."""
    for request in late:
        fate = "was sent and may have taken effect" if request.written else "was withdrawn"
        text = f"{outage} The request {request.call.script.name} waited {request.patience:.1f} s and {fate}."
        request.error = Unavailable(text, sent=None if request.written else False)
    for request in orphans:
        name = request.owner.name if request.owner else ""
        request.error = ClaimLost(f"worker {name} is dead; {request.call.script.name} was given up")


def too_old(request_queue: RequestQueue) -> list[Request]:
    """Take out the requests that must not be sent again, and set their errors."""
    requests, request_queue.too_old = request_queue.too_old, []
    for request in requests:
        request.error = Unavailable(
            f"{request.call.script.name} was first sent over {SEND_AGAIN_WITHIN / 60:.0f} minutes ago, and the server may have "
            "forgotten it; it is not sent again; whether it took effect is unknown",
            sent=None,
        )
    return requests


def guilty(requests: Iterable[Request], address: str, lost: ConnectionLost) -> None:
    """Set the errors of requests that have lost several connections, each time alone."""
    for request in requests:
        request.error = Unavailable(
            f"{request.call.script.name} alone lost {request.lost_alone} connections to the server at {address} ({lost.cause}); "
            "whether it took effect is unknown",
            sent=None,
        )

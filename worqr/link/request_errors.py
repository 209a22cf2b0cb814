"""The errors of requests that are not sent, or not sent again: too late, too old, or the likely cause of lost connections."""

from __future__ import annotations

from collections.abc import Iterable

from worqr.errors import ClaimLost, Unavailable
from worqr.link.request import Request
from worqr.link.request_queue import SEND_AGAIN_WITHIN
from worqr.link.server_errors import ConnectionLost


def give_up(late: Iterable[Request], orphans: Iterable[Request], outage: str) -> None:
    """Set the errors of requests whose patience has ended, and of those whose owner is dead."""
    for request in late:
        fate = "was withdrawn" if request.sent is False else "was sent and may have taken effect"
        text = f"{outage} The request {request.call.script.name} waited {request.patience:.1f} s and {fate}."
        request.fail(Unavailable(text, sent=request.sent))
    for request in orphans:
        name = request.owner.name if request.owner else ""
        request.fail(ClaimLost(f"worker {name} is dead; {request.call.script.name} was given up"))


def too_old(requests: Iterable[Request]) -> None:
    """Set the errors of requests that are not sent again, because the server may have forgotten its reply."""
    for request in requests:
        text = (
            f"{request.call.script.name} was first sent over {SEND_AGAIN_WITHIN / 60:.0f} minutes ago, and the server may have "
            "forgotten it; it is not sent again; whether it took effect is unknown"
        )
        request.fail(Unavailable(text, sent=None))


def guilty(requests: Iterable[Request], address: str, lost: ConnectionLost) -> None:
    """Set the errors of requests that have lost several connections, each time alone."""
    for request in requests:
        alone = 0 if request.trouble is None else request.trouble.alone
        text = (
            f"{request.call.script.name} alone lost {alone} connections to the server at {address} ({lost.cause}); "
            "whether it took effect is unknown"
        )
        request.fail(Unavailable(text, sent=None))

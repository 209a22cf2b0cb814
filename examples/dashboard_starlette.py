"""The dashboard in Starlette on Hypercorn with Trio. Viewers with the password may act, and others may look.

``cd examples && hypercorn -k trio --bind 127.0.0.1:8001 dashboard_starlette:app``, then open
http://127.0.0.1:8001/worqr/. Every name is right, with the password ``open sesame`` or with none.
"""

import base64
import binascii
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

import worqr
from worqr.dashboard import Dashboard, Viewer, operator, reader

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

mesh = worqr.Mesh(app="web", patience=10)


def access(scope: Scope) -> Viewer | None:
    kind, _, rest = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1").partition(" ")
    try:
        name, _, password = base64.b64decode(rest, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    if kind.lower() != "basic" or not name:
        return None
    if not password:
        return reader(name)
    return operator(name) if secrets.compare_digest(password.encode(), b"open sesame") else None


class AskForPassword:
    """Lets browsers ask for a name and a password."""

    def __init__(self, app: Dashboard) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and access(scope) is None:
            headers = {"WWW-Authenticate": 'Basic realm="operations"'}
            await PlainTextResponse("Log in", 401, headers)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


app = Starlette(routes=[Mount("/worqr", app=AskForPassword(Dashboard(mesh, access=access)))])

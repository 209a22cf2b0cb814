"""The dashboard: a web application that shows a mesh, and lets operators cancel, retry and pause.

It is not part of the core, which does not import it: install the extra ``dashboard``. Mount `Dashboard` in an ASGI application,
or run ``worqr dashboard``.
"""

try:
    import anyio as _anyio
    import jinja2 as _jinja2
    import starlette as _starlette
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f"the dashboard needs {_missing.name}: run `pip install 'worqr[dashboard]'`", name=_missing.name
    ) from None

from worqr.dashboard.access import Viewer, admin, operator, reader
from worqr.dashboard.app import Dashboard

__all__ = ["Dashboard", "Viewer", "admin", "operator", "reader"]

del _anyio, _jinja2, _starlette

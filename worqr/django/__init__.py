"""`worqr.django`: the backend for Django's tasks, ``manage.py worqr``, and the admin entry.

Put ``"worqr.django"`` into `INSTALLED_APPS`, and ``"worqr.django.Backend"`` into `TASKS`. `import worqr` imports nothing of this
package, and this module imports nothing of Django.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worqr.django.backend import Backend as Backend
    from worqr.django.backend import outbox as outbox
    from worqr.django.task_options import options as options

_HOMES = {
    "Backend": "worqr.django.backend",
    "outbox": "worqr.django.backend",
    "options": "worqr.django.task_options",
}

if not TYPE_CHECKING:
    __all__ = ["Backend", "options", "outbox"]

    def __getattr__(name):
        """Import the public name `name` at its first use: settings name this package before Django is ready."""
        if name not in _HOMES:
            raise AttributeError(f"module 'worqr.django' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

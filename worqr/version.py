"""The version of this library; the package's own is read from here."""

from __future__ import annotations

__version__ = "0.1.0"

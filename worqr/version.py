"""The version of worqr. The build of the package reads it from here."""

from __future__ import annotations

__version__ = "0.1.0"

"""The version of this library, from the installed package."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    try:
        return metadata.version("worqr")
    except metadata.PackageNotFoundError:
        return "0"


__version__ = _installed()

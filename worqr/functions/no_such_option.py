"""`NoSuchOption`: lets a type checker name a misspelt option of an overloaded method. Nothing else uses it."""

from __future__ import annotations


class NoSuchOption:
    """The type of an option that does not exist. With it, a type checker reports the name of the option."""

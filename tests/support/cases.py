"""`of_each`: one test that holds for many things, such as all files. The report names each of them for which it does not hold.

Thousands of parametrized cases cost each process of a test run memory and time, though none of them runs longer than it
takes to be counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

MOST_SHOWN = 20


def of_each(
    name: str, cases: Iterable[T], name_of: Callable[[T], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with each of the cases as its argument `name`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def all_of_them(**fixtures: Any) -> None:
            wrong = []
            for case in cases:
                try:
                    test(**{name: case}, **fixtures)
                except (AssertionError, pytest.fail.Exception) as error:
                    wrong.append(f"{name_of(case)}: {error}")
                except Exception as error:
                    error.add_note(f"{name}: {name_of(case)}")
                    raise
            assert not wrong, f"{len(wrong)} of them:\n" + "\n".join(wrong[:MOST_SHOWN])

        parameters = [each for each in inspect.signature(test).parameters.values() if each.name != name]
        all_of_them.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        all_of_them.__name__, all_of_them.__doc__ = test.__name__, test.__doc__
        all_of_them.__module__ = test.__module__
        return all_of_them

    return decorate

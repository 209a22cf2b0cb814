"""A block for `async with` is entered and left as ever; in `with` and `await` it says what to write."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

import worqr
from worqr.client.client import async_block


@async_block("write `async with`")
async def block(log: list[str]) -> AsyncGenerator[int]:
    """A block."""
    log.append("entered")
    try:
        yield 7
    except KeyError:
        log.append("suppressed")
    finally:
        log.append("left")


async def test_a_block_is_entered_left_and_may_suppress() -> None:
    log: list[str] = []
    async with block(log) as value:
        assert value == 7
        raise KeyError
    assert log == ["entered", "suppressed", "left"]


async def test_a_block_goes_into_a_stack_and_lets_errors_through() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        async with AsyncExitStack() as stack:
            assert await stack.enter_async_context(block(log)) == 7
            raise ZeroDivisionError
    assert log == ["entered", "left"]


def test_with_says_what_to_write() -> None:
    log: list[str] = []
    anything: Any = block(log)
    with pytest.raises(worqr.UsageError, match="^write `async with`$"), anything:
        pass
    with pytest.raises(worqr.UsageError, match="^write `async with`$"), ExitStack() as stack:
        stack.enter_context(anything)
    assert log == []


async def test_await_says_what_to_write() -> None:
    anything: Any = block([])
    with pytest.raises(worqr.UsageError, match="^write `async with`$"):
        await anything


def test_the_function_keeps_its_name_and_its_text() -> None:
    assert (block.__name__, block.__doc__) == ("block", "A block.")

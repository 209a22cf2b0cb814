"""One call of a function that takes a list: its payload is one element."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

import worqr
from worqr.argument_codec import ListCodec


@dataclass
class Page:
    url: str


def plain(pages: list[Page]) -> None: ...
def by_position(pages: list[Page], /) -> list[str | Exception]: ...
def sequence(pages: Sequence[Page]) -> Sequence[str | worqr.Retry] | None: ...
def iterable(pages: Annotated[Iterable[Page], "all"]) -> list[worqr.Failure | None] | None: ...
def untyped(pages): ...  # type: ignore[no-untyped-def]
def bare(pages: list) -> Any: ...  # type: ignore[type-arg]
def raw(pages: list[bytes]) -> None: ...
def nothing() -> None: ...
def two(pages: list[Page], n: int) -> None: ...
def keyword(*, pages: list[Page]) -> None: ...
def default(pages: list[Page] = []) -> None: ...  # noqa: B006
def many(*pages: list[Page]) -> None: ...
def one(page: Page) -> None: ...
def counts(pages: list[Page]) -> int: ...


@pytest.mark.parametrize("function", [plain, by_position, sequence, iterable])
def test_the_payload_is_one_element(function: Callable[..., object]) -> None:
    codec = ListCodec(function, "index")
    values = codec.bind((Page("/a"),), {})
    assert codec.encode(values) == b'{"url":"/a"}'
    assert codec.decode(b'{"url":"/a"}') == ((Page("/a"),), {})
    with pytest.raises(worqr.UsageError, match="invalid arguments"):
        codec.encode(codec.bind(([Page("/a")],), {}))
    with pytest.raises(TypeError):
        codec.bind((), {"pages": Page("/a")})


@pytest.mark.parametrize("function", [plain, by_position, sequence])
def test_a_form_shows_the_type_of_one_element(function: Callable[..., object]) -> None:
    [parameter] = ListCodec(function, "index").parameters
    assert (parameter.name, parameter.annotation) == ("pages", "Page")


@pytest.mark.parametrize("function", [untyped, bare])
def test_a_list_of_anything(function: Callable[..., object]) -> None:
    codec = ListCodec(function, "index")
    assert codec.encode(codec.bind(({"a": [1]},), {})) == b'{"a":[1]}'


def test_bytes_are_the_payload() -> None:
    codec = ListCodec(raw, "index")
    assert codec.encode(codec.bind((b"\xff",), {})) == b"\xff"
    assert codec.decode(b"\xff") == ((b"\xff",), {})


@pytest.mark.parametrize(
    ("function", "stored", "result"),
    [
        (plain, ("none", b""), None),
        (by_position, ("json", b'"x"'), "x"),
        (sequence, ("json", b'"x"'), "x"),
        (sequence, ("none", b""), None),
        (iterable, ("none", b""), None),
        (bare, ("json", b"[1]"), [1]),
    ],
)
def test_the_result_is_what_the_list_may_have_except_exceptions(
    function: Callable[..., object], stored: tuple[str, bytes], result: object
) -> None:
    assert ListCodec(function, "index", stores_result=True).decode_result(*stored) == result


def test_a_result_of_another_type_is_refused() -> None:
    with pytest.raises(worqr.UsageError, match="the result is not what it is said to return"):
        ListCodec(by_position, "index", stores_result=True).decode_result("json", b"1")


@pytest.mark.parametrize("function", [nothing, two, keyword, default, many])
def test_a_function_takes_one_list_and_nothing_else(function: Callable[..., object]) -> None:
    with pytest.raises(worqr.UsageError, match="takes one list of calls and nothing else"):
        ListCodec(function, "index")


def test_a_parameter_that_is_no_list_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        worqr.UsageError, match=r"its parameter 'page' is no list: annotate it as in `page: list\[Page\]`"
    ):
        ListCodec(one, "index")


def test_what_is_returned_is_none_or_a_list() -> None:
    with pytest.raises(worqr.UsageError, match="returns None or a list with one outcome for each call"):
        ListCodec(counts, "index")

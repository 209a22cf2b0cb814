"""Payloads as pages show them: escaped, redacted, bounded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import worqr
from tests.dashboard.conftest import Site
from worqr.dashboard.payloads import HEAD, HIDDEN, LINE, Redactor
from worqr.errors import UsageError

REDACTOR = Redactor()
SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "value",
    [
        {"password": SECRET},
        {"a": [{"deep": {"Api-Key": 1, "API_KEY": SECRET}}]},
        {"user": {"token": {"nested": [SECRET, {"x": SECRET}]}}},
        {"authorization": [SECRET, SECRET], "after": 1},
        {"card_number": SECRET, "ibanOf": SECRET},
    ],
)
def test_values_of_secret_keys_are_hidden_at_any_depth(value: Any) -> None:
    shown = REDACTOR.payload(json.dumps(value).encode())
    assert SECRET not in shown.text + shown.line
    assert HIDDEN in shown.text
    assert (shown.kind, shown.cut, shown.note) == ("JSON", False, "")


def unpacked(queue: str, data: bytes) -> str:
    if queue != "packed":
        raise KeyError(queue)
    return data[::-1].decode()


def test_a_function_of_the_application_makes_payloads_readable() -> None:
    redactor = Redactor(show=unpacked)
    stored = json.dumps({"password": SECRET, "city": "Tromso"}).encode()[::-1]
    shown = redactor.payload(stored, queue="packed")
    assert (shown.kind, shown.size, shown.note) == ("JSON", len(stored), "")
    assert "Tromso" in shown.text
    assert SECRET not in shown.text + shown.line, "it is redacted like any payload"
    for part in (
        redactor.payload(stored[:10], len(stored), queue="packed"),
        redactor.payload(stored, cut=True, queue="packed"),
    ):
        assert "Tromso" not in part.text, "a part cannot be unpacked"
        assert part.cut
    large = redactor.payload(b"x" * HEAD * 2, queue="packed")
    assert (large.cut, large.size) == (True, HEAD * 2)
    failed = redactor.payload(b"abc", queue="other")
    assert (failed.kind, failed.text) == ("text", "abc")
    assert "raised KeyError" in failed.note
    assert Redactor(mode="never", show=unpacked).payload(stored, queue="packed").kind == "hidden"
    with pytest.raises(UsageError, match="show must be a function"):
        Redactor(show="decrypt")  # type: ignore[arg-type]


@pytest.mark.leaves("*")
async def test_every_page_names_the_queue_to_the_function(connected: worqr.Mesh) -> None:
    site = Site(connected, options={"show": lambda queue, data: f"{queue} has {data[::-1].decode()}"})
    queue = connected.queue("mails")
    await queue.dispatch(b"cba", id="one")
    for address in (
        "/queue?name=mails",
        "/job?queue=mails&id=one",
        "/api/v1/tasks?queue=mails",
        "/api/v1/job?queue=mails&id=one",
    ):
        assert "mails has abc" in (await site.ask("GET", address)).text, address
    await queue.cancel_all()


def test_what_follows_a_secret_is_shown() -> None:
    shown = REDACTOR.payload(b'{"token": {"a": [1, {"b": 2}]}, "city": "Tromso", "n": [1, 2]}')
    assert '"city": "Tromso"' in shown.text
    assert '"b"' not in shown.text


def test_an_escaped_key_is_the_same_key() -> None:
    assert SECRET not in REDACTOR.payload(b'{"pass\\u0077ord": "s3cr3t"}').text


@pytest.mark.parametrize(
    "rest", [b'{"n": 1, "token": "s3cr3t" oops "z": 1}', b'[1,}, {"token": "s3cr3t"}', b'{"n": 1,, "token": "s3cr3t"}']
)
def test_what_is_no_json_any_more_is_hidden(rest: bytes) -> None:
    shown = REDACTOR.payload(rest)
    assert SECRET not in shown.text
    assert "hidden" in shown.note


@pytest.mark.parametrize("key", ["token", "city"])
def test_a_document_that_is_cut_off_is_redacted(key: str) -> None:
    whole = json.dumps({"a": 1, key: SECRET + "x" * 20_000}).encode()
    shown = REDACTOR.payload(whole[:HEAD], len(whole))
    assert shown.cut
    assert shown.size == len(whole)
    assert (SECRET in shown.text) == (key == "city")


def test_a_cut_character_at_the_end_is_left_out() -> None:
    whole = ("ø" * 4000).encode()
    shown = REDACTOR.payload(whole[: HEAD - 1], len(whole))
    assert (shown.kind, set(shown.text)) == ("text", {"ø"})


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_deep_json_needs_no_recursion(depth: int) -> None:
    for payload in (b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth):
        began = time.monotonic()
        shown = REDACTOR.payload(payload)
        assert len(shown.text) < 200_000
        assert len(shown.line) <= LINE
        assert time.monotonic() - began < 10  # a quadratic reader would take minutes


def test_control_and_bidi_characters_are_escaped() -> None:
    shown = REDACTOR.payload("a\x1b[31m\u202eb\u2066\x9b\x7f".encode())
    assert shown.text == "a\\x1b[31m\\u202eb\\u2066\\x9b\\x7f"
    assert "\\u202e" in REDACTOR.payload('{"a": "\u202e"}'.encode()).text


def test_binary_is_a_dump() -> None:
    shown = REDACTOR.payload(bytes(range(256)))
    assert shown.kind == "binary"
    assert shown.text.splitlines()[4] == "000040  40 41 42 43 44 45 46 47 48 49 4a 4b 4c 4d 4e 4f  @ABCDEFGHIJKLMNO"
    assert REDACTOR.payload(b"abc\x00def").kind == "binary"


def test_sizes_are_bounded() -> None:
    shown = REDACTOR.payload(b"x" * 16 * 1024 * 1024)
    assert len(shown.text) == HEAD
    assert (shown.cut, shown.size) == (True, 16 * 1024 * 1024)
    assert REDACTOR.payload(b"").kind == "empty"


@pytest.mark.parametrize(
    "text",
    [
        "password=s3cr3t",
        "Api-key: s3cr3t",
        'token="s3cr3t x"',
        "redis://me:s3cr3t@host/0",
        "Authorization: Bearer s3cr3t",
        "PGPASSWORD='s3cr3t'; x",
        "{'token': 's3cr3t'}",
    ],
)
def test_secrets_in_texts_are_hidden(text: str) -> None:
    assert SECRET not in REDACTOR.text(f"before {text} after")
    assert REDACTOR.text("order 17: refused") == "order 17: refused"


@pytest.mark.parametrize("part", ["y", "token", "token ", 'token="a', "://a:", "secret_", "\n ", "password:", "a://b@"])
def test_a_text_takes_time_in_proportion_to_its_length(part: str) -> None:
    text = part * (400_000 // len(part))
    began = time.process_time()
    REDACTOR.text(text)
    assert time.process_time() - began < 20  # a quadratic pattern would take hours


def test_modes() -> None:
    payload = b'{"token": "s3cr3t"}'
    assert SECRET in Redactor(mode="full").payload(payload).text
    assert SECRET in Redactor(mode="full").text("token=s3cr3t")
    never = Redactor(mode="never")
    assert (never.payload(payload).text, never.text("boom"), never.text("")) == ("", HIDDEN, "")
    own = Redactor("city")
    assert "Tromso" not in own.payload(b'{"city": "Tromso"}').text


def test_meta() -> None:
    assert REDACTOR.meta("auth_token", SECRET) == HIDDEN
    assert REDACTOR.meta("traceparent", "00-ab") == "00-ab"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_json_without_secrets_is_shown_whole(value: Any) -> None:
    payload = json.dumps(value).encode()
    shown = Redactor("never-a-key").payload(payload)
    if len(payload) <= HEAD and isinstance(value, (list, dict)):
        assert shown.note == ""
        assert json.loads(shown.text.replace("\n", "")) == value


@given(st.binary(max_size=300))
def test_any_bytes_can_be_shown(data: bytes) -> None:
    for part in (data, b"{" + data, b'{"a":"' + data):
        shown = REDACTOR.payload(part)
        assert all(c == "\n" or c.isprintable() for c in shown.text)
        assert shown.line.isprintable()

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


TEXTS = [
    # a quote or a bracket to the one that matches, else to the end of the line
    "password=s3cr3t",
    "Api-key: a s3cr3t, b",
    'token="s3cr3t x"',
    'password="a\\"s3cr3t"',
    r"password='s3cr3t\\'",
    "password='it''s s3cr3t'",
    "password='a'b's3cr3t'",
    'password=rb"a s3cr3t"',
    'password="""a\n"s3cr3t"\n"""',
    'password="never closed\ns3cr3t',
    "{'token': 's3cr3t'}",
    "bad {'card': {'number': 's3cr3t', 'n': [1, ('s3cr3t',)]}}",
    "bad {'tokens': ['a', 's3cr3t']}",
    "card=('a', 's3cr3t')",
    'password={"a": "}", "b": "s3cr3t"}',
    "password=[1, s3cr3t",
    '{"password": {"old": "x", "new": "s3cr3t"}}',
    "Login(user='a', password='s3cr3t', otp=1)",
    "Order(card=Card(number='s3cr3t',\n  code='s3cr3t'))",
    "password=SecretStr('s3cr3t')",
    "token=Token(\n  's3cr3t',\n)",
    "PGPASSWORD='s3cr3t'; x",
    # other signs between a name and its value
    "password -> s3cr3t",
    "password => s3cr3t",
    "password := s3cr3t",
    "password\t=\ts3cr3t",
    "assert password != 's3cr3t'",
    "wrong password 's3cr3t'",
    "the password is 's3cr3t'",
    "os.environ['DB_PASSWORD'] = 's3cr3t'",
    "user[password]=s3cr3t&password[0]=s3cr3t",
    "https://x.example/?next=password%3Ds3cr3t",
    "GET /?token=s3cr3t HTTP/1.1",
    "run --password s3cr3t --verbose",
    "run --db-password 'a s3cr3t'",
    "['--password', 's3cr3t']",
    '("password", "s3cr3t")',
    "{'name': 'password', 'value': 's3cr3t'}",
    "name: password, value: s3cr3t",
    "<password>s3cr3t</password>",
    '<x:card kind="a"><number>s3cr3t</number></x:card>',
    "password\n  Field required [type=missing, input_value={'pw': 's3cr3t'}, input_type=dict]",
    # values below their name
    "password=\ns3cr3t",
    "password:\n  old: x\n  new: s3cr3t",
    "tokens:\n- a\n- s3cr3t",
    "token: |\n  a\n  s3cr3t",
    # headers
    "Authorization: Bearer s3cr3t",
    "Authorization: Token s3cr3t",
    'Authorization: Digest username="a", response="s3cr3t"',
    "Proxy-Authorization: Basic s3cr3t",
    'Cookie: a="1"; session=s3cr3t',
    "Set-Cookie: id=a; token=s3cr3t",
    "b'GET / HTTP/1.1\\r\\nCookie: a=1; b=s3cr3t\\r\\n'",
    "{'Authorization': 'Digest a, s3cr3t'}",
    "[(b'host', b'x'), (b'cookie', b'a; s3cr3t')]",
    "refused: Bearer abcdefgh.ijklmnop.s3cr3t",
    # URLs
    "redis://me:s3cr3t@host/0",
    "redis://s3cr3t@host/0",
    "postgres://me:a@s3cr3t@host/0",
    "postgres://me:a/s3cr3t@host/0",
    "amqp://me:a?s3cr3t#s3cr3t@host",
    "https://me:a/s3cr3t@host/",
    "a://me:s3cr3t@host,b://me:s3cr3t@other",
    # texts in texts
    '{\\"password\\": \\"a s3cr3t\\"}',
    '{\\"password\\": \\"a\\\\\\"s3cr3t\\"}',
    '{"pass\\u0077ord": "s3cr3t"}',
]


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_in_texts_are_hidden(text: str) -> None:
    for whole in (f"before {text}\nafter", text):
        assert SECRET not in REDACTOR.text(whole)
        assert HIDDEN in REDACTOR.text(whole)
        assert SECRET in Redactor(mode="full").text(whole)
        for payload in (whole, json.dumps({"a": [whole]}), json.dumps({"a": json.dumps([whole])}), json.dumps(whole)):
            shown = REDACTOR.payload(payload.encode())
            assert SECRET not in shown.text + shown.line, payload
        assert SECRET not in REDACTOR.payload(b"\xff" + whole.encode()).text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("order 17: refused", ...),
        ("the token is expired", ...),
        ("KeyError: 'token'", ...),
        ("missing required field `password`", ...),
        ('File "/app/token.py", line 3, in f', ...),
        ("https://x.example/users/ada@example.org/mails", ...),
        ("http://localhost:8080/users/ada@example.org", ...),
        ("Login(user='a', password='x', otp=1)", f"Login(user='a', password={HIDDEN}, otp=1)"),
        ("{'card': {'n': 1}, 'city': 'Oslo'}", f"{{'card': {HIDDEN}, 'city': 'Oslo'}}"),
        ("token: x\nat line 3", f"token: {HIDDEN}\nat line 3"),
        ("redis://me:x@host/0 is away", f"redis://{HIDDEN}@host/0 is away"),
        ("[('cookie', 'x'), ('host', 'y')]", f"[('cookie', {HIDDEN}), ('host', 'y')]"),
    ],
)
def test_what_is_not_secret_is_shown(text: str, shown: Any) -> None:
    assert REDACTOR.text(text) == (text if shown is ... else shown)


@pytest.mark.parametrize("names", ["^pin$", r"\Apin\Z", "pin", "pi(?=n)", "n$"])
def test_names_may_be_any_expression(names: str) -> None:
    redactor = Redactor(names)
    assert SECRET not in redactor.text("a: pin=s3cr3t") + redactor.payload(b'{"pin": ["s3cr3t"]}').text
    assert Redactor("x*").text("a") == "a"


@pytest.mark.parametrize(
    "payload",
    [
        b'\xef\xbb\xbf{"password": {"a": "s3cr3t"}}',
        b'{"a": "\xff", "password": {"b": "s3cr3t"}}',
        '{"password": "s3cr3t"}'.encode("utf-16"),
        '{"password": "s3cr3t"}'.encode("utf-16-le"),
        '{"password": "s3cr3t"}'.encode("utf-32"),
        b'{"redis://ada:s3cr3t@db/0": 1}',
        b'[["host", "x"], ["authorization", "s3cr3t"], ["x-api-key", {"a": ["s3cr3t"]}]]',
        b'["Accept", "x", "Cookie", "s3cr3t"]',
        b'[{"name": "password", "value": "s3cr3t"}, {"key": "token", "value": {"a": ["s3cr3t"]}}]',
        b"\x81\xa8password\xa6s3cr3t",
        b"\x00\x01redis://a:s3cr3t@host/\x00",
        b"caf\xe9 password=s3cr3t",
        b"\x00t\x00o\x00k\x00e\x00n\x00=\x00s3cr3t",
    ],
)
def test_secrets_in_payloads_of_other_forms_are_hidden(payload: bytes) -> None:
    shown = REDACTOR.payload(payload)
    for text in (shown.text, shown.line):
        assert SECRET not in text
        assert SECRET.encode().hex(" ")[3:-3] not in text
    for length in range(len(payload)):
        part = REDACTOR.payload(payload[:length], len(payload))
        assert SECRET not in part.text + part.line, payload[:length]


def test_the_values_of_a_list_of_names_are_hidden_alone() -> None:
    assert SECRET not in REDACTOR.payload(b'[{"value": {"a": ["s3cr3t"]}, "key": "token"}]').text
    shown = REDACTOR.payload(
        b'[["cookie", "x"], ["host", "y"], {"name": "pin", "value": "z"}, {"name": "token", "n": 5}]'
    ).text
    assert (HIDDEN in shown, '"host"' in shown, '"y"' in shown, '"z"' in shown, '"n": 5' in shown) == (True,) * 5


def test_binary_is_shown_up_to_a_secret() -> None:
    shown = REDACTOR.payload(b"\x82\xa1a\x01\xa5token\xa6s3cr3t").text
    assert shown.splitlines()[0].endswith("..a..token")
    assert HIDDEN in shown
    assert "73 33" in Redactor(mode="full").payload(b"\x81\xa5token\xa6s3cr3t").text


@pytest.mark.parametrize(
    "part",
    [
        *(
            "y",
            "token",
            "token ",
            'token="a',
            "://a:",
            "secret_",
            "\n ",
            "password:",
            "a://b@",
            "password\n ",
            "password=(",
        ),
        *(
            "password={'",
            "token\\",
            'token\\"',
            "<token",
            "<token>",
            "token=|\n ",
            "http://a:1/",
            "password='a'b",
            "token '",
        ),
        *(
            "--token ",
            "password:\n ",
            "'a','token',",
            "Bearer ",
            "token[",
            "\\u0041",
            "token: (",
            "token, value",
            "b'",
            "''",
        ),
    ],
)
@pytest.mark.parametrize("start", ["", "password="])
def test_a_text_takes_time_in_proportion_to_its_length(part: str, start: str) -> None:
    text = start + part * (300_000 // len(part))
    began = time.process_time()
    REDACTOR.text(text)
    assert time.process_time() - began < 6  # a quadratic reader would take minutes


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

"""What is printed: nothing of it plays with the terminal, all of it can be read back from the JSON."""

from __future__ import annotations

import base64
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worqr.cli import output
from worqr.escaping import escape, escape_bytes
from worqr.views.values import shorten

NASTY = "\x1b[31mred\x07 \x9b2J \u202egnp.exe \r\n\t\x7f \ud800 \u2028"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain text, é, 漢字, 🙂", "plain text, é, 漢字, 🙂"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
        ("back\\slash [red]", "back\\slash [red]"),
        ("full\u3000width", "full\u3000width"),
    ],
)
def test_what_a_terminal_would_act_upon_is_an_escape(raw: str, shown: str) -> None:
    assert escape(raw) == shown


def test_lines_are_kept_where_they_are_wanted() -> None:
    assert escape("a\n\x1bb", keep="\n") == "a\n\\x1bb"


@pytest.mark.parametrize(
    ("payload", "shown"),
    [(b"abc", "abc"), (b"\xff\x00", "\\xff\\x00"), ("é".encode(), "é"), (b"\x1b]0;x\x07", "\\x1b]0;x\\x07")],
)
def test_a_payload_is_shown_as_text_where_it_is_text(payload: bytes, shown: str) -> None:
    assert escape_bytes(payload) == shown


def is_safe(line: str) -> bool:
    return line.isprintable() or escape(line) == line


@given(st.text())
def test_no_text_gets_a_control_character_through(raw: str) -> None:
    assert is_safe(escape(raw))
    if raw.isprintable():
        assert escape(raw) == raw


@given(st.text())
def test_json_is_exact_and_safe(raw: str) -> None:
    line = output.json_line({"a": raw})
    assert line.isprintable()
    assert json.loads(line) == {"a": raw}


@given(st.binary())
def test_a_payload_can_be_had_back_from_its_json(payload: bytes) -> None:
    fields = json.loads(output.json_line(output.payload_fields(payload)))
    decode = {"utf-8": str.encode, "base64": base64.b64decode}[fields["encoding"]]
    assert decode(fields["task"]) == payload


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="object is not for JSON"):
        output.json_line({"a": object()})


def test_a_table_is_aligned_and_safe_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    output.print_plain(("name", "n", "what"), [(NASTY, 5, "漢"), (long, 1000, "[bold]b"), ("c", "-", "")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(is_safe(line) for line in lines)
    assert long in lines[2]
    assert lines[2].endswith("1000  [bold]b")
    assert lines[1].endswith("   5  漢")
    assert lines[3].endswith("   -")


def test_a_long_payload_is_cut_in_a_table() -> None:
    assert shorten("x" * 200) == "x" * 200
    assert shorten("x" * 201) == "x" * 199 + "…"


def test_a_complaint_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_error(NASTY)
    assert is_safe(capsys.readouterr().err.replace("\n", ""))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_json_stays_json_in_an_encoding_that_lacks_characters(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding, errors="backslashreplace", write_through=True))
    output.print_json({"a": "é, 漢字, 🙂"})
    assert json.loads(out.getvalue().decode(encoding)) == {"a": "é, 漢字, 🙂"}

"""Codecs: what is encoded is decoded, by any key of the list; what was changed, or has another key, says so."""

from __future__ import annotations

import base64
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import of_each
from worqr import UsageError
from worqr.codecs import CHANGED, ZLIB, Codec, Compress, Fernet, Signed, Stack, WrongKey
from worqr.policy import Undecodable

OLD, NEW = (base64.urlsafe_b64encode(bytes([n]) * 32) for n in (1, 2))
SECRET = b"a secret of Signed"
STACKS: dict[str, Codec] = {
    "fernet": Fernet([NEW, OLD]),
    "signed": Signed(SECRET),
    "compress": Compress(above=10),
    "compress, fernet": Stack([Compress(above=10), Fernet(NEW)]),
    "compress, fernet, signed": Stack([Compress(), Fernet(NEW), Signed(SECRET)]),
}
KEYED = {
    "fernet": lambda *keys, **options: Fernet([base64.urlsafe_b64encode(key) for key in keys], **options),
    "signed": lambda *keys, **options: Signed(keys, **options),
}
A, B = b"a" * 32, b"b" * 32
MARKER = b"marker-of-the-payload"


@settings(max_examples=50)
@given(st.sampled_from(sorted(STACKS)), st.sampled_from([b"", b"\xc1F12", b"\xc1S12", ZLIB, b"x" * 20]), st.binary())
def test_each_codec_decodes_what_it_has_encoded(name: str, start: bytes, rest: bytes) -> None:
    codec = STACKS[name]
    assert codec.decode(codec.encode(start + rest)) == start + rest


def test_fernet_hides_the_value_and_its_repetition() -> None:
    first, second = (Fernet(NEW).encode(MARKER) for _ in range(2))
    assert MARKER not in first
    assert first != second


@of_each("make", KEYED.values(), str)
def test_the_first_key_encodes_and_all_decode(make: Callable[..., Codec]) -> None:
    before, meanwhile, after = make(A), make(B, A), make(B)
    assert meanwhile.decode(before.encode(MARKER)) == MARKER
    assert after.decode(meanwhile.encode(MARKER)) == MARKER
    with pytest.raises(WrongKey, match="add that key"):
        after.decode(before.encode(MARKER))


@of_each("make", KEYED.values(), str)
def test_each_changed_bit_is_found(make: Callable[..., Codec]) -> None:
    stored = make(A).encode(MARKER)
    for place in range(4, len(stored)):
        changed = stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :]
        with pytest.raises(Undecodable, match=CHANGED):
            make(A).decode(changed)
    for length in range(4, len(stored)):
        with pytest.raises(Undecodable):
            make(A).decode(stored[:length])


@of_each("make", KEYED.values(), str)
def test_a_plain_value_is_accepted_only_if_you_say_so(make: Callable[..., Codec]) -> None:
    for plain in (b"", b'{"to": 7}', b"\xc1", b"\xc1Fx", Compress(0).encode(b"x" * 99)):
        if not plain.startswith(make(A).encode(b"")[:2]):
            assert make(A, accept_plain=True).decode(plain) == plain
        with pytest.raises((Undecodable, WrongKey)):
            make(A).decode(plain)


def test_a_value_of_another_codec_is_no_plain_one() -> None:
    for encoded in (Fernet(NEW).encode(MARKER), Signed(SECRET).encode(MARKER)):
        with pytest.raises(WrongKey, match="was encoded by"):
            Compress().decode(encoded)
    with pytest.raises(WrongKey, match="by Fernet, not by Signed"):
        Signed(SECRET, accept_plain=True).decode(Fernet(NEW).encode(MARKER))


def test_a_compressed_value_is_smaller_and_has_a_bound() -> None:
    assert len(Compress().encode(b"x" * 10_000)) < 100
    assert Compress().encode(b"x" * 1024) == b"x" * 1024
    bomb = ZLIB + zlib.compress(bytes(10_000))
    with pytest.raises(Undecodable, match="max_size=9,999"):
        Compress(max_size=9_999).decode(bomb)
    with pytest.raises(UsageError, match="max_size=9,999"):
        Compress(max_size=9_999).encode(bytes(10_000))
    large = ZLIB + zlib.compress(bytes(30_000_000))
    tracemalloc.start()
    with pytest.raises(Undecodable):
        Compress(max_size=10_000).decode(large)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000
    for damaged in (bomb[:-1], bomb + b"x", ZLIB, ZLIB + b"no zlib"):
        with pytest.raises(Undecodable, match="damaged"):
            Compress().decode(damaged)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "no key": (lambda: Fernet([]), "at least one"),
    "a key of Fernet": (lambda: Fernet("secret-1"), "generate_key"),
    "a number": (lambda: Signed(cast_any(7)), "a list of them"),
    "a short key": (lambda: Signed("secret-1"), "at least 16 bytes"),
    "the order": (lambda: Stack([Fernet(NEW), Compress()]), "Compress must be the first"),
    "two of a kind": (lambda: Stack([Fernet(NEW), Fernet(OLD)]), "pass a list of keys"),
    "none": (lambda: Stack([]), "at least one codec"),
    "one without a list": (
        lambda: Stack(cast_any(Compress())),
        r"as in Stack\(\[Compress\(\), codec\]\), not Compress",
    ),
    "a class": (lambda: Stack([Compress(), cast_any(Fernet)]), "a codec of Stack must be one of .*, not Fernet"),
    "a text": (lambda: Compress(cast_any("1024")), "takes above >= 0 .* not '1024'"),
    "a bound": (lambda: Compress(max_size=0), "max_size >= 1"),
}


def cast_any(value: Any) -> Any:
    return value


@of_each("mistake", MISTAKES)
def test_a_mistake_says_the_remedy_and_no_key(mistake: str) -> None:
    make, remedy = MISTAKES[mistake]
    with pytest.raises(UsageError, match=remedy) as caught:
        make()
    assert "secret-1" not in str(caught.value)


def test_cryptography_is_imported_by_fernet_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, worqr.codecs as c; c.Signed(b'k' * 16); print('cryptography' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    with pytest.raises(UsageError, match=r"pip install 'worqr\[encryption\]'"):
        Fernet(NEW)

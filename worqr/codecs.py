"""Codecs of stored values: `Fernet` encrypts, `Signed` signs, `Compress` compresses, `Stack` joins them. Pure.

``Mesh(codec=...)`` encodes and decodes by `StoredValues`, its only user of a codec; programs may also call a codec by hand.

An encoded value begins with a header of four bytes: 0xC1, a letter for the codec, and two bytes for the key. 0xC1 is in no UTF-8
text, so JSON never begins with it. The bytes for the key let keys rotate: the first key of a list encodes, and all of them
decode. The codecs of a stack encode in their order, and decode in the reverse order.
"""

from __future__ import annotations

import base64
import hmac
import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeAlias, TypeVar, cast

from worqr.errors import UsageError, WorqrError
from worqr.policy import Retry, Undecodable

if TYPE_CHECKING:
    from cryptography.fernet import Fernet as Cipher

__all__ = ["Codec", "Compress", "Fernet", "Signed", "Stack", "WrongKey"]

Keys: TypeAlias = "bytes | str | Sequence[bytes | str]"

K = TypeVar("K")

MARK: Final = 0xC1
"""The first byte of a header. UTF-8 and MessagePack never use it."""
HEADER: Final = 4
"""Bytes of a header."""
MAC: Final = 32
"""Bytes of a signature by HMAC-SHA256."""
SHORTEST_KEY: Final = 16
"""Bytes of a key of `Signed`. Shorter keys can be guessed."""
MAX_DECODED: Final = 64 * 1024 * 1024
"""Bytes of a value that `Compress` decodes: four times the default of ``Mesh(max_payload=...)``."""
ZLIB: Final = b"\xc1Z\0\0"
"""The header of `Compress`, which has no key."""
KEYED: Final = {b"F": "Fernet", b"S": "Signed", b"X": "another codec"}
"""The letters of headers that no other codec decodes."""
KEY_LABEL: Final = b"worqr key"
"""What a key signs; the first two bytes of the signature name the key in headers."""
OWN: Final = b"\xc1X\0\0"
"""The header of a codec that is not of this module."""
NAMES: Final = {b"F": "Fernet", b"S": "Signed", b"Z": "Compress", b"X": "another codec"}
"""The letters of all headers."""
EQUAL_LABEL: Final = b"worqr equal"
"""What a key signs, with a value, for the start of its deterministic encryption."""
CHANGED: Final = "a value was changed after it was encoded, or is damaged"
TRY_AGAIN: Final = 30.0
"""Seconds until a task with an unknown key runs again. A program with the right key needs about that long to start."""


class Codec(Protocol):
    """What encodes and decodes bytes: each codec of this module, and a `Stack` of them."""

    def encode(self, value: bytes, /) -> bytes:
        """Return the bytes to store."""
        ...

    def decode(self, stored: bytes, /) -> bytes:
        """Return the value of stored bytes."""
        ...


class WrongKey(WorqrError, Retry):
    """A value was encoded with a key that this codec does not have. Add that key to the list of keys.

    In a handler, the task runs again 30 s later, and no failure is counted: it waits until a worker has the key.
    """

    __module__ = "worqr.codecs"

    def __init__(self, message: str) -> None:
        Retry.__init__(self, message, delay=TRY_AGAIN, counted=False)


class Fernet:
    """Encrypts and signs, by Fernet: AES-128 in CBC mode and HMAC-SHA256. Needs ``pip install 'worqr[encryption]'``.

    The same value is encrypted to other bytes each time.

    Args:
        keys: A key, or a list: the first one encrypts, and all of them decrypt. ``cryptography.fernet.Fernet.generate_key()``
            makes one.
        accept_plain: Decode a value without a header to itself: of a program without the codec, or from before you used it.
            Every program that may write to the server can then store such values.

    Raises:
        UsageError: cryptography is not installed, or a key is not valid.
    """

    def __init__(self, keys: Keys, *, accept_plain: bool = False) -> None:
        try:
            from cryptography.fernet import Fernet as Cipher
        except ImportError:
            raise UsageError("codecs.Fernet needs cryptography: run `pip install 'worqr[encryption]'`") from None
        given = _keys(keys, "Fernet")
        try:
            ciphers = [Cipher(key) for key in given]
        except ValueError:  # its text names no key, and neither does this one
            raise UsageError(
                "a key of Fernet must be 32 bytes in URL-safe base64: make one with `Fernet.generate_key()` of cryptography"
            ) from None
        self._ring: _Ring[Cipher] = _Ring("Fernet", b"F", given, ciphers, accept_plain=accept_plain)
        self._first_key = given[0]

    def encode(self, value: bytes, /) -> bytes:
        """Return the encrypted value."""
        header, cipher = self._ring.first
        return header + base64.urlsafe_b64decode(cipher.encrypt(value))

    def encode_equal(self, value: bytes, /) -> bytes:
        """Return the encrypted value, which is the same for equal values: its initialisation vector is a keyed digest of it."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.padding import PKCS7

        key = base64.urlsafe_b64decode(self._first_key)
        start = hmac.digest(self._first_key, EQUAL_LABEL + value, "sha256")[:16]
        padder, cipher = PKCS7(128).padder(), Cipher(algorithms.AES(key[16:]), modes.CBC(start)).encryptor()
        padded = padder.update(value) + padder.finalize()
        token = b"\x80" + bytes(8) + start + cipher.update(padded) + cipher.finalize()
        return self._ring.first[0] + token + hmac.digest(key[:16], token, "sha256")

    def decode(self, stored: bytes, /) -> bytes:
        """Return the decrypted value.

        Raises:
            WrongKey: It was encrypted with a key that is not in the list.
            Undecodable: It was changed, or it has no header and `accept_plain` is False.
        """
        from cryptography.fernet import InvalidToken

        if (ciphers := self._ring.of(stored)) is None:
            return stored
        token = base64.urlsafe_b64encode(stored[HEADER:])
        for cipher in ciphers:
            try:
                return cipher.decrypt(token)
            except InvalidToken:
                continue
        raise Undecodable(CHANGED)


class Signed:
    """Signs with HMAC-SHA256, so that a worker runs only what a program with the key has stored. The value stays readable.

    Args:
        keys: A secret of at least 16 bytes, or a list: the first one signs, and all of them are accepted.
        accept_plain: Accept a value without a header, while you begin to sign. Until you turn it off, nothing is protected.

    Raises:
        UsageError: A key is too short.
    """

    def __init__(self, keys: Keys, *, accept_plain: bool = False) -> None:
        given = _keys(keys, "Signed")
        if min(map(len, given)) < SHORTEST_KEY:
            raise UsageError(
                f"a key of Signed must have at least {SHORTEST_KEY} bytes: make one with `secrets.token_bytes(32)`"
            )
        self._ring: _Ring[bytes] = _Ring("Signed", b"S", given, given, accept_plain=accept_plain)

    def encode(self, value: bytes, /) -> bytes:
        """Return the value with its signature in front."""
        header, key = self._ring.first
        return header + hmac.digest(key, header + value, "sha256") + value

    def decode(self, stored: bytes, /) -> bytes:
        """Return the value.

        Raises:
            WrongKey: It was signed with a key that is not in the list.
            Undecodable: It was changed, or it has no header and `accept_plain` is False.
        """
        if (keys := self._ring.of(stored)) is None:
            return stored
        header, mac, value = stored[:HEADER], stored[HEADER : HEADER + MAC], stored[HEADER + MAC :]
        if any(hmac.compare_digest(mac, hmac.digest(key, header + value, "sha256")) for key in keys):
            return value
        raise Undecodable(CHANGED)


class Compress:
    """Compresses larger values with zlib. A value that does not become smaller is stored as it is.

    Args:
        above: Compress values of more bytes than this.
        max_size: The most bytes of a decompressed value. A value that hides more of them costs its own run only.

    Raises:
        UsageError: `above` is negative, or `max_size` is less than 1; or one is no whole number.
    """

    def __init__(self, above: int = 1024, *, max_size: int = MAX_DECODED) -> None:
        if (
            not all(isinstance(each, int) for each in cast("tuple[object, ...]", (above, max_size)))
            or above < 0
            or max_size < 1
        ):
            raise UsageError(f"Compress takes above >= 0 and max_size >= 1, not {above!r} and {max_size!r}")
        self._above = above
        self._max_size = max_size

    def encode(self, value: bytes, /) -> bytes:
        """Return the compressed value, or `value` itself.

        Raises:
            UsageError: It has more than `max_size` bytes, so that it could not be decoded.
        """
        if len(value) > self._max_size:
            raise UsageError(f"a value of {len(value):,} bytes is over max_size={self._max_size:,} of Compress")
        begins_like_header = value[:1] == bytes([MARK])
        if len(value) <= self._above and not begins_like_header:
            return value
        compressed = ZLIB + zlib.compress(value)
        return compressed if len(compressed) < len(value) or begins_like_header else value

    def decode(self, stored: bytes, /) -> bytes:
        """Return the decompressed value, or `stored` itself if it was not compressed.

        Raises:
            WrongKey: It was encrypted or signed.
            Undecodable: It was changed, or it has more than `max_size` bytes.
        """
        if not stored.startswith(ZLIB):
            _check_other(stored, "Compress")
            return stored
        stream = zlib.decompressobj()
        try:
            value = stream.decompress(stored[HEADER:], self._max_size + 1)
        except zlib.error:
            raise Undecodable("a compressed value is damaged") from None
        if len(value) > self._max_size:
            raise Undecodable(f"a compressed value has more than max_size={self._max_size:,} bytes")
        if not stream.eof or stream.unused_data:
            raise Undecodable("a compressed value is damaged")
        return value


def check_codec(codec: Codec, what: str) -> Codec:
    """Return `codec` if it can encode and decode. Raises UsageError, which names its type: its text may have keys."""
    if isinstance(codec, type) or not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
        kind = codec.__name__ if isinstance(codec, type) else type(codec).__name__
        raise UsageError(
            f"{what} must be one of worqr.codecs, as in codec=Fernet(keys), or have encode and decode, not {kind}"
        )
    return codec


class Stack:
    """Several codecs in a row. `Compress` comes first, because what is encrypted does not become smaller.

    Args:
        codecs: `Compress`, `Fernet` and `Signed`, at most one of each, in the order in which they encode.

    Raises:
        UsageError: `Compress` is not the first one, two are of one kind, there are none, or one is no codec.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        if not isinstance(codecs, list | tuple):
            raise UsageError(
                f"Stack takes a list of codecs, as in Stack([Compress(), codec]), not {type(codecs).__name__}"
            )
        for each in codecs:
            check_codec(each, "a codec of Stack")
        kinds = [type(codec) for codec in codecs]
        if not kinds:
            raise UsageError("Stack needs at least one codec")
        if len({*kinds}) < len(kinds):
            raise UsageError("Stack takes one codec of a kind: to rotate keys, pass a list of keys to one codec")
        if Compress in kinds[1:]:
            raise UsageError(
                "Compress must be the first codec of a Stack: what is encrypted or signed is compressed before"
            )
        self._codecs = tuple(codecs)

    def encode(self, value: bytes, /) -> bytes:
        """Return the value, encoded by each codec."""
        for codec in self._codecs:
            value = codec.encode(value)
        return value

    def encode_equal(self, value: bytes, /) -> bytes:
        """Return the value, encoded by each codec; the same for equal values, if the codecs can do that."""
        for codec in self._codecs:
            value = _equal(codec)(value)
        return value

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs, in the order in which they encode."""
        return self._codecs

    def decode(self, stored: bytes, /) -> bytes:
        """Return the value, decoded by each codec, the last one first.

        Raises:
            WrongKey: One of the codecs does not have the key.
            Undecodable: The value is damaged, or has no header and must have one.
        """
        for codec in reversed(self._codecs):
            stored = codec.decode(stored)
        return stored


class Sealed(bytes):
    """Bytes that are encoded already, as another part of the mesh has stored them: they are sent unchanged."""

    __slots__ = ()


_may_read: ContextVar[bool] = ContextVar("worqr.may_read", default=True)


def let_read(may: bool, /) -> None:
    """Note for the present task, and those that it starts, whether it acts for a person who may read payloads."""
    _may_read.set(may)


class StoredValues:
    """Encodes the values that a mesh stores, and decodes them: what the mesh makes of ``codec=`` and ``accept_plain=``.

    If a codec of the application raises an error, the value that it got is refused, and all others go on.
    """

    def __init__(self, codec: Codec, *, accept_plain: bool) -> None:
        parts = codec.codecs if isinstance(codec, Stack) else (codec,)
        self._codec = codec
        self._frames = not all(isinstance(each, Fernet | Signed | Compress) for each in parts)
        self._takes_plain = accept_plain or all(isinstance(each, Compress) for each in parts)
        self._compress = next((each for each in parts if isinstance(each, Compress)), Compress())

    def encode(self, value: bytes) -> bytes:
        """Return the bytes to store.

        Raises:
            UsageError: The codec cannot encode the value.
        """
        return self._encoded(value, self._codec.encode)

    def encode_equal(self, value: bytes) -> bytes:
        """Return the bytes to store, which are the same for equal values if the codec can do that.

        Raises:
            UsageError: The codec cannot encode the value.
        """
        return self._encoded(value, _equal(self._codec))

    def encode_alike(self, value: bytes, what: str, *, equal: bool = False) -> bytes:
        """Return the bytes as which a value is stored each time.

        Raises:
            UsageError: They are others each time, so `what` cannot compare them.
        """
        encode = self.encode_equal if equal else self.encode
        found = encode(value)
        if found != encode(value):
            raise UsageError(
                f"{what} compares payloads, and the codec of this mesh gives equal payloads other bytes each time: use the id "
                "of the job"
            )
        return found

    def _encoded(self, value: bytes, encode: Callable[[bytes], object]) -> bytes:
        if type(value) is Sealed:
            return bytes(value)
        try:
            found = encode(value)
        except (UsageError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of an extension in Rust is no Exception
            raise UsageError(f"the codec of this mesh cannot encode a value: {type(error).__name__}") from error
        if not isinstance(found, bytes):
            raise UsageError(f"the codec of this mesh must encode to bytes, not {type(found).__name__}")
        return OWN + found if self._frames else found

    def decode(self, stored: bytes) -> bytes:
        """Return the value of stored bytes.

        Raises:
            WrongKey: It was encoded with a key, or a codec, that this mesh does not have.
            Undecodable: It was changed; or it is plain, and `accept_plain` is False.
        """
        if stored[:1] != ZLIB[:1]:
            if self._takes_plain:
                return stored
            raise Undecodable(
                "a value was stored without the codec of this mesh: if it is of a program that you trust, pass "
                "Mesh(accept_plain=True)"
            )
        if self._takes_plain and stored.startswith(ZLIB):  # compressed alone is plain, too: no key protects it
            return self._compress.decode(stored)
        if self._frames:
            if not stored.startswith(OWN):
                _check_other(stored, "the codec of this mesh")
                raise Undecodable("a value was encoded by Compress, not by the codec of this mesh")
            stored = stored[HEADER:]
        try:
            found = cast("object", self._codec.decode(stored))
        except (WrongKey, Undecodable, KeyboardInterrupt):
            raise
        except BaseException as error:  # as in `_encoded`
            raise Undecodable(f"the codec of this mesh cannot decode a value: {type(error).__name__}") from error
        if not isinstance(found, bytes):
            raise Undecodable(f"the codec of this mesh must decode to bytes, not {type(found).__name__}")
        return found

    def readable(self, stored: bytes) -> bytes:
        """Return the value of stored bytes for people; the bytes themselves if this mesh cannot decode them, or the person must
        not read them.
        """
        if not _may_read.get():
            return stored
        try:
            return self.decode(stored)
        except (WrongKey, Undecodable):
            return stored

    def decode_tagged(self, stored: bytes) -> bytes:
        """Return what `encode_tagged` was given. Raises as `decode`."""
        kind, space, value = stored.partition(b" ")
        return kind + space + self.decode(value) if _has_value(kind) else stored

    def encode_tagged(self, value: bytes) -> bytes:
        """Return a value with its kind in front, encoded without its kind. ``none`` and ``failed`` have no value."""
        kind, space, rest = value.partition(b" ")
        return kind + space + self.encode(rest) if _has_value(kind) else value


def encoded_by(stored: bytes) -> str:
    """Return which codec and key have encoded stored bytes last, by their header: ``Fernet, key ab12``. Empty: they are plain."""
    name = NAMES.get(stored[1:2]) if stored[:1] == ZLIB[:1] and len(stored) >= HEADER else None
    if name is None:
        return ""
    return name if stored[2:HEADER] == b"\0\0" else f"{name}, key {stored[2:HEADER].hex()}"


def check_not_encoded(stored: bytes) -> None:
    """Raise WrongKey if a program without a codec is about to read bytes that a codec has encoded."""
    if name := encoded_by(stored):
        raise WrongKey(
            f"a value is encoded ({name}), and this mesh has no codec: give it that of the program that stored the value, as "
            "in Mesh(codec=...)"
        )


def _has_value(kind: bytes) -> bool:
    """Return True for the kinds in front of a value: ``bytes``, ``json``, and ``json-`` with the mark of a type."""
    return kind == b"bytes" or kind[:4] == b"json"


def _equal(codec: Codec) -> Callable[[bytes], bytes]:
    """Return how a codec encodes equal values to equal bytes; as far as it can."""
    return getattr(codec, "encode_equal", codec.encode)


class _Ring(Generic[K]):
    """The keys of a codec, by their headers. Two keys may have one header, though that is rare.

    Attributes:
        first: the header and the key that encode.
    """

    def __init__(
        self, name: str, letter: bytes, names: Sequence[bytes], keys: Sequence[K], *, accept_plain: bool
    ) -> None:
        self._name = name
        self._letter = letter
        self._accept_plain = accept_plain
        headers = [bytes([MARK]) + letter + hmac.digest(each, KEY_LABEL, "sha256")[:2] for each in names]
        self.first: tuple[bytes, K] = headers[0], keys[0]
        self._by_header: dict[bytes, list[K]] = {}
        for header, key in zip(headers, keys, strict=True):
            self._by_header.setdefault(header, []).append(key)

    def of(self, stored: bytes) -> list[K] | None:
        """Return the keys that may have encoded a value; None if it is plain, and accepted.

        Raises:
            WrongKey: None of the keys has.
            Undecodable: The value is plain.
        """
        if stored[:2] == bytes([MARK]) + self._letter:
            keys = self._by_header.get(stored[:HEADER])
            if keys is None:
                raise WrongKey(
                    f"a value has the key {stored[2:HEADER].hex()}, which is not in the list of {self._name}: add that key"
                )
            return keys
        _check_other(stored, self._name)
        if not self._accept_plain:
            raise Undecodable(f"a value was stored without {self._name}: to decode such values, pass accept_plain=True")
        return None


def _check_other(stored: bytes, name: str) -> None:
    """Raise WrongKey if a codec with keys, which is not the codec `name`, has encoded a value last."""
    other = KEYED.get(stored[1:2]) if stored[:1] == bytes([MARK]) and len(stored) >= HEADER else None
    if other is not None:
        raise WrongKey(f"a value was encoded by {other}, not by {name}: use the codec of the program that stored it")


def _keys(keys: Keys, name: str) -> list[bytes]:
    """Return the keys of a codec as bytes. Raises UsageError if there are none; its text has no key."""
    found: list[object] = [keys] if isinstance(keys, bytes | str) else []
    if isinstance(keys, list | tuple):
        found.extend(keys)
    encoded = [each.encode() if isinstance(each, str) else each for each in found if isinstance(each, bytes | str)]
    if not encoded or len(encoded) < len(found):
        raise UsageError(f"{name} takes a key as bytes or str, or a list of them with at least one")
    return encoded

"""Check the files of a ``rediss://`` URL before anything is sent, and explain failed TLS handshakes.

OpenSSL's errors do not name the file, and OpenSSL asks for the password of a private key on the terminal. Not here: the
connection (redis-py reads the files again for each one, so you can replace them while the program runs).
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from worqr.errors import UsageError

_AUTHORITY = "name the certificate authority: rediss://...?ssl_ca_certs=/path/to/ca.pem"
_VERIFICATION = {  # by OpenSSL's code
    9: "the server's certificate is not valid yet; are the clocks right?",
    10: "the server's certificate has expired",
    62: "the server's certificate is for another name than the URL's",
    64: "the server's certificate is for another address than the URL's",
}
_OWN = "the server asks for a client certificate that it trusts: rediss://...?ssl_certfile=...&ssl_keyfile=..."
_NO_TLS = "no TLS is spoken at this port; is it redis://?"
_REASONS = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "SSLV3_ALERT_BAD_CERTIFICATE": _OWN,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _OWN,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _OWN,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _OWN,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _OWN,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _OWN,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _OWN,
    "TLSV1_ALERT_ACCESS_DENIED": _OWN,
    "TLSV1_ALERT_UNKNOWN_CA": _OWN,
}


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors that caused it."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        inner = inner.__cause__ or inner.__context__


def tls_hint(error: BaseException) -> str | None:
    """Return the remedy for a failed handshake that waiting does not help; None for every other error."""
    inner = next((each for each in chain_of(error) if isinstance(each, ssl.SSLError)), None)
    if isinstance(inner, ssl.SSLCertVerificationError):
        return _VERIFICATION.get(inner.verify_code, _AUTHORITY)
    return None if inner is None else _REASONS.get(inner.reason)


def is_silent_handshake(error: BaseException) -> bool:
    """Return True if the other side accepted the first bytes and sent nothing, as a server without TLS does: it waits for
    more.
    """
    return any("handshake operation timed out" in str(each) for each in chain_of(error))


def check_tls_files(options: Mapping[str, str], shown: str) -> None:
    """Check that the certificates and the key of these options exist, are readable, and belong together.

    Args:
        options: of the URL: ``ssl_ca_certs``, ``ssl_ca_path``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_password``.
        shown: the URL without its secrets, for messages.

    Raises:
        UsageError: an option is invalid; the text names it, its value and the reason.
    """
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options:
            _check_readable(name, options[name], shown)
    folder = options.get("ssl_ca_path")
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"the server's URL {shown}: ssl_ca_path={folder!r} is not a directory")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if "ssl_ca_certs" in options:
        try:
            context.load_verify_locations(cafile=options["ssl_ca_certs"])
        except ssl.SSLError as error:
            raise _wrong("ssl_ca_certs", options["ssl_ca_certs"], "holds no certificate", error, shown) from error
    _check_own_certificate(context, options, shown)


def _check_readable(name: str, path: str, shown: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the server's URL {shown}: {name}={path!r} cannot be read: {why}") from error


def _check_own_certificate(context: ssl.SSLContext, options: Mapping[str, str], shown: str) -> None:
    certificate, key, password = (options.get(name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_password"))
    if certificate is None:
        if key is not None:
            raise UsageError(f"the server's URL {shown}: ssl_keyfile={key!r} needs its certificate, ssl_certfile, too")
        return

    def secret() -> str:
        if password is None:
            raise UsageError(
                f"the server's URL {shown}: the private key in {key or certificate!r} is encrypted: give ssl_password"
            )
        return password

    try:
        context.load_cert_chain(certificate, key, secret)
    except ssl.SSLError as error:
        place, what = ("ssl_certfile", certificate) if key is None else ("ssl_keyfile", key)
        why = "holds no private key that can be read" + ("" if password is None else " with ssl_password")
        if b"-----BEGIN CERTIFICATE-----" not in Path(certificate).read_bytes():
            place, what, why = "ssl_certfile", certificate, "holds no certificate"
        elif error.reason == "KEY_VALUES_MISMATCH":
            why = f"is not the key of ssl_certfile={certificate!r}"
        raise _wrong(place, what, why, error, shown) from error


def _wrong(name: str, path: str, why: str, error: ssl.SSLError, shown: str) -> UsageError:
    return UsageError(f"the server's URL {shown}: {name}={path!r} {why} ({error.reason or error})")

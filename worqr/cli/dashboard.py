"""``worqr dashboard``: serve the dashboard as a program of its own."""

from __future__ import annotations

import getpass
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from ipaddress import ip_network
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import FROM_ENVIRONMENT, ConnectOptions, flag, mesh_at
from worqr.cli.output import print_error
from worqr.errors import UsageError

if TYPE_CHECKING:
    from worqr.dashboard.standalone import Network, Settings
    from worqr.mesh import Mesh


SHORTEST: Final = 8
"""Characters of a password."""


Bind = Annotated[str, Parameter(metavar="HOST:PORT", help="Address to listen at.")]
PasswordFile = Annotated[
    Path | None, Parameter(metavar="FILE", help="Let in the users of this file, made with --hash.")
]
TrustHeader = Annotated[str, Parameter(metavar="NAME", help="Let in the viewer whom a proxy names in this header.")]
Proxies = Annotated[
    tuple[str, ...],
    Parameter(
        metavar="ADDRESS",
        help="Address or network of that proxy, such as 10.0.0.0/8; with --password-file, of one that sets X-Forwarded-For.",
    ),
]
Open = Annotated[bool, flag("Let everyone look, without a login. Nothing can be changed.")]
Rights = Annotated[
    Literal["reader", "operator", "admin"], Parameter(help="What viewers with a password or a header may do.")
]
ReadOnly = Annotated[bool, flag("Let viewers look only.")]
AllowEnqueue = Annotated[bool, flag("Let administrators enqueue tasks by hand.")]
Hosts = Annotated[
    tuple[str, ...], Parameter(metavar="NAME", help="Host name of the dashboard, such as ops.example.org.")
]
Origins = Annotated[
    tuple[str, ...], Parameter(metavar="URL", help="Public origin, such as https://ops.example.org, behind a proxy.")
]
RootPath = Annotated[
    str, Parameter(metavar="PATH", help="Path below which a proxy serves the dashboard, such as /worqr.")
]
Payloads = Annotated[
    Literal["redacted", "never", "full"],
    Parameter(help="How payloads are shown; redacted: with secrets hidden."),
]
Redact = Annotated[str, Parameter(metavar="REGEX", help="Keys whose values are secret, in place of the default.")]
TraceUrl = Annotated[str, Parameter(metavar="URL", help="Address of a trace in your system, with {trace_id}.")]
Hash = Annotated[
    str, Parameter(metavar="NAME", help="Ask for a password, print a line for the password file, and exit.")
]


TokenFile = Annotated[
    Path | None, Parameter(metavar="FILE", help="Let in programs with the tokens of this file, made with --new-token.")
]
NewToken = Annotated[
    str,
    Parameter(metavar="NAME", help="Add a token with these --rights to the token file, print it, and exit."),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class LoginOptions:
    """Who gets in, and what they may do."""

    password_file: PasswordFile = None
    trust_header: TrustHeader = ""
    trusted_proxy: Proxies = ()
    token_file: TokenFile = None
    i_know_it_is_open: Open = False
    rights: Rights = "operator"
    read_only: ReadOnly = False
    allow_enqueue: AllowEnqueue = False
    hash: Hash = ""
    new_token: NewToken = ""

    def settings(self) -> dict[str, Any]:
        """Return the same as fields of the settings of the dashboard."""
        return {
            "passwords": None if self.password_file is None else _read(self.password_file, "password file"),
            "tokens": None if self.token_file is None else _read(self.token_file, "token file"),
            "trust_header": self.trust_header,
            "proxies": tuple(map(_network, self.trusted_proxy)),
            "open_to_all": self.i_know_it_is_open,
            "rights": self.rights,
            "read_only": self.read_only,
            "allow_enqueue": self.allow_enqueue,
        }


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ShownOptions:
    """What the pages show of tasks."""

    payloads: Payloads = "redacted"
    redact: Redact = ""
    trace_url: TraceUrl = ""


AS_USUAL: Final = ShownOptions()
BY_ADDRESS: Final = LoginOptions()


def dashboard(
    *,
    bind: Bind = "127.0.0.1:9090",
    login: LoginOptions = BY_ADDRESS,
    host: Hosts = (),
    origin: Origins = (),
    root_path: RootPath = "",
    shown: ShownOptions = AS_USUAL,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Serve the dashboard, a web page of queues, jobs and workers, until Ctrl-C.

    On 127.0.0.1 it prints an address with a token, which works once. Other addresses need a login.
    """
    try:
        from worqr.dashboard import standalone
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"the dashboard needs the package {error.name!r}: run `pip install 'worqr[dashboard]'`"
        ) from None
    if login.hash:
        print(_hashed(login.hash, standalone.hash_password))
        return
    if login.new_token:
        print(_added_token(login, standalone.new_token(), standalone.token_line))
        return
    address, port = _address(bind)
    settings = standalone.Settings(
        host=address,
        port=port,
        hosts=host,
        origins=origin,
        root_path=root_path,
        **login.settings(),
        **asdict(shown),
    )
    _serve(mesh_at(connect, "dashboard"), settings)


def _serve(mesh: Mesh[None], settings: Settings) -> None:
    import trio

    from worqr.dashboard import standalone

    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.StreamHandler())  # warnings and errors of the dashboard, to the standard error
    try:
        app, address = standalone.build(mesh, settings)
    except UsageError as error:
        raise InvalidArguments(str(error)) from None

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(standalone.serve, app, settings)
            print(address, flush=True)
            print_error("the dashboard is running; open the address above, and press Ctrl-C to stop")

    try:
        trio.run(run)
    except* OSError as group:
        raise CommandFailed(
            f"cannot listen at {settings.host}:{settings.port}: {group.exceptions[0]}; choose another address with --bind"
        ) from None
    print_error("the dashboard has stopped")


def _name(name: str) -> str:
    if ":" in name or not name.isprintable():
        raise InvalidArguments(f"a name must not contain a colon or control characters, got {name!r}")
    return name


def _hashed(name: str, make: Callable[[str], str]) -> str:
    _name(name)
    if sys.stdin.isatty():
        password = getpass.getpass("Password: ")
        if getpass.getpass("The same again: ") != password:
            raise CommandFailed("the two passwords differ; run the command again")
    else:
        password = sys.stdin.readline().rstrip("\n")
    if len(password) < SHORTEST:
        raise CommandFailed(f"the password is shorter than {SHORTEST} characters; choose a longer one")
    return f"{name}:{make(password)}"


def _added_token(login: LoginOptions, token: str, line_of: Callable[[str, str, str], str]) -> str:
    """Add a token to the token file, which only its owner may read, and return it."""
    name, path = _name(login.new_token), login.token_file
    if path is None:
        raise InvalidArguments("name the file to which --new-token adds the token: --token-file FILE")
    try:
        with open(path, "a", encoding="utf-8", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
            file.write(f"{line_of(name, login.rights, token)}\n")
            mode = os.fstat(file.fileno()).st_mode & 0o777
    except OSError as error:
        raise CommandFailed(f"cannot write the token file: {error}") from None
    print_error(
        f"{path} now has a hash of the token of {name}, with the rights of {login.rights!r}; the token is not kept"
    )
    if mode & 0o077:
        print_error(
            f"warning: other users of this machine have access to {path} (mode {mode:o}); run `chmod 600 {quote(str(path))}`"
        )
    return token


def _address(bind: str) -> tuple[str, int]:
    name, colon, port = bind.rpartition(":")
    if not colon or not name or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArguments(f"--bind must be HOST:PORT, such as 127.0.0.1:9090, got {bind!r}")
    return name, int(port)


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise InvalidArguments(f"--trusted-proxy must be an address or a network: {error}") from None


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"cannot read the {what}: {error}") from None

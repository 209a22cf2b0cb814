"""``worqr move``: the data of one server to another, while producers and workers go on.

The new server replicates the old one first. Then FAILOVER pauses the writes for a moment, until the new server has all of them,
and swaps the roles. So each task is on the server that accepts writes. The old server refuses them, as a replica.
A link that finds a replica reads there where the mesh has moved to (`worqr.link.connector.MovableEndpoint`).

Each step may be repeated. A move that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl, urlsplit

from cyclopts import Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import FROM_ENVIRONMENT, ConnectOptions, flag, mesh_at, parse_duration
from worqr.client.client import url_or_default
from worqr.errors import UsageError, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import LinkSettings
from worqr.link.connector import StaticEndpoint, info_fields, open_connection
from worqr.link.failures import ConnectionLost, ErrorReply

POLL_EVERY: Final = 0.02
"""Seconds between two looks at the servers, which decides how long programs wait for their new address."""

HAND_OVER_WITHIN: Final = 10.0
"""Seconds for which the old server accepts no writes, at most; then it accepts them again."""

REACHED_WITHIN: Final = 20.0
"""Seconds within which the new server must have begun to copy."""

LOADS: Final = 3
"""Copies that the new server begins before it counts as unable to load them."""

SCANNED: Final = 1000

MOST_APART: Final = 2
"""Seconds that the clocks of the servers may differ. Expiries are times, so they would come early or late by that."""

LOCAL: Final = ("localhost", "127.0.0.1", "::1")

SUFFIX: Final = RegistryKeys("").queues.removeprefix(RegistryKeys("").base)
"""Of a key that each mesh has."""


class Side:
    """One of the two servers, and a connection to it.

    Attributes:
        settings: how to connect.
        name: its URL without secrets.

    Raises:
        CommandFailed: the server cannot be reached, or refuses a request.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self.settings: LinkSettings = settings
        self.name: str = settings.address.redacted
        endpoint = StaticEndpoint(self.name, settings.address.seeds[0])
        try:
            self._wire = open_connection(settings, endpoint, "move", replica=True, first=True)
        except WorqrError as error:
            raise CommandFailed(f"cannot connect to {self.name}: {error}") from None

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    @property
    def place(self) -> tuple[str, int]:
        """Its host and port."""
        return self.settings.address.host, self.settings.address.port

    def ask(self, *words: str | int) -> Any:
        """Return the reply to a request."""
        reply = self.try_to(*words)
        if isinstance(reply, ErrorReply):
            raise self.refusal(reply)
        return reply

    def refusal(self, reply: ErrorReply) -> CommandFailed:
        """Return the error for a request that the server refuses."""
        return CommandFailed(
            f"the server at {self.name} refuses a request: {reply}. Moving needs a user that may do everything (+@all); many "
            "managed services have a migration of their own instead"
        )

    def try_to(self, *words: str | int) -> Any:
        """As `ask`; return the error of a request that is refused."""
        try:
            return self._wire.exchange([tuple(map(str, words))])[0]
        except ConnectionLost as lost:
            raise CommandFailed(
                f"lost the connection to {self.name}: {lost}; run the same command again, it goes on where it stopped"
            ) from None

    def info(self) -> dict[str, str]:
        """Return the fields of INFO."""
        return info_fields(self.ask("INFO"))

    def log_in_as(self) -> tuple[str, str]:
        """Return user and password for a replica of this server; empty if it needs none."""
        address, credentials = self.settings.address, self.settings.credentials
        if credentials is None:
            return address.username, address.password
        user, password = ("", *credentials.get(self.name))[-2:]
        return user, password


class Move:
    """One move: its checks and its steps.

    Args:
        old, new: the servers.
        seen_at: host and port at which the new server reaches the old one.
        stored_url: the URL of the new server for programs that use the old one.
        say: gets a line of text about each step.
    """

    def __init__(
        self, old: Side, new: Side, seen_at: tuple[str, int], stored_url: str, say: Callable[[str], None]
    ) -> None:
        self._old = old
        self._new = new
        self._seen_at = seen_at
        self._stored_url = stored_url
        self._say = say

    def run(self, *, only_check: bool) -> None:
        """Move, or go on with a move that was interrupted.

        Raises:
            CommandFailed: a check or a step failed. The text says which server accepts writes then.
        """
        old = self._old.info()
        if _hands_over(old) and only_check:
            raise CommandFailed(f"{self._old.name} hands over now: run the command without --check, it goes on")
        if _hands_over(old):  # for a command that was interrupted
            self._wait_for_roles()
        old, new = self._old.info(), self._new.info()
        done = self._is_done(old, new)
        if not done:
            self._check(old, new)
        if only_check:
            self._say("the mesh has moved already" if done else "all checks passed; nothing was changed")
            return
        began = time.monotonic()
        if not done:
            self._copy(old, new)
            self._write_addresses(self._old)
            paused = self._hand_over()
        else:
            paused = 0.0
            self._write_addresses(self._new)
        self._settle()
        meshes = self._write_addresses(self._new)  # also of those that began after the first look
        keys = sum(_keys(self._new.info()).values())
        self._say(
            f"moved {keys} keys of {meshes} {'mesh' if meshes == 1 else 'meshes'} in {time.monotonic() - began:.1f} s; "
            f"writes waited for {paused:.2f} s"
        )
        self._say(
            f"{self._old.name} is a replica now, and sends programs to {self._new.name}. Change their URL, restart them "
            "when it suits you, and stop the old server last"
        )

    def _is_done(self, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
        """Return True if the old server is a replica of the new one."""
        host, port = self._new.place
        return old["role"] == "slave" and new["role"] == "master" and _primary(old) == f"{host}:{port}"

    def _is_copying(self, new: Mapping[str, str]) -> bool:
        """Return True if the new server is a replica of the old one."""
        host, port = self._seen_at
        return _primary(new) == f"{host}:{port}"

    # The checks

    def _check(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        if old.get("run_id") == new.get("run_id"):
            raise CommandFailed(f"{self._old.name} and {self._new.name} are the same server")
        if old["role"] != "master":
            raise CommandFailed(f"{self._old.name} is a replica of {_primary(old)}: move the mesh from its primary")
        if new["role"] == "master" and _keys(new):
            raise CommandFailed(
                f"{self._new.name} has {sum(_keys(new).values())} keys, which a move would delete: choose an empty server"
            )
        if new["role"] != "master" and not self._is_copying(new):
            raise CommandFailed(f"{self._new.name} is a replica of {_primary(new)}: choose a server that stands alone")
        for side, info in ((self._old, old), (self._new, new)):
            self._check_alone(side, info)
            side.ask("CONFIG", "GET", "maxmemory")
        refused = self._old.try_to("FAILOVER", "TIMEOUT", 0)  # an error that changes nothing
        if isinstance(refused, ErrorReply) and "timeout must be" not in refused.text:
            raise self._old.refusal(refused)
        self._check_versions(old, new)
        self._check_settings(old, new)
        apart = float(self._new.ask("TIME")[0]) - float(self._old.ask("TIME")[0])
        if abs(apart) > MOST_APART:
            raise CommandFailed(
                f"the clocks of the servers differ by {abs(apart):.0f} s, and the times of tasks with them: set the clocks first"
            )
        if not urlsplit(self._stored_url).password:
            self._check_users()

    def _check_alone(self, side: Side, info: Mapping[str, str]) -> None:
        if info.get("cluster_enabled") == "1":
            raise CommandFailed(
                f"{side.name} is a node of a cluster, which moves slots by itself: see its CLUSTER SETSLOT"
            )
        watched = side.try_to("PUBSUB", "NUMSUB", "__sentinel__:hello")
        if not isinstance(watched, ErrorReply) and int(watched[1]):
            raise CommandFailed(
                f"{side.name} is watched by Sentinels, which would undo a move: fail over with SENTINEL FAILOVER"
            )

    def _check_versions(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        """Raise CommandFailed if the new server cannot load what the old one writes."""
        here, there = _product(old), _product(new)
        newer = here[0] == there[0] and here[1][:2] > there[1][:2]
        back = here[0] == "Valkey" and there[0] == "Redis"
        late = here[0] == "Redis" and here[1] >= (7, 4) and there[0] == "Valkey"
        if newer or back or late:
            raise CommandFailed(
                f"{_shown(there)} cannot load the data of {_shown(here)}: choose a {here[0]} that is as new, or newer"
            )

    def _check_settings(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        if new.get("maxmemory_policy", "noeviction") != "noeviction":
            raise CommandFailed(
                f"{self._new.name} deletes data when its memory is full (maxmemory-policy {new['maxmemory_policy']}): "
                "set noeviction"
            )
        most, used = int(new.get("maxmemory") or 0), int(old.get("used_memory") or 0)
        if 0 < most < used:
            raise CommandFailed(
                f"{self._new.name} may use {most} bytes of memory, and the data take {used}: raise its maxmemory"
            )
        if old.get("aof_enabled") == "1" and new.get("aof_enabled") == "0":
            raise CommandFailed(
                f"{self._new.name} loses its data at a restart, and {self._old.name} does not: set `appendonly yes` there first"
            )

    def _check_users(self) -> None:
        """Raise CommandFailed if programs cannot log in at the new server as they do at the old one."""
        here, there = (side.try_to("ACL", "LIST") for side in (self._old, self._new))
        if isinstance(here, ErrorReply) or isinstance(there, ErrorReply):
            self._say(
                "the users of the servers cannot be compared; programs log in at the new server as they do at the old one"
            )
            return
        known = _users(there)
        missing = [name for name, secrets in _users(here).items() if not _accepts(known.get(name), secrets)]
        if missing:
            raise CommandFailed(
                f"{self._new.name} does not accept the {'user' if len(missing) == 1 else 'users'} {', '.join(missing)} as "
                f"{self._old.name} does: create them there with the same passwords, or pass --store-password, so that programs "
                "use the user and password of the new URL"
            )

    # The steps

    def _copy(self, old: Mapping[str, str], new: Mapping[str, str]) -> None:
        """Make the new server a replica, and wait until it has everything."""
        self._say(f"copying {sum(_keys(old).values())} keys from {self._old.name} to {self._new.name}")
        if not self._is_listed(old):
            host, port = self._new.place
            self._prepare(self._new, self._old)
            self._new.ask("REPLICAOF", "NO", "ONE")  # it may be a replica under another name
            self._new.ask("CONFIG", "SET", "replica-announce-ip", host)
            self._new.ask("CONFIG", "SET", "replica-announce-port", port)
            self._new.ask("REPLICAOF", *self._seen_at)
        begun = int(old.get("sync_full") or 0)
        patient_until = time.monotonic() + REACHED_WITHIN
        while not self._has_copied(old := self._old.info()):
            if self._is_listed(old):
                patient_until = time.monotonic() + REACHED_WITHIN
            failed = int(old.get("sync_full") or 0) - begun > LOADS
            if failed or time.monotonic() > patient_until:
                if failed or not _keys(self._new.info()):  # else it was a copy already: the same command goes on
                    self._new.ask("REPLICAOF", "NO", "ONE")
                place = ":".join(map(str, self._seen_at))
                raise CommandFailed(
                    f"{self._new.name} cannot load the data of {self._old.name}; its log says why"
                    if failed
                    else f"{self._new.name} cannot copy from {place}, and its log says why: check that it reaches this address "
                    "(the setting `bind` there, --from here), and the password. Nothing has moved"
                )
            time.sleep(POLL_EVERY)

    def _has_copied(self, old: Mapping[str, str]) -> bool:
        """Return True if the new server is a replica that has loaded everything, and may take over."""
        return self._is_listed(old, "online") and self._new.info().get("master_link_status") == "up"

    def _is_listed(self, old: Mapping[str, str], state: str = "") -> bool:
        """Return True if the old server lists the new one as its replica, under the address of its URL and in this state."""
        host, port = self._new.place
        place = f"ip={host},port={port},state={state}"
        return any(place in value for name, value in old.items() if name.startswith("slave"))

    def _prepare(self, replica: Side, primary: Side) -> None:
        """Let a server log in at the other one as its replica."""
        user, password = primary.log_in_as()
        replica.ask("CONFIG", "SET", "masteruser", user)
        replica.ask("CONFIG", "SET", "masterauth", password)
        encrypted = "yes" if primary.settings.address.kind == "tls" else "no"
        if encrypted == "yes" or replica.ask("CONFIG", "GET", "tls-replication"):
            replica.ask("CONFIG", "SET", "tls-replication", encrypted)

    def _write_addresses(self, primary: Side) -> int:
        """Write where each mesh is found from now on, and return how many meshes there are."""
        host, port = self._new.place
        found = {(self._old.settings.address.db, self._old.settings.prefix), *self._meshes()}
        for db, prefix in found:
            primary.ask("SELECT", db)
            primary.ask("HSET", RegistryKeys(prefix).moved, f"{host}:{port}", self._stored_url)
        return len(found)

    def _meshes(self) -> Iterator[tuple[int, str]]:
        """Yield database and prefix of each mesh. Reads the new server, which may be busy for it."""
        for db in _keys(self._new.info()):
            self._new.ask("SELECT", db)
            cursor = "0"
            while True:
                cursor, keys = self._new.ask("SCAN", cursor, "MATCH", f"{{*}}{SUFFIX}", "COUNT", SCANNED)
                for key in keys:
                    yield db, key.decode("utf-8", "surrogateescape").removesuffix(SUFFIX)[1:-1]
                if int(cursor) == 0:
                    break

    def _hand_over(self) -> float:
        """Swap the roles, and return for how many seconds no server accepted writes."""
        self._prepare(self._old, self._new)
        self._old.ask("FAILOVER", "TO", *self._new.place, "TIMEOUT", int(HAND_OVER_WITHIN * 1000))
        return self._wait_for_roles()

    def _wait_for_roles(self) -> float:
        """Wait until the new server is the primary and the old one its replica, and return how many seconds it took."""
        began = time.monotonic()
        while True:
            old = self._old.info()
            over = not _hands_over(old)
            if over and old["role"] == "master":
                raise CommandFailed(
                    f"{self._new.name} did not catch up within {HAND_OVER_WITHIN:g} s; {self._old.name} accepts writes again. "
                    "Run the same command again when there is less to do"
                )
            if over and self._new.info()["role"] == "master":
                return time.monotonic() - began
            if not over and old["role"] == "slave" and time.monotonic() > began + HAND_OVER_WITHIN:
                self._take_back()
            if time.monotonic() > began + 3 * HAND_OVER_WITHIN:
                raise CommandFailed(
                    f"{self._old.name} waits for {self._new.name} to take over, and accepts no writes meanwhile. If the new "
                    "server is lost for ever, send FAILOVER ABORT to the old one; otherwise run the same command again"
                )
            time.sleep(POLL_EVERY)

    def _take_back(self) -> None:
        """Let the old server accept writes again: it does not reach the new one, and TIMEOUT ends only the wait for the copy."""
        if self._new.info()["role"] == "master":
            return
        self._old.try_to("FAILOVER", "ABORT")
        if self._old.info()["role"] != "master":
            return  # it has reached the new one meanwhile
        self._new.ask("REPLICAOF", *self._seen_at)  # no program has been sent there
        host, port = self._new.place
        raise CommandFailed(
            f"{self._old.name} cannot connect to {host}:{port}, and its log says why: check that this address is right on its "
            "machine, and the password. It accepts writes again"
        )

    def _settle(self) -> None:
        """Send the programs to the new server, and store the roles in the files of the servers."""
        self._new.ask("CONFIG", "SET", "replica-announce-ip", "")
        self._new.ask("CONFIG", "SET", "replica-announce-port", 0)
        for kind in ("normal", "pubsub"):
            self._old.ask("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        self._new.try_to("CONFIG", "REWRITE")
        if isinstance(reply := self._old.try_to("CONFIG", "REWRITE"), ErrorReply):
            host, port = self._new.place
            self._say(
                f"warning: {self._old.name} cannot store that it is a replica ({reply.text}). If it is restarted, it accepts "
                f"writes with its old data: add `replicaof {host} {port}` to its configuration, or do not start it again"
            )


def _keys(info: Mapping[str, str]) -> dict[int, int]:
    """Return the number of keys by database."""
    found = ((name, value) for name, value in info.items() if name.startswith("db") and name[2:].isdigit())
    return {int(name[2:]): int(value.partition(",")[0].removeprefix("keys=")) for name, value in found}


def _hands_over(info: Mapping[str, str]) -> bool:
    return info.get("master_failover_state", "no-failover") != "no-failover"


def _primary(info: Mapping[str, str]) -> str:
    """Return ``host:port`` of the server that a replica copies."""
    return f"{info.get('master_host', '').lower()}:{info.get('master_port', '')}"


def _product(info: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
    """Return ``Redis`` or ``Valkey``, and its version."""
    version = info.get("valkey_version", "")
    numbers = (version or info.get("redis_version", "")).split(".")
    return "Valkey" if version else "Redis", tuple([int(each) for each in numbers if each.isdigit()])


def _shown(product: tuple[str, tuple[int, ...]]) -> str:
    return f"{product[0]} {'.'.join(map(str, product[1]))}"


def _users(listed: list[bytes]) -> dict[str, set[str]]:
    """Return the users that may log in, each with the digests of its passwords, or ``nopass``."""
    found = (line.decode("utf-8", "replace").split() for line in listed)
    return {
        words[1]: {word for word in words if word == "nopass" or word.startswith("#")}
        for words in found
        if "on" in words[2:4]
    }


def _accepts(known: set[str] | None, secrets: set[str]) -> bool:
    return known is not None and ("nopass" in known or bool(secrets & known))


def move(
    to: Annotated[str, Parameter(name="URL", help="URL of the new server: redis://HOST:PORT or rediss://HOST:PORT.")],
    /,
    *,
    seen_at: Annotated[
        str | None,
        Parameter(
            name="--from",
            metavar="HOST:PORT",
            help="Where the new server reaches the old one. Default: as in the URL of the old one.",
        ),
    ] = None,
    store_password: Annotated[
        bool,
        flag(
            "Let programs that use the old server log in with the user and password of the new URL, which the data then have."
        ),
    ] = False,
    check: Annotated[bool, flag("Check whether the move can be made, and change nothing.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Move all data of a server to a new, empty one, while producers and workers go on.

    --url names the old server. Programs that use it are sent to the new one. Run the command again if it was interrupted.
    """
    old, new = _settings(to, connect)
    place = _place(seen_at, old)
    local = place[0] in LOCAL
    if new.address.host in LOCAL and not local:
        raise InvalidArguments(
            f"{new.address.host} is another machine for each program: write the host of the new server"
        )
    if local and new.address.host not in LOCAL and seen_at is None:
        raise InvalidArguments(
            f"the new server cannot reach {place[0]}: pass --from HOST:{place[1]} with the host of the old server"
        )
    stored = _stored(to, with_password=store_password)

    def say(text: str) -> None:
        print(text, flush=True)

    with closing(Side(old)) as here, closing(_new_side(here, new)) as there:
        Move(here, there, place, stored, say).run(only_check=check)


def _new_side(here: Side, new: LinkSettings) -> Side:
    """Connect to the new one. The error of one that is lost while it takes over says how the old one accepts writes again."""
    try:
        return Side(new)
    except CommandFailed as error:
        if not _hands_over(here.info()):
            raise
        raise CommandFailed(
            f"{error}. {here.name} waits for it to take over, and accepts no writes meanwhile. If the new server never comes "
            "back, send FAILOVER ABORT to the old one; otherwise run the same command again"
        ) from None


def _settings(to: str, connect: ConnectOptions) -> tuple[LinkSettings, LinkSettings]:
    """Return how to connect to the old and to the new server."""
    mesh = mesh_at(connect, "move")
    patience = parse_duration(connect.patience, "--patience") or 0
    url = url_or_default(mesh.url)
    old = LinkSettings(url, prefix=mesh.prefix, app="cli", socket_timeout=patience, credentials=mesh.credentials)
    try:
        old.address.moved_to(to)
        new = LinkSettings(to, prefix=mesh.prefix, app="cli", socket_timeout=patience)
    except UsageError as error:
        raise InvalidArguments(str(error)) from None
    if old.address.topology != "single":
        raise InvalidArguments(f"{old.address.redacted} is not one server: a cluster moves slots, Sentinels fail over")
    if new.address.db not in (0, old.address.db):
        raise InvalidArguments(f"databases keep their numbers: write {to.rpartition('/')[0]}/{old.address.db}")
    return old, new


def _place(seen_at: str | None, old: LinkSettings) -> tuple[str, int]:
    """Return host and port at which the new server reaches the old one."""
    if seen_at is None:
        if old.address.kind == "unix":
            raise InvalidArguments(
                f"the new server cannot reach the socket {old.address.path}: give the old one a port (`worqr server --data DIR "
                "--port 6379 --password-file FILE --bind ADDRESS`), and pass --from HOST:PORT"
            )
        return old.address.host, old.address.port
    host, colon, port = seen_at.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidArguments(f"--from must be HOST:PORT, such as 10.0.0.5:6379, got {seen_at!r}")
    return host.strip("[]").lower(), int(port)


def _stored(url: str, *, with_password: bool) -> str:
    """Return the URL for programs that follow: without the database, which is theirs."""
    parts = urlsplit(url)
    if not with_password and "ssl_password" in dict(parse_qsl(parts.query, keep_blank_values=True)):
        raise InvalidArguments(
            "ssl_password would be stored in the data for all programs: leave it out, or pass --store-password"
        )
    user, at, place = parts.netloc.rpartition("@")
    if with_password and not user:
        raise InvalidArguments("--store-password needs a user or a password in the URL of the new server")
    return parts._replace(netloc=f"{user}{at}{place}" if with_password else place, path="").geturl()

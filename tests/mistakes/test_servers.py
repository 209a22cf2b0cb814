"""Mistakes in the server's URL, and servers that refuse."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

import worqr
from tests.link.test_outage import old_server
from tests.mistakes.conftest import Ended
from tests.support.servers import Server


def connecting_to(url: str, **settings: Any) -> str:
    """What `connect` raises."""

    async def connect() -> None:
        async with worqr.Mesh(url, **settings).connect():
            pass

    with pytest.raises(worqr.WorqrError) as error:
        asyncio.run(connect())
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (
            "localhost:6379",
            "localhost:6379: it must begin with redis://, rediss://, unix://, embedded:, redis+cluster://",
        ),
        ("http://localhost:6379", "http://localhost:6379: it must begin with redis://, rediss://, unix://, embedded:"),
        (
            "embedded",
            "cannot read the server's URL embedded: it must begin with redis://, rediss://, unix://, embedded:,",
        ),
        ("redis://localhost/shop", "names no database: 'shop' should be a number, as in redis://localhost:6379/0"),
        ("redis://:a/b@localhost/0", "in a password write / as %2F, ? as %3F, # as %23, @ as %40"),
        ("redis://:a#b@localhost/0", "in a password write / as %2F, ? as %3F, # as %23, @ as %40"),
        ("redis://:a@b/c@localhost/0", "in a password write / as %2F, ? as %3F, # as %23, @ as %40"),
    ],
)
def test_a_url_that_cannot_be_read(url: str, why: str) -> None:
    said = connecting_to(url)
    assert said.startswith("UsageError: ")
    assert why in said
    assert "a/b" not in said and "a#b" not in said and "a@b" not in said, "a password was printed"


@pytest.mark.parametrize("option", ["redis_url", "broker", "broker_url", "host"])
def test_the_url_under_the_name_that_others_give_it(option: str) -> None:
    make: Any = worqr.Mesh
    why = f"Mesh() has no option {option!r}; give the server's URL as the first argument, as in worqr.Mesh('redis://localhost"
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        make(**{option: "redis://localhost"})


def test_an_option_of_a_worker() -> None:
    make: Any = worqr.Mesh
    why = "Mesh() has no option 'concurrency'; it is an option of a worker: `worqr run --concurrency 50`"
    with pytest.raises(worqr.UsageError, match=re.escape(why)):
        make(concurrency=4)


def test_an_option_of_the_mesh_that_is_misspelt() -> None:
    make: Any = worqr.Mesh
    with pytest.raises(worqr.UsageError, match=re.escape("Mesh() has no option 'patince'; did you mean 'patience'?")):
        make(patince=3)


def test_a_wrong_password_and_a_wrong_user(own_server: Server) -> None:
    with own_server.client() as client:
        client.config_set("requirepass", "secret")
    place = f"127.0.0.1:{own_server.port}/0"
    for user in ("", ":wrong@", "nobody:secret@"):
        said = connecting_to(f"redis://{user}{place}")
        assert said.startswith("RefusedByServer: "), said
        assert "check user and password in its URL" in said


def test_too_few_rights(own_server: Server) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@connection", "+info", "+client")
    said = connecting_to(f"redis://app:secret@127.0.0.1:{own_server.port}/0")
    assert said.startswith("RefusedByServer: "), said
    assert "NOPERM" in said
    assert (
        "ACL LOG on the server names what is missing, and the page Permissions of the docs has complete rules" in said
    )


def test_a_database_that_is_not_there(server: Server) -> None:
    said = connecting_to(server.tcp_url.removesuffix("/0") + "/99")
    assert said.startswith("RefusedByServer: ")
    assert "out of range" in said


def test_a_server_that_is_too_old() -> None:
    with old_server("6.2.14") as url:
        assert "WrongVersion: " in (said := connecting_to(url))
        assert "is Redis 6.2.14; worqr needs Redis 7.0 or Valkey 7.2" in said


def test_the_url_of_a_cluster_or_of_sentinels_to_a_single_server(server: Server) -> None:
    place = f"127.0.0.1:{server.port}"
    for url in (f"redis+cluster://{place}", f"redis+sentinel://{place}/shop"):
        said = connecting_to(url)
        assert said.startswith("RefusedByServer: "), said
        assert "redis://" in said


def test_the_command_line_without_its_packages(program: Callable[..., Ended]) -> None:
    hidden = "import sys\nsys.modules.update(cyclopts=None, rich=None)\nfrom worqr.cli import main\nsys.exit(main(['queues']))\n"
    ended = program(hidden)
    assert ended.code == 1
    assert "cyclopts and rich not found: run `pip install " in ended.err

"""Error replies, sorted: by their word, by an inner error's word, and without what they quote of a request."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from worqr.errors import RefusedByServer
from worqr.link.failures import ErrorAction, as_connect_error, as_connection_lost, as_error_reply


def answered(reply: str) -> ResponseError:
    error = BaseParser.parse_error(reply)
    assert isinstance(error, ResponseError)
    return error


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("NOSCRIPT No matching script. Please use EVAL.", ErrorAction.NOSCRIPT),
        (
            "OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'",
            ErrorAction.FULL,
        ),
        (
            "ERR Error running script (call to f_12): @user_script:1: -OOM command not allowed when used memory",
            ErrorAction.FULL,
        ),
        (
            "READONLY You can't write against a read only replica. script: " + "a" * 40 + ", on @user_script:1.",
            ErrorAction.DROP,
        ),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", ErrorAction.DROP),
        ("CLUSTERDOWN The cluster is down", ErrorAction.DROP),
        ("TRYAGAIN Multiple keys request during rehashing of slot", ErrorAction.MOVING),
        (
            "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
            ErrorAction.HOLD,
        ),
        ("NOREPLICAS Not enough good replicas to write.", ErrorAction.HOLD),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", ErrorAction.HOLD),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", ErrorAction.REFUSED),
        ("NOPERM User x has no permissions to run the 'evalsha' command", ErrorAction.REFUSED),
        ("ERR user_script:12: attempt to index a nil value", ErrorAction.REFUSED),
        ("BUSYGROUP Consumer Group name already exists", ErrorAction.REFUSED),
    ],
)
def test_an_error_reply_is_sorted_by_its_word(reply: str, action: ErrorAction) -> None:
    assert as_error_reply(answered(reply)).action is action


@pytest.mark.parametrize(
    "reply",
    [
        "ERR Error running script (call to f_12): @user_script:2: script tried accessing undeclared key",
        "ERR bad lua script for redis cluster, all the keys that the script uses should be passed using the KEYS array",
    ],
)
def test_a_server_that_refuses_undeclared_keys_is_named_with_the_page_that_has_the_setting(reply: str) -> None:
    refused = as_error_reply(answered(reply))
    assert refused.action is ErrorAction.REFUSED
    assert "must allow keys that are not declared: the page Set up the server" in str(refused)


def test_arguments_are_cut_out_of_a_text() -> None:
    refused = as_error_reply(
        answered("ERR unknown command 'EVALSHA', with args beginning with: 'sha' '1' 'k' 'secret payload'")
    )
    assert str(refused) == "ERR unknown command 'EVALSHA'"


def test_a_text_is_one_short_line() -> None:
    text = str(as_error_reply(answered("ERR " + "x\n" * 1000)))
    assert "\n" not in text
    assert len(text) < 400


def test_a_loss_the_server_announced_blames_no_request() -> None:
    assert as_connection_lost(BaseParser.parse_error("LOADING Redis is loading the dataset in memory")).innocent
    assert as_connection_lost(BaseParser.parse_error("NOAUTH Authentication required.")).innocent
    assert not as_connection_lost(RedisConnectionError("Connection closed by server.")).innocent


def test_too_many_open_files_names_the_limit() -> None:
    assert (
        "ulimit -n"
        in as_connection_lost(RedisConnectionError("Error 24 connecting to h:1. Too many open files.")).cause
    )


@pytest.mark.parametrize(
    ("reply", "refused"),
    [
        ("WRONGPASS invalid username-password pair or user is disabled.", True),
        ("NOAUTH Authentication required.", True),
        ("ERR DB index is out of range", True),
        ("NOPERM User x has no permissions to run the 'select' command", True),
        ("LOADING Redis is loading the dataset in memory", False),
        ("BUSY Redis is busy running a script.", False),
        ("ERR max number of clients reached", False),
    ],
)
def test_only_what_waiting_does_not_mend_refuses_at_the_door(reply: str, refused: bool) -> None:
    error = as_connect_error(BaseParser.parse_error(reply), "redis://h")
    assert isinstance(error, RefusedByServer) == refused

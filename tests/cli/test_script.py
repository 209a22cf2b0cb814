"""``worqr script``: the scripts byte for byte, their SHA-1, and a list of what each guarantees."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from tests.cli.conftest import Command
from tests.support.children import ROOT
from tests.support.servers import Server
from worqr.lua import all_scripts, script

NAMES = [each.name for each in all_scripts()]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_printed_as_it_is_loaded(command: Command, name: str) -> None:
    source = command("script", name).out
    assert source == script(name).source
    assert command("script", name, "--sha").out == f"{hashlib.sha1(source.encode()).hexdigest()}\n"


@pytest.mark.parametrize("name", ["enqueue", "dispatch_jobs", "inspect"])
def test_the_variant_for_a_cluster_is_printed_too(command: Command, name: str) -> None:
    source = command("script", name, "--cluster").out
    assert source == script(name).sharded.source
    assert command("script", name, "--cluster", "--sha").out == f"{hashlib.sha1(source.encode()).hexdigest()}\n"
    assert ("'SPUBLISH'" in source) == ("'PUBLISH'" in script(name).source)


def test_the_readable_text_has_the_lines_of_the_source_and_its_own_names(command: Command) -> None:
    for options in ((), ("--cluster",)):
        text = command("script", "enqueue", "--readable", *options).out
        source = command("script", "enqueue", *options).out
        assert text.count("\n") == source.count("\n")
        assert "local function numbered(base, id, text, lowest, transaction)\n  local producer" in text
        assert ("'SPUBLISH'" in text) == bool(options)


@pytest.mark.parametrize("words", [(), ("enqueue", "--sha"), ("enqueue", "--header")])
def test_a_readable_text_is_of_one_script(command: Command, words: tuple[str, ...]) -> None:
    answer = command("script", *words, "--readable")
    assert answer.code == 2
    assert "name the script" in answer.err


def test_whatever_the_locale_a_script_is_the_same_bytes(server: Server) -> None:
    """Into the server by a pipe, whose SHA-1 is the one that is told."""
    for options in ([], ["--cluster"]):
        command = [sys.executable, "-m", "worqr", "script", "enqueue", *options]
        env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
        printed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True, timeout=60).stdout
        sha = subprocess.run([*command, "--sha"], cwd=ROOT, env=env, capture_output=True, check=True, timeout=60).stdout
        with server.client() as client:
            assert client.script_load(printed) == sha.decode().strip()  # type: ignore[arg-type]


def test_the_header_tells_how_to_call_it(command: Command) -> None:
    for name in NAMES:
        header = command("script", name, "--header").out
        assert header == script(name).header
        for word in (f"-- {name}: ", "-- RETURNS ", "-- RESEND "):
            assert word in header, name
        assert all(line.startswith("-- ") for line in header.splitlines())


@pytest.mark.parametrize("words", [(), ("enqueue", "--sha")])
def test_a_header_is_of_one_script(command: Command, words: tuple[str, ...]) -> None:
    answer = command("script", *words, "--header")
    assert answer.code == 2
    assert "name the script" in answer.err


@pytest.mark.parametrize("words", [(), ("--list",)])
def test_all_are_listed_with_what_they_guarantee(command: Command, words: tuple[str, ...]) -> None:
    header, *lines = command("script", *words).lines
    assert header.split() == ["script", "does"]
    assert [line.split()[0] for line in lines] == NAMES
    does = {name: line.removeprefix(name).strip() for name, line in zip(NAMES, lines, strict=True)}
    assert does["enqueue"] == (
        "puts tasks at the back (or the front) of a queue and wakes as many waiting workers as there are tasks."
    )
    for name, what in does.items():
        assert what.endswith("."), name
        assert "KEYS" not in what, name
        assert "--" not in what, name


def test_the_list_can_be_of_shas(command: Command) -> None:
    _, *lines = command("script", "--sha").lines
    assert dict(line.split() for line in lines) == {each.name: each.sha for each in all_scripts()}
    _, *lines = command("script", "--sha", "--cluster").lines
    assert dict(line.split() for line in lines) == {each.name: each.sharded.sha for each in all_scripts()}


def test_the_list_can_be_had_as_json(command: Command) -> None:
    found = command("script", "--json").json
    assert [(each["name"], each["sha"]) for each in found] == [(each.name, each.sha) for each in all_scripts()]
    assert {tuple(each) for each in found} == {("name", "sha", "does")}


def test_an_unknown_name_is_told_which_was_meant(command: Command) -> None:
    answer = command("script", "enqeue")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "worqr: there is no script 'enqeue'; did you mean 'enqueue'?\n"
    assert command("script", "zzz", "--sha").err == "worqr: there is no script 'zzz'; `worqr script` lists them\n"
    assert command("script", "_wake").code == 1
    assert command("script", "../lua/enqueue").code == 1


@pytest.mark.parametrize("option", ["--list", "--json"])
def test_one_script_is_no_list(command: Command, option: str) -> None:
    answer = command("script", "enqueue", option)
    assert answer.code == 2
    assert option in answer.err


def test_no_server_is_asked(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORQR_URL", "redis://127.0.0.1:1/0")
    assert command("script", "enqueue", "--sha").code == 0
    assert command("script").code == 0

"""The random part of generated ids: enough of it, nobody's twice, and nothing else in the process tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from string import ascii_letters, digits

import pytest

from tests.support.children import ROOT
from worqr.client import producer
from worqr.client.producer import random_part, with_random_ids


def parts(n: int) -> list[object]:
    return [options["random"] for options, _ in with_random_ids([({}, b"x")] * n)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All that is asked of the system's random number generator."""
    answers: list[bytes] = []
    urandom = os.urandom

    def draw(size: int) -> bytes:
        answers.append(urandom(size))
        return answers[-1]

    monkeypatch.setattr("os.urandom", draw)
    monkeypatch.setattr(producer, "_drawn", [])
    return answers


def letters(drawn: bytes) -> str:
    """What random bytes are in an id."""
    return "".join((ascii_letters + digits)[byte % 62] for byte in drawn)


def test_a_batch_takes_a_byte_for_each_character_from_the_system_at_once(drawn: list[bytes]) -> None:
    assert "".join(map(str, parts(1000))) == letters(drawn[0])
    assert [len(each) for each in drawn] == [1000 * 22]


def test_single_ids_take_theirs_from_the_system_too(drawn: list[bytes]) -> None:
    found = {str(part) for _ in range(100) for part in parts(1)}
    assert len(found) == 100
    assert {len(part) for part in found} == {22}
    assert all(part in letters(b"".join(drawn)) for part in found)


def test_a_job_with_an_id_is_left_as_it_is() -> None:
    given = {"id": "x", "delay": 1}
    for jobs in ([(given, b"a")], [(given, b"a"), ({"delay": 2}, b"b")]):
        (same, task), *others = with_random_ids(jobs)
        assert (same, task) == (given, b"a")
        assert [(options["delay"], len(str(options["random"])), task) for options, task in others] == [(2, 22, b"b")][
            : len(others)
        ]
    options: dict[str, object] = {"delay": 1}
    with_random_ids([(options, b"a")])
    assert options == {"delay": 1}  # those of a function may be used for the next call


def test_threads_never_share_one() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [*chain(*pool.map(lambda _: [random_part() for _ in range(500)], range(16)))]
    assert len(set(found)) == 16 * 500


FORK = """
import os
from worqr.client.producer import random_part
random_part()  # others were drawn with it
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, " ".join(random_part() for _ in range(64)).encode())
    os._exit(0)
os.wait()
mine = {random_part() for _ in range(64)}
print(len(mine), len(mine & set(os.read(read, 10_000).decode().split())))
"""


def test_a_forked_child_has_others_than_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "64 0\n"

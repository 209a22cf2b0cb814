"""Where the tasks of a queue of several shards lie: names, slots, and which id belongs to which."""

from __future__ import annotations

from itertools import product

import pytest
from redis.crc import key_slot

from tests.support.clusters import open_node
from worqr.errors import UsageError
from worqr.keys import (
    MAX_NAME,
    MAX_SHARDS,
    SLOTS,
    QueueKeys,
    check_name,
    check_shards,
    shard_of,
    shards_of,
    slot_of,
    tags_of,
)

NAMES = ("hot", "Q1", "a~b", "ä", "a:b c", "~", "x" * MAX_NAME)
HOT = QueueKeys("worqr", "hot")


def crc16(data: bytes) -> int:
    """The CRC of the specification of Redis Cluster, bit by bit."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


# Slots


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_is_that_of_the_hash_tag(name: str) -> None:
    assert slot_of(name) == crc16(name.encode()) % SLOTS == key_slot(QueueKeys("p", name).base.encode())


@pytest.mark.one_server
def test_the_shards_lie_where_the_server_says(server_kind: str) -> None:
    with open_node(server_kind) as node:  # a server that is no node of a cluster may not say it
        for name, failures in product(NAMES, (False, True)):
            for i, keys in enumerate(shards_of(QueueKeys("p", name, failures), 8)):
                wanted = (slot_of(name) + 2048 * i) % SLOTS
                spelled = (
                    keys.base,
                    keys.workers,
                    keys.due,
                    keys.job("{x}"),
                    keys.cancelled_channel,
                    keys.wake_channel("w"),
                )
                assert {node.ask("CLUSTER", "KEYSLOT", key) for key in spelled} == {wanted}


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 12, 63, MAX_SHARDS])
@pytest.mark.parametrize("name", NAMES)
def test_shards_are_spread_evenly(name: str, shards: int) -> None:
    slots = [key_slot(keys.base.encode()) for keys in shards_of(QueueKeys("p", name), shards)]
    assert slots == [(slots[0] + round(i * SLOTS / shards)) % SLOTS for i in range(shards)]


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_a_queue_of_as_many_shards_as_there_are_nodes_has_one_on_each(nodes: int) -> None:
    for name in (f"queue-{n}" for n in range(20)):
        slots = [key_slot(keys.base.encode()) for keys in shards_of(QueueKeys("p", name), nodes)]
        assert {slot * nodes // SLOTS for slot in slots} == set(range(nodes))


def test_twice_as_many_shards_are_these_and_others() -> None:
    for shards in (1, 2, 4, 8, 16, 32):
        assert set(shards_of(HOT, shards)) < set(shards_of(HOT, 2 * shards))


def test_the_rule_is_the_one_that_is_written_down() -> None:
    """Other programs go by it: it must not change."""
    assert tags_of("hot", 4) == ("", "MK", "4oZ", "oO")
    assert [keys.base for keys in shards_of(HOT, 2)] == ["worqr:{hot}", "worqr:{hot~4oZ}-shard"]
    alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    slot = (crc16(b"hot") + 8192) % SLOTS
    short = ("".join(letters) for length in (1, 2, 3) for letters in product(alphabet, repeat=length))
    assert next(tag for tag in short if crc16(f"hot~{tag}".encode()) % SLOTS == slot) == "4oZ"


# Names


def test_the_first_shard_is_the_plain_queue() -> None:
    assert shards_of(HOT, 8)[0] == HOT
    failures = QueueKeys("worqr", "hot", failures=True)
    assert shards_of(failures, 8)[0] == failures


@pytest.mark.parametrize("failures", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_registry_knows_a_shard_by_a_name_that_no_queue_can_have(name: str, failures: bool) -> None:
    shards = shards_of(QueueKeys("worqr", name, failures), 8)
    assert len({keys.name for keys in shards}) == len({keys.base for keys in shards}) == 8
    for keys in shards:
        assert QueueKeys.of("worqr", keys.name) == keys
        assert keys.display_name == shards[0].name
        assert keys.base == f"worqr:{keys.name}" or keys == QueueKeys("worqr", name)
    for keys in shards[1:]:
        with pytest.raises(UsageError, match="braces|1 to 200 bytes"):
            check_name(keys.name)


def test_a_failure_queue_of_a_shard_is_spelled_as_lua_does() -> None:
    keys = shards_of(HOT, 2)[1]
    assert shards_of(QueueKeys("worqr", "hot", failures=True), 2)[1].base == f"{keys.base}-fail"


@pytest.mark.parametrize("name", ["{a}", "{a}-shard", "{a~}", "{a~b}", "{a~b}-else", "{~b", "a~b}-shard", "{}-x-fail"])
def test_what_is_no_name_of_a_shard_is_a_name(name: str) -> None:
    assert QueueKeys.of("worqr", name) == QueueKeys("worqr", name)


# Ids


@pytest.mark.parametrize("shards", [2, 3, 8, 64])
def test_an_id_has_one_shard(shards: int) -> None:
    every = shards_of(HOT, shards)
    for name in ("x", "order-7", "ä", "{a}b", "a" * 200):
        assert shard_of(every, name) == every[crc16(name.encode()) % shards]
    used = {shard_of(every, f"order-{n}") for n in range(64 * shards)}
    assert used == set(every)


def test_a_generated_id_says_itself_where_it_is() -> None:
    every = shards_of(HOT, 8)
    for keys in every:
        assert shard_of(every, f"@1712345678901234{keys.id_suffix}") == keys
        assert shard_of(every, f"@f1712345678901234{keys.id_suffix}") == keys
    assert shard_of(every, "@1") == HOT
    assert shard_of((HOT,), f"@1{every[5].id_suffix}") == every[5]  # also to whoever knows of no shards
    for bad in ("@1~", "@1~}x{", "@1~ä", "@1~a b", "@1~a~"):
        assert shard_of(every, bad) == HOT


def test_of_one_shard_every_id_is_there() -> None:
    assert {shard_of((HOT,), name) for name in ("x", "x~MK", "@1", "@1~")} == {HOT}


# Numbers


@pytest.mark.parametrize("number", [1, 2, 64])
def test_so_many_shards_a_queue_may_have(number: int) -> None:
    assert check_shards(number) == number


@pytest.mark.parametrize("number", [0, -1, 65, 2.0, "2", None, True])
def test_any_other_number_is_an_error(number: object) -> None:
    with pytest.raises(UsageError, match="shards must be a whole number from 1 to 64, not "):
        check_shards(number)

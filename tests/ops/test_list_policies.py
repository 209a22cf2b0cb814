from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops
from worqr.ops import ServedPolicy

USUAL = {"max_stalls": "3", "keep_failed": "1000", "on_failure": "0"}


def test_workers_with_the_same_options_are_together_the_most_first(desk: Desk) -> None:
    desk.enter("A", max_stalls=5)
    desk.enter(*[f"B{n}" for n in range(7)], result_ttl_ms=60_000)
    desk.enter("C", on_failure=True)
    with desk.nothing_changes():
        assert desk.call(ops.list_policies(desk.q)) == (
            [
                ServedPolicy(7, [f"B{n}" for n in range(5)], {**USUAL, "result_ttl": "60000"}),
                ServedPolicy(1, ["A"], {**USUAL, "max_stalls": "5"}),
                ServedPolicy(1, ["C"], {**USUAL, "on_failure": "1"}),
            ],
            0,
        )


def test_options_for_people_are_stored_until_the_worker_has_others(desk: Desk) -> None:
    def start(options: str) -> dict[str, str]:
        call = ops.start_work(desk.q, "A", max_stalls=3, keep_failed=1000, last=0, options=options)
        desk.call(call)
        [found], _ = desk.call(ops.list_policies(desk.q))
        return found.fields

    assert start('{"max_failures":"7"}') == {**USUAL, "max_failures": "7"}
    assert start("") == USUAL
    for foreign in ("[", "[1]", "7", "[" * 100_000):
        assert start(foreign) == USUAL
    assert start('{"max_stalls":"9"}') == USUAL  # what the scripts read counts


def test_few_of_many_workers_are_looked_at(desk: Desk) -> None:
    desk.enter("C", "A", "B")
    assert desk.call(ops.list_policies(desk.q, 2, 1)) == ([ServedPolicy(2, ["A"], USUAL)], 1)


def test_a_worker_that_leaves_is_still_named_and_a_foreign_key_is_no_policy(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    assert desk.call(ops.stop_work(desk.q, "A", 1)).more
    desk.enter("B")
    desk.client.delete(desk.q.policy("B"))
    desk.client.set(desk.q.policy("B"), "foreign")
    found = desk.call(ops.list_policies(desk.q))[0]
    assert sorted(found, key=lambda each: each.workers) == [ServedPolicy(1, ["A"], USUAL), ServedPolicy(1, ["B"], {})]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_policies(desk.q)) == [b"ok", 0]
    assert desk.state() == {}

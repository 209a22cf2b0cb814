from __future__ import annotations

import pytest

from tests.ops.driver import Desk, digest, fields_of, record, reference, remembered
from worqr import ops


def note(desk: Desk, worker: str, *said: tuple[int, float | None, str] | tuple[int, float | None, str, bytes]) -> int:
    return desk.call(ops.note_progress(desk.q, worker, [ops.Progress(*each) for each in said]))


def test_a_job_says_how_far_it_is(desk: Desk) -> None:
    held = desk.run("A", "x")
    before = desk.state()
    with desk.listening(desk.q.job("x")) as heard:
        assert desk.send(ops.note_progress(desk.q, "A", [(held, 0.25, "a \n ä")])) == [b"ok", 1]
    assert heard == [(":job:x", b"progress")]
    before[":active:x"] |= {"progress": "0.25", "message": "a \n ä".encode().decode("latin-1")}
    assert desk.state() == before


def test_a_raw_task_becomes_a_job_in_the_hands_of_its_worker(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    before = desk.state()
    assert note(desk, "A", (held, None, "on it")) == 1
    known = record("a", held, "active", twin=digest("a"), claim=held, worker="A", progress="", message="on it")
    assert desk.state() == {
        **before,
        f":claim:{held}": [reference(f"@{held}")],
        f":active:@{held}": known,
        f":twins:{digest('a')}": {f"@{held}"},
    }


def test_what_is_said_again_is_noted_again(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    note(desk, "A", (held, 0.5, "half"))
    with desk.nothing_changes():
        assert note(desk, "A", (held, 0.5, "half")) == 1
    note(desk, "A", (held, 1.0, ""))
    found = desk.state()[f":active:@{held}"]
    assert (found["progress"], found["message"]) == ("1.0", "")


def test_many_at_once_and_those_that_have_ended_are_left_out(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.finish_tasks(desk.q, "A", [two]))
    assert note(desk, "A", (one, 0.1, ""), (two, 0.2, ""), (three, 0.3, ""), (1, 0.4, "")) == 2
    assert [name for name in desk.state() if name.startswith(":active")] == [f":active:@{one}", f":active:@{three}"]
    with desk.nothing_changes():
        assert note(desk, "A") == 0


@pytest.mark.parametrize("end", ["finish", "stop", "retry", "fail", "sweep", "cancel"])
def test_the_raw_task_ends_like_any_other(desk: Desk, end: str) -> None:
    [held] = desk.hold("A", b"a")
    note(desk, "A", (held, 0.5, "half"))
    match end:
        case "finish":
            assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {}
        case "stop":
            desk.call(ops.stop_tasks(desk.q, "A", [held]))
            assert desk.state()[f":job:@{held}"] == remembered("a", held)
        case "retry":
            desk.retry("A", held)
            assert desk.state()[f":job:@{held}"] == remembered("a", held, failures=1)
        case "fail":
            desk.fail("A", held)
            assert desk.client.hget(desk.q.dead_letter(held), "task") == b"a"
        case "sweep":
            desk.call(ops.fail_worker(desk.q, "A"))
            assert desk.state()[f":job:@{held}"] == remembered("a", held, stalls=1)
        case _:
            assert desk.call(ops.cancel_task(desk.q, b"a")).claims == [held]
            assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}
    state = desk.state()
    given_back = end in ("stop", "retry", "sweep")
    assert desk.waiting() == ([b"a"] if given_back else [])
    assert (f":twins:{digest('a')}" in state) == given_back
    assert not any(name.startswith((":active", ":claim", ":cancelling")) for name in state)


def test_a_start_that_is_sent_again_finds_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    note(desk, "A", (held, 0.5, "half"))
    [entry] = desk.call(ops.start_tasks(desk.q, "A", 1, 1)).entries
    found = fields_of(entry)
    assert (found["id"], found["task"], found["progress"]) == (f"@{held}", b"a", "0.5")


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert note(desk, "B", (held, 0.5, "")) == note(desk, "stranger", (held, 0.5, "")) == 0


def test_a_swept_owner_says_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.enter("B")
    desk.take("B", 1)
    with desk.nothing_changes():
        assert note(desk, "A", (held, 0.5, "")) == 0


def test_a_claim_with_nothing_under_it_says_nothing(desk: Desk) -> None:
    raw, held = desk.hold("A", b"a", b"b")
    desk.retry("A", held)
    [job] = desk.take("A", 1)
    desk.client.delete(desk.q.claim(raw), desk.q.active(f"@{held}"))  # data that somebody deleted
    with desk.nothing_changes():
        assert note(desk, "A", (raw, 0.5, ""), (job, 0.5, "")) == 0


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert note(desk, "A", (1, 0.5, "")) == 0
    assert desk.state() == {}


def test_a_value_stays_until_there_is_another_and_goes_with_the_job(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    name = f"@{held}"
    assert note(desk, "A", (held, 0.5, "half", b"json [1]")) == 1
    kept = {"value": "json [1]", "saved_size": "0"}
    with desk.nothing_changes():
        assert note(desk, "A", (held, 0.5, "half", b"json [1]"), (held, 0.5, "half")) == 2
    assert desk.state()[f":active:{name}"].items() >= {**kept, "progress": "0.5"}.items()
    desk.retry("A", held)
    assert desk.state()[f":job:{name}"] == remembered("a", held, failures=1, **kept)
    assert desk.call(ops.job_status(desk.q, name, 0)).value == b"json [1]"
    assert desk.call(ops.read_job(desk.q, name)).job.fields["value"] == b"json [1]"
    [again] = desk.take("A", 1)
    desk.fail("A", again)
    assert desk.call(ops.job_status(desk.q, name, 0)).value == b"json [1]"
    desk.call(ops.retry_aside(desk.q, "failed", [again]))
    assert desk.call(ops.job_status(desk.q, name, 0)).value == b"json [1]"
    [last] = desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [last]))
    assert b"json [1]" not in repr(desk.state()).encode()


def test_a_value_belongs_to_its_payload(desk: Desk) -> None:
    held = desk.run("A", "x", b"a")
    note(desk, "A", (held, None, "", b"none "))
    desk.retry("A", held)
    desk.dispatch("x", b"b")
    assert "value" not in desk.state()[":job:x"]

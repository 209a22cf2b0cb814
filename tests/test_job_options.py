"""What may be said at a dispatch: all of it is checked before anything is sent, and each refusal names what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from worqr import RetryPolicy, Update, UsageError
from worqr.job_options import MAX_META, JobOptions, check_id, encode_options, encode_update
from worqr.policy import POLICY_FIELDS
from worqr.validation import LONGEST

NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)
NOON_MS = 1_906_545_600_000


# Ids


@pytest.mark.parametrize("id", ["a", "report-7", "ä" * 100, "x" * 200, "a@b", "a:b", "a b", "{a}", "日本", "'", "\xa0"])
def test_good_ids(id: str) -> None:
    assert check_id(id) == id


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("", "1 to 200 bytes"),
        ("x" * 201, "this one has 201"),
        ("ä" * 101, "this one has 202"),
        ("a\x00b", "no control characters"),
        ("a\nb", "no control characters"),
        ("a\x7f", "no control characters"),
        ("a\x85", "no control characters"),
        ("@", "begin with '@'"),
        ("@17", "begin with '@'"),
        ("\udcff", "not valid Unicode"),
        (b"a", "must be a str, not bytes"),
        (7, "must be a str, not int"),
        (None, "must be a str, not NoneType"),
    ],
)
def test_bad_ids_are_refused(id: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_id(id)
    if not str(id).startswith("@"):
        with pytest.raises(UsageError, match=words):
            check_id(id, generated=True)


def test_a_generated_id_can_be_asked_for() -> None:
    assert check_id("@17", generated=True) == "@17"


# Options


@pytest.mark.parametrize(
    ("options", "wire"),
    [
        ({}, {}),
        ({"id": "x"}, {"id": "x"}),
        ({"delay": 0}, {"delay": 0}),
        ({"delay": 1.5}, {"delay": 1500}),
        ({"delay": timedelta(milliseconds=7)}, {"delay": 7}),
        ({"run_at": NOON}, {"run_at": NOON_MS}),
        ({"run_at": NOON + timedelta(microseconds=1)}, {"run_at": NOON_MS + 1}),
        ({"run_at": NOON.astimezone(timezone(timedelta(hours=9)))}, {"run_at": NOON_MS}),
        ({"result_ttl": 60}, {"fields": {"result_ttl": "60000"}}),
        ({"result_ttl": 0}, {"fields": {"result_ttl": "0"}}),
        ({"timeout": 0.0001}, {"fields": {"timeout": "1"}}),
        ({"retry": RetryPolicy()}, {}),
        ({"retry": RetryPolicy(max_failures=3, jitter=False)}, {"fields": {"max_failures": "3", "jitter": "0"}}),
        ({"expires": 2}, {"expires": "2000"}),
        ({"expires": NOON}, {"expires_at": str(NOON_MS)}),
        ({"if_exists": "skip"}, {"exists": "skip"}),
        ({"if_exists": "cancel"}, {"exists": "cancel"}),
        ({"update": Update(run_at="if_later", at_most=60)}, {"when": "later", "at_most": 60_000}),
        ({"update": Update(at_most=timedelta(seconds=0.0001))}, {"at_most": 1}),
        ({"unique_for": 0.0001, "id": "x"}, {"unique_for": 1, "id": "x"}),
        ({"meta": {}}, {"meta": "{}"}),
        ({"meta": {"a": "ä"}}, {"meta": '{"a":"ä"}'}),
        ({"max_length": 1, "front": True}, {"max_length": 1, "front": True}),
        ({"keep_task": True}, {"keep": True}),
        ({"lane": "customer 7"}, {"lane": "customer 7"}),
        ({"update": Update()}, {}),
    ],
    ids=repr,
)
def test_options_travel(options: Any, wire: Mapping[str, object]) -> None:
    assert encode_options(options) == wire


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: -1}, f"{name} must be at least 0") for name in ("delay", "result_ttl", "expires")),
    *(({name: 0}, f"{name} must be above 0") for name in ("timeout",)),
    *(({name: -0.001, "id": "x"}, f"{name} must be above 0") for name in ("timeout", "unique_for")),
    *(
        ({name: bad, "id": "x"}, f"{name} must be ")
        for name in ("delay", "result_ttl", "timeout", "expires", "unique_for")
        for bad in (float("nan"), float("inf"), 1e300, LONGEST + 1, "5", b"5", True, None, [], timedelta(days=-1))
    ),
    *(
        ({name: bad}, f"{name} must ")
        for name in ("run_at", "expires")
        for bad in (datetime(2030, 6, 1), datetime(1969, 6, 1, tzinfo=UTC))
    ),
    *(
        ({"wait": bad, "max_length": 5}, "wait must be ")
        for bad in (-1, float("nan"), "5", True, None, timedelta(days=-1), 1e300)
    ),
    *(({"run_at": bad}, "run_at must be a datetime") for bad in (0, 17.5, "now", None, timedelta(1))),
    ({"delay": 1, "run_at": NOON}, "a delay or a run_at, not both"),
    ({"unique_for": 3}, "unique_for needs an id"),
    ({"id": "@7"}, "begin with '@'"),
    ({"retry": {"max_failures": 3}}, "retry must be a worqr.RetryPolicy"),
    ({"retry": None}, "retry must be a worqr.RetryPolicy"),
    ({"retry": RetryPolicy}, "retry must be a worqr.RetryPolicy"),
    ({"update": True}, "update must be a worqr.Update"),
    ({"update": {"data": False}}, "update must be a worqr.Update"),
    ({"if_exists": "ignore"}, "if_exists must be one of 'update', 'skip', 'raise', 'cancel', not 'ignore'"),
    ({"if_exists": True}, "if_exists must be one of"),
    ({"if_exists": ["skip"]}, "if_exists must be one of"),
    *(
        ({"max_length": bad}, "max_length must be a whole number of at least 1")
        for bad in (0, -1, 1.0, True, "7", None)
    ),
    *(({name: bad}, f"{name} must be True or False") for name in ("front", "keep_task") for bad in (0, 1, "yes", None)),
    ({"keep": 7}, "keep must be a worqr.Keep, not 7"),
    *(({"tags": bad}, "tag") for bad in (7, ["x" * 101], [""], [str(n) for n in range(9)])),
    *(({"meta": bad}, "meta must be a mapping") for bad in (None, "a", [("a", "b")], 7)),
    ({"meta": {"a": 1}}, "a text in meta must be a str"),
    *(({name: len}, rf"{name} must be a call: write {name}=function\.call") for name in ("then", "otherwise")),
    ({"lane": 7}, "a lane must be a str, not"),
    ({"lane": ""}, "a lane must have 1 to 200 bytes of UTF-8, this one has 0"),
    ({"lane": "ä" * 101}, "this one has 202"),
    ({"lane": "a\0b"}, "a lane must have no control characters"),
    ({"meta": {1: "a"}}, "a name in meta must be a str"),
    ({"meta": {"a": None}}, "a text in meta must be a str"),
    ({"meta": {"a": "\udcff"}}, "a text in meta is not valid Unicode"),
    ({"replicas": -1}, "replicas must be a whole number from 0 to 100, not -1"),
    ({"replicas": 101}, "replicas"),
    ({"replicas": True}, "replicas"),
    ({"replicas": 1.0}, "replicas"),
    ({"dellay": 1}, "no option 'dellay'; did you mean 'delay'"),
    ({"xyz": 1}, "no option 'xyz'; it takes delay, expires"),
    ({"eta": NOON}, r"no option 'eta'; use run_at, as in fn\.options\(run_at="),
    ({"countdown": 60}, r"no option 'countdown'; use delay, as in fn\.options\(delay=60\)\.dispatch"),
    (
        {"max_retries": 3},
        r"no option 'max_retries'; use retry=worqr\.RetryPolicy\(max_failures=3\), which counts the first",
    ),
    ({"queue": "mails"}, r"no option 'queue'; a function's name is its queue: set it with @mesh\.task\(name="),
    ({"task_id": "x"}, r"no option 'task_id'; use id, as in"),
    ({"retry": 3}, r"retry must be a worqr\.RetryPolicy, not 3: write retry=worqr\.RetryPolicy\(max_failures=3\)"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[repr(options)[:60] for options, _ in REFUSED])
def test_options_that_cannot_be_are_refused(options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        encode_options(options)


def test_every_option_is_looked_at() -> None:
    """A name of `JobOptions` that nobody checks would be refused as unknown, or travel unchecked."""
    assert {name for options, _ in REFUSED for name in options} >= JobOptions.__annotations__.keys()


def test_meta_is_bounded_by_its_bytes() -> None:
    fits = {"k": "x" * (MAX_META - len('{"k":""}'))}
    assert len(str(encode_options({"meta": fits})["meta"])) == MAX_META
    with pytest.raises(UsageError, match="at most 4,096 bytes as JSON, this one has 4,097"):
        encode_options({"meta": {"k": fits["k"] + "x"}})
    with pytest.raises(UsageError, match="at most 4,096 bytes"):
        encode_options({"meta": {"k": "ä" * (MAX_META // 2)}})


# Updates


def test_an_update_says_what_differs_from_the_default() -> None:
    assert encode_update(Update()) == {}
    assert encode_update(Update(data=True, run_at=True, counts=None, policy=False)) == {}
    assert encode_update(Update(data=False)) == {"data": False}
    assert [encode_update(Update(run_at=flag)) for flag in (False, "if_later", "if_earlier")] == [  # type: ignore[arg-type]
        {"when": "keep"},
        {"when": "later"},
        {"when": "earlier"},
    ]
    assert encode_update(Update(counts=False)) == {"counts": False}
    assert encode_update(Update(policy=True)) == {"policy": " ".join(sorted(POLICY_FIELDS))}
    assert encode_update(Update(policy={"timeout", "max_stalls"})) == {"policy": "max_stalls timeout"}
    assert encode_update(Update(policy=())) == {}


@pytest.mark.parametrize(
    "how",
    [
        {"data": None},
        {"data": 1},
        {"data": "true"},
        {"run_at": "ifLater"},  # silently meant True in Queasy
        {"run_at": "if later"},
        {"run_at": None},
        {"run_at": 0},
        {"counts": "yes"},
        {"counts": 1},
        *({"at_most": bad} for bad in (0, -1, "60", True, float("nan"))),
        *({"at_most": 60, "run_at": flag} for flag in (False, "if_earlier")),
        {"policy": "timeout"},
        {"policy": None},
        {"policy": 1},
        {"policy": ["timeouts"]},
        {"policy": [7]},
        {"policy": [[]]},
    ],
    ids=repr,
)
def test_unknown_values_of_an_update_are_refused(how: Any) -> None:
    with pytest.raises(UsageError, match=f"Update.{next(iter(how))}"):
        Update(**how)


def test_a_misspelt_flag_of_an_update_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="runAt"):
        Update(runAt=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

"""The scripts as text: a header says what the body does, a script is sent with the functions that it calls and no others, and
each has its one function in `worqr.ops`. What they do is in tests/ops, how they are put together in test_lua_assembler."""

from __future__ import annotations

import hashlib
import inspect
import math
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import worqr.lua
from tests.ops.driver import part_of
from tests.ops.scene import CALLS, NO_SCENE
from tests.support.cases import of_each
from tests.support.servers import Server
from worqr import ops
from worqr.cron import AHEAD_MS
from worqr.keys import LimitKeys, QueueKeys, RegistryKeys
from worqr.lua import Script, all_scripts, script
from worqr.lua.assembler import SHORT_CALLS, Definition, library, names, strip, tokens, transactions

FOLDER = Path(worqr.lua.__file__).parent
FILES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.lua"))}
TRANSACTIONS = {each.name: each for text in FILES.values() for each in transactions(text)}
SCRIPTS = sorted(TRANSACTIONS)

FILL_MEMORY = {
    *(
        "dispatch_jobs",
        "enqueue",
        "enqueue_traced",
        "fire_schedules",
        "note_event",
        "note_histories",
        "note_progress",
        "note_queues",
    ),
    *("index_schedule", "run_again", "store_schedule"),
    *("hold_follow_ups", "note_runs", "open_batch", "open_part", "sample_queue"),
}
"""What memory is filled by: refused when it is full. All else goes on."""
# fmt: off
READS = {
    "EXISTS", "GET", "GETRANGE", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HRANDFIELD", "HSCAN",
    "HSTRLEN", "INFO", "LINDEX", "LLEN", "LPOS", "LRANGE", "PTTL", "PUBSUB", "SCARD", "SINTER", "SISMEMBER", "SMEMBERS",
    "SCAN", "SMISMEMBER", "SORT_RO", "SRANDMEMBER", "SSCAN", "STRLEN", "TIME", "XRANGE", "XREVRANGE", "ZCARD", "ZCOUNT", "ZRANGE",
    "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZREVRANGE", "ZREVRANK", "ZSCAN", "ZSCORE",
}
WRITES = {
    "DEL", "EXPIRE", "HDEL", "HINCRBY", "HSET", "HSETNX", "LPOP", "LPUSH", "LREM", "LSET", "PERSIST", "PEXPIRE", "PUBLISH",
    "RENAME", "RPOP", "RPOPLPUSH", "RPUSH", "SADD", "SET", "SETRANGE", "SMOVE", "SORT", "SPOP", "SREM",
    "XADD", "XDEL", "ZADD", "ZPOPMIN", "ZREM",
}
# fmt: on
SLOTS = re.compile(r"\bARGV\b")


@dataclass(frozen=True, slots=True)
class Slot:
    """One line ``ARGV[2] front 1`` or ``ARGV[3..] tasks bytes`` of a header."""

    index: int
    rest: bool
    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Source:
    """One transaction, taken apart."""

    flags: str
    title: str
    args: list[Slot]
    returns: str
    resend: list[str]
    numbered: bool
    body: str

    @property
    def words(self) -> list[str]:
        """What a reply may begin with."""
        return re.findall(r"(?:^|\| )(\w+)", self.returns)


@cache
def read(name: str) -> Source:
    header = re.sub(r"\n--   +", " ", TRANSACTIONS[name].header)  # a continued line is indented
    args = re.findall(r"^-- ARGV\[(\d+)(\.\.)?\] (\w+) ?(.*)$", header, re.MULTILINE)
    return Source(
        flags=" ".join(re.findall(r"^-- FLAGS (.+)$", header, re.MULTILINE)),
        title=header.partition("\n")[0],
        args=[Slot(int(index), bool(rest), name, what) for index, rest, name, what in args],
        returns=" ".join(re.findall(r"^-- RETURNS (.+)$", header, re.MULTILINE)),
        resend=re.findall(r"^-- RESEND (.+)$", header, re.MULTILINE),
        numbered=re.search("^-- NUMBERED$", header, re.MULTILINE) is not None,
        body=TRANSACTIONS[name].body,
    )


# Headers


@of_each("name", SCRIPTS)
def test_a_header_has_all_its_lines(name: str) -> None:
    source = read(name)
    assert re.match(rf"-- {name}: \S", source.title)
    first = 4 if source.numbered else 1  # before it are those of every numbered script
    assert [slot.index for slot in source.args] == list(range(first, first + len(source.args)))
    assert not any(slot.rest for slot in source.args[:-1])
    assert source.words
    assert len(source.resend) == 1
    assert re.match(r"safe: \w.{10}", source.resend[0])


@of_each("name", SCRIPTS)
def test_the_base_is_the_only_key_and_bound_first(name: str) -> None:
    body = read(name).body
    assert re.match(r"local (queue|mesh|limit) = KEYS\[1\]\n", body)
    assert body.count("KEYS[") == 1
    assert not re.search(r"\bKEYS\b", "".join(each.code for each in needed(reached(name))))


@of_each("name", SCRIPTS)
def test_every_slot_is_bound_to_the_name_that_the_header_gives_it_and_appears_nowhere_else(name: str) -> None:
    source = read(name)
    bound: dict[str, str] = {}
    for variables, values in re.findall(r"^local ([\w, ]+) = (.*ARGV\[\d+\].*)$", source.body, re.MULTILINE):
        for each, value in zip(variables.split(", "), values.split(", "), strict=True):
            [slot] = re.findall(r"ARGV\[\d+\]", value)
            assert slot not in bound
            bound[slot] = each
    rest = [slot for slot in source.args if slot.rest]
    assert bound == {f"ARGV[{slot.index}]": slot.name for slot in source.args if not slot.rest}
    others = sum(len(SLOTS.findall("\n".join(rest_lines(source, slot)))) for slot in rest)
    assert len(SLOTS.findall(source.body)) == len(bound) + others


def in_turn(n: int) -> str:
    """What reads `n` arguments from i on."""
    return ", ".join([r"ARGV\[i\]", *(rf"ARGV\[i \+ {more}\]" for more in range(1, n))])


def rest_lines(source: Source, slot: Slot) -> list[str]:
    """The lines that read a header's last slot, which stands for many: a loop, or an offset and a number."""
    first, one = slot.index, slot.name.removesuffix("s")
    bound = rf" *local (?:{slot.name}|{one}) = ARGV\[i\]"
    loop = [rf" *for i = {first}, #ARGV do", bound]
    pairs = [rf" *for i = {first}, #ARGV, 2 do", rf" *local (?:{slot.name}|{one}), \w+ = {in_turn(2)}"]
    triples = [rf" *for i = {first}, #ARGV, 3 do", rf" *local (?:{slot.name}|{one}), \w+, \w+ = {in_turn(3)}"]
    fours = [rf" *for i = {first}, #ARGV, 4 do", rf" *local (?:{slot.name}|{one}), \w+, \w+, \w+ = {in_turn(4)}"]
    chunks = [rf"for from = {first}, #ARGV, 1000 do", r" *for i = from, math.min\(from \+ 999, #ARGV\) do", bound]
    offset = [rf"local {slot.name}_from, {slot.name} = {first}, #ARGV - {first - 1}"]
    offset.append(rf".*ARGV\[{slot.name}_from \+ position\].*")
    lines = source.body.splitlines()
    some = [rf"for i = {first}, {first - 1} \+ 3 \* results, 3 do", rf" *local {slot.name}, \w+, \w+ = {in_turn(3)}"]
    chunks_after = [rf"for from = {first} \+ 3 \* results, #ARGV, 1000 do", *chunks[1:]]
    for patterns in (loop, pairs, triples, fours, chunks, offset, some + chunks_after):
        found = [[line for line in lines if re.fullmatch(pattern, line)] for pattern in patterns]
        if all(len(each) == 1 for each in found):
            return [line for each in found for line in each]
    raise AssertionError(f"ARGV[{first}..] {slot.name} is bound to no name")


@of_each("name", SCRIPTS)
def test_what_a_header_returns_the_body_returns(name: str) -> None:
    source = read(name)
    everything = reached(name)
    if name == "job_status":  # whose words are read from records, as others wrote them
        everything = "".join(FILES.values()).replace(source.body.replace("\n", "\n  "), "")
    assert {word for word in source.words if f"'{word}'" not in everything} == set()
    answers = r"(?:return \{|reply\[1\] = |status = |local reply[\w, ]* = \{)'(\w+)'"
    answered = set(re.findall(answers, source.body)) - {"finished"}  # which is told of no claim
    assert {word for word in answered if not re.search(rf"\b{word}\b", source.returns)} == set()


@of_each("name", SCRIPTS)
def test_numbered_scripts_and_no_others_keep_their_replies(name: str) -> None:
    source = read(name)
    assert source.numbered == ("the reply is stored under the producer's number" in source.resend[0])
    assert source.numbered == part_of(script(name).text, name).endswith("\nend)\n")
    assert source.numbered == (
        re.search(
            r"\nreturn (?:shared\.)?numbered\(KEYS\[1\], ARGV\[1\], ARGV\[2\], ARGV\[3\], function\(\)\n",
            part_of(script(name).text, name),
        )
        is not None
    )
    assert not {"numbered", "repeated_reply"} & set(re.findall(r"\w+", source.body)), "that is the loader's"
    assert ("late" in source.words) == (source.numbered or name == "start_tasks")


@of_each("name", SCRIPTS)
def test_flags_are_right(name: str) -> None:
    """no-writes: it may run on a replica, and when memory is full. allow-oom: it must go on when memory is full."""
    writes = commands(reached(name)) - READS
    assert read(name).flags == ("no-writes" if not writes else "" if name in FILL_MEMORY else "allow-oom")


def lines_of_code(text: str) -> int:
    return len(strip(text).splitlines())


@of_each("name", SCRIPTS)
def test_bodies_are_short(name: str) -> None:
    assert lines_of_code(read(name).body) <= 61  # with the one that binds the base


def test_shared_functions_are_short() -> None:
    assert {each.name for each in shared().values() if lines_of_code(each.code) > 40} == set()


# Bodies


def commands(text: str) -> set[str]:
    return set(re.findall(r"redis\.p?call\((?:front and 'RPUSH' or )?'(\w+)'", text)) | (
        {"RPUSH"} if "and 'RPUSH' or" in text else set()
    )


@cache
def shared() -> dict[str, Definition]:
    """What transactions share, by name."""
    return library(FILES.values())


def needed(text: str) -> list[Definition]:
    """What the text uses of the shared functions, and what that uses."""
    found: dict[str, Definition] = {}
    left = list(names(text))
    while left:
        name = left.pop()
        if name in shared() and name not in found:
            found[name] = shared()[name]
            left += found[name].needs
    return list(found.values())


@cache
def reached(stem: str) -> str:
    """The body, and all shared functions that it calls, and those that they call."""
    text = read(stem).body + ("\nnumbered()" if read(stem).numbered else "")
    return "".join([text, *(each.code for each in needed(text))])


def test_only_commands_that_we_know() -> None:
    """The rights that a user needs. None that runs other code, none that blocks. Only find_claims, whose right is no part of a
    role, walks the key space."""
    found = set().union(*map(commands, FILES.values()))
    assert found == READS | WRITES
    assert {stem for stem in SCRIPTS if "SCAN" in commands(reached(stem))} == {"find_claims"}


@of_each("stem", FILES)
def test_no_trap_of_lua_or_redis_in_it(stem: str) -> None:
    code = re.sub(r"--.*", "", FILES[stem])
    calls = re.findall(r"redis\.(\w+)\('(\w+)'", code)
    judged = re.sub(r"\b(?:own|permitted)\(redis\.pcall\(|local (\w+) = redis\.pcall\(.*\n  if .*\bown\(\1\)", "", code)
    judged = re.sub(r"local (\w+) = redis\.pcall\(.*\n  if .*\b\1\.err then *\n    own\(\1\)\n", "", judged)
    judged = re.sub(r"local (\w+) = redis\.pcall\(.*\n  if type\(\1\) ~= 'number'.*\s.*\bown\(\1,", "", judged)
    ignored = set(re.findall(r"redis\.pcall\('(\w+)'", judged))
    assert ignored <= {"PUBLISH", "PUBSUB", "INFO", *({"HGET"} if stem == "queue" else ())}, "own() tells why it failed"
    assert {command for how, command in calls if how == "call"}.isdisjoint({"PUBLISH", "PUBSUB"}), "pcall every publish"
    assert "setresp" not in code
    assert "tostring" not in code, "digits() prints a number as it is"
    assert "cjson" not in code, "it mangles bytes and numbers"
    assert not re.search(r"redis\.(?:call|pcall)\([^')f]", code), "a command that nobody can grep"


def test_digits_writes_each_number_as_it_is(server: Server) -> None:
    """Also what does not fit into 32 bits, and what is no whole number."""
    rng = random.Random(1)
    edges = [10.0**n + more for n in range(19) for more in (-1, 0, 1)]
    values = [
        *edges,
        2.0**53 - 1,
        -1.0,
        -(10.0**12),
        0.5,
        1.5,
        1e9 + 0.5,
        1e300,
        math.inf,
        *(rng.uniform(0, 2.0**53) // 1 for _ in range(1000)),
    ]
    code = (
        shared()["digits"].code
        + "\nlocal found = {} for i = 1, #ARGV do found[i] = digits(tonumber(ARGV[i])) end return found"
    )
    found = server.client().eval(code, 0, *(repr(value) for value in values))
    assert [each.decode() for each in found] == [f"{value:.0f}" for value in values]


def test_unpack_is_bounded() -> None:
    """More than 7999 values are an error in the middle of a script."""
    found = {(stem, each) for stem, text in FILES.items() for each in re.findall(r"unpack\(([^)]*)\)", text)}
    assert found == {
        ("claims", "claims, from, math.min(from + 999, #claims"),
        ("claims", "others"),  # six keys
        ("finished", "keys, 1, math.min(#keys, 1000"),
        ("lanes", "entries"),  # claims of one request, 1000 at most
        ("lanes", "gone"),  # some of them
        ("lanes", "lanes"),  # of one request, 1000 at most
        ("lanes", "set"),  # names and values of these
        ("lanes", "unused"),  # some of them
        ("lanes", "kept, 1, 7"),
        ("lanes", "claims, from, math.min(from + 999, #claims"),
        ("lanes", "empty"),  # some of them
        ("lanes", "held"),  # turns and names of these
        ("lanes", "idle"),  # likewise
        ("lanes", "scores"),  # likewise
        ("lanes", "passed"),  # 100 at most
        ("schedules", "fields"),  # ten of each of 25 schedules
        ("schedules", "facts"),  # six of each of these
        ("schedules", "kept"),  # five
        ("values", "checks"),  # a time and a name of each of these
        ("history", "lines"),  # of ended runs: 1000
        ("jobs", "kept"),  # of twelve fields
        ("jobs", "KEPT"),  # seven names
        ("finished", "KEPT_FIELDS"),  # sixteen names
        ("finished", "ENDED"),  # two names
        ("finished", "facts"),  # of one end
        ("finished", "names"),  # eight at most
        ("finished", "pairs_of"),  # 200
        ("finished", "SHOWN"),  # eighteen names
        ("finished", "shown"),  # their values
        ("finished", "stale, 1, math.min(#stale, 100"),
        ("finished", "entries, 1, math.min(#entries, 100"),
        ("batches", "ids, from, math.min(from + 999, #ids"),
        ("batches", "some"),  # 1000 at most
        ("batches", "BATCH_FACTS"),
        ("queue", "ends[n]"),  # six values
        ("batches", "batch_entry(queue, id"),  # three values
        ("batches", "parent"),  # cmsgpack's
        ("history", "fields"),  # 38 at most
        ("history", "totals"),  # 50
        ("history", "'>I4', kept"),
        ("history", "'>I4', minute"),
        ("values", "gone"),
        ("values", "flat, 1, math.min(#flat, 1000"),
        ("values", "flat, from, math.min(from + 999, #flat"),
        ("jobs", "facts"),
        ("consumers", "words"),  # of an example
        ("jobs", "gone"),
        ("claims", "reply, 2"),
        ("consumers", "named"),  # 1000 at most
        ("queue", "skipped"),  # 64 at most
        ("schedules", "facts"),  # of one schedule
        ("schedules", "flat"),  # of one batch, 500 at most
        ("schedules", "wanted"),  # cmsgpack's
        ("schedules", "firing"),
        ("jobs", "job"),  # cmsgpack's
        ("queue", "items"),
        ("claims", "named"),
        ("registry", "unused"),
        ("limits", "lapsed"),  # 1000 at most
        ("limits", "claims"),  # of one request, 1000 at most
        ("limits", "claims, from, math.min(from + 999, #claims"),
        ("limits", "running, from, math.min(from + 999, #running"),
    }
    assert "math.min(low, newest + 1, oldest + 1000)" in FILES["values"]
    assert "for chunk = 0, tasks - 1, 1000 do" in read("enqueue").body
    assert "for i = from, math.min(from + 999, #ARGV) do" in read("finish_tasks").body


def test_every_shared_function_is_called_by_a_script() -> None:
    everything = "numbered()" + "".join(map(strip, FILES.values()))
    assert {name for name in shared() if len(re.findall(rf"\b{name}\b", everything)) < 2} == set()
    sent = "".join(script(name).text for name in SCRIPTS)
    assert {name for name, each in shared().items() if each.literal and name in sent} == set()


@of_each("name", SCRIPTS)
def test_no_variable_has_the_name_of_a_shared_function(name: str) -> None:
    """It would hide the function, and the script would be sent with a function that it does not call."""
    functions = {name for name, each in shared().items() if each.code.startswith("local function")}
    for text in [read(name).body, *(each.code for each in needed(reached(name)))]:
        words = [word for word in tokens(text) if word[0] not in {"space", "comment"}]
        for (_, before), (kind, word), (_, after) in zip(words, words[1:], words[2:], strict=False):
            if kind == "name" and before[-1] not in {".", ":"} and after[0] != "(":
                assert word not in functions


# The loader


def test_all_scripts_are_loaded_and_nothing_else() -> None:
    assert [each.name for each in all_scripts()] == SCRIPTS
    assert script("enqueue") is script("enqueue")


def always(name: str) -> list[str]:
    """The definitions that a script makes at once; the others are made together, when one of them is needed."""
    lines: list[str] = re.findall(r"^-- ALWAYS (.+)$", TRANSACTIONS[name].header, re.MULTILINE)
    return " ".join(lines).split()


MADE_TOGETHER = re.compile(
    r"^setmetatable\(shared, \{__index = function\(shared, name\)\n(.*)^return rawget\(shared, name\).*\nend\}\)\n",
    re.MULTILINE | re.DOTALL,
)
"""The definitions of a script that are not always needed."""
AT_ONCE = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)
AS_FIELD = re.compile(r"^(?:function shared\.(?=\w+\()|shared\.(?=\w+ = ))(\w+)", re.MULTILINE)
"""What a script makes at once, and the fields of its table."""


@of_each("name", SCRIPTS)
def test_the_shebang_comes_first_then_what_the_body_needs_then_the_body(name: str) -> None:
    text = part_of(script(name).text, name)
    assert text.startswith("#!lua")
    assert text.count("#!lua") == 1
    assert text.splitlines()[1] == "local shared = {}"
    body = strip(read(name).body)
    assert text.count("\n") > body.count("\n")
    last = text.splitlines()[-1].replace("shared.", "")
    assert last == ("end)" if read(name).numbered else body.splitlines()[-1])
    begin, fields = ([*filter(shared().get, each.findall(text))] for each in (AT_ONCE, AS_FIELD))
    assert len({*begin, *fields}) == len([*begin, *fields]), "each stands once"
    used = {each.name for each in needed(reached(name)) if not each.literal}
    unneeded = ({*fields} | {*always(name)}) ^ used
    assert unneeded == set() or (script(name).tail and unneeded <= {*fields} - used)
    assert {*always(name)} <= {*begin}


@of_each("name", SCRIPTS)
def test_everything_is_defined_before_it_is_used(name: str) -> None:
    """Lua takes a name that is not yet defined for a global, and the server refuses those when the line runs."""
    there: set[str] = set()
    text = part_of(script(name).text, name)
    linked = {each.name for each in needed(text.replace("shared.", ""))}
    for line in text.splitlines()[1:]:
        if found := re.match(r"local (?:function )?(\w+)", line):
            there.add(found[1])
        assert {each for each in re.findall(r"(?<![.:\w'])[A-Za-z_]\w*", line) if each in shared()} <= there, line
        assert {*re.findall(r"\bshared\.(\w+)", line)} <= linked, line


@pytest.mark.parametrize(("name", "most"), [("enqueue", 10), ("start_tasks", 25), ("finish_tasks", 16)])
def test_a_script_that_runs_for_each_task_makes_few_functions(name: str, most: int) -> None:
    """Each costs server time, also if it is not called."""
    assert len(always(name)) <= most
    at_once = MADE_TOGETHER.sub("", script(name).text)
    assert len(re.findall(r"^(?:local )?function ", at_once, re.MULTILINE)) <= most


MOST_LOCALS, MOST_UPVALUES = 200, 60
"""The limits of Lua 5.1 for one function. The main part of a script is a function too."""


@of_each("name", SCRIPTS)
def test_no_function_comes_near_the_limits_of_lua(name: str) -> None:
    """Counted too high: the local variables of a body. Only what is always needed is a variable outside a function."""
    in_the_body = sum(1 + line.count(",") for line in re.findall(r"\b(?:local|for) ([\w, ]+)", strip(read(name).body)))
    assert len(always(name)) + in_the_body < MOST_LOCALS
    assert len(always(name)) < MOST_UPVALUES


def code_words(text: str) -> list[tuple[str, str]]:
    """The tokens of a script after its first two lines, symbols one by one."""
    words = [word for word in tokens(text.split("\n", 2)[2]) if word[0] not in {"space", "comment"}]
    return [(kind, each) for kind, text in words for each in (text if kind == "symbol" else [text])]


@of_each("name", SCRIPTS)
def test_what_is_sent_is_the_text_with_other_names(name: str) -> None:
    """In a definition, one name stands for one name, and for none that is there already."""
    assert script(name).source.count("\n") == script(name).text.count("\n")
    source, text = part_of(script(name).source, name), part_of(script(name).text, name)
    for function, short in SHORT_CALLS.items():
        text = text.replace(f"{function}(", f"{short}(")
    meant, sent = code_words(text), code_words(source)
    renamed, kept, depth, base = dict[str, str](), set[str](), 0, 0
    for n, ((kind, one), (_, other)) in enumerate(zip(meant, sent, strict=True)):
        is_field = meant[n - 1][1] == "." and meant[n - 2][1] != "."
        if one != other:
            assert kind == "name"
            assert renamed.setdefault(f".{one}" if is_field else one, other) == other
            assert not is_field or meant[n - 2][1] == "shared"
        elif kind == "name" and not is_field and meant[n + 1 : n + 2] != [("symbol", "=")]:
            kept.add(one)
        depth += {"function": 1, "if": 1, "do": 1, "repeat": 1, "end": -1, "until": -1}.get(one, 0)
        base += {"__index": 1, "rawget": -1}.get(one, 0)  # definitions that are made together are inside a function
        if depth == base and one == "end":
            variables = [other for name, other in renamed.items() if name[0] != "."]
            assert len({*variables, *kept}) == len(variables) + len(kept), variables
            renamed, kept = {}, set()


@of_each("name", SCRIPTS)
def test_nothing_but_comments_is_left_out_of_what_is_sent(name: str) -> None:
    assert "--" not in script(name).source
    assert "\n\n" not in script(name).source


@of_each("name", SCRIPTS)
def test_the_sha_is_the_one_the_server_will_know_it_by(name: str) -> None:
    assert script(name).sha == hashlib.sha1(script(name).source.encode()).hexdigest()


def test_lua_and_python_agree_on_how_far_ahead_a_cursor_may_be() -> None:
    assert f"local AHEAD_MS = {AHEAD_MS}\n" in FILES["values"]


def test_what_several_transactions_share_stands_once_and_what_one_alone_needs_stands_in_its_branch() -> None:
    groups = [group for sha in {each.sha for each in all_scripts()} if len(group := of_one_script(sha)) > 1]
    assert len(groups) == 3
    for group in groups:
        text = group[0].text
        definitions = re.findall(r"^(?:function shared\.(\w+)\(|shared\.(\w+) = )", text, re.MULTILINE)
        assert len({*definitions}) == len(definitions)
        assert [each.name for each in group] == re.findall(
            r"^(?:else)?if transaction=='(\w+)' then$", text, re.MULTILINE
        )
        users = [{each.name for each in needed(reached(each.name)) if not each.literal} for each in group]
        common = part_of(text, "nothing")
        for name in {*filter(None, sum(definitions, ()))}:
            assert (f"shared.{name} = " in common or f"shared.{name}(" in common) == (
                sum(name in each for each in users) > 1
            )


def of_one_script(sha: str) -> list[Script]:
    return [each for each in all_scripts() if each.sha == sha]


# Scripts and operations


def test_every_script_has_one_operation_and_every_operation_one_script() -> None:
    exported = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert exported - {"enqueue_one"} == set(SCRIPTS)
    assert ops.enqueue_one(QueueKeys("p", "Q1"), b"task").script is script("enqueue"), "which is short for this one"


def test_everything_public_in_the_package_is_exported() -> None:
    for path in Path(ops.__file__).parent.glob("*.py"):
        if path.stem not in ("__init__", "replies"):
            names = re.findall(
                r"^(?:def|class) ([A-Za-z]\w*)|^([A-Z]\w*)(?:: \w+)? =", path.read_text("utf-8"), re.MULTILINE
            )
            assert {function or constant for function, constant in names} <= set(ops.__all__), path


@of_each("name", SCRIPTS)
def test_an_operation_fills_the_slots_of_its_script(name: str) -> None:
    q, g = QueueKeys("p", "Q1"), RegistryKeys("p")
    call, source = CALLS[name](q, g, NO_SCENE), read(name)
    assert call.script is script(name)
    assert call.numbered == source.numbered
    bases = {"queue": q.base, "mesh": g.base, "limit": LimitKeys("p", "Q2").base}
    assert call.base == bases[source.body.split()[1]]
    if source.args and source.args[-1].rest:
        assert len(call.args) >= len(source.args)
    else:
        assert len(call.args) == len(source.args)

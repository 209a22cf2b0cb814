"""The assembler: tokens of Lua, the names that a text uses, and what is put in front of a body."""

from __future__ import annotations

import pytest

from worqr.lua.assembler import Assembler, Code, Definition, definitions, library, names, strip, tokens

MODULE = """-- Things.

-- Returns one.
local ONE = 1

-- Adds one.
local function more(n)
  return n + ONE -- not two
end

-- Says it.
local function loud(text)
  return string.upper(text) .. more(0)
end
"""


def kinds(text: str) -> list[tuple[str, str]]:
    return [word for word in tokens(text) if word[0] != "space"]


# Tokens


def test_the_tokens_are_the_text() -> None:
    assert "".join(text for _, text in tokens(MODULE)) == MODULE


def test_each_kind_of_token() -> None:
    assert kinds("local a1 = 'x' .. 0x1F -- why\n") == [
        ("name", "local"),
        ("name", "a1"),
        ("symbol", "="),
        ("string", "'x'"),
        ("symbol", ".."),
        ("number", "0x1F"),
        ("comment", "-- why"),
    ]


@pytest.mark.parametrize(
    "string",
    ["'--'", '"--"', r"'a\'--'", r"'\\'", '"\'"', "[[ -- 'a\n]]", "[=[ ]] -- ]=]", "''"],
)
def test_a_string_is_one_token_whatever_is_in_it(string: str) -> None:
    assert kinds(f"f({string}, b)") == [
        ("name", "f"),
        ("symbol", "("),
        ("string", string),
        ("symbol", ","),
        ("name", "b"),
        ("symbol", ")"),
    ]


@pytest.mark.parametrize("comment", ["-- it's", "--", '-- "', "--[[ a\nb ]]", "--[==[ ]] ]==]", "--[ one line"])
def test_a_comment_is_one_token_whatever_is_in_it(comment: str) -> None:
    assert kinds(f"a {comment}\nb") == [("name", "a"), ("comment", comment), ("name", "b")]


def test_an_index_is_no_string() -> None:
    assert [text for _, text in kinds("a[b[1]] = c[ [[x]] ]")] == [
        *("a", "[", "b", "[", "1", "]]", "=", "c", "[", "[[x]]", "]"),
    ]


def test_numbers_and_operators() -> None:
    assert [text for _, text in kinds("1e-5 ~= 2592000 and a<=b or ...==1..2")] == [
        *("1e-5", "~=", "2592000", "and", "a", "<=", "b", "or", "...==", "1..2"),
    ]


def test_a_string_without_an_end_is_an_error_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2: a string has no end"):
        list(tokens("a = 1\nb = 'x\n"))


# Comments


def test_comments_and_empty_lines_go_and_indentation_stays() -> None:
    text = """-- odd: has strings with dashes.
local a = '--' .. "it's -- ''" .. 'a\\'--' -- gone
  -- gone, too

if a then
  a = 1   -- and this

  --[[ and
  this ]]
  a = 2--[[ ]]+ 1
end
return {a, [[
  -- kept

]]}
"""
    assert (
        strip(text)
        == """local a = '--' .. "it's -- ''" .. 'a\\'--'
if a then
  a = 1
  a = 2 + 1
end
return {a, [[
  -- kept

]]}
"""
    )


def test_of_nothing_but_comments_nothing_is_left() -> None:
    assert strip("-- a\n\n  -- b\n") == ""


# Names


def test_the_names_that_a_text_uses_in_their_order() -> None:
    assert names("return wake(queue, count(queue) + wake(1))") == ("return", "wake", "queue", "count")


@pytest.mark.parametrize(
    "text",
    [
        "o.wake(1)",
        "o:wake(1)",
        "'wake(1)'",
        "-- wake(1)",
        "{wake = 1}",
        "{a, wake = 1}",
        "o . wake",
        "f().wake",
        "{wake=1}",
    ],
)
def test_a_field_a_key_a_string_and_a_comment_are_no_use_of_a_name(text: str) -> None:
    assert "wake" not in names(text)


@pytest.mark.parametrize(
    "text", ["pcall(wake, 1)", "{wake}", "a == wake", "wake == a", "a..wake()", "{a = wake}", "wake==a"]
)
def test_a_function_may_be_used_without_a_call(text: str) -> None:
    assert "wake" in names(text)


# Definitions


def test_a_module_is_a_list_of_definitions() -> None:
    one, more, loud = definitions(MODULE)
    assert (one.name, one.code, one.literal) == ("ONE", "local ONE = 1\n", "1")
    assert (more.name, more.code) == ("more", "local function more(n)\n  return n + ONE\nend\n")
    assert {"ONE"} == {"ONE", "loud", "more"} & set(more.needs), "not itself"
    assert (loud.name, loud.literal) == ("loud", "")


@pytest.mark.parametrize(
    "text",
    [
        "return 1\n",
        "local a, b = 1, 2\n",
        "local a\n",
        "local function a() end\nlocal b\n",
        "x = 1\n",
        "local a = 1\na()\n",
    ],
)
def test_anything_else_in_a_module_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="definitions|more or less"):
        assert [each.code for each in definitions(text)]


def test_a_name_may_be_defined_once() -> None:
    with pytest.raises(ValueError, match="'a' is defined twice"):
        library(["local a = 1\n", "local a = 2\n"])


# What people read


def readable(body: str, known: dict[str, Definition], *always: str) -> str:
    return Assembler(known).readable({"t": body}, always)


def test_only_what_is_needed_is_there_each_after_what_it_needs_itself() -> None:
    known = library(["local function top()\n  return middle()\nend\n", "local function other()\nend\n"])
    known |= library(["local function middle()\n  return LOW\nend\n", "local LOW = 1\n"])
    assert (
        readable("-- why\nreturn top() + LOW\n", known)
        == """local shared = {}
function shared.middle()
  return 1
end
function shared.top()
  return shared.middle()
end
return shared.top() + 1
"""
    )
    assert readable("return 1\n", known) == "local shared = {}\nreturn 1\n"


def test_a_number_or_a_text_is_there_in_place_of_its_name_and_a_table_is_not() -> None:
    known = library(["local WORD = 'a word' -- why\nlocal LIST = {1, 2}\n\n-- Two.\nlocal SUM = 1 + 1\n"])
    text = readable("return {WORD, 'WORD', LIST, SUM}\n", known)
    assert text == (
        "local shared = {}\nshared.LIST = {1, 2}\nshared.SUM = 1 + 1\nreturn {'a word', 'WORD', shared.LIST, shared.SUM}\n"
    )


def test_a_function_may_call_itself_but_not_one_that_calls_it() -> None:
    again = "local function a(n)\n  return n == 0 or a(n - 1)\nend\n"
    assert "function shared.a(n)\n  return n == 0 or shared.a(n - 1)\n" in readable("return a(1)\n", library([again]))
    circle = ["local function a()\n  return b()\nend\n", "local function b()\n  return a()\nend\n"]
    with pytest.raises(ValueError, match="a circle of calls: a -> b -> a"):
        readable("return a()\n", library(circle))


PARTS = [
    "local function a()\nend\n",
    "local function b(x)\n  return c(x, a(), LIST)\nend\n",
    "local function c(x)\n  return x\nend\n",
    "local LIST = {}\n",
]


def test_what_is_not_always_needed_is_made_together_at_the_first_need() -> None:
    assert (
        readable("return b(a())\n", library(PARTS), "a", "LIST")
        == """local shared = {}
local function a()
end
local LIST = {}
setmetatable(shared, {__index = function(shared, name)
function shared.c(x)
  return x
end
function shared.b(x)
  return shared.c(x, a(), LIST)
end
return rawget(shared, name)
end})
return shared.b(a())
"""
    )


def test_what_is_always_needed_may_be_all_and_must_be_needed() -> None:
    assert readable("return a()\n", library(PARTS), "a") == "local shared = {}\nlocal function a()\nend\nreturn a()\n"
    with pytest.raises(ValueError, match="not needed: c"):
        readable("return a()\n", library(PARTS), "a", "c")


def test_what_is_often_needed_is_made_first_and_the_rest_when_something_else_is_needed() -> None:
    text = Assembler(library(PARTS)).readable({"t": "return b(a())\n"}, ["a"], ["LIST", "c"])
    assert (
        text
        == """local shared = {}
local function a()
end
setmetatable(shared, {__index = function(shared, name)
function shared.c(x)
  return x
end
shared.LIST = {}
setmetatable(shared, {__index = function(shared, name)
function shared.b(x)
  return shared.c(x, a(), shared.LIST)
end
return rawget(shared, name)
end})
return rawget(shared, name) or shared[name]
end})
return shared.b(a())
"""
    )


# What is sent


def sent(body: str, known: dict[str, Definition], *always: str) -> str:
    return Assembler(known).sent({"t": body}, always)


def test_what_is_sent_has_short_names_and_the_same_lines() -> None:
    known = library(["local function add(one, other)\n  local sum = one + other\n  return sum\nend\n"])
    assert (
        sent("local text = KEYS[1] .. ':x'\nreturn add(redis.call('GET', text), {text = text})\n", known)
        == """local _,C={},redis.call
function _.Aa(a,b)
local c=a+b
return c
end
local a=KEYS[1]..':x'
return _.Aa(C('GET',a),{text=a})
"""
    )


def test_what_is_always_needed_keeps_its_short_name_without_the_table() -> None:
    source = sent("return b(a())\n", library(PARTS), "a", "LIST")
    assert source == (
        "local _={}\nlocal function Ab()\nend\nlocal Aa={}\n"
        "setmetatable(_, {__index = function(_, name)\n"
        "function _.Ad(a)\nreturn a\nend\nfunction _.Ac(a)\nreturn _.Ad(a,Ab(),Aa)\nend\n"
        "return rawget(_, name)\nend})\nreturn _.Ac(Ab())\n"
    )


def test_names_depend_on_nothing_but_the_files() -> None:
    first, again = (Assembler(library(PARTS)) for _ in range(2))
    again.sent({"t": "return c(1)\n"})
    assert first.sent({"t": "return b(a())\n"}) == again.sent({"t": "return b(a())\n"})


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("return a - -a", "return a- -a"),
        ("return 1 .. a", "return 1 ..a"),
        ("return a .. 'x' .. a", "return a..'x'..a"),
        ("return #a, not a", "return#a,not a"),
        ("return a == 1 and 'x' or {}", "return a==1 and'x'or{}"),
        ("return a[ [[x]] ]", "return a[ [[x]]]"),
        ("return a == 'x' and (a) or nil", "return a=='x'and(a)or nil"),
        ("a = a\n  return a", "a=a\nreturn a"),
    ],
)
def test_only_spaces_go_that_lua_does_not_need(text: str, short: str) -> None:
    assert Code(text).short({}) == f"{short}\n"
    assert [word for word in tokens(short) if word[0] in {"string", "number"}] == [
        word for word in tokens(text) if word[0] in {"string", "number"}
    ]


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        ("local a, b = c, d", ("a", "b")),
        ("local a\nb, c = 1, 2", ("a",)),
        ("local a\nprint(b)", ("a",)),
        ("for i, each in ipairs(all) do end", ("i", "each")),
        ("for i = from, to do end", ("i",)),
        ("local function f(x, ...) end", ("f", "x")),
        ("sort(all, function(one, other) return one < other end)", ("one", "other")),
        ("call(function() return x end)", ()),
        ("-- local x\nreturn 'local y', z.local_time", ()),
    ],
)
def test_the_local_variables_of_a_text(text: str, declared: tuple[str, ...]) -> None:
    assert Code(text).declared == declared


def test_fields_and_keys_keep_their_names() -> None:
    names = {"one": "a", "two": "b"}
    assert Code("one.two, two = {one = two, two}, one:two(one['two'])").short(names) == (
        "a.two,b={one=b,b},a:two(a['two'])\n"
    )


def test_a_function_among_the_values_of_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="a function among the values"):
        Code("return {a = function() end}").short({})

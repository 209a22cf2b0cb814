"""The assembler: tokens of Lua, the names that a text uses, and what is put in front of a body."""

from __future__ import annotations

import pytest

from worqr.lua.assembler import assemble, definitions, library, names, strip, tokens

MODULE = """-- Things.

-- Returns one.
local ONE = 1

-- Adds one.
local function more(n)
  return n + ONE -- not two
end

-- Says it.
-- LATER: seldom.
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
    assert (one.name, one.code, one.later) == ("ONE", "local ONE = 1\n", False)
    assert (more.name, more.code, more.later) == (
        "more",
        "local function more(n)\n  return n + ONE\nend\n",
        False,
    )
    assert {"ONE"} == {"ONE", "loud", "more"} & set(more.uses), "not itself"
    assert (loud.name, loud.later) == ("loud", True)


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
        definitions(text)


def test_a_name_may_be_defined_once() -> None:
    with pytest.raises(ValueError, match="'a' is defined twice"):
        library(["local a = 1\n", "local a = 2\n"])


# What is sent


def test_only_what_is_needed_is_sent_each_after_what_it_needs_itself() -> None:
    known = library(["local function top()\n  return middle()\nend\n", "local function other()\nend\n"])
    known |= library(["local function middle()\n  return LOW\nend\n", "local LOW = 1\n"])
    assert (
        assemble("-- why\nreturn top() + LOW\n", known)
        == """local function middle()
  return 1
end
local function top()
  return middle()
end
return top() + 1
"""
    )
    assert assemble("return 1\n", known) == "return 1\n"


def test_a_number_or_a_text_is_sent_in_place_of_its_name_and_a_table_is_not() -> None:
    known = library(["local WORD = 'a word'\nlocal LIST = {1, 2}\nlocal SUM = 1 + 1\n"])
    sent = assemble("return {WORD, 'WORD', LIST, SUM}\n", known)
    assert sent == "local LIST = {1, 2}\nlocal SUM = 1 + 1\nreturn {'a word', 'WORD', LIST, SUM}\n"


def test_a_function_may_call_itself_but_not_one_that_calls_it() -> None:
    again = "local function a(n)\n  return n == 0 or a(n - 1)\nend\n"
    assert assemble("return a(1)\n", library([again])) == f"{again}return a(1)\n"
    circle = ["local function a()\n  return b()\nend\n", "local function b()\n  return a()\nend\n"]
    with pytest.raises(ValueError, match="a circle of calls: a -> b -> a"):
        assemble("return a()\n", library(circle))


LATE = [
    "local function a()\nend\n",
    "-- LATER: seldom.\nlocal function b(x)\n  return c(x, a())\nend\n",
    "local function c(x)\n  return x\nend\n",
]


def test_one_that_is_made_later_is_made_by_a_function_with_what_only_it_needs() -> None:
    assert (
        assemble("return b(a())\n", library(LATE))
        == """local function a()
end
local made_b
local function make_b()
local function c(x)
  return x
end
local function b(x)
  return c(x, a())
end
return b
end
local function b(...)
  made_b = made_b or make_b()
  return made_b(...)
end
return b(a())
"""
    )


def test_what_the_body_needs_too_is_made_at_once_and_only_once() -> None:
    sent = assemble("return b(1) + c(2)\n", library(LATE))
    assert sent.count("local function c(") == 1
    assert sent.index("local function c(") < sent.index("local made_b")
    assert sent.index("local function a(") > sent.index("local function make_b("), "which the body does not call"


def test_one_that_is_made_later_may_need_another() -> None:
    known = library([*LATE, "-- LATER: still less.\nlocal function d()\n  return b(1)\nend\n"])
    alone = assemble("return d()\n", known)
    assert alone.index("local function make_d(") < alone.index("local function make_b(") < alone.index("return d\n")
    both = assemble("return d() + b(1)\n", known)
    assert both.count("local function make_b(") == 1
    assert both.index("local function make_b(") < both.index("local function make_d(")

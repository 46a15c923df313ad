"""Filters: the grammar and the truth of RocketMQ's SQL92, its error texts, and tag expressions."""

import pytest

from outbox.errors import FilterError
from outbox.model.filter.sql92 import MAX_DEPTH, MAX_LENGTH, Filter
from outbox.model.filter.tags import chosen_tags, tag_expression
from outbox.model.message import Message

HEADERS = {
    "a": "5",
    "A": "upper",
    "price": "150.50",
    "yes": "tRUe",
    "empty": "",
    "word": "it's 100%",
    "$_9": "dollar",
    "nine": "9",
    "ten": "1e1",
    "ts": "1700000000000",
    "odd": "1_000",
    "nan": "NaN",
    "digits": "9" * 100,
    "more_digits": "9" * 101,
    "far": "1000E996",
    "farther": "1E1000",
}

OUT_OF_ORDER = "Illegal values of between, left value({}) must less than or equal to right value({}); exchange them"
NOT_THERE = "there are no !=, LIKE, arithmetic and functions"
NO_TOKEN = f"texts are in single quotes, a quote in a text is '', and {NOT_THERE}"
NOT_JOINED = f"after a complete expression; join conditions by AND or OR; {NOT_THERE}"


def value_of(text: str):
    """True, False, or None for unknown; headers that are not in `HEADERS` are missing."""
    return Filter.of(text).expression.value(HEADERS.get)


#: Expressions with their values.
VALUES = {
    # A missing property is unknown, an empty text is a value.
    "missing": None,
    "missing = 'x'": None,
    "missing IS NULL": True,
    "missing IS NOT NULL": False,
    "empty IS NULL": False,
    "empty = ''": True,
    # AND and OR.
    "missing AND a = 6": False,
    "missing AND a = 5": None,
    "missing OR a = 5": True,
    "missing OR a = 6": None,
    "a = 6 OR a = 5 AND nine = 9": True,
    "(a = 6 OR a = 5) AND nine = 8": False,
    "NOT missing": None,
    "NULL": None,
    "TRUE AND NOT FALSE": True,
    # `=` with an unknown side is not symmetrical.
    "missing = other": True,
    "missing = 4": None,
    "4 = missing": False,
    "4 <> missing": True,
    "missing <> 4": None,
    "a = missing": False,
    # Numbers are decimals.
    "a = 5": True,
    "a = 5.0": True,
    "a = '5'": True,
    "a = '5.0'": False,
    "5 = a": True,
    "a = nine": False,
    "price > 150": True,
    "price = 150.5": True,
    "price <= 150.4999999999999999999999999": False,
    "ts > 0": True,
    "ts > 1699999999999L": True,
    "nine < ten": True,
    "nine >= ten": False,
    "ten = 10": True,
    "ten = .1E2": True,
    "a > 4. AND a > 0.0": True,
    "a > - 5 AND a < +6": True,
    "a > - - 6": False,
    "1 = 1.0": True,
    "1 <> 2": True,
    "digits > 1": True,
    "more_digits > 1": None,
    "far = 1e999": True,
    "farther > 0": None,
    # What is no number is unknown beside a number.
    "word > 5": None,
    "odd = 1000": None,
    "nan = nan": True,
    "nan < 1": None,
    "empty < 1": None,
    "word <> 5": None,
    "word > a": None,
    "word > 5 OR a = 5": True,
    # A sign before what is no number.
    "-a = 5": None,
    "-a > 5": None,
    "-a = -missing": True,
    # Conditions as values.
    "yes = TRUE": True,
    "TRUE = yes": True,
    "a = TRUE": False,
    "a = FALSE": True,
    "empty = FALSE": True,
    "3 = TRUE": False,
    "(a = 5) = (nine = 9)": True,
    "(a = 5) <> TRUE": False,
    # A bare property is never true.
    "yes": False,
    "NOT yes": True,
    # NOT binds tighter than a comparison.
    "NOT a = 3": False,
    "NOT (a = 3)": True,
    "NOT missing = 3": None,
    # Lists.
    "a IN ('4', '5')": True,
    "a NOT IN ('4', '5')": False,
    "a IN ('5.0')": False,
    "missing IN ('5')": None,
    "missing NOT IN ('5')": None,
    # Searches: false in both forms where there is no text.
    "word CONTAINS '100%'": True,
    "word CONTAINS 'IT'": False,
    "word NOT CONTAINS 'x'": True,
    "word STARTSWITH 'it''s'": True,
    "word ENDSWITH '%'": True,
    "word NOT ENDSWITH '%'": False,
    "missing CONTAINS 'x'": False,
    "missing NOT CONTAINS 'x'": False,
    "NOT (missing CONTAINS 'x')": True,
    "word CONTAINS ''": False,
    "word NOT CONTAINS ''": False,
    "5 CONTAINS '5'": False,
    "'abc' CONTAINS 'b'": True,
    # BETWEEN includes both bounds.
    "a BETWEEN 5 AND 6": True,
    "a NOT BETWEEN 5 AND 6": False,
    "a BETWEEN -6 AND -5": False,
    "a BETWEEN nine AND 3": False,
    "missing BETWEEN 1 AND 2": None,
    "missing NOT BETWEEN 1 AND 2": None,
    "a BETWEEN missing AND 4": False,
    # Names and words.
    "A = 'upper' and a = '5'": True,
    "$_9 = 'dollar'": True,
    "a\n=\t5 -- five\n OR /* never * */ a = 6": True,
}


def test_an_expression_has_a_value():
    assert {text: value_of(text) for text in VALUES} == VALUES


@pytest.mark.parametrize(
    ("text", "at", "problem"),
    [
        ("a = NULL", 4, "'NULL' cannot be compared; write IS NULL or IS NOT NULL"),
        ("NULL <> a", 0, "'NULL' cannot be compared; write IS NULL or IS NOT NULL"),
        ("a > 'x'", 4, "Value ''x'' cannot be compared; only numbers have an order"),
        ("TRUE <= a", 0, "Value 'TRUE' cannot be compared; only numbers have an order"),
        ("a < (b = 'c')", 4, "Value '(b = 'c')' cannot be compared; only numbers have an order"),
        ("a > 1 > 2", 0, "Value 'a > 1' cannot be compared; only numbers have an order"),
        ("TRUE = 3", 7, "'TRUE' cannot be compared with '3'"),
        ("a BETWEEN 2 AND 1", 10, OUT_OF_ORDER.format(2, 1)),
        ("a BETWEEN -5 AND -10", 10, OUT_OF_ORDER.format(-5, -10)),
        ("a BETWEEN 'b' AND 'c'", 10, "Value ''b'' cannot be compared; only numbers have an order"),
        ("5 IN ('5')", 0, "Expected a property for In expression, got: 5"),
        ("a IN ()", 6, "expected a text in single quotes, not ')'"),
        ("a IN (5)", 6, "expected a text in single quotes, not '5'"),
        ("a CONTAINS b", 11, "expected a text in single quotes, not 'b'"),
        ("'text'", 0, "Expression will not result in a boolean value: 'text'; compare it"),
        ("a = 1 AND 5", 10, "Expression will not result in a boolean value: 5; compare it"),
        ("a = 1 garbage", 6, f"unexpected 'garbage' {NOT_JOINED}"),
        ("a = 1 b = 2", 6, f"unexpected 'b' {NOT_JOINED}"),
        ("a > 007", 5, f"unexpected '0' {NOT_JOINED}"),
        ("a LIKE 'x%'", 2, f"unexpected 'LIKE' {NOT_JOINED}"),
        ("a-b = 1", 1, f"unexpected '-' {NOT_JOINED}"),
        ("(a = 1", 6, "expected a closing bracket here"),
        ("a = ", 4, "expected a property, a text, a number or a bracket here"),
        ("between = 1", 0, "expected a property, a text, a number or a bracket, not 'between'"),
        ("a IS 5", 5, "expected NULL or NOT NULL, not '5'"),
        ("a > 1e1000", 4, "a number has at most 100 characters, and an exponent of 3 digits"),
        ("a != 1", 2, f"Lexical error: '!' begins nothing; {NO_TOKEN}"),
        ("a = 'b\0'", 6, "Lexical error: '\\x00' is no text; leave it out"),
        ('a = "b"', 4, f"Lexical error: '\"' begins nothing; {NO_TOKEN}"),
    ],
)
def test_what_is_no_filter_is_refused_with_a_caret_under_the_place(text, at, problem):
    with pytest.raises(FilterError) as refused:
        Filter.of(text)

    assert str(refused.value) == f"filter: {problem}\n  {text.replace(chr(0), ' ')}\n  {' ' * at}^"
    assert (refused.value.text, refused.value.at) == (text, at)


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_filter_is_refused_in_rocketmqs_words(text):
    with pytest.raises(FilterError, match=r"^filter: Expression can't be null! SQL92; "):
        Filter.of(text)


def test_the_caret_of_a_long_filter_is_shown_with_the_text_around_it():
    with pytest.raises(FilterError) as refused:
        Filter.of("region = 'eu'\nAND " + "a = 1 OR " * 20 + "\t! AND b = 2")

    _, line, caret = str(refused.value).split("\n")
    assert line[caret.index("^")] == "!"
    assert len(line) < 80


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("a = 1 OR " * 500 + "a = 1", f"at most {MAX_LENGTH} characters, not 4505"),
        (
            "(" * 40 + "a = 1" + ")" * 40,
            f"at most {MAX_DEPTH} levels of brackets, signs and comparisons inside each other",
        ),
        ("NOT " * 900 + "a", f"at most {MAX_DEPTH} levels of brackets, signs and comparisons inside each other"),
        ("a" + " IS NULL" * 400, f"at most {MAX_DEPTH} levels of brackets, signs and comparisons inside each other"),
        (
            "a" + " CONTAINS 'x'" * 300,
            f"at most {MAX_DEPTH} levels of brackets, signs and comparisons inside each other",
        ),
    ],
)
def test_a_filter_is_not_too_long_and_not_too_deep(text, limit):
    with pytest.raises(FilterError, match=limit):
        Filter.of(text)


def test_a_filter_matches_headers_tags_key_and_topic():
    message = Message("orders.placed", b"", key="order-1", tags="TagA", headers={"a": "5", "TAGS": "hidden"})
    bare = Message("orders.placed", b"")

    texts = ["a = 5", "TAGS = 'TagA'", "KEYS = 'order-1'", "TOPIC STARTSWITH 'orders.'", "tags IS NULL"]
    assert [Filter.of(text).matches(message) for text in texts] == [True, True, True, True, True]
    assert [Filter.of(text).matches(bare) for text in texts] == [False, False, False, True, True]


def test_words_for_a_search_come_before_the_key():
    """Clients of RocketMQ send them beside a message group, which is the key here."""
    message = Message("orders", b"", key="group-7", headers={"KEYS": "order-1 order-2"})

    texts = ["KEYS = 'order-1 order-2'", "KEYS CONTAINS 'order-2'", "KEYS = 'group-7'"]
    assert [Filter.of(text).matches(message) for text in texts] == [True, True, False]


@pytest.mark.parametrize("headers", ["{", "[1]", '"a"', '{"a": 5}'])
def test_a_row_of_another_hand_has_no_properties_where_it_has_no_texts(headers):
    message = Message("orders", b"").sent_as("orders", headers_json=headers, body=b"", content_type=None)

    assert Filter.of("a IS NULL").matches(message)


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        (None, None),
        ("", None),
        ("*", None),
        ("TagA", ("TagA",)),
        (" TagB||TagA || TagB ||", ("TagA", "TagB")),
        (" * ", ("*",)),
        ("*||A", ("*", "A")),
        ("two words", ("two words",)),
    ],
)
def test_a_tag_expression_names_exact_tags(expression, tags):
    assert chosen_tags(expression) == tags
    assert chosen_tags(tag_expression(tags)) == tags or tags == ("*",)


@pytest.mark.parametrize("expression", ["||", "|| ||", " "])
def test_a_tag_expression_without_a_tag_is_refused_in_rocketmqs_words(expression):
    with pytest.raises(FilterError, match=r"^tags: subString split error; "):
        chosen_tags(expression)


@pytest.mark.parametrize("expression", ["a|b", "a\nb||c", "x" * 256, ["TagA"]])
def test_what_no_message_has_as_its_tags_is_refused(expression):
    with pytest.raises(FilterError, match=r"^tags: .*write 'TagA \|\| TagB'|not list"):
        chosen_tags(expression)

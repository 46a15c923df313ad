"""A filter means the same in SQL as in Python, for every row, on every database."""

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from outbox.errors import FilterError
from outbox.model.filter.sql92 import MAX_DEPTH, MAX_LENGTH, Filter
from outbox.model.message import Message, stored_message
from outbox.store.database import Channel, Database
from outbox.store.dialects import part_of
from outbox.store.dialects.speech import Speech
from outbox.store.log import filtering
from outbox.store.log.filtering import condition
from outbox.store.log.filtering import value as value_of
from tests.support.refusals import answer

NAMES = ("a", "b", "$c_", "TAGS", "KEYS", "TOPIC")
#: Texts that a database might take for a number, or for something else, in a way of its own.
ODD = (
    "", " ", "1", " 1", "1 ", "1.0", "01", "+1", "-1", "1.", ".5", "-.5", ".", "+", "-", "1e2", "1E+02", "1e-2", "e1",
    "1e", "100", "0", "-0", "0.0", "1e400", "1e-400", "1e999", "1e1000", "1_000", "1,5", "0x1", "NaN", "Infinity",
    "-inf", "\u0661", "1\n", "9007199254740993", "9007199254740992", "99999999999999999999999999999999999999.5",
    "9" * 100, "9" * 101, "0." + "3" * 98, "0." + "3" * 99, "true", "TRUE", "tRuE", "false", "t", "null", "a", "A",
    "ä", "Ä", "ß", "ss", "e\u0301", "é", "\u0130", "\u0131", "\u212a", "😀", "\u2028", "'", "''", '"', "\\",
    "\\\\", "%", "_", "a%", "a_b", "\\%", "a\\", "--", "/*", ":f0", "%(f0)s", "{0}",
)  # fmt: skip
NUMBERS = ("0", "1", "100", "1.0", ".5", "0.0", "2.", "1e2", "1E999", "1e-400", "9007199254740993", "100L", "9" * 100)
EQUALITIES, ORDERS = ("=", "<>"), ("<", "<=", ">", ">=")


class Making(Random):
    """Makes filters and messages at random. Half of the texts are odd, so that many of them meet."""

    def text(self) -> str:
        """A text of a header."""
        return self.choice(ODD) if self.random() < 0.5 else "".join(self.choices("aA1%_\\'\" ä😀", k=self.randrange(4)))

    def literal(self) -> str:
        """A text in a filter."""
        return "'" + self.text().replace("'", "''") + "'"

    def number(self) -> str:
        """A property, or a number, with a sign or without."""
        return self.choice(["", "", "", "-", "+"]) + self.choice((*NAMES, *NUMBERS))

    def value(self, depth: int) -> str:
        """An expression of any kind."""
        bracket = f"({self.condition(depth - 1)})"
        return self.choice([self.choice(NAMES), self.choice(NAMES), self.literal(), self.number(), bracket])

    def condition(self, depth: int) -> str:
        """An expression that is true, false or unknown."""
        if depth <= 0:
            return self.choice((*NAMES, "TRUE", "FALSE", "NULL"))
        no = self.choice(["", "NOT "])
        made = [
            lambda: f"{self.value(depth)} {self.choice(EQUALITIES)} {self.value(depth)}",
            lambda: f"{self.value(depth)} {self.choice(EQUALITIES)} {self.value(depth)}",
            lambda: f"{self.number()} {self.choice(ORDERS)} {self.number()}",
            lambda: f"{self.number()} {no}BETWEEN {self.number()} AND {self.number()}",
            lambda: f"{self.choice(NAMES)} {no}IN ({self.literal()}, {self.literal()})",
            lambda: f"{self.value(depth)} {no}{self.choice(['CONTAINS', 'STARTSWITH', 'ENDSWITH'])} {self.literal()}",
            lambda: f"{self.value(depth)} IS {no}NULL",
            lambda: f"NOT ({self.condition(depth - 1)})",
            lambda: f"({self.condition(depth - 1)}) AND ({self.condition(depth - 1)})",
            lambda: f"({self.condition(depth - 1)}) OR ({self.condition(depth - 1)})",
        ]
        return self.choice(made)()

    def filters(self, number: int) -> list[str]:
        """Filters of the grammar, without those whose constants cannot be compared."""
        found: list[str] = []
        while len(found) < number:
            with suppress(FilterError):
                found.append(Filter.of(self.condition(self.randrange(1, 4))).text)
        return found

    def message(self) -> Message:
        """A row with any headers, tags and key, its JSON in one of the ways of writers."""
        headers = {name: self.text() for name in ("a", "b", "$c_", "TAGS", "KEYS") if self.random() < 0.7}
        written = self.choice([None, compact(headers), compact(headers), json.dumps(headers)])
        tags, key = (self.choice([None, self.text()]) for _ in range(2))
        return stored_message((None, b"", self.text(), key, tags, written, b"", None, None, None, None))


def compact(headers: dict[str, str]) -> str:
    return json.dumps(headers, ensure_ascii=False, separators=(",", ":"))


def in_sql(
    channel: Channel, texts: list[str], rows: list[Message], *, written: bool = False
) -> list[list[bool | None]]:
    """The value of each filter for each row, by one statement; `written`: with the texts in it, as Spark reads."""
    parameters: dict[str, Any] = {}

    def bind(value: str | None) -> str:
        parameters[f"v{len(parameters)}"] = value
        return f":v{len(parameters) - 1}"

    values = [{"headers": row.headers_json, "tags": row.tags, "key": row.key, "topic": row.topic} for row in rows]
    table = " UNION ALL ".join(
        f"SELECT {n} AS n, " + ", ".join(f"CAST({bind(value)} AS text) AS {name}" for name, value in row.items())
        for n, row in enumerate(values)
    )
    parts = channel.database.dialect.values.filtering
    literal = part_of(channel.database.dialect.name, Speech).text
    forms = (value_of, condition)
    found = ", ".join(form(text, parts, literal if written else bind) for text in texts for form in forms)
    answers = channel.rows(
        channel.database.sql("SELECT {found} FROM ({table}) AS r ORDER BY n", found=found, table=table), **parameters
    )
    found_values = [[None if value is None else bool(value) for value in answer] for answer in answers]
    # A condition selects the rows for which the filter is true, and no other.
    assert [[value is True for value in answer[::2]] for answer in found_values] == [
        [value is True for value in answer[1::2]] for answer in found_values
    ]
    return [answer[::2] for answer in found_values]


def in_python(texts: list[str], rows: list[Message]) -> list[list[bool | None]]:
    """The same, by the filter itself."""

    def value(text: str, row: Message) -> Any:
        values = {"TAGS": row.tags, "KEYS": row.headers.get("KEYS", row.key), "TOPIC": row.topic}
        return Filter.of(text).expression.value(lambda name: values[name] if name in values else row.headers.get(name))

    return [[value(text, row) for text in texts] for row in rows]


def differences(channel: Channel, seed: int, *, written: bool = False) -> list[tuple[Any, ...]]:
    """Where SQL and Python have two answers: filter, row, and both of them."""
    making = Making(seed)
    texts, rows = making.filters(25), [making.message() for _ in range(8)]
    answers = zip(rows, in_sql(channel, texts, rows, written=written), in_python(texts, rows), strict=True)
    return [
        (text, (row.headers_json, row.tags, row.key, row.topic), one, other)
        for row, sql, python in answers
        for text, one, other in zip(texts, sql, python, strict=True)
        if one is not other
    ]


@pytest.fixture
def channel(engine: Engine) -> Iterator[Channel]:
    """A connection of a worker, to each kind of database."""
    with closing(Database(engine).open()) as opened:
        yield opened


@pytest.mark.parametrize("written", [False, True], ids=["parameters", "written"])
def test_every_filter_has_the_same_value_in_sql_and_in_python(channel, full, written):
    @settings(max_examples=400 if full else 25)
    @given(st.integers(min_value=0))
    def compare(seed):
        assert differences(channel, seed, written=written) == []

    compare()


def as_pattern(monkeypatch):
    """A search by LIKE, in which some letters stand for others."""
    monkeypatch.setitem(filtering._SEARCHES, "CONTAINS", "{value} LIKE '%' || {text} || '%'")


def as_sql_has_it(monkeypatch):
    """An equality that is unknown wherever one side is."""
    monkeypatch.setattr(
        filtering._Writing, "_equal", lambda self, e: self._same(e, self.sql(e.left), self.sql(e.right))
    )


def by_the_text(monkeypatch):
    """Equal numbers are equal texts."""
    monkeypatch.setattr(filtering._Writing, "_compared", lambda self, sign, one, other: f"({one} {sign} {other})")
    monkeypatch.setattr(filtering._Writing, "_number", lambda self, found: f"CAST({self.sql(found)} AS text)")


def asking_too_much(monkeypatch):
    """A search for a text that a selected message need not hold."""
    monkeypatch.setattr(filtering, "_needed", lambda _: ("a",))


def differs(channel: Channel, seed: int) -> bool:
    try:
        return bool(differences(channel, seed))
    except AssertionError:
        return True


@pytest.mark.parametrize("wrong", [as_pattern, as_sql_has_it, by_the_text, asking_too_much])
def test_the_comparison_finds_a_wrong_translation(channel, monkeypatch, wrong):
    wrong(monkeypatch)

    assert any(differs(channel, seed) for seed in range(100))


@pytest.mark.parametrize("text", ["a = 'AB'", "'AB' = a", "a IN ('x', 'AB')", "a CONTAINS 'B'", "a = 'AB' OR b = 'x'"])
def test_a_text_is_found_also_where_it_is_written_with_escapes(channel, text):
    rows = [
        stored_message((None, b"", "t", None, None, written, b"", None, None, None, None))
        for written in (r'{"a":"\u0041B"}', '{"a":"AB"}', '{"a":"AC"}')
    ]

    assert in_sql(channel, [text], rows) == in_python([text], rows)
    assert [row == [True] for row in in_sql(channel, [text], rows)] == [True, True, False]


@pytest.mark.parametrize(
    "text",
    [
        " OR ".join(["a"] * (MAX_LENGTH // 5)),
        " AND ".join(["NOT a"] * (MAX_LENGTH // 11)),
        "NOT (" * (MAX_DEPTH // 2 - 3) + "(a = b) = (NOT (a = c) <> (a > b))" + " OR c > a)" * (MAX_DEPTH // 2 - 3),
        "((" * (MAX_DEPTH // 2 - 1) + "a IS NULL" + " AND b < c) = TRUE)" * (MAX_DEPTH // 2 - 1),
        "a IN (" + ",".join(["'x'"] * (MAX_LENGTH // 4 - 5)) + ")",
        " OR ".join(f"a{n} > {n}" for n in range(MAX_LENGTH // 15)),
    ],
)
def test_the_longest_and_deepest_filters_work_on_every_database(channel, text):
    rows = [stored_message((None, b"", "t", None, None, '{"a":"1","b":"2"}', b"", None, None, None, None))]

    assert in_sql(channel, [text], rows) == in_python([text], rows)


#: Texts that another hand may have written in place of a JSON object of strings.
ODD_HEADERS = (
    "", "{", "[", "[1]", "5", "null", '"a"', '{"a":', '{"a":"x"', '{"a":"\\u0000"}', '{"a":"\\ud800"}', '{"a":"\\q"}',
    '{"a":"\t"}', "{'a':'x'}", '{"a":"x",}', '{"a":{"b":"x"}}', '{"a":["x"]}', '{"a":5}', '{"a":true}', '{"a":null}',
)  # fmt: skip


def test_a_row_of_another_hand_stops_no_reader(channel):
    """One row that raised would hold up all that come after it."""
    found = {}
    for headers in ODD_HEADERS:
        row = stored_message((None, b"", "t", None, None, headers, b"", None, None, None, None))
        found[headers] = answer(in_sql, channel, ["a > 1"], [row])

    assert found == {headers: [[None]] for headers in ODD_HEADERS}

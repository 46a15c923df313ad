"""What the page about filters says is so: its code runs, and its table and its error are what the library answers."""

import re

import pytest

from outbox import FilterError
from outbox.model.filter import sql92
from outbox.model.filter.sql92 import MAX_COMPARED, MAX_DEPTH, MAX_LENGTH, Filter
from tests.support.pages import TOP, blocks, run

PAGE = (TOP / "docs" / "filters.md").read_text()
#: The message of the table.
PROPERTIES = {"price": "150.50", "region": "eu", "yes": "True", "empty": "", "TAGS": "paid", "TOPIC": "orders"}
ROWS = re.findall(r"^\| `(.+?)` \| (true|false|unknown) \|", PAGE, re.MULTILINE)


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    page = run(PAGE, "docs/filters.md")

    assert (page["relay"].name, page["consumer"].name) == ("relay", "billing")


@pytest.mark.parametrize(("condition", "value"), ROWS)
def test_a_condition_has_the_value_of_the_table(condition, value):
    told = {"true": True, "false": False, "unknown": None}

    assert Filter.of(condition).expression.value(PROPERTIES.get) is told[value]


def test_the_table_has_rows():
    assert len(ROWS) == 20


def test_the_grammar_is_that_of_the_parser():
    grammar, error = blocks(PAGE, "text")

    assert grammar.strip() in (sql92.__doc__ or "")
    with pytest.raises(FilterError) as refused:
        Filter.of("region = 'eu' AND price > 'x'")
    assert str(refused.value) == error.strip()


def test_the_limits_are_those_of_the_parser():
    assert (MAX_LENGTH, MAX_DEPTH, MAX_COMPARED) == (4_000, 16, 2)
    assert "at most 4 000 characters, 16 levels of brackets, signs and comparisons inside each other, and two\n" in PAGE

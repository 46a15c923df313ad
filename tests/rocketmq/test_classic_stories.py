"""The classic stories of transactional messages run as the examples' first lines say."""

import sqlite3
from contextlib import closing

import pytest

from tests.support.examples import run, typed

PLACED, KILLED, STARTED_AGAIN = range(3)


def rows(file: str, question: str) -> list[tuple[str, ...]]:
    """What a database file of an example holds."""
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(question).fetchall()


def lines_of(style: str) -> list[str]:
    return [line.replace("listener", style) for line in typed("rocketmq/carts.py")]


@pytest.mark.parametrize("style", ["listener", "checker", "join"])
def test_an_order_clears_the_cart(folder, style):
    assert run(lines_of(style)[PLACED]).splitlines() == ["ann's order is placed", "all carts are empty"]


@pytest.mark.parametrize(("style", "verdicts"), [("listener", []), ("checker", []), ("join", [("commit",)])])
def test_an_order_service_that_was_killed_leaves_an_order_and_a_full_cart(folder, style, verdicts):
    """And a verdict only where the commit of the order is one."""
    said = run(lines_of(style)[KILLED])

    orders = "messages.db" if style == "join" else "orders.db"
    assert said == "the order service is gone\n"
    assert rows(orders, "SELECT customer FROM orders") == [("bob",)]
    assert rows("carts.db", "SELECT customer FROM articles") == [("bob",)]
    assert rows("messages.db", "SELECT op FROM outbox_op") == verdicts


@pytest.mark.parametrize(
    ("style", "by"),
    [("listener", "check orders-listener"), ("checker", "check orders-checker"), ("join", "producer orders-join")],
)
def test_the_cart_is_cleared_once_the_order_service_is_back(folder, style, by):
    """Check-back decides, but where the order itself has decided."""
    lines = lines_of(style)
    run(lines[KILLED])

    said = run(lines[STARTED_AGAIN])

    assert said == "all carts are empty\n"
    assert rows("carts.db", "SELECT customer FROM articles") == []
    assert rows("messages.db", "SELECT op, decided_by FROM outbox_op") == [("commit", by)]


def test_points_are_granted_once_and_taken_only_where_they_are(folder):
    assert run(*typed("rocketmq/points.py")).splitlines() == [
        "ann paid 300 euros and has 300 points",
        "ann pays with 30 points: done",
        "ann pays with 500 points: refused",
        "ann has 270 points",
        "the payment failed, and ann has 20 points: the others are reserved",
        "they are given back: ann has 270 points",
    ]

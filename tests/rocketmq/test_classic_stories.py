"""The classic stories of transactional messages run as the examples' first lines say."""

import sqlite3
from contextlib import closing

import pytest

from tests.support.examples import run, typed

pytestmark = pytest.mark.storm

PLACED, KILLED, STARTED_AGAIN = range(3)


def rows(file: str, question: str) -> list[tuple[str, ...]]:
    """What a database file of an example holds."""
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(question).fetchall()


@pytest.mark.parametrize(
    ("style", "by"),
    [("listener", "check orders-listener"), ("checker", "check orders-checker"), ("join", "producer orders-join")],
)
def test_an_order_clears_the_cart_even_if_the_order_service_is_killed(folder, style, by):
    """Check-back decides once the service is back, but where the commit of the order is the verdict."""
    lines = [line.replace("listener", style) for line in typed("rocketmq/carts.py")]
    verdicts = "SELECT op, decided_by FROM outbox_op ORDER BY decided_at, transaction_id"
    placed = run(lines[PLACED])
    before = rows("messages.db", verdicts)
    killed = run(lines[KILLED])
    orders = rows("messages.db" if style == "join" else "orders.db", "SELECT customer FROM orders")
    carts, decided = rows("carts.db", "SELECT customer FROM articles"), rows("messages.db", verdicts)[len(before) :]
    again = run(lines[STARTED_AGAIN])

    assert placed.splitlines() == ["ann's order is placed", "all carts are empty"]
    assert (killed, orders, carts) == ("the order service is gone\n", [("ann",), ("bob",)], [("bob",)])
    assert len(decided) == (style == "join")
    assert (again, rows("carts.db", "SELECT customer FROM articles")) == ("all carts are empty\n", [])
    assert rows("messages.db", verdicts)[-1] == ("commit", by)


def test_points_are_granted_once_and_taken_only_where_they_are(folder):
    assert run(*typed("rocketmq/points.py")).splitlines() == [
        "ann paid 300 euros and has 300 points",
        "ann pays with 30 points: done",
        "ann pays with 500 points: refused",
        "ann has 270 points",
        "the payment failed, and ann has 20 points: the others are reserved",
        "they are given back: ann has 270 points",
    ]

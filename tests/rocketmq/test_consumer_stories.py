"""The examples of queues, batches, filters and consumers, run as their first lines say."""

import pytest

from tests.support.examples import run, typed

STEPS = "created, paid, shipped, finished"
PRICE_BATCHES = 7


@pytest.fixture(autouse=True)
def in_a_folder(folder):
    """With nothing in it."""


@pytest.mark.storm
def test_the_steps_of_an_order_arrive_in_order():
    assert run(*typed("rocketmq/steps.py")).splitlines() == [
        f"15103111039: {STEPS}",
        f"15103111065: {STEPS}",
        f"15103117235: {STEPS}",
    ]


@pytest.mark.storm
def test_an_order_that_nobody_has_paid_is_closed():
    assert run(*typed("rocketmq/unpaid.py")).splitlines() == [
        "placed: {1: 'paid', 2: 'open'}",
        "a second later: {1: 'paid', 2: 'closed'}",
    ]


@pytest.mark.storm
def test_prices_go_in_batches():
    assert run(*typed("rocketmq/batches.py")).splitlines() == [
        "refused: CODE: 13  DESC: the message body size over max value, MAX: 4194304",
        f"sent: 10000 prices in {PRICE_BATCHES} batches",
        "received: 32, and 32 more",
    ]


@pytest.mark.storm
def test_each_group_gets_what_it_asks_for():
    assert run(*typed("rocketmq/filters.py")).splitlines() == [
        "by-tags: paid in eu, shipped in eu",
        "by-sql: paid in eu",
        "by-both: placed in eu",
        "without-amount: shipped in eu",
        "filter: expected a property, a text, a number or a bracket, not '='",
        "  region == 'eu'",
        "          ^",
    ]

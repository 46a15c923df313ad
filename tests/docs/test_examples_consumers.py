"""The examples of consumers run as their first lines say."""

import pytest

from tests.support.examples import run, typed

pytestmark = pytest.mark.storm


def test_a_read_model_is_kept_and_built_anew(folder):
    assert run(*typed("consumers/read_model.py")).splitlines() == [
        "totals: ann, 2 of 50 in all",
        "totals: bob, 1 of 7 in all",
        "totals-2: ann, 2 of 50 in all",
        "totals-2: bob, 1 of 7 in all",
    ]


def test_a_booking_happens_once_although_the_process_is_killed(folder):
    assert run(*typed("consumers/booking.py")).splitlines() == [
        "booked 42 from ann to bob",
        "the process is gone",
        "ann: -42",
        "bob: 42",
    ]


def test_a_saga_ends_with_paid_and_cancelled_orders(folder):
    assert run(*typed("consumers/saga.py")).splitlines() == [
        "order 1 over 42 is paid",
        "order 2 over 42 is cancelled",
    ]

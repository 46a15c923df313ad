"""The settings of a worker: what they refuse."""

from datetime import timedelta
from typing import Any

import pytest

from outbox import Limits, Settings

SECOND = timedelta(seconds=1)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "1"])
@pytest.mark.parametrize("name", ["rows", "bytes"])
def test_a_read_returns_something(name, number):
    """With no row at all a worker would find every log empty, and say nothing."""
    with pytest.raises(ValueError, match=f"^{name} must be a whole number from 1 on, not "):
        Limits(**{name: number})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"limits": 500}, "limits must be Limits, not 500; write limits=Limits(rows=500)"),
        (
            {"poll": SECOND},
            "poll must be the shortest and the longest pause, not datetime.timedelta(seconds=1); write ",
        ),
        ({"poll": (0, SECOND)}, "poll[0] must be a timedelta above 0, of at most 36525 days, not 0"),
        ({"poll": (SECOND, 1)}, "poll[1] must be a timedelta above 0, of at most 36525 days, not 1"),
        ({"poll": (2 * SECOND, SECOND)}, "poll: the shortest pause, 0:00:02, is longer than the longest, 0:00:01"),
        ({"lease": 30}, "lease must be a timedelta above 0, of at most 36525 days, not 30"),
        ({"renew_every": -SECOND}, "renew_every must be a timedelta above 0, of at most 36525 days, not "),
        ({"lease": SECOND}, "renew_every 0:00:03 leaves no second try within a lease of 0:00:01"),
    ],
)
def test_a_mistaken_value_is_named(given: dict[str, Any], told: str):
    with pytest.raises((TypeError, ValueError)) as refused:
        Settings(**given)
    assert str(refused.value).startswith(told)

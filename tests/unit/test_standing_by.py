"""A worker that stands by says why."""

from datetime import timedelta

import pytest

from outbox.model.lease import Holder
from outbox.worker.lease_search import standing_by

TEN = timedelta(seconds=10)


@pytest.mark.parametrize(
    ("owner", "live", "wanted", "says"),
    [
        ("somebody", True, False, "another worker holds the lease; standing by"),
        ("somebody", True, True, "another worker holds the lease; standing by"),
        (None, False, True, "a command wants the lease; standing by"),
        (
            "somebody",
            False,
            False,
            "the lease has run out and was not given back; standing by until nobody renews it for 10 s",
        ),
    ],
)
def test_a_lease_that_was_given_back_to_a_command_has_not_run_out(owner, live, wanted, says):
    holder = Holder(owner=owner, epoch=1, renewals=0, lease_until=None, live=live, wanted=wanted)

    assert standing_by(holder, TEN) == says

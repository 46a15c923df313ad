"""A backfill handles earlier messages beside its subscription, exactly up to where it was ordered, and ends by itself."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.admin import commands
from outbox.admin.backfill import backfill
from outbox.model.verdict import DONE, Reject, Retry
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.destination import Destination, failing, fill, relay_to
from tests.support.parked import states
from tests.support.waiting import eventually


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox of which nothing was sent yet."""
    return Outbox(engine)


def names(channel):
    return [each.name for each in Subscriptions(channel).all()]


@pytest.mark.parametrize("partitions", [1, 3])
def test_try(outbox, channel, partitions, caplog):
    caplog.set_level(logging.INFO)
    destination = Destination()
    fill(outbox, 300, topics=3)
    relay = relay_to(destination, outbox, partitions=partitions)
    relay.until_empty()
    assert len(destination.messages) == 300
    made = backfill(channel, "relay", ["topic1"])
    fill(outbox, 30, first=300, topics=3)
    relay.until_empty()
    assert names(channel) == ["relay"]
    assert len(destination.messages) == 430

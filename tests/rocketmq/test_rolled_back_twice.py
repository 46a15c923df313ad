"""A business transaction that was rolled back, and the rollback of its messages after it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.rocketmq import TransactionMQProducer, TransactionResolution
from outbox.store.half_messages.half import Way


@pytest.mark.parametrize("way", ["join", "commit"])
def test_messages_are_rolled_back_after_their_business_transaction(engine: Engine, way: Way) -> None:
    """Its connection is closed by then."""
    transaction = TransactionMQProducer("shop", Outbox(engine)).begin_transaction(verdict=way)
    transaction.send("orders", "1")
    with suppress(LookupError), Session(engine) as session, session.begin():
        transaction.join(session) if way == "join" else transaction.commit(session)
        raise LookupError

    transaction.rollback()

    assert transaction.resolution is TransactionResolution.ROLLBACK

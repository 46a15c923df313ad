from datetime import timedelta

import pytest

from outbox import Message, Outbox, SubscriptionError
from outbox.rocketmq import CheckPolicy, LocalTransactionState, TransactionMQProducer, TransactionResolution
from tests.support.readers import bodies


class Listener:
    """Knows nothing."""

    def check_local_transaction(self, message: Message) -> LocalTransactionState:
        """Say so."""
        return LocalTransactionState.UNKNOW


class Checker:
    """Knows nothing."""

    def check(self, message: Message) -> TransactionResolution:
        """Say so."""
        return TransactionResolution.UNKNOWN


@pytest.mark.parametrize("listener", [Listener, Checker])
def test_a_class_in_place_of_a_listener_is_refused(sqlite_engine, listener):
    """Every question to it would fail for want of `self`, which counts as UNKNOWN, until all was given up."""
    with pytest.raises(TypeError, match=rf"not a class: pass {listener.__name__}\(\)"):
        TransactionMQProducer("orders", Outbox(sqlite_engine), listener)


def test_a_producer_with_a_longer_timeout_than_its_group_has_is_told_so(engine):
    """In the producer's words, before those of the subscription."""
    outbox = Outbox(engine)
    short = TransactionMQProducer("orders", outbox, policy=CheckPolicy(transaction_timeout=timedelta(seconds=1)))
    short.begin_transaction(verdict="join").send("orders", b"1")

    with pytest.raises(SubscriptionError, match=r"transaction_timeout is longer than its group's: .*has grace 1 s"):
        TransactionMQProducer("orders", outbox).begin_transaction(verdict="join").send("orders", b"2")


def test_a_producer_with_a_shorter_timeout_than_its_group_has_sends(engine):
    """The longer one counts for all."""
    outbox = Outbox(engine)
    TransactionMQProducer("orders", outbox).begin_transaction(verdict="join").send("orders", b"1")

    short = TransactionMQProducer("orders", outbox, policy=CheckPolicy(transaction_timeout=timedelta(seconds=1)))
    short.begin_transaction(verdict="join").send("orders", b"2")

    assert len(bodies(engine)) == 2

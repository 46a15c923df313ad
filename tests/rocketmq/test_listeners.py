import pytest

from outbox import Message, Outbox
from outbox.rocketmq import LocalTransactionState, TransactionMQProducer, TransactionResolution


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
    with pytest.raises(TypeError, match=rf"{listener.__name__} is a class: pass {listener.__name__}\(\)"):
        TransactionMQProducer("orders", Outbox(sqlite_engine), listener)

"""Whom a check-back may ask: objects and functions that answer at once, and nothing that only looks like one."""

import pytest

from outbox import Outbox
from outbox.rocketmq import TransactionChecker, TransactionListener, TransactionMQProducer, TransactionResolution
from outbox.rocketmq.listener import question_of


class AwaitedChecker:
    """The 5.x shape, written with async."""

    async def check(self, message):
        """Commit, to whoever awaits it."""
        return TransactionResolution.COMMIT


class AwaitedQuestion:
    """A callable of this kind."""

    async def __call__(self, message):
        """Commit, to whoever awaits it."""
        return TransactionResolution.COMMIT


@pytest.mark.parametrize("listener", [AwaitedChecker(), AwaitedChecker().check, AwaitedQuestion()])
def test_a_listener_that_would_have_to_be_awaited_is_refused(listener):
    with pytest.raises(TypeError, match="without async"):
        question_of(listener)


class Misspelt:
    """Its business would be executed by nobody."""

    def execute_local_transactoin(self, message, arg):
        """Do the business."""

    def check_local_transaction(self, message):
        """Look for it."""


class AsInJava:
    """The names of Java's client."""

    def executeLocalTransaction(self, message, arg):  # noqa: N802
        """Do the business."""

    def check_local_transaction(self, message):
        """Look for it."""


class CheckMisspelt:
    """Callable, so that it would be asked as a function."""

    def execute_local_transaction(self, message, arg):
        """Do the business."""

    def check_local_transactions(self, message):
        """Look for it."""

    def __call__(self, message):
        """Something else."""


@pytest.mark.parametrize(
    ("listener", "says"),
    [
        (Misspelt(), "has the method execute_local_transaction: rename execute_local_transactoin of Misspelt"),
        (AsInJava(), "has the method execute_local_transaction: rename executeLocalTransaction of AsInJava"),
        (CheckMisspelt(), "has the method check_local_transaction: rename check_local_transactions of CheckMisspelt"),
    ],
)
def test_a_method_that_is_misspelt_is_refused_where_the_producer_is_made(sqlite_engine, listener, says):
    with pytest.raises(TypeError, match=says):
        TransactionMQProducer("shop", Outbox(sqlite_engine), listener)


class AwaitedListener:
    """Its business would never be executed: nobody awaits it."""

    async def execute_local_transaction(self, message, arg):
        """Do the business, for whoever awaits it."""

    def check_local_transaction(self, message):
        """Look for it."""


class AwaitedCheck(Misspelt):
    """Its answer would never come."""

    def execute_local_transaction(self, message, arg):
        """Do the business."""

    async def check_local_transaction(self, message):
        """Look for it, for whoever awaits it."""


@pytest.mark.parametrize("listener", [AwaitedListener(), AwaitedCheck()])
def test_a_method_that_would_have_to_be_awaited_is_refused_where_the_producer_is_made(sqlite_engine, listener):
    with pytest.raises(TypeError, match="without async"):
        TransactionMQProducer("shop", Outbox(sqlite_engine), listener)


def test_a_subclass_that_lacks_a_method_cannot_be_made():
    """Whose method has another name, for example: the inherited one would answer None for ever."""

    class Mine(TransactionListener):
        def execute_local_transactions(self, message, arg):
            """Do the business."""

        def check_local_transaction(self, message):
            """Look for it."""

    class MyChecker(TransactionChecker):
        def chekc(self, message):
            """Look for it."""

    for kind, lacks in ((Mine, "execute_local_transaction"), (MyChecker, "check")):
        with pytest.raises(TypeError, match=f"abstract method '?{lacks}"):
            kind()  # type: ignore[abstract]

"""What a user writes: a listener of the 4.x shape, or a checker of the 5.x shape."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Protocol

from outbox.model.message import Message
from outbox.rocketmq.states import LocalTransactionState, TransactionResolution


class TransactionListener(Protocol):
    """Executes local transactions, and says later what became of them.

    Both find the id of the transaction as `message.transaction_id`.
    """

    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState:
        """Do the business. Only the states themselves are verdicts: anything else that is returned is UNKNOW."""

    def check_local_transaction(self, message: Message) -> LocalTransactionState:
        """Say what became of the business. UNKNOW, an exception and anything strange mean: ask again later.

        ROLLBACK_MESSAGE is the right answer only when the business can not be committed any more.
        """


class TransactionChecker(Protocol):
    """Says what became of a transaction."""

    def check(self, message: Message) -> TransactionResolution:
        """Answer as `check_local_transaction` does."""


#: A question as it is asked, whatever the shape of who answers.
Question = Callable[[Message], object]


def question_of(listener: TransactionListener | TransactionChecker | Question | None) -> Question | None:
    """Return how a listener, a checker or a function is asked.

    Raises:
        TypeError: it is none of them, or a class, or written with async.
    """
    if isinstance(listener, type):
        raise TypeError(f"a listener is an object, not a class: pass {listener.__name__}()")
    for verb in ("check_local_transaction", "check"):
        found = getattr(listener, verb, None)
        if callable(found):
            question: Question = _blocking(found)
            return question
    if listener is None:
        return None
    if callable(listener):
        return _blocking(listener)
    raise TypeError(
        "a listener has check_local_transaction(message), a checker has check(message); a function of one message is"
        f" one, too; {type(listener).__name__} is none of them"
    )


def _blocking(question: Question) -> Question:
    """Refuse a question whose answer would have to be awaited: it would be UNKNOWN for ever."""
    if iscoroutinefunction(question) or iscoroutinefunction(getattr(question, "__call__", None)):  # noqa: B004
        raise TypeError("a listener is asked by a thread that blocks: write its check without async")
    return question

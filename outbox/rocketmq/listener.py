"""Protocols for the classes that a user writes: a listener of the 4.x shape, or a checker of the 5.x shape."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Protocol

from outbox.model.message import Message
from outbox.rocketmq.states import LocalTransactionState, TransactionResolution


class TransactionListener(Protocol):
    """Executes local transactions, and says later what became of them.

    Both methods find the id of the transaction as `message.transaction_id`.
    """

    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState:
        """Execute the local transaction; return its state. Anything else that is returned counts as UNKNOW."""

    def check_local_transaction(self, message: Message) -> LocalTransactionState:
        """Return the state of the local transaction. UNKNOW, an exception or any other object mean: ask again later.

        ROLLBACK_MESSAGE is the right answer only if the local transaction cannot be committed any more.
        """


class TransactionChecker(Protocol):
    """Says what became of a transaction."""

    def check(self, message: Message) -> TransactionResolution:
        """Return the resolution of the transaction, by the same rules as `check_local_transaction`."""


#: A function that asks about one message, whether a listener, a checker or a function answers.
Question = Callable[[Message], object]


def question_of(listener: TransactionListener | TransactionChecker | Question | None) -> Question | None:
    """Return the function that asks a listener, a checker or a function; None if there is none.

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
        "a listener has check_local_transaction(message) or check(message), or is a function of one message;"
        f" {type(listener).__name__} is none of them"
    )


def _blocking(question: Question) -> Question:
    """Raise if a question is written with async: nothing awaits its answer, so it would be UNKNOWN for ever."""
    if iscoroutinefunction(question) or iscoroutinefunction(getattr(question, "__call__", None)):  # noqa: B004
        raise TypeError("a listener is asked by a thread that blocks: write its check without async")
    return question

"""Protocols for the classes that a user writes: a listener of the 4.x shape, or a checker of the 5.x shape."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, Protocol

from outbox.model.message import Message
from outbox.model.topics import Topics, chosen_topics
from outbox.rocketmq.states import LocalTransactionState, TransactionResolution


class TransactionListener(Protocol):
    """Executes local transactions, and tells their outcome later.

    Both methods find the id of the transaction as `message.transaction_id`. A listener with an attribute
    `known_topics`, names or patterns, is asked about transactions of these topics only, and another process of the
    group about the rest.
    """

    @abstractmethod
    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState:
        """Execute the local transaction; return its state. Any other answer counts as UNKNOW."""

    @abstractmethod
    def check_local_transaction(self, message: Message) -> LocalTransactionState:
        """Return the state of the local transaction. UNKNOW, an exception or any other object mean: ask again later.

        Answer ROLLBACK_MESSAGE only if the local transaction cannot be committed any more, and UNKNOW about a
        transaction that this program does not know. A `NobodyAsked` counts for nothing: another process may ask.
        """


class TransactionChecker(Protocol):
    """Tells the outcome of a transaction."""

    @abstractmethod
    def check(self, message: Message) -> TransactionResolution:
        """Return the resolution of the transaction, by the same rules as `check_local_transaction`."""


#: The methods of a listener of the 4.x shape. A name that is nearly the same, or the name in Java, is a mistake.
_EXECUTE, _CHECK = "execute_local_transaction", "check_local_transaction"
_NEARLY = 0.9

#: A function that asks about one message, whether a listener, a checker or a function answers.
Question = Callable[[Message], object]


@dataclass(frozen=True, slots=True)
class QuestionOfTopics:
    """A question to a listener that knows the transactions of some topics only."""

    topics: Topics
    ask: Question

    def __call__(self, message: Message) -> object:
        """Ask about a message."""
        return self.ask(message)


def knows(question: Question, topic: str) -> bool:
    """Return whether a listener knows the transactions of a topic."""
    return not isinstance(question, QuestionOfTopics) or question.topics.matches(topic)


def question_of(listener: TransactionListener | TransactionChecker | Question | None) -> Question | None:
    """Return the function that asks a listener, a checker or a function; None for None. Refuse anything else."""
    if isinstance(listener, type):
        raise TypeError(f"a listener is an object, not a class: pass {listener.__name__}()")
    _require_spelling(listener)
    execution_of(listener)
    for verb in (_CHECK, "check"):
        found = getattr(listener, verb, None)
        if callable(found):
            return _of_topics(listener, _blocking(found))
    if listener is None:
        return None
    if callable(listener):
        return _of_topics(listener, _blocking(listener))
    raise TypeError(
        "a listener has check_local_transaction(message) or check(message), or is a function of one message;"
        f" {type(listener).__name__} is no listener"
    )


def _of_topics(listener: object, question: Question) -> Question:
    """Return the question with the `known_topics` of its listener; without those it is for all topics."""
    known = getattr(listener, "known_topics", None)
    if known is None:
        return question
    if isinstance(known, str) or not isinstance(known, Iterable):
        raise TypeError(f"known_topics of a listener is a list of topics, not {type(known).__name__}: write ['orders']")
    return QuestionOfTopics(Topics.of(chosen_topics(known)), question)


def execution_of(listener: object) -> Callable[[Message, Any], object] | None:
    """Return the method that executes local transactions; None if there is none."""
    execute: Callable[[Message, Any], object] | None = getattr(listener, _EXECUTE, None)
    if execute is not None and _is_awaited(execute):
        raise TypeError(f"a local transaction is executed by a call that blocks: write {_EXECUTE} without async")
    return execute


def _blocking(question: Question) -> Question:
    """Raise if a question is written with async: nobody awaits the answer, so it would be UNKNOWN for ever."""
    if _is_awaited(question):
        raise TypeError("a listener is asked by a thread that blocks: write its check without async")
    return question


def _is_awaited(function: object) -> bool:
    return any(
        is_so(each)
        for is_so in (iscoroutinefunction, isasyncgenfunction)
        for each in (function, getattr(function, "__call__", None))  # noqa: B004
    )


def _require_spelling(listener: object) -> None:
    """Raise if a listener lacks a method, and has a method whose name is nearly the same.

    Otherwise nobody would execute a transaction, or answer for it.
    """
    others = {_plain(name): name for name in dir(listener) if name not in (_EXECUTE, _CHECK)}
    for verb in (_EXECUTE, _CHECK):
        if not hasattr(listener, verb):
            for found in get_close_matches(_plain(verb), others, n=1, cutoff=_NEARLY):
                raise TypeError(
                    f"a listener has the method {verb}: rename {others[found]} of {type(listener).__name__}"
                )


def _plain(name: str) -> str:
    return name.replace("_", "").lower()

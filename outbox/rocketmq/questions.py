"""Questions to a listener: several at once, each on a thread of its own, because a question may hang."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from outbox.model.message import Message
from outbox.model.verdict import DONE, Verdict, describe
from outbox.rocketmq.listener import Question
from outbox.rocketmq.states import LocalTransactionState, TransactionResolution
from outbox.runtime.clock import clock
from outbox.store.half_messages.half import real_message
from outbox.worker.calls import Call, Caller

logger = logging.getLogger("outbox")


@dataclass(frozen=True, slots=True)
class Answer:
    """The `state` that a listener returned; if it is no verdict, the `reason` says why."""

    state: object
    reason: str


class Questions:
    """Asks a listener several questions at once, each on a thread of its own, because a question may hang."""

    def __init__(self, question: Question, *, seconds: float, threads: int) -> None:
        """`seconds`: the time limit of one question; `threads`: the most questions at once."""
        self._question = question
        self._seconds = seconds
        self._threads = threads
        #: Questions that hang, by transaction. Each transaction has one thread at most, so that one whose question
        #: hangs for ever leaves the other threads free.
        self._hung: dict[str | None, Call] = {}

    def ask(self, rows: Sequence[Message]) -> list[tuple[Message, Answer | None]]:
        """Ask about the transaction of each row; return the rows with their answers.

        An answer is None if the question was not asked. Then the time of one question is over, or an earlier question
        about this transaction hangs, or too many about others do.
        """
        until = clock() + self._seconds
        self._forget_those_that_ended()
        answers: list[tuple[Message, Answer | None]] = [(row, None) for row in rows if row.key in self._hung]
        waiting = [row for row in rows if row.key not in self._hung]
        while waiting:
            self._forget_those_that_ended()
            free = self._threads - len(self._hung)
            if free <= 0 or clock() >= until:
                return answers + [(row, None) for row in waiting]
            portion, waiting = waiting[:free], waiting[free:]
            answers += self._answers(portion)
        return answers

    def _forget_those_that_ended(self) -> None:
        self._hung = {transaction: call for transaction, call in self._hung.items() if not call.finished}

    def _answers(self, rows: Sequence[Message]) -> list[tuple[Message, Answer | None]]:
        answered: dict[int | None, object] = {}

        def put(messages: Sequence[Message]) -> Sequence[Verdict]:
            answered[messages[0].id] = self._question(messages[0])
            return [DONE]

        calls = [(row, _called(put, real_message(row))) for row in rows]
        until = clock() + self._seconds
        found: list[tuple[Message, Answer | None]] = []
        for row, call in calls:
            call.wait(max(0.0, until - clock()))
            if not call.finished:
                self._hung[row.key] = call
                found.append((row, Answer(None, f"no answer within {self._seconds:g} s")))
            elif call.error is not None:
                logger.warning("the check of transaction %s raised %s", row.key, describe(call.error))
                found.append((row, Answer(None, describe(call.error))))
            else:
                state = answered.get(row.id)
                found.append((row, Answer(state, _reason(state))))
        return found


def _called(put: Callable[[Sequence[Message]], Sequence[Verdict]], message: Message) -> Call:
    caller = Caller(put)
    call = caller.start([message])
    caller.close()
    return call


def _reason(state: object) -> str:
    if state is LocalTransactionState.UNKNOW or state is TransactionResolution.UNKNOWN:
        return "UNKNOWN"
    with suppress(Exception):
        return f"UNKNOWN, because the answer is no state: {state!r:.200}"
    return f"UNKNOWN, because the answer is no state but a {type(state).__name__}"

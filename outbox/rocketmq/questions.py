"""Questions about transactions, several at once, each on a thread of its own, because a question may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue

from outbox.model.message import Message
from outbox.model.verdict import describe
from outbox.rocketmq.states import LocalTransactionState, TransactionResolution
from outbox.runtime.clock import clock
from outbox.runtime.fork import in_child


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question; the `reason` says why it is no verdict. `raised`: the listener has raised an error.

    `times`: how often the transaction was asked about, this time included.
    """

    returned: object
    reason: str
    raised: bool = False
    times: int = 0


class Unasked(Enum):
    """The reasons why a question is not asked."""

    OPEN = "its last question is open still"
    HANGS = "its last question hangs"
    BUSY = "too many other questions hang"
    NO_TIME = "there was no time for it"


@dataclass(frozen=True, slots=True)
class Hanging:
    """The questions that are past their time limit.

    `number`: how many; `all_threads`: they leave no thread free. `seconds`: for how long the oldest is open.
    """

    number: int
    all_threads: bool
    seconds: float
    transaction: str | None


Answered = SimpleQueue[tuple[str | None, Answer]]


class Respondent:
    """A listener or a business database, with the questions that wait for an answer.

    Calls of a checker may overlap: they share the threads, and never ask about a transaction twice at a time. A
    question that hangs for ever keeps one thread; the other threads stay free.
    """

    def __init__(self, ask: Callable[[Message], object], *, threads: int, seconds: float) -> None:
        """`ask`: returns the answer about the transaction of a half row. `threads`: the most questions at once.
        `seconds`: the time limit of a question.
        """
        self._ask = ask
        self._threads = threads
        self._seconds = seconds
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin without questions: at first, and in a forked process, because their threads stay with the parent."""
        self._lock = threading.Lock()
        #: The moment at which each open question was asked, by transaction.
        self._open: dict[str | None, float] = {}

    def begin(self, row: Message, answered: Answered) -> Unasked | None:
        """Ask about the transaction of a row; put the answer into `answered`. Return why nobody is asked, or None."""
        with self._lock:
            if row.key in self._open:
                return Unasked.OPEN if clock() - self._open[row.key] < self._seconds else Unasked.HANGS
            if len(self._open) >= self._threads:
                return Unasked.BUSY
            threading.Thread(target=self._answer, args=(row, answered), name="outbox-question", daemon=True).start()
            self._open[row.key] = clock()
        return None

    def hanging(self) -> Hanging | None:
        """Return the questions that hang; None if there are none."""
        with self._lock:
            open_for = {transaction: clock() - began for transaction, began in self._open.items()}
        late = {transaction: seconds for transaction, seconds in open_for.items() if seconds >= self._seconds}
        if not late:
            return None
        oldest = max(late, key=lambda transaction: late[transaction])
        return Hanging(len(late), len(late) >= self._threads, late[oldest], oldest)

    def _answer(self, row: Message, answered: Answered) -> None:
        try:
            returned = self._ask(row)
            answer = Answer(returned, _reason(returned), times=row.attempt)
        except BaseException as error:
            # SystemExit and KeyboardInterrupt, too, which end only this thread.
            answer = Answer(None, describe(error), raised=True)
        with self._lock:
            self._open.pop(row.key, None)
        answered.put((row.key, answer))


def ask_all(questions: Sequence[tuple[Message, Respondent]], *, seconds: float) -> dict[str | None, Answer | Unasked]:
    """Ask about the transactions of these rows, the first ones first; return the answers by transaction.

    Each respondent has as many questions at once as it has threads. No question begins after `seconds`, and no answer
    is waited for longer than `seconds`.
    """
    answers: dict[str | None, Answer | Unasked] = {}
    answered: Answered = SimpleQueue()
    #: The moment until which each open question is waited for, by transaction.
    limits: dict[str | None, float] = {}
    waiting, until = list(questions), clock() + seconds
    while True:
        busy, later, in_time = set[Respondent](), [], clock() < until
        for row, respondent in waiting:
            unasked = respondent.begin(row, answered) if in_time and respondent not in busy else Unasked.BUSY
            if unasked is None:
                limits[row.key] = clock() + seconds
            elif unasked in (Unasked.OPEN, Unasked.HANGS):
                answers[row.key] = unasked
            else:
                busy.add(respondent)
                later.append((row, respondent))
        waiting = later
        if not limits:
            break
        answers |= _next_answers(answered, limits, seconds)
    for row, respondent in waiting:
        hanging = respondent.hanging()
        answers[row.key] = Unasked.BUSY if hanging is not None and hanging.all_threads else Unasked.NO_TIME
    return answers


def _next_answers(answered: Answered, limits: dict[str | None, float], seconds: float) -> dict[str | None, Answer]:
    """Wait for the next answer, or for the time limit of the oldest question; take what came from the `limits`."""
    try:
        transaction, answer = answered.get(timeout=max(0.0, min(limits.values()) - clock()))
    except Empty:
        now = clock()
        late = [each for each, limit in limits.items() if limit <= now]
        for each in late:
            del limits[each]
        return {each: Answer(None, f"no answer within {seconds:g} s") for each in late}
    return {} if limits.pop(transaction, None) is None else {transaction: answer}


def _reason(returned: object) -> str:
    if returned is LocalTransactionState.UNKNOW or returned is TransactionResolution.UNKNOWN:
        return "UNKNOWN"
    with suppress(Exception):
        return f"UNKNOWN, because the answer is no state: {returned!r:.200}"
    return f"UNKNOWN, because the answer is no state but a {type(returned).__name__}"

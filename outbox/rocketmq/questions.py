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
    """What was returned to a question; if that is no verdict, the `reason` says why. `raised`: an error was raised."""

    returned: object
    reason: str
    raised: bool = False


class Unasked(Enum):
    """Why a question was not asked."""

    OPEN = "its last question is open still"
    BUSY = "too many other questions hang"
    NO_TIME = "there was no time for it"


@dataclass(frozen=True, slots=True)
class Hanging:
    """The questions that are past their time limit.

    `number`: how many; `all_threads`: no thread is left for another one. `seconds`: for how long the oldest is open.
    """

    number: int
    all_threads: bool
    seconds: float
    transaction: str | None


Answered = SimpleQueue[tuple[str | None, Answer]]


class Respondent:
    """A listener or a business database, with the questions that it has not answered yet.

    Several calls of a checker may use it at the same time. They share its threads, and no two of them ask about the
    same transaction. A question that hangs for ever keeps one thread, and the others stay free.
    """

    def __init__(self, ask: Callable[[Message], object], *, threads: int, seconds: float) -> None:
        """`ask`: returns the answer about the transaction of a half row. `threads`: the most questions at once.
        `seconds`: the time limit of one question.
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
        """Ask about the transaction of a row; the answer will be in `answered`. Return why it could not be asked."""
        with self._lock:
            if row.key in self._open:
                return Unasked.OPEN
            if len(self._open) >= self._threads:
                return Unasked.BUSY
            threading.Thread(target=self._answer, args=(row, answered), name="outbox-question", daemon=True).start()
            self._open[row.key] = clock()
        return None

    def hanging(self) -> Hanging | None:
        """Return which questions hang; None if none does."""
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
            answer = Answer(returned, _reason(returned))
        except BaseException as error:
            # Also SystemExit and KeyboardInterrupt, which end only this thread.
            answer = Answer(None, describe(error), raised=True)
        with self._lock:
            self._open.pop(row.key, None)
        answered.put((row.key, answer))


class _Round:
    """Questions that are asked together."""

    def __init__(self, questions: Sequence[tuple[Message, Respondent]], seconds: float) -> None:
        self._waiting = list(questions)
        self._seconds = seconds
        self._until = clock() + seconds
        self._answered: Answered = SimpleQueue()
        #: The moment until which each open question is waited for, by transaction.
        self._limits: dict[str | None, float] = {}
        self.answers: dict[str | None, Answer | Unasked] = {}

    def run(self) -> None:
        """Ask as long as there is time for it, and wait for the answers."""
        self._begin()
        while self._limits:
            self._wait_for_one()
            self._begin()
        for row, respondent in self._waiting:
            hanging = respondent.hanging()
            self.answers[row.key] = Unasked.BUSY if hanging is not None and hanging.all_threads else Unasked.NO_TIME

    def _begin(self) -> None:
        """Ask as many questions as can be asked now, the first ones first."""
        waiting, self._waiting = self._waiting, []
        in_time, busy = clock() < self._until, set[Respondent]()
        for row, respondent in waiting:
            if not in_time or respondent in busy:
                self._waiting.append((row, respondent))
                continue
            unasked = respondent.begin(row, self._answered)
            if unasked is None:
                self._limits[row.key] = clock() + self._seconds
            elif unasked is Unasked.OPEN:
                self.answers[row.key] = unasked
            else:
                busy.add(respondent)
                self._waiting.append((row, respondent))

    def _wait_for_one(self) -> None:
        """Wait for the next answer, or for the time limit of the oldest question."""
        try:
            transaction, answer = self._answered.get(timeout=max(0.0, min(self._limits.values()) - clock()))
        except Empty:
            now = clock()
            for transaction in [each for each, limit in self._limits.items() if limit <= now]:
                del self._limits[transaction]
                self.answers[transaction] = Answer(None, f"no answer within {self._seconds:g} s")
        else:
            if self._limits.pop(transaction, None) is not None:
                self.answers[transaction] = answer


def ask_all(questions: Sequence[tuple[Message, Respondent]], *, seconds: float) -> dict[str | None, Answer | Unasked]:
    """Ask about the transactions of these rows, the first ones first; return the answers by transaction.

    Each respondent has as many questions at once as it has threads. No question begins after `seconds`, and none is
    waited for longer than `seconds`.
    """
    together = _Round(questions, seconds)
    together.run()
    return together.answers


def _reason(returned: object) -> str:
    """Return why an answer is no verdict, for one that is none."""
    if returned is LocalTransactionState.UNKNOW or returned is TransactionResolution.UNKNOWN:
        return "UNKNOWN"
    with suppress(Exception):
        return f"UNKNOWN, because the answer is no state: {returned!r:.200}"
    return f"UNKNOWN, because the answer is no state but a {type(returned).__name__}"

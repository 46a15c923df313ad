"""Listeners: the functions of a consumer, each for some topics; what they raise or return becomes a verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from inspect import isasyncgenfunction, iscoroutine, iscoroutinefunction, isgeneratorfunction, signature
from itertools import groupby
from typing import Any

from outbox.model.message import Message
from outbox.model.topics import Topics
from outbox.model.verdict import BEHIND, DONE, Done, Reject, Retry, Unavailable, Verdict, describe, failure_of
from outbox.runtime.event_loop import BackgroundLoop
from outbox.runtime.named import named
from outbox.runtime.tasks import NoAnswerError, in_time
from outbox.runtime.throttled_log import Throttle
from outbox.senders.port import destination_of

logger = logging.getLogger("outbox")

#: The listeners of so many topics are kept in mind.
_MOST_TOPICS = 1_000
_VERDICTS = "None, Done(), Retry(…), Reject(…) or Unavailable(…)"


@dataclass(frozen=True, slots=True)
class Listener:
    """A function for the messages of some topics.

    `name`: for errors. `awaited`: the function is written with async. `throttle`: for log lines about wrong answers.
    """

    topics: Topics
    function: Callable[..., Any]
    name: str
    awaited: bool
    throttle: Throttle = field(default_factory=Throttle)

    @classmethod
    def of(cls, topics: Topics, function: Callable[..., Any], *given: str) -> Listener:
        """Return the listener for a function.

        Args:
            topics: of the messages.
            function: is called with these messages.
            given: the names of the arguments of a call, for errors.

        Raises:
            TypeError: nothing that can be called, a class or a generator, or a function of other arguments.
        """
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"a handler is a function of a message, not {function!r:.60}")
        call = type(function).__call__
        name = destination_of(function).removeprefix("callable:")
        if any(isgeneratorfunction(each) or isasyncgenfunction(each) for each in (function, call)):
            raise TypeError(f"{name} is a generator; write the handler without yield")
        require_arguments(function, name, *given)
        return cls(topics, function, name, iscoroutinefunction(function) or iscoroutinefunction(call))

    @property
    def judged(self) -> Callable[..., Any]:
        """The function with verdicts in place of its answers, for a transaction that ends by the verdict."""
        if self.awaited:

            @wraps(self.function)
            async def awaited(*given: Any) -> Verdict:
                return self.verdict(await self.function(*given))

            return awaited

        @wraps(self.function)
        def called(*given: Any) -> Verdict:
            return self.verdict(self.function(*given))

        return called

    def verdict(self, answer: object) -> Verdict:
        """Return the verdict for an answer of the function; None means `Done`."""
        if answer is None:
            return DONE
        if isinstance(answer, Done | Retry | Reject | Unavailable):
            return answer
        if iscoroutine(answer):
            answer.close()
            return self._mistake(f"{self.name} returned a coroutine, which nobody awaits; write async def")
        return self._mistake(f"{self.name} returned {type(answer).__name__}; let the handler return {_VERDICTS}")

    def verdicts(self, answer: object, messages: Sequence[Message]) -> list[Verdict]:
        """Return a verdict for each message of a list, for an answer about all or a list of answers."""
        if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
            if len(answer) == len(messages):
                return list(map(self.verdict, answer))
            text = f"{self.name} returned {len(answer)} answers for {len(messages)} messages; return one for each"
            return [self._mistake(text)] * len(messages)
        return [self.verdict(answer)] * len(messages)

    def _mistake(self, text: str) -> Retry:
        """Return the verdict after an error in the code of the application, which is logged, unlike other retries."""
        if self.throttle.allows(text):
            logger.warning("%s", text)
        return Retry(text)


class Dispatch:
    """The handler of a consumer: calls the first listener that fits. No exception of a listener comes through.

    Coroutines run in a loop of the consumer's own, each waited for by the thread that called; cancelled at the
    deadline.
    """

    def __init__(self, consumer: str, listeners: Sequence[Listener], *, seconds: float, batches: bool) -> None:
        """`seconds`: the deadline of a coroutine. `batches`: listeners get lists."""
        self._consumer = consumer
        self._listeners = listeners
        self._seconds = seconds
        self._batches = batches
        self._listener_of = lru_cache(_MOST_TOPICS)(self._find)
        self._loop = BackgroundLoop("outbox-consumer", make=lambda: None, close=_nothing, sees_end=True)
        self._throttle = Throttle()

    def handle(self, messages: Sequence[Message]) -> list[Verdict]:
        """Call the listeners, and return a verdict for each message, in their order."""
        return self._handle_lists(messages) if self._batches else list(map(self._handle_one, messages))

    def close(self) -> None:
        """End the loop."""
        self._loop.stop()

    def _find(self, topic: str) -> Listener | None:
        return next((each for each in self._listeners if each.topics.matches(topic)), None)

    def _handle_one(self, message: Message) -> Verdict:
        listener = self._listener_of(message.topic)
        if listener is None:
            return self._nobody(message.topic)
        try:
            answer = self._awaited(listener, message) if listener.awaited else listener.function(message)
            return DONE if answer is None else listener.verdict(answer)
        except BaseException as error:
            # Also SystemExit and a CancelledError: the failure is the message's, and ends no thread of the worker.
            return self._failure(listener, error)

    def _handle_lists(self, messages: Sequence[Message]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        failed: set[str | None] = set()
        for listener, group in groupby(messages, key=lambda message: self._listener_of(message.topic)):
            of_listener = list(group)
            asked = [message for message in of_listener if message.key not in failed]
            answers = dict(zip([message.id for message in asked], self._handle_list(listener, asked), strict=True))
            verdicts += [answers.get(message.id, BEHIND) for message in of_listener]
            failed.update(m.key for m in asked if m.key is not None and answers[m.id] is not DONE)
        return verdicts

    def _handle_list(self, listener: Listener | None, messages: list[Message]) -> list[Verdict]:
        if listener is None:
            return [self._nobody(message.topic) for message in messages]
        if not messages:
            return []
        try:
            # A list of its own, from which the function may take messages out.
            given = list(messages)
            answer = self._awaited(listener, given) if listener.awaited else listener.function(given)
            return listener.verdicts(answer, messages)
        except BaseException as error:
            return [self._failure(listener, error)] * len(messages)

    def _awaited(self, listener: Listener, given: Message | list[Message]) -> object:
        # Without a limit here: until its coroutine has ended, a message is held, whatever became of its deadline.
        return self._loop.run(lambda _: in_time(listener.function(given), self._seconds), timeout=None)

    def _failure(self, listener: Listener, error: BaseException) -> Verdict:
        if isinstance(error, NoAnswerError):
            return Retry(str(error))
        if self._throttle.allows((listener.name, type(error))):
            about, why = named("listener_raised", subscription=self._consumer, error=describe(error)), describe(error)
            logger.warning("%s: %s raised %s", self._consumer, listener.name, why, exc_info=error, extra=about)
        return failure_of(error)

    def _nobody(self, topic: str) -> Verdict:
        text = (
            f"consumer {self._consumer} has no handler for topic {topic}: write @consumer.on({topic!r}), or leave the"
            " topic out of topics="
        )
        if self._throttle.allows(text):
            logger.warning("%s", text)
        return Retry(text)


def require_arguments(function: Callable[..., Any], name: str, *given: str) -> None:
    """Refuse a function that cannot be called with these arguments; `name`, of the function, is for the error."""
    try:
        # A decorator may add or take arguments, so those of the wrapped function do not count.
        called = signature(function, follow_wrapped=False)
    except ValueError:  # some functions in C do not tell
        return
    try:
        called.bind(*given)
    except TypeError as error:
        arguments = ", ".join(given)
        raise TypeError(f"{name} is called with ({arguments}): {error}; let the function take ({arguments})") from None


async def _nothing(_kept: object) -> None:
    return

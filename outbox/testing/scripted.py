"""A destination that answers as a test says, and notes the messages of each call.

    sender = ScriptedSender(ConnectionError("gone"), Unavailable("starting"))           # the first call, the second
    sender.on(topic="orders").answer(Retry("503"), Retry("503"))                        # the first two orders
    sender.on(key="order-7").always(Reject("no such customer"))
    Relay(outbox, sender).until_empty()
    assert [m.body for m in sender.stored] == [b"1", b"2"]

A message that no script mentions is `Done`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Unavailable, Verdict

#: The answer to one message: a verdict, an exception that the whole call raises, or an event to wait for first.
Answer = Verdict | BaseException | threading.Event
#: The answer to one call: an answer for all messages, one verdict per message, or None: the rules answer.
Step = Answer | Sequence[Verdict] | None

_EARLIER = Unavailable("an earlier message of its key was not stored")
_LONGEST_HANG = 60.0


class ScriptedSender:
    """A sender with verdicts from a script.

    Args:
        script: a step for each call, in order. Afterwards, and for a step None, the first rule of `on` with an answer
            decides, message by message; without any rule a message is `Done`.
        destination: the name by which subscriptions know the sender.

        The call raises an exception, and waits for an event, a minute at most, as if the destination hung. The script
        goes on when the event is set.

        The rules keep the promise of `Sender`: behind the first message of a key that is not `Done`, later messages of
        the key are `Unavailable`. A step with a verdict for each message is taken unchanged.
    """

    def __init__(self, *script: Step, destination: str = "scripted") -> None:
        self.destination = destination
        #: The messages of each call, also of calls that raised or hang.
        self.calls: list[list[Message]] = []
        #: The messages that were answered with `Done`, in order, repeats included.
        self.stored: list[Message] = []
        #: How often `close` was called.
        self.closed = 0
        self._script = deque(script)
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    @property
    def given(self) -> list[Message]:
        """Every message of every call, in order."""
        return [message for call in self.calls for message in call]

    def on(
        self, *, topic: str | None = None, key: str | None = None, where: Callable[[Message], object] | None = None
    ) -> Rule:
        """Add a rule for messages of a description, behind the present rules."""
        rule = Rule(topic, key, where)
        self._rules.append(rule)
        return rule

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Return one verdict per message, as the script says."""
        with self._lock:
            self.calls.append(list(messages))
            step = self._script.popleft() if self._script else None
        verdicts = self._verdicts(step, messages)
        self.stored += [m for m, verdict in zip(messages, verdicts, strict=False) if isinstance(verdict, Done)]
        return verdicts

    def close(self) -> None:
        """Count the call in `closed`."""
        self.closed += 1

    def _verdicts(self, step: Step, messages: Sequence[Message]) -> list[Verdict]:
        if isinstance(step, threading.Event):
            _wait(step)
            step = None
        if isinstance(step, BaseException):
            raise step
        if isinstance(step, Sequence):
            return list(step)
        return self._ruled(messages) if step is None else [step] * len(messages)

    def _ruled(self, messages: Sequence[Message]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        stopped: set[str] = set()
        for message in messages:
            behind = message.key is not None and message.key in stopped
            verdicts.append(_EARLIER if behind else self._answered(message))
            if message.key is not None and not isinstance(verdicts[-1], Done):
                stopped.add(message.key)
        return verdicts

    def _answered(self, message: Message) -> Verdict:
        for rule in self._rules:
            answer = rule.take(message)
            if isinstance(answer, threading.Event):
                _wait(answer)
                return DONE
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                return answer
        return DONE


class Rule:
    """A rule: the answers to messages of a description."""

    def __init__(self, topic: str | None, key: str | None, where: Callable[[Message], object] | None) -> None:
        self._topic, self._key, self._where = topic, key, where
        self._answers: deque[Answer] = deque()
        self._always: Answer | None = None

    def answer(self, *answers: Answer) -> Self:
        """Answer the next messages of the description, an answer each."""
        self._answers.extend(answers)
        return self

    def always(self, answer: Answer) -> Self:
        """Answer all further messages of the description in the same way."""
        self._always = answer
        return self

    def take(self, message: Message) -> Answer | None:
        """Return the next answer if the message fits the description, else None."""
        if (self._topic or message.topic) != message.topic or (self._key or message.key) != message.key:
            return None
        if self._where is not None and not self._where(message):
            return None
        return self._answers.popleft() if self._answers else self._always


def _wait(event: threading.Event) -> None:
    if not event.wait(_LONGEST_HANG):
        raise TimeoutError(f"the event of the script was not set within {_LONGEST_HANG:.0f} s")

"""Topics for which no answer comes in time, although the destination may accept messages of others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outbox.model.message import Message
from outbox.worker.blame import Blame

#: An answer for a silent topic is waited for so many seconds. An answer that refuses after so many is a silence, too.
PATIENCE_SECONDS = 1.0
#: So many different messages show that the topic is silent, and not a message.
_MESSAGES = 2
#: So many calls show the same while nothing is accepted: one alone may have had too many messages.
_CALLS = 2


@dataclass(slots=True)
class _Silence:
    """The messages without an answer, as far as a call had no other topic, and the number of such calls.

    `accepted`: by the destination before.
    """

    accepted: int
    ids: set[int | None] = field(default_factory=set)
    calls: int = 0


class Silences:
    """The topics of one lease that are suspected to be silent.

    A suspected topic shares no call with another topic, because the call would show nothing about either. Each further
    call of a silent topic is given up early, so that others wait shortly.
    """

    def __init__(self, blame: Blame) -> None:
        self._blame = blame
        #: In the order of the last silence.
        self._suspected: dict[str, _Silence] = {}

    @property
    def suspected(self) -> Collection[str]:
        """The topics in the order of their last silence."""
        return self._suspected.keys()

    def is_silent(self, topic: str) -> bool:
        """Return whether no answer came for several messages of a topic."""
        silence = self._suspected.get(topic)
        several = silence is not None and len(silence.ids) >= _MESSAGES and silence.calls >= _CALLS
        return several or self.is_silent_alone(topic)

    def is_silent_alone(self, topic: str) -> bool:
        """Return whether no answer came for several messages of a topic, while others were accepted."""
        silence = self._suspected.get(topic)
        return silence is not None and len(silence.ids) >= _MESSAGES and self._blame.count > silence.accepted

    def unanswered(self, messages: Sequence[Message], *, alone: bool) -> None:
        """Note that no answer came in time. `alone`: the call had no message of another topic."""
        for message in messages:
            silence = self._suspected.pop(message.topic, None) or _Silence(self._blame.count)
            silence.ids.update((message.id,) if alone else ())
            self._suspected[message.topic] = silence
        for topic in {message.topic for message in messages} if alone else ():
            self._suspected[topic].calls += 1

    def answered(self, messages: Sequence[Message]) -> None:
        """Note that an answer came."""
        for message in messages if self._suspected else ():
            self._suspected.pop(message.topic, None)
